"""One run with a worker of every language side by side, killed and started again: nothing is skipped, and everyone has a part in it."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from clients import BUILD_S, UnavailableError, chosen, unavailable
from controller_process import DEADLINE_S, ControllerProcess, Worker, serving, write_config

from cosmos_ctrl.audit import audit
from cosmos_ctrl.v1 import controller_service_pb2 as pb

pytestmark = pytest.mark.timeout(BUILD_S + 120)

COMPLETIONS = 960


class Trainer(threading.Thread):
    """The one trainer rank: does what it is told until the end, or until its controller is gone."""

    def __init__(self, controller: ControllerProcess) -> None:
        super().__init__(daemon=True)
        self._worker = Worker(controller, pb.ROLE_TRAINER)
        self._steps = controller.state().metadata.completed_training_steps
        self.gone = threading.Event()
        self.failure: Exception | None = None
        self.end: pb.EndCommand | None = None

    def run(self) -> None:
        try:
            self._train()
        except Exception as error:
            if not self.gone.is_set():
                self.failure = error

    def _train(self) -> None:
        self._worker.confirm()
        self._announce(self._steps)
        number = 1
        while self.end is None:
            command = self._worker.next(number)
            kind = command.WhichOneof("command")
            if kind == "train":
                self._worker.complete(number, command.train)
                self._announce(command.train.step)
            elif kind == "save":
                self._worker.save(number, command.save)
            elif kind == "end":
                self.end = command.end
                self._worker.end()
            number += kind is not None

    def _announce(self, version: int) -> None:
        self._worker.submit(weights=[{"version": version, "handle": f"weights-{version}"}])


class Clients:
    """One worker of each command, each a replica of its own."""

    def __init__(self, commands: Sequence[Sequence[str]], controller: ControllerProcess, logs: Path) -> None:
        self._logs = logs / controller.execution_id
        self._logs.mkdir()
        self.processes = [self._start(replica, command, controller) for replica, command in enumerate(commands)]

    def _start(self, replica: int, command: Sequence[str], controller: ControllerProcess) -> subprocess.Popen[bytes]:
        environment = os.environ | {
            "COSMOS_CTRL_ADDRESS": controller.address,
            "COSMOS_CTRL_EXECUTION_ID": controller.execution_id,
            "COSMOS_CTRL_REPLICA": str(replica),
            "COSMOS_CTRL_IN_FLIGHT": "1",
        }
        with (self._logs / f"{replica}.log").open("wb") as log:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)

    @property
    def log(self) -> str:
        return "\n".join(f"{path.name}: {path.read_text(errors='replace')}" for path in sorted(self._logs.iterdir()))

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait(DEADLINE_S)


@contextmanager
def working(config: Path, commands: Sequence[Sequence[str]]) -> Iterator[tuple[ControllerProcess, Clients, Trainer]]:
    """A controller whose gate opens once every client has registered."""
    with serving(config) as controller:
        clients = Clients(commands, controller, config.parent)
        trainer = Trainer(controller)
        try:
            until(lambda: len(workers(controller)) == len(commands), controller, clients, trainer)
            trainer.start()
            yield controller, clients, trainer
        finally:
            trainer.gone.set()
            clients.kill()


def workers(controller: ControllerProcess) -> dict[int, pb.Worker]:
    """Rollout workers by replica."""
    listed = controller.stub.ListWorkers(pb.ListWorkersRequest(), timeout=DEADLINE_S).workers
    return {worker.replica: worker for worker in listed if worker.role == pb.ROLE_ROLLOUT}


def until(done: Callable[[], bool], controller: ControllerProcess, clients: Clients, trainer: Trainer) -> None:
    """Waits within the deadline."""
    end = time.monotonic() + 3 * DEADLINE_S
    while not done():
        assert trainer.failure is None, trainer.failure
        assert time.monotonic() < end, f"{controller.log}\n{clients.log}"
        assert all(process.poll() in (None, 0) for process in clients.processes), clients.log
        time.sleep(0.01)


def every_command() -> tuple[list[list[str]], list[str]]:
    """Two Python workers, so that there is always company, and one of every other language; and which of those cannot be built here."""
    commands, missing = [], []
    for client in chosen():
        try:
            commands += [client.command()] * (2 if client.language == "python" else 1)
        except UnavailableError as error:
            missing.append(str(error))
    return commands, missing


def test_g12_clients_of_all_languages_share_a_run_that_is_killed_and_resumed(tmp_path: Path) -> None:
    commands, missing = every_command()
    config = write_config(
        tmp_path,
        train={"trainers": {"policy": 1}, "groups_per_step": 2},
        rollout={"n_generation": 2, "announces_weights": True, "max_outstanding_groups": 2 * len(commands)},
        sampling={"completions": COMPLETIONS},
        checkpoints={"every_steps": 4},
    )
    with working(config, commands) as (controller, clients, trainer):

        def in_the_middle() -> bool:
            shares = workers(controller).values()
            return all(worker.applied for worker in shares) and bool(controller.manifests())

        until(in_the_middle, controller, clients, trainer)
        assert trainer.end is None, "the run ended before everyone had a part in it"
        trainer.gone.set()
        controller.process.kill()
        clients.kill()

    applied: dict[int, int] = {}
    with working(config, commands) as (controller, clients, trainer):

        def over() -> bool:
            if trainer.end is None:
                applied.update({replica: worker.applied for replica, worker in workers(controller).items()})
            return trainer.end is not None

        assert controller.state().metadata.completed_training_steps > 0, "it resumed from nothing"
        until(over, controller, clients, trainer)
        codes = [process.wait(DEADLINE_S) for process in clients.processes]
        assert codes == [0] * len(commands), clients.log
        assert controller.exit_code() == 0, controller.log
        assert trainer.end is not None
        assert trainer.end.reason == pb.END_REASON_BUDGET_EXHAUSTED
    assert sorted(applied) == list(range(len(commands)))
    assert all(applied.values()), f"not every client had a part in the second execution: {applied}"

    report: Any = audit(controller.run)
    assert (report.skipped, report.remaining_completions) == (0, 0)
    assert report.repeated <= report.window_at_checkpoint
    assert [execution.number for execution in report.executions] == [1, 2]
    if missing:
        unavailable("as it should be, but not with every language: " + "; ".join(missing))
