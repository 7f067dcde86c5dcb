"""The save that goes on while training does.

* One at a time: what was copied for it is all the memory that asynchronous saves take. The next save waits for it.
* It runs on a thread of its own. What it meets is kept, and raised once, by the user's next call, which has then done nothing.
* A wait for it ends with the connection, and at a deadline. The thread itself is a daemon: it keeps no process alive.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from cosmos_ctrl.core.errors import ControlError
from cosmos_worker.client import Connection
from cosmos_worker.commands import SaveWork
from cosmos_worker.errors import DeadlineError, SaveFailedError

_log = logging.getLogger(__name__)

#: Seconds between two looks at the connection while waiting.
_LOOK_S = 0.1


class Background:
    """See the module. Called by the user's thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._finished, self._released = threading.Event(), threading.Event()
        self._finished.set()
        self._released.set()
        self._failure: SaveFailedError | None = None

    def start(self, command: SaveWork, finish: Callable[[], None], release: Callable[[], None]) -> None:
        """Run `finish`, then `release`, on a thread. The save before is over: see `wait_released`.

        Args:
            command: what is saved.
            finish: writes, and tells the controller; what it raises is the save's failure.
            release: lets go of the files and the memory, and may have to wait for that; raises nothing.
        """
        self._finished, self._released = threading.Event(), threading.Event()
        arguments = (command, finish, release, self._finished, self._released)
        threading.Thread(target=self._run, args=arguments, name="cosmos-save", daemon=True).start()

    def check(self) -> None:
        """Raise what the save met, once.

        Raises:
            SaveFailedError: it is abandoned.
            ControlError, DeadlineError: the execution is over for this process, which is why.
        """
        failure, self._failure = self._failure, None
        if failure is None:
            return
        if self._connection.finishing and isinstance(failure.__cause__, ConnectionError):
            # The end comes only when every save is over at the controller; what is lost is its word about it.
            _log.info("the end of the save was not heard of: %s", failure)
            return
        if isinstance(failure.__cause__, ControlError | ConnectionError):
            # The end of the connection is the news, and this call is where the user hears of it.
            self._connection.check()
        raise failure

    def wait_released(self, total_s: float) -> None:
        """Wait until the save is over and its memory is free; then `check`.

        Raises:
            DeadlineError: it is not, after `total_s`.
        """
        self._wait(self._released, total_s)

    def wait_finished(self, total_s: float) -> None:
        """Wait until the save has succeeded or failed; then `check`.

        Raises:
            DeadlineError: it has not, after `total_s`.
        """
        self._wait(self._finished, total_s)

    def _wait(self, event: threading.Event, total_s: float) -> None:
        started = time.monotonic()
        while not event.wait(_LOOK_S):
            # A failure is raised at once, though its memory may not be free yet.
            self.check()
            self._connection.check()
            if time.monotonic() - started >= total_s:
                raise DeadlineError("the end of the asynchronous save before", total_s)
        self.check()

    def _run(
        self,
        command: SaveWork,
        finish: Callable[[], None],
        release: Callable[[], None],
        finished: threading.Event,
        released: threading.Event,
    ) -> None:
        try:
            with self._connection.aside():
                finish()
        except BaseException as error:  # torch has some that are no Exception
            _log.warning("the save of step %d failed: %s", command.step, error)
            failure = SaveFailedError(command.step, command.checkpoint_id, f"{type(error).__name__}: {error}")
            failure.__cause__ = error
            self._failure = failure
        finally:
            finished.set()
            try:
                release()
            finally:
                released.set()
