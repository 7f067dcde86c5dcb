"""A full window: it waits for its oldest group, or gives that up where the policy says so; it is never the end of a run."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from core_harness import House, Worker, disposed_row, rows
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_harness import Batches, ReplayHouse, cut, journal, keys_of, train

from cosmos_ctrl.audit import audit_journals
from cosmos_ctrl.core.commands import End, Save, Train
from cosmos_ctrl.core.groups import Lease, LeasesCancelled, PayloadsFreed
from cosmos_ctrl.core.samplers import SeekableSampler

#: A state of this sampler takes so many bytes.
STATE_BYTES = len(House().controller.ledger.cursor.encoded_state.data)

#: A window of four draws, by either limit.
CAPS = pytest.mark.parametrize(
    "cap",
    [{"max_window_draws": 4}, {"max_window_bytes": 4 * STATE_BYTES + STATE_BYTES - 1}],
    ids=["draws", "bytes"],
)


def stuck(cap: dict[str, int], on_full: str, **options: Any) -> tuple[House, Worker, list[Worker], list[Lease]]:
    """A window of four draws that is full: the oldest group is with a worker of its own, the three behind it are trained."""
    house = House(
        **{"prompts": 12, "n": 2, "budget": 24, "groups_per_step": 3, "on_full_window": on_full, **cap, **options}
    )
    (trainer,) = house.open_gate()
    slow, fast = house.rollout(0), house.rollout(1)
    (held,) = slow.lease(1)
    leases = fast.lease(3)
    fast.complete(*leases)
    train(trainer, 1)
    assert house.controller.ledger.statistics().window_draws == 4
    return house, trainer, [slow, fast], [held, *leases]


@CAPS
def test_a_full_window_waits_for_its_oldest_group_by_default(cap: dict[str, int]) -> None:
    house, _, (slow, fast), leases = stuck(cap, "wait")
    assert fast.lease_reply(4, last_call=False) is None
    assert fast.lease(4) == []
    assert house.reasons() == []
    assert slow.notices == []
    slow.complete(leases[0])
    assert house.controller.ledger.statistics().window_draws == 4  # reported is not settled
    assert fast.lease_reply(4, last_call=False) is None


@CAPS
def test_once_the_oldest_group_has_settled_the_boundary_moves_over_all_and_there_is_room_again(
    cap: dict[str, int],
) -> None:
    house, _, (slow, fast), leases = stuck(cap, "wait")
    slow.report("discarded", (leases[0], 0b11))
    assert house.controller.ledger.snapshot().remaining_completions == 24 - 8
    assert keys_of(fast.lease(8)) == ["4", "5", "6", "7"]


@CAPS
def test_a_full_window_gives_up_its_oldest_group_where_the_policy_says_so(cap: dict[str, int]) -> None:
    house, _, (_, fast), leases = stuck(cap, "discard")
    assert keys_of(fast.lease(1)) == ["4"]
    assert house.reasons() == ["window_full"]
    assert house.controller.statistics().discarded_completions == 2
    # The boundary moves over the discarded group and the trained ones behind it.
    assert house.controller.ledger.snapshot().remaining_completions == 24 - 8
    assert house.controller.ledger.statistics().window_draws == 1
    assert house.controller.rollouts.group(leases[0].group) is None
    assert house.settled("discarded") == 2


@CAPS
def test_the_worker_of_a_group_that_is_given_up_is_told_and_its_late_report_is_refused(cap: dict[str, int]) -> None:
    house, trainer, (slow, fast), leases = stuck(cap, "discard")
    fast.lease(1)
    slow.heartbeat()
    assert slow.notices == [LeasesCancelled((leases[0].number,))]
    slow.complete(leases[0])
    refused = slow.notices[-1]
    assert (refused.reason, refused.group, refused.mask) == ("RETIRED", leases[0].group, 0b11)
    statistics = house.controller.statistics()
    assert (statistics.trained_completions, statistics.discarded_completions) == (6, 2)
    assert house.controller.rollouts.buffered_bytes == 0
    assert slow.lease(1)  # the worker itself is as good as any
    assert trainer.command(2) is None


def test_what_a_given_up_group_had_ready_is_given_up_with_it_and_its_payloads_are_freed() -> None:
    house = House(prompts=12, n=2, budget=24, groups_per_step=3, max_window_draws=4, on_full_window="discard")
    (trainer,) = house.open_gate()
    slow, fast = house.rollout(0), house.rollout(1)
    (held,) = slow.lease(1)
    slow.submit(rollouts=(rows("completed", (held, 0b01), handles=["there"]),))
    fast.complete(*fast.lease(3))
    train(trainer, 1)
    assert house.controller.rollouts.group(held.group) is not None
    fast.lease(1)
    slow.heartbeat()
    assert slow.notices == [LeasesCancelled((held.number,)), PayloadsFreed(((held.group, 0b01),))]
    assert house.settled("discarded") == 2
    assert slow.place not in [worker.place for worker in house.controller.workers if worker.leases]


def test_inline_payloads_of_a_given_up_group_are_let_go_of() -> None:
    house = House(prompts=12, n=2, budget=24, groups_per_step=3, max_window_draws=4, on_full_window="discard")
    (trainer,) = house.open_gate()
    slow, fast = house.rollout(0), house.rollout(1)
    (held,) = slow.lease(1)
    slow.submit(rollouts=(rows("completed", (held, 0b10), payloads=[b"x" * 100]),))
    assert house.controller.rollouts.buffered_bytes == 100
    fast.complete(*fast.lease(3))
    train(trainer, 1)
    fast.lease(1)
    assert house.controller.rollouts.buffered_bytes == 0


@CAPS
def test_a_ready_group_is_never_given_up(cap: dict[str, int]) -> None:
    house, trainer, (slow, fast), leases = stuck(cap, "discard")
    slow.complete(leases[0])
    assert house.controller.rollouts.ready_groups == 1
    assert fast.lease_reply(4, last_call=False) is None
    assert house.reasons() == []
    # Nothing else can come, so what is ready trains, and makes room by itself.
    assert train(trainer, 2).rows == ((leases[0].group, 0b11),)
    assert keys_of(fast.lease(1)) == ["4"]
    assert house.reasons() == []


@CAPS
def test_a_group_in_a_command_is_never_given_up(cap: dict[str, int]) -> None:
    house, trainer, (slow, fast), leases = stuck(cap, "discard")
    slow.complete(leases[0])
    command = trainer.command(2)
    assert isinstance(command, Train)
    assert house.controller.rollouts.ready_groups == 0
    assert fast.lease_reply(4, last_call=False) is None
    assert house.reasons() == []
    trainer.trained(command)
    assert keys_of(fast.lease(1)) == ["4"]


@CAPS
def test_a_group_that_waits_for_a_worker_is_leased_and_not_given_up(cap: dict[str, int]) -> None:
    house, _, (slow, fast), leases = stuck(cap, "discard")
    slow.report("returned", (leases[0], 0b11))
    assert house.controller.rollouts.pending_groups == 1
    (again,) = fast.lease(1)
    assert (again.group, house.reasons()) == (leases[0].group, [])


@CAPS
def test_a_group_that_this_very_reply_leases_is_never_given_up(cap: dict[str, int]) -> None:
    """A worker that asks for more than the window holds gets what the window holds."""
    house = House(prompts=40, n=2, budget=80, on_full_window="discard", **cap)
    house.open_gate()
    rollout = house.rollout()
    leases = rollout.lease(10)
    assert (keys_of(leases), house.reasons()) == (["0", "1", "2", "3"], [])
    rollout.heartbeat()
    assert rollout.notices == []


@CAPS
def test_a_hole_that_this_very_reply_leases_again_is_not_given_up_at_once(cap: dict[str, int]) -> None:
    house, _, (slow, fast), leases = stuck(cap, "discard")
    slow.report("returned", (leases[0], 0b11))
    (again,) = fast.lease(3)
    assert (again.group, house.reasons()) == (leases[0].group, [])
    # From then on it is with a worker again, and somebody else's request finds the window full.
    assert keys_of(slow.lease(1)) == ["4"]
    assert house.reasons() == ["window_full"]


@CAPS
def test_g9_a_window_that_is_ready_but_for_its_oldest_group_is_not_waited_with(cap: dict[str, int]) -> None:
    """A step needs more groups than the window holds: nothing of it would ever settle."""
    house = House(prompts=40, n=2, budget=80, groups_per_step=8, on_full_window="discard", **cap)
    (trainer,) = house.open_gate()
    slow, fast = house.rollout(0), house.rollout(1)
    (held,) = slow.lease(1)
    fast.complete(*fast.lease(3))
    assert trainer.command(1) is None
    assert keys_of(fast.lease(1)) == ["4"]
    assert house.reasons() == ["window_full"]
    slow.heartbeat()
    assert slow.notices == [LeasesCancelled((held.number,))]


@CAPS
def test_a_window_of_which_nothing_is_settled_is_not_stuck_and_nothing_of_it_is_given_up(cap: dict[str, int]) -> None:
    """Else workers that ask by turns would give up each other's groups, and the budget would go without a step."""
    house = House(prompts=40, n=2, budget=80, on_full_window="discard", **cap)
    house.open_gate()
    workers = [house.rollout(replica) for replica in range(8)]
    for _ in range(3):
        for worker in workers:
            worker.lease(1)
    assert house.controller.statistics().groups_leased == 4
    assert house.reasons() == []


def test_only_as_much_is_given_up_as_makes_room() -> None:
    house = House(prompts=12, n=1, budget=12, groups_per_step=2, max_window_draws=4, on_full_window="discard")
    (trainer,) = house.open_gate()
    slow, fast = house.rollout(0), house.rollout(1)
    held = slow.lease(2)
    fast.complete(*fast.lease(2))
    train(trainer, 1)
    assert keys_of(fast.lease(1)) == ["4"]
    assert house.settled("discarded") == 1
    slow.heartbeat()
    assert slow.notices == [LeasesCancelled((held[0].number,))]
    assert house.controller.ledger.snapshot().remaining_completions == 11


def test_groups_of_one_draw_are_given_up_until_the_draw_is_behind_the_boundary() -> None:
    house = House(
        sampler=SeekableSampler(12, shuffle=False),
        batch_sampler=Batches(12, 3),
        n=1,
        budget=12,
        groups_per_step=3,
        max_window_draws=2,
        on_full_window="discard",
    )
    (trainer,) = house.open_gate()
    slow, fast = house.rollout(0), house.rollout(1)
    held = slow.lease(3)
    fast.complete(*fast.lease(3))
    train(trainer, 1)
    assert keys_of(fast.lease(1)) == ["6"]
    assert house.reasons() == ["window_full"] * 3
    slow.heartbeat()
    assert slow.notices == [LeasesCancelled((lease.number,)) for lease in held]
    assert house.controller.ledger.snapshot().remaining_completions == 6


@pytest.mark.parametrize("on_full", ["wait", "discard"])
def test_the_statistics_name_the_group_that_blocks_and_its_worker(on_full: str) -> None:
    house, _, (slow, fast), leases = stuck({"max_window_draws": 4}, on_full)
    house.clock.advance(7)
    statistics = house.controller.statistics()
    assert (statistics.blocking_group, statistics.blocking_worker) == (leases[0].group, str(slow.place))
    assert (statistics.gap_age_s, statistics.window_draws, statistics.window_completions) == (7.0, 4, 8)
    new = fast.lease(1)
    statistics = house.controller.statistics()
    if on_full == "discard":
        assert (statistics.blocking_group, statistics.blocking_worker) == (new[0].group, str(fast.place))
        assert statistics.gap_age_s == 0.0
    else:
        assert statistics.blocking_group == leases[0].group
    slow.report("returned", (leases[0], 0b11))
    statistics = house.controller.statistics()
    assert (statistics.blocking_worker, statistics.groups_pending) == (
        ("", 1) if on_full == "wait" else (str(fast.place), 0)
    )


def test_an_empty_window_has_nothing_that_blocks() -> None:
    statistics = House().controller.statistics()
    assert (statistics.blocking_group, statistics.blocking_worker, statistics.gap_age_s) == (0, "", None)


# -- states that grow


class Growing(SeekableSampler):
    """Its state grows as it goes, as a feedback-driven sampler's may."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return state | {"padding": "x" * 40 * state["position"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({key: value for key, value in state.items() if key != "padding"})


def test_a_state_that_is_larger_than_the_newest_gives_up_what_it_needs_and_is_not_skipped() -> None:
    sampler = Growing(12, shuffle=False)
    sizes = [
        len(House(sampler=Growing(12, shuffle=False)).controller.ledger.cursor.encoded_state.data) + 40 * at
        for at in range(5)
    ]
    # Room for the third state beside two like the first, and not for its true size.
    limit = sizes[1] + sizes[2] + sizes[2] + 39
    house = House(sampler=sampler, n=1, budget=12, groups_per_step=1, max_window_bytes=limit, on_full_window="discard")
    (trainer,) = house.open_gate()
    slow, fast = house.rollout(0), house.rollout(1)
    slow.lease(1)
    fast.complete(*fast.lease(1))
    train(trainer, 1)
    assert house.controller.ledger.has_room()
    assert not house.controller.ledger.has_room(sizes[3])
    assert keys_of(fast.lease(1)) == ["2"]
    assert house.reasons() == ["window_full"]
    assert house.controller.ledger.snapshot().remaining_completions == 10


def test_a_state_that_finds_no_room_waits_where_nothing_is_given_up() -> None:
    sampler = Growing(12, shuffle=False)
    first = len(House(sampler=Growing(12, shuffle=False)).controller.ledger.cursor.encoded_state.data)
    house = House(sampler=sampler, n=1, budget=12, groups_per_step=1, max_window_bytes=3 * first + 3 * 40 + 79)
    (trainer,) = house.open_gate()
    slow, fast = house.rollout(0), house.rollout(1)
    (held,) = slow.lease(1)
    fast.complete(*fast.lease(1))
    train(trainer, 1)
    assert fast.lease(1) == []
    assert fast.lease(1) == []
    slow.complete(held)
    train(trainer, 2)
    assert keys_of(fast.lease(1)) == ["2"]


# -- to the end


def play_to_the_end(house: House, seed: int) -> list[str]:
    """Workers that finish, return, fail or forget; every command done. Returns the keys that were issued."""
    rng = random.Random(seed)
    (trainer,) = house.open_gate()
    workers = [house.rollout(replica) for replica in range(2)]
    out: list[tuple[Worker, Lease]] = []
    number = 1
    for turn in itertools.count():
        assert turn < 3000, "it does not end"
        worker = rng.choice(workers)
        out += [(worker, lease) for lease in worker.lease(rng.randint(1, 3))]
        rng.shuffle(out)
        # Something may be forgotten for long, and everything comes back in the end: no lease lapses here.
        for _ in range(rng.randint(0, len(out)) if turn % 7 else len(out)):
            holder, lease = out.pop()
            if holder.house.controller.rollouts.group(lease.group) is None:
                continue
            outcome = rng.choice(["completed", "completed", "completed", "returned", "discarded"])
            holder.report(outcome, (lease, lease.mask))
        command = trainer.command(number)
        if command is None:
            continue
        if isinstance(command, End):
            return [values["key"] for event, values in house.events if event == "issue"]
        if isinstance(command, Train):
            trainer.trained(command, disposed=[disposed_row(*row, "trained") for row in command.rows])
        else:
            trainer.saved(command)
            house.publish()
        number += 1
    raise AssertionError


@settings(max_examples=60, deadline=None)
@given(
    draws=st.integers(1, 5),
    outstanding=st.integers(1, 6),
    groups_per_step=st.integers(1, 4),
    batch=st.integers(0, 3),
    budget=st.integers(1, 40),
    on_full=st.sampled_from(["wait", "discard"]),
    tail=st.sampled_from(["train", "discard"]),
    seed=st.integers(0, 1 << 32),
)
def test_g9_a_small_window_never_stops_a_run_and_everything_is_settled_at_its_end(
    draws: int, outstanding: int, groups_per_step: int, batch: int, budget: int, on_full: str, tail: str, seed: int
) -> None:
    house = House(
        prompts=7,
        n=2,
        budget=budget,
        batch_sampler=Batches(7, batch) if batch else None,
        groups_per_step=groups_per_step,
        max_window_draws=draws,
        max_outstanding_groups=outstanding,
        on_full_window=on_full,
        tail=tail,
        save_every_steps=2,
    )
    play_to_the_end(house, seed)
    assert house.settled() == budget
    assert house.controller.ledger.snapshot().remaining_completions == 0
    assert not house.controller.rollouts.unsettled_groups
    if on_full == "wait":
        assert "window_full" not in house.reasons()
    assert audit_journals([journal(house)]).skipped == 0


@CAPS
def test_g9_a_group_that_is_out_for_good_does_not_stop_a_run_that_discards(cap: dict[str, int]) -> None:
    """Nobody ever hears of the oldest group again, though its worker lives."""
    house, trainer, (slow, fast), _ = stuck(cap, "discard", prompts=12)
    for number in range(2, 20):
        fast.complete(*fast.lease(3))
        slow.heartbeat()
        command = trainer.command(number)
        if not isinstance(command, Train):
            break
        trainer.trained(command)
    save = command
    assert isinstance(save, Save)
    assert (save.final, save.boundary.remaining_completions) == (True, 0)
    assert house.reasons() == ["window_full"] * 1


def test_g1_a_group_that_was_given_up_is_settled_for_the_next_execution_too() -> None:
    house, trainer, (_, fast), leases = stuck(
        {"max_window_draws": 4}, "discard", save_every_steps=2, records_window="settled"
    )
    new = fast.lease(3)
    fast.complete(*new)
    train(trainer, 2)
    save = cut(house, trainer, 3)
    assert save.boundary.remaining_completions == 24 - 14
    second = ReplayHouse(save, prompts=12, n=2)
    second.open_gate()
    assert keys_of(second.rollout().lease(20)) == ["7", "8", "9", "10", "11"]
    report = audit_journals([journal(house), journal(second)])
    assert (report.skipped, report.repeated, report.live_cursor_would_skip) == (0, 0, 0)
    assert leases[0].group not in [values["group"] for event, values in second.events if event == "issue"]


@pytest.mark.parametrize("on_full", ["wait", "discard"])
def test_what_a_resume_replays_is_given_up_only_after_it_was_leased(on_full: str) -> None:
    house, trainer, (_, fast), _ = stuck({"max_window_draws": 6}, "wait", save_every_steps=1, records_window="settled")
    save = cut(house, trainer, 2)
    assert fast.lease(1)
    second = ReplayHouse(save, prompts=12, n=2, max_window_draws=2, on_full_window=on_full)
    assert second.reasons() == []
    assert second.controller.statistics().window_draws == 2
    second.open_gate()
    slow, fast = second.rollout(0), second.rollout(1)
    assert keys_of(slow.lease(1)) == ["0"]
    given = keys_of(fast.lease(1))
    if on_full == "wait":
        assert (given, second.reasons()) == ([], [])
    else:
        # The draws that waited for room are issued first, with what is settled of them.
        assert (given, second.reasons()) == (["4"], ["window_full"])
    assert second.controller.statistics().spared_completions == (2 if on_full == "wait" else 6)
