"""Waiting with a deadline, without `asyncio.wait_for`: before Python 3.12 that one loses a cancellation which comes at the
moment when the wait is over, and the cancelled task goes on."""

from __future__ import annotations

import asyncio


async def set_within(event: asyncio.Event, deadline_s: float) -> bool:
    """Wait for `event`; False: it was not set in time."""
    if event.is_set():
        return True
    waiter = asyncio.ensure_future(event.wait())
    try:
        done, _ = await asyncio.wait({waiter}, timeout=max(0.0, deadline_s))
        return bool(done)
    finally:
        waiter.cancel()
