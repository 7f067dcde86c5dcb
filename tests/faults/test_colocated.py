"""Colocated generation: one process is a trainer rank and a rollout worker, and neither call waits on the other.

With ``max_staleness = 0`` a step trains only what was generated with the weights that the step before left: generation cannot
run ahead, so a wait of one role for the other would never end.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from controller_process import ControllerProcess, serving, write_config
from fault_model import settled_by_journal

from cosmos_ctrl.audit import audit
from cosmos_worker.rollout import Rollout, SyncRollout
from cosmos_worker.settings import ClientConfig
from cosmos_worker.trainer import Trainer

DEADLINE_S = 60.0

CONFIG = ClientConfig(poll_s=0.2, lease_wait_s=0.1, idle_total_s=30.0, report_s=30.0, unfinished_total_s=30.0)


class Process:
    """What the two roles of one process share: the model, which is the number of its steps."""

    def __init__(self) -> None:
        self.steps = 0
        self.trained = 0


def train(environ: dict[str, str], own: Process) -> str:
    with Trainer.from_env(environ=environ, config=CONFIG) as trainer:
        resume = trainer.resume()
        assert not resume.checkpoint
        trainer.confirm(steps=0, updates=0)
        trainer.announce_weights(0, "w0")
        for command in trainer.commands():
            if command.is_save:
                with trainer.save(command) as save:
                    save.open("state.pt").write(b"%d" % own.steps)
                continue
            groups = command.payloads()
            for group in groups:
                for one in group.completions:
                    assert one.lowest_version == own.steps, "trained on what other weights have generated"
                    own.trained += 1
            own.steps = command.step
            trainer.complete(command, updates=1)
            trainer.announce_weights(command.step, f"w{command.step}")
        assert trainer.end_reason is not None
        return trainer.end_reason.name


def generate(environ: dict[str, str], own: Process, in_flight: int) -> None:
    loaded = -1

    def load(version: int, _handle: str) -> None:
        nonlocal loaded
        loaded = version

    with SyncRollout.from_env(environ=environ, config=CONFIG, on_weights=load) as rollout:
        for group in rollout.groups(in_flight=in_flight):
            rollout.report_group(
                group, rewards=[1.0] * len(group.pending), payloads=[b"x"] * len(group.pending), versions=loaded
            )


def generate_on_a_loop(environ: dict[str, str], own: Process, in_flight: int) -> None:
    loaded = -1

    async def load(version: int, _handle: str) -> None:
        nonlocal loaded
        loaded = version

    async def one(rollout: Rollout, group: Any) -> None:
        for index in group.pending:
            await rollout.report(group, index, b"x", reward=1.0, versions=loaded)

    async def work() -> None:
        async with Rollout.from_env(environ=environ, config=CONFIG, on_weights=load) as rollout:
            tasks = []
            async for group in rollout.groups(in_flight=in_flight):
                tasks.append(asyncio.ensure_future(one(rollout, group)))
            await asyncio.gather(*tasks)

    asyncio.run(work())


def run_to_the_end(controller: ControllerProcess, own: Process, generating: Callable[..., None], in_flight: int) -> str:
    environ = {"COSMOS_CTRL_ADDRESS": controller.address, "COSMOS_CTRL_EXECUTION_ID": controller.execution_id}
    before = threading.active_count()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(generating, environ, own, in_flight)
        reason = train(environ, own)
        other.result(DEADLINE_S)
    # A few may stay for the next to use; none for each group.
    assert threading.active_count() < before + 10
    return reason


@pytest.mark.parametrize("generating", [generate, generate_on_a_loop])
@pytest.mark.parametrize("in_flight", [1, 16], ids=["a lease gives less than a step", "a lease gives more than a step"])
def test_g9_one_process_in_both_roles_runs_to_its_end_without_waiting_on_itself(
    tmp_path: Path, generating: Callable[..., None], in_flight: int
) -> None:
    config = write_config(
        tmp_path,
        train={"trainers": {"policy": 1}, "groups_per_step": 4},
        # What is ready when its step has passed is too old, and generated again.
        rollout={"max_staleness": 0, "on_stale": "regenerate", "announces_weights": True, "max_outstanding_groups": 16},
        # The last step has fewer groups than a whole one.
        sampling={"completions": 2 * 22},
        checkpoints={"every_steps": 2},
    )
    own = Process()
    with serving(config) as controller:
        assert run_to_the_end(controller, own, generating, in_flight) == "BUDGET_EXHAUSTED"
        assert controller.exit_code() == 0, controller.log
    assert own.steps >= 6
    assert own.trained == 2 * 22
    trained = [group for group, mask, outcome in settled_by_journal(tmp_path / "run") if outcome == "trained"]
    assert len(trained) == len(set(trained)) == 22
    assert audit(tmp_path / "run").skipped == 0
