"""What should be true, by code that is dumber than the core: one list of draws, and what became of each completion.

* The *line* is every draw of a lineage, in order, as the sampler itself told it. A completion's *place* is its number in that
  list, from 0, so a boundary is one number. Whatever a resume starts from, it issues a contiguous part of the line.
* A completion's *name* says which draw it came from. A resumed sampler that draws what the line has keeps the names; from the
  first draw that differs the rest of the line is gone, and what is drawn instead has names of its own.
* A deterministic sampler must draw the line that one uninterrupted pass gives.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Drawn:
    """One draw, as the sampler gave it, cut to the budget."""

    epoch: int
    keys: tuple[str, ...]
    sizes: tuple[int, ...]
    names: tuple[int, ...]
    """Of its completions."""
    state: Any
    """The sampler's, right after."""

    @property
    def given(self) -> tuple[Any, ...]:
        return self.epoch, self.keys, self.sizes


@dataclass(frozen=True)
class Issued:
    """One draw as an execution issued it: several of the line's at once, where a recorded window was issued again."""

    epoch: int
    """After it."""
    keys: tuple[str, ...]
    sizes: tuple[int, ...]
    settled: tuple[int, ...] = ()

    @property
    def given(self) -> tuple[Any, ...]:
        return self.epoch, self.keys, self.sizes


@dataclass(frozen=True)
class Cut:
    """The oracle's books at the moment when a checkpoint was cut."""

    boundary: int
    issued: int
    """By the execution that cut it."""
    lineage_issued: int
    """By it, or by those before it."""
    line: tuple[Drawn, ...]
    discarded: dict[int, str]
    """Reasons, by name, of everything discarded in the lineage."""
    window: tuple[Issued, ...]
    """Draws beyond the boundary, with what is settled of them."""
    settled: frozenset[int]
    """Places beyond the boundary that are settled."""
    cursor: Drawn | None
    """The last draw that was issued."""
    keys_recorded: bool
    inherited: bool
    """Whether some of what is settled beyond the boundary was settled by an execution before."""


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint, and what is truly in its model."""

    execution: int
    metadata: Any
    digest: str
    repeat_bound: int
    """W, as the core recorded it."""
    model: Counter[int]
    """How often each completion was trained in the saved model, by name."""
    cut: Cut
    record: bytes | None
    """What the storage has of its window."""

    @property
    def order(self) -> tuple[int, int, int]:
        steps = self.metadata.completed_training_steps
        return self.execution, steps, -self.metadata.remaining_completions


class Oracle:
    """One execution's history: what was drawn, what was issued, and what settled how."""

    def __init__(
        self,
        *,
        budget: int,
        n: int,
        due: Sequence[tuple[int, list[str]]] | None,
        names: Iterator[int],
        parent: Checkpoint | None,
        keys_recorded: bool,
    ) -> None:
        """`due`: epoch and keys of each draw of an uninterrupted pass; None: there is no telling what the sampler draws."""
        self.budget, self.parent = budget, parent
        self._n, self._pass, self._names, self._keys_recorded = n, due, names, keys_recorded
        cut = parent.cut if parent else None
        self.start = budget - parent.metadata.remaining_completions if parent else 0
        self.issued = self.drawn = self.start
        self.lineage_issued = max(self.start, cut.lineage_issued) if cut else 0
        """How far the lineage had come before this execution."""
        self.line: list[Drawn] = list(cut.line) if cut else []
        self.draws = 0
        """How often the sampler was drawn from."""
        self._next = self._index(self.start)
        """Where in the line the sampler stands."""
        self._due: deque[tuple[Issued, Any]] = deque()
        """Drawn and not issued, each with the state after it."""
        self._epochs: deque[int] = deque()
        """Of each group that is due."""
        self._part = 0
        """Groups of the first draw that is due that are issued."""
        self._draws: list[tuple[Issued, int]] = []
        """What was issued, with the bytes of the state after it."""
        self._ends = [self.start]
        """Places where the issued draws end, with the start before them."""
        self._first_unsettled = self.start
        self.settled: dict[int, str] = {}
        """By place."""
        self.counts: Counter[str] = Counter()
        """Of their outcomes."""
        self.trained: set[int] = set()
        """Names."""
        self.spared: set[int] = set()
        self.to_spare: frozenset[int] = frozenset()
        """Places that the record proves settled."""
        self.model: Counter[int] = Counter(parent.model) if parent else Counter()
        """Of the leader's live model."""
        self.discarded: dict[int, str] = dict(cut.discarded) if cut else {}
        self.base_of: dict[int, int] = {}
        self.size_of: dict[int, int] = {}
        self.key_of: dict[int, str] = {}
        if parent is not None:
            beyond = sum(1 for name in self._names_from(self.start) if name in parent.model)
            assert beyond <= parent.repeat_bound, (
                f"G2: {beyond} trained lie beyond the boundary, W is {parent.repeat_bound}"
            )

    # -- the line

    def _index(self, place: int) -> int:
        at = 0
        for index, drawn in enumerate(self.line):
            if at == place:
                return index
            at += len(drawn.names)
        assert at == place, f"{place} is not the end of a draw"
        return len(self.line)

    def _names_from(self, place: int) -> list[int]:
        return [name for drawn in self.line for name in drawn.names][place:]

    def _name(self, place: int) -> int:
        for drawn in self.line:
            if place < len(drawn.names):
                return drawn.names[place]
            place -= len(drawn.names)
        raise AssertionError(f"nothing was drawn for place {place}")

    def state_at(self, place: int, first: Any) -> Any:
        """The sampler's state where the line has come to `place`; `first`: before anything was drawn."""
        index = self._index(place)
        return self.line[index - 1].state if index else first

    # -- a resume

    def reissue(self) -> None:
        """The restored checkpoint's window is issued again as it was, as one draw, and the sampler goes on after it."""
        assert self.parent is not None
        cut = self.parent.cut
        stop = self._index(cut.issued)
        again = self.line[self._next : stop]
        keys = tuple(key for drawn in again for key in drawn.keys)
        sizes = tuple(size for drawn in again for size in drawn.sizes)
        self._due.append((Issued(again[-1].epoch, keys, sizes), again[-1].state))
        self._epochs += [drawn.epoch for drawn in again for _ in drawn.keys]
        self._next, self.drawn = stop, cut.issued
        self.to_spare = cut.settled

    def redraw(self) -> bool:
        """The sampler was drawn from again to prove what the record says; whether it gave all of that."""
        assert self.parent is not None
        cut = self.parent.cut
        wanted = list(cut.window)
        while wanted and not cut.keys_recorded and not any(wanted[-1].settled):
            wanted.pop()
        place, proved = self.start, set()
        for number, (recorded, (drawn, _)) in enumerate(zip(wanted, self._due, strict=False), start=1):
            if recorded.given != drawn.given:
                assert self.draws == number, "drawn beyond the first doubt"
                self.to_spare = frozenset(proved)
                return False
            for size in drawn.sizes:
                proved.update(place + bit for bit in range(size) if place + bit in cut.settled)
                place += size
        assert self.draws <= len(wanted), "drawn beyond the record"
        self.to_spare = frozenset(proved)
        return self.draws == len(wanted)

    # -- what happened

    def on_draw(self, epoch: int, keys: list[str], state: Any) -> None:
        """The sampler was drawn from."""
        self.draws += 1
        left = self.budget - self.drawn
        assert left > 0, "drawn beyond the budget"
        sizes = []
        for _ in keys:
            if left:
                sizes.append(min(self._n, left))
                left -= sizes[-1]
        drawn = Drawn(epoch, tuple(keys[: len(sizes)]), tuple(sizes), (), state)
        index, known = self._next, self.line[self._next : self._next + 1]
        if self._pass is not None:
            due_epoch, due_keys = self._pass[index]
            assert (epoch, keys) == (due_epoch, due_keys), f"G1: drew {keys} of epoch {epoch} where {due_keys} was due"
        if known and known[0].given == drawn.given:
            self.line[index] = replace(drawn, names=known[0].names)
        else:
            names = tuple(next(self._names) for _ in range(sum(sizes)))
            self.line[index:] = [replace(drawn, names=names)]
        self._next += 1
        self.drawn += sum(sizes)
        self._due.append((Issued(epoch, drawn.keys, drawn.sizes), state))
        self._epochs += [epoch for _ in drawn.keys]

    def on_issue(self, group: int, key: str, size: int, epoch: int) -> None:
        assert self._due, f"G1: issued {key}, which the sampler did not give"
        (draw, state), at = self._due[0], self._part
        assert (key, size) == (draw.keys[at], draw.sizes[at]), f"G1: issued {key} where {draw.keys[at]} was due"
        due = self._epochs.popleft()
        assert epoch == due, f"epoch {epoch} where {due} was due"
        self.base_of[group], self.size_of[group], self.key_of[group] = self.issued, size, key
        self.issued += size
        self._part += 1
        if self._part == len(draw.keys):
            self._due.popleft()
            self._part = 0
            self._draws.append((draw, size_of(state)))
            self._ends.append(self.issued)

    def on_settle(self, group: int, mask: int, outcome: str, reason: str) -> None:
        assert mask, "an empty settlement"
        assert mask < 1 << self.size_of[group]
        for place, name in zip(self.places(group, mask), self.names(group, mask), strict=True):
            assert place not in self.settled, f"G6: completion {place} settled twice ({self.settled[place]}, {outcome})"
            self.settled[place] = outcome
            self.counts[outcome] += 1
            if outcome == "trained":
                assert name not in self.trained, f"completion {place} was trained twice"
                self.trained.add(name)
            elif outcome == "recorded":
                assert place in self.to_spare, f"completion {place} was spared, and nothing proves it settled"
                assert self.parent is not None
                settled = name in self.parent.model or name in self.discarded
                assert settled, f"G1: completion {place} was spared, and the lineage has not settled it"
                self.spared.add(place)
            else:
                assert reason, "a discard without a reason"
                self.discarded[name] = reason

    def places(self, group: int, mask: int) -> list[int]:
        base = self.base_of[group]
        return [base + bit for bit in range(mask.bit_length()) if mask >> bit & 1]

    def names(self, group: int, mask: int) -> list[int]:
        return [self._name(place) for place in self.places(group, mask)]

    # -- what must hold

    @property
    def due_draws(self) -> int:
        """Draws that are drawn and not issued."""
        return len(self._due)

    def safe(self) -> int:
        """The end of the longest prefix of draws that is wholly settled."""
        while self._first_unsettled in self.settled:
            self._first_unsettled += 1
        return self._ends[bisect_right(self._ends, self._first_unsettled) - 1]

    def check_ledger(self, cursor: Any, safe: Any) -> None:
        """Both budget equations, and the epoch of the safe boundary."""
        assert cursor.remaining_completions == self.budget - self.issued, "budget ≠ issued + the cursor's remaining"
        expected = self.safe()
        found = self.budget - safe.remaining_completions
        assert found == expected, f"the safe boundary stands at {found}, should be {expected}"
        if expected > self.start:
            draw, _ = self._draws[self._ends.index(expected) - 1]
            assert safe.epoch == draw.epoch, f"epoch {safe.epoch} of the boundary, should be {draw.epoch}"

    def check_spared(self) -> None:
        """What the record proves is settled as soon as it is issued, and nothing else is spared."""
        due = {place for place in self.to_spare if place < self.issued}
        assert self.spared == due, f"spared {sorted(self.spared)}, should be {sorted(due)}"

    def window_size(self) -> tuple[int, int]:
        """Draws beyond the safe boundary, and bytes of their states."""
        beyond = self._draws[self._ends.index(self.safe()) :]
        return len(beyond), sum(size for _, size in beyond)

    def next_state_bytes(self, first: Any) -> int:
        """What the next draw's state takes, as far as that can be known before it is drawn."""
        if self._due:
            return size_of(self._due[0][1])
        return self._draws[-1][1] if self._draws else size_of(self.state_at(self.start, first))

    def is_oldest(self, group: int) -> bool:
        """Whether everything issued before `group` is settled, and it is not."""
        base = self.base_of[group]
        before = all(place in self.settled for place in range(self.start, base))
        return before and any(base + bit not in self.settled for bit in range(self.size_of[group]))

    def is_overtaken(self, group: int) -> bool:
        """Whether a later group is wholly settled."""
        later = ((base, self.size_of[other]) for other, base in self.base_of.items() if base > self.base_of[group])
        return any(all(base + bit in self.settled for bit in range(size)) for base, size in later)

    def cut(self) -> Cut:
        """The books of this moment."""
        boundary, window, base = self.safe(), [], self.start
        for (draw, _), end in zip(self._draws, self._ends[1:], strict=True):
            if end > boundary:
                masks, at = [], base
                for size in draw.sizes:
                    masks.append(sum(1 << bit for bit in range(size) if at + bit in self.settled))
                    at += size
                window.append(replace(draw, settled=tuple(masks)))
            base = end
        index = self._index(self.issued)
        return Cut(
            boundary=boundary,
            issued=self.issued,
            lineage_issued=max(self.issued, self.lineage_issued),
            line=tuple(self.line),
            discarded=dict(self.discarded),
            window=tuple(window),
            settled=frozenset(place for place in self.settled if place >= boundary),
            cursor=self.line[index - 1] if index else None,
            keys_recorded=self._keys_recorded,
            inherited=any(place >= boundary for place in self.spared),
        )

    def check_cut(self, boundary: Any, repeat_bound: int, first: Any) -> None:
        """G1: whatever lies before a saved boundary is in the leader's model, or discarded with a reason."""
        at = self.budget - boundary.remaining_completions
        lost = lost_before(at, self.line, self.model, self.discarded)
        assert not lost, f"G1: a resume from {at} would skip {lost}"
        assert boundary.sampler_state == self.state_at(at, first), f"the sampler's state is not that of place {at}"
        beyond = max(self.issued, self.lineage_issued) - at
        assert repeat_bound == beyond, f"W is {repeat_bound}, the lineage has issued {beyond} beyond the boundary"

    @property
    def repeated(self) -> set[int]:
        """Names of what the restored model contains and this execution trained again."""
        return self.trained & self.parent.model.keys() if self.parent else set()

    def check_repeats(self) -> None:
        """G2: what this execution trained again is no more than was promised, and nothing that the record spares."""
        if self.parent is not None:
            repeated = self.repeated
            bound = self.parent.repeat_bound
            assert len(repeated) <= bound, f"G2: {len(repeated)} repeats, W is {bound}"
            proved = {self._name(place) for place in self.to_spare}
            assert not repeated & proved, "G2: repeated what the checkpoint's record proves settled"

    def check_complete(self) -> None:
        """G1 at the end of an exhausted budget: every completion has its place."""
        assert self.issued == self.budget, f"G1: {self.budget - self.issued} completions were never issued"
        missing = lost_before(self.budget, self.line, self.model, self.discarded)
        assert not missing, f"G1: {missing} are neither trained in the lineage nor discarded"

    def check_tail(self, most: int, unsettled: int) -> None:
        """G1 at an end with a tail that waits: what has no place yet is less than a step, and something does wait, though the restored
        model may contain it."""
        left = lost_before(self.issued, self.line, self.model, self.discarded)
        # What the record proves settled is not issued only to be spared.
        proved = sum(place >= self.issued for place in self.to_spare)
        waiting = len(left) + self.budget - self.issued - proved
        assert waiting <= most, f"{waiting} completions wait, where {most} at most are too few for a step"
        assert waiting or unsettled, "nothing waits"


def lost_before(place: int, line: Iterable[Drawn], model: Counter[int], discarded: dict[int, str]) -> list[int]:
    """Places before `place` that are neither trained in `model` nor discarded."""
    names = [name for drawn in line for name in drawn.names]
    assert len(names) >= place, "the line ends before the boundary"
    return [at for at, name in enumerate(names[:place]) if name not in model and name not in discarded]


def size_of(state: Any) -> int:
    """Bytes of an encoded state."""
    return len(json.dumps(state, separators=(",", ":"), ensure_ascii=False).encode())
