"""The record of a checkpoint's window: what it says, when it is believed, and what a resume then generates again."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from core_harness import House, LoadState, disposed_row, prompt_of, resume_from
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_harness import Batches, ReplayHouse, cut, journal, keys_of, recorded, replay_of, train

from cosmos_ctrl.audit import audit_journals
from cosmos_ctrl.core.commands import End, Save, Train
from cosmos_ctrl.core.groups import Lease
from cosmos_ctrl.core.ledger import SamplingBoundary, SamplingReplayLedger
from cosmos_ctrl.core.replay import (
    Doubt,
    DrawLabel,
    RecordedDraw,
    Replay,
    ReplayRecord,
    boundary_digest,
    draw_identity,
    record_of,
    restore,
)
from cosmos_ctrl.core.resume import ControllerResumeMetadata
from cosmos_ctrl.core.samplers import SeekableSampler
from cosmos_ctrl.core.sampling import Draw, Prompt, Sampling
from cosmos_ctrl.core.state import EncodedState

# -- without a controller: a sampler and a ledger


class Stand:
    """A sampler drawn into a ledger, as an execution does it."""

    def __init__(self, *, length: int = 6, n: int = 2, budget: int = 24, batch: int = 0, keys: bool = False) -> None:
        self.length, self.n, self.batch, self.keys = length, n, batch, keys
        self.sampling = self.another()
        self.ledger = SamplingReplayLedger(self.sampling.start(budget), first_token=101)
        self.draws: list[Draw] = []
        self.tokens: list[int] = []

    def another(self, make_prompt: Any = prompt_of, n: int | None = None) -> Sampling:
        """The sampler of the next execution."""
        batches = Batches(self.length, self.batch) if self.batch else None
        sampler = SeekableSampler(self.length, shuffle=False)
        return Sampling(sampler, batches, prompt_of=make_prompt, completions_per_prompt=n or self.n)

    def draw(self, count: int) -> Stand:
        for _ in range(count):
            draw = self.sampling.draw(self.ledger.cursor.remaining_completions)
            keys = tuple(prompt.key for prompt in draw.prompts) if self.keys else ()
            self.tokens += self.ledger.issue_draw(draw.after, draw.sizes, DrawLabel(draw_identity(draw), keys))
            self.draws.append(draw)
        return self

    def settle(self, **masks: int) -> Stand:
        """``g0=0b11`` settles both completions of the first group."""
        for name, mask in masks.items():
            assert self.ledger.settle_mask(self.tokens[int(name[1:])], mask) == mask
        return self

    @property
    def record(self) -> ReplayRecord | None:
        return record_of(self.ledger.window())

    def metadata(self, **overrides: Any) -> ControllerResumeMetadata:
        safe = self.ledger.snapshot()
        values: dict[str, Any] = {
            "completed_training_steps": 1,
            "completed_optimizer_updates": 1,
            "remaining_completions": safe.remaining_completions,
            "epoch": safe.epoch,
            "sampling_owner": self.sampling.owner_name,
            "sampler_state": safe.encoded_state,
            "checkpoint_path": "checkpoints/x",
            "checkpoint_id": "x",
        }
        return ControllerResumeMetadata(**values | overrides)

    def resume(
        self, sampling: Sampling | None = None, record: Any = "its own", **options: Any
    ) -> tuple[SamplingBoundary, Replay]:
        sampling = sampling or self.another()
        record = self.record if record == "its own" else record
        return restore(sampling, options.pop("adapter", LoadState()), self.metadata(), record, **options)


def shape(replay: Replay) -> list[tuple[tuple[str, ...], tuple[int, ...]]]:
    return [(tuple(prompt.key for prompt in each.draw.prompts), each.settled) for each in replay.draws]


def test_there_is_nothing_to_record_of_an_empty_window() -> None:
    assert Stand().record is None
    assert Stand().draw(3).settle(g0=0b11, g1=0b11, g2=0b11).record is None


def test_there_is_nothing_to_record_when_nothing_beyond_the_boundary_is_settled() -> None:
    assert Stand().draw(4).record is None
    assert Stand().draw(4).settle(g0=0b11, g1=0b11).record is None


def test_a_record_holds_the_draws_up_to_the_last_that_has_something_settled() -> None:
    stand = Stand().draw(6).settle(g0=0b11, g2=0b11, g4=0b10)
    record = stand.record
    assert record == ReplayRecord(
        boundary_digest(stand.draws[0].after),
        tuple(
            RecordedDraw(draw_identity(draw), (2,), (mask,))
            for draw, mask in zip(stand.draws[1:5], (0, 0b11, 0, 0b10), strict=True)
        ),
    )


def test_a_record_tells_the_groups_of_a_draw_apart() -> None:
    stand = Stand(batch=3, length=4).draw(2).settle(g1=0b11, g3=0b01)
    record = stand.record
    assert record is not None
    assert [(draw.sizes, draw.settled) for draw in record.draws] == [((2, 2, 2), (0, 0b11, 0)), ((2,), (0b01,))]


@pytest.mark.parametrize("keys", [False, True])
@pytest.mark.parametrize("first", [{"g0": 0b11}, {"g0": 0b11, "g1": 0b11}])
def test_a_draw_whose_first_groups_are_settled_is_recorded_whole(keys: bool, first: dict[str, int]) -> None:
    stand = Stand(batch=3, keys=keys, budget=18).draw(2).settle(**first, g4=0b01)
    record = stand.record
    assert record is not None
    masks = tuple(first.get(f"g{group}", 0) for group in range(3))
    assert [(draw.sizes, draw.settled) for draw in record.draws] == [((2, 2, 2), masks), ((2, 2, 2), (0, 0b01, 0))]
    _, replay = stand.resume(prompt_by_key=Prompt if keys else None)
    assert replay.doubt == ""
    settled = [mask for each in replay.draws for mask in each.settled]
    assert settled == [*masks, 0, 0b01, 0]


def test_a_group_of_more_than_64_completions_is_recorded_bit_by_bit() -> None:
    mask = 1 << 99 | 1 << 64 | 1 << 63 | 1
    stand = Stand(n=100, budget=200).draw(2).settle(g0=mask)
    record = stand.record
    assert record is not None
    assert [(draw.sizes, draw.settled) for draw in record.draws] == [((100,), (mask,))]
    _, replay = stand.resume()
    assert shape(replay) == [(("0",), (mask,))]


def test_a_record_is_of_the_moment_of_the_cut() -> None:
    stand = Stand().draw(4).settle(g2=0b01)
    window = stand.ledger.window()
    before = record_of(window)
    stand.settle(g0=0b11, g2=0b10, g3=0b11).draw(2).settle(g1=0b11, g5=0b11)
    assert record_of(window) == before
    assert before is not None
    assert [draw.settled for draw in before.draws] == [(0,), (0,), (0b01,)]


def test_with_keys_the_whole_window_is_recorded_and_where_it_ends() -> None:
    stand = Stand(batch=2, keys=True).draw(3).settle(g0=0b01)
    record = stand.record
    assert record is not None
    assert [draw.keys for draw in record.draws] == [("0", "1"), ("2", "3"), ("4", "5")]
    assert [draw.settled for draw in record.draws] == [(0b01, 0), (0, 0), (0, 0)]
    assert record.cursor == stand.ledger.cursor
    untouched = Stand(keys=True).draw(2).record
    assert untouched is not None
    assert [draw.keys for draw in untouched.draws] == [("0",), ("1",)]


def test_without_keys_a_record_has_no_cursor() -> None:
    record = Stand().draw(2).settle(g1=0b11).record
    assert record is not None
    assert record.cursor is None


# -- identities


def a_draw(*prompts: Prompt, sizes: tuple[int, ...] | None = None, epoch: int = 1, state: Any = 0) -> Draw:
    after = SamplingBoundary(epoch=epoch, sampler_state=state, remaining_completions=5)
    return Draw(prompts, sizes or (2,) * len(prompts), after)


def test_what_a_draw_gave_is_its_identity_and_the_samplers_state_is_not() -> None:
    base = a_draw(Prompt("ab", "c"), Prompt("d"))
    assert draw_identity(base) == draw_identity(a_draw(Prompt("ab", "c"), Prompt("d"), state={"anything": 1}))
    payload = a_draw(Prompt("ab", "c", b"payload", "raw"), Prompt("d"))
    assert draw_identity(base) == draw_identity(payload)
    others = [
        a_draw(Prompt("d"), Prompt("ab", "c")),
        a_draw(Prompt("a", "bc"), Prompt("d")),
        a_draw(Prompt("abc"), Prompt("d")),
        a_draw(Prompt("ab", "c"), Prompt("", "d")),
        a_draw(Prompt("ab", "c")),
        a_draw(Prompt("ab", "c"), Prompt("d"), Prompt("")),
        a_draw(Prompt("ab", "c"), Prompt("d"), sizes=(2, 1)),
        a_draw(Prompt("ab", "c"), Prompt("d"), sizes=(1, 2)),
        a_draw(Prompt("ab", "c"), Prompt("d"), epoch=2),
        a_draw(Prompt("ab", "c"), Prompt("d"), epoch=11),
    ]
    identities = [draw_identity(draw) for draw in (base, *others)]
    assert len(set(identities)) == len(identities)
    assert all(0 <= identity < 1 << 64 for identity in identities)


def test_a_draws_identity_is_the_same_in_every_version() -> None:
    """It lies in checkpoints: another one would make every resume from an older version repeat its window."""
    assert draw_identity(a_draw(Prompt("key", "source"), Prompt("é"), sizes=(8, 1), epoch=3)) == 15295195550254583948
    start = SamplingBoundary(epoch=3, sampler_state={"position": 7}, remaining_completions=40)
    assert boundary_digest(start) == "181e9bb4418eb9e60b40864158749af4"


def test_a_boundarys_digest_sees_all_of_it() -> None:
    def digest(**values: Any) -> str:
        given = {"epoch": 1, "remaining_completions": 10, "sampler_state": EncodedState(b"x", "raw")}
        return boundary_digest(SamplingBoundary(**given | values))

    others = [
        digest(epoch=2),
        digest(remaining_completions=1),
        digest(epoch=11, remaining_completions=0),
        digest(sampler_state=EncodedState(b"y", "raw")),
        digest(sampler_state=EncodedState(b"x", "wra")),
        digest(sampler_state=EncodedState(b"w/x", "ra")),
        digest(sampler_state=EncodedState(b"/x", "raw")),
        digest(sampler_state=EncodedState(b"", "rawx")),
    ]
    assert len({digest(), *others}) == len(others) + 1
    assert digest() == digest()


# -- restoring against a record


@pytest.mark.parametrize("batch", [0, 1, 3, 4])
def test_what_was_settled_is_passed_over_and_the_sampler_goes_on_behind_the_record(batch: int) -> None:
    stand = Stand(batch=batch, length=6, n=2, budget=36).draw(3).settle(g0=0b10, g2=0b11)
    uninterrupted = [tuple(p.key for p in draw.prompts) for draw in (*stand.draws, *stand.draw(1).draws[-1:])]
    record = stand.record
    assert record is not None
    sampling = stand.another()
    start, replay = stand.resume(sampling)
    assert start == stand.ledger.snapshot()
    assert replay.doubt == ""
    assert [each.draw for each in replay.draws] == stand.draws[: len(record.draws)]
    assert [each.settled for each in replay.draws] == [draw.settled for draw in record.draws]
    after = replay.draws[-1].draw.after.remaining_completions
    following = sampling.draw(after)
    assert tuple(p.key for p in following.prompts) == uninterrupted[len(record.draws)]


def test_a_window_over_an_epochs_end_is_redrawn_over_it() -> None:
    stand = Stand(length=3, n=1, budget=9).draw(2).settle(g0=1, g1=1).draw(5).settle(g6=1, g2=1, g4=1)
    start, replay = stand.resume()
    assert (start.epoch, start.remaining_completions) == (1, 6)
    assert [(each.draw.after.epoch, *shape(Replay((each,)))[0]) for each in replay.draws] == [
        (2, ("0",), (0,)),
        (2, ("1",), (1,)),
        (2, ("2",), (0,)),
        (3, ("0",), (1,)),
    ]


def test_groups_that_the_budget_cuts_are_recorded_as_they_were_cut() -> None:
    stand = Stand(n=4, budget=11, batch=3, length=6).draw(1).settle(g1=0b1111, g2=0b100)
    assert stand.draws[0].sizes == (4, 4, 3)
    _, replay = stand.resume()
    assert (shape(replay), replay.doubt) == ([(("0", "1", "2"), (0, 0b1111, 0b100))], "")
    assert replay.draws[0].draw.after.remaining_completions == 0


def test_without_a_record_nothing_is_replayed_and_nothing_is_doubted() -> None:
    stand = Stand().draw(3).settle(g1=0b11)
    sampling = stand.another()
    assert stand.resume(sampling, None) == (stand.ledger.snapshot(), Replay())
    assert sampling.draw(24).prompts == (Prompt("0"),)


def test_a_record_that_could_not_be_read_is_a_doubt_and_everything_replays() -> None:
    stand = Stand().draw(3).settle(g1=0b11)
    sampling = stand.another()
    assert stand.resume(sampling, Doubt("gone")) == (stand.ledger.snapshot(), Replay((), "gone"))
    assert sampling.draw(24).prompts == (Prompt("0"),)


@pytest.mark.parametrize("keys", [False, True])
def test_a_record_of_another_boundary_is_not_believed_and_the_sampler_is_not_drawn_from(keys: bool) -> None:
    stand = Stand(keys=keys).draw(3).settle(g1=0b11)
    older = stand.record
    stand.settle(g0=0b11)
    sampling = stand.another()
    asked: list[str] = []
    start, replay = stand.resume(sampling, older, prompt_by_key=lambda key: asked.append(key) or Prompt(key))
    assert start == stand.ledger.snapshot()
    assert (replay.draws, "another boundary" in replay.doubt) == ((), True)
    assert asked == []
    assert sampling.draw(20).prompts == (Prompt("2"),)


@pytest.mark.parametrize("other", range(5))
def test_everything_before_the_first_other_draw_is_spared_and_everything_from_it_on_replays(other: int) -> None:
    stand = Stand().draw(5).settle(g1=0b11, g2=0b01, g4=0b11)
    sampling = stand.another(lambda index: Prompt("other" if index == other else str(index)))
    start, replay = stand.resume(sampling)
    assert [each.settled for each in replay.draws] == [*[(0,), (0b11,), (0b01,), (0,), (0b11,)][:other], ()]
    assert f"draw {other + 1} of 5" in replay.doubt
    # The other draw itself is not lost, and what follows is drawn from where the sampler stands.
    assert replay.draws[-1].draw.prompts == (Prompt("other"),)
    left = replay.draws[-1].draw.after.remaining_completions
    assert left == start.remaining_completions - 2 * (other + 1)
    following = [sampling.draw(left - 2 * more).prompts[0].key for more in range(5 - other)]
    assert following == [str((other + 1 + more) % 6) for more in range(5 - other)]


def test_another_number_of_completions_is_another_draw() -> None:
    stand = Stand(n=2).draw(3).settle(g1=0b11)
    _, replay = stand.resume(stand.another(n=3))
    assert (shape(replay), "draw 1 of 2" in replay.doubt) == ([(("0",), ())], True)


def test_sizes_that_are_not_the_draws_are_not_believed_whatever_the_identity_says() -> None:
    stand = Stand(n=2).draw(2).settle(g1=0b11)
    record = stand.record
    assert record is not None
    forged = replace(record, draws=(record.draws[0], replace(record.draws[1], sizes=(3,), settled=(0b111,))))
    _, replay = stand.resume(record=forged)
    assert (shape(replay), "draw 2 of 2" in replay.doubt) == ([(("0",), (0,)), (("1",), ())], True)


def test_a_budget_that_ends_before_the_record_does_is_a_doubt_after_what_it_could_replay() -> None:
    stand = Stand(n=2, budget=6).draw(3).settle(g1=0b11)
    record = stand.record
    assert record is not None
    more = RecordedDraw(1, (2,), (0b11,))
    last = RecordedDraw(draw_identity(stand.draws[2]), (2,), (0b01,))
    _, replay = stand.resume(record=replace(record, draws=(*record.draws, last, more, more)))
    assert shape(replay) == [(("0",), (0,)), (("1",), (0b11,)), (("2",), (0b01,))]
    assert "budget ends before draw 4 of 5" in replay.doubt


def test_an_adapter_that_raises_is_heard_as_it_is() -> None:
    class Broken(LoadState):
        def restore_sampler(self, sampler: Any, metadata: Any) -> None:
            raise error

    error = ZeroDivisionError("the application's own")
    for keys in (False, True):
        with pytest.raises(ZeroDivisionError) as caught:
            Stand(keys=keys).draw(2).settle(g1=0b11).resume(adapter=Broken(), prompt_by_key=Prompt)
        assert caught.value is error


# -- the window issued again by its keys


class Noted:
    """Notes what is asked of a sampler that draws something else each time."""

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def set_epoch(self, epoch: int) -> None:
        self.calls.append(("set_epoch", epoch))

    def __iter__(self) -> Any:
        self.calls.append("iter")
        for index in range(100, 1000):
            self.calls.append("next")
            yield index

    def state_dict(self) -> dict[str, int]:
        self.calls.append("state_dict")
        return {"position": 0}

    def load_state_dict(self, state: Any) -> None:
        self.calls.append(("load_state_dict", state))


class NotedAdapter(LoadState):
    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def restore_sampler(self, sampler: Any, metadata: ControllerResumeMetadata) -> None:
        self.calls.append(("restore", metadata))
        super().restore_sampler(sampler, metadata)


def noted(
    stand: Stand, record: Any = "its own", *, by_key: Any = Prompt
) -> tuple[list[Any], Sampling, SamplingBoundary, Replay]:
    calls: list[Any] = []

    def find(key: str) -> Prompt:
        calls.append(("find", key))
        found: Prompt = by_key(key)
        return found

    sampling = Sampling(Noted(calls), prompt_of=prompt_of, completions_per_prompt=2)
    start, replay = stand.resume(sampling, record, adapter=NotedAdapter(calls), prompt_by_key=find)
    return calls, sampling, start, replay


def keyed() -> Stand:
    """Four draws over an epoch's end, the first is settled, of the second a half and of the fourth all."""
    return Stand(length=2, keys=True, budget=20).draw(4).settle(g0=0b11, g1=0b01, g3=0b11)


def test_with_keys_the_sampler_is_restored_once_at_the_cursor_and_never_at_the_boundary() -> None:
    stand = keyed()
    calls, sampling, start, replay = noted(stand)
    cursor = stand.ledger.cursor
    assert (cursor.epoch, stand.ledger.snapshot().epoch) == (2, 1)
    finds = [("find", key) for key in ("1", "0", "1")]
    (restored,) = [call[1] for call in calls if call[0] == "restore"]
    assert calls == [*finds, ("set_epoch", 2), ("restore", restored), ("load_state_dict", cursor.sampler_state)]
    moved = stand.metadata().values() | {
        "epoch": 2,
        "remaining_completions": cursor.remaining_completions,
        "sampler_state": cursor.encoded_state,
    }
    assert restored.values() == moved
    assert start == stand.ledger.snapshot()
    (replayed,) = replay.draws
    assert replay.doubt == ""
    assert replayed.draw == Draw((Prompt("1"), Prompt("0"), Prompt("1")), (2, 2, 2), cursor)
    assert replayed.settled == (0b01, 0, 0b11)
    assert sampling.draw(cursor.remaining_completions).prompts == (Prompt("100"),)
    assert calls[-3:] == ["iter", "next", "state_dict"]


def fallen_back(stand: Stand, record: Any = "its own", by_key: Any = Prompt) -> str:
    """A doubt in a record with keys: the sampler is restored at the boundary, once, and not drawn from. Returns the doubt."""
    calls, sampling, start, replay = noted(stand, record, by_key=by_key)
    safe = stand.ledger.snapshot()
    assert start == safe
    assert replay.draws == ()
    assert [call for call in calls if call[0] != "find"] == [
        ("set_epoch", safe.epoch),
        ("restore", stand.metadata()),
        ("load_state_dict", safe.sampler_state),
    ]
    assert sampling.draw(20).prompts == (Prompt("100"),)
    return replay.doubt


def test_with_keys_a_prompt_that_is_unknown_now_means_that_everything_is_drawn_anew() -> None:
    assert "'1'" in fallen_back(keyed(), by_key={"0": Prompt("0")}.__getitem__)


def replace_cursor(cursor: SamplingBoundary, **values: Any) -> SamplingBoundary:
    named = {
        "epoch": cursor.epoch,
        "remaining_completions": cursor.remaining_completions,
        "sampler_state": cursor.encoded_state,
    }
    return SamplingBoundary(**named | values)


def test_with_keys_groups_that_do_not_lead_to_the_cursor_are_not_believed() -> None:
    stand = keyed()
    record = stand.record
    assert record is not None
    assert record.cursor is not None
    last = record.draws[-1]
    for sizes in ((1,), (3,), (2, 2)):
        wrong = replace(record, draws=(*record.draws[:-1], replace(last, sizes=sizes)))
        assert "do not lead" in fallen_back(stand, wrong)
    later = replace_cursor(record.cursor, remaining_completions=13)
    assert "do not lead" in fallen_back(stand, replace(record, cursor=later))


def test_with_keys_a_cursor_in_an_earlier_epoch_is_not_believed() -> None:
    stand = Stand(length=2, keys=True, budget=20).draw(2).settle(g0=0b11, g1=0b11).draw(2).settle(g2=0b11).draw(1)
    assert stand.ledger.snapshot().epoch == 2
    record = stand.record
    assert record is not None
    assert record.cursor is not None
    wrong = replace(record, cursor=replace_cursor(record.cursor, epoch=1))
    assert "do not lead" in fallen_back(stand, wrong)


def test_with_keys_each_group_has_one() -> None:
    stand = keyed()
    record = stand.record
    assert record is not None
    for keys in ((), ("1", "0")):
        wrong = replace(record, draws=(*record.draws[:-1], replace(record.draws[-1], keys=keys)))
        assert "one key for each group" in fallen_back(stand, wrong)


def test_a_record_with_keys_is_drawn_again_where_nobody_can_find_a_prompt_by_its_key() -> None:
    stand = Stand(keys=True).draw(3).settle(g1=0b11)
    _, replay = stand.resume()
    assert (shape(replay), replay.doubt) == ([(("0",), (0,)), (("1",), (0b11,)), (("2",), (0,))], "")


def test_a_record_without_keys_is_drawn_again_also_where_prompts_can_be_found_by_key() -> None:
    stand = Stand().draw(3).settle(g1=0b11)
    _, replay = stand.resume(prompt_by_key=lambda key: pytest.fail(key))
    assert (shape(replay), replay.doubt) == ([(("0",), (0,)), (("1",), (0b11,))], "")


# -- through the controller


RECORDS: dict[str, Any] = {"save_every_steps": 1, "records_window": "settled"}


def a_cut(house: House | None = None, **overrides: Any) -> tuple[House, Save]:
    """Six prompts out, 2 and 4 trained, of 3 one completion discarded by its worker: then saved and, with 1, 3, 5, 6 out, lost."""
    house = house or House(**{"prompts": 6, "n": 2, "budget": 12, **RECORDS, **overrides})
    (trainer,) = house.open_gate()
    rollout = house.rollout()
    leases = rollout.lease(6)
    rollout.report("discarded", (leases[2], 0b01))
    rollout.complete(leases[1], leases[3])
    command = train(trainer, 1)
    assert [group for group, _ in command.rows] == [leases[1].group, leases[3].group]
    return house, cut(house, trainer, 2)


def finish(house: House) -> tuple[list[Lease], End]:
    """Generates and trains everything that is given; returns what was leased."""
    (trainer,) = house.open_gate()
    rollout = house.rollout()
    leases: list[Lease] = []
    for number in range(1, 100):
        if given := rollout.lease(2):
            rollout.complete(*given)
            leases += given
        command = trainer.command(number)
        if isinstance(command, End):
            return leases, command
        if isinstance(command, Save):
            trainer.saved(command)
            house.publish()
        elif isinstance(command, Train):
            trainer.trained(command)
    raise AssertionError("it does not end")


def test_a_resume_generates_only_what_was_unfinished_at_the_cut() -> None:
    _, save = a_cut()
    second = ReplayHouse(save)
    leases, end = finish(second)
    assert [(lease.prompt.key, lease.mask, lease.size) for lease in leases] == [
        ("0", 0b11, 2),
        ("2", 0b10, 2),
        ("4", 0b11, 2),
        ("5", 0b11, 2),
    ]
    assert end.reason == "BUDGET_EXHAUSTED"
    statistics = second.controller.statistics()
    assert (statistics.spared_completions, statistics.trained_completions) == (5, 7)
    assert (statistics.safe_remaining_completions, statistics.window_draws, statistics.replay_doubts) == (0, 0, 0)


def test_the_same_resume_without_the_record_repeats_the_whole_window() -> None:
    _, save = a_cut()
    leases, _ = finish(ReplayHouse(save, record=None))
    assert [(lease.prompt.key, lease.mask) for lease in leases] == [(str(key), 0b11) for key in range(6)]
    leases, _ = finish(resume_from(save))
    assert len(leases) == 6


def test_what_is_spared_is_in_the_statistics_and_in_the_journal_from_the_start() -> None:
    _, save = a_cut()
    second = ReplayHouse(save)
    first = second.controller.ledger.next_token - 4  # the record ends with what is settled last
    statistics = second.controller.statistics()
    assert (statistics.spared_completions, statistics.trained_completions, statistics.discarded_completions) == (
        5,
        0,
        0,
    )
    assert (statistics.window_draws, statistics.window_completions) == (4, 8)
    assert (statistics.groups_pending, statistics.blocking_group) == (2, first)
    events = [
        (event, values["group"] if event == "issue" else values["rows"][0][0])
        for event, values in second.events
        if event in ("issue", "settle")
    ]
    assert events == [
        ("issue", first),
        ("issue", first + 1),
        ("settle", first + 1),
        ("issue", first + 2),
        ("settle", first + 2),
        ("issue", first + 3),
        ("settle", first + 3),
    ]
    assert recorded(second) == [(first + 1, 0b11), (first + 2, 0b01), (first + 3, 0b11)]
    assert all((values["reason"], values["step"]) == ("", 1) for event, values in second.events if event == "settle")
    assert second.controller.replay_doubts == 0
    assert "replay_doubt" not in [event for event, _ in second.events]


def test_a_doubt_is_counted_once_and_in_the_journal_with_its_reason() -> None:
    _, save = a_cut()
    second = ReplayHouse(save, record=Doubt("its digest is another"))
    assert second.controller.statistics().replay_doubts == 1
    assert [values for event, values in second.events if event == "replay_doubt"] == [{"why": "its digest is another"}]
    assert second.controller.statistics().spared_completions == 0


def test_a_doubt_in_the_middle_spares_what_is_before_it() -> None:
    _, save = a_cut()
    second = ReplayHouse(save, make_prompt=lambda index: Prompt("other" if index == 3 else str(index)))
    assert second.controller.statistics().spared_completions == 3
    assert second.controller.statistics().replay_doubts == 1
    leases, _ = finish(second)
    assert [(lease.prompt.key, lease.mask) for lease in leases] == [
        ("0", 0b11),
        ("2", 0b10),
        ("other", 0b11),
        ("4", 0b11),
        ("5", 0b11),
    ]


def test_a_restart_at_its_limit_replays_nothing() -> None:
    _, save = a_cut()
    second = ReplayHouse(save, max_training_steps=1)
    assert second.controller.lifecycle.over
    assert second.controller.statistics().spared_completions == 0
    assert second.controller.ledger.snapshot() == save.boundary


def test_what_is_spared_does_not_change_what_the_budget_or_the_boundary_say() -> None:
    _, save = a_cut()
    second = ReplayHouse(save)
    ledger = second.controller.ledger
    assert ledger.snapshot() == save.boundary
    assert ledger.cursor.remaining_completions == save.boundary.remaining_completions - 8
    assert second.controller.resumed is not None
    assert second.controller.resumed.repeat_bound_completions == 12


# -- groups that are partly settled


def test_the_rest_of_a_group_is_not_dropped_for_being_too_little() -> None:
    _, save = a_cut()
    second = ReplayHouse(save, min_completions_per_group=2, groups_per_step=4)
    (trainer,) = second.open_gate()
    rollout = second.rollout()
    leases = rollout.lease(6)
    assert (leases[1].prompt.key, leases[1].mask) == ("2", 0b10)
    rollout.complete(*leases)
    assert second.reasons() == []
    assert train(trainer, 1).rows[1] == (leases[1].group, 0b10)


def test_a_group_that_is_too_little_even_with_what_was_settled_is_dropped() -> None:
    house = House(prompts=2, n=4, budget=8, **RECORDS | {"groups_per_step": 1})
    (trainer,) = house.open_gate()
    rollout = house.rollout()
    leases = rollout.lease(2)
    rollout.report("discarded", (leases[0], 0b0001))
    rollout.complete(leases[1])
    train(trainer, 1)
    second = ReplayHouse(cut(house, trainer, 2), prompts=2, n=4, min_completions_per_group=3, groups_per_step=1)
    second.open_gate()
    rollout = second.rollout()
    (lease,) = rollout.lease(2)
    assert lease.mask == 0b1110
    rollout.report("discarded", (lease, 0b1100))
    rollout.report("completed", (lease, 0b0010))
    # One of before and one of now: fewer than three.
    assert "below_minimum" in second.reasons()


def test_a_group_of_more_than_64_completions_is_leased_for_what_is_missing_of_it() -> None:
    house = House(prompts=2, n=100, budget=200, **RECORDS | {"groups_per_step": 1})
    (trainer,) = house.open_gate()
    rollout = house.rollout()
    leases = rollout.lease(2)
    gone = 1 << 99 | 1 << 64 | 1 << 3
    rollout.report("discarded", (leases[0], gone))
    rollout.complete(leases[1])
    train(trainer, 1)
    second = ReplayHouse(cut(house, trainer, 2), prompts=2, n=100, groups_per_step=1)
    second.open_gate()
    (lease,) = second.rollout().lease(2)
    assert lease.mask == ((1 << 100) - 1) ^ gone
    assert second.controller.statistics().spared_completions == 103


# -- limits


def test_what_does_not_fit_the_window_waits_and_is_spared_when_it_does() -> None:
    _, save = a_cut()
    second = ReplayHouse(save, max_window_draws=2)
    # The first two of four draws are issued: of the second everything is settled.
    assert second.controller.statistics().spared_completions == 2
    assert second.controller.statistics().window_draws == 2
    leases, end = finish(second)
    assert [(lease.prompt.key, lease.mask) for lease in leases] == [
        ("0", 0b11),
        ("2", 0b10),
        ("4", 0b11),
        ("5", 0b11),
    ]
    assert second.controller.statistics().spared_completions == 5
    assert (end.reason, second.controller.ledger.snapshot().remaining_completions) == ("BUDGET_EXHAUSTED", 0)


def test_a_stop_while_a_recorded_draw_waits_for_room_loses_nothing() -> None:
    _, save = a_cut()
    second = ReplayHouse(save, max_window_draws=2)
    (trainer,) = second.open_gate()
    rollout = second.rollout()
    (lease,) = rollout.lease(5)
    rollout.complete(lease)
    second.controller.stop("enough")
    again = trainer.command(1)
    assert isinstance(again, End)  # nothing was trained, so the checkpoint that it resumed from is the newest
    third = ReplayHouse(save, number=3)
    assert third.controller.statistics().spared_completions == 5


def test_replayed_groups_count_as_outstanding_only_as_far_as_they_are_unfinished() -> None:
    _, save = a_cut()
    second = ReplayHouse(save, max_outstanding_groups=2)
    assert second.controller.rollouts.outstanding_groups == 2
    assert second.controller.ledger.statistics().window_draws == 4


def test_where_nothing_is_recorded_nothing_is_kept_of_a_draw_for_it() -> None:
    for records, kept in (("nothing", [None]), ("settled", [()]), ("keys", [("0",)])):
        house = House(records_window=records)
        house.open_gate()
        house.rollout().lease(1)
        labels = [label for label, _, _ in house.controller.ledger.window().draws()]
        assert [label.keys if label else None for label in labels] == kept


@pytest.mark.parametrize("keys", [False, True])
def test_g10_a_replayed_prompt_that_fits_no_message_ends_the_execution_as_a_drawn_one_does(keys: bool) -> None:
    """A limit was lowered between the executions: the worker's call would be refused for ever, with the library's own error."""

    def large(index: Any) -> Prompt:
        return Prompt(str(index), payload=b"x" * 40_000)

    records = RECORDS | {"records_window": "keys" if keys else "settled"}
    sampling = Sampling(SeekableSampler(6, shuffle=False), prompt_of=large, completions_per_prompt=2)
    _, save = a_cut(House(sampling=sampling, budget=12, **records))
    options: dict[str, Any] = {"make_prompt": large, "max_message_bytes": 1 << 16, **records}
    without = ReplayHouse(save, record=None, **options)
    without.open_gate()
    with pytest.raises(ValueError, match="prompt 0 takes 40"):
        without.rollout().lease(1)
    second = ReplayHouse(save, prompt_by_key=large if keys else None, **options)
    assert second.controller.lifecycle.phase == "FAILED"
    assert "prompt 0 takes 40" in str(second.controller.lifecycle.failure)


# -- generations


def test_a_save_soon_after_a_resume_records_what_both_executions_settled() -> None:
    _, save = a_cut()
    second = ReplayHouse(save, **RECORDS)
    (trainer,) = second.open_gate()
    rollout = second.rollout()
    leases = rollout.lease(4)
    assert keys_of(leases) == ["0", "2", "4", "5"]
    rollout.complete(leases[1], leases[3])
    train(trainer, 1)
    again = cut(second, trainer, 2)
    assert again.boundary == save.boundary
    third = ReplayHouse(again, number=3, **RECORDS)
    # 1, 3: the first execution; 2: both, half and half; 5: the second.
    assert third.controller.statistics().spared_completions == 8
    leases, end = finish(third)
    assert [(lease.prompt.key, lease.mask) for lease in leases] == [("0", 0b11), ("4", 0b11)]
    assert end.steps == 3
    assert third.controller.ledger.snapshot().remaining_completions == 0


def test_a_third_and_a_fourth_execution_resume_from_the_same_record() -> None:
    _, save = a_cut()
    for number in (2, 3, 4):
        house = ReplayHouse(save, number=number)
        assert house.controller.statistics().spared_completions == 5
        leases, _ = finish(house)
        assert [lease.mask for lease in leases] == [0b11, 0b10, 0b11, 0b11]


def test_with_keys_later_generations_issue_exactly_the_unfinished_remains() -> None:
    def by_key(key: str) -> Prompt:
        return Prompt(key)

    records = RECORDS | {"records_window": "keys"}
    _, save = a_cut(**records, budget=20)
    second = ReplayHouse(
        save, sampler=SeekableSampler(6, seed=9), prompt_by_key=by_key, adapter=AnySampler(), **records
    )
    (trainer,) = second.open_gate()
    rollout = second.rollout()
    leases = rollout.lease(4)
    assert [(lease.prompt.key, lease.mask) for lease in leases] == [("0", 3), ("2", 2), ("4", 3), ("5", 3)]
    assert second.controller.statistics().window_draws == 1
    new = rollout.lease(1)
    rollout.complete(leases[0], new[0])
    train(trainer, 1)
    again = cut(second, trainer, 2)
    assert again.boundary == save.boundary  # nothing of the window is behind it before all of it is
    third = ReplayHouse(
        again, number=3, sampler=SeekableSampler(6, seed=4), prompt_by_key=by_key, adapter=AnySampler(), **records
    )
    assert third.controller.statistics().spared_completions == 9
    (trainer,) = third.open_gate()
    rollout = third.rollout()
    leases = rollout.lease(3)
    assert [(lease.prompt.key, lease.mask) for lease in leases] == [("2", 2), ("4", 3), ("5", 3)]
    rollout.complete(*leases)
    train(trainer, 1)
    trainer.saved(trainer.command(2))  # type: ignore[arg-type]
    third.publish()
    rest = rollout.lease(1)
    rollout.complete(*rest)
    train(trainer, 3)
    assert third.controller.ledger.snapshot() == third.controller.ledger.cursor
    assert third.controller.ledger.snapshot().remaining_completions == 20 - 12 - 2 - 2


def test_with_keys_a_window_over_an_epochs_end_is_audited_as_what_it_is() -> None:
    """A completion is a prompt of an epoch: issued again by its key, it is the same one, whatever the epoch is by then."""
    records = RECORDS | {"records_window": "keys"}
    house = House(prompts=2, n=2, budget=12, **records)
    (trainer,) = house.open_gate()
    rollout = house.rollout()
    leases = rollout.lease(5)
    assert keys_of(leases) == ["0", "1", "0", "1", "0"]  # of epochs 1, 1, 2, 2, 3
    rollout.complete(leases[1], leases[2])
    train(trainer, 1)
    second = ReplayHouse(cut(house, trainer, 2), prompts=2, prompt_by_key=Prompt, **records)
    again, _ = finish(second)
    assert [(lease.prompt.key, lease.mask) for lease in again] == [("0", 3), ("1", 3), ("0", 3), ("1", 3)]
    issued = [(values["epoch"], values["key"]) for event, values in second.events if event == "issue"]
    assert issued == [(1, "0"), (1, "1"), (2, "0"), (2, "1"), (3, "0"), (3, "1")]
    report = audit_journals([journal(house), journal(second)])
    assert (report.skipped, report.repeated, report.redone, report.spared) == (0, 0, 0, 4)


def test_with_keys_a_third_execution_knows_the_epochs_of_the_first() -> None:
    records = RECORDS | {"records_window": "keys"}
    house = House(prompts=2, n=2, budget=12, **records)
    (trainer,) = house.open_gate()
    rollout = house.rollout()
    leases = rollout.lease(5)
    rollout.complete(leases[1], leases[2])
    train(trainer, 1)
    second = ReplayHouse(cut(house, trainer, 2), prompts=2, prompt_by_key=Prompt, **records)
    (trainer,) = second.open_gate()
    rollout = second.rollout()
    leases = rollout.lease(3)
    rollout.complete(*leases[1:])
    train(trainer, 1)
    third = ReplayHouse(cut(second, trainer, 2), number=3, prompts=2, prompt_by_key=Prompt, **records)
    assert third.controller.statistics().spared_completions == 8
    finish(third)
    report = audit_journals([journal(house), journal(second), journal(third)])
    assert (report.skipped, report.repeated, report.redone) == (0, 0, 0)


def test_g1_the_audit_does_not_take_a_records_word_for_it() -> None:
    """A record that lies makes a resume skip, and the journals say so: what was settled counts where it was settled."""
    house, save = a_cut()
    record = record_of(save.window)  # type: ignore[arg-type]
    assert record is not None
    first, *rest = record.draws
    second = ReplayHouse(save, record=replace(record, draws=(replace(first, settled=(0b10,)), *rest)), **RECORDS)
    assert second.controller.statistics().spared_completions == 6
    finish(second)
    report = audit_journals([journal(house), journal(second)])
    assert (report.skipped, report.spared) == (1, 6)


def test_what_a_live_cursor_would_have_lost_does_not_hold_what_was_spared() -> None:
    """At the second cut the first and the fifth prompt are out; the others were settled, in one execution or the other."""
    house, save = a_cut()
    second = ReplayHouse(save, **RECORDS)
    (trainer,) = second.open_gate()
    rollout = second.rollout()
    leases = rollout.lease(4)
    rollout.complete(leases[1], leases[3])
    train(trainer, 1)
    third = ReplayHouse(cut(second, trainer, 2), number=3, **RECORDS)
    report = audit_journals([journal(house), journal(second), journal(third)])
    assert report.live_cursor_would_skip == 4 + 2  # 1, 3, 5 and 6 at the first cut
    assert [execution.spared for execution in report.executions] == [0, 5, 8]


class AnySampler(LoadState):
    """The sampler's order changes from execution to execution, as a feedback-driven one's does."""

    def restore_sampler(self, sampler: Any, metadata: ControllerResumeMetadata) -> None:
        sampler.load_state_dict(sampler.state_dict() | {"position": metadata.sampler_state["position"]})


# -- against a list


class Dumb:
    """The whole stream as a list of draws, each a list of groups, each a set of settled completions."""

    def __init__(self, length: int, batch: int, n: int, budget: int) -> None:
        self.sizes: list[list[int]] = []
        left, position = budget, 0
        while left:
            sizes = []
            for _ in range(min(max(1, batch), length - position % length)):
                if left:
                    sizes.append(min(n, left))
                    left -= sizes[-1]
                position += 1
            self.sizes.append(sizes)
        self.first = [sum(map(len, self.sizes[:draw])) for draw in range(len(self.sizes))]

    def safe(self, settled: set[tuple[int, int]]) -> int:
        """Groups behind the boundary: the longest prefix of draws that is wholly settled."""
        for draw, sizes in enumerate(self.sizes):
            first = self.first[draw]
            whole = {(first + group, bit) for group, size in enumerate(sizes) for bit in range(size)}
            if not whole <= settled:
                return first
        return sum(map(len, self.sizes))

    @property
    def everything(self) -> set[tuple[int, int]]:
        sizes = [size for draw in self.sizes for size in draw]
        return {(group, bit) for group, size in enumerate(sizes) for bit in range(size)}


class Play:
    """An execution at a time, against the list. What it does is up to `seed`."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.n, self.length = self.random.randint(1, 3), self.random.randint(1, 7)
        self.batch, self.budget = self.random.randint(0, 3), self.random.randint(1, 40)
        self.dumb = Dumb(self.length, self.batch, self.n, self.budget)
        self.settled: set[tuple[int, int]] = set()
        self.at_cut: dict[tuple[int, str], set[tuple[int, int]]] = {}
        self.saved: Save | None = None
        self.kept: set[tuple[int, int]] = set()
        self.number = self.spared = 0
        self.journals: list[Any] = []
        self.start()

    def start(self) -> None:
        self.number += 1
        options: dict[str, Any] = {
            "prompts": self.length,
            "n": self.n,
            "batch_sampler": Batches(self.length, self.batch) if self.batch else None,
            "groups_per_step": self.random.randint(1, 3),
            "max_outstanding_groups": 5,
            "number": self.number,
            **RECORDS,
        }
        self.settled = set(self.kept) if self.saved else set()
        self.base = self.dumb.safe(self.settled)
        self.house: House = ReplayHouse(self.saved, **options) if self.saved else House(budget=self.budget, **options)
        self.journals.append(lambda house=self.house: journal(house))
        if self.saved:
            self.check_resume()
        self.over = self.house.controller.lifecycle.over
        if not self.over:
            (self.trainer,) = self.house.open_gate()
            self.rollout = self.house.rollout()
        self.out: list[Lease] = []
        self.command = 1

    def bits(self, group: int, mask: int) -> set[tuple[int, int]]:
        """Completions by where in the stream their group stands."""
        place = self.base + group - (self.number * (1 << 40) + 1)
        return {(place, bit) for bit in range(mask.bit_length()) if mask >> bit & 1}

    def check_resume(self) -> None:
        beyond = {(group, bit) for group, bit in self.settled if group >= self.base}
        spared = set[tuple[int, int]]().union(*(self.bits(*row) for row in recorded(self.house)))
        assert spared == beyond
        assert self.house.controller.statistics().spared_completions == len(beyond)
        assert replay_of(self.house).doubt == ""
        self.spared += len(beyond)

    def lease(self) -> None:
        for lease in self.rollout.lease(self.random.randint(1, 4)):
            again, whole = self.bits(lease.group, lease.mask), self.bits(lease.group, (1 << lease.size) - 1)
            assert again == whole - self.settled  # what is settled is not generated again, and all the rest is
            self.out.append(lease)

    def report(self) -> None:
        if not self.out:
            return
        lease = self.out.pop(self.random.randrange(len(self.out)))
        gone = self.random.randint(0, (1 << lease.size) - 1) & lease.mask if self.random.random() < 0.3 else 0
        if gone:
            self.rollout.report("discarded", (lease, gone))
            self.settled |= self.bits(lease.group, gone)
        if lease.mask & ~gone:
            self.rollout.report("completed", (lease, lease.mask & ~gone))

    def step(self) -> None:
        """Whatever command is next."""
        command = self.trainer.command(self.command)
        self.note_cuts()
        if isinstance(command, Train):
            rows, back = [], self.random.random() < 0.2
            for group, mask in command.rows:
                part = mask & self.random.randint(0, mask) if self.random.random() < 0.3 else 0
                rows += [disposed_row(group, part, "discarded", "rejected")] if part else []
                if mask & ~part:
                    rows.append(disposed_row(group, mask & ~part, "returned" if back else "trained"))
                self.settled |= self.bits(group, part if back else mask)
            self.trainer.trained(command, disposed=rows)
            self.note_cuts()
        elif isinstance(command, Save):
            kept, window = self.at_cut[self.number, command.checkpoint_id], command.window
            behind = sum(1 for group, _ in self.dumb.everything if group < self.dumb.safe(kept))
            assert command.boundary.remaining_completions == self.budget - behind
            self.trainer.saved(command)
            self.house.publish()
            command.window = window
            self.saved, self.kept = command, kept
        elif isinstance(command, End):
            self.over = True
            return
        else:
            return
        self.command += 1

    def note_cuts(self) -> None:
        """What is settled now was settled at a cut that was made just now."""
        for event, values in self.house.events:
            if event == "cut":
                self.at_cut.setdefault((self.number, values["checkpoint"]), set(self.settled))

    def drain(self) -> None:
        for _ in range(2000):
            if self.over:
                return
            self.random.choice((self.lease, self.report, self.step))()
        raise AssertionError("it does not end")


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 32))
def test_g1_what_is_spared_is_what_was_settled_at_the_cut_however_often_it_dies(seed: int) -> None:
    play = Play(seed)
    for _ in range(play.random.randint(0, 4)):
        for _ in range(play.random.randint(0, 40)):
            if not play.over:
                play.random.choice((play.lease, play.report, play.step))()
        play.start()
    play.drain()
    assert play.settled == play.dumb.everything
    report = audit_journals([listed() for listed in play.journals])
    assert (report.skipped, report.repeated, report.spared) == (0, 0, play.spared)


def test_the_plays_do_spare_something() -> None:
    """Else the property above would say nothing."""
    spared = 0
    for seed in range(40):
        play = Play(seed)
        for _ in range(3):
            for _ in range(40):
                if not play.over:
                    play.random.choice((play.lease, play.report, play.step))()
            play.start()
        spared += play.spared
    assert spared > 100
