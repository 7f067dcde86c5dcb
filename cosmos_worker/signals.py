"""A trainer rank that is told to stop: the first SIGTERM or SIGUSR1 (Slurm's warning) stops the run well, a second one this rank at once.

* They are heard by the client's thread, by way of Python's wakeup descriptor: a main thread that is stuck in a collective keeps nobody from
  hearing them.
* They are heard from the agreement on: before, nothing is worth saving, and a rank ends of them as any process does.
* What the application handles itself, before or later, stays the application's; so does everything where the wakeup descriptor is taken
  already, or where the main thread does not confirm. Where it is taken later, by asyncio say, the main thread hears them.
* A process that is forked off has them as they were: its signals are none of the run's.
* Signals within a second are one: a launcher passes on what its whole process group was sent.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
import time

from cosmos_worker.client import Connection
from cosmos_worker.errors import EXIT_ENDED, exit_code_for
from cosmos_worker.training_calls import TrainingCalls

_log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_SAME_S = 1.0
_TELL_S = 2.0
"""How long a second signal waits for the controller to hear of it."""


_installed: list[StopSignals] = []
"""At most one: there is one wakeup descriptor."""


class StopSignals:
    """See the module."""

    def __init__(self, connection: Connection, calls: TrainingCalls) -> None:
        self._connection, self._calls = connection, calls
        self._handled: tuple[signal.Signals, ...] = ()
        self._first_at: float | None = None
        # Made when they are installed.
        self._reading: socket.socket
        self._writing: socket.socket

    def install(self) -> None:
        """Hear them from now on, where nobody else does."""
        if threading.current_thread() is not threading.main_thread():
            return
        handled = tuple(number for number in _SIGNALS if signal.getsignal(number) is signal.SIG_DFL)
        before = signal.set_wakeup_fd(-1)
        if before != -1 or not handled:
            signal.set_wakeup_fd(before)
            return
        self._reading, self._writing = socket.socketpair()
        for end in (self._reading, self._writing):
            end.setblocking(False)
        self._connection.listen(self._reading, self._read)
        signal.set_wakeup_fd(self._writing.fileno(), warn_on_full_buffer=False)
        self._handled = handled
        for number in handled:
            signal.signal(number, _wake_up)
        _installed.append(self)

    def restore(self) -> None:
        """Hand them back. Idempotent."""
        if self._handled:
            _installed.remove(self)
            self._let_go()
            self._connection.hang_up(self._reading)
            self._writing.close()

    def _let_go(self) -> None:
        handled, self._handled = self._handled, ()
        for number in handled:
            if signal.getsignal(number) is _wake_up:
                signal.signal(number, signal.SIG_DFL)
        descriptor = signal.set_wakeup_fd(-1)
        if descriptor not in (-1, self._writing.fileno()):
            signal.set_wakeup_fd(descriptor)

    def hear_in_main_thread(self, number: int) -> None:
        """Hear what did not come by the descriptor, because that is somebody else's now."""
        descriptor = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(descriptor)
        if descriptor != self._writing.fileno():
            self._connection.soon(lambda: self._hear(signal.Signals(number).name))

    # -- on the client's loop

    def _read(self) -> None:
        for number in self._reading.recv(64):
            if number in self._handled and signal.getsignal(number) is _wake_up:
                self._hear(signal.Signals(number).name)

    def _hear(self, name: str) -> None:
        now, connection = time.monotonic(), self._connection
        if connection.finishing:
            connection.end_process(f"{name} after the end", 0)
        elif connection.terminal is not None:
            connection.end_process(f"{name} after the end", exit_code_for(connection.terminal) or EXIT_ENDED)
        elif self._first_at is None:
            self._first_at = now
            _log.info("%s: %s; the run finishes issued updates, saves and ends", connection.place, name)
            connection.spawn(self._ask(f"{name} to {connection.place}"))
        elif now - self._first_at >= _SAME_S:
            connection.spawn(self._end(f"{name} again"))

    async def _ask(self, reason: str) -> None:
        try:
            await self._calls.ask_to_stop(reason, None)
        except Exception as error:
            _log.warning("%s: the stop was not taken: %s", reason, error)
            if self._connection.terminal is not None:
                self._connection.end_process(f"{reason}: {error}", exit_code_for(error) or EXIT_ENDED)

    async def _end(self, reason: str) -> None:
        try:
            await asyncio.wait_for(self._calls.say_end(reason), _TELL_S)
        except Exception as error:
            _log.warning("the controller was not told: %s", error)
        self._connection.end_process(f"{reason}: ending at once, nothing more is saved", EXIT_ENDED)


def _let_go_in_child() -> None:
    # The descriptor is the parent's too: a data loader's worker that is terminated would stop the run.
    while _installed:
        _installed.pop()._let_go()


os.register_at_fork(after_in_child=_let_go_in_child)


def _wake_up(number: int, _frame: object) -> None:
    """Without a handler of Python's, nothing is written to the descriptor."""
    for one in _installed:
        one.hear_in_main_thread(number)
