"""Waking who waits: levels, not edges.

* A watcher names the revision it has seen and is woken by any later one; it then looks at the state, not at a message.
* One future per watcher and nothing queued: a slow one skips revisions and never misses the last.
* Calls that wait for the same thing stand in a line, and the first is tried until it finds nothing: then nobody would. So a change
  costs what it gives, not what waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Any


class Revisions:
    """The run's revision, and who waits for a later one."""

    def __init__(self) -> None:
        self.current = 0
        self._waiters: set[asyncio.Future[None]] = set()

    def __len__(self) -> int:
        """Who waits."""
        return len(self._waiters)

    def publish(self, revision: int) -> None:
        """The state is now at `revision`; wakes everyone when that is new."""
        if revision == self.current:
            return
        self.current = revision
        waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def beyond(self, seen: int, timeout_s: float) -> bool:
        """Wait until the revision is not `seen` any more; False when that took longer than `timeout_s`."""
        if self.current != seen:
            return True
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            # Not wait_for: before Python 3.12 it swallows a cancellation that arrives together with the result.
            woken, _ = await asyncio.wait([waiter], timeout=timeout_s)
        finally:
            self._waiters.discard(waiter)
        return bool(woken)


class Line:
    """Calls that wait, first come, first served."""

    def __init__(self, *, shared: bool = True) -> None:
        """`shared`: what the first finds nothing of, nobody finds."""
        self._shared = shared
        self._waiting: dict[asyncio.Future[Any], tuple[str, Callable[[], Any]]] = {}

    def __len__(self) -> int:
        """Who waits."""
        return len(self._waiting)

    async def wait(self, session: str, attempt: Callable[[], Any], timeout_s: float) -> Any:
        """What `attempt` gives, once it gives something; None after `timeout_s`. What it raises is raised here."""
        turn: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[turn] = session, attempt
        try:
            await asyncio.wait([turn], timeout=timeout_s)
            return turn.result() if turn.done() else None
        finally:
            self._waiting.pop(turn, None)
            if turn.done():
                turn.exception()  # it was looked at, also when this call is cancelled meanwhile

    def serve(self, departed: AbstractSet[str] = frozenset()) -> None:
        """Try the first, and the next as long as something is found; and who left, wherever it stands: it waits in vain."""
        for turn, (session, _) in list(self._waiting.items()) if departed or not self._shared else ():
            if not self._shared or session in departed:
                self._try(turn)
        while self._shared and self._waiting and self._try(next(iter(self._waiting))):
            pass

    def _try(self, turn: asyncio.Future[Any]) -> bool:
        _, attempt = self._waiting[turn]
        try:
            found = attempt()
        except Exception as error:  # whatever it is, it is that call's
            turn.set_exception(error)
        else:
            if found is None:
                return False
            turn.set_result(found)
        del self._waiting[turn]
        return True
