"""The pure orders: permutations that look shuffled, draws that keep to their weights."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmos_ctrl.core.orders import Weights, sequential, shuffled


def excess(counts: Counter[Any], expected: dict[Any, float]) -> float:
    """How far chi squared lies above its mean, in standard deviations."""
    assert counts.keys() <= expected.keys()
    chi = sum((counts[key] - mean) ** 2 / mean for key, mean in expected.items())
    freedom = len(expected) - 1
    return (chi - freedom) / math.sqrt(2 * freedom)


@given(st.integers(1, 400), st.integers(0, 1 << 70), st.integers(1, 1 << 40))
def test_a_shuffled_epoch_is_a_permutation(length: int, seed: int, epoch: int) -> None:
    index_at = shuffled(length, seed=seed, epoch=epoch)
    assert sorted(map(index_at, range(length))) == list(range(length))


@given(st.integers(1, 1 << 80), st.data())
def test_a_shuffled_index_lies_in_its_range(length: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, length - 1), min_size=2, max_size=2, unique=length > 1))
    indices = list(map(shuffled(length, seed=1, epoch=1), positions))
    assert all(0 <= index < length for index in indices)
    assert len(set(indices)) == len(set(positions))


@pytest.mark.parametrize("length", [2, 3, 4, 5])
def test_every_permutation_comes_equally_often(length: int) -> None:
    of_each, kinds = 60, math.factorial(length)
    counts = Counter(
        tuple(map(shuffled(length, seed=1, epoch=epoch), range(length))) for epoch in range(1, of_each * kinds + 1)
    )
    assert len(counts) == kinds
    assert excess(counts, dict.fromkeys(counts, of_each)) < 4


@pytest.mark.parametrize("length", [7, 64, 100])
@pytest.mark.parametrize("by", ["epoch", "seed"])
def test_a_position_holds_every_index_equally_often(length: int, by: str) -> None:
    rounds = 40 * length
    orders = [shuffled(length, **({"seed": 1, "epoch": 1} | {by: n})) for n in range(1, rounds + 1)]  # type: ignore[arg-type]
    for position in (0, length // 2, length - 1):
        counts = Counter(index_at(position) for index_at in orders)
        assert excess(counts, dict.fromkeys(range(length), 40)) < 4
    steps = Counter((index_at(1) - index_at(0)) % length for index_at in orders)
    assert excess(steps, dict.fromkeys(range(1, length), rounds / (length - 1))) < 4


def test_neighbours_in_an_epoch_lie_anywhere() -> None:
    length = 10_000
    order = [*map(shuffled(length, seed=3, epoch=9), range(length))]
    steps = Counter((b - a) % length * 50 // length for a, b in pairwise(order))
    assert excess(steps, dict.fromkeys(range(50), (length - 1) / 50)) < 4
    assert abs(sum(a > b for a, b in pairwise(order)) / length - 0.5) < 0.02


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [tuple(map(shuffled(40, seed=s, epoch=e), range(40))) for s in range(6) for e in range(1, 7)]
    orders.append(tuple(map(sequential, range(40))))
    assert len(set(orders)) == len(orders)


@pytest.mark.parametrize(
    "weights", [[1.0], [1, 1, 1], [0, 5, 0, 1e-3, 2.5, 0], [1e-300, 2e-300], [2.0**n for n in range(12)]]
)
def test_indices_come_by_their_weights(weights: list[float]) -> None:
    draws, total = 20_000, sum(weights)
    counts: Counter[int] = Counter()
    prepared = Weights(weights)
    for epoch in range(1, 5):
        counts.update(map(prepared.order(seed=1, epoch=epoch), range(draws // 4)))
    expected = {index: draws * weight / total for index, weight in enumerate(weights) if weight}
    likely = {index: mean for index, mean in expected.items() if mean >= 5}
    assert counts.keys() <= expected.keys()
    if len(likely) > 1:
        assert excess(Counter({index: counts[index] for index in likely}), likely) < 4


@given(st.lists(st.floats(0, 1e300) | st.just(0.0), min_size=1, max_size=30).filter(lambda w: 0 < sum(w) < math.inf))
def test_a_weight_of_zero_is_never_drawn_and_the_cells_share_out_everything(weights: list[float]) -> None:
    prepared = Weights(weights)
    drawn = set(map(prepared.order(seed=1, epoch=1), range(100)))
    assert all(weights[index] > 0 for index in drawn)
    share = dict.fromkeys(prepared._indices, 0.0)
    for cell, (chance, alias) in enumerate(zip(prepared._chance, prepared._alias, strict=True)):
        assert 0 <= chance <= 1
        share[prepared._indices[cell]] += chance
        share[prepared._indices[alias]] += 1 - chance
    total = math.fsum(weights)
    for index, weight in enumerate(weights):
        if weight:
            assert share[index] / len(share) == pytest.approx(weight / total, abs=1e-12)


def test_draws_of_epochs_seeds_and_positions_differ() -> None:
    prepared = Weights([1] * 1000)
    draws = [tuple(map(prepared.order(seed=s, epoch=e), range(20))) for s in range(4) for e in range(1, 5)]
    assert len(set(draws)) == len(draws)
    assert len(set(draws[0])) > 15
