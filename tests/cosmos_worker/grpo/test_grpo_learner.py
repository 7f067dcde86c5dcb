from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from grpo_data import make_groups

from cosmos_worker.grpo import vocab
from cosmos_worker.grpo.config import GrpoSettings
from cosmos_worker.grpo.groups import TrainCompletion, TrainGroup
from cosmos_worker.grpo.learner import Learner
from cosmos_worker.grpo.payload import encode_completion
from cosmos_worker.grpo.state import StateError
from cosmos_worker.grpo.tasks import BUNDLED_SOURCE, Task


def saved(learner: Learner) -> dict[str, Any]:
    """The state as another process reads it."""
    buffer = io.BytesIO()
    torch.save(learner.state(), buffer)
    buffer.seek(0)
    state: dict[str, Any] = torch.load(buffer, weights_only=True)
    return state


def bits(learner: Learner) -> bytes:
    buffer = io.BytesIO()
    torch.save(learner.state(), buffer)
    return buffer.getvalue()


def test_a_step_counts_steps_and_updates_apart(settings: GrpoSettings) -> None:
    learner = Learner(settings, total_steps=6)

    result = learner.train(make_groups(5, 0))

    assert result.updates == settings.updates_per_step > 1
    assert (learner.steps, learner.updates) == (1, settings.updates_per_step)
    assert (result.n_completions, result.n_completions_local) == (20, 20)
    assert result.mean_reward == result.mean_reward_local == 0.5
    assert result.rejected == []


def test_training_raises_the_share_of_what_is_rewarded(settings: GrpoSettings) -> None:
    learner = Learner(settings, total_steps=100)
    right, wrong = vocab.encode("yy"), vocab.encode("nn")
    logprobs = [-4.5, -4.5]
    group = TrainGroup(
        0,
        "?",
        [
            TrainCompletion(0, encode_completion(right, logprobs), 1.0),
            TrainCompletion(1, encode_completion(wrong, logprobs), 0.0),
        ],
    )

    def log_odds() -> float:
        with torch.no_grad():
            logits = learner.model(torch.tensor([vocab.encode_prompt("?")]))[0, -1]
        return float(logits[right[0]] - logits[wrong[0]])

    before = log_odds()
    for _ in range(5):
        learner.train([group])

    assert log_odds() > before + 0.1


def test_equal_rewards_count_as_trained_and_have_no_gradient(settings: GrpoSettings) -> None:
    learner = Learner(settings, total_steps=6)
    completion = encode_completion([70], [-1.0])
    before = learner.weights()

    result = learner.train([TrainGroup(0, "1", [TrainCompletion(i, completion, 1.0) for i in range(4)])])

    assert (result.n_completions, result.updates) == (4, settings.updates_per_step)
    assert learner.weights() == before


@pytest.mark.parametrize("groups", [[], [TrainGroup(3, "1", [TrainCompletion(0, b"broken", 1.0)])]])
def test_a_step_with_nothing_to_train_is_a_step_without_updates(
    settings: GrpoSettings, groups: list[TrainGroup]
) -> None:
    learner = Learner(settings, total_steps=6)
    before = learner.weights()

    result = learner.train(groups)

    assert (learner.steps, learner.updates, result.updates, result.n_completions) == (1, 0, 0, 0)
    assert [(each.group_id, each.index) for each in result.rejected] == [(3, 0)] * len(groups)
    assert learner.weights() == before


def test_the_learning_rate_rises_and_falls(settings: GrpoSettings) -> None:
    learner = Learner(settings.model_copy(update={"lr_warmup_steps": 2, "lr_final_fraction": 0.25}), total_steps=6)

    rates = [learner.train([]).learning_rate / settings.learning_rate for _ in range(7)]

    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.8125, 0.625, 0.4375, 0.25])


def test_training_goes_on_to_the_bit(settings: GrpoSettings) -> None:
    straight = Learner(settings, total_steps=6)
    for step in range(2):
        straight.train(make_groups(5, step))
    state = saved(straight)
    for step in range(2, 4):
        straight.train(make_groups(5, step))
    expected = bits(straight), random.random()

    resumed = Learner(settings, total_steps=6)
    resumed.train(make_groups(3, 99))
    random.seed(99)
    resumed.load_state(state)
    assert (resumed.steps, resumed.updates) == (2, 2 * settings.updates_per_step)
    for step in range(2, 4):
        resumed.train(make_groups(5, step))

    assert (bits(resumed), random.random()) == expected


def test_a_state_shares_nothing_with_the_learner(settings: GrpoSettings) -> None:
    learner = Learner(settings, total_steps=6)
    learner.train(make_groups(3, 0))
    state = learner.state()
    before = copy.deepcopy(state)

    learner.train(make_groups(3, 1))
    other = Learner(settings, total_steps=6)
    other.load_state(state)
    other.train(make_groups(3, 1))

    assert saved_bytes(state) == saved_bytes(before)


def saved_bytes(state: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def without(*path: str) -> Callable[[dict[str, Any]], None]:
    def damage(state: dict[str, Any]) -> None:
        for name in path[:-1]:
            state = state[name]
        del state[path[-1]]

    return damage


def with_value(value: Any, *path: str) -> Callable[[dict[str, Any]], None]:
    def damage(state: dict[str, Any]) -> None:
        for name in path[:-1]:
            state = state[name]
        state[path[-1]] = value

    return damage


DAMAGES = {
    **{f"no {part}": without(part) for part in ("format", "rank", "world_size", "steps", "updates", "model")},
    **{f"no {part}": without(part) for part in ("optimizer", "scheduler", "random")},
    "no embedding": without("model", "embedding.weight"),
    "embedding of another shape": with_value(torch.zeros(2, 2), "model", "embedding.weight"),
    "no moments": lambda state: state["optimizer"].update(state={}),
    "one parameter's moments missing": lambda state: state["optimizer"]["state"].pop(3),
    "half of a parameter's moments": lambda state: state["optimizer"]["state"][3].pop("exp_avg_sq"),
    "moments of another shape": lambda state: state["optimizer"]["state"][3].update(exp_avg=torch.zeros(3)),
    "no optimizer groups": without("optimizer", "param_groups"),
    "no place in the schedule": without("scheduler", "last_epoch"),
    "another place in the schedule": with_value(7, "scheduler", "last_epoch"),
    "half a schedule": without("scheduler", "base_lrs"),
    "no Python random state": without("random", "python"),
    "no torch random state": without("random", "torch"),
    "broken Python random state": with_value((3, (1, 2), None), "random", "python"),
    "broken torch random state": with_value(torch.zeros(3, dtype=torch.uint8), "random", "torch"),
    "another format": with_value(2, "format"),
    "another rank": with_value(1, "rank"),
    "another world size": with_value(2, "world_size"),
    "steps that are no count": with_value(True, "steps"),
    "negative updates": with_value(-1, "updates"),
    "something unknown": with_value(1, "extra"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_state_that_does_not_fit_changes_nothing(
    settings: GrpoSettings, damage: Callable[[dict[str, Any]], None]
) -> None:
    source = Learner(settings, total_steps=6)
    source.train(make_groups(3, 0))
    state = saved(source)
    damage(state)
    learner = Learner(settings, total_steps=6)
    learner.train(make_groups(3, 1))
    before = bits(learner)

    with pytest.raises(StateError):
        learner.load_state(state)

    assert bits(learner) == before


def test_what_is_no_state_at_all_is_refused(settings: GrpoSettings) -> None:
    with pytest.raises(StateError, match="is a list, not a dict"):
        Learner(settings, total_steps=6).load_state([])  # type: ignore[arg-type]


OWN_TASKS = [Task(key=str(i), prompt=f"{i} =", answer=str(i)) for i in range(10)]


def test_the_warm_start_is_the_same_each_time_and_teaches(settings: GrpoSettings) -> None:
    many = settings.model_copy(update={"warm_start_max_steps": 400, "warm_start_target": 0.5})
    results = []
    for _ in range(2):
        learner = Learner(many, total_steps=6)
        results.append((learner.warm_start(OWN_TASKS), learner.weights()))

    assert results[0] == results[1]
    assert results[0][0].accuracy >= 0.5
    assert results[0][0].steps < 400


def test_a_warm_start_of_no_steps_changes_nothing(settings: GrpoSettings) -> None:
    learner = Learner(settings.model_copy(update={"warm_start_max_steps": 0}), total_steps=6)
    before = learner.weights()

    assert learner.warm_start(OWN_TASKS).steps == 0
    assert learner.weights() == before


def test_bundled_tasks_are_warm_started_on_other_examples(settings: GrpoSettings) -> None:
    pytest.importorskip("reasoning_gym")
    from cosmos_worker.grpo.warmstart import choose_examples

    tasks = [Task(key="k", prompt="1 + 2 + 3 =", answer="6", source=BUNDLED_SOURCE)]
    examples = choose_examples(tasks)
    train, check = {prompt for prompt, _ in examples.train}, {prompt for prompt, _ in examples.check}

    assert "1 + 2 + 3 =" not in train | check
    assert not train & check
    assert choose_examples([*tasks, *OWN_TASKS]).train == [(task.prompt, task.answer) for task in [*tasks, *OWN_TASKS]]


def test_a_run_that_has_begun_is_not_warm_started(settings: GrpoSettings) -> None:
    learner = Learner(settings, total_steps=6)
    learner.train([])

    with pytest.raises(RuntimeError, match="before the first step"):
        learner.warm_start(OWN_TASKS)
