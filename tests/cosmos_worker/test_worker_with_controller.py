"""The worker library against the real controller, which is a process of its own; trainer ranks and rollout workers are threads."""

# what is raised comes out of the worker's with statement, body and all
from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cosmos_ctrl.core.errors import CheckpointDamagedError, ResumeMetadataMismatch, StaleExecutionError
from cosmos_worker.errors import ControllerUnreachableError, exit_code_for
from cosmos_worker.rollout import LeasedGroup, SyncRollout
from cosmos_worker.settings import ClientConfig
from cosmos_worker.trainer import Trainer

DEADLINE_S = 60.0
CONFIG = ClientConfig(
    poll_s=0.5, lease_wait_s=0.3, connect_total_s=5.0, confirm_total_s=30.0, idle_total_s=40.0, report_s=30.0
)
GROUPS, COMPLETIONS = 12, 4


class Execution:
    """One controller process over a run's directory."""

    def __init__(self, directory: Path, number: int) -> None:
        ready = directory / f"ready-{number}.json"
        prompts = directory / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"prompt": f"p{i}", "answer": str(i)}) + "\n" for i in range(GROUPS)))
        config = directory / "run.toml"
        config.write_text(
            f"""
[run]
name = "test"
directory = {str(directory / "run")!r}
[server]
linger_s = 3.0
[train]
groups_per_step = 3
trainers = {{ policy = 2 }}
[rollout]
n_generation = {COMPLETIONS}
max_outstanding_groups = 6
[sampling]
prompts = {str(prompts)!r}
epochs = 1
[checkpoints]
every_steps = 1
"""
        )
        with (directory / f"controller-{number}.log").open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "cosmos_ctrl.cli", "serve", "--config", str(config), "--ready-file", str(ready)],
                stdout=subprocess.DEVNULL,
                stderr=log,
            )
        end = time.monotonic() + DEADLINE_S
        while not (ready.exists() and ready.stat().st_size):
            assert self.process.poll() is None, (directory / f"controller-{number}.log").read_text()
            assert time.monotonic() < end
            time.sleep(0.02)
        told = json.loads(ready.read_text())
        self.environ = {
            "COSMOS_CTRL_ADDRESS": told["address"],
            "COSMOS_CTRL_EXECUTION_ID": told["execution_id"],
        }

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait(DEADLINE_S)

    def trainer(self, rank: int) -> Trainer:
        environ = self.environ | {"RANK": str(rank), "WORLD_SIZE": "2"}
        return Trainer.from_env(group="policy", environ=environ, config=CONFIG)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as executor:
        yield executor


def train(execution: Execution, rank: int, *, until: int | None = None) -> tuple[list[int], str, int]:
    """The quickstart's loop without a model: the state is the step count. Returns steps, end, and completions trained."""
    steps, trained = [], 0
    with execution.trainer(rank) as trainer:
        resume = trainer.resume()
        state = {"steps": 0, "updates": 0}
        if resume.checkpoint:
            state = json.load(trainer.artifacts(resume)["state.pt"])
            assert state["rank"] == rank
        trainer.confirm(steps=state["steps"], updates=state["updates"])
        trainer.announce_weights(state["steps"], f"w{state['steps']}")
        for command in trainer.commands():
            if command.is_save:
                with trainer.save(command) as save:
                    save.open("state.pt").write(json.dumps(state | {"rank": rank}).encode())
                    save.note({"tracker": "t"})
                assert save.state in ("PENDING", "PUBLISHING", "COMMITTED")
                continue
            if until is not None and command.step > until:
                raise InterruptedError(f"rank {rank} dies in step {command.step}")
            groups = command.payloads()
            for group in groups:
                for one in group.completions:
                    # What a worker said of a completion is what a trainer is told of it, and of no other.
                    assert one.reward == one.index
                    assert one.payload == {"text": one.index, "prompt": group.decoded_prompt()["prompt"]}
            trained += sum(len(group.completions) for group in groups)
            discarded = [(group, 3, "bad") for group in command.masks][:1]
            trainer.complete(command, updates=2, discarded=discarded)
            state = {"steps": command.step, "updates": state["updates"] + 2}
            steps.append(command.step)
            trainer.announce_weights(command.step, f"w{command.step}")
    return steps, trainer.end_reason.name, trained


def report_whole(rollout: SyncRollout, group: LeasedGroup) -> None:
    """Report all of a group at once."""
    payloads = [{"text": i, "prompt": group.prompt()["prompt"]} for i in group.pending]
    rollout.report_group(group, rewards=[float(i) for i in group.pending], payloads=payloads, versions=0)


def wait_for_checkpoint(directory: Path) -> None:
    """Wait until the first one is committed."""
    deadline = time.monotonic() + DEADLINE_S
    while not list((directory / "run").glob("**/manifest.json")):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def generate(execution: Execution, replica: int) -> int:
    """A rollout worker; returns how many groups it generated."""
    loaded = []
    count = 0
    with SyncRollout.from_env(
        on_weights=lambda version, handle: loaded.append((version, handle)),
        replica=replica,
        environ=execution.environ,
        config=CONFIG,
    ) as rollout:
        for group in rollout.groups(in_flight=2):
            version, handle = loaded[-1]
            assert handle == f"w{version}"
            for i in reversed(group.pending):
                payload = {"text": i, "prompt": group.prompt()["prompt"]}
                rollout.report(group, i, payload, reward=float(i), versions=version)
            count += 1
    return count


def test_a_run_from_start_to_end_and_a_restart_that_does_nothing(tmp_path, pool):
    with Execution(tmp_path, 1) as execution:
        ranks = [pool.submit(train, execution, rank) for rank in range(2)]
        workers = [pool.submit(generate, execution, replica) for replica in range(2)]
        results = [rank.result(DEADLINE_S) for rank in ranks]
        assert sum(worker.result(DEADLINE_S) for worker in workers) == GROUPS
        assert [result[:2] for result in results] == [([1, 2, 3, 4], "BUDGET_EXHAUSTED")] * 2
        assert sum(result[2] for result in results) == GROUPS * COMPLETIONS
        assert execution.process.wait(DEADLINE_S) == 0
    with Execution(tmp_path, 2) as again:
        ranks = [pool.submit(train, again, rank) for rank in range(2)]
        assert [rank.result(DEADLINE_S)[:2] for rank in ranks] == [([], "BUDGET_EXHAUSTED")] * 2
        assert again.process.wait(DEADLINE_S) == 0


def test_g5_a_killed_controller_is_noticed_and_its_worker_is_stale_in_the_next_execution(tmp_path, pool):
    def work(execution: Execution) -> None:
        with SyncRollout.from_env(on_weights=lambda *_: None, environ=execution.environ, config=CONFIG) as rollout:
            groups = rollout.groups(in_flight=3)
            for _ in range(3):
                report_whole(rollout, next(groups))
            rollout.flush()
            wait_for_checkpoint(tmp_path)
            execution.process.send_signal(signal.SIGKILL)
            list(groups)

    with Execution(tmp_path, 1) as first:
        workers = [pool.submit(train, first, rank) for rank in range(2)]
        workers.append(pool.submit(work, first))
        for worker in workers:
            with pytest.raises(ControllerUnreachableError) as gone:
                worker.result(DEADLINE_S)
            assert exit_code_for(gone.value) == 11
    with Execution(tmp_path, 2) as second:
        # Launched with the dead execution's ID.
        stale = second.environ | {"COSMOS_CTRL_EXECUTION_ID": first.environ["COSMOS_CTRL_EXECUTION_ID"]}
        with pytest.raises(StaleExecutionError) as caught, SyncRollout.from_env(environ=stale, config=CONFIG):
            pass
        assert exit_code_for(caught.value) == 10
        ranks = [pool.submit(train, second, rank) for rank in range(2)]
        worker = pool.submit(generate, second, 0)
        assert [rank.result(DEADLINE_S)[:2] for rank in ranks] == [([2, 3, 4], "BUDGET_EXHAUSTED")] * 2
        assert worker.result(DEADLINE_S) == GROUPS - 3


def test_g3_a_rank_that_restored_something_else_ends_everyone(tmp_path, pool):
    def confirm(execution: Execution, rank: int) -> None:
        with execution.trainer(rank) as trainer:
            trainer.resume()
            trainer.confirm(steps=0, updates=3 * rank)

    with Execution(tmp_path, 1) as execution:
        ranks = [pool.submit(confirm, execution, rank) for rank in range(2)]
        for rank in ranks:
            with pytest.raises(ResumeMetadataMismatch) as caught:
                rank.result(DEADLINE_S)
            assert exit_code_for(caught.value) == 11
        assert execution.process.wait(DEADLINE_S) != 0


def test_a_stop_saves_at_the_real_step_and_damage_in_it_is_told(tmp_path, pool):
    with Execution(tmp_path, 1) as first:
        ranks = [pool.submit(train, first, rank) for rank in range(2)]
        with SyncRollout.from_env(on_weights=lambda *_: None, environ=first.environ, config=CONFIG) as rollout:
            groups = rollout.groups(in_flight=3)
            for _ in range(3):
                report_whole(rollout, next(groups))
            next(groups)  # leased, and never reported
            wait_for_checkpoint(tmp_path)
            first.process.send_signal(signal.SIGTERM)
            assert [rank.result(DEADLINE_S)[:2] for rank in ranks] == [([1], "STOP_REQUESTED")] * 2
        assert first.process.wait(DEADLINE_S) == 0
    (shard,) = (tmp_path / "run").glob("**/policy-1/state.pt")
    shard.write_bytes(shard.read_bytes()[:-1] + b" ")
    with Execution(tmp_path, 2) as second:
        ranks = [pool.submit(train, second, rank) for rank in range(2)]
        with pytest.raises(CheckpointDamagedError, match=r"policy-1/state\.pt"):
            ranks[1].result(DEADLINE_S)
        assert ranks[0].exception(DEADLINE_S) is not None
        assert second.process.wait(DEADLINE_S) != 0
