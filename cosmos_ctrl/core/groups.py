"""A prompt group as values: what it is, what was reported of it, what is handed to a worker and told to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from cosmos_ctrl.core.execution import Incarnation
from cosmos_ctrl.core.sampling import Prompt

Outcome = Literal["completed", "discarded", "failed", "returned"]


Disposition = Literal["trained", "discarded", "returned", "payload_lost"]


Refusal = Literal["LEASE_LOST", "RETIRED", "ALREADY_REPORTED", "ENDED"]


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
