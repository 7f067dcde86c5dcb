"""The seekable sampler: a permutation, resumable at every position."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmos_ctrl.core.samplers import SeekableSampler


def epoch_of(sampler: SeekableSampler, epoch: int) -> list[int]:
    sampler.set_epoch(epoch)
    return list(sampler)


@pytest.mark.parametrize("length", [*range(1, 70), 255, 256, 257, 1000, 1025])
def test_an_epoch_is_a_permutation_at_every_length(length: int) -> None:
    assert sorted(epoch_of(SeekableSampler(length, seed=length), 1)) == list(range(length))


@given(st.integers(1, 300), st.integers(0, 1 << 64), st.integers(1, 1 << 40))
def test_an_epoch_is_a_permutation_for_every_seed_and_epoch(length: int, seed: int, epoch: int) -> None:
    assert sorted(epoch_of(SeekableSampler(length, seed=seed), epoch)) == list(range(length))


def test_in_order_when_not_shuffled() -> None:
    sampler = SeekableSampler(5, shuffle=False)
    assert [epoch_of(sampler, epoch) for epoch in (1, 2)] == [[0, 1, 2, 3, 4]] * 2


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("length", [1, 2, 7, 16, 33])
def test_g1_resume_at_every_position_equals_the_uninterrupted_run(length: int, shuffle: bool) -> None:
    whole = epoch_of(SeekableSampler(length, shuffle=shuffle, seed=3), 4)
    for position in range(length + 1):
        running = SeekableSampler(length, shuffle=shuffle, seed=3)
        running.set_epoch(4)
        iterator = iter(running)
        before = [next(iterator) for _ in range(position)]
        state = json.loads(json.dumps(running.state_dict()))
        restored = SeekableSampler(length, shuffle=shuffle, seed=3)
        restored.load_state_dict(state)
        assert before + list(restored) == whole
        assert restored.state_dict() == {**state, "position": length}


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [tuple(epoch_of(SeekableSampler(50, seed=seed), epoch)) for seed in range(5) for epoch in range(1, 6)]
    assert len(set(orders)) == len(orders)


def test_the_order_never_changes_between_releases() -> None:
    assert epoch_of(SeekableSampler(10, seed=1), 1) == [0, 1, 9, 5, 2, 4, 3, 7, 6, 8]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"length": 8}, ValueError),
        ({"seed": 1}, ValueError),
        ({"shuffle": False}, ValueError),
        ({"shuffle": 1}, ValueError),
        ({"position": 10}, ValueError),
        ({"position": -1}, ValueError),
        ({"position": True}, TypeError),
        ({"epoch": 0}, ValueError),
        ({"epoch": 1.0}, TypeError),
        ({"extra": 1}, ValueError),
    ],
)
def test_g1_a_state_that_names_other_prompts_is_refused_and_changes_nothing(
    change: dict[str, Any], error: type[Exception]
) -> None:
    sampler = SeekableSampler(9, seed=0)
    sampler.set_epoch(3)
    next(iter(sampler))
    before = sampler.state_dict()
    with pytest.raises(error):
        sampler.load_state_dict(before | change)
    assert sampler.state_dict() == before
    with pytest.raises(ValueError, match="keys"):
        sampler.load_state_dict([])  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [0, -1, True, 2.0, "3"])
def test_the_length_is_a_positive_int(wrong: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        SeekableSampler(wrong)


def test_seeking_costs_the_same_anywhere() -> None:
    sampler = SeekableSampler(1 << 40, seed=5)
    sampler.load_state_dict(sampler.state_dict() | {"position": (1 << 40) - 2})
    assert sum(1 for _ in sampler) == 2
    assert len(sampler) == 1 << 40
