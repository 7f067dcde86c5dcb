"""Histories by the hundred: see `simulator`."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulator import Simulation

_SEEDS_PER_TEST = 60


@pytest.mark.parametrize("first", range(0, 600, _SEEDS_PER_TEST))
def test_g1_g2_g6_g8_hold_over_random_histories_of_crashes(first: int) -> None:
    for seed in range(first, first + _SEEDS_PER_TEST):
        Simulation(seed).run()


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(1 << 32, (1 << 64) - 1))
def test_g1_g2_g6_g8_hold_over_histories_that_nobody_chose(seed: int) -> None:
    Simulation(seed).run()
