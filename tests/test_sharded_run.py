"""FSDP2 and torch.distributed.checkpoint on four ranks, saved while they train, through a real controller: killed and resumed."""

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
from pathlib import Path
from typing import Any

from controller_process import ControllerProcess, serving, write_config

from cosmos_worker.rollout import SyncRollout
from cosmos_worker.settings import ClientConfig

RANKS, STEPS = 4, 8
DEADLINE_S = 60.0
CONFIG = ClientConfig(lease_wait_s=0.2, connect_total_s=2.0, call_s=5.0)


def config(directory: Path) -> Path:
    """Nothing is outstanding where a step is saved: there is room for the groups of one step, and no more."""
    return write_config(
        directory,
        train={"groups_per_step": RANKS, "trainers": {"policy": RANKS}},
        rollout={"n_generation": 2, "max_outstanding_groups": RANKS},
        sampling={"completions": 2 * RANKS * STEPS},
        checkpoints={"every_steps": 2},
    )


class Ranks:
    """The ranks of one execution."""

    def __init__(self, directory: Path, controller: ControllerProcess) -> None:
        self.directory = directory
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
                [sys.executable, str(Path(__file__).with_name("sharded_trainer.py")), str(directory), str(RANKS)],
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def steps(self) -> list[list[dict[str, Any]]]:
        """What every rank said of its steps, so far."""
        files = [self.directory / f"steps-{self.process.pid}-{rank}.jsonl" for rank in range(RANKS)]
        return [
            [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
            for file in files
            if file.exists()
        ]

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
def ranks_of(directory: Path, controller: ControllerProcess) -> Iterator[Ranks]:
    ranks = Ranks(directory, controller)
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
