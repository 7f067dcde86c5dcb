"""The audit counts what happened, by journals whose answers are known: also of runs that skip."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmos_ctrl.audit import audit, audit_journals


class Story:
    """Writes one execution's journal by hand. Groups have two completions, the budget is 20."""

    def __init__(
        self, number: int, resumed_from: str | None = None, *, remaining: int = 20, step: int = 0, size: int = 2
    ) -> None:
        self.number, self.size = number, size
        self.events: list[dict[str, Any]] = []
        self.groups: dict[str, int] = {}
        self.cursor = self.safe = remaining
        self.at_step = step
        self.add(
            "start", number=number, id=f"id-{number}", resumed_from=resumed_from, step=step, updates=step,
            remaining=remaining,
        )  # fmt: skip

    def add(self, event: str, **values: Any) -> Story:
        self.events.append({"event": event, "t": float(len(self.events)), **values})
        return self

    def issue(self, *keys: str, epoch: int = 1) -> Story:
        for key in keys:
            self.groups[key] = self.number * 100 + len(self.groups)
            self.cursor -= self.size
            self.add("issue", group=self.groups[key], key=key, size=self.size, epoch=epoch)
        return self

    def settle(self, *keys: str, outcome: str = "trained", mask: int = 3) -> Story:
        for key in keys:
            self.add("settle", rows=[(self.groups[key], mask)], outcome=outcome, reason="", step=self.at_step)
        return self

    def commit(self, *keys: str, reward: float | None = 1.0, safe: int = 0) -> Story:
        self.settle(*keys)
        self.at_step += 1
        return self.add(
            "commit", step=self.at_step, updates=self.at_step, trained=2 * len(keys), mean_reward=reward,
            cursor=self.cursor, safe=safe,
        )  # fmt: skip

    def cut(self, checkpoint: str, *, remaining: int) -> Story:
        window = remaining - self.cursor
        return self.add(
            "cut", checkpoint=checkpoint, path=checkpoint, step=self.at_step, remaining=remaining, window=window
        )

    def published(self, checkpoint: str) -> Story:
        return self.add("published", checkpoint=checkpoint, path=checkpoint, step=self.at_step)

    def save(self, checkpoint: str, *, remaining: int) -> Story:
        return self.cut(checkpoint, remaining=remaining).published(checkpoint)


def report(*stories: Story) -> Any:
    return audit_journals([story.events for story in stories])


def finished(story: Story, *keys: str, checkpoint: str = "last") -> Story:
    """Trains what is left in one step and saves."""
    return story.commit(*keys).save(checkpoint, remaining=story.cursor)


# -- known answers


def test_a_run_that_did_everything_in_one_go():
    story = Story(1).issue("a", "b", "c")
    finished(story, "a", "b", "c")
    found = report(story)
    assert (found.skipped, found.repeated, found.redone, found.window_at_checkpoint) == (0, 0, 0, 0)
    assert found.live_cursor_would_skip == 0
    assert found.remaining_completions == 14
    assert (found.completed_training_steps, found.completed_optimizer_updates) == (1, 1)
    assert [(c.id, c.step, c.execution) for c in found.checkpoints] == [("last", 1, 1)]
    assert found.executions[0].resumed_from is None


def crashed() -> Story:
    """Trains b and c, saves at the boundary before a, trains d (lost), dies with a and e out."""
    first = Story(1).issue("a", "b", "c", "d", "e").commit("b", "c").save("one", remaining=20)
    return first.commit("d")


def test_a_crash_and_a_resume():
    second = Story(2, "one", remaining=20, step=1).issue("a", "b", "c", "d", "e")
    finished(second, "a", "b", "c", "d", "e")
    found = report(crashed(), second)
    assert found.skipped == 0
    assert found.repeated == 4  # b and c, in the model that was restored
    assert found.redone == 2  # d, trained after the cut
    assert found.window_at_checkpoint == 10
    # A cursor fetched at the cut stands behind e: a, d and e would never come again.
    assert found.live_cursor_would_skip == 3
    assert found.remaining_completions == 10
    assert [(own.number, own.resumed_from, own.window) for own in found.executions] == [(1, None, 0), (2, "one", 10)]


def test_a_run_that_skips_is_found_out():
    """A buggy one: it resumes behind what was out, so that a, d and e are never issued again."""
    second = Story(2, "one", remaining=10, step=1).issue("f")
    finished(second, "f")
    found = report(crashed(), second)
    assert found.skipped == 6
    assert found.repeated == found.redone == 0


def test_a_ledger_that_moves_over_an_unsettled_group_is_found_out():
    story = Story(1).issue("a", "b", "c").commit("b", "c").save("one", remaining=14)
    found = report(story)
    assert found.skipped == 2


def test_a_single_completion_that_is_skipped_is_found_out():
    story = Story(1).issue("a", "b").settle("a", mask=0b01).commit("b").save("one", remaining=16)
    assert report(story).skipped == 1


def test_a_terminal_discard_is_settled_and_not_skipped():
    story = Story(1).issue("a", "b").settle("a", outcome="discarded").commit("b").save("one", remaining=16)
    found = report(story)
    assert found.skipped == 0
    assert found.remaining_completions == 16


def test_a_discard_is_neither_repeated_nor_redone():
    first = Story(1).issue("a", "b", "c").settle("a", outcome="discarded").commit("c").save("one", remaining=18)
    second = Story(2, "one", remaining=18, step=1).issue("b", "c").settle("c", outcome="discarded")
    finished(second, "b")
    found = report(first, second)
    assert (found.skipped, found.repeated, found.redone) == (0, 0, 0)


def test_work_beyond_the_boundary_is_not_skipped_it_will_be_issued_again():
    story = Story(1).issue("a", "b", "c").commit("a").save("one", remaining=18)
    assert report(story).skipped == 0


def test_a_run_that_never_saved_has_skipped_nothing_yet():
    found = report(Story(1).issue("a", "b").commit("a"))
    assert (found.skipped, found.remaining_completions) == (0, 20)
    assert found.checkpoints == ()
    found = report(Story(1).issue("a").commit("a"), finished(Story(2).issue("a", "b"), "a", "b"))
    assert (found.skipped, found.repeated, found.redone) == (0, 0, 2)


def test_the_same_prompt_in_another_epoch_is_another_completion():
    story = Story(1).issue("a", "b").commit("a", "b").issue("a", epoch=2)
    story.groups["a2"] = story.groups["a"]
    story.commit("a2").save("one", remaining=14)
    assert report(story).skipped == 0
    skipped = Story(1).issue("a", "b").commit("a", "b").issue("a", epoch=2).save("one", remaining=14)
    assert report(skipped).skipped == 2


def test_several_restarts_without_a_checkpoint_in_between():
    first = crashed()
    second = Story(2, "one", remaining=20, step=1).issue("a", "b", "c").commit("a", "b")
    third = Story(3, "one", remaining=20, step=1).issue("a", "b", "c", "d", "e")
    finished(third, "a", "b", "c", "d", "e")
    found = report(first, second, third)
    assert found.skipped == 0
    # b in the second, b and c in the third: each resume repeats at most its window.
    assert [own.repeated for own in found.executions] == [0, 2, 4]
    # d from the first; in the third also a from the second (b was in the model already).
    assert [own.redone for own in found.executions] == [0, 0, 4]
    assert found.window_at_checkpoint == 20
    assert found.live_cursor_would_skip == 6
    assert all(own.repeated <= own.window for own in found.executions)


def test_a_chain_of_resumes_each_from_the_one_before():
    first = Story(1).issue("a", "b", "c").commit("b").save("one", remaining=20)
    second = Story(2, "one", remaining=20, step=1).issue("a", "b", "c").commit("a", "b").save("two", remaining=16)
    third = finished(Story(3, "two", remaining=16, step=2).issue("c", "d"), "c", "d")
    found = report(first, second, third)
    assert found.skipped == 0
    assert found.repeated == 2
    assert found.redone == 0
    # At the first cut a and c were out; at the second, c.
    assert found.live_cursor_would_skip == 3
    assert [step.in_lineage for step in found.steps] == [True, True, True]


def test_a_branch_that_was_lost_does_not_count_as_settled():
    """Settled in an execution that the newest checkpoint does not descend from: the model never saw it."""
    first = Story(1).issue("a", "b").commit("b").save("one", remaining=20)
    second = Story(2, "one", remaining=20, step=1).issue("a", "b").commit("a", "b")
    third = Story(3, "one", remaining=16, step=1).issue("c")
    finished(third, "c")
    found = report(first, second, third)
    assert found.skipped == 2
    assert [step.in_lineage for step in found.steps] == [True, False, True]


def test_what_was_settled_after_the_cut_does_not_count_in_the_lineage():
    first = Story(1).issue("a", "b").commit("b").cut("one", remaining=20).commit("a").published("one")
    second = Story(2, "one", remaining=16, step=1).issue("c")
    finished(second, "c")
    assert report(first, second).skipped == 2


def test_a_save_that_was_not_committed_is_no_checkpoint():
    story = Story(1).issue("a", "b").commit("a").save("one", remaining=18).commit("b").cut("two", remaining=16)
    found = report(story)
    assert [checkpoint.id for checkpoint in found.checkpoints] == ["one"]
    assert found.remaining_completions == 18


def test_a_checkpoint_that_was_resumed_from_was_committed_though_its_controller_died_before_it_noted_so():
    first = Story(1).issue("a", "b").commit("b").cut("one", remaining=20)
    second = finished(Story(2, "one", remaining=20, step=1).issue("a", "b"), "a", "b")
    found = report(first, second)
    assert (found.skipped, found.repeated) == (0, 2)
    assert [checkpoint.id for checkpoint in found.checkpoints] == ["one", "last"]


def test_an_execution_that_died_before_its_start_was_noted_did_nothing():
    first = crashed()
    third = finished(Story(3, "one", remaining=20, step=1).issue("a", "b"), "a", "b")
    assert audit_journals([first.events, [], third.events]) == report(first, third)


def test_stale_refusals_are_summed():
    first = Story(1).issue("a").add("stale_refused", stated="x", what="report").commit("a").save("one", remaining=18)
    second = Story(2, "one", remaining=18, step=1).add("stale_refused", stated="x", what="report")
    second.add("stale_refused", stated="", what="report").add("stale_refused", stated="", what="request")
    assert report(first, second).stale_reports_refused == 3


def test_the_newest_checkpoint_is_by_execution_then_step():
    first = (
        Story(1).issue("a", "b", "c").commit("a").save("one", remaining=18).commit("b", "c").save("two", remaining=14)
    )
    fresh = Story(2).issue("a").commit("a").save("fresh", remaining=18)
    assert report(first, fresh).remaining_completions == 18


def test_a_restart_that_had_nothing_to_do_changes_nothing():
    first = finished(Story(1).issue("a"), "a")
    again = Story(2, "last", remaining=18, step=1).add("ending", reason="STEP_LIMIT", message="nothing to do")
    alone, both = report(first), report(first, again)
    assert both.completed_training_steps == alone.completed_training_steps == 1
    assert both.skipped == both.repeated == both.redone == 0
    assert both.remaining_completions == 18


def test_rewards_are_means_of_the_first_and_last_fifth_of_the_lineage():
    story = Story(1)
    for number in range(10):
        key = f"k{number}"
        story.issue(key).commit(key, reward=float(number))
    story.save("one", remaining=0)
    found = report(story)
    assert (found.reward_first, found.reward_last) == (0.5, 8.5)
    assert [step.mean_reward for step in found.steps] == [float(number) for number in range(10)]
    nothing = report(Story(1))
    assert (nothing.reward_first, nothing.reward_last) == (None, None)


def test_the_report_is_plain_json_with_the_promised_keys():
    values = json.loads(json.dumps(report(crashed()).to_json()))
    assert {
        "executions", "skipped", "repeated", "redone", "window_at_checkpoint", "live_cursor_would_skip",
        "stale_reports_refused", "completed_training_steps", "completed_optimizer_updates", "remaining_completions",
        "reward_first", "reward_last", "checkpoints",
    } <= values.keys()  # fmt: skip
    assert {"number", "id", "resumed_from"} <= values["executions"][0].keys()
    assert values["checkpoints"] == [{"id": "one", "step": 1, "execution": 1}]


# -- from files


def write(run: Any, *stories: Story) -> None:
    directory = run / "executions"
    directory.mkdir(parents=True)
    for story in stories:
        text = "".join(json.dumps(event) + "\n" for event in story.events)
        (directory / f"{story.number:08d}.jsonl").write_text(text)


def test_journals_are_read_in_the_order_of_their_executions(tmp_path):
    stories = [crashed(), finished(Story(2, "one", remaining=20, step=1).issue("a"), "a")]
    write(tmp_path, *stories)
    assert audit(tmp_path) == report(*stories)


def test_a_torn_last_line_is_as_if_it_had_not_been_written(tmp_path):
    whole, torn = crashed(), crashed()
    torn.events.pop()
    write(tmp_path, whole)
    path = tmp_path / "executions" / "00000001.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    assert audit(tmp_path) == report(torn)


@pytest.mark.parametrize(
    "stories",
    [
        pytest.param([], id="none"),
        pytest.param([Story(2, "unknown")], id="a checkpoint that nobody published"),
        pytest.param([Story(1).add("settle", rows=[(9, 1)], outcome="trained")], id="an unknown group"),
    ],
)
def test_journals_that_do_not_fit_together_are_refused(tmp_path, stories):
    if stories:
        stories[-1].add("cut", checkpoint="x", step=0, remaining=20, window=0).published("x")
    write(tmp_path, *stories)
    with pytest.raises(ValueError, match=r"journals|journal"):
        audit(tmp_path)


# -- against a dumber count


@given(st.data())
def test_a_sound_resume_skips_nothing_and_an_unsound_one_what_it_jumped_over(data):
    """One crash: any subset is trained before the cut, the run resumes at any boundary."""
    keys = [f"k{number}" for number in range(8)]
    trained = data.draw(st.sets(st.sampled_from(keys)))
    first = Story(1).issue(*keys).commit(*sorted(trained))
    settled_prefix = next((n for n, key in enumerate(keys) if key not in trained), len(keys))
    boundary = data.draw(st.integers(0, len(keys)))
    first.cut("one", remaining=20 - 2 * boundary).published("one")
    again = keys[boundary:]
    second = Story(2, "one", remaining=20 - 2 * boundary, step=1).issue(*again)
    finished(second, *again)
    found = report(first, second)
    jumped = [key for key in keys[:boundary] if key not in trained]
    assert found.skipped == 2 * len(jumped)
    assert (found.skipped == 0) == (boundary <= settled_prefix)
    assert found.repeated == 2 * len(trained & set(again))
    assert found.repeated <= found.window_at_checkpoint == 2 * len(again)
    assert found.live_cursor_would_skip == len(keys) - len(trained)


def test_another_lineages_prompts_are_not_skipped_by_this_one():
    first = Story(1).issue("a", "b").commit("a", "b").save("one", remaining=16)
    # Started fresh although there was a checkpoint, over other prompts: a lineage of its own.
    second = Story(2).issue("x").commit("x").save("two", remaining=18)
    assert report(first, second).skipped == 0
    # One that resumed from this lineage belongs to it, with or without checkpoints of its own.
    third = Story(3, "two", remaining=18, step=1).issue("y").commit("y")
    fourth = Story(4, "two", remaining=18, step=1).issue("z").commit("z").save("three", remaining=16)
    assert report(first, second, third, fourth).skipped == 2
