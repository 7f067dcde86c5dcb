"""FSDP2 and torch.distributed.checkpoint, saved while they train, through a real controller: killed, and resumed by as many ranks or not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controller_process import ControllerProcess, serving, started, write_config

from cosmos_ctrl.audit import audit
from cosmos_ctrl.exits import ExitCode
from cosmos_ctrl.v1 import controller_service_pb2 as pb
from cosmos_worker.rollout import SyncRollout
from cosmos_worker.settings import ClientConfig

RANKS, STEPS = 4, 8
DEADLINE_S = 60.0
CONFIG = ClientConfig(lease_wait_s=0.2, connect_total_s=2.0, call_s=5.0)


def config(directory: Path, *, ranks: int = RANKS, steps: int = STEPS, **checkpoints: Any) -> Path:
    """Nothing is outstanding where a step is saved: there is room for the groups of one step, and no more."""
    return write_config(
        directory,
        train={
            "groups_per_step": RANKS,
            "trainers": {"policy": ranks},
            "mesh": {"policy": {"dp_shard": ranks}},
            "sharding": {"policy": "fsdp2"},
        },
        rollout={"n_generation": 2, "max_outstanding_groups": RANKS},
        sampling={"completions": 2 * RANKS * steps},
        checkpoints={"every_steps": 2, **checkpoints},
    )


class Ranks:
    """The ranks of one execution."""

    def __init__(self, directory: Path, controller: ControllerProcess, number: int) -> None:
        self.directory, self.number = directory, number
        self.log = directory / f"ranks-{controller.execution_id}.log"
        environment = os.environ | {
            "COSMOS_CTRL_ADDRESS": controller.address,
            "COSMOS_CTRL_EXECUTION_ID": controller.execution_id,
            "GRPC_VERBOSITY": "NONE",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(Path(__file__).resolve().parent.parent),
        }
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("sharded_trainer.py")), str(directory), str(number)],
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def steps(self) -> list[list[dict[str, Any]]]:
        """What every rank said of its steps, so far."""
        files = [self.directory / f"steps-{self.process.pid}-{rank}.jsonl" for rank in range(self.number)]
        return [
            [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
            for file in files
            if file.exists()
        ]

    def restored(self) -> list[dict[str, Any]]:
        """What every rank restored."""
        files = [self.directory / f"restored-{self.process.pid}-{rank}.json" for rank in range(self.number)]
        return [json.loads(file.read_text()) for file in files]

    def until(self, what: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not what():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.01)

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(DEADLINE_S)


@contextmanager
def ranks_of(directory: Path, controller: ControllerProcess, number: int = RANKS) -> Iterator[Ranks]:
    ranks = Ranks(directory, controller, number)
    try:
        yield ranks
    finally:
        ranks.kill()


@contextmanager
def generating(controller: ControllerProcess) -> Iterator[None]:
    """A rollout worker on a thread: a completion's reward follows from its prompt. Step 4 waits until the first save is published."""

    def work() -> None:
        environ = {"COSMOS_CTRL_ADDRESS": controller.address, "COSMOS_CTRL_EXECUTION_ID": controller.execution_id}
        try:
            with SyncRollout.from_env(environ=environ, config=CONFIG) as rollout:
                for number, group in enumerate(rollout.groups(in_flight=1)):
                    deadline = time.monotonic() + DEADLINE_S
                    while number == 3 * RANKS and not saved(controller):
                        assert time.monotonic() < deadline
                        time.sleep(0.01)
                    rewards = [
                        (len(group.prompt_key) + 3 * i + sum(map(ord, group.prompt_key))) % 7 for i in group.pending
                    ]
                    rollout.report_group(group, rewards=list(map(float, rewards)), payloads=None, versions=0)
        except Exception as error:
            failures.append(error)

    failures: list[Exception] = []
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def saved(controller: ControllerProcess) -> list[int]:
    return [manifest["metadata"]["completed_training_steps"] for manifest in controller.manifests()]


def run_to_the_end(directory: Path) -> tuple[list[list[dict[str, Any]]], list[int]]:
    with serving(config(directory)) as controller, generating(controller), ranks_of(directory, controller) as ranks:
        assert ranks.process.wait(DEADLINE_S) == 0, ranks.log.read_text() + controller.log
        assert controller.exit_code() == 0, controller.log
        return ranks.steps(), saved(controller)


def test_g3_a_sharded_model_goes_on_after_a_kill_in_a_save_as_if_nothing_had_happened(tmp_path: Path) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    killed.mkdir()
    hold = killed / "hold-4"
    hold.touch()
    with serving(config(killed)) as controller, generating(controller), ranks_of(killed, controller) as ranks:
        # The save of step 4 is held back on one rank. Training does not wait for it, and the one of step 2 is published meanwhile.
        ranks.until(lambda: len(ranks.steps()) == RANKS and all(len(steps) >= 6 for steps in ranks.steps()))
        assert saved(controller) == [2]
        assert any(path.name.startswith("e0001-s00000004-") for path in (controller.run / "checkpoints").iterdir())
        ranks.kill()
        controller.process.kill()
        before = ranks.steps()
    hold.unlink()
    again, checkpoints = run_to_the_end(killed)
    uninterrupted, all_checkpoints = run_to_the_end(whole)
    assert [[line["step"] for line in steps] for steps in again] == [list(range(3, STEPS + 1))] * RANKS
    assert [[line["step"] for line in steps] for steps in uninterrupted] == [list(range(1, STEPS + 1))] * RANKS
    # Losses, weights, schedule and draws, of every rank and step, to the bit.
    assert again == [steps[2:] for steps in uninterrupted]
    assert [steps[:6] for steps in before] == [steps[:6] for steps in uninterrupted]
    assert len({steps[-1]["weights"] for steps in again}) == 1
    assert len({steps[-1]["loss"] for steps in again}) == RANKS
    assert checkpoints[0] == all_checkpoints[0] == 2
    assert checkpoints[-1] == all_checkpoints[-1] == STEPS


@dataclass(frozen=True)
class Outcome:
    """What an execution resumed from, and came to."""

    state: pb.GetResumeStateResponse
    restored: list[dict[str, Any]]
    steps: list[list[dict[str, Any]]]

    def tensors_at(self, step: int) -> list[tuple[str, str]]:
        """Of every rank."""
        return [tensors(line) for lines in self.steps for line in lines if line["step"] == step]


def until_saved(directory: Path, step: int, *, ranks: int, reshard: bool = False) -> Outcome:
    """One execution, killed when the checkpoint of `step` is committed, and the next one is being written."""
    hold = directory / f"hold-{step + 2}"
    hold.touch()
    settings = config(directory, ranks=ranks, steps=6, reshard=reshard)
    with serving(settings) as controller, generating(controller), ranks_of(directory, controller, ranks) as trainers:
        state = controller.state()
        trainers.until(lambda: step in saved(controller) and len(trainers.steps()) == ranks)
        trainers.kill()
        controller.process.kill()
        return Outcome(state, trainers.restored() if state.HasField("metadata") else [], trainers.steps())


def tensors(line: dict[str, Any]) -> tuple[str, str]:
    return line["weights"], line["momentum"]


def position(manifest: dict[str, Any]) -> tuple[Any, ...]:
    metadata = manifest["metadata"]
    names = ("remaining_completions", "epoch", "completed_training_steps", "completed_optimizer_updates")
    return metadata["sampler_state"]["data"], *(metadata[name] for name in names)


def position_of(state: pb.GetResumeStateResponse) -> tuple[Any, ...]:
    metadata = state.metadata
    names = ("remaining_completions", "epoch", "completed_training_steps", "completed_optimizer_updates")
    return metadata.sampler_state.data.decode(), *(getattr(metadata, name) for name in names)


def test_g3_a_declared_reshard_restores_four_ranks_on_two_and_two_on_four_to_the_bit(tmp_path: Path) -> None:
    run = tmp_path / "run"
    four = until_saved(tmp_path, 2, ranks=4)
    (tmp_path / "hold-4").unlink()
    files = {path: path.read_bytes() for path in (run / "checkpoints").rglob("*") if path.is_file()}

    with started(config(tmp_path, ranks=2, steps=6)) as controller:
        assert controller.exit_code() == ExitCode.CANNOT_RESUME
        assert "topology.policy.world_size: the checkpoint has 4, this run has 2" in controller.log
        assert (
            'topology.policy.mesh: the checkpoint has [["dp_shard",4]], this run has [["dp_shard",2]]' in controller.log
        )
        assert "checkpoints.reshard = true" in controller.log
    assert {path: path.read_bytes() for path in (run / "checkpoints").rglob("*") if path.is_file()} == files

    two = until_saved(tmp_path, 4, ranks=2, reshard=True)
    (tmp_path / "hold-6").unlink()
    settings = config(tmp_path, ranks=4, steps=6, reshard=True)
    with serving(settings) as controller, generating(controller), ranks_of(tmp_path, controller) as trainers:
        state = controller.state()
        assert trainers.process.wait(DEADLINE_S) == 0, trainers.log.read_text() + controller.log
        assert controller.exit_code() == 0, controller.log
        manifests = controller.manifests()
        four_again = Outcome(state, trainers.restored(), trainers.steps())

    for before, after, step in ((four, two, 2), (two, four_again, 4)):
        assert list(after.state.resharded_groups) == ["policy"]
        assert all(line["resharded"] for line in after.restored)
        assert [line["step"] for line in after.restored] == [step] * len(after.steps)
        # Weights and momentum, gathered, on every rank of both worlds.
        assert {tensors(line) for line in after.restored} == set(before.tensors_at(step))
        assert len(set(before.tensors_at(step))) == 1
        # The application's own part, of the rank whose files each was dealt.
        assert {line["n"] for line in after.restored} == {step}
        assert [lines[0]["step"] for lines in after.steps] == [step + 1] * len(after.steps)
        # Ranks that were dealt one rank's files draw apart all the same.
        assert len({lines[0]["noise"] for lines in after.steps}) == len(after.steps)
        saved_at = next(m for m in manifests if m["metadata"]["completed_training_steps"] == step)
        assert position_of(after.state) == position(saved_at)
    recorded = [manifest["compatibility"]["topology"]["policy"] for manifest in manifests]
    assert [(group["world_size"], group["mesh"]) for group in recorded] == [
        (size, [["dp_shard", size]]) for size in (4, 2, 4)
    ]
    assert manifests[-1]["metadata"]["remaining_completions"] == 0
    report = audit(run)
    assert (report.skipped, report.repeated) == (0, 0)
    assert report.completed_training_steps == 6
