"""The seekable sampler: a permutation, resumable at every position."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmos_ctrl.core import samplers
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
    assert epoch_of(SeekableSampler(10, seed=1), 1) == [5, 7, 1, 6, 8, 4, 3, 0, 9, 2]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"length": 8}, ValueError),
        ({"seed": 1}, ValueError),
        ({"shuffle": False}, ValueError),
        ({"shuffle": 1}, ValueError),
        ({"weights": "sha256:00"}, ValueError),
        ({"shard": [0, 2]}, ValueError),
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
    with pytest.raises(ValueError, match="expected the keys"):
        sampler.load_state_dict([])  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [0, -1, True, 2.0, "3"])
def test_the_length_is_a_positive_int(wrong: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        SeekableSampler(wrong)


def test_seeking_costs_the_same_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    length, counted = 1 << 70, []
    built = samplers.shuffled

    def counting(*args: Any, **options: Any) -> Any:
        index_at = built(*args, **options)

        def index_counting(position: int) -> int:
            counted.append(position)
            return index_at(position)

        return index_counting

    monkeypatch.setattr(samplers, "shuffled", counting)
    sampler = SeekableSampler(length, seed=5)
    sampler.load_state_dict(sampler.state_dict() | {"position": length - 2})
    assert len(set(sampler)) == 2
    assert counted == [length - 2, length - 1]


# -- weights


WEIGHTS = [3.0, 0.0, 1.0, 0.5, 0.0, 2.5]


@pytest.mark.parametrize("shard", [None, (0, 2), (1, 2)])
def test_g1_a_weighted_sampler_resumes_at_every_position(shard: tuple[int, int] | None) -> None:
    def make() -> SeekableSampler:
        return SeekableSampler(6, weights=WEIGHTS, seed=3, shard=shard)

    whole = epoch_of(make(), 2)
    for position in range(len(whole) + 1):
        running = make()
        running.set_epoch(2)
        iterator = iter(running)
        before = [next(iterator) for _ in range(position)]
        restored = make()
        restored.load_state_dict(json.loads(json.dumps(running.state_dict())))
        assert before + list(restored) == whole


def test_the_weighted_order_never_changes_between_releases() -> None:
    assert epoch_of(SeekableSampler(10, seed=1, weights=[1, 2, 3, 4, 0, 0, 1, 1, 1, 1]), 1) == [
        3,
        3,
        7,
        3,
        6,
        8,
        3,
        9,
        0,
        3,
    ]


@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        ([1.0, -0.5], ValueError, r"weights\[1\] is -0.5"),
        ([1.0, math.nan], ValueError, r"weights\[1\] is nan"),
        ([math.inf, 1.0], ValueError, r"weights\[0\] is inf"),
        ([1.0, 10**400], ValueError, r"weights\[1\] is 1000"),
        ([True, 1.0], TypeError, r"weights\[0\] must be a number, not bool"),
        (["1", 1.0], TypeError, r"weights\[0\] must be a number, not str"),
        ([0.0, -0.0], ValueError, "add up to 0"),
        ([1e308, 1e308], ValueError, "add up to inf"),
        ([1.0], ValueError, "1 weights for 2 indices"),
    ],
)
def test_weights_that_cannot_be_are_refused_by_their_place(weights: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SeekableSampler(2, weights=weights)


def test_a_weighted_sampler_is_not_in_order() -> None:
    with pytest.raises(ValueError, match="exclude each other"):
        SeekableSampler(2, weights=[1, 1], shuffle=False)
    with pytest.raises(TypeError, match="shuffle must be a bool"):
        SeekableSampler(2, shuffle=1)  # type: ignore[arg-type]


# -- shards


@given(st.integers(1, 60), st.integers(1, 9), st.booleans(), st.integers(1, 5))
def test_the_shards_of_an_epoch_partition_it(length: int, of: int, shuffle: bool, epoch: int) -> None:
    whole = epoch_of(SeekableSampler(length, shuffle=shuffle, seed=2), epoch)
    samplers_of_ranks = [SeekableSampler(length, shuffle=shuffle, seed=2, shard=(rank, of)) for rank in range(of)]
    shards = [epoch_of(sampler, epoch) for sampler in samplers_of_ranks]
    assert [len(sampler) for sampler in samplers_of_ranks] == [len(shard) for shard in shards]
    assert shards == [whole[rank::of] for rank in range(of)]
    assert sorted(index for shard in shards for index in shard) == list(range(length))


@pytest.mark.parametrize(
    ("shard", "error", "message"),
    [
        ((2, 2), ValueError, "rank 2 of 2"),
        ((-1, 2), ValueError, "the rank"),
        ((0, 0), ValueError, "the number of shards"),
        ((True, 2), TypeError, "the rank"),
        ([0, 2], TypeError, r"a tuple \(rank, of\)"),
        ((0, 1, 2), TypeError, r"a tuple \(rank, of\)"),
    ],
)
def test_a_shard_is_a_rank_of_a_number(shard: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SeekableSampler(5, shard=shard)


# -- what a state belongs to


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (SeekableSampler(7), "length was 6, here 7"),
        (SeekableSampler(6, seed=1), "seed was 0, here 1"),
        (SeekableSampler(6, shuffle=False), "shuffle was True, here False"),
        (SeekableSampler(6, weights=WEIGHTS), "weights was None, here 'sha256:"),
        (SeekableSampler(6, shard=(1, 2)), r"shard was \[0, 1\], here \[1, 2\]"),
        (SeekableSampler(7, seed=2), "length was 6, here 7; seed was 0, here 2"),
    ],
)
def test_a_state_of_another_configuration_is_refused_by_every_key(other: SeekableSampler, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(SeekableSampler(6).state_dict())


def test_weights_are_told_apart_by_their_digest() -> None:
    state = SeekableSampler(6, weights=WEIGHTS).state_dict()
    SeekableSampler(6, weights=WEIGHTS).load_state_dict(state)
    SeekableSampler(6, weights=[3, -0.0, 1, 0.5, 0, 2.5]).load_state_dict(state)
    with pytest.raises(ValueError, match="weights was 'sha256:"):
        SeekableSampler(6, weights=WEIGHTS[::-1]).load_state_dict(state)


def test_it_says_what_a_controller_asks() -> None:
    sampler = SeekableSampler(6, weights=WEIGHTS, seed=1, shard=(1, 2))
    assert sampler.deterministic
    assert sampler.compatibility.keys() == {"length", "seed", "shuffle", "weights", "shard"}
    assert sampler.compatibility["shard"] == [1, 2]


def test_a_living_iterator_follows() -> None:
    sampler = SeekableSampler(9, seed=1)
    second = epoch_of(SeekableSampler(9, seed=1), 2)
    iterator = iter(sampler)
    next(iterator)
    sampler.set_epoch(2)
    assert list(iterator) == second
