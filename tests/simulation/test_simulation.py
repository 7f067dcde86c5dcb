"""Histories by the hundred: see `simulator`."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulator import Simulation

_SEEDS, _SEEDS_PER_TEST = 800, 80

#: What has to happen now and then, or the histories prove nothing of it.
_RARE = (
    "given up",
    "limits smaller than the record",
    "record cut off",
    "record damaged",
    "record foreign",
    "record intact",
    "record lost",
    "record off",
    "record other draws",
    "record unknown key",
    "record upon record",
    "recorded while a later step trained",
    "reissued",
)

_seen: dict[int, Counter[str]] = {}


@pytest.mark.parametrize("first", range(0, _SEEDS, _SEEDS_PER_TEST))
def test_g1_g2_g6_g8_hold_over_random_histories_of_crashes(first: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(first, first + _SEEDS_PER_TEST):
        simulation = Simulation(seed)
        simulation.run()
        seen += simulation.carried.seen
    _seen[first] = seen


def test_what_is_rare_has_happened_in_them() -> None:
    if len(_seen) < _SEEDS // _SEEDS_PER_TEST:
        pytest.skip("not all of them have run here")
    seen = sum(_seen.values(), Counter())
    assert not [what for what in _RARE if not seen[what]]


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(1 << 32, (1 << 64) - 1))
def test_g1_g2_g6_g8_hold_over_histories_that_nobody_chose(seed: int) -> None:
    Simulation(seed).run()
