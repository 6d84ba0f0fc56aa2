"""The GEMMs' ring in every order of steps: no stage is overwritten while it is read, nobody waits for ever."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cpu.ring_model import Broken, Shape, run

SHAPES = st.builds(
    Shape,
    stages=st.integers(2, 5),
    k_blocks=st.integers(1, 12),
    rows=st.integers(1, 2),
    cols=st.integers(1, 2),
    warpgroups=st.integers(1, 2),
    alone=st.integers(0, 1 << 12),
    lookahead=st.booleans(),
    scaled=st.booleans(),
)


def choices(seed: int, eager: float):
    """Random steps; `eager` is how often the first one is taken, so that single agents run far ahead."""
    rng = random.Random(seed)
    return lambda n: 0 if rng.random() < eager else rng.randrange(n)


@given(SHAPES, st.integers(0, 1 << 32), st.sampled_from([0.0, 0.5, 0.95]))
def test_every_order_ends_well(shape: Shape, seed: int, eager: float) -> None:
    run(shape, choices(seed, eager))


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("eager", [0.0, 0.5])
def test_counting_only_the_own_warpgroups_is_found(eager: float, scaled: bool) -> None:
    """Without the other CTA's arrivals its part of A lands on a stage that is still read, or a phase ends early."""
    shape = Shape(stages=2, k_blocks=12, cols=2, counted=2, scaled=scaled)
    with pytest.raises(Broken):
        for seed in range(200):
            run(shape, choices(seed, eager))


@pytest.mark.parametrize("eager", [0.0, 0.5])
@pytest.mark.parametrize("fault", [dict(full=1), dict(patient=False)])
def test_a_careless_scale_warp_is_found(eager: float, fault: dict) -> None:
    """A full stage that does not count it is read without scales; one that does not wait writes over what is read."""
    shape = Shape(stages=3, k_blocks=12, scaled=True, **fault)
    with pytest.raises(Broken):
        for seed in range(200):
            run(shape, choices(seed, eager))


@pytest.mark.parametrize("scaled", [False, True])
def test_lookahead_over_a_single_stage_is_found(scaled: bool) -> None:
    """It would wait for the stage that it holds."""
    with pytest.raises(Broken, match="nobody can go on"):
        run(Shape(stages=1, k_blocks=2, lookahead=True, scaled=scaled), choices(1, 0.0))


@pytest.mark.parametrize(
    "fault", [dict(counted=3), dict(full=2), dict(counted=3, scaled=True), dict(full=3, scaled=True)]
)
def test_too_many_arrivals_counted_is_found(fault: dict) -> None:
    with pytest.raises(Broken, match="nobody can go on"):
        run(Shape(stages=3, k_blocks=6, **fault), choices(1, 0.0))
