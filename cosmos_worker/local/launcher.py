"""``cosmos-ctrl run``: executions of one run, one after the other, until it ends.

* An execution that fails, or whose controller dies, is followed by another; a rollout worker that dies is replaced.
* The planned crash kills everything but one rollout worker; that one goes on, and meets the next execution's fence.
* The first interrupt ends the run well, the second at once.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from pydantic import ValidationError

from cosmos_ctrl.config import Config, ConfigurationError, load_config, problems_of
from cosmos_ctrl.exits import ExitCode
from cosmos_ctrl.journal import JournalTail, journal_path
from cosmos_ctrl.v1 import controller_service_pb2 as pb
from cosmos_worker.errors import EXIT_STALE
from cosmos_worker.grpo.config import GrpoSettings
from cosmos_worker.grpo.tasks import ensure_bundled_prompts, load_prompts
from cosmos_worker.local import processes
from cosmos_worker.local.execution import Execution, Launch, LaunchError, free_port, start_execution
from cosmos_worker.local.processes import Child
from cosmos_worker.local.summary import write_report
from cosmos_worker.local.view import View, make_view

BUNDLED_CONFIG = Path(__file__).with_name("run.toml")

_LOOK_S = 0.2
_TRAINERS_GONE_S = 60.0
"""How long the controller may take to notice that its trainers are gone."""
_FINISH_S = 10.0
"""How long workers may take to end after the controller did."""

#: Starting again would end the same way. What cannot be resumed from is met by the next start, which says so.
_HOPELESS = (ExitCode.RESUME_MISMATCH, ExitCode.SUPERSEDED)

_MOST_REPLACEMENTS = 20
"""Rollout workers that may be replaced in one execution before something is wrong with all of them."""


def main(options: argparse.Namespace) -> int:
    """Run everything; returns the exit code."""
    try:
        launch = _prepare(options)
    except OSError as error:
        raise ConfigurationError("the run's directory", [f"cannot be used: {error}"]) from error
    view = make_view()
    try:
        code = Launcher(launch, view).run()
    except LaunchError as error:
        view.event(f"cosmos-ctrl: {error}")
        code = error.exit_code
    finally:
        view.close()
    if code == ExitCode.ENDED:
        write_report(launch.run)
    return code


class Launcher:
    """Starts executions until the run has ended."""

    def __init__(self, launch: Launch, view: View) -> None:
        self._launch, self._view = launch, view
        self._interrupts = 0
        self._wake = threading.Event()
        self._survivor: Child | None = None
        self._crashed = False
        self._replaced = 0

    def run(self) -> int:
        """All executions, one after the other."""
        previous = {
            number: signal.signal(number, self._interrupt) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        }
        try:
            for attempt in range(self._launch.config.local.restarts + 1):
                code = self._run_one(attempt)
                if code is not None:
                    return code
            self._view.event(f"cosmos-ctrl: gave up after {self._launch.config.local.restarts} restarts")
            return ExitCode.FAILED
        finally:
            if self._survivor is not None:
                processes.kill([self._survivor])
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _run_one(self, attempt: int) -> int | None:
        """One execution; None when another one should follow."""
        execution = start_execution(self._launch, attempt, lambda: self._interrupts > 0)
        origin = f"resumed from {execution.resumed_from}" if execution.resumed_from else "fresh"
        self._view.event(
            f"execution {execution.number} ({execution.id}): {origin}; controller {execution.controller.pid}"
        )
        try:
            if execution.end:
                # No worker will come and ask.
                processes.terminate([execution.controller], grace_s=_FINISH_S)
                self._view.event(f"{execution.end}. Use --fresh for a new run.")
                return execution.controller.exit_code
            execution.start_workers(0 if self._crashed else self._crash_step(execution), self._wake)
            return self._watch(execution)
        finally:
            execution.close()
            processes.kill(child for child in execution.children if child is not self._survivor)

    def _crash_step(self, execution: Execution) -> int:
        return self._launch.config.local.crash_at_step if execution.number == 1 else 0

    def _watch(self, execution: Execution) -> int | None:
        signalled = 0
        trainers_gone: float | None = None
        named: frozenset[int] = frozenset()
        deletions = JournalTail(journal_path(self._launch.run, execution.number), ("retired", "swept"))
        while execution.controller.exit_code is None:
            if execution.crash_due.is_set() and self._crash(execution):
                return None
            while signalled < self._interrupts:
                signalled += 1
                self._view.event("ending: finishing issued updates and saving; again to end at once")
                execution.controller.process.terminate()
            self._replace_rollouts(execution)
            trainers_gone = self._check_trainers(execution, trainers_gone)
            self._look_at_survivor()
            state = execution.watch.state if execution.watch is not None else None
            workers = execution.workers()
            named = self._name_workers(execution, workers, named)
            self._view.show(state, workers, _processes(execution, workers))
            self._show_deletions(deletions)
            self._wake.wait(_LOOK_S)
            self._wake.clear()
        self._show_deletions(deletions)
        return self._after(execution)

    def _show_deletions(self, journal: JournalTail) -> None:
        with contextlib.suppress(OSError):  # only to be looked at
            for event in journal.take():
                self._view.event(f"{event['event']} {event['path']}: {event['why']}")

    def _after(self, execution: Execution) -> int | None:
        code = execution.controller.exit_code
        if code == ExitCode.ENDED:
            self._wait_for_workers(execution)
            state = execution.watch.state if execution.watch is not None else None
            self._view.show(state, [], [])
            self._look_at_survivor()
            return code
        cause = "was killed" if code is not None and code < 0 else f"ended with code {code}"
        state = execution.watch.state if execution.watch is not None else None
        why = f": {state.end.message}" if state is not None and state.HasField("end") else ""
        self._view.event(f"execution {execution.number} is over: its controller {cause}{why}")
        if code in _HOPELESS or self._interrupts > 1:
            self._view.event(processes.tail(execution.log))
            return ExitCode.FAILED if code is None or code < 0 else code
        return None

    def _wait_for_workers(self, execution: Execution) -> None:
        """They have heard of the end, or look for a controller that is gone; another interrupt does not wait for them."""
        interrupts, deadline = self._interrupts, time.monotonic() + _FINISH_S
        while not processes.wait(execution.children, timeout_s=_LOOK_S):
            if time.monotonic() > deadline or self._interrupts > interrupts:
                left = ", ".join(f"{child.name} {child.pid}" for child in execution.children if child.exit_code is None)
                self._view.event(f"killing what did not end by itself: {left}")
                return

    def _crash(self, execution: Execution) -> bool:
        """Kill everything but a rollout worker that is generating, so that it has something to report; False: none is."""
        leases = {worker.pid: worker.leases for worker in execution.workers()}
        survivor = max(execution.rollouts, key=lambda child: leases.get(child.pid, 0))
        if not leases.get(survivor.pid):
            execution.crash_due.clear()
            return False
        self._crashed, self._survivor = True, survivor
        victims = [child for child in execution.children if child is not self._survivor]
        processes.kill(victims)
        self._view.event(
            f"SIGKILL in the middle of a step: controller, trainers and {len(victims) - 2} rollout worker; "
            f"rollout worker {self._survivor.pid} survives"
        )
        return True

    def _look_at_survivor(self) -> None:
        if self._survivor is None or self._survivor.exit_code is None:
            return
        how = "it was refused as stale" if self._survivor.exit_code == EXIT_STALE else "unexpected"
        self._view.event(f"the surviving rollout worker ended with code {self._survivor.exit_code}: {how}")
        self._survivor = None

    def _replace_rollouts(self, execution: Execution) -> None:
        for replica, child in enumerate(execution.rollouts):
            if child.exit_code not in (None, 0):
                self._replaced += 1
                if self._replaced > _MOST_REPLACEMENTS:
                    log = processes.tail(self._launch.log(execution.number, child.name))
                    raise LaunchError(f"{self._replaced} rollout workers ended; the last one said:\n{log}")
                execution.rollouts[replica] = execution.start_rollout(replica)
                self._view.event(
                    f"rollout worker {child.pid} ended with code {child.exit_code}; "
                    f"{execution.rollouts[replica].pid} takes its place"
                )

    def _check_trainers(self, execution: Execution, gone_since: float | None) -> float | None:
        trainers = execution.trainers
        if trainers is None or trainers.exit_code in (None, 0):
            return None
        if gone_since is None:
            self._view.event(f"the trainers ended with code {trainers.exit_code}; waiting for the controller to notice")
            return time.monotonic()
        if time.monotonic() - gone_since > _TRAINERS_GONE_S:
            self._view.event("the controller did not notice in time; killing it")
            processes.kill([execution.controller])
        return gone_since

    def _name_workers(self, execution: Execution, workers: list[pb.Worker], named: frozenset[int]) -> frozenset[int]:
        """Say who runs, once everyone does and again when somebody new came: a person may want to kill one."""
        running = frozenset(worker.pid for worker in workers if worker.connected)
        config = self._launch.config
        if len(running) < config.train.trainers["policy"] + config.local.rollout_workers or running <= named:
            return named
        self._view.event("processes: " + ", ".join(f"{n} {pid}" for n, pid in _processes(execution, workers)))
        return running

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        self._interrupts += 1
        self._wake.set()


def _processes(execution: Execution, workers: list[pb.Worker]) -> list[tuple[str, int]]:
    """Names and process IDs of what runs: the controller, and every worker that it knows."""
    found = [("controller", execution.controller.pid)]
    for worker in workers:
        if worker.connected:
            trainer = worker.role == pb.ROLE_TRAINER
            found.append((f"trainer {worker.rank}" if trainer else f"rollout {worker.replica}", worker.pid))
    return found


def _prepare(options: argparse.Namespace) -> Launch:
    path: Path = options.config or BUNDLED_CONFIG
    # The report is counted from the journals.
    overrides: dict[str, dict[str, Any]] = {"run": {"journal": True}}
    if options.no_crash:
        overrides["local"] = {"crash_at_step": 0}
    config = load_config(path, environment=os.environ, overrides=overrides)
    run = config.directory
    settings = _settings(config, path)
    prompts = options.prompts or (Path(config.sampling.prompts) if config.sampling.prompts else None)
    if prompts is not None:
        _check_prompts(prompts, settings)
    if options.fresh:
        if config.in_object_store:
            raise ConfigurationError(str(path), [f"--fresh removes local runs only: remove {config.location} yourself"])
        _remove_run(run)
    run.mkdir(parents=True, exist_ok=True)
    if prompts is None:
        prompts = ensure_bundled_prompts(run / "prompts.jsonl", prompts=settings.bundled_prompts)
        _check_prompts(prompts, settings)
    port = config.server.port or free_port()
    environment = {
        "COSMOS_CTRL__SAMPLING__PROMPTS": str(prompts.resolve()),
        "COSMOS_CTRL__SERVER__PORT": str(port),
        "COSMOS_CTRL__RUN__JOURNAL": "true",
        "GRPC_VERBOSITY": "ERROR",
    }
    return Launch(config, path.resolve(), run, port, environment)


def _check_prompts(prompts: Path, settings: GrpoSettings) -> None:
    try:
        load_prompts(prompts, max_prompt_chars=settings.max_prompt_chars, max_answer_chars=settings.max_answer_chars)
    except (OSError, ValueError) as error:
        raise ConfigurationError(str(prompts), [str(error)]) from error


def _remove_run(run: Path) -> None:
    """Remove what runs write there, and nothing else that may lie in the directory."""
    for name in ("executions", "checkpoints", "damaged", "deleting", "weights", "logs"):
        if (run / name).is_dir():
            shutil.rmtree(run / name)
    for name in ("report.json", "report.png"):
        (run / name).unlink(missing_ok=True)


def _settings(config: Config, path: Path) -> GrpoSettings:
    try:
        settings = GrpoSettings.from_dict(config.application)
    except ValidationError as error:
        raise ConfigurationError(str(path), problems_of(error, section="application")) from error
    if "policy" not in config.train.trainers:
        raise ConfigurationError(str(path), ["train.trainers: the bundled application trains a group named policy"])
    return settings
