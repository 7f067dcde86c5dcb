"""A TCP proxy on loopback that cuts, holds and records the connections of one client.

* It knows HTTP/2 frames: after a quiet run it says at how many bytes each message of an exchange began and ended, so that a
  sweep can cut there.
* Each new connection takes the next planned cut; without one it is passed on whole.
* It runs on a thread and loop of its own. Tests wait on its state (`until`), never on time.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

Direction = Literal["up", "down"]

DEADLINE_S = 20.0

_PREFACE_BYTES = 24
_FRAME_HEADER_BYTES = 9
_DATA, _HEADERS = 0, 1


@dataclass(frozen=True)
class Cut:
    """The end of a connection: after so many bytes in one direction, none of which is lost."""

    direction: Direction
    after: int


@dataclass
class Recorder:
    """Where messages begin and end in one direction of a connection."""

    skip: int
    seen: int = 0
    ends: list[int] = field(default_factory=list)
    """Offsets after each frame of a call: its headers, a message, its trailers."""
    _pending: bytearray = field(default_factory=bytearray)
    _at: int = 0

    def feed(self, data: bytes) -> None:
        self.seen += len(data)
        self._pending += data
        if self._at == 0:
            if len(self._pending) < self.skip:
                return
            del self._pending[: self.skip]
            self._at = self.skip
        while len(self._pending) >= _FRAME_HEADER_BYTES:
            size = int.from_bytes(self._pending[:3], "big") + _FRAME_HEADER_BYTES
            if len(self._pending) < size:
                return
            kind = self._pending[3]
            del self._pending[:size]
            self._at += size
            if kind in (_DATA, _HEADERS):
                self.ends.append(self._at)


class Proxy:
    """See the module."""

    def __init__(self, target: str) -> None:
        self.retarget(target)
        self.cuts: deque[Cut] = deque()
        self.made: list[Cut] = []
        self.connections = 0
        self.recorders: list[dict[Direction, Recorder]] = []
        self.passed: dict[Direction, int] = {"up": 0, "down": 0}
        self.stalled = False
        """A stall that was asked for has come about."""
        self._room: dict[Direction, int | None] = {"up": None, "down": None}
        self._changed = threading.Condition()
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._call(self._start())

    # -- any thread

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    def plan(self, *cuts: Cut) -> None:
        self.cuts.extend(cuts)

    def hold(self, direction: Direction) -> None:
        """Nothing goes through in that direction until it is released."""
        self._loop.call_soon_threadsafe(self._gates[direction].clear)

    def release(self, direction: Direction) -> None:
        self._loop.call_soon_threadsafe(self._gates[direction].set)

    def stall(self, direction: Direction, after: int) -> None:
        """So many bytes more go through in that direction, in the middle of whatever they are, and then nothing."""
        self._call(self._stall(direction, after))

    def retarget(self, target: str) -> None:
        """New connections go there."""
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))

    def drop(self) -> None:
        """Every connection ends now."""
        self._call(self._drop())

    def until(self, what: Callable[[], Any]) -> None:
        with self._changed:
            assert self._changed.wait_for(what, DEADLINE_S), "the proxy never saw it"

    def close(self) -> None:
        self._call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE_S)
        self._loop.close()

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(DEADLINE_S)

    # -- the loop

    async def _start(self) -> None:
        self._gates = {"up": asyncio.Event(), "down": asyncio.Event()}
        for gate in self._gates.values():
            gate.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._port = self._server.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        self._server.close()
        await self._drop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _stall(self, direction: Direction, after: int) -> None:
        self._room[direction] = after

    async def _drop(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        upstream: asyncio.StreamWriter | None = None
        self._writers.add(writer)
        try:
            answers, upstream = await asyncio.open_connection(*self._target)
            self._writers.add(upstream)
            for one in (writer, upstream):
                one.transport.set_write_buffer_limits(high=0)
            cut = self.cuts.popleft() if self.cuts else None
            recorders: dict[Direction, Recorder] = {"up": Recorder(_PREFACE_BYTES), "down": Recorder(0)}
            self.recorders.append(recorders)
            self._note(lambda: setattr(self, "connections", self.connections + 1))
            pumps = [
                asyncio.ensure_future(self._pump(reader, upstream, "up", cut, recorders["up"])),
                asyncio.ensure_future(self._pump(answers, writer, "down", cut, recorders["down"])),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            for one in (writer, upstream):
                if one is not None:
                    self._writers.discard(one)
                    one.transport.abort()

    async def _pump(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        direction: Direction,
        cut: Cut | None,
        recorder: Recorder,
    ) -> None:
        while data := await source.read(1 << 16):
            await self._gates[direction].wait()
            data = await self._up_to_the_stall(direction, data, sink)
            here = cut is not None and cut.direction == direction and recorder.seen + len(data) >= cut.after
            if cut is not None and here:
                data = data[: cut.after - recorder.seen]
            recorder.feed(data)
            sink.write(data)
            await sink.drain()
            self._note(lambda data=data: self.passed.__setitem__(direction, self.passed[direction] + len(data)))
            if cut is not None and here:
                self._note(lambda: self.made.append(cut))
                return

    async def _up_to_the_stall(self, direction: Direction, data: bytes, sink: asyncio.StreamWriter) -> bytes:
        room = self._room[direction]
        if room is None or len(data) < room:
            self._room[direction] = room and room - len(data)
            return data
        self._room[direction] = None
        self._gates[direction].clear()
        sink.write(data[:room])
        await sink.drain()
        self._note(lambda: setattr(self, "stalled", True))
        await self._gates[direction].wait()
        return data[room:]

    def _note(self, change: Callable[[], Any]) -> None:
        with self._changed:
            change()
            self._changed.notify_all()
