"""Waking who waits: levels, not edges.

* A waiter names the revision it has seen and is woken by any later one; it then looks at the state, not at a message.
* One future per waiter and nothing queued: a slow waiter skips revisions and never misses the last.
"""

from __future__ import annotations

import asyncio


class Revisions:
    """The run's revision, and who waits for a later one."""

    def __init__(self) -> None:
        self.current = 0
        self._waiters: set[asyncio.Future[None]] = set()

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
