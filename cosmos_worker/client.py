"""One process's connection to the controller, for one role.

* It has a thread of its own with an asyncio loop; the user's threads and loops only hand work over. Nothing here blocks on
  user code.
* The execution ID is pinned by the first registration and never refreshed: another ID in any answer is
  `StaleExecutionError`, and final. Identity is stamped on fresh messages; what the caller holds is not changed.
* One incarnation for the life of the process: sessions come and go under it.
* The first terminal error is recorded, what was still to be said is let go of, and every later call raises it. If the main
  thread does not come back to hear it, the process is ended (`exits.Watchdog`).
* Every wait has a deadline from `ClientConfig`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from cosmos_ctrl.core.errors import ExecutionEndedError, StaleExecutionError
from cosmos_ctrl.v1 import controller_service_pb2 as pb
from cosmos_ctrl.v1.controller_service_pb2_grpc import ControllerServiceStub
from cosmos_worker.errors import UsageError, is_failure
from cosmos_worker.exits import Watchdog
from cosmos_worker.faults import TERMINAL, Fault, Patience, fault_of
from cosmos_worker.reports import ReportStream
from cosmos_worker.settings import ClientConfig, Endpoint, WorkerPlace
from cosmos_worker.transport import on_loop_exception, open_channel, registration
from cosmos_worker.window import Heard

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from cosmos_ctrl.v1.controller_service_pb2_grpc import ControllerServiceAsyncStub
    from cosmos_worker.reports import StreamCall

_log = logging.getLogger(__name__)

_REPORTS = f"/{pb.DESCRIPTOR.services_by_name['ControllerService'].full_name}/StreamReports"

T = TypeVar("T")
Request = TypeVar("Request", bound="Message")
Response = TypeVar("Response", bound="Message")


class Connection:
    """See the module. Made and closed by `Trainer` and `Rollout`."""

    def __init__(
        self,
        endpoint: Endpoint,
        place: WorkerPlace,
        *,
        config: ClientConfig | None = None,
        on_notice: Callable[[Heard], None] | None = None,
        on_over: Callable[[], None] | None = None,
        incarnation: str | None = None,
        exit_process: Callable[[int], object] = os._exit,
    ) -> None:
        self.place = place
        self.config = config or ClientConfig()
        self.endpoint = endpoint
        self.incarnation = incarnation or secrets.token_hex(16)
        self.session = ""
        self.lease_time_s = 30.0
        self.weights_announced = False
        self.leader = False
        """Whether the controller says that this rank speaks for all; known once registered."""
        self.finishing = False
        self.reports = ReportStream(self, on_notice or _ignore)
        self._on_over = on_over
        self._pinned: str | None = None
        self._terminal: Exception | None = None
        self._watchdog = Watchdog(self.config.end_grace_s, str(place), exit_process)
        self._thread: threading.Thread | None = None
        self._closed = False
        self._aside = threading.local()
        # The rest is made when it starts.
        self._loop: asyncio.AbstractEventLoop
        self._stub: ControllerServiceAsyncStub
        self._channel: grpc.aio.Channel
        self._ended: asyncio.Event
        self._registering: asyncio.Lock
        self._tasks: set[asyncio.Task[None]] = set()

    # --- life, from the user's side ---

    def start(self) -> concurrent.futures.Future[None]:
        """Start the thread and register; the future ends when the session is open, or with the error."""
        if self._thread is not None:
            raise UsageError("the worker was entered before; make a new one")
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(on_loop_exception)
        self._thread = threading.Thread(target=self._run_loop, name=f"cosmos-{self.place.role}-client", daemon=True)
        self._thread.start()
        return asyncio.run_coroutine_threadsafe(self._open(), self._loop)

    async def finish(self, *, flush_s: float) -> None:
        """Flush what can be flushed and leave the loop's work. On the loop.

        Raises:
            Exception: the terminal error, or that the flush did not end in time: what was said last may be lost. Not where
                the end was known and wanted.
        """
        try:
            if self.session:
                self._check_terminal()
                await self._guarded(self.reports.flush(flush_s), heard=True)
        except Exception as error:
            if not self.finishing:
                raise
            _log.info("%s: the last reports were not acknowledged: %s", self.place, error)
        finally:
            self._watchdog.stand_down()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            if hasattr(self, "_channel"):
                await self._channel.close()

    def stop(self) -> None:
        """Stop the thread. Idempotent."""
        self._watchdog.stand_down()
        if self._closed or self._thread is None:
            return
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(self.config.close_s)
        if not self._thread.is_alive():
            self._loop.close()

    # --- work, from the user's side ---

    def check(self) -> None:
        """Raise the terminal error, if there is one."""
        if self._closed:
            raise UsageError("the worker is closed")
        if self._thread is None:
            raise UsageError("the worker is not open: use it in a with statement")
        if self._terminal is not None:
            self._hear()
            raise self._terminal

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Calls of this thread are none of the user's: what ends the connection has yet to come to the main thread."""
        self._aside.entered = True
        try:
            yield
        finally:
            self._aside.entered = False

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run `work` on the loop; it ends early with the terminal error if one comes."""
        try:
            self.check()
        except BaseException:
            work.close()
            raise
        return asyncio.run_coroutine_threadsafe(self._guarded(work, heard=self._is_heard()), self._loop)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """`submit`, and wait. The deadline is the work's own."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def detached(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run `work` on the loop whether or not the connection has ended: for leaving."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def acall(self, work: Coroutine[Any, Any, T]) -> T:
        """`submit` from any loop, and wait without blocking it."""
        return await asyncio.wrap_future(self.submit(work))

    def soon(self, callback: Callable[[], object]) -> None:
        """Run `callback` on the loop, soon; never, if it is not open."""
        if self._thread is None:
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to hear it
            self._loop.call_soon_threadsafe(callback)

    def listen(self, end: socket.socket, callback: Callable[[], object]) -> None:
        """Run `callback` on the loop whenever there is something to read."""
        self.soon(lambda: self._loop.add_reader(end, callback))

    def hang_up(self, end: socket.socket) -> None:
        """Listen no more, and close it."""

        def close() -> None:
            self._loop.remove_reader(end)
            end.close()

        self.soon(close)

    def end_process(self, why: str, code: int) -> None:
        """End this process at once."""
        self._watchdog.end_process(f"{why}; ending process {os.getpid()} with exit code {code}", code)

    # --- calls, on the loop ---

    @property
    def stub(self) -> ControllerServiceAsyncStub:
        """The controller."""
        if self._thread is None:
            raise UsageError("the worker is not open: use it in a with statement")
        return self._stub

    def open_reports(self) -> StreamCall:
        """A report stream, whose requests are encoded already: a payload is copied once."""
        return self._channel.stream_stream(_REPORTS, response_deserializer=pb.StreamReportsResponse.FromString)()

    @property
    def execution_id(self) -> str:
        """The pinned execution; empty before the first registration, and with a legacy controller."""
        return self._pinned or ""

    @property
    def terminal(self) -> Exception | None:
        """The error that ended this connection."""
        return self._terminal

    def identity(self) -> pb.WorkerIdentity:
        """A fresh identity for a fenced request."""
        return pb.WorkerIdentity(execution_id=self.execution_id, session_id=self.session)

    def patience(self, later_total_s: float | None = None) -> Patience:
        """For one call or stream."""
        return Patience(self.config, self.endpoint.address, later_total_s=later_total_s)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` on the loop until it ends or the connection closes. On the loop."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)

    async def unary(
        self,
        method: Callable[..., Awaitable[Response]],
        build: Callable[[pb.WorkerIdentity], Request],
        *,
        wait_s: float = 0.0,
        later_total_s: float | None = None,
        after: Callable[[], Awaitable[None]] | None = None,
    ) -> Response:
        """Call until answered; the request is made anew for each attempt, with the present session.

        Args:
            method: of `stub`.
            build: makes the request; the same but for the identity each time.
            wait_s: how long the request asks the controller to wait.
            later_total_s: how long "later" is an acceptable answer; None: as configured.
            after: awaited before each attempt.

        Raises:
            ControlError: as the controller said it.
            ControllerUnreachableError, DeadlineError: patience is over.
        """
        patience = self.patience(later_total_s)
        while True:
            self._check_terminal()
            if after is not None:
                await after()
            session = self.session
            try:
                response = await method(build(self.identity()), timeout=wait_s + self.config.call_s)
            except grpc.RpcError as error:
                await self.recover(fault_of(error), session, patience)
                continue
            header: pb.ResponseHeader = response.header  # type: ignore[attr-defined]  # every response has one
            self.check_header(header)
            return response

    async def recover(self, fault: Fault, session: str, patience: Patience) -> None:
        """Do what the contract says after a failed call; returns when it may be sent again.

        Raises:
            Exception: it may not. What ends the execution for this process is recorded first.
        """
        if self.finishing:
            patience.connect_total_s = self.config.after_end_s
        try:
            delay = patience.pause(fault)
        except Exception as error:
            if isinstance(error, (*TERMINAL, ConnectionError)):
                self.fail(error)
            raise
        if fault.kind == "register":
            await self._register_again(session)
            if patience.attempts > 1:
                await asyncio.sleep(delay)
        else:
            await asyncio.sleep(delay)

    def check_header(self, header: pb.ResponseHeader) -> None:
        """Compare an answer's execution with the pinned one.

        Raises:
            StaleExecutionError: another controller answered; recorded as terminal.
        """
        if self._pinned is not None and header.execution_id != self._pinned:
            error = StaleExecutionError(stated=self._pinned, current=header.execution_id)
            self.fail(error)
            raise error

    def fail(self, error: Exception) -> None:
        """Record what ends this connection; the first one counts. On the loop."""
        if self._terminal is not None:
            return
        if self.finishing and (isinstance(error, ConnectionError) or _is_wanted_end(error)):
            return
        self._terminal = error
        self._ended.set()
        self.reports.drop()
        if self._on_over is not None:
            self._on_over()
        if not self.finishing:
            self._watchdog.arm(self._loop, error)
        _log.warning("%s: %s", self.place, error)

    # --- the loop's own ---

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        # The transport leaves tasks of its own behind; a loop that closes over them complains.
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))

    async def _open(self) -> None:
        self._ended = asyncio.Event()
        self._registering = asyncio.Lock()
        self._channel = open_channel(self.endpoint, self.config)
        self._stub = ControllerServiceStub(self._channel)
        await self._register()
        self.spawn(self.reports.run())

    async def _register_again(self, lapsed: str) -> None:
        async with self._registering:
            # Several calls may have met the same lapse; one registration serves them all.
            if self.session == lapsed:
                await self._register()

    async def _register(self) -> None:
        patience = self.patience()
        stated = self.endpoint.execution_id if self._pinned is None else self._pinned
        while True:
            self._check_terminal()
            try:
                response = await self._stub.RegisterWorker(
                    registration(self.place, stated, self.incarnation), timeout=self.config.call_s
                )
                break
            except grpc.RpcError as error:
                fault = fault_of(error)
                # A session is what is being asked for: one that lapsed here is an answer to ask again.
                await self.recover(
                    Fault("later", fault.error) if fault.kind == "register" else fault, self.session, patience
                )
        self._pin(response.header)
        self.session = response.session_id
        self.lease_time_s = response.lease_time.ToTimedelta() / timedelta(seconds=1) or self.lease_time_s
        self.weights_announced = response.weights_announced
        self.leader = response.leader
        try:
            self.reports.on_registered(response.applied, response.limits)
        except Exception as error:
            self.fail(error)
            raise

    def _pin(self, header: pb.ResponseHeader) -> None:
        if self._pinned is None:
            given = self.endpoint.execution_id
            # A legacy controller has no execution and takes any; otherwise what was given is what counts.
            self._pinned = given if given and header.execution_id else header.execution_id
        self.check_header(header)

    def _check_terminal(self) -> None:
        if self._terminal is not None:
            raise self._terminal

    def _is_heard(self) -> bool:
        return not getattr(self._aside, "entered", False)

    def _hear(self) -> None:
        if self._is_heard():
            self._watchdog.stand_down()

    async def _guarded(self, work: Coroutine[Any, Any, T], *, heard: bool) -> T:
        task = asyncio.ensure_future(work)
        ended = asyncio.ensure_future(self._ended.wait())
        try:
            await asyncio.wait({task, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and self._terminal is not None:
                if heard:
                    self._watchdog.stand_down()
                raise self._terminal
            if self._terminal is not None and task.exception() is not None and heard:
                self._watchdog.stand_down()
            return task.result()
        finally:
            ended.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait({task})


def _is_wanted_end(error: Exception) -> bool:
    return isinstance(error, ExecutionEndedError) and not is_failure(error)


def _ignore(_: Heard) -> None:
    pass
