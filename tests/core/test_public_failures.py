"""Failures that were reported of other systems, each by what should have happened."""

from __future__ import annotations

from typing import Any

import pytest
from core_harness import House, Worker
from replay_harness import ReplayHouse, cut, journal, keys_of, train

from cosmos_ctrl.audit import audit_journals
from cosmos_ctrl.core.commands import End, Save, Train
from cosmos_ctrl.core.groups import Lease
from cosmos_ctrl.core.ledger import SamplingBoundary
from cosmos_ctrl.core.samplers import SeekableSampler

#: A resume with the record of the window, and one that repeats it whole: neither may skip anything.
RECORDS = pytest.mark.parametrize("records", ["settled", "nothing"])


def go_on(save: Save, records: str, **options: Any) -> House:
    """The next execution after a save."""
    record = {} if records == "settled" else {"record": None}
    return ReplayHouse(save, records_window=records, **record, **options)


def ending(trainer: Worker, house: House, number: int) -> End:
    """Does what is told from command `number` on, until END."""
    while True:
        command = trainer.command(number)
        if isinstance(command, End):
            return command
        if isinstance(command, Save):
            trainer.saved(command)
            house.publish()
        elif isinstance(command, Train):
            trainer.trained(command)
        else:
            raise AssertionError("no command")
        number += 1


@RECORDS
def test_ten_drawn_nine_trained_and_the_third_dropped_as_stale_moves_the_boundary_to_ten(records: str) -> None:
    """Reported: a prompt that is dropped for staleness blocks the position for ever, or is lost without a trace."""
    house = House(
        prompts=20,
        n=1,
        budget=20,
        groups_per_step=3,
        max_staleness=1,
        announces_weights=True,
        save_every_steps=4,
        records_window=records,
        max_outstanding_groups=20,
    )
    (trainer,) = house.open_gate()
    trainer.announce(0)
    rollout = house.rollout()
    leases = rollout.lease(10)
    for number, wanted in ((1, (0, 1, 3)), (2, (4, 5, 6))):
        rollout.complete(*(leases[at] for at in wanted), version=number - 1)
        train(trainer, number)
        trainer.announce(number)
    rollout.complete(leases[2], version=0)
    rollout.complete(*leases[7:], version=2)
    command = train(trainer, 3)
    assert [group for group, _ in command.rows] == [lease.group for lease in leases[7:]]
    statistics = house.controller.statistics()
    assert (statistics.trained_completions, statistics.discarded_completions) == (9, 1)
    assert house.reasons() == ["stale"]
    assert house.controller.ledger.snapshot().remaining_completions == 10
    assert statistics.window_draws == 0


@RECORDS
def test_window_four_batch_two_and_three_crashes_leave_none_of_24_prompts_unsettled(records: str) -> None:
    """Reported: 675 of 736 prompts lost over seven restarts, since each resumed where the fetching had got to."""
    options: dict[str, Any] = {
        "prompts": 24,
        "n": 1,
        "groups_per_step": 2,
        "save_every_steps": 1,
        "max_window_draws": 4,
    }
    house, save, journals = House(records_window=records, **options), None, []
    for crash in (True, True, True, False):
        (trainer,) = house.open_gate()
        rollout = house.rollout()
        out: list[Lease] = []
        number = 1
        for _ in range(3 if crash else 100):
            out += rollout.lease(4 - len(out))
            # Newest first, so that the window always has a hole at its front.
            for lease in [out.pop() for _ in range(min(2, len(out)))]:
                rollout.complete(lease)
            command = trainer.command(number)
            if isinstance(command, End):
                break
            if isinstance(command, Train):
                trainer.trained(command)
                number += 1
                save = cut(house, trainer, number)
                number += 1
        if crash:
            rollout.lease(4)
        journals.append(journal(house))
        if crash:
            assert house.controller.ledger.statistics().window_draws > 0
            assert save is not None
            house = go_on(save, records, number=house.controller.identity.number + 1, **options)
    report = audit_journals(journals)
    assert (report.skipped, report.remaining_completions) == (0, 0)
    assert report.live_cursor_would_skip > 0  # what the reported system would have lost
    assert report.repeated <= report.window_at_checkpoint
    assert (report.spared > 0, report.repeated == 0) == ((records == "settled"),) * 2


@RECORDS
def test_of_ten_with_four_out_and_one_settled_the_next_is_the_second_and_not_the_fifth(records: str) -> None:
    """Reported: a restart goes on behind the batch that was in flight."""
    house = House(prompts=10, n=1, budget=10, groups_per_step=1, save_every_steps=1, records_window=records)
    (trainer,) = house.open_gate()
    rollout = house.rollout()
    leases = rollout.lease(4)
    assert keys_of(leases) == ["0", "1", "2", "3"]
    rollout.complete(leases[0])
    train(trainer, 1)
    save = cut(house, trainer, 2)
    assert (save.boundary.remaining_completions, save.window_completions) == (9, 3)
    second = go_on(save, records, prompts=10, n=1)
    second.open_gate()
    assert keys_of(second.rollout().lease(10)) == [str(key) for key in range(1, 10)]


@RECORDS
@pytest.mark.parametrize("out", [0, 2])
def test_after_a_save_at_the_end_of_an_epoch_all_of_the_next_epoch_comes(records: str, out: int) -> None:
    """Reported: a position saved at an epoch's end yields an empty epoch, or ends the run, or starts the epoch over."""
    house = House(prompts=4, n=1, budget=12, groups_per_step=4, save_every_steps=1, records_window=records)
    (trainer,) = house.open_gate()
    rollout = house.rollout()
    rollout.complete(*rollout.lease(4))
    if out:
        rollout.lease(out)
    train(trainer, 1)
    save = cut(house, trainer, 2)
    assert (save.boundary.epoch, save.boundary.remaining_completions, save.window_completions) == (1, 8, out)
    second = go_on(save, records, prompts=4, n=1, groups_per_step=4)
    (trainer,) = second.open_gate()
    rollout = second.rollout()
    leases = rollout.lease(8)
    assert keys_of(leases) == ["0", "1", "2", "3"] * 2
    rollout.complete(*leases)
    epochs = [values["epoch"] for event, values in second.events if event == "issue"]
    assert epochs == [2] * 4 + [3] * 4
    assert ending(trainer, second, 1).reason == "BUDGET_EXHAUSTED"
    assert audit_journals([journal(house), journal(second)]).skipped == 0


@RECORDS
def test_at_a_step_limit_of_five_two_restarts_issue_no_command_and_the_step_stays_five(records: str) -> None:
    """Reported: each restart trains one step more than the limit."""
    options = {"prompts": 20, "n": 1, "groups_per_step": 1, "max_training_steps": 5}
    house = House(budget=20, records_window=records, **options)
    (trainer,) = house.open_gate()
    rollout = house.rollout()
    # The first one is never finished: the window of the checkpoint has settled work in it.
    rollout.complete(*rollout.lease(6)[1:])
    for number in range(1, 6):
        train(trainer, number)
    save = trainer.command(6)
    assert isinstance(save, Save)
    save = cut(house, trainer, 6)
    assert (save.steps, save.final, save.window_completions) == (5, True, 6)
    for number in (2, 3):
        again = go_on(save, records, number=number, **options)
        assert again.controller.lifecycle.phase == "ENDED"
        reason, message = again.controller.lifecycle.end or ("", "")
        assert (reason, "nothing to do: at step 5" in message) == ("STEP_LIMIT", True)
        (trainer,) = (again.worker(place) for place in again.controller.commands.ranks)
        assert isinstance(trainer.command(1), End)
        rollout = again.rollout()
        reply = rollout.lease_reply(4)
        assert reply is not None
        assert (reply.leases, reply.no_more) == ((), True)
        assert again.controller.commands.steps == 5
        assert again.publish() == []
        assert {"train", "issue", "cut"}.isdisjoint(event for event, _ in again.events)


@RECORDS
def test_restored_at_seven_with_a_limit_of_five_it_is_finished_at_once_and_says_so(records: str) -> None:
    """Reported: a limit that was lowered below the restored step is never reached again."""
    house = House(prompts=20, n=1, groups_per_step=1, max_training_steps=7, records_window=records)
    (trainer,) = house.open_gate()
    rollout = house.rollout()
    for number in range(1, 8):
        rollout.complete(*rollout.lease(1))
        train(trainer, number)
    save = cut(house, trainer, 8)
    assert save.steps == 7
    again = go_on(save, records, prompts=20, n=1, max_training_steps=5)
    assert again.controller.lifecycle.end == ("STEP_LIMIT", "nothing to do: at step 7, the limit is 5")
    assert again.controller.statistics().completed_training_steps == 7
    (trainer,) = (again.worker(place) for place in again.controller.commands.ranks)
    end = trainer.command(1)
    assert isinstance(end, End)
    assert (end.steps, end.reason) == (7, "STEP_LIMIT")


def test_a_checkpoint_of_step_zero_is_resumed_and_not_taken_for_a_fresh_start() -> None:
    """Reported: `if step:` as the test for a resume."""
    house = House(prompts=6, n=1, budget=6, records_window="settled")
    (trainer,) = house.open_gate()
    rollout = house.rollout()
    leases = rollout.lease(3)
    rollout.report("discarded", (leases[1], 0b1))
    house.controller.stop("enough")
    save = cut(house, trainer, 1)
    assert (save.steps, save.boundary.remaining_completions) == (0, 6)
    second = ReplayHouse(save, prompts=6, n=1)
    assert second.controller.resumed is not None
    assert second.controller.statistics().spared_completions == 1
    second.open_gate()
    assert keys_of(second.rollout().lease(6)) == ["0", "2", "3", "4", "5"]


def test_a_live_cursor_is_never_what_a_checkpoint_holds() -> None:
    """Reported: the loader's own state is saved, which prefetching has moved on."""
    house = House(prompts=10, n=1, budget=10, groups_per_step=1)
    (trainer,) = house.open_gate()
    rollout = house.rollout()
    for _ in range(3):
        rollout.lease(2)
    house.controller.stop("enough")
    save = cut(house, trainer, 1)
    assert save.boundary == SamplingBoundary(
        epoch=1, sampler_state=SeekableSampler(10, shuffle=False).state_dict(), remaining_completions=10
    )
    assert save.window_completions == 6
