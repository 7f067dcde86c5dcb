"""Feedback reaches the sampler that wants it: once a committed step, what that step did, and at no other time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from core_harness import House, Worker, disposed_row, rows
from replay_harness import Batches, ReplayHouse, cut, train

from cosmos_ctrl.core.commands import Train
from cosmos_ctrl.core.errors import ControlError, WrongStepError
from cosmos_ctrl.core.groups import Lease
from cosmos_ctrl.core.samplers import SeekableSampler
from cosmos_ctrl.core.sampling import Prompt, PromptFeedback, Sampling


class Curriculum(SeekableSampler):
    """Keeps what it is told."""

    def __init__(self, length: int = 8) -> None:
        super().__init__(length, shuffle=False)
        self.told: list[list[PromptFeedback]] = []

    def feedback(self, results: Sequence[PromptFeedback]) -> None:
        self.told.append(list(results))


def prompt_of(index: Any) -> Prompt:
    return Prompt(f"key-{index}", f"source-{index % 2}")


def a_run(sampler: Any = None, **options: Any) -> tuple[House, Worker, Worker, Any]:
    sampler = sampler if sampler is not None else Curriculum()
    n = options.pop("n", 2)
    house = House(
        sampler=sampler,
        sampling=Sampling(sampler, options.pop("batch_sampler", None), prompt_of=prompt_of, completions_per_prompt=n),
        **{"budget": 16, "groups_per_step": 2} | options,
    )
    trainers = house.open_gate()
    return house, trainers[0], house.rollout(), sampler


def complete(rollout: Worker, *leases: Lease, first: float = 1.0) -> None:
    """Rewards are first, first + 1, … over all completions."""
    count = sum(lease.mask.bit_count() for lease in leases)
    rollout.complete(*leases, rewards=[first + at for at in range(count)])


def test_a_committed_step_tells_its_prompts_and_rewards_once() -> None:
    _, trainer, rollout, sampler = a_run()
    complete(rollout, *rollout.lease(2))
    assert sampler.told == []
    command = trainer.command(1)
    assert isinstance(command, Train)
    assert sampler.told == []  # issued is not committed
    trainer.trained(command)
    assert sampler.told == [
        [PromptFeedback("key-0", "source-0", (1.0, 2.0)), PromptFeedback("key-1", "source-1", (3.0, 4.0))]
    ]
    complete(rollout, *rollout.lease(2), first=5.0)
    train(trainer, 2)
    assert sampler.told[1:] == [
        [PromptFeedback("key-2", "source-0", (5.0, 6.0)), PromptFeedback("key-3", "source-1", (7.0, 8.0))]
    ]


def test_a_report_that_is_sent_again_tells_nothing_again() -> None:
    _, trainer, rollout, sampler = a_run()
    complete(rollout, *rollout.lease(2))
    command = train(trainer, 1)
    trainer.trained(command, number=1)  # the same batch
    trainer.trained(command)  # the same report in another batch
    assert len(sampler.told) == 1


def test_nothing_is_told_before_every_rank_has_completed_the_step() -> None:
    sampler = Curriculum()
    house = House(sampler=sampler, budget=16, trainer_groups=(("policy", 2), ("critic", 1)))
    trainers = house.open_gate()
    rollout = house.rollout()
    complete(rollout, *rollout.lease(2))
    command = trainers[0].command(1)
    assert isinstance(command, Train)
    for trainer in (trainers[0], trainers[1]):
        trainer.trained(command)
        assert sampler.told == []
    trainers[2].trained(command)
    assert [[result.key for result in told] for told in sampler.told] == [["0", "1"]]


def test_what_is_discarded_is_told_with_its_rewards_and_what_is_returned_or_lost_is_not() -> None:
    _, trainer, rollout, sampler = a_run(groups_per_step=4)
    leases = rollout.lease(4)
    complete(rollout, *leases)
    command = trainer.command(1)
    assert isinstance(command, Train)
    what = ("returned", "discarded", "payload_lost", "trained")
    disposed = [
        disposed_row(group, mask, outcome, "dull" if outcome == "discarded" else "")  # type: ignore[arg-type]
        for (group, mask), outcome in zip(command.rows, what, strict=True)
    ]
    trainer.trained(command, disposed=disposed)
    assert sampler.told == [
        [PromptFeedback("key-1", "source-1", (3.0, 4.0)), PromptFeedback("key-3", "source-1", (7.0, 8.0))]
    ]
    # The others are told when they are trained: with what they have then.
    (again,) = rollout.lease(1)
    assert again.group == leases[2].group
    complete(rollout, again, first=50.0)
    rest = rollout.lease(2)
    complete(rollout, *rest, first=60.0)
    train(trainer, 2)
    assert {result.key: result.rewards for result in sampler.told[1]} == {
        "key-0": (1.0, 2.0),
        "key-2": (50.0, 51.0),
        "key-4": (60.0, 61.0),
        "key-5": (62.0, 63.0),
    }


def test_a_step_of_which_nothing_was_settled_tells_that() -> None:
    _, trainer, rollout, sampler = a_run(groups_per_step=1)
    complete(rollout, *rollout.lease(1))
    command = trainer.command(1)
    assert isinstance(command, Train)
    trainer.trained(command, disposed=[disposed_row(*command.rows[0], "returned")])
    assert sampler.told == [[]]


def test_a_prompt_is_told_once_a_step_however_many_rows_name_its_completions() -> None:
    """Its rewards are of the completions in the step, by index, trained or discarded: a row is a matter of the wire."""
    _, trainer, rollout, sampler = a_run(n=4, groups_per_step=1)
    (lease,) = rollout.lease(1)
    complete(rollout, lease)
    command = trainer.command(1)
    assert isinstance(command, Train)
    group = lease.group
    disposed = [disposed_row(group, 0b1001, "trained"), disposed_row(group, 0b0110, "discarded", "dull")]
    trainer.trained(command, disposed=disposed)
    assert sampler.told == [[PromptFeedback("key-0", "source-0", (1.0, 2.0, 3.0, 4.0))]]


def test_a_group_of_more_than_64_completions_is_one_prompt_though_it_takes_two_rows() -> None:
    _, trainer, rollout, sampler = a_run(n=70, groups_per_step=1, budget=140)
    (lease,) = rollout.lease(1)
    complete(rollout, lease)
    command = trainer.command(1)
    assert isinstance(command, Train)
    low = (1 << 64) - 1
    disposed = [disposed_row(lease.group, low, "trained"), disposed_row(lease.group, lease.mask ^ low, "trained")]
    trainer.trained(command, disposed=disposed)
    assert sampler.told == [[PromptFeedback("key-0", "source-0", tuple(1.0 + at for at in range(70)))]]


def test_only_what_is_in_the_step_is_told_of_a_group() -> None:
    _, trainer, rollout, sampler = a_run(n=4, groups_per_step=1)
    (lease,) = rollout.lease(1)
    rollout.report("discarded", (lease, 0b0010))
    rollout.submit(rollouts=(rows("completed", (lease, 0b1101), rewards=[1.0, 3.0, 4.0]),))
    train(trainer, 1)
    assert sampler.told == [[PromptFeedback("key-0", "source-0", (1.0, 3.0, 4.0))]]


def test_what_never_was_in_a_step_is_not_told() -> None:
    """Discards of rollout workers, stale groups and tails."""
    house, trainer, rollout, sampler = a_run(budget=6, tail="discard", max_staleness=0, announces_weights=False)
    leases = rollout.lease(3)
    rollout.report("discarded", (leases[0], 0b11))
    rollout.complete(*leases[1:])
    train(trainer, 1)
    assert house.controller.lifecycle.ending is not None
    assert [[result.key for result in told] for told in sampler.told] == [["key-1", "key-2"]]


def test_a_step_that_is_refused_tells_nothing() -> None:
    _, trainer, rollout, sampler = a_run()
    complete(rollout, *rollout.lease(2))
    command = trainer.command(1)
    assert isinstance(command, Train)
    with pytest.raises(ControlError):
        trainer.trained(command, disposed=[disposed_row(*command.rows[0], "trained")], number=1)
    wrong = Train(command.number, command.step + 1, command.rows, command.deadline)
    with pytest.raises(WrongStepError):
        trainer.trained(wrong, number=1)
    assert sampler.told == []


def test_a_sampler_without_the_method_is_left_alone() -> None:
    house, trainer, rollout, sampler = a_run(SeekableSampler(8, shuffle=False))
    complete(rollout, *rollout.lease(2))
    train(trainer, 1)
    assert house.controller.commands.steps == 1
    assert not hasattr(sampler, "feedback")


def test_a_feedback_that_is_no_method_is_not_called() -> None:
    class Odd(SeekableSampler):
        feedback = None

    house, trainer, rollout, _ = a_run(Odd(8))
    complete(rollout, *rollout.lease(2))
    train(trainer, 1)
    assert house.controller.commands.steps == 1


@pytest.mark.parametrize("owner_wants", [True, False])
def test_it_is_the_owner_that_is_told_and_not_what_is_nested_in_it(owner_wants: bool) -> None:
    class Wanting(Batches):
        def __init__(self) -> None:
            super().__init__(8, 2)
            self.told: list[Sequence[PromptFeedback]] = []

        def feedback(self, results: Sequence[PromptFeedback]) -> None:
            self.told.append(results)

    batches = Wanting() if owner_wants else Batches(8, 2)
    _, trainer, rollout, inner = a_run(batch_sampler=batches)
    complete(rollout, *rollout.lease(2))
    train(trainer, 1)
    assert inner.told == []
    if isinstance(batches, Wanting):
        assert [len(told) for told in batches.told] == [2]


def test_feedback_is_told_after_the_step_has_settled_and_before_its_save_is_cut() -> None:
    seen: list[tuple[int, int, bool]] = []

    class Looking(Curriculum):
        def feedback(self, results: Sequence[PromptFeedback]) -> None:
            cut_yet = any(event == "cut" for event, _ in house.events)
            seen.append((house.settled("trained"), house.controller.ledger.statistics().window_draws, cut_yet))

    house, trainer, rollout, _ = a_run(Looking(), save_every_steps=1)
    complete(rollout, *rollout.lease(2))
    train(trainer, 1)
    assert seen == [(4, 0, False)]
    assert any(event == "cut" for event, _ in house.events)


def test_a_feedback_that_raises_ends_the_execution_with_its_name() -> None:
    """The sampler may have taken half of it: what it draws from then on is nobody's curriculum."""

    class Broken(Curriculum):
        def feedback(self, results: Sequence[PromptFeedback]) -> None:
            raise KeyError("no such pool")

    house, trainer, rollout, _ = a_run(Broken(), save_every_steps=1)
    complete(rollout, *rollout.lease(2))
    command = trainer.command(1)
    assert isinstance(command, Train)
    with pytest.raises(KeyError, match="no such pool"):
        trainer.trained(command)
    assert house.controller.lifecycle.phase == "FAILED"
    assert "KeyError" in str(house.controller.lifecycle.failure)
    assert house.publish() == []


def test_what_a_resume_spares_is_not_told_again() -> None:
    records: dict[str, Any] = {"save_every_steps": 1, "records_window": "settled"}
    house, trainer, rollout, sampler = a_run(**records)
    leases = rollout.lease(3)
    complete(rollout, *leases[1:])
    train(trainer, 1)
    assert [result.key for result in sampler.told[0]] == ["key-1", "key-2"]
    again = Curriculum()
    second = ReplayHouse(cut(house, trainer, 2), sampler=again, make_prompt=prompt_of, groups_per_step=1, **records)
    assert second.controller.statistics().spared_completions == 4
    (trainer,) = second.open_gate()
    rollout = second.rollout()
    complete(rollout, *rollout.lease(1))
    train(trainer, 1)
    assert [[result.key for result in told] for told in again.told] == [["key-0"]]
