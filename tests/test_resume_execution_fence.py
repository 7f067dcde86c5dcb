"""What must not be resumed, and what a dead execution must not do: real controllers, real trainer ranks (threads), real files.

What else there is of each case:

* mixed artifacts, shards swapped or missing: `checkpoints/test_checkpoint_damage.py`, `checkpoints/test_checkpoint_publication.py` (on load),
  `core/test_commands.py`, `service/test_exactly_once.py` (in receipts); RNG files of two torchrun ranks swapped: `test_checkpoint_replay.py`
* every field of a stamp: `cosmos_worker/test_worker_artifacts.py`
* equal counters with another identity, ranks that disagree: `core/test_agreement.py`; also under ``python -O``: `test_server.py`
* incompatible settings: `checkpoints/test_checkpoint_manifest.py`, `checkpoints/test_checkpoint_discovery.py`; another topology:
  `checkpoints/test_topology.py`, `test_sharded_run.py`
* duplicate, old and stale reports: `service/test_exactly_once.py`, `service/test_late_results.py`, `service/test_fence.py` (every RPC), `faults/`
* a step that was never given: `core/test_commands.py`, `core/test_controller.py`
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import grpc
import pytest
import torch
from canary_learner import PARTS, Learner
from controller_process import ControllerProcess, Worker, Workers, refused, serving, started, write_config

from cosmos_ctrl.checkpoints.artifacts import Artifact
from cosmos_ctrl.checkpoints.digests import digest_bytes
from cosmos_ctrl.checkpoints.discovery import list_checkpoints
from cosmos_ctrl.checkpoints.manifest import read_manifest
from cosmos_ctrl.checkpoints.stores.local import LocalStore
from cosmos_ctrl.core.errors import (
    ArtifactForeignError,
    ArtifactMissingError,
    CheckpointDamagedError,
    ConflictingRetryError,
    ControlError,
    ExecutionEndedError,
    MalformedError,
    ResumeMetadataMismatch,
    StaleExecutionError,
    WrongStepError,
)
from cosmos_ctrl.exits import ExitCode
from cosmos_ctrl.service.metadata import metadata_from_message
from cosmos_ctrl.v1 import checkpoint_pb2, reports_pb2
from cosmos_ctrl.v1 import controller_service_pb2 as pb
from cosmos_worker.settings import ClientConfig
from cosmos_worker.trainer import Resume, SaveWork, Trainer

DEADLINE_S = 60.0
CONFIG = ClientConfig(poll_s=0.5, confirm_total_s=30.0, idle_total_s=20.0, report_s=20.0)
NAMES = ("state.pt", "rng.pt")


def trainer_of(controller: ControllerProcess, rank: int) -> Trainer:
    return Trainer.from_env(
        address=controller.address,
        execution_id=controller.execution_id,
        rank=rank,
        world_size=2,
        artifacts=NAMES,
        config=CONFIG,
        environ={},
    )


def restore(trainer: Trainer, resume: Resume, rank: int) -> tuple[int, int]:
    """Read both shards, refuse what is foreign; returns the counters found in them."""
    with trainer.artifacts(resume) as files:
        contents = {name: json.load(files[name]) for name in NAMES}
        for name in NAMES:
            files.check_stamp(name, contents[name]["stamp"])
    assert contents["rng.pt"]["drawn"] == f"of rank {rank}"
    return contents["state.pt"]["steps"], contents["state.pt"]["updates"]


Load = Callable[[Trainer, Resume, int], tuple[int, int]]


def train(controller: ControllerProcess, rank: int, together: Barrier, load: Load) -> int:
    """One rank's loop; returns the steps at its end."""
    with trainer_of(controller, rank) as trainer:
        resume = trainer.resume()
        # Else the one that fails may have ended the execution before the other has come to it.
        together.wait(DEADLINE_S)
        steps, updates = load(trainer, resume, rank) if resume.checkpoint else (0, 0)
        trainer.confirm(steps=steps, updates=updates)
        for command in trainer.commands():
            if isinstance(command, SaveWork):
                with trainer.save(command) as save:
                    stamp = save.stamp.values()
                    state = {"steps": steps, "updates": updates, "stamp": stamp}
                    save.open("state.pt").write(json.dumps(state).encode())
                    save.open("rng.pt").write(json.dumps({"drawn": f"of rank {rank}", "stamp": stamp}).encode())
            else:
                trainer.complete(command, updates=1)
                steps, updates = command.step, updates + 1
    return steps


def train_on_both(pool: Executor, controller: ControllerProcess, load: Load = restore) -> list[Future[int]]:
    together = Barrier(2)
    return [pool.submit(train, controller, rank, together, load) for rank in range(2)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of the steps 1 and 2, which is never touched."""
    directory = tmp_path_factory.mktemp("trained")
    config = write_config(directory, train={"max_steps": 2})
    with serving(config) as controller, ThreadPoolExecutor(2) as pool:
        ranks = train_on_both(pool, controller)
        rollout = Worker(controller, pb.ROLE_ROLLOUT)
        rollout.rollout(2)
        rollout.rollout(2)
        assert [rank.result(DEADLINE_S) for rank in ranks] == [2, 2]
        rollout.end()
        assert controller.exit_code() == ExitCode.ENDED
        assert [m["metadata"]["completed_training_steps"] for m in controller.manifests()] == [1, 2]
    return directory / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as executor:
        yield executor


def checkpoint_of(run: Path, step: int) -> Path:
    (found,) = (run / "checkpoints").glob(f"*-s{step:08d}-*")
    return found


def everything(run: Path) -> dict[str, bytes]:
    """What could be resumed from."""
    return {str(path): path.read_bytes() for path in (run / "checkpoints").rglob("*") if path.is_file()}


# -- shards


def mix(checkpoint: Path) -> None:
    earlier = checkpoint_of(checkpoint.parent.parent, 1) / "policy-1/rng.pt"
    shutil.copy(earlier, checkpoint / "policy-1/rng.pt")


@pytest.mark.parametrize(
    ("harm", "error"),
    [
        (mix, CheckpointDamagedError),
        (lambda checkpoint: (checkpoint / "policy-1/rng.pt").unlink(), ArtifactMissingError),
    ],
    ids=["of another step", "missing"],
)
def test_g3_g4_a_set_of_shards_that_is_not_the_committed_one_is_refused_and_not_met_again(
    harm: Callable[[Path], object], error: type[ControlError], run: Path, pool: ThreadPoolExecutor
) -> None:
    config = write_config(run.parent)
    checkpoint = checkpoint_of(run, 2)
    sizes = {path: path.stat().st_size for path in checkpoint.rglob("*.pt")}
    # While the controller has it already: what was missing before, it would have refused to start with.
    with serving(config) as controller:
        harm(checkpoint)
        found = {path: path.stat().st_size for path in checkpoint.rglob("*.pt")}
        assert found.items() <= sizes.items(), "else sizes alone would tell"
        before = everything(run)
        ranks = train_on_both(pool, controller)
        with pytest.raises(error, match=r"policy-1/rng\.pt"):
            ranks[1].result(DEADLINE_S)
        assert isinstance(ranks[0].exception(10.0), ExecutionEndedError)
        assert controller.exit_code() == ExitCode.DAMAGE_FOUND
    assert everything(run) == before
    with started(config) as controller:
        assert controller.exit_code() == ExitCode.CANNOT_RESUME
        assert "rng.pt" in controller.log


def commit_anew(checkpoint: Path, name: str, content: Mapping[str, Any]) -> None:
    """As if `content` had been saved as `name` from the first: its digest is the manifest's."""
    data = json.dumps(content).encode()
    (checkpoint / name).write_bytes(data)
    manifest, _ = read_manifest(checkpoint, "")
    before = manifest.artifacts[name]
    entry = Artifact(len(data), digest_bytes(data), before.rank, before.group)
    forged = replace(manifest, artifacts={**manifest.artifacts, name: entry})
    (checkpoint / "manifest.json").write_bytes(forged.to_bytes())


@pytest.mark.parametrize(("field", "foreign"), [("rank", 0), ("steps", 1), ("execution_id", "2" * 32)])
def test_g3_a_rank_refuses_content_that_another_rank_step_or_execution_wrote_under_its_name(
    field: str, foreign: int | str, run: Path, pool: ThreadPoolExecutor
) -> None:
    checkpoint = checkpoint_of(run, 2)
    content = json.loads((checkpoint / "policy-1/rng.pt").read_bytes())
    content["stamp"][field] = foreign
    commit_anew(checkpoint, "policy-1/rng.pt", content)
    with serving(write_config(run.parent)) as controller:
        ranks = train_on_both(pool, controller)
        with pytest.raises(ArtifactForeignError, match=r"policy-1/rng\.pt") as caught:
            ranks[1].result(DEADLINE_S)
        assert caught.value.what == field
        # The sibling, whose own shards are sound, does not wait for an agreement that cannot come.
        assert isinstance(ranks[0].exception(10.0), ExecutionEndedError)
        assert controller.exit_code() == ExitCode.DAMAGE_FOUND
        assert "belongs elsewhere" in controller.log


def test_damage_in_another_ranks_shard_is_told_by_whoever_reads_it(run: Path) -> None:
    config = write_config(run.parent, server={"linger_s": 0.5})
    damaged = checkpoint_of(run, 2) / "policy-1/state.pt"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b" ")
    with serving(config) as controller:
        with pytest.raises(CheckpointDamagedError, match=r"policy-1/state\.pt"), trainer_of(controller, 0) as trainer:
            trainer.artifacts(trainer.resume()).of_rank(1)
        assert controller.exit_code() == ExitCode.DAMAGE_FOUND
    with started(config) as controller:
        assert controller.exit_code() == ExitCode.CANNOT_RESUME


# -- agreement


def test_g3_equal_counters_of_another_lineage_disagree_for_every_rank(run: Path, pool: ThreadPoolExecutor) -> None:
    original = checkpoint_of(run, 2)
    twin = original.with_name("e0002-s00000002-twin")
    shutil.copytree(original, twin)
    manifest, digest = read_manifest(original, str(original.relative_to(run)))
    other = replace(manifest, execution_number=2, execution_id="2" * 32)
    metadata = manifest.metadata
    values = metadata.values()
    values["checkpoint_id"] = "2" * 32
    other = replace(other, metadata=type(metadata)(**values))
    (twin / "manifest.json").write_bytes(other.to_bytes())

    def load(trainer: Trainer, resume: Resume, rank: int) -> tuple[int, int]:
        assert resume.checkpoint is not None
        assert resume.checkpoint.metadata.checkpoint_id == "2" * 32
        if rank == 1:
            resume = replace(resume, checkpoint=replace(resume.checkpoint, metadata=metadata, manifest_digest=digest))
        with trainer.artifacts(resume) as files:
            state = json.load(files["state.pt"])
        return state["steps"], state["updates"]

    before = everything(run)
    with serving(write_config(run.parent)) as controller:
        ranks = train_on_both(pool, controller, load)
        for rank in ranks:
            error = rank.exception(DEADLINE_S)
            assert isinstance(error, ResumeMetadataMismatch)
            assert error.changed == ("checkpoint_id", "checkpoint_path", "manifest_digest")
            assert (error.missing, error.unexpected) == ((), ())
        assert controller.exit_code() == ExitCode.RESUME_MISMATCH
    assert everything(run) == before


def test_g3_a_scheduler_that_was_advanced_twice_is_another_count_and_trains_nothing(
    run: Path, pool: ThreadPoolExecutor
) -> None:
    def load(trainer: Trainer, resume: Resume, rank: int) -> tuple[int, int]:
        steps, updates = restore(trainer, resume, rank)
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
        for _ in range(updates + rank):  # rank 1 once too often
            optimizer.step()
            scheduler.step()
        return steps, scheduler.last_epoch

    before = everything(run)
    with serving(write_config(run.parent)) as controller:
        ranks = train_on_both(pool, controller, load)
        for rank in ranks:
            error = rank.exception(DEADLINE_S)
            assert isinstance(error, ResumeMetadataMismatch)
            assert error.changed == ("restored_optimizer_updates",)
            assert "policy/1" in error.place
        assert controller.exit_code() == ExitCode.RESUME_MISMATCH
    assert everything(run) == before


def test_g3_the_canarys_ranks_refuse_a_scheduler_that_is_not_of_their_model() -> None:
    states = torch.get_rng_state()
    try:
        learner = Learner(0, torch.device("cpu"))
        state = learner.state()
        state[PARTS[0]]["scheduler"]["last_epoch"] += 1
        with pytest.raises(ValueError, match="the scheduler stands at 1 and the model at update 0"):
            learner.load(state)
    finally:
        torch.set_rng_state(states)


def test_another_dataset_and_another_topology_are_refused_and_both_named(run: Path) -> None:
    config = write_config(run.parent, train={"trainers": {"policy": 3}})
    prompts = run.parent / "prompts.jsonl"
    prompts.write_text("".join(reversed(prompts.read_text().splitlines(keepends=True))))
    before = everything(run)
    with started(config) as controller:
        assert controller.exit_code() == ExitCode.CANNOT_RESUME
        assert 'dataset: the checkpoint has "sha256:' in controller.log
        assert "topology.policy.world_size: the checkpoint has 2, this run has 3" in controller.log
        assert not controller.ready_file.exists()
    assert everything(run) == before


@pytest.mark.parametrize("sharding", ["", "replicated"])
def test_a_declared_reshard_moves_no_sampling_position_and_changes_nothing_where_nothing_changed(
    sharding: str, run: Path
) -> None:
    train = {"trainers": {"policy": 2}, "sharding": {"policy": sharding}} if sharding else {}
    newest = list_checkpoints(LocalStore(run))[0].manifest
    with serving(write_config(run.parent, train=train, checkpoints={"reshard": True})) as controller:
        state = controller.state()
        assert list(state.resharded_groups) == (["policy"] if sharding else [])
        assert ("resharding topology.policy.sharding" in controller.log) is bool(sharding)
        assert metadata_from_message(state.metadata).values() == newest.metadata.values()
        explained = controller.stub.ExplainResume(pb.ExplainResumeRequest(), timeout=DEADLINE_S).candidates
        assert explained[0].checkpoint.checkpoint_id == newest.checkpoint_id
        assert explained[0].verdict == checkpoint_pb2.VERDICT_CHOSEN


# -- settlements and reports


def test_g6_a_settlement_that_comes_again_settles_nothing_and_another_one_is_a_conflict(tmp_path: Path) -> None:
    with serving(write_config(tmp_path, checkpoints={"every_steps": 2})) as controller:
        workers = Workers(controller)
        workers.rollout.rollout(4)
        first = workers.trainers[0].next(1).train
        for trainer in workers.trainers:
            trainer.complete(1, first)
        # Told again in batches of their own, while the next step is out and after it.
        for trainer in workers.trainers:
            trainer.complete(1, first)
        second = workers.trainers[0].next(2).train
        assert set(second.groups).isdisjoint(first.groups)
        for trainer in workers.trainers:
            trainer.complete(1, first)
            trainer.complete(2, second)
        workers.number = 3
        workers.save()
        (manifest,) = controller.manifests()
        counts = {name: manifest["metadata"][name] for name in ("completed_training_steps", "remaining_completions")}
        assert counts == {"completed_training_steps": 2, "remaining_completions": 16 - 8}
        assert manifest["repeat_bound_completions"] == 0
        other = reports_pb2.CompletionReport(command=2, completed_training_step=2, optimizer_updates=1)
        other.rows.add(disposition=reports_pb2.DISPOSITION_DISCARDED, reason="late", groups=[9], masks=[3])
        error = refused(lambda: workers.trainers[0].submit(completions=[other]))
        assert isinstance(error, ConflictingRetryError)
        assert controller.manifests() == [manifest]


def test_g1_a_leader_that_leaves_a_part_of_a_group_out_settles_nothing(tmp_path: Path) -> None:
    with serving(write_config(tmp_path)) as controller:
        workers = Workers(controller)
        workers.rollout.rollout(2)
        train = workers.trainers[0].next(1).train
        partial = reports_pb2.CompletionReport(command=1, completed_training_step=1, optimizer_updates=1)
        partial.rows.add(disposition=reports_pb2.DISPOSITION_TRAINED, groups=train.groups, masks=[train.masks[0], 0b01])
        leader = workers.trainers[0]
        error = refused(lambda: leader.submit(completions=[partial]))
        assert isinstance(error, MalformedError)
        assert "leaves out completions" in error.what
        leader.batches -= 1  # a refused batch does not use its number up
        for trainer in workers.trainers:
            trainer.complete(1, train)
        workers.number = 2
        workers.save()
        (manifest,) = controller.manifests()
        assert manifest["metadata"]["remaining_completions"] == 16 - 4


@pytest.mark.parametrize(
    "change",
    [{"command": 2}, {"completed_training_step": 4}, {"completed_training_step": 2}],
    ids=["a later command", "a later step", "the step before"],
)
def test_g3_a_step_that_was_never_given_ends_everyone_and_the_checkpoint_before_stays_the_newest(
    change: dict[str, int], run: Path
) -> None:
    before = everything(run)
    with serving(write_config(run.parent, server={"linger_s": 0.5})) as controller:
        workers = Workers(controller)
        workers.rollout.rollout(2)
        train = workers.trainers[0].next(1).train
        assert train.step == 3
        values: dict[str, Any] = {"command": 1, "completed_training_step": 3, "optimizer_updates": 1} | change
        error = refused(lambda: workers.trainers[1].submit(completions=[reports_pb2.CompletionReport(**values)]))
        assert isinstance(error, WrongStepError)
        for worker in (workers.trainers[0], workers.rollout):
            assert isinstance(refused(worker.submit), ControlError)
        assert controller.exit_code() == ExitCode.FAILED
    assert everything(run) == before


def test_g5_nothing_of_a_dead_execution_reaches_the_next_one(run: Path) -> None:
    config = write_config(run.parent)
    with serving(config) as first:
        old = Workers(first)
        old.step()
        save = old.trainers[0].next(2).save
        old.trainers[0].save(2, save)
        late_receipts = old.trainers[1].shards(2, save)
        old.rollout.rollout(1)
        first.process.kill()
        first.process.wait()
    with serving(config) as second:
        workers = Workers(second)
        workers.rollout.rollout(2)
        train = workers.trainers[0].next(1).train
        before, state = everything(run), second.state()

        def late(worker: Worker, **content: Any) -> Callable[[], object]:
            worker.stub = second.stub
            return lambda: worker.submit(**content)

        done = reports_pb2.CompletionReport(command=1, completed_training_step=train.step, optimizer_updates=1)
        done.rows.add(disposition=reports_pb2.DISPOSITION_TRAINED, groups=train.groups, masks=train.masks)
        rows = reports_pb2.RolloutRows(
            outcome=reports_pb2.OUTCOME_DISCARDED, reason="late", groups=train.groups, leases=[1, 2], masks=train.masks
        )
        leader, _ = old.trainers
        for call in (
            late(leader, completions=[done]),
            late(leader, end=reports_pb2.EndReport(reason="late")),
            late(old.rollout, rollouts=[rows]),
            lambda: second.stub.ReportShards(late_receipts, timeout=10),
            lambda: second.stub.NextCommand(pb.NextCommandRequest(worker=leader.identity, number=2), timeout=10),
            lambda: second.stub.ConfirmResume(
                pb.ConfirmResumeRequest(worker=leader.identity, damaged=pb.DamagedArtifact(name="policy-0.pt")),
                timeout=10,
            ),
        ):
            assert isinstance(refused(call), StaleExecutionError)
        assert everything(run) == before
        assert second.state().metadata == state.metadata
        # The step that the late report meant to complete is still to be done, by its own ranks.
        assert workers.trainers[0].next(1).train == train
        with pytest.raises(grpc.RpcError):
            workers.trainers[1].next(2)
        for trainer in workers.trainers:
            trainer.complete(1, train)
        workers.number = 2
        assert workers.save().completed_training_steps == 3
