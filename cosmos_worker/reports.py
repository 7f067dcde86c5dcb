"""The report stream: a thin asyncio edge over `ReportWindow`.

* `append` is called from any thread and only queues; everything else runs on the client's loop.
* One stream at a time. When it ends, the client recovers as the contract says, opens the next one, and sends again what is
  not acknowledged; the controller applies a number once.
* A message goes out at least every third of the session's lease time: a batch, else a heartbeat.
* An error that ends the stream for good ends the connection: the next call of the user raises it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import grpc

from cosmos_ctrl.core.errors import SequenceGapError, WindowFullError
from cosmos_ctrl.service import wire
from cosmos_ctrl.v1 import controller_service_pb2 as pb
from cosmos_worker.errors import DeadlineError
from cosmos_worker.faults import Fault, Patience, fault_of
from cosmos_worker.report_items import FormedBatch, Item
from cosmos_worker.settings import ClientConfig
from cosmos_worker.transport import set_within
from cosmos_worker.window import Heard, ReportWindow, WindowLimits, WindowStatistics

if TYPE_CHECKING:
    StreamCall = grpc.aio.StreamStreamCall[bytes, pb.StreamReportsResponse]


class Link(Protocol):
    """What a stream needs of its connection."""

    @property
    def config(self) -> ClientConfig:
        """The client's limits."""

    def open_reports(self) -> StreamCall:
        """A report stream; requests go encoded, so that a payload is copied once."""

    @property
    def session(self) -> str:
        """The present session."""

    @property
    def lease_time_s(self) -> float:
        """The session lapses after so long a silence."""

    def identity(self) -> pb.WorkerIdentity:
        """The execution and the present session."""

    def check_header(self, header: pb.ResponseHeader) -> None:
        """Raises StaleExecutionError for another execution."""

    def patience(self) -> Patience:
        """For one stream."""

    async def recover(self, fault: Fault, session: str, patience: Patience) -> None:
        """Wait, or register again; raises what is final."""

    def fail(self, error: Exception) -> None:
        """End the connection."""


class ReportStream:
    """Numbered batches up, acknowledgements and notices down."""

    def __init__(self, link: Link, on_notice: Callable[[Heard], None]) -> None:
        self._link = link
        self._on_notice = on_notice
        config = link.config
        self._window = ReportWindow(
            WindowLimits(
                completions=config.window_completions,
                total_bytes=config.window_bytes,
                batch_bytes=config.batch_bytes,
                message_bytes=config.max_message_bytes,
            )
        )
        self._lock = threading.Lock()
        self._poked = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._progress = asyncio.Event()
        self._owed = _Owed()
        self._over = False
        self._answered = asyncio.Event()
        """Whether the present stream has been answered."""

    # --- any thread ---

    def append(self, item: Item) -> int:
        """Queue `item` without waiting.

        Returns:
            Its place, for `wait_acknowledged`.

        Raises:
            WindowFullError: there is no room now.
            MessageTooLargeError: the item is larger than a message may be.
        """
        with self._lock:
            place = self._window.append(item)
            poke = not self._poked
            self._poked = True
        if poke and self._loop is not None:
            self._loop.call_soon_threadsafe(self._wake.set)
        return place

    def statistics(self) -> WindowStatistics:
        """How full the window is."""
        with self._lock:
            return self._window.statistics()

    def drop(self) -> None:
        """The connection is over: let go of what was not acknowledged."""
        with self._lock:
            self._window.drop()

    # --- the client's loop ---

    def on_registered(self, applied: int, limits: pb.Limits) -> None:
        """A session was opened: take over the controller's limits, drop what it has applied."""
        mine = self._window.limits
        with self._lock:
            self._window.limits = WindowLimits(
                batches=limits.max_unacknowledged_batches or mine.batches,
                batch_completions=limits.max_batch_completions or mine.batch_completions,
                batch_bytes=mine.batch_bytes,
                completions=mine.completions,
                total_bytes=mine.total_bytes,
                message_bytes=min(limits.max_message_bytes or mine.message_bytes, mine.message_bytes),
            )
            self._window.on_reconnect(applied)
        self._step()

    async def append_waiting(self, item: Item) -> int:
        """As `append`, and wait for room.

        Raises:
            DeadlineError: there was none within ``report_s``.
        """
        deadline_s = self._link.config.report_s
        end = time.monotonic() + deadline_s
        while True:
            try:
                return self.append(item)
            except WindowFullError as error:
                await self._next_step(end, deadline_s, "room in the report window", error)

    async def wait_acknowledged(self, place: int, deadline_s: float) -> bool:
        """Wait until the item of that place is acknowledged.

        Returns:
            False: the stream was over before, as was wanted.

        Raises:
            DeadlineError: it was not in time.
        """
        end = time.monotonic() + deadline_s
        while self._window.acknowledged < place:
            if self._over:
                return False
            await self._next_step(end, deadline_s, "the acknowledgement of a report")
        return True

    async def answered(self) -> None:
        """Wait until the present stream has been answered, or there is none any more. A stream that never is ends by itself."""
        while not self._over and not await set_within(self._answered, self._link.config.call_s):
            pass

    async def flush(self, deadline_s: float) -> bool:
        """Wait until everything appended so far is acknowledged; as `wait_acknowledged`."""
        return await self.wait_acknowledged(self._window.appended, deadline_s)

    async def run(self) -> None:
        """Keep a stream open until cancelled, or until an error is final."""
        self._loop = asyncio.get_running_loop()
        patience = self._link.patience()
        try:
            while True:
                session = self._link.session
                fault = await self._one_stream(patience)
                await self._link.recover(fault, session, patience)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._link.fail(error)
        finally:
            self._over = True
            self._answered.set()
            self._step()

    async def _one_stream(self, patience: Patience) -> Fault:
        with self._lock:
            self._window.on_reconnect()
        self._owed = _Owed()
        self._answered.clear()
        call: StreamCall = self._link.open_reports()
        reading = asyncio.ensure_future(self._read(call, patience))
        writing = asyncio.ensure_future(self._write(call))
        watching = asyncio.ensure_future(self._owed.overdue(self._link.config.silence_s))
        try:
            await asyncio.wait({reading, writing, watching}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                return Fault("unreachable", ConnectionError("the report stream gave no answer in time"))
            # A write fails without a reason; the status is the reader's to learn.
            await asyncio.wait({reading}, timeout=self._link.config.call_s)
            if not reading.done():
                return Fault("unreachable", ConnectionError("the report stream broke"))
            return self._fault_of_end(reading.exception())
        finally:
            call.cancel()
            for task in (reading, writing, watching):
                task.cancel()
            await asyncio.gather(reading, writing, watching, return_exceptions=True)

    def _fault_of_end(self, error: BaseException | None) -> Fault:
        if error is None:
            return Fault("unreachable", ConnectionError("the controller closed the report stream"))
        if not isinstance(error, grpc.RpcError):
            if isinstance(error, Exception):
                return Fault("final", error)
            raise error
        fault = fault_of(error)
        if isinstance(fault.error, SequenceGapError):
            with self._lock:
                self._window.on_reconnect(fault.error.expected - 1)
            return Fault("unreachable", fault.error)
        return fault

    async def _write(self, call: StreamCall) -> None:
        # A stream that ended refuses writes with either error; the reader learns why.
        first = True
        with contextlib.suppress(asyncio.InvalidStateError, grpc.RpcError):
            while True:
                with self._lock:
                    self._poked = False
                    self._wake.clear()
                    batch = self._window.next_batch()
                # A new stream speaks at once: its answer says whether the session lives.
                if batch is not None or first or await self._heartbeat_due():
                    first = False
                    request = self._request(batch)
                    self._owed.sent()
                    await call.write(request)

    def _request(self, batch: FormedBatch | None) -> bytes:
        with self._lock:
            request = pb.StreamReportsRequest(
                worker=self._link.identity(),
                acked_through=self._window.applied,
                notices_through=self._window.notices_handled,
            )
        parts = wire.field(pb.StreamReportsRequest, "batch", batch.parts) if batch is not None else []
        return b"".join((request.SerializeToString(), *parts))

    async def _heartbeat_due(self) -> bool:
        """Wait for something to send; True: nothing came in time."""
        return not await set_within(self._wake, self._link.lease_time_s / 3)

    async def _read(self, call: StreamCall, patience: Patience) -> None:
        while True:
            response = await call.read()
            if not isinstance(response, pb.StreamReportsResponse):
                return
            self._link.check_header(response.header)
            with self._lock:
                notices = self._window.on_ack(response.ack.applied, response.ack.notices)
            patience.reset()
            self._owed.answered()
            self._answered.set()
            for notice in notices:
                self._on_notice(notice)
            self._step()
            self._wake.set()

    def _step(self) -> None:
        """Let everyone who waits for progress look again."""
        self._progress.set()
        self._progress = asyncio.Event()

    async def _next_step(self, end: float, deadline_s: float, what: str, cause: object = "") -> None:
        if not await set_within(self._progress, end - time.monotonic()):
            raise DeadlineError(what, deadline_s, str(cause))


class _Owed:
    """How long a stream has owed an answer."""

    def __init__(self) -> None:
        self._messages = 0
        self._since = 0.0
        self._some = asyncio.Event()

    def sent(self) -> None:
        """A message goes out; its answer is owed from now on."""
        if self._messages == 0:
            self._since = time.monotonic()
        self._messages += 1
        self._some.set()

    def answered(self) -> None:
        """An answer came: the next one is owed from now on. One that comes twice shows as much, and is owed once."""
        self._messages = max(0, self._messages - 1)
        self._since = time.monotonic()
        if self._messages == 0:
            self._some.clear()

    async def overdue(self, longest_s: float) -> None:
        """Return when answers were owed for so long and none came."""
        while True:
            await self._some.wait()
            left_s = self._since + longest_s - time.monotonic()
            if left_s <= 0:
                return
            await asyncio.sleep(left_s)
