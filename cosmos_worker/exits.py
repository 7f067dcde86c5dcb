"""Ends a process whose execution is over and whose main thread does not notice.

* It is armed once, by the first terminal error that the client's thread learns of, and stands down when any client call
  tells the user's code of it, or the client is closed.
* It leaves the traces of all threads behind, so that a collective that hung can be named, and takes no lock that the stuck
  thread may hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
from collections.abc import Callable

from cosmos_worker.errors import exit_code_for


class Watchdog:
    """Waits on the client's loop for the main thread to come back."""

    def __init__(self, grace_s: float, place: str, exit_process: Callable[[int], object] = os._exit) -> None:
        self._grace_s = grace_s
        self._place = place
        self._exit_process = exit_process
        self._stood_down = False
        self._timer: asyncio.TimerHandle | None = None

    def arm(self, loop: asyncio.AbstractEventLoop, error: BaseException) -> None:
        """Start the countdown. On the client's loop."""
        if self._timer is None and not self._stood_down:
            self._timer = loop.call_later(self._grace_s, self._fire, error)

    def stand_down(self) -> None:
        """The user's code knows. From any thread."""
        # Only a flag: cancelling a timer belongs to the loop's thread.
        self._stood_down = True

    def _fire(self, error: BaseException) -> None:
        if self._stood_down:
            return
        code = exit_code_for(error)
        # An execution that ended as it should still leaves a process here that does not end by itself.
        code = code or exit_code_for(TimeoutError())
        text = (
            f"{error}\nThe main thread did not come back to a client call within "
            f"{self._grace_s:g} s; ending process {os.getpid()} with exit code {code}. Where its threads are:"
        )
        self.end_process(text, code, traces=True)

    def end_process(self, text: str, code: int, *, traces: bool = False) -> None:
        """Say why, and end the process at once, as nobody's cleanup can be waited for."""
        with contextlib.suppress(OSError):
            os.write(2, f"cosmos-worker {self._place}: {text}\n".encode())
        if traces:
            with contextlib.suppress(OSError, ValueError):
                faulthandler.dump_traceback(file=2, all_threads=True)
        self._exit_process(code)
