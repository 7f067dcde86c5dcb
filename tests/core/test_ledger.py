"""The replay ledger, against a list of everything that happened."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from cosmos_ctrl.core.errors import UnknownWorkError, WindowFullError
from cosmos_ctrl.core.ledger import SamplingBoundary, SamplingReplayLedger, Settlement

BUDGET = 400
FIRST = 1001


def boundary(remaining: int, *, epoch: int = 1, state: Any = None) -> SamplingBoundary:
    return SamplingBoundary(
        epoch=epoch, sampler_state=[remaining] if state is None else state, remaining_completions=remaining
    )


class DumbLedger:
    """A list of draws; a draw is its boundary and its groups; a group is a list of settled flags."""

    def __init__(self, start: SamplingBoundary) -> None:
        self.start = start
        self.draws: list[tuple[SamplingBoundary, list[tuple[int, list[bool]]]]] = []

    def prefix(self) -> int:
        return next(
            (at for at, (_, groups) in enumerate(self.draws) if not all(all(flags) for _, flags in groups)),
            len(self.draws),
        )

    def safe(self) -> SamplingBoundary:
        prefix = self.prefix()
        return self.draws[prefix - 1][0] if prefix else self.start

    def flags(self, token: int) -> list[bool] | None:
        return next((flags for _, groups in self.draws for number, flags in groups if number == token), None)

    def retired(self, token: int) -> bool:
        """Whether no group up to this one has anything unsettled."""
        return all(all(flags) for _, groups in self.draws for number, flags in groups if number <= token)

    def unsettled_in_order(self) -> list[int]:
        return [number for _, groups in self.draws for number, flags in groups if not all(flags)]


class LedgerMachine(RuleBasedStateMachine):
    tokens = Bundle("tokens")

    def __init__(self) -> None:
        super().__init__()
        start = boundary(BUDGET)
        self.now = 0.0
        self.real = SamplingReplayLedger(start, first_token=FIRST, max_draws=12, max_bytes=100, clock=lambda: self.now)
        self.dumb = DumbLedger(start)
        self.issued_at: list[float] = []
        self.kept: list[tuple[SamplingBoundary, tuple[Any, ...]]] = []
        self.settled = 0

    @rule(
        target=tokens,
        sizes=st.lists(st.integers(1, 70), min_size=1, max_size=3),
        new_epoch=st.booleans(),
        size=st.integers(0, 30),
    )
    def issue(self, sizes: list[int], new_epoch: bool, size: int) -> Any:
        cursor = self.real.cursor
        if sum(sizes) > cursor.remaining_completions:
            return multiple()
        after = boundary(cursor.remaining_completions - sum(sizes), epoch=cursor.epoch + new_epoch, state=b"x" * size)
        window = self.dumb.draws[self.dumb.prefix() :]
        held = sum(len(b.encoded_state.data) for b, _ in window)
        full = bool(window) and (len(window) >= 12 or held + size > 100)
        assert self.real.has_room(size) is not full
        if full:
            before = (self.real.cursor, self.real.snapshot(), self.real.next_token, self.real.statistics())
            with pytest.raises(WindowFullError):
                self.real.issue_draw(after, sizes)
            assert before == (self.real.cursor, self.real.snapshot(), self.real.next_token, self.real.statistics())
            return multiple()
        tokens = list(self.real.issue_draw(after, sizes, label=("draw", len(self.dumb.draws))))
        self.dumb.draws.append((after, [(token, [False] * n) for token, n in zip(tokens, sizes, strict=True)]))
        self.issued_at.append(self.now)
        return multiple(*tokens)

    @rule(token=tokens, completion=st.integers(0, 75))
    def settle(self, token: int, completion: int) -> None:
        flags = self.dumb.flags(token)
        assert flags is not None
        outcome = self.real.settle(token, completion)
        if self.dumb.retired(token):
            assert outcome is Settlement.RETIRED
        elif completion >= len(flags):
            assert outcome is Settlement.UNKNOWN
        else:
            assert outcome is (Settlement.DUPLICATE if flags[completion] else Settlement.SETTLED)
            self.settled += not flags[completion]
            flags[completion] = True
        assert bool(outcome) is (outcome is Settlement.SETTLED)

    @rule(token=tokens, data=st.data())
    def settle_mask(self, token: int, data: st.DataObject) -> None:
        flags = self.dumb.flags(token)
        assert flags is not None
        mask = data.draw(st.one_of(st.just((1 << len(flags)) - 1), st.integers(0, (1 << len(flags)) - 1)))
        bits = [i for i in range(len(flags)) if mask >> i & 1]
        expected = 0 if self.dumb.retired(token) else sum(1 << i for i in bits if not flags[i])
        assert self.real.settle_mask(token, mask) == expected
        for i in bits:
            self.settled += not flags[i]
            flags[i] = True

    @rule(rows=st.lists(st.tuples(tokens, st.integers(0, 1 << 70)), max_size=6), whole=st.booleans())
    def settle_rows(self, rows: list[tuple[int, int]], whole: bool) -> None:
        sized = [(token, mask & (1 << len(self.dumb.flags(token) or ())) - 1) for token, mask in rows]
        before = self.real.statistics()
        if not whole:
            with pytest.raises(UnknownWorkError):
                self.real.settle_rows([*sized, (self.real.next_token, 1)])
            assert self.real.statistics() == before
            return
        new = 0
        for token, mask in sized:
            flags = self.dumb.flags(token) or []
            for i in range(len(flags)):
                new += mask >> i & 1 and not flags[i]
                flags[i] |= bool(mask >> i & 1)
        assert self.real.settle_rows(sized) == new
        self.settled += new

    @rule(token=tokens)
    def settle_outside_the_group(self, token: int) -> None:
        flags = self.dumb.flags(token)
        assert flags is not None
        if not self.dumb.retired(token):
            with pytest.raises(UnknownWorkError):
                self.real.settle_mask(token, 1 << len(flags))

    @rule(ahead=st.integers(0, 5), behind=st.integers(1, 5))
    def settle_what_was_never_issued(self, ahead: int, behind: int) -> None:
        assert self.real.settle(self.real.next_token + ahead) is Settlement.UNKNOWN
        assert self.real.settle(FIRST - behind) is Settlement.STALE_EXECUTION
        with pytest.raises(UnknownWorkError):
            self.real.settle_mask(self.real.next_token + ahead, 1)
        with pytest.raises(UnknownWorkError):
            self.real.settle_mask(FIRST - behind, 1)

    @rule(change=st.sampled_from([-1, 1]), fall=st.booleans())
    def issue_wrongly(self, change: int, fall: bool) -> None:
        cursor = self.real.cursor
        remaining = cursor.remaining_completions - 1
        if remaining < 1 or (fall and cursor.epoch == 1):
            return
        after = (
            boundary(remaining, epoch=cursor.epoch - 1) if fall else boundary(remaining + change, epoch=cursor.epoch)
        )
        with pytest.raises(ValueError, match="epoch falls" if fall else "budget"):
            self.real.issue(after, 1)

    @rule(seconds=st.floats(0, 100))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def keep_a_snapshot(self) -> None:
        taken = self.real.snapshot()
        self.kept.append((taken, (taken.epoch, taken.remaining_completions, taken.encoded_state.data)))

    @invariant()
    def the_boundary_stands_after_the_longest_settled_prefix(self) -> None:
        assert self.real.snapshot() == self.dumb.safe()
        # No copy is ever made of a state.
        assert self.real.snapshot().encoded_state.data is self.dumb.safe().encoded_state.data

    @invariant()
    def both_budget_equations_hold(self) -> None:
        prefix = self.dumb.prefix()
        in_prefix = sum(len(flags) for _, groups in self.dumb.draws[:prefix] for _, flags in groups)
        issued = sum(len(flags) for _, groups in self.dumb.draws for _, flags in groups)
        assert in_prefix + self.real.snapshot().remaining_completions == BUDGET
        assert issued + self.real.cursor.remaining_completions == BUDGET

    @invariant()
    def statistics_count_what_happened(self) -> None:
        found, prefix = self.real.statistics(), self.dumb.prefix()
        window = self.dumb.draws[prefix:]
        assert found.issued_completions == sum(len(flags) for _, groups in self.dumb.draws for _, flags in groups)
        assert found.settled_completions == self.settled
        assert found.window_draws == len(window)
        assert found.window_completions == sum(len(flags) for _, groups in window for _, flags in groups)
        assert found.window_bytes == sum(len(b.encoded_state.data) for b, _ in window)
        unsettled = self.dumb.unsettled_in_order()
        assert found.blocking_token == (unsettled[0] if unsettled else None)
        assert found.gap_age_s == (self.now - self.issued_at[prefix] if window else 0.0)

    @invariant()
    def the_window_is_every_draw_beyond_the_boundary_with_what_is_settled_of_it(self) -> None:
        prefix, window = self.dumb.prefix(), self.real.window()
        assert (window.safe, window.cursor) == (self.real.snapshot(), self.real.cursor)
        assert list(window.draws()) == [
            (
                ("draw", prefix + at),
                tuple(len(flags) for _, flags in groups),
                tuple(sum(1 << i for i, done in enumerate(flags) if done) for _, flags in groups),
            )
            for at, (_, groups) in enumerate(self.dumb.draws[prefix:])
        ]

    @invariant()
    def groups_know_what_is_unsettled(self) -> None:
        for _, groups in self.dumb.draws:
            for token, flags in groups:
                assert self.real.unsettled(token) == sum(1 << i for i, done in enumerate(flags) if not done)

    @invariant()
    def kept_snapshots_never_change(self) -> None:
        for taken, values in self.kept:
            assert (taken.epoch, taken.remaining_completions, taken.encoded_state.data) == values


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


def test_a_snapshot_shares_nothing_with_a_live_state() -> None:
    state = {"position": [1]}
    ledger = SamplingReplayLedger(boundary(2, state=state))
    state["position"].append(2)
    first = ledger.snapshot().sampler_state
    first["position"].append(3)
    assert ledger.snapshot().sampler_state == {"position": [1]}


def test_the_public_shape_issue_settle_snapshot() -> None:
    ledger = SamplingReplayLedger(SamplingBoundary(epoch=1, sampler_state={"at": 0}, remaining_completions=4))
    first = ledger.issue(SamplingBoundary(epoch=1, sampler_state={"at": 1}, remaining_completions=2), completions=2)
    second = ledger.issue(SamplingBoundary(epoch=1, sampler_state={"at": 2}, remaining_completions=1))
    assert ledger.settle(second)
    assert ledger.settle(first, 1)
    assert ledger.snapshot().sampler_state == {"at": 0}
    assert ledger.settle(first, completion=0)
    assert ledger.snapshot() == SamplingBoundary(epoch=1, sampler_state={"at": 2}, remaining_completions=1)
    assert not ledger.settle(first)


def test_g1_ten_drawn_nine_trained_and_the_third_discarded_moves_the_boundary_to_ten() -> None:
    ledger = SamplingReplayLedger(boundary(10))
    tokens = [ledger.issue(boundary(9 - i)) for i in range(10)]
    for token in tokens:
        ledger.settle(token)
    assert ledger.snapshot().remaining_completions == 0


def test_g1_total_ten_batch_four_one_settled_resumes_at_one_not_at_four() -> None:
    ledger = SamplingReplayLedger(boundary(10))
    tokens = [ledger.issue(boundary(9 - i)) for i in range(4)]
    ledger.settle(tokens[0])
    assert ledger.snapshot().remaining_completions == 9
    assert ledger.cursor.remaining_completions == 6


def test_g1_a_draw_of_several_prompts_is_passed_only_as_a_whole() -> None:
    ledger = SamplingReplayLedger(boundary(4))
    tokens = ledger.issue_draw(boundary(0), (2, 2))
    ledger.settle_mask(tokens[0], 0b11)
    assert ledger.snapshot().remaining_completions == 4
    assert ledger.settle(tokens[0]) is Settlement.RETIRED
    ledger.settle_mask(tokens[1], 0b11)
    assert ledger.snapshot().remaining_completions == 0


def test_g9_an_empty_window_takes_a_state_of_any_size() -> None:
    ledger = SamplingReplayLedger(boundary(3), max_bytes=4)
    token = ledger.issue(boundary(2, state=b"x" * 100))
    assert not ledger.has_room(1)
    with pytest.raises(WindowFullError):
        ledger.issue(boundary(1, state=b"x"))
    ledger.settle(token)
    assert ledger.issue(boundary(1, state=b"x" * 100))


@pytest.mark.parametrize("sizes", [(), (0,), (1, 0), (-1,), (True,), (1.0,)])
def test_a_draw_of_nothing_or_of_no_counts_is_refused(sizes: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        SamplingReplayLedger(boundary(5)).issue_draw(boundary(4), sizes)


def test_a_boundary_takes_strict_counts_only() -> None:
    for wrong in (True, "3", 3.0, None):
        with pytest.raises(TypeError):
            SamplingBoundary(epoch=1, sampler_state=None, remaining_completions=wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            SamplingBoundary(epoch=wrong, sampler_state=None, remaining_completions=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 1"):
        SamplingBoundary(epoch=0, sampler_state=None, remaining_completions=1)
    with pytest.raises(ValueError, match="at least 0"):
        SamplingBoundary(epoch=1, sampler_state=None, remaining_completions=-1)


def test_a_large_window_settles_in_any_order_without_slowing_down() -> None:
    count = 20_000
    ledger = SamplingReplayLedger(boundary(count))
    tokens = [ledger.issue(boundary(count - 1 - i)) for i in range(count)]
    for token in reversed(tokens):
        ledger.settle(token)
    assert ledger.snapshot().remaining_completions == 0
    assert ledger.statistics().window_bytes == 0


def test_a_window_is_whole_however_much_of_the_ledger_was_let_go_of() -> None:
    """Draws of three groups, of which the second settles last, when the next one's first has: columns are cut many times."""
    count = 4000
    ledger = SamplingReplayLedger(boundary(6 * count))
    draws = [ledger.issue_draw(boundary(6 * (count - 1 - at)), (1, 2, 3), label=at) for at in range(count)]
    for at, tokens in enumerate(draws[:-2]):
        ledger.settle_mask(tokens[0], 0b1)
        ledger.settle_mask(tokens[2], 0b111)
        ledger.settle_mask(draws[at + 1][0], 0b1)
        assert next(iter(ledger.window().draws())) == (at, (1, 2, 3), (0b1, 0, 0b111))
        ledger.settle_mask(tokens[1], 0b11)
    ledger.settle_mask(draws[-1][2], 0b101)
    assert list(ledger.window().draws()) == [(count - 2, (1, 2, 3), (0b1, 0, 0)), (count - 1, (1, 2, 3), (0, 0, 0b101))]
    assert ledger.window().safe.remaining_completions == 12
    assert len(ledger._groups) < 2 * 1024 + 6  # what is behind the boundary is not kept


def test_a_window_is_a_value() -> None:
    ledger = SamplingReplayLedger(boundary(6))
    tokens = [ledger.issue(boundary(5 - at), 1) for at in range(3)]
    window = ledger.window()
    for token in tokens:
        ledger.settle(token)
    ledger.issue(boundary(2))
    assert [(sizes, settled) for _, sizes, settled in window.draws()] == [((1,), (0,))] * 3
    assert (window.safe.remaining_completions, window.cursor.remaining_completions) == (6, 3)


@pytest.mark.parametrize("broken", ["epoch", "clock"])
def test_a_draw_that_cannot_be_recorded_leaves_the_ledger_as_it_was(broken: str) -> None:
    def clock() -> float:
        if broken == "clock":
            raise OSError("no time")
        return 0.0

    ledger = SamplingReplayLedger(boundary(10), clock=clock)
    with pytest.raises((ValueError, OSError)):
        ledger.issue_draw(boundary(6, epoch=1 << 64 if broken == "epoch" else 1), (2, 2))
    assert ledger.next_token == 1
    assert ledger.cursor == ledger.snapshot() == boundary(10)
    assert list(ledger.window().draws()) == []
    assert ledger.statistics().window_draws == 0
    broken = ""
    assert ledger.issue_draw(boundary(6), (2, 2)) == range(1, 3)
    assert ledger.settle_rows([(1, 3), (2, 3)]) == 4
    assert ledger.snapshot() == boundary(6)
