"""What a worker has to say, and how it becomes one batch of packed rows.

* An item is a value: made once by the caller's thread, never changed, sized before it is queued.
* A batch keeps the order in which items were said across kinds: rollouts, completions, weights, end. An item of an earlier
  kind than one already in the batch begins the next batch, because the controller applies a batch kind by kind.
* Rows that share outcome, reason, codec and kind of payload share a block. Completions of one lease that were reported one
  by one share a row as long as they do not overlap; two claims about one completion stay two rows, and the controller
  refuses the second by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from cosmos_ctrl.service import wire
from cosmos_ctrl.v1 import reports_pb2 as pb

WORD_BITS = 64
_WORD = (1 << WORD_BITS) - 1

PayloadKind = Literal["none", "inline", "handle"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutItem:
    """What became of some completions of one lease."""

    outcome: pb.Outcome.ValueType
    group: int
    lease: int
    mask: int
    """Bit i is completion i; of any width, never zero."""
    reason: str = ""
    lowest_version: int = 0
    highest_version: int = 0
    rewards: tuple[float, ...] = ()
    """COMPLETED: one per set bit, low bit first."""
    payload_kind: PayloadKind = "none"
    codec: str = ""
    payloads: tuple[bytes | str, ...] = ()
    """Bytes if inline, text if handles: one per set bit, or none at all."""

    @property
    def completions(self) -> int:
        """How many it is about."""
        return self.mask.bit_count()

    @property
    def size_bytes(self) -> int:
        """At least what it adds to a message."""
        fixed = 96 + len(self.reason.encode()) + len(self.codec) + 24 * self.completions
        return fixed + sum(
            len(payload) if isinstance(payload, bytes) else len(payload.encode()) for payload in self.payloads
        )


@dataclass(frozen=True, slots=True)
class CompletionItem:
    """A TRAIN command is complete on this rank."""

    report: pb.CompletionReport

    completions = 0

    @property
    def size_bytes(self) -> int:
        """What it adds to a message."""
        return self.report.ByteSize() + 16


@dataclass(frozen=True, slots=True)
class WeightsItem:
    """New weights exist."""

    version: int
    handle: str

    completions = 0

    @property
    def size_bytes(self) -> int:
        """What it adds to a message."""
        return 32 + len(self.handle.encode())


@dataclass(frozen=True, slots=True)
class MetricItem:
    """A number for operators."""

    name: str
    value: float

    completions = 0

    @property
    def size_bytes(self) -> int:
        """What it adds to a message."""
        return 32 + len(self.name.encode())


@dataclass(frozen=True, slots=True)
class EndItem:
    """This worker has ended; nothing follows."""

    reason: str

    completions = 0

    @property
    def size_bytes(self) -> int:
        """What it adds to a message."""
        return 32 + len(self.reason.encode())


Item: TypeAlias = RolloutItem | CompletionItem | WeightsItem | MetricItem | EndItem

_ORDER: dict[type[Item], int] = {RolloutItem: 0, CompletionItem: 1, WeightsItem: 2, EndItem: 3}


def kind_order(item: Item) -> int | None:
    """Place of the item's kind in a batch; None: it fits anywhere."""
    return _ORDER.get(type(item))


@dataclass(frozen=True, slots=True)
class FormedBatch:
    """A batch as it goes out, each time."""

    number: int
    parts: Sequence[bytes]
    """A `ReportBatch`, encoded. The payloads are the items' own."""
    leases: Sequence[Sequence[int]]
    """Of each row of each block, for what is said of a row."""


def form_batch(number: int, items: Iterable[Item]) -> FormedBatch:
    """The batch of these items, which are in an order that one batch keeps."""
    batch = pb.ReportBatch(number=number)
    blocks: dict[tuple[object, ...], _Block] = {}
    metrics: dict[str, float] = {}
    for item in items:
        if isinstance(item, RolloutItem):
            key = (item.outcome, item.reason, item.codec, item.payload_kind)
            block = blocks.get(key)
            if block is None:
                block = blocks[key] = _Block(item)
            block.add(item)
        elif isinstance(item, CompletionItem):
            batch.completions.append(item.report)
        elif isinstance(item, WeightsItem):
            batch.weights.add(version=item.version, handle=item.handle)
        elif isinstance(item, MetricItem):
            metrics[item.name] = item.value
        else:
            batch.end.reason = item.reason
            batch.end.SetInParent()
    # Only the last value of a name is ever shown.
    for name, value in metrics.items():
        batch.metrics.add(name=name, value=value)
    parts = [batch.SerializeToString()]
    for block in blocks.values():
        parts += wire.field(pb.ReportBatch, "rollouts", block.encode())
    return FormedBatch(number, parts, [block.leases for block in blocks.values()])


class _Row:
    __slots__ = ("group", "highest", "lease", "lowest", "mask", "parts", "word")

    def __init__(self, group: int, lease: int, word: int, lowest: int, highest: int) -> None:
        self.group = group
        self.lease = lease
        self.word = word
        self.mask = 0
        self.lowest = lowest
        self.highest = highest
        self.parts: list[_Part] = []
        """What was reported of it, in the order in which it was."""

    def columns(self) -> tuple[Sequence[float], Sequence[bytes | str]]:
        """Rewards and payloads in the order of the bits."""
        if len(self.parts) == 1:  # most groups are reported whole
            return self.parts[0][1:]
        rewards: dict[int, float] = {}
        payloads: dict[int, bytes | str] = {}
        for mask, some_rewards, some_payloads in self.parts:
            rewards.update(zip(bits_of(mask), some_rewards, strict=True))
            payloads.update(zip(bits_of(mask), some_payloads, strict=False))  # there may be none
        return [rewards[bit] for bit in sorted(rewards)], [payloads[bit] for bit in sorted(payloads)]


_Part = tuple[int, Sequence[float], Sequence[bytes | str]]
"""Mask, rewards and payloads of completions that were reported together."""


class _Block:
    """Rows that share a RolloutRows message."""

    def __init__(self, first: RolloutItem) -> None:
        self._first = first
        self._rows: list[_Row] = []
        self._latest: dict[tuple[int, int, int], _Row] = {}

    def add(self, item: RolloutItem) -> None:
        start = 0
        for word, mask in words_of(item.mask):
            key = (item.group, item.lease, word)
            row = self._latest.get(key)
            if row is None or row.mask & mask:
                row = self._latest[key] = _Row(item.group, item.lease, word, item.lowest_version, item.highest_version)
                self._rows.append(row)
            end = start + mask.bit_count()
            row.mask |= mask
            row.lowest = min(row.lowest, item.lowest_version)
            row.highest = max(row.highest, item.highest_version)
            row.parts.append((mask, item.rewards[start:end], item.payloads[start:end]))
            start = end

    @property
    def leases(self) -> list[int]:
        """Of each row."""
        return [row.lease for row in self._rows]

    def encode(self) -> list[bytes]:
        """The parts of its message."""
        first = self._first
        rows = pb.RolloutRows(outcome=first.outcome, reason=first.reason, payload_codec=first.codec)
        rows.groups.extend([row.group for row in self._rows])
        rows.leases.extend(self.leases)
        rows.masks.extend([row.mask for row in self._rows])
        if any(row.word for row in self._rows):
            rows.words.extend([row.word for row in self._rows])
        inline: list[bytes] = []
        if first.outcome == pb.OUTCOME_COMPLETED:
            rows.lowest_versions.extend([row.lowest for row in self._rows])
            rows.highest_versions.extend([row.highest for row in self._rows])
            for row in self._rows:
                rewards, payloads = row.columns()
                rows.rewards.extend(rewards)
                # One kind in a block: it is part of what rows share.
                for payload in payloads:
                    if isinstance(payload, bytes):
                        inline += wire.field(pb.RolloutRows, "payloads", [payload])
                    else:
                        rows.handles.append(payload)
        return [rows.SerializeToString(), *inline]


def bits_of(mask: int) -> Iterator[int]:
    """Set bits, low first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def words_of(mask: int) -> Iterator[tuple[int, int]]:
    """(word index, 64-bit mask) of a mask of any width, words without bits left out."""
    word = 0
    while mask:
        if low := mask & _WORD:
            yield word, low
        mask >>= WORD_BITS
        word += 1


def mask_of_words(masks: Sequence[int]) -> int:
    """One mask of any width from consecutive 64-bit words."""
    return sum(mask << WORD_BITS * word for word, mask in enumerate(masks))
