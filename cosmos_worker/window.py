"""The reports of one incarnation that the controller has not acknowledged: plain state, no clock, no transport.

* Items become batches in the order they were appended; batches are numbered from 1 without gaps, and a batch once formed
  never changes, so it is sent again byte for byte.
* What is acknowledged is forgotten; what is not is sent again, in order, after a rewind. An acknowledgement is cumulative,
  and an old or repeated one changes nothing.
* Bounded: in completions, bytes and batches. An append that does not fit is refused and changes nothing; one item always
  fits into an empty window.
* Batching is natural: while a batch is out, items gather for the next one; a full one goes out without waiting.
* A notice is handed out once, by number, however often it comes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from cosmos_ctrl.core.errors import MessageTooLargeError, SequenceGapError, WindowFullError
from cosmos_ctrl.v1 import reports_pb2 as pb
from cosmos_worker.errors import ProtocolError
from cosmos_worker.report_items import FormedBatch, Item, RolloutItem, form_batch, kind_order

#: Room in a message for everything that is not items: identity, numbers, framing.
_OVERHEAD_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowLimits:
    """What a window holds at most."""

    batches: int = 64
    """Formed and unacknowledged."""
    batch_completions: int = 4096
    """In one batch; an item with more has a batch of its own."""
    batch_bytes: int = 4 << 20
    """After so many a batch goes out without waiting; an item with more has a batch of its own."""
    completions: int = 1 << 17
    """In the whole window."""
    total_bytes: int = 256 << 20
    """In the whole window."""
    message_bytes: int = 64 << 20
    """No item and no batch is larger."""

    @property
    def batch_room(self) -> int:
        """Bytes of items that make a batch full."""
        return min(self.batch_bytes, self.message_bytes - _OVERHEAD_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowStatistics:
    """How full a window is."""

    appended: int
    """Items since the start."""
    acknowledged: int
    """Items since the start."""
    pending_items: int
    """Not in a batch yet."""
    batches: int
    """Formed and unacknowledged."""
    completions: int
    """Unacknowledged."""
    bytes: int
    """Unacknowledged, estimated from above."""
    applied: int
    """Highest batch number acknowledged."""
    notices_handled: int
    """Highest notice number handed out."""


@dataclass(frozen=True, slots=True)
class Heard:
    """A notice, and what it was about."""

    notice: pb.Notice
    lease: int
    """Of a refused row: its lease number; 0 where the batch is forgotten, and for other notices."""


@dataclass(frozen=True, slots=True)
class _Formed:
    batch: FormedBatch
    last_item: int
    completions: int
    size_bytes: int


class ReportWindow:
    """See the module. Not thread-safe: its owner holds a lock."""

    def __init__(self, limits: WindowLimits | None = None) -> None:
        self.limits = limits or WindowLimits()
        """May be replaced when the controller tells its own."""
        self._pending: deque[tuple[Item, int]] = deque()
        self._formed: deque[_Formed] = deque()
        self._unsent = 0
        """How many of `_formed`, counted from its end, go out (again)."""
        self._appended = 0
        self._acknowledged = 0
        self._numbered = 0
        self._applied = 0
        self._notices = 0
        self._completions = 0
        self._bytes = 0
        self._pending_completions = 0
        self._pending_bytes = 0

    def append(self, item: Item) -> int:
        """Queue `item`.

        Returns:
            Its place in the order of all items, from 1; compare with `acknowledged`.

        Raises:
            WindowFullError: there is no room now; nothing was changed.
            MessageTooLargeError: there never will be.
        """
        size = item.size_bytes
        limits = self.limits
        if size > limits.message_bytes // 2:
            self._require_fit(item, size)
        if self._completions and self._completions + item.completions > limits.completions:
            raise WindowFullError(
                what="unacknowledged completions",
                limit=limits.completions,
                found=self._completions + item.completions,
            )
        if self._bytes and self._bytes + size > limits.total_bytes:
            raise WindowFullError(what="unacknowledged bytes", limit=limits.total_bytes, found=self._bytes + size)
        self._pending.append((item, size))
        self._appended += 1
        self._completions += item.completions
        self._bytes += size
        self._pending_completions += item.completions
        self._pending_bytes += size
        return self._appended

    def _require_fit(self, item: Item, size: int) -> None:
        limit = self.limits.message_bytes
        if size > limit - _OVERHEAD_BYTES:
            raise MessageTooLargeError(limit=limit - _OVERHEAD_BYTES, found=size)
        # The controller would refuse the whole batch: a payload goes out again with its prompt, in one message.
        if isinstance(item, RolloutItem) and item.payload_kind == "inline":
            largest = max(map(len, item.payloads))
            if largest > limit // 2:
                raise MessageTooLargeError(limit=limit // 2, found=largest)

    def next_batch(self) -> FormedBatch | None:
        """The next batch to send now, each once until a rewind; None: nothing may or needs to go out."""
        if self._unsent == 0:
            if not self._may_form():
                return None
            self._form()
        formed = self._formed[len(self._formed) - self._unsent]
        self._unsent -= 1
        return formed.batch

    def on_ack(self, applied: int, notices: Iterable[pb.Notice] = ()) -> list[Heard]:
        """Forget what is applied.

        Returns:
            The notices that were not handed out before, in order.

        Raises:
            ProtocolError: a batch is acknowledged that was never formed.
        """
        if applied > self._numbered:
            raise ProtocolError(f"the controller acknowledges batch {applied}; only {self._numbered} were sent")
        fresh = []
        for notice in notices:
            if notice.number == self._notices + 1:
                self._notices = notice.number
                fresh.append(Heard(notice, self._lease_of(notice.refused)))
        while self._formed and self._formed[0].batch.number <= applied:
            formed = self._formed.popleft()
            self._acknowledged = formed.last_item
            self._completions -= formed.completions
            self._bytes -= formed.size_bytes
        self._unsent = min(self._unsent, len(self._formed))
        self._applied = max(self._applied, applied)
        return fresh

    def on_reconnect(self, applied: int | None = None) -> None:
        """Send what is unacknowledged again, from the first.

        Args:
            applied: highest batch that the controller says it has applied; None: it has said nothing new.

        Raises:
            SequenceGapError: it has forgotten batches that it had acknowledged: they cannot be sent again.
            ProtocolError: it acknowledges batches that were never sent.
        """
        if applied is not None:
            if applied < self._applied:
                raise SequenceGapError(what="report batch", expected=applied + 1, found=self._applied + 1)
            self.on_ack(applied)
        self._unsent = len(self._formed)

    def drop(self) -> None:
        """Nobody will hear any of it: let go of everything that is not acknowledged."""
        self._pending.clear()
        self._formed.clear()
        self._unsent = self._completions = self._bytes = self._pending_completions = self._pending_bytes = 0

    @property
    def applied(self) -> int:
        """Highest batch number acknowledged."""
        return self._applied

    @property
    def acknowledged(self) -> int:
        """How many items, in order, are acknowledged."""
        return self._acknowledged

    @property
    def appended(self) -> int:
        """How many items there were."""
        return self._appended

    @property
    def notices_handled(self) -> int:
        """Highest notice number handed out."""
        return self._notices

    def statistics(self) -> WindowStatistics:
        """A snapshot."""
        return WindowStatistics(
            appended=self._appended,
            acknowledged=self._acknowledged,
            pending_items=len(self._pending),
            batches=len(self._formed),
            completions=self._completions,
            bytes=self._bytes,
            applied=self._applied,
            notices_handled=self._notices,
        )

    def _lease_of(self, refused: pb.RowRefused) -> int:
        for formed in self._formed:
            if formed.batch.number == refused.batch:
                blocks = formed.batch.leases
                leases = blocks[refused.block] if refused.block < len(blocks) else ()
                return leases[refused.row] if refused.row < len(leases) else 0
        return 0

    def _may_form(self) -> bool:
        limits = self.limits
        if not self._pending or len(self._formed) >= limits.batches:
            return False
        return (
            not self._formed
            or self._pending_completions >= limits.batch_completions
            or self._pending_bytes >= limits.batch_room
        )

    def _form(self) -> None:
        items: list[Item] = []
        completions = size = order = 0
        while self._pending:
            item, item_size = self._pending[0]
            item_order = kind_order(item)
            if items and (
                completions + item.completions > self.limits.batch_completions
                or size + item_size > self.limits.batch_room
                or (item_order is not None and item_order < order)
            ):
                break
            self._pending.popleft()
            items.append(item)
            completions += item.completions
            size += item_size
            order = order if item_order is None else item_order
        self._pending_completions -= completions
        self._pending_bytes -= size
        self._numbered += 1
        self._formed.append(
            _Formed(
                form_batch(self._numbered, items),
                self._appended - len(self._pending),
                completions,
                size,
            )
        )
        self._unsent += 1
