"""The order in which a sampler is restored, and what is drawn from it: a recorder notes every call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmos_ctrl.core.errors import CheckpointNotFoundError
from cosmos_ctrl.core.ledger import SamplingBoundary
from cosmos_ctrl.core.resume import ControllerResumeMetadata
from cosmos_ctrl.core.sampling import Prompt, Sampling, load_resume_metadata

Calls = list[tuple[Any, ...]]


class RecordingSampler:
    """Indices 0 … length-1 an epoch; notes everything that is asked of it."""

    def __init__(self, calls: Calls, name: str = "sampler", *, length: int = 4, batch: int = 0) -> None:
        self.calls, self.name, self.length, self.batch = calls, name, length, batch
        self.position = 0

    def set_epoch(self, epoch: int) -> None:
        self.calls.append((self.name, "set_epoch", epoch))
        self.position = 0

    def __iter__(self) -> Iterator[Any]:
        self.calls.append((self.name, "iter"))
        while self.position < self.length:
            first = self.position
            self.position = min(self.length, first + (self.batch or 1))
            self.calls.append((self.name, "next"))
            yield list(range(first, self.position)) if self.batch else first

    def state_dict(self) -> dict[str, int]:
        self.calls.append((self.name, "state_dict"))
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.calls.append((self.name, "load_state_dict"))
        self.position = state["position"]


class ProviderError(Exception):
    """An application's own."""


class RecordingAdapter:
    def __init__(
        self, calls: Calls, found: Any, *, error: Exception | None = None, restore_error: Exception | None = None
    ) -> None:
        self.calls, self.found, self.error, self.restore_error = calls, found, error, restore_error

    def load_metadata(self, config: Any) -> Any:
        self.calls.append(("adapter", "load_metadata", config))
        if self.error is not None:
            raise self.error
        return self.found

    def restore_sampler(self, sampler: Any, metadata: ControllerResumeMetadata) -> None:
        self.calls.append(("adapter", "restore_sampler", sampler.name))
        if self.restore_error is not None:
            raise self.restore_error
        sampler.load_state_dict(metadata.sampler_state)


@dataclass
class Train:
    resume: Any
    output_dir: str = "out"


@dataclass
class Config:
    train: Train


def metadata(**overrides: Any) -> ControllerResumeMetadata:
    values: dict[str, Any] = {
        "completed_training_steps": 3,
        "completed_optimizer_updates": 6,
        "remaining_completions": 10,
        "epoch": 2,
        "sampling_owner": "sampler",
        "sampler_state": {"position": 1},
        "checkpoint_path": "checkpoints/x",
        "checkpoint_id": "abc",
    }
    return ControllerResumeMetadata(**values | overrides)


def build(calls: Calls, *, batch: int = 0, length: int = 4, n: int = 2) -> Sampling:
    sampler = RecordingSampler(calls, length=length)
    batches = RecordingSampler(calls, "batch_sampler", length=length, batch=batch) if batch else None
    return Sampling(sampler, batches, prompt_of=lambda index: Prompt(key=str(index)), completions_per_prompt=n)


def begin(
    calls: Calls, sampling: Sampling, adapter: RecordingAdapter, resume: Any, budget: int = 20
) -> SamplingBoundary:
    """As the server does it: the samplers exist; then this."""
    found = load_resume_metadata(adapter, Config(Train(resume)), owner=sampling.owner_name)
    return sampling.start(budget) if found is None else sampling.restore(adapter, found)


def test_nothing_is_asked_of_a_sampler_when_it_is_taken() -> None:
    calls: Calls = []
    build(calls)
    build(calls, batch=2)
    assert calls == []


def test_order_automatic_miss_starts_fresh_and_the_provider_is_asked_once() -> None:
    calls: Calls = []
    sampling = build(calls)
    config = Config(Train(True))
    adapter = RecordingAdapter(calls, None)
    assert load_resume_metadata(adapter, config, owner="sampler") is None
    start = sampling.start(20)
    assert calls == [("adapter", "load_metadata", config), ("sampler", "set_epoch", 1), ("sampler", "state_dict")]
    assert start == SamplingBoundary(epoch=1, sampler_state={"position": 0}, remaining_completions=20)


def test_order_resume_off_never_asks_the_adapter() -> None:
    calls: Calls = []
    sampling = build(calls)
    begin(calls, sampling, RecordingAdapter(calls, metadata()), False)
    assert calls == [("sampler", "set_epoch", 1), ("sampler", "state_dict")]


@pytest.mark.parametrize("resume", [True, "checkpoints/x"])
def test_order_resume_sets_the_epoch_restores_once_and_only_then_iterates(resume: Any) -> None:
    calls: Calls = []
    sampling = build(calls)
    start = begin(calls, sampling, RecordingAdapter(calls, metadata()), resume)
    sampling.draw(start.remaining_completions)
    assert [call[:2] for call in calls] == [
        ("adapter", "load_metadata"),
        ("sampler", "set_epoch"),
        ("adapter", "restore_sampler"),
        ("sampler", "load_state_dict"),
        ("sampler", "iter"),
        ("sampler", "next"),
        ("sampler", "state_dict"),
    ]
    assert ("sampler", "set_epoch", 2) in calls
    assert start == SamplingBoundary(epoch=2, sampler_state={"position": 1}, remaining_completions=10)


def test_order_with_a_batch_sampler_sets_the_epoch_on_both_and_restores_the_owner_only() -> None:
    calls: Calls = []
    sampling = build(calls, batch=2)
    assert sampling.owner_name == "batch_sampler"
    start = begin(calls, sampling, RecordingAdapter(calls, metadata(sampling_owner="batch_sampler")), True)
    draw = sampling.draw(start.remaining_completions)
    assert calls[1:] == [
        ("sampler", "set_epoch", 2),
        ("batch_sampler", "set_epoch", 2),
        ("adapter", "restore_sampler", "batch_sampler"),
        ("batch_sampler", "load_state_dict"),
        ("batch_sampler", "iter"),
        ("batch_sampler", "next"),
        ("batch_sampler", "state_dict"),
    ]
    assert [prompt.key for prompt in draw.prompts] == ["1", "2"]


def test_g7_step_zero_is_a_checkpoint_and_not_a_fresh_start() -> None:
    calls: Calls = []
    sampling = build(calls)
    found = metadata(completed_training_steps=0, completed_optimizer_updates=0, epoch=1, sampler_state={"position": 0})
    begin(calls, sampling, RecordingAdapter(calls, found), True)
    assert ("adapter", "restore_sampler", "sampler") in calls


def test_g7_explicit_and_missing_is_file_not_found() -> None:
    with pytest.raises(FileNotFoundError) as caught:
        load_resume_metadata(RecordingAdapter([], None), Config(Train("checkpoints/gone")), owner="sampler")
    assert isinstance(caught.value, CheckpointNotFoundError)
    assert "checkpoints/gone" in str(caught.value)


@pytest.mark.parametrize("wrong", [{}, {"step": 1}, 0, "x", object(), False])
def test_g7_a_wrong_type_is_a_type_error(wrong: Any) -> None:
    calls: Calls = []
    with pytest.raises(TypeError, match="RecordingAdapter"):
        begin(calls, build(calls), RecordingAdapter(calls, wrong), True)
    assert [call[:2] for call in calls] == [("adapter", "load_metadata")]


@pytest.mark.parametrize(("batch", "saved"), [(0, "batch_sampler"), (2, "sampler")])
def test_g1_another_owner_is_a_value_error_before_anything_is_touched(batch: int, saved: Any) -> None:
    calls: Calls = []
    with pytest.raises(ValueError, match="owner"):
        begin(calls, build(calls, batch=batch), RecordingAdapter(calls, metadata(sampling_owner=saved)), True)
    assert [call[:2] for call in calls] == [("adapter", "load_metadata")]


@pytest.mark.parametrize("resume", [True, "checkpoints/x"])
def test_g7_a_provider_that_raises_propagates_as_it_is(resume: Any) -> None:
    cause = OSError(5, "EIO")
    error = ProviderError("cannot read")
    error.__cause__ = cause
    calls: Calls = []
    with pytest.raises(ProviderError) as caught:
        begin(calls, build(calls), RecordingAdapter(calls, None, error=error), resume)
    assert caught.value is error
    assert caught.value.__cause__ is cause
    assert [call[:2] for call in calls] == [("adapter", "load_metadata")]


def test_g7_a_restore_that_raises_propagates_and_no_iterator_is_made() -> None:
    error = ProviderError("another dataset")
    calls: Calls = []
    with pytest.raises(ProviderError) as caught:
        begin(calls, build(calls), RecordingAdapter(calls, metadata(), restore_error=error), True)
    assert caught.value is error
    assert ("sampler", "iter") not in calls


def test_g1_an_epoch_end_of_four_rolls_once_and_the_next_epochs_four_all_come() -> None:
    calls: Calls = []
    sampling = build(calls)
    found = metadata(epoch=2, sampler_state={"position": 4}, remaining_completions=8)
    left = begin(calls, sampling, RecordingAdapter(calls, found), True).remaining_completions
    drawn = []
    while left:
        draw = sampling.draw(left)
        drawn += [(draw.after.epoch, prompt.key) for prompt in draw.prompts]
        left = draw.after.remaining_completions
    assert drawn == [(3, "0"), (3, "1"), (3, "2"), (3, "3")]
    assert [call for call in calls if "set_epoch" in call] == [("sampler", "set_epoch", 2), ("sampler", "set_epoch", 3)]


def test_later_epochs_set_the_epoch_once_each_on_both() -> None:
    calls: Calls = []
    sampling = build(calls, batch=3, length=4, n=1)
    left = sampling.start(12).remaining_completions
    shapes = []
    while left:
        draw = sampling.draw(left)
        shapes.append((draw.after.epoch, len(draw.prompts)))
        left = draw.after.remaining_completions
    assert shapes == [(1, 3), (1, 1), (2, 3), (2, 1), (3, 3), (3, 1)]
    assert [call for call in calls if "set_epoch" in call] == [
        (name, "set_epoch", epoch) for epoch in (1, 2, 3) for name in ("sampler", "batch_sampler")
    ]


@pytest.mark.parametrize("batch", [0, 2])
def test_g9_an_epoch_that_yields_nothing_is_an_error(batch: int) -> None:
    calls: Calls = []
    sampling = build(calls, batch=batch, length=0)
    sampling.start(5)
    with pytest.raises(ValueError, match="yields nothing"):
        sampling.draw(5)


def test_g9_an_empty_batch_is_an_error() -> None:
    class Empty:
        def __iter__(self) -> Iterator[list[int]]:
            return iter([[]])

        def state_dict(self) -> dict[str, int]:
            return {}

    sampling = Sampling([1], Empty(), prompt_of=lambda index: Prompt(key=str(index)), completions_per_prompt=1)
    sampling.start(5)
    with pytest.raises(ValueError, match="empty batch"):
        sampling.draw(5)


def test_samplers_without_set_epoch_are_taken() -> None:
    class Plain:
        def __iter__(self) -> Iterator[int]:
            return iter([0, 1])

        def state_dict(self) -> bytes:
            return b"opaque"

    sampling = Sampling(Plain(), prompt_of=lambda index: Prompt(key=str(index)), completions_per_prompt=1)
    left = sampling.start(5).remaining_completions
    keys = []
    while left:
        draw = sampling.draw(left)
        keys.append((draw.after.epoch, draw.prompts[0].key))
        left = draw.after.remaining_completions
    assert keys == [(1, "0"), (1, "1"), (2, "0"), (2, "1"), (3, "0")]


@given(length=st.integers(1, 6), batch=st.integers(0, 4), n=st.integers(1, 5), budget=st.integers(1, 60))
def test_the_budget_cuts_the_last_group_and_no_draw_exceeds_it(length: int, batch: int, n: int, budget: int) -> None:
    sampling = build([], batch=batch, length=length, n=n)
    left = sampling.start(budget).remaining_completions
    sizes = []
    while left:
        draw = sampling.draw(left)
        assert len(draw.sizes) == len(draw.prompts) > 0
        assert draw.after.remaining_completions == left - sum(draw.sizes)
        left = draw.after.remaining_completions
        sizes += draw.sizes
    assert sum(sizes) == budget
    assert sizes[:-1] == [n] * (len(sizes) - 1)


@given(
    length=st.integers(1, 6),
    batch=st.integers(0, 4),
    n=st.integers(1, 3),
    budget=st.integers(1, 40),
    cut=st.integers(0, 40),
)
def test_g1_a_restore_at_any_draw_continues_as_if_nothing_had_happened(
    length: int, batch: int, n: int, budget: int, cut: int
) -> None:
    def drain(sampling: Sampling, left: int, most: int) -> tuple[list[Any], SamplingBoundary | None]:
        found, after = [], None
        while left and len(found) < most:
            draw = sampling.draw(left)
            after = draw.after
            left = after.remaining_completions
            found.append((after.epoch, after.sampler_state, draw.sizes, tuple(prompt.key for prompt in draw.prompts)))
        return found, after

    uninterrupted = build([], batch=batch, length=length, n=n)
    uninterrupted.start(budget)
    whole, _ = drain(uninterrupted, budget, 1000)
    first = build([], batch=batch, length=length, n=n)
    first.start(budget)
    before, after = drain(first, budget, cut)
    if after is None:
        return
    second = build([], batch=batch, length=length, n=n)
    saved = metadata(
        epoch=after.epoch,
        sampler_state=after.encoded_state,
        remaining_completions=after.remaining_completions,
        sampling_owner=second.owner_name,
    )
    second.restore(RecordingAdapter([], saved), saved)
    assert before + drain(second, after.remaining_completions, 1000)[0] == whole


def test_a_draws_state_shares_nothing_with_the_sampler() -> None:
    class Live:
        def __init__(self) -> None:
            self.state: dict[str, list[int]] = {"seen": []}

        def __iter__(self) -> Iterator[int]:
            for index in range(3):
                self.state["seen"].append(index)
                yield index

        def state_dict(self) -> dict[str, list[int]]:
            return self.state

    sampling = Sampling(Live(), prompt_of=lambda index: Prompt(key=str(index)), completions_per_prompt=1)
    sampling.start(3)
    draws = [sampling.draw(3), sampling.draw(2)]
    assert [draw.after.sampler_state for draw in draws] == [{"seen": [0]}, {"seen": [0, 1]}]
