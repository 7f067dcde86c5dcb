"""The sampling replay ledger: which place in the sampler's stream is safe to resume from.

Invariants, at every moment:

* a boundary is a place to resume from; the *cursor* is the boundary after the newest draw, the *safe boundary* the one
  after the longest prefix of draws whose completions are all settled;
* budget = settled in that prefix + the safe boundary's remaining completions
  = issued + the cursor's remaining completions; what settles out of order changes neither;
* the safe boundary never moves back, and moves only over a wholly settled prefix;
* nothing that the ledger returns shares memory with a live sampler: states are encoded bytes.

Tokens are consecutive integers; one token is one prompt group. The first one is given by the owner, so that a token of an
earlier execution is told apart from one that was never issued.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from cosmos_ctrl.core.errors import UnknownWorkError, WindowFullError
from cosmos_ctrl.core.resume import require_count
from cosmos_ctrl.core.state import EncodedState


@dataclass(frozen=True, slots=True, init=False)
class SamplingBoundary:
    """A place in the sampler's stream to resume from. Immutable; the state is encoded when it is made."""

    epoch: int
    """Sampling epoch, from 1."""
    remaining_completions: int
    """Completions that the budget holds beyond this place."""
    encoded_state: EncodedState
    """The sampler's position, as bytes."""

    def __init__(self, *, epoch: int, sampler_state: Any, remaining_completions: int) -> None:
        """`sampler_state` is a plain value, bytes, or an `EncodedState`.

        Raises:
            TypeError: a count is not an int, or the state cannot be encoded faithfully.
            ValueError: a count is negative, or the epoch is not positive.
        """
        object.__setattr__(self, "epoch", require_count("epoch", epoch, least=1))
        object.__setattr__(self, "remaining_completions", require_count("remaining_completions", remaining_completions))
        object.__setattr__(self, "encoded_state", EncodedState.of(sampler_state))

    @property
    def sampler_state(self) -> Any:
        """The sampler's position, as a fresh copy at every access."""
        return self.encoded_state.decode()


class Settlement(Enum):
    """What a call to `SamplingReplayLedger.settle` did. Only SETTLED is true."""

    SETTLED = "settled"
    """The completion was outstanding and is settled now."""
    DUPLICATE = "duplicate"
    """It was settled before; its draw is still in the window."""
    RETIRED = "retired"
    """Its draw is behind the safe boundary."""
    STALE_EXECUTION = "stale_execution"
    """The token belongs to an earlier execution."""
    UNKNOWN = "unknown"
    """It was never issued."""

    def __bool__(self) -> bool:
        return self is Settlement.SETTLED


@dataclass(frozen=True, slots=True)
class LedgerStatistics:
    """A frozen snapshot of the ledger's counters."""

    issued_completions: int
    settled_completions: int
    window_draws: int
    """Draws issued beyond the safe boundary."""
    window_completions: int
    """Completions issued beyond the safe boundary: what a resume from here repeats at most."""
    window_bytes: int
    """Bytes of sampler state that the window holds."""
    blocking_token: int | None
    """The oldest group with an unsettled completion; None when everything issued is settled."""
    gap_age_s: float
    """Seconds since that group's draw; 0 when there is none."""


@dataclass(frozen=True, slots=True)
class _Draw:
    last_token: int
    boundary: SamplingBoundary
    issued_at: float


class SamplingReplayLedger:
    """Issue draws, settle completions in any order, and ask where it is safe to resume."""

    def __init__(
        self,
        start: SamplingBoundary,
        *,
        first_token: int = 1,
        max_draws: int = 1 << 20,
        max_bytes: int = 1 << 30,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Begin at `start`, nothing outstanding.

        Args:
            start: where the sampler stands: a fresh one, or the boundary of the checkpoint that was resumed.
            first_token: token of the first group; larger than any of an earlier execution.
            max_draws: most draws in the window.
            max_bytes: most bytes of sampler state in the window.
            clock: seconds, for the age of the gap.
        """
        self._first = self._base = self._next = first_token
        self._max_draws, self._max_bytes, self._clock = max_draws, max_bytes, clock
        self._safe = self._cursor = start
        # Per group of the window its unsettled completions, with one bit above them as the mark of its size: a group
        # is settled when only the mark is left.
        self._groups: dict[int, int] = {}
        self._draws: deque[_Draw] = deque()
        self._bytes = 0
        self._budget = start.remaining_completions
        self._settled = 0

    @property
    def cursor(self) -> SamplingBoundary:
        """The boundary after the newest draw. A checkpoint of it would skip what is outstanding."""
        return self._cursor

    @property
    def next_token(self) -> int:
        """The token that the next group will get."""
        return self._next

    def snapshot(self) -> SamplingBoundary:
        """The safe boundary."""
        return self._safe

    def issue(self, after: SamplingBoundary, completions: int = 1) -> int:
        """Record a draw of one group; returns its token. As `issue_draw`."""
        return self.issue_draw(after, (completions,))[0]

    def issue_draw(self, after: SamplingBoundary, sizes: Sequence[int]) -> range:
        """Record a draw of several groups, one per prompt; returns their tokens.

        Args:
            after: the boundary right after the draw.
            sizes: completions of each group, each at least 1.

        Raises:
            ValueError: the budget does not fall by exactly what is issued, or the epoch falls.
            WindowFullError: the window holds as many draws or bytes as it may; nothing is recorded.
        """
        if not sizes:
            raise ValueError("a draw issues at least one group")
        issued = sum(require_count("completions", size, least=1) for size in sizes)
        if after.remaining_completions != self._cursor.remaining_completions - issued:
            raise ValueError(
                f"a draw of {issued} completions takes the budget from {self._cursor.remaining_completions} to "
                f"{self._cursor.remaining_completions - issued}, not to {after.remaining_completions}"
            )
        if after.epoch < self._cursor.epoch:
            raise ValueError(f"the epoch falls from {self._cursor.epoch} to {after.epoch}")
        self._require_room(len(after.encoded_state.data))
        tokens = range(self._next, self._next + len(sizes))
        self._groups.update(zip(tokens, ((2 << size) - 1 for size in sizes), strict=True))
        self._draws.append(_Draw(tokens[-1], after, self._clock()))
        self._bytes += len(after.encoded_state.data)
        self._next = tokens[-1] + 1
        self._cursor = after
        return tokens

    def has_room(self, state_bytes: int | None = None) -> bool:
        """Whether another draw fits in the window, with a state of `state_bytes`, or as large as the newest.

        One always fits in an empty window: a limit that refused the only draw could never be relieved.
        """
        size = len(self._cursor.encoded_state.data) if state_bytes is None else state_bytes
        return not self._draws or (len(self._draws) < self._max_draws and self._bytes + size <= self._max_bytes)

    def settle(self, token: int, completion: int = 0) -> Settlement:
        """Settle one completion of a group; terminal, whatever the reason. True only the first time."""
        if token < self._first:
            return Settlement.STALE_EXECUTION
        if token >= self._next or completion < 0:
            return Settlement.UNKNOWN
        if token < self._base:
            return Settlement.RETIRED
        if completion >= self.size(token):
            return Settlement.UNKNOWN
        return Settlement.SETTLED if self.settle_mask(token, 1 << completion) else Settlement.DUPLICATE

    def settle_mask(self, token: int, mask: int) -> int:
        """Settle the completions of `mask` (bit i is completion i); returns those that this call settled.

        Raises:
            UnknownWorkError: the group was never issued here, or `mask` has bits outside it; nothing is settled.
        """
        if self._first <= token < self._base:
            return 0
        state = self._groups.get(token, 0)
        if mask < 0 or mask.bit_length() >= max(state.bit_length(), 1):
            raise UnknownWorkError(
                what=f"group {token}" if not state else f"completion mask {mask:#x} of group {token}"
            )
        newly = state & mask
        if not newly:
            return 0
        state ^= newly
        self._groups[token] = state
        self._settled += newly.bit_count()
        if token == self._base and state & (state - 1) == 0:
            self._advance()
        return newly

    def size(self, token: int) -> int:
        """Completions of a group in the window, settled or not."""
        return self._groups[token].bit_length() - 1

    def unsettled(self, token: int) -> int:
        """Mask of a group's unsettled completions; 0 when it is settled or retired."""
        state = self._groups.get(token, 1)
        return state ^ (1 << (state.bit_length() - 1))

    def statistics(self) -> LedgerStatistics:
        """Counters of this moment."""
        return LedgerStatistics(
            issued_completions=self._budget - self._cursor.remaining_completions,
            settled_completions=self._settled,
            window_draws=len(self._draws),
            window_completions=self._safe.remaining_completions - self._cursor.remaining_completions,
            window_bytes=self._bytes,
            blocking_token=self._base if self._draws else None,
            gap_age_s=self._clock() - self._draws[0].issued_at if self._draws else 0.0,
        )

    def _require_room(self, state_bytes: int) -> None:
        if self.has_room(state_bytes):
            return
        if len(self._draws) >= self._max_draws:
            raise WindowFullError(what="draws in the window", limit=self._max_draws, found=len(self._draws) + 1)
        raise WindowFullError(
            what="bytes of sampler state in the window", limit=self._max_bytes, found=self._bytes + state_bytes
        )

    def _advance(self) -> None:
        groups, base = self._groups, self._base
        while base < self._next and groups[base] & (groups[base] - 1) == 0:
            del groups[base]
            base += 1
        self._base = base
        while self._draws and self._draws[0].last_token < base:
            draw = self._draws.popleft()
            self._safe = draw.boundary
            self._bytes -= len(draw.boundary.encoded_state.data)
