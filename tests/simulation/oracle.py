"""What should be true, by code that is dumber than the core: one list of completions, and what became of each.

Completions are numbered from 0 in the order in which an uninterrupted run would issue them. A resume, wherever it starts,
issues a contiguous part of that list: so a position in the sampler's stream is one number, and so is a boundary.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Stream:
    """The whole run's completions, as one uninterrupted pass over the sampler would issue them."""

    keys: list[str]
    """Prompt of each group; a key names one place in the stream."""
    sizes: list[int]
    draw_ends: list[int]
    """Numbers of completions after which a draw ends, 0 included."""
    epochs: list[int]
    """Epoch of each draw."""
    base: dict[str, int] = field(default_factory=dict)

    @staticmethod
    def of(draws: list[tuple[int, list[str]]], n: int, budget: int) -> Stream:
        """`draws`: epoch and prompt keys of each draw, more than the budget needs."""
        stream = Stream([], [], [0], [1])
        at = 0
        for epoch, keys in draws:
            if at == budget:
                break
            for key in keys:
                size = min(n, budget - at)
                if not size:
                    break
                stream.keys.append(key)
                stream.sizes.append(size)
                stream.base[key] = at
                at += size
            stream.draw_ends.append(at)
            stream.epochs.append(epoch)
        assert at == budget, "the draws do not reach the budget"
        return stream


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint, and what is truly in its model."""

    execution: int
    metadata: Any
    digest: str
    window: int
    """W, as the core recorded it."""
    model: Counter[int]
    """How often each completion was trained in the saved model."""
    discarded: dict[int, str]
    """Reasons of what was discarded before the cut, in the lineage."""
    issued: int
    """How many completions the lineage had issued at the cut."""

    @property
    def order(self) -> tuple[int, int, int]:
        steps = self.metadata.completed_training_steps
        return self.execution, steps, -self.metadata.remaining_completions


class Oracle:
    """One execution's history: what was issued, and what settled how."""

    def __init__(self, stream: Stream, budget: int, parent: Checkpoint | None) -> None:
        self.stream, self.budget, self.parent = stream, budget, parent
        self.start = budget - parent.metadata.remaining_completions if parent else 0
        self.issued = self.start
        self.lineage_issued = max(self.start, parent.issued) if parent else 0
        """How far the lineage had come before this execution."""
        self._next_group = bisect_right(list(stream.base.values()), self.start - 1)
        self._first_unsettled = self.start
        self.settled: dict[int, str] = {}
        self.trained: set[int] = set()
        self.model: Counter[int] = Counter(parent.model) if parent else Counter()
        """Of the leader's live model."""
        self.discarded: dict[int, str] = dict(parent.discarded) if parent else {}
        self.base_of: dict[int, int] = {}
        self.size_of: dict[int, int] = {}
        if parent is not None:
            beyond = sum(1 for completion in parent.model if completion >= self.start)
            assert beyond <= parent.window, (
                f"G2: {beyond} trained completions lie beyond the boundary, W is {parent.window}"
            )

    # -- what happened

    def on_issue(self, group: int, key: str, size: int, epoch: int) -> None:
        at = self._next_group
        assert at < len(self.stream.keys), f"issued {key} beyond the budget"
        assert key == self.stream.keys[at], f"G1: issued {key} where {self.stream.keys[at]} was due"
        assert size == self.stream.sizes[at]
        self._next_group += 1
        self.base_of[group], self.size_of[group] = self.issued, size
        self.issued += size
        draw = bisect_right(self.stream.draw_ends, self.issued - 1)
        assert epoch == self.stream.epochs[draw], f"epoch {epoch} where {self.stream.epochs[draw]} was due"

    def on_settle(self, group: int, mask: int, outcome: str, reason: str) -> None:
        assert mask, "an empty settlement"
        assert mask < 1 << self.size_of[group]
        for completion in self.completions(group, mask):
            assert completion not in self.settled, (
                f"G6: completion {completion} settled twice ({self.settled[completion]}, {outcome})"
            )
            self.settled[completion] = outcome
            if outcome == "trained":
                assert completion not in self.trained
                self.trained.add(completion)
            else:
                assert reason, "a discard without a reason"
                self.discarded[completion] = reason

    def completions(self, group: int, mask: int) -> list[int]:
        base = self.base_of[group]
        return [base + bit for bit in range(mask.bit_length()) if mask >> bit & 1]

    # -- what must hold

    def safe(self) -> int:
        """The end of the longest prefix of draws that is wholly settled."""
        while self._first_unsettled in self.settled:
            self._first_unsettled += 1
        ends = self.stream.draw_ends
        return ends[bisect_right(ends, min(self._first_unsettled, self.issued)) - 1]

    def check_ledger(self, cursor: Any, safe: Any) -> None:
        """Both budget equations, and the epoch of the safe boundary."""
        assert cursor.remaining_completions == self.budget - self.issued, "budget ≠ issued + the cursor's remaining"
        expected = self.safe()
        found = self.budget - safe.remaining_completions
        assert found == expected, f"the safe boundary stands at {found}, should be {expected}"
        if expected > self.start:
            assert safe.epoch == self.stream.epochs[self.stream.draw_ends.index(expected)]

    def check_cut(self, remaining: int, window: int) -> None:
        """G1: whatever lies before a saved boundary is in the saved model, or discarded with a reason."""
        boundary = self.budget - remaining
        lost = [c for c in range(boundary) if c not in self.model and c not in self.discarded]
        assert not lost, f"G1: a resume from {boundary} would skip {lost}"
        beyond = max(self.issued, self.lineage_issued) - boundary
        assert window == beyond, f"W is {window}, the lineage has issued {beyond} beyond the boundary"

    def check_repeats(self) -> None:
        """G2: what this execution trained again is no more than was promised."""
        if self.parent is not None:
            repeated = self.trained & self.parent.model.keys()
            assert len(repeated) <= self.parent.window, f"G2: {len(repeated)} repeats, W is {self.parent.window}"

    def check_complete(self) -> None:
        """G1 at the end of an exhausted budget: every completion has its place."""
        missing = [c for c in range(self.budget) if c not in self.model and c not in self.discarded]
        assert not missing, f"G1: {missing} are neither trained in the lineage nor discarded"
