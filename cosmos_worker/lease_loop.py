"""The client-side loop that keeps a rollout process in work, and hears what the controller says about its leases.

* Lease requests are numbered and made one at a time; a reply that was lost is asked for again under its number.
* Everything here runs on the client's loop; the faces in `rollout` read the book and the newest weights from their own.
* Leaving lets the request in flight end, so that no group is leased to a process that is gone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from cosmos_ctrl.v1 import controller_service_pb2 as pb
from cosmos_ctrl.v1 import reports_pb2
from cosmos_worker.client import Connection
from cosmos_worker.errors import DeadlineError
from cosmos_worker.lease_book import LeaseBook
from cosmos_worker.report_items import WORD_BITS, EndItem, RolloutItem, bits_of
from cosmos_worker.transport import duration_of, name_of, set_within
from cosmos_worker.window import Heard

_log = logging.getLogger(__name__)

FreeCallback = Callable[[int, tuple[int, ...]], object]
"""Called with a group and the indices of its completions whose payloads the producer may free."""

#: A controller that answers "nothing" at once is asked again after this pause, in seconds.
_EMPTY_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class Announced:
    """Weights that exist."""

    version: int
    """Completed training steps in them."""
    handle: str
    """Where they are."""


class Leasing:
    """See the module."""

    def __init__(self, on_free: FreeCallback | None) -> None:
        self.book = LeaseBook()
        self.book.on_change = self._changed_from_any_thread
        self.no_more = False
        self.weights: Announced | None = None
        self._in_flight = 0
        self._leaving = False
        self._connection: Connection
        self._change = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._on_free = on_free
        # The callback is the user's and may block; one thread keeps its calls in order.
        self._freeing = ThreadPoolExecutor(1, "cosmos-free") if on_free else None

    def bind(self, connection: Connection) -> None:
        """The connection to lease over, before anything else."""
        self._connection = connection

    def set_in_flight(self, groups: int) -> None:
        """How many groups may be leased and not over, from now on. From any thread."""
        if groups < 1:
            raise ValueError(f"in_flight must be at least 1, not {groups}")
        self._in_flight = groups
        self._changed_from_any_thread()

    # --- on the client's loop ---

    async def start(self) -> None:
        """Begin, once the session is open."""
        self._task = asyncio.ensure_future(self._run())

    async def wait_ready(self, most_s: float | None = None) -> bool:
        """Wait until a group may be popped, or there will be none any more.

        Args:
            most_s: do not wait longer; None: as configured.

        Returns:
            False: there was nothing in `most_s`.

        Raises:
            DeadlineError: the controller had no work for ``idle_total_s``, or groups were handed out and not reported.
        """
        config = self._connection.config
        since, seen = time.monotonic(), (self.no_more, self.book.held)
        end = None if most_s is None else since + most_s
        while not (self.book.has_waiting or self.exhausted):
            if (self.no_more, self.book.held) != seen:
                # Something was handed out, or is over. That the controller has nothing once more is no news.
                since, seen = time.monotonic(), (self.no_more, self.book.held)
            if self.no_more:
                what = f"a report about {self.book.held} groups that were handed out"
                limit_s = config.unfinished_total_s
            else:
                what, limit_s = "work from the controller", config.idle_total_s
            now = time.monotonic()
            left_s = since + limit_s - now if end is None else min(since + limit_s, end) - now
            if not await set_within(self._change, left_s):
                if end is not None and time.monotonic() >= end:
                    return False
                raise DeadlineError(what, limit_s)
        return True

    @property
    def exhausted(self) -> bool:
        """Nothing more will be leased, and every lease is over."""
        return self.no_more and self.book.held == 0

    async def leave(self, reason: str) -> None:
        """Stop leasing, return what is not over, say that this worker has ended, and flush."""
        self._leaving = True
        self._changed()
        connection = self._connection
        config = connection.config
        connection.finishing = self.no_more
        try:
            if self._task is not None:
                await asyncio.wait({self._task}, timeout=config.lease_wait_s + config.call_s)
                self._task.cancel()
            if connection.terminal is None:
                for group in self.book.unfinished():
                    if mask := self.book.take(group, None):
                        await connection.reports.append_waiting(
                            RolloutItem(
                                outcome=reports_pb2.OUTCOME_RETURNED,
                                group=group.group_id,
                                lease=group.lease,
                                mask=mask,
                            )
                        )
                await connection.reports.append_waiting(EndItem(reason))
        finally:
            if self._freeing is not None:
                self._freeing.shutdown(wait=False)
            await connection.finish(flush_s=config.close_s)

    def on_notice(self, heard: Heard) -> None:
        """What the controller says about leases and payloads."""
        notice = heard.notice
        if notice.HasField("cancelled"):
            self.book.cancel(notice.cancelled.leases)
        elif notice.HasField("freed"):
            freed = notice.freed
            self._free(freed.groups, freed.words, freed.masks)
        elif notice.HasField("refused"):
            refused = notice.refused
            _log.info(
                "group %d: report refused with %s",
                refused.group,
                name_of(reports_pb2.RefusalReason, refused.reason),
            )
            if heard.lease and refused.reason != reports_pb2.REFUSAL_REASON_ALREADY_REPORTED:
                self.book.cancel([heard.lease])
            self._free([refused.group], [refused.word], [refused.mask])

    async def _run(self) -> None:
        number = 0
        connection = self._connection
        try:
            while not (self._leaving or self.no_more):
                room = self._in_flight - self.book.held
                if room < 1:
                    await self._change.wait()
                    continue
                number += 1
                await self._lease(number, room)
        except Exception as error:
            connection.fail(error)

    async def _lease(self, number: int, room: int) -> None:
        connection = self._connection
        config = connection.config
        wait = duration_of(config.lease_wait_s)
        started = time.monotonic()
        response = await connection.unary(
            connection.stub.LeasePrompts,
            lambda worker: pb.LeasePromptsRequest(worker=worker, number=number, max_groups=room, wait=wait),
            wait_s=config.lease_wait_s,
            later_total_s=config.idle_total_s,
            # No new work while what was done cannot be reported: what this process has to say comes first.
            after=connection.reports.answered,
        )
        if response.HasField("weights"):
            # Before the groups: whoever sees them sees the weights that came with them.
            self.weights = Announced(response.weights.version, response.weights.handle)
        self.book.add(response.groups)
        self.no_more = response.no_more
        self._changed()
        if not response.groups and not self.no_more and time.monotonic() - started < _EMPTY_PAUSE_S:
            await asyncio.sleep(_EMPTY_PAUSE_S)

    def _free(self, groups: Sequence[int], words: Sequence[int], masks: Sequence[int]) -> None:
        if self._freeing is None:
            return
        for row, (group, mask) in enumerate(zip(groups, masks, strict=True)):
            first = WORD_BITS * words[row] if words else 0
            indices = tuple(first + bit for bit in bits_of(mask))
            self._freeing.submit(self._call_on_free, group, indices)

    def _call_on_free(self, *arguments: Any) -> None:
        assert self._on_free is not None
        try:
            self._on_free(*arguments)
        except Exception:
            _log.exception("on_free failed")

    def _changed_from_any_thread(self) -> None:
        if hasattr(self, "_connection"):
            self._connection.soon(self._changed)

    def _changed(self) -> None:
        self._change.set()
        self._change = asyncio.Event()
