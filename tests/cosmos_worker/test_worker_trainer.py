"""A trainer rank against a scripted controller."""

# ruff: noqa: PT012  # what is raised comes out of the worker's with statement, body and all
from __future__ import annotations

import dataclasses
import json
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fake_controller import end, group, metadata, payloads, save, train

from cosmos_ctrl.checkpoints.manifest import CheckpointManifest, read_manifest
from cosmos_ctrl.core.errors import (
    ArtifactMissingError,
    AwaitingAgreementError,
    CheckpointDamagedError,
    CheckpointNotFoundError,
    ConflictingRetryError,
    ExecutionEndedError,
    ResumeMetadataMismatch,
    StaleExecutionError,
    WrongStepError,
)
from cosmos_ctrl.core.resume import ControllerResumeMetadata
from cosmos_ctrl.v1 import controller_service_pb2 as pb
from cosmos_ctrl.v1 import reports_pb2
from cosmos_worker.errors import AgreementTimeoutError, ControllerUnreachableError, UsageError, exit_code_for
from cosmos_worker.rollout import SyncRollout
from cosmos_worker.settings import ClientConfig
from cosmos_worker.trainer import Trainer


@pytest.fixture
def run(controller, tmp_path) -> Path:
    controller.resume_state.run_uri = f"file://{tmp_path}"
    return tmp_path


@pytest.fixture
def fresh(options, run):
    """A trainer that has agreed that the run is fresh."""

    def make(**more):
        trainer = Trainer.from_env(**options(**more))

        class Entered:
            def __enter__(self):
                trainer.__enter__()
                try:
                    assert trainer.resume().checkpoint is None
                    trainer.confirm(steps=0, updates=0)
                except BaseException:
                    trainer.__exit__(*sys.exc_info())
                    raise
                return trainer

            def __exit__(self, *error):
                return trainer.__exit__(*error)

        return Entered()

    return make


def publish(run: Path, controller, *, rank: int = 0, content: bytes = b"model", steps: int = 2, updates: int = 5):
    """A committed checkpoint of one rank, known to the controller."""
    path = "checkpoints/e1-s2"
    directory = run / path
    (directory / f"policy-{rank}").mkdir(parents=True)
    (directory / f"policy-{rank}" / "state.pt").write_bytes(content)
    CheckpointManifest.publish(
        directory,
        ControllerResumeMetadata(
            checkpoint_path=path,
            checkpoint_id="ck",
            completed_training_steps=steps,
            completed_optimizer_updates=updates,
            remaining_completions=10,
            epoch=1,
            sampling_owner="sampler",
            sampler_state={},
        ),
        required_artifacts=[f"policy-{rank}/state.pt"],
        compatibility={},
    )
    _, digest = read_manifest(directory, path)
    controller.resume_state.metadata.CopyFrom(metadata(steps, path, updates=updates))
    controller.resume_state.manifest_digest = digest
    controller.resume_state.application_note = '{"tracker":"t1"}'
    return directory


@pytest.mark.parametrize("groups", [["policy", "critic"], ["critic"], []])
def test_a_rank_beyond_those_that_saved_loads_what_it_is_dealt_where_its_group_is_resharded(
    groups, controller, options, run
):
    publish(run, controller)
    controller.resume_state.resharded_groups.extend(groups)
    with Trainer.from_env(**options(group="policy", rank=1, world_size=2)) as trainer:
        resume = trainer.resume()
        assert resume.checkpoint.resharded is ("policy" in groups)
        if not resume.checkpoint.resharded:
            with pytest.raises(ArtifactMissingError, match="policy-1/"):
                trainer.artifacts(resume)
            return
        with trainer.artifacts(resume) as files:
            assert files["state.pt"].read() == b"model"
            assert (files.stamp.rank, files.stamp.resharded) == (0, True)


def test_the_loop_of_the_quickstart(controller, options, run):
    publish(run, controller)
    work = {7: 0b111, 8: 0b1}
    controller.commands = [train(3, work), save(3, updates=7), end(steps=3)]
    controller.payloads[1] = [payloads(work)]
    with Trainer.from_env(**options(group="policy", dp=(0, 1))) as trainer:
        resume = trainer.resume()
        assert resume.checkpoint
        assert resume.checkpoint.application_note == {"tracker": "t1"}
        assert {name: file.read() for name, file in trainer.artifacts(resume).items()} == {"state.pt": b"model"}
        trainer.confirm(steps=2, updates=5)
        trainer.announce_weights(2, "w2")
        for command in trainer.commands():
            if command.is_save:
                with trainer.save(command) as saving:
                    saving.open("state.pt").write(b"new model")
                    saving.note({"tracker": "t1"})
                assert saving.state == "COMMITTED"
            else:
                groups = command.payloads()
                assert [(g.group_id, [c.index for c in g.completions]) for g in groups] == [(7, [0, 1, 2]), (8, [0])]
                assert groups[0].completions[2].payload == [1, 2]
                trainer.complete(command, updates=2, discarded=[(7, 1, "too_short")])
                trainer.announce_weights(command.step, "w3")
        assert str(trainer.end_reason) == "ended after 3 training steps: budget exhausted"
    (confirmed,) = controller.confirmed.values()
    assert confirmed.metadata == controller.resume_state.metadata
    assert confirmed.manifest_digest == controller.resume_state.manifest_digest
    assert (confirmed.completed_training_steps, confirmed.completed_optimizer_updates) == (2, 5)
    assert list(confirmed.artifact_names) == ["policy-0/state.pt"]
    said = [report for batch in controller.batches for report in batch.completions]
    assert [(r.command, r.completed_training_step, r.optimizer_updates) for r in said] == [(1, 3, 2)]
    rows = {(row.disposition, row.reason): dict(zip(row.groups, row.masks, strict=True)) for row in said[0].rows}
    assert rows == {
        (reports_pb2.DISPOSITION_DISCARDED, "too_short"): {7: 0b010},
        (reports_pb2.DISPOSITION_TRAINED, ""): {7: 0b101, 8: 0b1},
    }
    assert [(w.version, w.handle) for b in controller.batches for w in b.weights] == [(2, "w2"), (3, "w3")]
    (shards,) = controller.shards
    assert shards.command == 2
    assert json.loads(shards.receipts.application_note) == {"tracker": "t1"}
    (receipt,) = shards.receipts.receipts
    assert (receipt.name, receipt.size_bytes, receipt.completed_training_steps) == ("policy-0/state.pt", 9, 3)
    assert (receipt.completed_optimizer_updates, receipt.execution_id) == (7, "exec-1")
    assert (run / "checkpoints/e1-s1/policy-0/state.pt").read_bytes() == b"new model"
    assert controller.batches[-1].end.reason == "ended after 3 training steps: budget exhausted"


def test_lost_replies_everywhere_apply_once(controller, options, run):
    work = {1: 0b11, 2: 0b11}
    controller.commands = [train(1, work), save(1), end(steps=1)]
    controller.payloads[1] = [payloads({1: 0b01}), payloads({1: 0b10, 2: 0b11})]
    for name in ("RegisterWorker", "GetResumeState", "ConfirmResume", "NextCommand", "FetchPayloads", "ReportShards"):
        controller.lose_replies[name] = 2
    controller.lose_replies["StreamReports"] = 3
    with Trainer.from_env(**options()) as trainer:
        trainer.resume()
        trainer.confirm(steps=0, updates=0)
        for command in trainer.commands():
            if command.is_save:
                with trainer.save(command) as saving:
                    saving.open("state.pt").write(b"x")
            else:
                assert sum(len(g.completions) for g in command.payloads()) == 4
                controller.lapse()
                trainer.complete(command, updates=1)
    assert [r.command for b in controller.batches for r in b.completions] == [1]
    assert len({s.SerializeToString(deterministic=True) for s in controller.shards}) == 1
    (confirmed,) = controller.confirmed.values()
    assert confirmed.HasField("fresh")


def test_damage_is_told_before_it_is_raised(controller, options, run):
    directory = publish(run, controller)
    (directory / "policy-0" / "state.pt").write_bytes(b"modul")
    with pytest.raises(CheckpointDamagedError, match=r"state\.pt"), Trainer.from_env(**options()) as trainer:
        trainer.artifacts(trainer.resume())
    (confirmed,) = controller.confirmed.values()
    assert confirmed.damaged.name == "policy-0/state.pt"
    assert "damaged" in confirmed.damaged.explanation


def test_g7_a_run_that_is_mounted_elsewhere_is_no_damage(controller, options, run, tmp_path):
    publish(run, controller)
    wrong = options(run_directory=str(tmp_path / "not mounted"))
    with pytest.raises(CheckpointNotFoundError), Trainer.from_env(**wrong) as trainer:
        trainer.artifacts(trainer.resume())
    assert not controller.confirmed


@pytest.mark.parametrize("harm", ["missing", "link", "swapped manifest", "other rank"])
def test_what_is_not_the_committed_checkpoint_is_refused(controller, options, run, harm):
    directory = publish(run, controller, rank=1 if harm == "other rank" else 0)
    state = directory / "policy-0" / "state.pt"
    if harm == "missing":
        state.unlink()
    elif harm == "link":
        state.rename(run / "elsewhere")
        state.symlink_to(run / "elsewhere")
    elif harm == "swapped manifest":
        controller.resume_state.manifest_digest = "sha256:" + "0" * 64
    with pytest.raises((CheckpointDamagedError, ArtifactMissingError)), Trainer.from_env(**options()) as trainer:
        trainer.artifacts(trainer.resume())
    (confirmed,) = controller.confirmed.values()
    assert confirmed.HasField("damaged")


def test_a_mismatch_is_fatal_and_stays(controller, options, run):
    publish(run, controller)
    controller.errors["ConfirmResume"].append(ResumeMetadataMismatch(place="policy/0", changed=("checkpoint_id",)))
    with pytest.raises(ResumeMetadataMismatch) as caught, Trainer.from_env(**options()) as trainer:
        trainer.artifacts(trainer.resume()).close()
        with pytest.raises(ResumeMetadataMismatch) as first:
            trainer.confirm(steps=2, updates=5)
        assert first.value.changed == ("checkpoint_id",)
        trainer.announce_weights(2, "w")
    assert exit_code_for(caught.value) == 11


@pytest.mark.parametrize("as_error", [False, True])
def test_the_wait_for_agreement_names_who_is_missing(controller, options, run, quick, as_error):
    controller.ranks = 2
    if as_error:
        for _ in range(100):
            controller.errors["ConfirmResume"].append(AwaitingAgreementError(missing=("policy/1",)))
    config = dataclasses.replace(quick, confirm_total_s=0.3, poll_s=0.1)
    with (
        pytest.raises(AgreementTimeoutError, match="policy/1") as caught,
        Trainer.from_env(**options(config=config)) as t,
    ):
        t.resume()
        t.confirm(steps=0, updates=0)
    assert caught.value.missing == ("policy/1",)


def test_misuse_is_named_and_changes_nothing(controller, options, run, fresh):
    publish_later = {1: 0b11}
    controller.commands = [train(1, publish_later), save(1), end()]
    with pytest.raises(UsageError, match="with statement"):
        Trainer.from_env(**options()).resume()
    with pytest.raises(UsageError, match="resume"), Trainer.from_env(**options()) as trainer:
        trainer.confirm(steps=0, updates=0)
    with pytest.raises(UsageError, match="confirm"), Trainer.from_env(**options()) as trainer:
        trainer.resume()
        next(trainer.commands())
    controller.batches.clear()
    with fresh() as trainer:
        commands = trainer.commands()
        command = next(commands)
        with pytest.raises(UsageError, match="not the one"):
            trainer.complete(dataclasses.replace(command, number=9), updates=1)
        with pytest.raises(UsageError, match="not of command"):
            trainer.complete(command, updates=1, discarded=[(1, 2)])
        with pytest.raises(UsageError, match="twice"):
            trainer.complete(command, updates=1, discarded=[(1, 1)], returned={(1, 1): ""})
        with pytest.raises(TypeError):
            trainer.complete(command, updates=True)
        with pytest.raises(UsageError, match="save"):
            trainer.save(command)
        with pytest.raises(UsageError, match="was not completed"):
            next(trainer.commands())
        assert not any(batch.completions for batch in controller.batches)
        trainer.complete(command, updates=0)
        with pytest.raises(UsageError, match="not the one"):
            trainer.complete(command, updates=0)
        saving = next(trainer.commands())
        with pytest.raises(UsageError, match="was not saved"):
            next(trainer.commands())
        with trainer.save(saving) as to:
            with pytest.raises(UsageError, match="not declared"):
                to.open("other.pt")
            to.open("state.pt").write(b"x")
            with pytest.raises(UsageError, match="opened before"):
                to.open("state.pt")
        with pytest.raises(UsageError):
            trainer.save(saving)
        with pytest.raises(UsageError, match="inside"):
            to.open("state.pt")
        assert list(trainer.commands()) == []
    assert len([r for batch in controller.batches for r in batch.completions]) == 1


def test_what_was_restored_is_said_once(controller, options, run):
    publish(run, controller)
    controller.commands = [end(steps=2)]
    with Trainer.from_env(**options()) as trainer:
        resume = trainer.resume()
        files = trainer.artifacts(resume)
        assert (files.stamp.rank, files.stamp.steps, files.stamp.updates) == (0, 2, 5)
        assert (files.stamp.execution_id, files.stamp.checkpoint_id) == ("", "ck")
        trainer.confirm(steps=2, updates=5)
        assert files["state.pt"].closed
        with pytest.raises(UsageError, match=r"before confirm\(\)"):
            trainer.artifacts(resume)
        with pytest.raises(UsageError, match="once"):
            trainer.confirm(steps=2, updates=5)
        assert list(trainer.commands()) == []
    assert controller.calls["ConfirmResume"] == 1


def test_a_fresh_run_has_nothing_to_load(controller, options, run):
    with pytest.raises(UsageError, match="fresh"), Trainer.from_env(**options()) as trainer:
        trainer.artifacts(trainer.resume())
    assert not controller.confirmed


def test_a_save_that_was_not_asked_for_is_refused(controller, fresh):
    controller.commands = [train(1, {1: 1}), save(1), end(steps=1)]
    with fresh() as trainer:
        command = next(trainer.commands())
        trainer.complete(command, updates=1)
        with pytest.raises(UsageError, match="present SAVE command"):
            trainer.save(command)
        saving = next(trainer.commands())
        with pytest.raises(UsageError, match="present SAVE command"):
            trainer.save(dataclasses.replace(saving, number=9))
        with pytest.raises(UsageError, match="not the one to complete"):
            trainer.complete(saving, updates=1)
        with pytest.raises(UsageError, match="no payloads"):
            saving.payloads()
        with trainer.save(saving) as to:
            with pytest.raises(UsageError, match="present SAVE command, once"):
                trainer.save(saving)
            to.open("state.pt").write(b"x")
        with pytest.raises(UsageError, match="present SAVE command, once"):
            trainer.save(saving)
        assert list(trainer.commands()) == []
    assert len(controller.shards) == 1


@pytest.mark.parametrize("call", ["resume", "confirm", "save", "complete", "metric", "announce_weights", "stop"])
def test_a_trainer_that_was_left_says_so(controller, fresh, call):
    controller.commands = [train(1, {1: 1}), end()]
    with fresh() as trainer:
        command = next(trainer.commands())
        trainer.complete(command, updates=1)
    arguments = {
        "confirm": {"steps": 0, "updates": 0},
        "save": {"command": command},
        "complete": {"command": command, "updates": 1},
        "metric": {"name": "loss", "value": 1.0},
        "announce_weights": {"version": 1, "handle": "w"},
        "stop": {"reason": "enough"},
    }.get(call, {})
    with pytest.raises(UsageError):
        getattr(trainer, call)(**arguments)
    with pytest.raises(UsageError, match="entered before"):
        trainer.__enter__()


def test_restoring_comes_before_confirming(controller, options, run):
    publish(run, controller)
    with pytest.raises(UsageError, match="artifacts"), Trainer.from_env(**options()) as trainer:
        trainer.resume()
        trainer.confirm(steps=2, updates=5)
    assert controller.confirmed == {}


def test_an_exception_inside_a_save_abandons_it(controller, fresh):
    controller.commands = [save(0), save(0, path="checkpoints/second"), end()]
    with fresh() as trainer:
        for command in trainer.commands():
            with pytest.raises(OSError, match="full") as caught, trainer.save(command) as saving:
                saving.open("state.pt").write(b"x")
                raise OSError("disk full")
            assert str(caught.value) == "disk full"
            assert saving.state == "ABANDONED"
    assert [shards.abandoned.reason for shards in controller.shards] == ["OSError: disk full"] * 2


@pytest.mark.parametrize("harm", ["nothing", "empty"])
def test_an_incomplete_save_is_abandoned(controller, fresh, harm):
    controller.commands = [save(0), end()]
    with pytest.raises(UsageError), fresh() as trainer:
        for command in trainer.commands():
            with trainer.save(command) as saving:
                if harm == "empty":
                    saving.open("state.pt")
    assert controller.shards[0].HasField("abandoned")


def test_a_follower_says_nothing_about_completions_or_weights(controller, fresh):
    controller.commands = [train(1, {1: 0b1, 2: 0b1}, [0, 1]), end()]
    controller.payloads[1] = [payloads({2: 0b1})]
    with fresh(rank=1, world_size=2) as trainer:
        assert not trainer.leader
        for command in trainer.commands():
            assert dict(command.masks) == {1: 1, 2: 1}
            assert [g.group_id for g in command.payloads()] == [2]
            trainer.complete(command, updates=1, discarded=[(2, 0)])
            trainer.announce_weights(1, "w")
    (said,) = [r for b in controller.batches for r in b.completions]
    assert not said.rows
    assert not any(b.weights for b in controller.batches)


def test_a_failed_execution_is_raised_and_not_just_an_end(controller, fresh):
    controller.commands = [end(pb.END_REASON_FAILURE, message="rank 1 died")]
    with pytest.raises(ExecutionEndedError, match="rank 1 died") as caught, fresh() as trainer:
        list(trainer.commands())
    assert exit_code_for(caught.value) == 11


def test_a_run_at_its_limit_ends_at_once(controller, options, run):
    controller.errors["ConfirmResume"].append(ExecutionEndedError(end_reason="STEP_LIMIT", message="limit 2"))
    with Trainer.from_env(**options()) as trainer:
        trainer.resume()
        trainer.confirm(steps=0, updates=0)
        assert list(trainer.commands()) == []
        assert trainer.end_reason.name == "STEP_LIMIT"


def test_a_wrong_step_ends_it(controller, fresh):
    controller.commands = [train(1, {1: 1})]
    controller.errors["StreamReports"].append(
        WrongStepError(place="policy/0", what="optimizer updates", expected=1, found=2)
    )
    with pytest.raises(WrongStepError), fresh() as trainer:
        for command in trainer.commands():
            trainer.complete(command, updates=2)


def test_a_conflicting_retry_is_raised(controller, fresh):
    controller.commands = [train(1, {1: 1})]
    controller.errors["StreamReports"].append(ConflictingRetryError(what="batch", number=1))
    with pytest.raises(ConflictingRetryError), fresh() as trainer:
        for command in trainer.commands():
            trainer.complete(command, updates=2)


def test_a_controller_that_is_gone_is_an_error_with_its_name(controller, fresh, quick):
    config = dataclasses.replace(quick, connect_total_s=0.5)
    with pytest.raises(ControllerUnreachableError) as caught, fresh(config=config) as trainer:
        controller.stop()
        list(trainer.commands())
    assert exit_code_for(caught.value) == 11


def test_a_controller_that_is_gone_after_the_end_is_none(controller, fresh, quick):
    controller.commands = [end(steps=1)]
    config = dataclasses.replace(quick, after_end_s=0.2)
    with fresh(config=config) as trainer:
        assert list(trainer.commands()) == []
        controller.stop()
    assert trainer.end_reason.completed_training_steps == 1


def test_the_main_thread_that_hangs_in_a_collective_is_ended(controller, fresh, quick):
    ended = threading.Event()
    codes = []
    controller.lease_time_s = 0.15
    config = dataclasses.replace(quick, end_grace_s=0.05)

    def leave(code):
        codes.append(code)
        ended.set()

    with pytest.raises(ExecutionEndedError), fresh(config=config, exit_process=leave):
        controller.change(
            lambda: controller.errors["StreamReports"].append(
                ExecutionEndedError(end_reason="FAILURE", message="rank 1")
            )
        )
        assert ended.wait(10)
    assert codes == [11]


def test_the_main_thread_that_comes_back_is_left_alone(controller, fresh, exits, quick):
    controller.lease_time_s = 0.15
    config = dataclasses.replace(quick, end_grace_s=0.2)
    with pytest.raises(StaleExecutionError), fresh(config=config) as trainer:
        controller.change(lambda: setattr(controller, "execution_id", "exec-2"))
        with pytest.raises(StaleExecutionError):
            list(trainer.commands())
        threading.Event().wait(0.4)
    assert exits == []


def test_a_stop_is_asked_for(controller, fresh):
    with fresh() as trainer:
        trainer.stop("enough", deadline_s=5.0)
        trainer.stop("again", wait=False)
        controller.until(lambda: len(controller.stops) == 2)
    assert controller.stops == ["enough", "again"]


def test_both_roles_in_one_process(controller, fresh, options):
    """Colocated generation: neither call waits on the other, each role has a session of its own."""
    controller.offer(group(1, completions=1))
    controller.no_more = True
    controller.payloads[1] = [payloads({1: 1})]
    with fresh() as trainer, SyncRollout.from_env(**options()) as rollout:
        for leased in rollout.groups():
            rollout.report(leased, 0, b"p", reward=1.0, versions=0)
        rollout.flush()
        controller.change(lambda: controller.commands.extend([train(1, {1: 1}), end(steps=1)]))
        for command in trainer.commands():
            trainer.complete(command, updates=len(command.payloads()))
    assert len(controller.processes) == 2


_RANK = """
import os, sys
import torch.distributed as dist
from cosmos_worker.errors import exit_code_for
from cosmos_worker.settings import ClientConfig
from cosmos_worker.trainer import Trainer

rank, world, replicas = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(sys.argv[2])
size = world // replicas
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=world)
groups = [dist.new_group(list(range(size * each, size * (each + 1)))) for each in range(replicas)]
seen = []
try:
    config = ClientConfig(poll_s=0.2, connect_total_s=10)
    with Trainer.from_env(dp=(rank // size, replicas), config=config) as trainer:
        trainer.resume()
        trainer.confirm(steps=0, updates=0)
        for command in trainer.commands(process_group=groups[rank // size]):
            seen.append((command.number, command.step, [group.group_id for group in command.payloads()]))
            trainer.complete(command, updates=1)
    print(os.environ["RANK"], seen, trainer.end_reason, flush=True)
except Exception as error:
    print(os.environ["RANK"], seen, type(error).__name__, flush=True)
    code = exit_code_for(error)
else:
    code = 0
# Left to the interpreter's exit, gloo's threads may abort the process, and now and then even then.
dist.destroy_process_group()
os._exit(code)
"""


@pytest.mark.parametrize(("ending", "replicas"), [("end", 2), ("stale", 1)])
def test_the_ranks_of_a_replica_share_one_fetch(controller, environ, run, tmp_path, ending, replicas):
    """Two ranks each, as with tensor, pipeline or context parallelism; payloads by data-parallel share."""
    pytest.importorskip("torch")
    world = controller.ranks = 2 * replicas
    for number in (1, 2):
        controller.payloads[number] = [payloads({10 * number + replica: 1 for replica in range(replicas)})]
    controller.commands = [
        train(number, {10 * number + replica: 1 for replica in range(replicas)}, dp_ranks=list(range(replicas)))
        for number in (1, 2)
    ]
    import os

    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, str(tmp_path / "rendezvous"), str(replicas)],
            env=os.environ | environ | {"RANK": str(rank), "WORLD_SIZE": str(world), "GRPC_VERBOSITY": "NONE"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        controller.until(
            lambda: sum(r.command == 2 for b in controller.batches for r in b.completions) == world, "all complete"
        )
        if ending == "end":
            controller.change(lambda: controller.commands.append(end(steps=2)))
        else:
            controller.change(
                lambda: controller.errors["NextCommand"].append(StaleExecutionError(stated="a", current="b"))
            )
        outputs = [rank.communicate(timeout=60)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    what = "ended after 2 training steps: budget exhausted" if ending == "end" else "StaleExecutionError"
    seen = [[(number, number, [10 * number + rank // 2]) for number in (1, 2)] for rank in range(world)]
    assert outputs == [f"{rank} {seen[rank]} {what}\n" for rank in range(world)]
    assert [rank.returncode for rank in ranks] == [0 if ending == "end" else 10] * world
    # The first rank of a replica asks for its others, which never do; payloads each fetches for itself.
    asked = {process.place[3]: process.asked for process in controller.processes.values()}
    assert [rank for rank in range(world) if asked[rank]["NextCommand"]] == list(range(0, world, 2))
    assert [asked[rank]["FetchPayloads"] for rank in range(world)] == [2] * world
    assert len([r for b in controller.batches for r in b.completions]) == 2 * world


def test_a_digest_that_cannot_be_made_is_known_before_the_first_save(options, monkeypatch):
    with pytest.raises(ValueError, match="md5"):
        Trainer.from_env(**options(config=ClientConfig(digest="md5")))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "blake3", None)
    with pytest.raises(ModuleNotFoundError, match="pip install blake3"):
        Trainer.from_env(**options(config=ClientConfig(digest="blake3")))


def test_signals_that_the_application_handles_itself_stay_its_own(controller, fresh):
    def mine(*_):
        pytest.fail("nobody sends it")

    controller.commands = [end()]
    signal.signal(signal.SIGUSR1, mine)
    try:
        with fresh() as trainer:
            assert signal.getsignal(signal.SIGUSR1) is mine
            signal.raise_signal(signal.SIGTERM)
            controller.until(lambda: controller.stops == ["SIGTERM to trainer policy/0/0"])
            assert list(trainer.commands()) == []
        assert signal.getsignal(signal.SIGUSR1) is mine
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.set_wakeup_fd(-1) == -1


def test_a_handler_that_the_application_installs_later_stays_its_own(controller, fresh):
    heard = []
    controller.commands = [end()]
    try:
        with fresh() as trainer:
            signal.signal(signal.SIGTERM, lambda *_: heard.append("mine"))
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGUSR1)
            controller.until(lambda: controller.stops == ["SIGUSR1 to trainer policy/0/0"])
            assert list(trainer.commands()) == []
        assert heard == ["mine"]
        assert signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, None)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_a_signal_is_heard_where_the_wakeup_descriptor_was_taken_later(controller, fresh):
    controller.commands = [end()]
    one, other = socket.socketpair()
    with one, other:
        other.setblocking(False)
        with fresh() as trainer:
            signal.set_wakeup_fd(other.fileno())
            signal.raise_signal(signal.SIGTERM)
            controller.until(lambda: controller.stops == ["SIGTERM to trainer policy/0/0"])
            assert list(trainer.commands()) == []
        assert signal.set_wakeup_fd(-1) == other.fileno()


def test_a_signal_after_the_end_was_heard_ends_the_rank_well(controller, fresh, exits):
    controller.commands = [end()]
    with fresh() as trainer:
        assert list(trainer.commands()) == []
        signal.raise_signal(signal.SIGTERM)
        controller.until(lambda: exits == [0])
    assert controller.stops == []


def test_before_the_agreement_a_signal_is_nobodys(controller, options):
    with Trainer.from_env(**options()) as trainer:
        trainer.resume()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("why", ["the wakeup descriptor is taken", "another thread"])
def test_signals_that_the_trainer_cannot_hear_are_left_as_they_are(controller, fresh, why):
    def enter() -> None:
        with fresh():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    if why == "another thread":
        with ThreadPoolExecutor(1) as pool:
            pool.submit(enter).result(10)
        return
    one, other = socket.socketpair()
    with one, other:
        other.setblocking(False)
        signal.set_wakeup_fd(other.fileno())
        try:
            enter()
        finally:
            assert signal.set_wakeup_fd(-1) == other.fileno()
