"""The sampling replay ledger: which place in the sampler's stream is safe to resume from.

Invariants, at every moment:

* a boundary is a place to resume from; the *cursor* is the boundary after the newest draw, the *safe boundary* the one
  after the longest prefix of draws whose completions are all settled;
* budget = settled in that prefix + the safe boundary's remaining completions
  = issued + the cursor's remaining completions; what settles out of order changes neither;
* the safe boundary never moves back, and moves only over a wholly settled prefix;
* nothing that the ledger returns shares memory with a live sampler: states are encoded bytes;
* no call but `window` does work that grows with the window, and none with the size of a state.

The window is kept in columns, not in objects: about 100 bytes a group, and nothing for the garbage collector to walk.

Tokens are consecutive integers; one token is one prompt group. The first one is given by the owner, so that a token of an
earlier execution is told apart from one that was never issued.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NoReturn

from cosmos_ctrl.core.errors import UnknownWorkError, WindowFullError
from cosmos_ctrl.core.resume import require_count
from cosmos_ctrl.core.state import EncodedState

_set = object.__setattr__

#: Rows behind the boundary that are not worth moving the others for.
_KEPT_ROWS = 1024


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
        if type(epoch) is not int or epoch < 1:
            require_count("epoch", epoch, least=1)
        if type(remaining_completions) is not int or remaining_completions < 0:
            require_count("remaining_completions", remaining_completions)
        _set(self, "epoch", epoch)
        _set(self, "remaining_completions", remaining_completions)
        _set(self, "encoded_state", EncodedState.of(sampler_state))

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
class LedgerWindow:
    """The window at one moment. Taking it copies references; reading `draws` is what takes time, wherever that is done."""

    safe: SamplingBoundary
    cursor: SamplingBoundary
    _first_token: int
    _last_tokens: array[int]
    _labels: list[Any]
    _groups: list[int]

    def draws(self) -> Iterable[tuple[Any, tuple[int, ...], tuple[int, ...]]]:
        """Each draw, oldest first: its label, its groups' sizes, and the masks of what is settled of them."""
        start = 0
        for label, last_token in zip(self._labels, self._last_tokens, strict=True):
            stop = last_token - self._first_token + 1
            groups = self._groups[start:stop]
            sizes = tuple(group.bit_length() - 1 for group in groups)
            settled = tuple((2 << size) - 1 ^ group for size, group in zip(sizes, groups, strict=True))
            yield label, sizes, settled
            start = stop


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

        Raises:
            ValueError: the budget or a token would not fit in 64 bits, which is what the wire carries.
        """
        if max(start.remaining_completions + first_token, start.epoch) >= 1 << 63:
            raise ValueError(
                f"a budget of {start.remaining_completions} from group {first_token} does not fit in 64 bits"
            )
        self._first = self._base = self._origin = self._beyond = first_token
        self._max_draws, self._max_bytes, self._clock = max_draws, max_bytes, clock
        self._safe = self._cursor = start
        # Groups from token `_origin` on; those before `_base` are settled, and those before `_beyond` are behind the boundary: a draw
        # of several is passed as a whole. Each is the mask of its unsettled completions with one bit above them as the mark of its
        # size: it is settled when only the mark is left.
        self._groups: list[int] = []
        self._whole: dict[int, int] = {}  # by size: whole groups share one object
        # Draws, a row in each column; the first `_settled_draws` are behind the boundary.
        self._settled_draws = 0
        self._last_tokens, self._remaining, self._epochs = array("Q"), array("Q"), array("Q")
        self._issued_at = array("d")
        self._states: list[bytes] = []
        self._codecs: list[str] = []
        self._labels: list[Any] = []
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
        return self._origin + len(self._groups)

    def snapshot(self) -> SamplingBoundary:
        """The safe boundary. It is a value: what settles later does not change it, so a save may take its time."""
        return self._safe

    def window(self) -> LedgerWindow:
        """The draws beyond the safe boundary, with what is settled of them."""
        draws = slice(self._settled_draws, None)
        return LedgerWindow(
            self._safe,
            self._cursor,
            self._beyond,
            self._last_tokens[draws],
            self._labels[draws],
            self._groups[self._beyond - self._origin :],
        )

    def issue(self, after: SamplingBoundary, completions: int = 1) -> int:
        """Record a draw of one group; returns its token. As `issue_draw`."""
        return self.issue_draw(after, (completions,))[0]

    def issue_draw(self, after: SamplingBoundary, sizes: Sequence[int], label: Any = None) -> range:
        """Record a draw of several groups, one per prompt; returns their tokens.

        Args:
            after: the boundary right after the draw.
            sizes: completions of each group, each at least 1.
            label: kept with the draw for `window`; nothing else looks at it.

        Raises:
            ValueError: the budget does not fall by exactly what is issued, or the epoch falls or does not fit in 64 bits.
            WindowFullError: the window holds as many draws or bytes as it may; nothing is recorded.
        """
        if not sizes:
            raise ValueError("a draw issues at least one group")
        issued = 0
        for size in sizes:
            if type(size) is not int or size < 1:
                require_count("completions", size, least=1)
            issued += size
        cursor, state = self._cursor, after.encoded_state
        if after.remaining_completions != cursor.remaining_completions - issued:
            raise ValueError(
                f"a draw of {issued} completions takes the budget from {cursor.remaining_completions} to "
                f"{cursor.remaining_completions - issued}, not to {after.remaining_completions}"
            )
        if after.epoch < cursor.epoch:
            raise ValueError(f"the epoch falls from {cursor.epoch} to {after.epoch}")
        if after.epoch >= 1 << 63:
            raise ValueError(f"epoch {after.epoch} does not fit in 64 bits")
        if not self.has_room(len(state.data)):
            self._raise_full(len(state.data))
        now = self._clock()  # whatever may fail comes before the first change
        groups, whole, first = self._groups, self._whole, self._origin + len(self._groups)
        for size in sizes:
            groups.append(whole.get(size) or whole.setdefault(size, (2 << size) - 1))
        end = self._origin + len(groups)
        self._last_tokens.append(end - 1)
        self._remaining.append(after.remaining_completions)
        self._epochs.append(after.epoch)
        self._issued_at.append(now)
        self._states.append(state.data)
        self._codecs.append(state.codec)
        self._labels.append(label)
        self._bytes += len(state.data)
        self._cursor = after
        return range(first, end)

    def has_room(self, state_bytes: int | None = None) -> bool:
        """Whether another draw fits in the window, with a state of `state_bytes`, or as large as the newest.

        One always fits in an empty window: a limit that refused the only draw could never be relieved.
        """
        draws = len(self._states) - self._settled_draws
        size = len(self._cursor.encoded_state.data) if state_bytes is None else state_bytes
        return not draws or (draws < self._max_draws and self._bytes + size <= self._max_bytes)

    def settle(self, token: int, completion: int = 0) -> Settlement:
        """Settle one completion of a group; terminal, whatever the reason. True only the first time."""
        if token < self._first:
            return Settlement.STALE_EXECUTION
        if token >= self.next_token or completion < 0:
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
        newly = self.unsettled(token) & mask
        self.settle_rows(((token, mask),))
        return newly

    def settle_rows(self, rows: Sequence[tuple[int, int]]) -> int:
        """Settle rows of (token, mask), as a batch of reports brings them; returns how many completions this call settled.

        Raises:
            UnknownWorkError: a group was never issued here, or a mask has bits outside its group; nothing is settled.
        """
        groups, origin, base, end = self._groups, self._origin, self._base, self.next_token
        for token, mask in rows:
            if base <= token < end:
                if mask >> (groups[token - origin].bit_length() - 1):
                    raise UnknownWorkError(what=f"completion mask {mask:#x} of group {token}")
            elif not self._first <= token < base:
                raise UnknownWorkError(what=f"group {token}")
        settled = 0
        for token, mask in rows:
            if token >= base:
                newly = groups[token - origin] & mask
                groups[token - origin] ^= newly
                settled += newly.bit_count()
        self._settled += settled
        if end > base and groups[base - origin].bit_count() == 1:
            self._advance()
        return settled

    def size(self, token: int) -> int:
        """Completions of a group in the window, settled or not.

        Raises:
            KeyError: there is no such group in the window.
        """
        return self._group(token).bit_length() - 1

    def unsettled(self, token: int) -> int:
        """Mask of a group's unsettled completions; 0 when it is settled or retired, or was never issued."""
        if not self._base <= token < self.next_token:
            return 0
        group = self._group(token)
        return group ^ (1 << (group.bit_length() - 1))

    def statistics(self) -> LedgerStatistics:
        """Counters of this moment."""
        draws = len(self._states) - self._settled_draws
        return LedgerStatistics(
            issued_completions=self._budget - self._cursor.remaining_completions,
            settled_completions=self._settled,
            window_draws=draws,
            window_completions=self._safe.remaining_completions - self._cursor.remaining_completions,
            window_bytes=self._bytes,
            blocking_token=self._base if draws else None,
            gap_age_s=self._clock() - self._issued_at[self._settled_draws] if draws else 0.0,
        )

    def _group(self, token: int) -> int:
        if not self._base <= token < self.next_token:
            raise KeyError(token)
        return self._groups[token - self._origin]

    def _raise_full(self, state_bytes: int) -> NoReturn:
        draws = len(self._states) - self._settled_draws
        if draws >= self._max_draws:
            raise WindowFullError(what="draws in the window", limit=self._max_draws, found=draws + 1)
        raise WindowFullError(
            what="bytes of sampler state in the window", limit=self._max_bytes, found=self._bytes + state_bytes
        )

    def _advance(self) -> None:
        groups, at, end = self._groups, self._base - self._origin, len(self._groups)
        while at < end and groups[at].bit_count() == 1:
            at += 1
        self._base = self._origin + at
        row, draws = self._settled_draws, len(self._states)
        while row < draws and self._last_tokens[row] < self._base:
            state, self._states[row] = self._states[row], b""  # let go of now, not when the columns are cut
            self._bytes -= len(state)
            row += 1
        if row > self._settled_draws:
            self._safe = SamplingBoundary(
                epoch=self._epochs[row - 1],
                sampler_state=EncodedState(state, self._codecs[row - 1]),
                remaining_completions=self._remaining[row - 1],
            )
            self._settled_draws = row
            self._beyond = self._last_tokens[row - 1] + 1
        self._cut_columns()

    def _cut_columns(self) -> None:
        """Give back what is behind the boundary, when it is the larger part: each row moves at most once for each that goes."""
        settled_groups = self._beyond - self._origin
        if settled_groups > max(_KEPT_ROWS, len(self._groups) // 2):
            del self._groups[:settled_groups]
            self._origin = self._beyond
        row = self._settled_draws
        if row > max(_KEPT_ROWS, len(self._states) // 2):
            for column in (self._last_tokens, self._remaining, self._epochs, self._issued_at):
                del column[:row]
            for listed in (self._states, self._codecs, self._labels):
                del listed[:row]
            self._settled_draws = 0
