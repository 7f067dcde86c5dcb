"""A rollout worker: leases prompt groups, hands them to the user, reports what became of them.

* At most `in_flight` groups are leased and not over at any time.
* Newer weights are loaded before a group is handed out that was leased after their announcement.
* Reporting is an append: it waits only while the report window is full, and never blocks the user's loop.
* Leaving the context, however that comes about, returns every lease that is not over, says that this worker has ended, and
  waits for the acknowledgements until a deadline.
* The iteration ends when nothing more will be leased and every group handed out is over.
* One implementation stands under both faces; torch is not needed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from inspect import isawaitable, iscoroutinefunction
from types import TracebackType
from typing import TYPE_CHECKING, Any

from cosmos_ctrl.v1 import reports_pb2
from cosmos_worker.lease_book import LeasedGroup
from cosmos_worker.lease_loop import Announced
from cosmos_worker.report_items import RolloutItem
from cosmos_worker.rollout_base import RolloutBase, RolloutStatistics
from cosmos_worker.rollout_reports import Versions

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Announced", "LeasedGroup", "Rollout", "RolloutStatistics", "SyncRollout"]

_log = logging.getLogger(__name__)


class Rollout(RolloutBase):
    """The asynchronous face; use it with ``async with``."""

    async def __aenter__(self) -> Self:
        opening = self._connection.start()
        try:
            await asyncio.wrap_future(opening)
            await self._connection.acall(self._leasing.start())
        except BaseException as error:
            await self._leave(error)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._leave(error)

    async def groups(self, *, in_flight: int = 8, wait_s: float | None = None) -> AsyncIterator[LeasedGroup]:
        """Groups to generate, until the execution has none left and every one handed out is over.

        Args:
            in_flight: groups leased and not over, at most.
            wait_s: end also when none came for so long; called again, it goes on. For a thread that is a trainer rank too, and
                has to train before there is more.

        Raises:
            StaleExecutionError, SupersededError: this process's execution is over: free buffers and exit with code 10.
            DeadlineError: no work came, or groups that were handed out were never reported.
        """
        self._leasing.set_in_flight(in_flight)
        while True:
            event = self._next()
            if isinstance(event, Announced):
                await self._load(event)
            elif event is not None:
                yield event
            elif self._leasing.exhausted or not await self._connection.acall(self._leasing.wait_ready(wait_s)):
                return

    async def report(
        self,
        group: LeasedGroup,
        index: int,
        payload: Any = None,
        *,
        reward: float,
        versions: Versions = None,
        codec: str | None = None,
    ) -> bool:
        """One completion was generated.

        Args:
            group: as handed out.
            index: which of its pending completions.
            payload: bytes, a value that JSON carries, a `Handle`, or None.
            reward: as the trainer will see it.
            versions: weight version(s) that its tokens were sampled with.
            codec: name for payload bytes of the application's own format.

        Returns:
            False: the lease is over, nothing was sent.

        Raises:
            UsageError: it was reported before, or was not leased.
            DeadlineError: the report window stayed full.
        """
        return await self._say(group, self._completed(group, 1 << index, [payload], [reward], versions, codec))

    async def report_group(
        self,
        group: LeasedGroup,
        *,
        rewards: Sequence[float],
        payloads: Sequence[Any] | None = None,
        versions: Versions = None,
        codec: str | None = None,
    ) -> bool:
        """All pending completions of a group, in the order of `group.pending`; as `report`."""
        mask = self._whole(group, rewards, payloads)
        return await self._say(group, self._completed(group, mask, payloads or (), rewards, versions, codec))

    async def discard(self, group: LeasedGroup, index: int | None = None, *, reason: str) -> bool:
        """A completion, or all that are left, will never be generated; this settles them."""
        return await self._say(group, self._given_up(group, index, reports_pb2.OUTCOME_DISCARDED, reason))

    async def fail(self, group: LeasedGroup, *, reason: str) -> bool:
        """This worker could not generate what is left: leased again, and counted toward the poison limit."""
        return await self._say(group, self._given_up(group, None, reports_pb2.OUTCOME_FAILED, reason))

    async def give_back(self, group: LeasedGroup) -> bool:
        """What is left goes to another worker, at once."""
        return await self._say(group, self._given_up(group, None, reports_pb2.OUTCOME_RETURNED, ""))

    async def flush(self) -> None:
        """Wait until everything said so far is acknowledged.

        Raises:
            DeadlineError: it was not in time.
        """
        await self._connection.acall(self._connection.reports.flush(self._connection.config.report_s))

    async def _say(self, group: LeasedGroup, item: RolloutItem | None) -> bool:
        if item is None:
            return False
        if not self._try(group, item):
            try:
                await self._connection.acall(self._connection.reports.append_waiting(item))
            except BaseException:
                self._leasing.book.undo(group, item.mask)
                raise
        return True

    async def _load(self, weights: Announced) -> None:
        assert self._on_weights is not None
        if iscoroutinefunction(self._on_weights):
            await self._on_weights(weights.version, weights.handle)
        else:
            loaded = await asyncio.to_thread(self._on_weights, weights.version, weights.handle)
            if isawaitable(loaded):
                await loaded
        self._loaded = weights.version

    async def _leave(self, error: BaseException | None) -> None:
        # Shielded: a cancelled task, too, returns its leases.
        work = asyncio.ensure_future(self._leave_now(error))
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait({work})
            raise

    async def _leave_now(self, error: BaseException | None) -> None:
        try:
            await asyncio.wrap_future(self._connection.detached(self._leasing.leave(self._leave_reason(error))))
        except Exception as failure:
            if error is None:
                raise
            _log.warning("leaving after %s: %s", type(error).__name__, failure)
        finally:
            await asyncio.to_thread(self._connection.stop)


class SyncRollout(RolloutBase):
    """The synchronous face; use it with ``with``. Weights are loaded on the calling thread. As `Rollout` otherwise."""

    def __enter__(self) -> Self:
        opening = self._connection.start()
        try:
            opening.result()
            self._connection.call(self._leasing.start())
        except BaseException as error:
            self._leave(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(error)

    def groups(self, *, in_flight: int = 1, wait_s: float | None = None) -> Iterator[LeasedGroup]:
        """As `Rollout.groups`."""
        self._leasing.set_in_flight(in_flight)
        while True:
            event = self._next()
            if isinstance(event, Announced):
                assert self._on_weights is not None
                self._on_weights(event.version, event.handle)
                self._loaded = event.version
            elif event is not None:
                yield event
            elif self._leasing.exhausted or not self._connection.call(self._leasing.wait_ready(wait_s)):
                return

    def report(
        self,
        group: LeasedGroup,
        index: int,
        payload: Any = None,
        *,
        reward: float,
        versions: Versions = None,
        codec: str | None = None,
    ) -> bool:
        """As `Rollout.report`."""
        return self._say(group, self._completed(group, 1 << index, [payload], [reward], versions, codec))

    def report_group(
        self,
        group: LeasedGroup,
        *,
        rewards: Sequence[float],
        payloads: Sequence[Any] | None = None,
        versions: Versions = None,
        codec: str | None = None,
    ) -> bool:
        """As `Rollout.report_group`."""
        mask = self._whole(group, rewards, payloads)
        return self._say(group, self._completed(group, mask, payloads or (), rewards, versions, codec))

    def discard(self, group: LeasedGroup, index: int | None = None, *, reason: str) -> bool:
        """As `Rollout.discard`."""
        return self._say(group, self._given_up(group, index, reports_pb2.OUTCOME_DISCARDED, reason))

    def fail(self, group: LeasedGroup, *, reason: str) -> bool:
        """As `Rollout.fail`."""
        return self._say(group, self._given_up(group, None, reports_pb2.OUTCOME_FAILED, reason))

    def give_back(self, group: LeasedGroup) -> bool:
        """As `Rollout.give_back`."""
        return self._say(group, self._given_up(group, None, reports_pb2.OUTCOME_RETURNED, ""))

    def flush(self) -> None:
        """As `Rollout.flush`."""
        self._connection.call(self._connection.reports.flush(self._connection.config.report_s))

    def _say(self, group: LeasedGroup, item: RolloutItem | None) -> bool:
        if item is None:
            return False
        if not self._try(group, item):
            try:
                self._connection.call(self._connection.reports.append_waiting(item))
            except BaseException:
                self._leasing.book.undo(group, item.mask)
                raise
        return True

    def _leave(self, error: BaseException | None) -> None:
        try:
            self._connection.detached(self._leasing.leave(self._leave_reason(error))).result()
        except Exception as failure:
            if error is None:
                raise
            _log.warning("leaving after %s: %s", type(error).__name__, failure)
        finally:
            self._connection.stop()
