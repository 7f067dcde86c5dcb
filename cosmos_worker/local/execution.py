"""One execution of the run as processes: the controller first, then its workers, launched with its ID."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from cosmos_ctrl.config import Config
from cosmos_ctrl.exits import ExitCode
from cosmos_ctrl.v1 import controller_service_pb2 as pb
from cosmos_worker.local import processes
from cosmos_worker.local.processes import Child
from cosmos_worker.local.watch import RunWatch

_READY_TIMEOUT_S = 120.0
_READY_POLL_S = 0.05
_STOP_S = 10.0
_STEPS_TO_WAIT = 8
"""How many steps the planned crash waits for results that are out of order."""


class LaunchError(Exception):
    """A process did not come up; the message has the end of its log."""

    def __init__(self, message: str, exit_code: int = ExitCode.FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        """What the launcher ends with: the process's own code, if it had one."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What every process of the run is started with."""

    config: Config
    config_path: Path
    run: Path
    port: int
    environment: dict[str, str]

    def arguments(self, *words: str) -> tuple[str, ...]:
        """The words, and where the configuration is."""
        return (*words, "--config", str(self.config_path))

    def log(self, execution: int, name: str) -> Path:
        """Where a process writes."""
        directory = self.run / "logs"
        directory.mkdir(parents=True, exist_ok=True)
        return directory / f"e{execution:04d}-{name}.log"


@dataclass(slots=True)
class Execution:
    """The running processes of one execution."""

    launch: Launch
    number: int
    id: str
    end: str
    """Why it was over when it was ready, there being nothing to do; empty otherwise."""
    resumed_from: str
    controller: Child
    log: Path
    """The controller's."""
    trainers: Child | None = None
    rollouts: list[Child] = field(default_factory=list)
    watch: RunWatch | None = None
    crash_due: threading.Event = field(default_factory=threading.Event)

    @property
    def children(self) -> list[Child]:
        """All of them."""
        return [self.controller, *([self.trainers] if self.trainers else []), *self.rollouts]

    def start_workers(self, crash_at_step: int, wake: threading.Event) -> None:
        """Start trainer ranks and rollout workers, and follow the run; a state that fits sets `crash_due`, and `wake`."""
        self.watch = RunWatch(f"127.0.0.1:{self.launch.port}", lambda state: self._look(state, crash_at_step, wake))
        ranks = self.launch.config.train.trainers["policy"]
        torchrun = ("--standalone", f"--nproc-per-node={ranks}", "-m", "cosmos_worker.cli")
        self.trainers = self._start(
            "trainers",
            "torch.distributed.run",
            (*torchrun, *self.launch.arguments("trainer")),
            {"OMP_NUM_THREADS": "1"},
        )
        for replica in range(self.launch.config.local.rollout_workers):
            self.rollouts.append(self.start_rollout(replica))

    def start_rollout(self, replica: int) -> Child:
        """A rollout worker of that replica."""
        # Whatever launched the launcher, this worker is the only rank of its replica.
        environment = {"COSMOS_CTRL_REPLICA": str(replica), "RANK": "0", "WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
        return self._start(f"rollout-{replica}", "cosmos_worker.cli", self.launch.arguments("rollout"), environment)

    def workers(self) -> list[pb.Worker]:
        """The worker table."""
        return self.watch.workers() if self.watch is not None else []

    def close(self) -> None:
        """Stop following."""
        if self.watch is not None:
            self.watch.close()

    def _start(self, name: str, module: str, arguments: tuple[str, ...], environment: dict[str, str]) -> Child:
        own = {"COSMOS_CTRL_ADDRESS": f"127.0.0.1:{self.launch.port}", "COSMOS_CTRL_EXECUTION_ID": self.id}
        merged = {**self.launch.environment, **own, **environment}
        return processes.start(name, module, arguments, merged, self.launch.log(self.number, name))

    def _look(self, state: pb.RunState, crash_at_step: int, wake: threading.Event) -> None:
        """In the middle of a step, with work out with workers, and something to resume from; and settled groups beyond an
        unsettled one, unless that does not come about in some steps."""
        steps = state.completed_training_steps
        in_a_step = state.groups_training and state.groups_leased
        unsettled = state.groups_pending + state.groups_leased + state.groups_ready + state.groups_training
        out_of_order = state.window_draws > unsettled or steps >= crash_at_step + _STEPS_TO_WAIT
        resumable = state.HasField("checkpoint") and not state.saves_pending
        if crash_at_step and steps >= crash_at_step and in_a_step and out_of_order and resumable:
            self.crash_due.set()
            wake.set()


def start_execution(launch: Launch, attempt: int, interrupted: Callable[[], bool]) -> Execution:
    """Start a controller and wait until it serves.

    Raises:
        LaunchError: it ended, or did not serve in time.
    """
    # Two launchers may work in one directory; each has files of its own, and fresh ones for every start.
    own = f"{os.getpid()}-{attempt}"
    ready_file = launch.run / f"ready-{own}.json"
    ready_file.unlink(missing_ok=True)
    log = launch.log(0, f"controller-{own}")
    log.unlink(missing_ok=True)
    arguments = launch.arguments("serve", "--ready-file", str(ready_file))
    controller = processes.start("controller", "cosmos_ctrl.cli", arguments, launch.environment, log)
    deadline = time.monotonic() + _READY_TIMEOUT_S
    while not ready_file.exists():
        if interrupted():
            processes.terminate([controller], grace_s=_STOP_S)
            raise LaunchError("interrupted while the controller was starting", ExitCode.INTERRUPTED)
        code = controller.exit_code
        if code is not None:
            text = f"the controller ended with code {code}:\n{processes.tail(log)}"
            raise LaunchError(text, code if code > 0 else ExitCode.FAILED)
        if time.monotonic() > deadline:
            processes.kill([controller])
            raise LaunchError(f"the controller did not serve within {_READY_TIMEOUT_S:.0f} s:\n{processes.tail(log)}")
        time.sleep(_READY_POLL_S)
    ready = json.loads(ready_file.read_text(encoding="utf-8"))
    ready_file.unlink()
    return Execution(
        launch,
        ready["execution_number"],
        ready["execution_id"],
        ready["end"],
        ready["resumed_from"],
        controller,
        log,
    )


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
