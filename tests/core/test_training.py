"""Commands, saves and endings, through the whole controller."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from core_harness import (
    House,
    Worker,
    counted_ids,
    disposed_row,
    make_policy,
    metadata_of,
    prompt_of,
    resume_from,
)

from cosmos_ctrl.core.agreement import Resumed
from cosmos_ctrl.core.commands import Command, DisposedRows, End, Save, Train
from cosmos_ctrl.core.controller import Controller
from cosmos_ctrl.core.errors import ExecutionEndedError, StorageUnavailableError
from cosmos_ctrl.core.execution import ExecutionIdentity
from cosmos_ctrl.core.ledger import SamplingBoundary
from cosmos_ctrl.core.replay import Replay, ReplayedDraw
from cosmos_ctrl.core.samplers import SeekableSampler
from cosmos_ctrl.core.sampling import Sampling


class Run:
    """A house whose gate is open, with one rollout worker, driven a step at a time."""

    def __init__(self, house: House | None = None, **overrides: Any) -> None:
        self.house = house or House(**overrides)
        self.controller = self.house.controller
        self.trainers = self.house.open_gate()
        self.leader = self.trainers[0]
        self.rollout = self.house.rollout()
        self.number = 1

    def generate(self, groups: int = 1) -> list[int]:
        leases = self.rollout.lease(groups)
        for lease in leases:
            self.rollout.complete(lease)
        return [lease.group for lease in leases]

    def next(self) -> Command | None:
        command = self.leader.command(self.number)
        for trainer in self.trainers:
            assert trainer.command(self.number) is command
        self.number += command is not None
        return command

    def next_train(self) -> Train:
        command = self.next()
        assert isinstance(command, Train), command
        return command

    def next_save(self) -> Save:
        command = self.next()
        assert isinstance(command, Save), command
        return command

    def next_end(self) -> End:
        command = self.next()
        assert isinstance(command, End), command
        return command

    def commit(self, command: Train, disposed: list[DisposedRows] | None = None) -> None:
        for trainer in self.trainers:
            trainer.trained(command, disposed=disposed)

    def step(self, groups: int) -> Train:
        self.generate(groups)
        command = self.next_train()
        self.commit(command)
        return command

    def save(self, save: Save) -> None:
        for trainer in self.trainers:
            trainer.saved(save)
        assert self.house.publish() == [save]

    @property
    def phase(self) -> str:
        return self.controller.lifecycle.phase


def restart(save: Save, **overrides: Any) -> House:
    return resume_from(save, **overrides)


# -- forming steps


def test_a_step_is_formed_when_enough_groups_are_ready() -> None:
    run = Run(groups_per_step=3)
    first = run.generate(2)
    assert run.next() is None
    assert run.generate(2)
    command = run.next_train()
    assert (command.number, command.step) == (1, 1)
    assert [group for group, _ in command.rows][:2] == first
    assert len(command.rows) == 3
    assert run.controller.statistics().groups_training == 3
    assert run.controller.statistics().groups_ready == 1


def test_ranks_of_several_groups_commit_together() -> None:
    run = Run(trainer_groups=(("policy", 2), ("critic", 1)), groups_per_step=1)
    run.generate()
    command = run.next_train()
    for trainer in run.trainers[::-1]:
        assert run.controller.commands.steps == 0
        trainer.trained(command, updates=2)
    assert (run.controller.commands.steps, run.controller.commands.updates) == (1, 2)
    assert run.house.settled("trained") == 2


def test_the_tail_trains() -> None:
    run = Run(prompts=3, groups_per_step=2)
    run.step(2)
    assert len(run.step(1).rows) == 1
    assert run.next_save().final
    assert run.controller.lifecycle.ending == ("BUDGET_EXHAUSTED", "every completion of the budget is settled")


def test_the_tail_waits_for_what_may_come_back() -> None:
    run = Run(prompts=3, groups_per_step=2)
    run.step(2)
    lost = run.house.rollout(1)
    lost.lease()
    assert run.next() is None
    lost.submit(end="preempted")
    assert run.next() is None
    run.generate()
    assert len(run.next_train().rows) == 1


def test_the_tail_is_discarded_with_a_reason() -> None:
    run = Run(prompts=3, groups_per_step=2, tail="discard")
    run.step(2)
    run.generate()
    save = run.next_save()
    assert (save.final, save.boundary.remaining_completions) == (True, 0)
    assert run.house.reasons() == ["tail"]
    run.save(save)
    assert run.next_end().reason == "BUDGET_EXHAUSTED"


@pytest.mark.parametrize("settles", ["the last group", "the first group"])
def test_the_tail_waits_unsettled_in_the_final_checkpoint(settles: str) -> None:
    run = Run(prompts=3, groups_per_step=2, tail="wait", records_window="settled")
    if settles == "the first group":
        # The hole is the oldest: what was trained lies beyond the boundary, and is in the record.
        hole = run.house.rollout(1)
        (lease,) = hole.lease()
        run.step(2)
        hole.complete(lease)
    else:
        run.step(2)
        run.generate(1)
    save = run.next_save()
    assert save.final
    # The tail, and what was trained beyond it, lie beyond the boundary.
    assert (save.boundary.remaining_completions, save.window_completions) == (
        (2, 2) if settles == "the last group" else (6, 6)
    )
    assert (run.house.settled("trained"), run.house.reasons()) == (4, [])
    run.save(save)
    end = run.next_end()
    assert (end.reason, end.steps) == ("BUDGET_EXHAUSTED", 1)
    assert "1 groups are too few for a step, and wait" in end.message


def test_a_tail_that_waits_is_nothing_to_do_until_somebody_takes_it() -> None:
    run = Run(prompts=3, groups_per_step=2, tail="wait")
    run.step(2)
    tail = run.generate(1)
    save = run.next_save()
    again = restart(save, prompts=3, groups_per_step=2, tail="wait").controller
    assert again.lifecycle.end == (
        "BUDGET_EXHAUSTED",
        "nothing to do: at step 1 the 1 groups that are left are too few for a step, and wait",
    )
    taken = Run(restart(save, number=3, prompts=3, groups_per_step=1, tail="wait"))
    (group,) = taken.generate(5)
    command = taken.next_train()
    assert (command.step, [token for token, _ in command.rows]) == (2, [group])
    assert len(tail) == 1
    taken.commit(command)
    last = taken.next_save()
    assert (last.final, last.boundary.remaining_completions) == (True, 0)
    assert restart(last, number=4, prompts=3, groups_per_step=1, tail="wait").controller.lifecycle.over


@pytest.mark.parametrize("settled", [0b01, 0b11])
def test_what_a_record_proves_settled_is_no_part_of_a_tail_that_waits(settled: int) -> None:
    house = House(prompts=4, groups_per_step=3, tail="wait")
    sampling = Sampling(SeekableSampler(4, shuffle=False), prompt_of=prompt_of, completions_per_prompt=2)
    draws = []
    remaining = sampling.start(8).remaining_completions
    for mask in (0, settled):
        draw = sampling.draw(remaining)
        remaining = draw.after.remaining_completions
        draws.append(ReplayedDraw(draw, (mask,)))
    replay = Replay(tuple(draws))
    assert replay.settled_groups == (settled == 0b11)
    controller = Controller(
        make_policy(groups_per_step=4, tail="wait"),
        ExecutionIdentity(2, "execution-2"),
        sampling,
        SamplingBoundary(epoch=1, sampler_state={}, remaining_completions=8),
        Resumed(metadata=metadata_of(_stopped(house))),
        replay=replay,
        clock=house.clock,
        new_id=counted_ids(),
    )
    assert controller.lifecycle.over is (settled == 0b11)


def _stopped(house: House) -> Save:
    run = Run(house)
    run.controller.stop("enough")
    return run.next_save()


@pytest.mark.parametrize("tail", ["train", "discard", "wait"])
def test_only_an_exhausted_budget_discards_a_tail(tail: Any) -> None:
    run = Run(prompts=6, groups_per_step=4, tail=tail)
    run.generate(3)
    run.controller.stop("maintenance")
    save = run.next_save()
    assert save.boundary.remaining_completions == 12
    assert run.house.settled() == 0


# -- limits that could stop everything (G9)


def test_g9_a_window_of_discards_trains_what_it_has() -> None:
    run = Run(prompts=20, groups_per_step=4, max_window_draws=4)
    leases = run.rollout.lease(4)
    run.rollout.report("discarded", (leases[1], leases[1].mask), reason="dull")
    run.rollout.complete(leases[0], leases[2], leases[3])
    assert run.rollout.lease(1) == []
    command = run.next_train()
    assert len(command.rows) == 3
    run.commit(command)
    assert len(run.rollout.lease(4)) == 4


def test_g9_fewer_outstanding_groups_than_a_step_needs_still_train() -> None:
    run = Run(prompts=20, groups_per_step=4, max_outstanding_groups=2, tail="discard")
    assert len(run.generate(4)) == 2
    assert len(run.next_train().rows) == 2


@pytest.mark.parametrize("max_buffered_bytes", [1, 7, 12])
def test_g9_payloads_larger_than_the_buffer_do_not_stop_the_run(max_buffered_bytes: int) -> None:
    run = Run(prompts=4, n=2, groups_per_step=2, max_buffered_bytes=max_buffered_bytes)
    for _ in range(40):
        for lease in run.rollout.lease(1):
            run.rollout.complete(lease, payloads=[b"12345678"] * lease.mask.bit_count())
        command = run.next()
        if isinstance(command, Train):
            rows = [
                disposed_row(group, mask & 1, "payload_lost" if command.step == 1 else "trained")
                for group, mask in command.rows
                if mask & 1
            ]
            rows += [
                disposed_row(group, mask & 2, "returned" if command.step == 2 else "trained")
                for group, mask in command.rows
                if mask & 2
            ]
            run.commit(command, rows)
        elif isinstance(command, Save):
            run.save(command)
        elif isinstance(command, End):
            break
    assert run.phase == "ENDED"
    assert run.house.settled("trained") == 8


def test_g9_a_full_buffer_of_groups_that_wait_for_their_rest_does_not_stop_the_run() -> None:
    run = Run(prompts=1, n=2, groups_per_step=1, max_buffered_bytes=7)
    (lease,) = run.rollout.lease(1)
    run.rollout.complete(lease, payloads=[b"12345678"] * 2)
    group = lease.group
    run.commit(run.next_train(), [disposed_row(group, 0b01, "returned"), disposed_row(group, 0b10, "payload_lost")])
    assert run.controller.rollouts.buffered_bytes > 7
    (rest,) = run.rollout.lease(1)
    run.rollout.complete(rest, payloads=[b"12345678"])
    assert run.next_train().rows == ((group, 0b11),)


def test_g10_leasing_waits_while_the_buffer_is_full_and_something_moves() -> None:
    run = Run(prompts=9, groups_per_step=2, max_buffered_bytes=10)
    for lease in run.rollout.lease(2):
        run.rollout.complete(lease, payloads=[b"12345678"] * lease.mask.bit_count())
    assert run.rollout.lease(1) == []
    run.commit(run.next_train())
    assert len(run.rollout.lease(1)) == 1


# -- saves and their boundaries (G1, G2)


def test_g1_the_boundary_of_a_save_is_cut_before_anything_of_the_next_step_settles() -> None:
    run = Run(groups_per_step=1, save_every_steps=1)
    run.step(1)
    save = run.next_save()
    assert (save.steps, save.boundary.remaining_completions, save.window_completions) == (1, 10, 0)
    run.step(1)
    assert run.controller.ledger.snapshot().remaining_completions == 8
    run.save(save)  # asynchronous: it finishes while later steps train
    assert save.boundary.remaining_completions == 10
    assert metadata_of(save).sampler_state["position"] == 1


def test_g1_what_settles_out_of_order_stays_in_the_window_of_the_save() -> None:
    run = Run(groups_per_step=1, save_every_steps=1)
    hole = run.house.rollout(1)
    hole.lease()
    run.step(1)
    save = run.next_save()
    assert (save.boundary.remaining_completions, save.window_completions) == (12, 4)
    house = restart(save)
    house.open_gate()
    keys = [lease.prompt.key for lease in house.rollout().lease(6)]
    assert keys == ["0", "1", "2", "3", "4", "5"]


def test_g2_w_counts_what_the_lineage_had_issued_and_not_only_this_execution() -> None:
    run = Run(prompts=8, n=1, groups_per_step=4, save_every_steps=1)
    hole = run.house.rollout(1)
    hole.lease()
    run.step(4)
    first = run.next_save()
    assert (first.boundary.remaining_completions, first.window_completions) == (8, 5)
    # The next execution draws less than its parent had, and saves before it has come as far: the model still has all four.
    second = Run(restart(first, groups_per_step=1, save_every_steps=1, max_outstanding_groups=1, prompts=8, n=1))
    second.house.rollout(1).lease()
    second.controller.stop("maintenance")
    assert second.next_end()
    third = Run(restart(first, groups_per_step=1, save_every_steps=1, prompts=8, n=1))
    third.house.rollout(1).lease()
    third.step(1)
    save = third.next_save()
    assert save.boundary.remaining_completions == 8
    assert save.window_completions == 5, "a resume from here repeats up to four of the first execution's"


def test_a_step_is_saved_once() -> None:
    run = Run(groups_per_step=1, save_every_steps=1)
    run.step(1)
    run.save(run.next_save())
    run.controller.stop("maintenance")
    assert run.next_end().steps == 1


def test_a_pending_save_is_not_overtaken_by_a_periodic_one() -> None:
    run = Run(groups_per_step=1, save_every_steps=1)
    run.step(1)
    first = run.next_save()
    run.step(1)
    assert run.next() is None
    run.save(first)
    run.step(1)
    assert run.next_save().steps == 3


def test_g9_an_abandoned_save_does_not_stop_the_run() -> None:
    run = Run(groups_per_step=1, save_every_steps=1)
    run.step(1)
    save = run.next_save()
    run.leader.abandon(save)
    assert (save.state, save.why_abandoned) == ("ABANDONED", "trainer policy/0: disk full")
    run.leader.saved(save)
    assert run.controller.take_effects() == []
    run.step(1)
    again = run.next_save()
    assert again.steps == 2
    assert again.path != save.path


def test_g9_a_save_that_was_abandoned_is_saved_again_at_the_stop() -> None:
    run = Run(groups_per_step=1, save_every_steps=1)
    run.step(1)
    run.controller.stop("maintenance")
    first = run.next_save()
    run.leader.abandon(first)
    second = run.next_save()
    assert (first.final, second.final, second.steps) == (False, True, 1)
    assert second.checkpoint_id != first.checkpoint_id
    run.save(second)
    assert run.next_end().reason == "STOP_REQUESTED"


def test_g4_an_abandoned_final_save_fails_the_execution() -> None:
    run = Run(groups_per_step=1)
    run.step(1)
    run.controller.stop("maintenance")
    save = run.next_save()
    assert save.final
    run.leader.abandon(save)
    assert run.phase == "FAILED"
    with pytest.raises(ExecutionEndedError, match="disk full"):
        run.leader.command(run.number)


def test_g4_one_rank_that_abandons_ends_the_save_for_all() -> None:
    run = Run(groups_per_step=1, save_every_steps=1, trainer_groups=(("policy", 2),))
    run.step(1)
    save = run.next_save()
    run.trainers[0].saved(save)
    run.trainers[1].abandon(save)
    run.trainers[1].saved(save)
    assert save.state == "ABANDONED"
    assert run.controller.take_effects() == []


def test_g4_a_save_that_is_being_published_cannot_be_abandoned() -> None:
    run = Run(groups_per_step=1, save_every_steps=1)
    run.step(1)
    save = run.next_save()
    run.leader.saved(save)
    run.leader.abandon(save)
    assert save.state == "PUBLISHING"
    run.house.publish()
    run.leader.abandon(save)
    assert save.state == "COMMITTED"
    assert run.controller.statistics().last_save is save


@pytest.mark.parametrize("final", [False, True])
def test_a_publication_that_fails_is_an_abandoned_save(final: bool) -> None:
    run = Run(groups_per_step=1, save_every_steps=0 if final else 1)
    run.step(1)
    if final:
        run.controller.stop("maintenance")
    save = run.next_save()
    run.leader.saved(save)
    run.controller.take_effects()
    run.controller.publication_failed(save, StorageUnavailableError(path=save.path, operation="link", cause="EIO"))
    assert run.phase == ("FAILED" if final else "RUNNING")


def test_g9_a_save_has_a_deadline() -> None:
    run = Run(groups_per_step=1, save_every_steps=1, save_timeout_s=50.0, session_ttl_s=1000.0)
    run.step(1)
    save = run.next_save()
    run.house.clock.advance(51)
    run.controller.tick()
    assert save.state == "ABANDONED"
    assert "50 s" in save.why_abandoned
    assert run.phase == "RUNNING"


def test_g9_a_publication_has_a_deadline_and_cannot_be_abandoned() -> None:
    run = Run(groups_per_step=1, save_every_steps=1, save_timeout_s=50.0, session_ttl_s=1000.0)
    run.step(1)
    save = run.next_save()
    run.house.clock.advance(49)
    run.leader.saved(save)
    run.house.clock.advance(49)
    run.controller.tick()
    assert run.phase == "RUNNING"
    run.house.clock.advance(2)
    run.controller.tick()
    assert run.phase == "FAILED"
    assert "publication" in str(run.controller.lifecycle.failure)
    run.house.publish()
    assert (run.phase, save.state) == ("FAILED", "COMMITTED")


def test_the_end_waits_for_an_asynchronous_save_and_the_newest_stays_the_newest() -> None:
    run = Run(groups_per_step=1, save_every_steps=1)
    run.step(1)
    first = run.next_save()
    run.generate()
    command = run.next_train()
    run.controller.stop("maintenance")
    run.commit(command)
    final = run.next_save()
    assert (final.steps, final.final) == (2, True)
    run.leader.saved(final)
    assert run.house.publish() == [final]
    assert run.next() is None
    run.leader.saved(first)
    assert run.house.publish() == [first]
    assert run.controller.training.last_save is final
    assert run.next_end().steps == 2


# -- ends (G8, G9)


def test_stop_at_step_zero_saves_step_zero() -> None:
    run = Run()
    run.generate(1)
    waiting = run.rollout.lease(1)
    assert run.controller.request_stop("execution-1", run.leader.session, "maintenance", None) == "maintenance"
    assert run.phase == "DRAINING"
    save = run.next_save()
    assert (save.steps, save.updates, save.final, save.boundary.remaining_completions) == (0, 0, True, 12)
    assert save.window_completions == 4
    run.rollout.heartbeat()
    assert [notice.leases for notice in run.rollout.notices] == [(waiting[0].number,)]
    reply = run.rollout.lease_reply()
    assert reply is not None
    assert reply.no_more
    run.save(save)
    end = run.next_end()
    assert (end.reason, end.message, end.steps) == ("STOP_REQUESTED", "maintenance", 0)
    assert run.phase == "ENDED"


def test_stop_in_the_middle_of_a_step_finishes_it() -> None:
    run = Run(groups_per_step=1)
    run.generate(2)
    command = run.next_train()
    run.controller.stop("maintenance")
    assert run.leader.command(1) is command
    run.commit(command)
    save = run.next_save()
    assert (save.steps, save.boundary.remaining_completions) == (1, 10)
    assert run.house.settled() == 2


def test_stop_before_the_gate_ends_at_once_and_saves_nothing() -> None:
    house = House()
    trainer = house.trainer()
    house.controller.stop("maintenance")
    assert house.controller.lifecycle.phase == "ENDED"
    command = trainer.command(1)
    assert isinstance(command, End)
    assert command.reason == "STOP_REQUESTED"


def test_stop_while_a_save_is_pending_waits_for_it() -> None:
    run = Run(groups_per_step=1, save_every_steps=1)
    run.step(1)
    save = run.next_save()
    run.controller.stop("maintenance")
    assert run.next() is None
    run.save(save)
    assert run.next_end().steps == 1


def test_g6_the_first_reason_to_stop_wins_and_so_does_the_first_grace() -> None:
    run = Run(session_ttl_s=1000.0)
    assert run.controller.stop("first", 10.0) == "first"
    run.house.clock.advance(9)
    assert run.controller.stop("second", 100.0) == "first"
    run.house.clock.advance(2)
    run.controller.tick()
    assert run.phase == "FAILED"
    assert "grace" in str(run.controller.lifecycle.failure)


def test_g9_a_stop_bounds_an_ending_that_has_begun() -> None:
    run = Run(prompts=1, groups_per_step=1, session_ttl_s=1000.0)
    run.step(1)
    run.next_save()
    assert run.controller.stop("SIGTERM", 10.0) == "every completion of the budget is settled"
    run.house.clock.advance(11)
    run.controller.tick()
    assert run.phase == "FAILED"


def test_a_stop_of_a_run_that_is_over_changes_nothing() -> None:
    run = Run(prompts=1, groups_per_step=1, session_ttl_s=10_000.0)
    run.step(1)
    run.save(run.next_save())
    run.next_end()
    run.controller.stop("SIGTERM", 1.0)
    run.house.clock.advance(100)
    run.controller.tick()
    assert (run.phase, run.controller.lifecycle.end) == (
        "ENDED",
        ("BUDGET_EXHAUSTED", "every completion of the budget is settled"),
    )


def test_g8_a_limit_is_hard_and_leaves_the_rest_unsettled() -> None:
    run = Run(groups_per_step=1, max_training_steps=2)
    run.step(1)
    run.generate(3)
    run.commit(run.next_train())
    save = run.next_save()
    assert (save.steps, save.final, save.boundary.remaining_completions) == (2, True, 8)
    run.save(save)
    assert run.next_end().reason == "STEP_LIMIT"
    assert run.house.settled() == 4


def test_g8_limit_reached_and_restarted_twice_gives_no_command() -> None:
    run = Run(groups_per_step=1, max_training_steps=5, prompts=9)
    for _ in range(5):
        run.step(1)
    save = run.next_save()
    run.save(save)
    for number in (2, 3):
        house = restart(save, number=number, groups_per_step=1, max_training_steps=5, prompts=9)
        assert house.controller.lifecycle.phase == "ENDED"
        assert house.controller.statistics().completed_training_steps == 5
        trainer = house.trainer()
        trainer.confirm()
        command = trainer.command(1)
        assert isinstance(command, End)
        assert (command.reason, command.steps) == ("STEP_LIMIT", 5)
        assert "nothing to do" in command.message
        reply = house.rollout().lease_reply()
        assert reply is not None
        assert (reply.leases, reply.no_more) == ((), True)
        assert house.settled() == 0


def test_g8_restored_at_seven_with_limit_five_is_over_at_once() -> None:
    run = Run(groups_per_step=1, save_every_steps=7, prompts=9)
    for _ in range(7):
        run.step(1)
    house = restart(run.next_save(), max_training_steps=5, prompts=9)
    assert house.controller.lifecycle.end == ("STEP_LIMIT", "nothing to do: at step 7, the limit is 5")


@pytest.mark.parametrize("limit", [0, 1])
def test_g8_a_limit_of_zero_trains_nothing(limit: int) -> None:
    house = House(max_training_steps=limit)
    assert (house.controller.lifecycle.phase == "ENDED") is (limit == 0)


@pytest.mark.parametrize(
    ("policy", "steps"),
    [
        ({"groups_per_step": 4}, 3),
        ({"groups_per_step": 4, "tail": "discard"}, 2),
        ({"groups_per_step": 4, "tail": "wait"}, 2),
        ({"groups_per_step": 5, "tail": "discard"}, 2),
        ({"groups_per_step": 4, "max_training_steps": 2}, 2),
        ({"groups_per_step": 4, "max_training_steps": 30}, 3),
    ],
)
def test_g8_the_horizon_is_the_budget_in_steps_or_the_limit(policy: dict[str, Any], steps: int) -> None:
    house = House(prompts=10, budget=19, **policy)  # ten groups of two, the last cut short
    assert house.controller.horizon_training_steps == steps
    run = Run(house)
    while isinstance(command := next(_commands(run)), Train):
        run.commit(command)
    assert run.controller.commands.steps == steps


def _commands(run: Run) -> Iterator[Command]:
    while True:
        if (command := run.next()) is not None:
            yield command
        run.generate(1)


def test_g8_the_horizon_is_kept_whatever_repeats_and_however_the_limits_change() -> None:
    run = Run(prompts=8, groups_per_step=2, save_every_steps=1)
    assert run.controller.horizon_training_steps == 4
    run.house.rollout(1).lease()  # a hole, so all that is trained now repeats
    for _ in range(3):
        run.step(2)
        save = run.next_save()
        run.save(save)
    assert save.boundary.remaining_completions == 16
    for changed in ({}, {"max_training_steps": 50}, {"max_training_steps": 3}, {"groups_per_step": 1}):
        policy = {"groups_per_step": 2, **changed}
        resumed = Resumed(metadata=metadata_of(save), repeat_bound_completions=14, horizon_training_steps=4)
        assert House(number=2, resumed=resumed, prompts=8, **policy).controller.horizon_training_steps == 4
    # A checkpoint that does not say: what is left is planned anew, on top of what is done.
    assert restart(save, prompts=8, groups_per_step=2).controller.horizon_training_steps == 7


def test_steps_updates_and_completions_stay_apart() -> None:
    run = Run(prompts=12, groups_per_step=2, save_every_steps=3)
    trained = discarded = 0
    for updates, dropped in ((3, 0), (0, 2), (2, 1)):
        run.generate(2)
        command = run.next_train()
        (first, mask), (second, other) = command.rows
        rows = [DisposedRows("trained", ((second, other),))]
        if dropped == 2:
            rows = [DisposedRows("discarded", command.rows, "all alike")]
        elif dropped:
            rows += [disposed_row(first, 0b01, "trained"), disposed_row(first, 0b10, "discarded", "too long")]
        else:
            rows = [DisposedRows("trained", command.rows)]
        discarded += {0: 0, 2: 4, 1: 1}[dropped]
        trained += 4 - {0: 0, 2: 4, 1: 1}[dropped]
        for trainer in run.trainers:
            trainer.trained(command, updates=updates, disposed=rows)
        assert mask == 0b11
    save = run.next_save()
    assert (save.steps, save.updates, save.boundary.remaining_completions) == (3, 5, 24 - 12)
    assert (run.house.settled("trained"), run.house.settled("discarded")) == (trained, discarded) == (7, 5)


def test_g8_replayed_steps_count_toward_the_limit() -> None:
    run = Run(groups_per_step=1, save_every_steps=1, max_training_steps=3)
    hole = run.house.rollout(1)
    hole.lease()
    run.step(1)
    save = run.next_save()
    second = Run(restart(save, groups_per_step=1, max_training_steps=3))
    second.step(1)
    assert second.step(1).step == 3
    assert second.next_save().steps == 3


def test_g8_a_restart_of_a_finished_run_does_nothing_and_says_so() -> None:
    run = Run(prompts=2, groups_per_step=1, save_every_steps=1)
    run.step(1)
    run.save(run.next_save())
    run.step(1)
    save = run.next_save()
    assert save.final
    run.save(save)
    run.next_end()
    house = restart(save, prompts=2)
    assert house.controller.lifecycle.end == ("BUDGET_EXHAUSTED", "nothing to do: at step 2 with no budget left")


@pytest.mark.parametrize("how", ["tail", "discarded"])
def test_g8_a_run_that_ends_with_discards_is_finished_for_its_restart_too(how: str) -> None:
    run = Run(
        prompts=2,
        groups_per_step=1 if how == "discarded" else 2,
        save_every_steps=1,
        tail="discard",
        budget=3 if how == "discarded" else 6,
    )
    run.step(1 if how == "discarded" else 2)
    last = run.next_save()
    run.save(last)
    if how == "discarded":
        (lease,) = run.rollout.lease()
        run.rollout.report("discarded", (lease, lease.mask))
    else:
        run.generate(1)
    command = run.next()
    if isinstance(command, Save):
        last = command
        run.save(last)
        command = run.next()
    assert isinstance(command, End)
    assert restart(last, prompts=2).controller.lifecycle.phase == "ENDED"


def test_natural_end_with_discards_only_saves_step_zero() -> None:
    run = Run(prompts=2, groups_per_step=2)
    for lease in run.rollout.lease(2):
        run.rollout.report("discarded", (lease, lease.mask), reason="dull")
    run.controller.tick()
    save = run.next_save()
    assert (save.steps, save.final, save.boundary.remaining_completions) == (0, True, 0)
    run.save(save)
    assert run.next_end().reason == "BUDGET_EXHAUSTED"
    assert restart(save, prompts=2).controller.lifecycle.phase == "ENDED"


def test_the_run_ends_in_the_very_call_that_drops_its_last_group_as_stale() -> None:
    run = Run(prompts=3, groups_per_step=2, max_staleness=0, on_stale="discard")
    leases = run.rollout.lease(3)
    run.rollout.complete(*leases)
    run.commit(run.next_train())
    save = run.next_save()
    assert run.house.reasons() == ["stale"]
    assert (save.final, save.boundary.remaining_completions) == (True, 0)


def test_whoever_waits_is_woken_when_stale_groups_make_room() -> None:
    run = Run(prompts=9, groups_per_step=2, max_staleness=0, max_outstanding_groups=3)
    run.rollout.complete(*run.rollout.lease(3))
    run.commit(run.next_train())
    before = run.controller.lifecycle.revision
    assert run.next() is None
    assert run.controller.lifecycle.revision > before


def test_whoever_waits_is_woken_when_a_lease_is_overdue() -> None:
    run = Run(lease_deadline_s=5.0)
    run.rollout.lease(1)
    before = run.controller.lifecycle.revision
    run.house.clock.advance(6)
    run.controller.tick()
    assert run.controller.lifecycle.revision > before
    assert run.controller.statistics().groups_pending == 1


# -- draws


class Growing(SeekableSampler):
    """Its state grows as it goes, as a feedback-driven sampler's may."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return state | {"padding": "x" * 10 * state["position"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({key: value for key, value in state.items() if key != "padding"})


@pytest.mark.parametrize("max_window_bytes", [1, 100, 150, 200, 250, 300, 400])
def test_g1_a_draw_that_finds_no_room_is_kept_and_not_skipped(max_window_bytes: int) -> None:
    run = Run(sampler=Growing(8, shuffle=False), prompts=8, n=1, groups_per_step=1, max_window_bytes=max_window_bytes)
    keys: list[str] = []
    for _ in range(30):
        leases = run.rollout.lease(4)
        keys += [lease.prompt.key for lease in leases]
        for lease in leases:
            run.rollout.complete(lease)
        while isinstance(command := run.next(), Train):
            run.commit(command)
    assert keys == ["0", "1", "2", "3", "4", "5", "6", "7"]
    assert run.controller.ledger.snapshot().remaining_completions == 0


class Broken(SeekableSampler):
    """Fails at its third index, once."""

    failed = False

    def __iter__(self) -> Iterator[int]:
        for index in super().__iter__():
            if index == 2 and not self.failed:
                self.failed = True
                raise OSError("cannot read the third prompt")
            yield index


def test_g1_a_sampler_that_raises_ends_the_execution_and_skips_nothing() -> None:
    run = Run(sampler=Broken(8, shuffle=False))
    with pytest.raises(OSError, match="third"):
        run.rollout.lease(4)
    assert run.phase == "FAILED"
    with pytest.raises(ExecutionEndedError, match="OSError: cannot read the third prompt"):
        run.rollout.lease(4)
    assert run.controller.ledger.snapshot().remaining_completions == 12


# -- what the leader says


def test_dispositions_go_where_they_should() -> None:
    run = Run(prompts=3, n=4, groups_per_step=1)
    (group,) = run.generate()
    command = run.next_train()
    rows = [
        disposed_row(group, 0b0001, "trained"),
        disposed_row(group, 0b0010, "discarded", "dull"),
        disposed_row(group, 0b0100, "returned"),
        disposed_row(group, 0b1000, "payload_lost"),
    ]
    run.commit(command, rows)
    assert (run.house.settled("trained"), run.house.settled("discarded"), run.house.reasons()) == (1, 1, ["dull"])
    assert run.controller.ledger.unsettled(group) == 0b1100
    (lease,) = run.rollout.lease()
    assert (lease.group, lease.mask) == (group, 0b1000)
    run.rollout.complete(lease)
    assert run.next_train().rows == ((group, 0b1100),)


def test_a_step_that_returns_everything_still_counts() -> None:
    run = Run(groups_per_step=1)
    (group,) = run.generate()
    run.commit(run.next_train(), [disposed_row(group, 0b11, "returned")])
    assert run.controller.commands.steps == 1
    assert run.house.settled() == 0
    assert run.next_train().rows == ((group, 0b11),)


@pytest.mark.parametrize("leader_first", [True, False])
def test_nothing_settles_before_the_last_rank_has_reported(leader_first: bool) -> None:
    run = Run(groups_per_step=1, trainer_groups=(("policy", 2),))
    run.generate()
    command = run.next_train()
    first, last = run.trainers if leader_first else run.trainers[::-1]
    first.trained(command)
    assert run.house.settled() == 0
    last.trained(command)
    assert run.house.settled("trained") == 2
    assert run.controller.statistics().mean_reward == 1.0


def test_g1_every_prompt_is_settled_over_three_crashes_with_an_unsettled_window() -> None:
    """Window 4, batch 2, 24 prompts: the public report's shape."""
    settings: dict[str, Any] = {
        "prompts": 24,
        "n": 1,
        "groups_per_step": 2,
        "save_every_steps": 1,
        "max_window_draws": 4,
    }
    model: list[str] = []
    house, saved = House(**settings), []
    for crash in (True, True, True, False):
        run = Run(house)
        model = list(saved)
        steps = 0
        while run.phase not in ("ENDED", "FAILED"):
            keys = {lease.group: lease for lease in run.rollout.lease(4)}
            for lease in reversed(keys.values()):
                run.rollout.complete(lease)
            while (command := run.next()) is not None:
                if isinstance(command, Train):
                    model += [run.controller.rollouts.group(group).prompt.key for group, _ in command.rows]  # type: ignore[union-attr]
                    run.commit(command)
                    steps += 1
                elif isinstance(command, Save):
                    saved, last = list(model), command
                    run.save(command)
                else:
                    break
            if crash and steps >= 3:
                run.rollout.lease(4)
                break
        house = resume_from(last, number=house.controller.identity.number + 1, **settings)
    assert set(saved) == {str(index) for index in range(24)}


def test_a_resumed_identity_is_handed_to_the_ranks() -> None:
    run = Run(groups_per_step=1, save_every_steps=1)
    run.step(1)
    save = run.next_save()
    house = House(number=2, resumed=Resumed(metadata=metadata_of(save), manifest_digest="sha256:x"))
    assert isinstance(house.trainer(), Worker)
    assert house.controller.commands.steps == 1
    assert house.controller.commands.updates == 1
