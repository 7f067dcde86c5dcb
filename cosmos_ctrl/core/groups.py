"""A prompt group as values: what it is, what was reported of it, what is handed to a worker and told to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from cosmos_ctrl.core.errors import MalformedError
from cosmos_ctrl.core.execution import Incarnation
from cosmos_ctrl.core.sampling import Prompt

Outcome = Literal["completed", "discarded", "failed", "returned"]


Disposition = Literal["trained", "discarded", "returned", "payload_lost"]


Refusal = Literal["LEASE_LOST", "RETIRED", "ALREADY_REPORTED", "ENDED"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRows:
    """Rollout reports that share one outcome, in columns: one row per group and word of 64 completions."""

    outcome: Outcome
    groups: Sequence[int]
    leases: Sequence[int]
    masks: Sequence[int]
    words: Sequence[int] = ()
    """Empty: word 0 in every row."""
    reason: str = ""
    lowest_versions: Sequence[int] = ()
    highest_versions: Sequence[int] = ()
    rewards: Sequence[float] = ()
    codec: str = ""
    payloads: Sequence[bytes] = ()
    handles: Sequence[str] = ()

    def check_shape(self) -> int:
        """Completions in all rows; raises MalformedError unless the columns fit each other."""
        rows = len(self.groups)
        completed = self.outcome == "completed"
        for name, column in (("leases", self.leases), ("masks", self.masks), ("words", self.words)):
            if len(column) != rows and not (name == "words" and not column):
                raise MalformedError(what=f"{len(column)} {name} for {rows} groups")
        versions = rows if completed else 0
        if len(self.lowest_versions) != versions or len(self.highest_versions) != versions:
            raise MalformedError(what=f"{len(self.lowest_versions)} versions for {rows} {self.outcome} rows")
        if any(map(int.__gt__, self.lowest_versions, self.highest_versions)):
            raise MalformedError(what="a lowest weight version above the highest")
        if not all(self.masks):
            raise MalformedError(what="a row without completions")
        completions = sum(map(int.bit_count, self.masks))
        if len(self.rewards) != (completions if completed else 0):
            raise MalformedError(what=f"{len(self.rewards)} rewards for {completions} {self.outcome} completions")
        # The sum is finite unless one is not, or the largest doubles are meant: only then each is looked at.
        if not math.isfinite(sum(self.rewards)) and not all(map(math.isfinite, self.rewards)):
            raise MalformedError(what="a reward that is not a finite number")
        for name, values in (("payloads", self.payloads), ("handles", self.handles)):
            if values and (not completed or len(values) != completions):
                raise MalformedError(what=f"{len(values)} {name} for {completions} {self.outcome} completions")
        if self.payloads and self.handles:
            raise MalformedError(what="both payloads and handles in one block")
        if (self.outcome in ("discarded", "failed")) != bool(self.reason):
            raise MalformedError(what="a reason is due for what is discarded or failed, and only for that")
        return completions


@dataclass(slots=True)
class Segment:
    """Completions of one reported row: `rewards`, `payloads` and `handles` follow the set bits of `reported`, low first."""

    reported: int
    held: int
    """Those of them that were accepted and are still held: not settled, not to be generated again."""
    rewards: Sequence[float]
    lowest_version: int
    highest_version: int
    producer: Incarnation
    codec: str = ""
    payloads: Sequence[bytes] = ()
    handles: Sequence[str] = ()

    def position(self, completion: int) -> int:
        """Where a completion stands in the columns."""
        return (self.reported & ((1 << completion) - 1)).bit_count()

    def reward_sum(self, mask: int) -> float:
        """Of the completions of `mask` that are held."""
        bits, total = self.held & mask, 0.0
        while bits:
            total += self.rewards[self.position((bits & -bits).bit_length() - 1)]
            bits &= bits - 1
        return total


@dataclass(frozen=True, slots=True)
class CompletionPayload:
    """One completion of a command, as its producer reported it."""

    completion: int
    reward: float
    lowest_version: int
    highest_version: int
    codec: str
    payload: bytes | None
    handle: str | None


@dataclass(slots=True)
class Group:
    """One prompt's completions, as far as they are not settled."""

    id: int
    prompt: Prompt
    size: int
    pending: int
    leased: int = 0
    ready: int = 0
    training: int = 0
    lease: int = 0
    """Newest lease number; 0 before the first."""
    holder: Incarnation | None = None
    deadline: float | None = None
    failures: int = 0
    """Leases of it that reported a failure."""
    failed_lease: int = 0
    """The newest of them."""
    trained: int = 0
    segments: list[Segment] = field(default_factory=list)

    @property
    def unsettled(self) -> int:
        """Every completion that is still in the table."""
        return self.pending | self.leased | self.ready | self.training


@dataclass(frozen=True, slots=True)
class Lease:
    """A group as handed to a worker."""

    group: int
    number: int
    prompt: Prompt
    size: int
    mask: int
    """Completions to generate."""
    deadline_s: float | None


@dataclass(frozen=True, slots=True)
class PayloadsFreed:
    """Notice: the producer frees these payloads. Rows of (group, mask)."""

    rows: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class LeasesCancelled:
    """Notice: these lease numbers are not wanted any more."""

    leases: tuple[int, ...]
