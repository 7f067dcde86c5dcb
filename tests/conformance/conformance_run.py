"""One scenario: a real controller with a trainer rank, one client process, and what the scenario does to the two.

The controller is the core, the runtime and the servicer as they are served, on loopback; the client's connection goes through the tap.
The core's clock stands still, so nothing lapses but what the script lapses. Every wait has a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
from conformance_rules import Broken, Heard, Observer
from conformance_scenarios import Scenario, Step
from conformance_tap import FOREIGN, Tap
from google.protobuf import json_format
from service_harness import SERVICE, House, Worker

from cosmos_ctrl.core.errors import ControlError
from cosmos_ctrl.core.sampling import Prompt
from cosmos_ctrl.service.guard import Guard
from cosmos_ctrl.service.status import from_rpc_error
from cosmos_ctrl.v1 import controller_service_pb2 as pb
from cosmos_ctrl.v1 import reports_pb2
from cosmos_ctrl.v1.controller_service_pb2_grpc import add_ControllerServiceServicer_to_server

#: Longest life of a client process, in seconds; of one in a slow scenario.
CLIENT_S, SLOW_CLIENT_S = 30.0, 90.0

#: Longest wait for the controller's state after the client has ended.
_STATE_S = 10.0

#: How long an outage lasts.
_OUTAGE_S = 0.2

_COMMAND_WAIT_S = 5.0

#: Characters of a client's output in a report.
_SAID = 2000


@dataclass(frozen=True, slots=True)
class Result:
    """What a scenario found."""

    scenario: str
    broken: tuple[Broken, ...]
    exit: int | None
    """None: it did not end by itself."""
    said: str
    """The end of what the client wrote to standard output and standard error."""
    reports_by: tuple[str, ...]
    """ "stream", "unary" or both: which RPC it reported by, if it did."""
    seconds: float
    """Life of the client process, for a person; no rule looks at it."""

    @property
    def passed(self) -> bool:
        """Whether no rule was broken."""
        return not self.broken


async def run_scenario(scenario: Scenario, command: Sequence[str], limit_s: float | None = None) -> Result:
    """Runs `command` as the client of one scenario, until it ends, breaks a rule that a message can break, or has run for `limit_s`."""
    limit_s = limit_s or (SLOW_CLIENT_S if scenario.slow else CLIENT_S)
    with tempfile.TemporaryDirectory(prefix="conformance-") as directory:
        stage = _Stage(scenario, Path(directory), limit_s)
        try:
            await stage.open()
            return await stage.play(command)
        finally:
            await stage.close()


class _Trainer(Worker):
    """A trainer rank that confirms what is acknowledged."""

    async def submit(self, batch: reports_pb2.ReportBatch | None = None, **numbers: int) -> reports_pb2.ReportAck:
        return await super().submit(batch, acked=self.batches, **numbers)

    async def train(self, number: int, command: pb.TrainCommand) -> None:
        """Completes the step and announces its weights in one batch, so that no group is leased between the two."""
        weights = reports_pb2.WeightAnnouncement(version=command.step, handle=f"weights-{command.step}")
        await self.submit(reports_pb2.ReportBatch(completions=[self.completion(number, command)], weights=[weights]))


class _Run:
    """One execution with its trainer rank."""

    def __init__(self, scenario: Scenario, directory: Path) -> None:
        sources = scenario.sources

        def prompt(index: int) -> Prompt:
            key = f"p{index}"
            return Prompt(key, sources[index], scenario.prompt_of(key), "bytes")

        self.house = House(
            directory,
            prompts=len(sources),
            n_generation=scenario.n_generation,
            prompt_of=prompt,
            ranks=1,
            **scenario.policy,
        )
        self._partly = scenario.partly
        self.gate = asyncio.Event()
        if scenario.gate == "open":
            self.gate.set()
        self.training: asyncio.Task[None]

    async def open(self) -> None:
        await self.house.open()
        trainer = _Trainer(self.house, pb.ROLE_TRAINER)
        await trainer.register()
        if self.gate.is_set():  # before any client can ask
            await self._confirm(trainer)
        if self._partly:
            await self._begin_groups()
        self.training = asyncio.create_task(self._train(trainer))

    async def close(self) -> None:
        self.training.cancel()
        await asyncio.gather(self.training, return_exceptions=True)
        await self.house.close()

    async def _confirm(self, trainer: _Trainer) -> None:
        await trainer.confirm()
        await trainer.announce(self.house.core.commands.steps)

    async def _begin_groups(self) -> None:
        """Another worker generates completion 0 of some groups, and returns the rest of them."""
        other = await self.house.rollout(replica=1)
        groups = (await other.lease(self._partly)).groups
        rows = reports_pb2.RolloutRows(
            outcome=reports_pb2.OUTCOME_COMPLETED,
            groups=[group.group for group in groups],
            leases=[group.lease for group in groups],
            masks=[1] * len(groups),
            lowest_versions=[0] * len(groups),
            highest_versions=[0] * len(groups),
            rewards=[0.0] * len(groups),
        )
        await other.submit(reports_pb2.ReportBatch(rollouts=[rows], end=reports_pb2.EndReport(reason="done")))

    async def _train(self, trainer: _Trainer) -> None:
        if not self.gate.is_set():
            await self.gate.wait()
            await self._confirm(trainer)
        with _failed_run(self.house):
            number = 1
            while True:
                command = await trainer.next(number, wait=_COMMAND_WAIT_S)
                kind = command.WhichOneof("command")
                if kind == "train":
                    await trainer.train(number, command.train)
                elif kind == "save":
                    await trainer.saved(number, command.save)
                elif kind == "end":
                    await trainer.end()
                    return
                number += kind is not None


@contextlib.contextmanager
def _failed_run(house: House) -> Iterator[None]:
    """A run that the script has failed tells its trainer so."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        known: ControlError | None = from_rpc_error(error)
        if known is None or house.core.lifecycle.failure is None:
            raise


class _Stage:
    """See the module."""

    def __init__(self, scenario: Scenario, directory: Path, limit_s: float) -> None:
        self._scenario, self._directory, self._limit_s = scenario, directory, limit_s
        self._run = _Run(scenario, directory)
        self._port = 0
        self._nobody: socket.socket | None = None
        self._chores: set[asyncio.Task[None]] = set()
        self._process: asyncio.subprocess.Process
        given = {"given": self._run.house.core.identity.id, "other": FOREIGN, "none": ""}
        self._execution_id = given[scenario.execution_id]
        self.observer = Observer(
            execution_id=self._execution_id, in_flight=scenario.in_flight, prompt_of=scenario.prompt_of
        )

    async def open(self) -> None:
        await self._run.open()
        await self._listen()

    async def close(self) -> None:
        if self._nobody is not None:
            self._nobody.close()
        for chore in self._chores:
            chore.cancel()
        await asyncio.gather(*self._chores, return_exceptions=True)
        await self._front.stop(None)
        await self._run.close()

    async def play(self, command: Sequence[str]) -> Result:
        """The client's whole life, and what is left of it."""
        scenario, observer = self._scenario, self.observer
        log = self._directory / "client.log"
        environment = os.environ | {
            "COSMOS_CTRL_ADDRESS": self._address(),
            "COSMOS_CTRL_EXECUTION_ID": self._execution_id,
            "COSMOS_CTRL_REPLICA": "0",
            "COSMOS_CTRL_GROUP": "rollout",
            "COSMOS_CTRL_IN_FLIGHT": str(scenario.in_flight),
        }
        with log.open("wb") as output:
            self._process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, env=environment
            )
        started = time.monotonic()
        code = await self._exit_code()
        seconds = round(time.monotonic() - started, 2)
        await asyncio.gather(*self._chores)  # an outage that the client did not wait for
        if self._run.training.done():
            self._run.training.result()  # or what the client did says nothing
        if code is not None:
            await self._check_end(code)
        said = log.read_bytes().decode(errors="replace")[-_SAID:]
        return Result(scenario.name, tuple(observer.broken), code, said, tuple(sorted(observer.reports_by)), seconds)

    def _address(self) -> str:
        if self._scenario.address == "absent":
            return ""
        if self._scenario.address == "served":
            return f"127.0.0.1:{self._port}"
        # Bound and not listened to: a connection is refused, and nobody else is given the port.
        self._nobody = socket.socket()
        self._nobody.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{self._nobody.getsockname()[1]}"

    async def _exit_code(self) -> int | None:
        ended = asyncio.create_task(self._process.wait())
        broken = asyncio.create_task(self.observer.is_broken.wait())
        await asyncio.wait({ended, broken}, timeout=self._limit_s, return_when=asyncio.FIRST_COMPLETED)
        broken.cancel()
        if ended.done():
            return ended.result()
        if not self.observer.broken:
            counts = {kind: count for kind, count in self.observer.counts.items() if count}
            wanted = f"an end within {self._limit_s:g} s, with exit code {self._scenario.expect.exit}"
            self.observer.add("ends", wanted, f"messages so far: {counts}")
        self._process.kill()
        await ended
        return None

    async def _check_end(self, code: int) -> None:
        expect, observer = self._scenario.expect, self.observer
        if code != expect.exit:
            observer.add("exit_code", str(expect.exit), str(code))
            return  # whatever else is wrong follows from that
        observer.at_exit(end_expected=expect.end)
        for kind, least in expect.at_least.items():
            if observer.counts[kind] < least:
                observer.add("messages", f"at least {least} × {kind}", str(observer.counts[kind]))
        if observer.notices_confirmed < expect.notices:
            found = f"told {observer.notices_told}, confirmed {observer.notices_confirmed}"
            observer.add("notices_through", f"at least {expect.notices} notices confirmed", found)
        await self._check_state()

    async def _check_state(self) -> None:
        wanted = pb.RunState()
        json_format.ParseDict(self._scenario.expect.state, wanted)
        names = self._scenario.expect.state.keys()
        loop = asyncio.get_running_loop()
        end = loop.time() + _STATE_S
        while True:
            state = await self._state()
            wrong = {name: getattr(state, name) for name in names if getattr(state, name) != getattr(wanted, name)}
            if not wrong:
                return
            if loop.time() > end:
                expected = {name: getattr(wanted, name) for name in wrong}
                self.observer.add("state", f"RunState {expected}", str(wrong))
                return
            await asyncio.sleep(0.02)

    async def _state(self) -> pb.RunState:
        call = self._run.house.stub.WatchRun(pb.WatchRunRequest())
        async for response in call:
            call.cancel()
            return response.state
        raise AssertionError("WatchRun gives one state at least")

    # -- the script

    async def plan(self, heard: Heard) -> list[Step]:
        """What is to be done to this message; what is done to the run is done first."""
        steps = [step for step in self._scenario.script if self._is_due(step, heard)]
        for step in steps:
            for action in step.do:
                if action in _DEEDS:
                    await getattr(self, _DEEDS[action])(heard)
        if any(action in ("outage", "new_execution") for step in steps for action in step.do):
            # The server stops with all its calls, of which this is one.
            await asyncio.Event().wait()
        return steps

    def _is_due(self, step: Step, heard: Heard) -> bool:
        if step.message != heard.kind and not (step.message == "end" and heard.is_end):
            return False
        return step.nth <= self.observer.counts[step.message] < step.nth + step.times

    async def _lapse(self, heard: Heard) -> None:
        core = self._run.house.core
        worker = core.workers.of(heard.message.worker.session_id)
        core.workers.lapse(worker)
        core.rollouts.expire(worker)
        self._changed()

    async def _cancel_leases(self, heard: Heard) -> None:
        self._run.house.core.rollouts.cancel_all()
        self._changed()

    async def _takeover(self, heard: Heard) -> None:
        newer = Worker(self._run.house, pb.ROLE_ROLLOUT, group="rollout")
        await newer.register()

    async def _fail_run(self, heard: Heard) -> None:
        self._run.house.core.fail("the conformance suite fails this run")
        self._changed()

    async def _stop_run(self, heard: Heard) -> None:
        self._run.house.core.stop("the conformance suite stops this run")
        self._changed()

    def _changed(self) -> None:
        self._run.house.core.lifecycle.touch()
        self._run.house.runtime.settle()

    async def _open_gate(self, heard: Heard) -> None:
        self._run.gate.set()

    async def _sigterm(self, heard: Heard) -> None:
        self.observer.told_to_leave = True
        self._process.send_signal(signal.SIGTERM)

    async def _outage(self, heard: Heard) -> None:
        self._do_aside(self._go_out())

    async def _new_execution(self, heard: Heard) -> None:
        self._do_aside(self._start_anew())

    def _do_aside(self, chore: Any) -> None:
        task = asyncio.create_task(chore)
        self._chores.add(task)

    async def _go_out(self) -> None:
        await self._front.stop(None)
        await asyncio.sleep(_OUTAGE_S)
        await self._listen()

    async def _start_anew(self) -> None:
        await self._front.stop(None)
        await self._run.close()
        self._run = _Run(self._scenario, self._directory)
        await self._run.open()
        await self._listen()

    async def _listen(self) -> None:
        """Opens the port that the client knows, for the present execution."""
        options = [("grpc.so_reuseport", 0)]
        self._front = grpc.aio.server(interceptors=[Tap(self), Guard(SERVICE)], options=options)
        add_ControllerServiceServicer_to_server(self._run.house.servicer, self._front)
        self._port = self._front.add_insecure_port(f"127.0.0.1:{self._port}")
        await self._front.start()


#: Interventions that are done to the run or to the client, by the method that does them; the tap does the others.
_DEEDS = {
    "lapse": "_lapse",
    "cancel_leases": "_cancel_leases",
    "takeover": "_takeover",
    "fail_run": "_fail_run",
    "stop_run": "_stop_run",
    "open_gate": "_open_gate",
    "sigterm": "_sigterm",
    "outage": "_outage",
    "new_execution": "_new_execution",
}
