"""The GEMMs' ring in every order of steps: no stage is overwritten while it is read, nobody waits for ever."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megamoe.sched import tiles
from tests.cpu.ring_model import Broken, Shape, run

SHAPES = st.builds(
    Shape,
    stages=st.integers(2, 5),
    k_blocks=st.integers(1, 12),
    rows=st.integers(1, 2),
    cols=st.integers(1, 2),
    warpgroups=st.integers(1, 2),
    alone=st.integers(0, 1 << 12),
    scaled=st.booleans(),
    each=st.integers(1, 12),
)


def choices(seed: int, eager: float):
    """Random steps; `eager` is how often the first one is taken, so that single agents run far ahead."""
    rng = random.Random(seed)
    return lambda n: 0 if rng.random() < eager else rng.randrange(n)


@given(SHAPES, st.integers(0, 1 << 32), st.sampled_from([0.0, 0.5, 0.95]))
def test_every_order_ends_well(shape: Shape, seed: int, eager: float) -> None:
    if shape.scaled:
        shape = replace(shape, slots=tiles.window_slots(shape.each, shape.stages))
    run(shape, choices(seed, eager))


@pytest.mark.parametrize("each", [1, 3, 4, 6, 16])
@pytest.mark.parametrize("stages", [4, 6, 9])
def test_half_as_many_slots_for_windows_are_found(stages: int, each: int) -> None:
    slots = tiles.window_slots(each, stages)
    shape = Shape(stages=stages, k_blocks=24, each=each, scaled=True, slots=slots)
    run(shape, choices(1, 0.5))
    with pytest.raises(Broken, match="window"):
        for seed in range(200):
            run(replace(shape, slots=slots // 2), choices(seed, 0.5))


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
def test_a_single_stage_is_found(scaled: bool) -> None:
    """Math warps await the next stage before they release one, so they would wait for the stage that they hold."""
    with pytest.raises(Broken, match="nobody can go on"):
        run(Shape(stages=1, k_blocks=2, scaled=scaled), choices(1, 0.0))


@pytest.mark.parametrize(
    "fault", [dict(counted=3), dict(full=2), dict(counted=3, scaled=True), dict(full=3, scaled=True)]
)
def test_too_many_arrivals_counted_is_found(fault: dict) -> None:
    with pytest.raises(Broken, match="nobody can go on"):
        run(Shape(stages=3, k_blocks=6, **fault), choices(1, 0.0))
