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
)


def scaled(shape: Shape, pass_blocks: int, passes: int) -> Shape:
    """The shape with slots for scales, as many as the kernels have (GemmSpec.window_slots, item_slots)."""
    lengths = (tuple(tiles.windows_of(pass_blocks)), (passes * pass_blocks,))
    return replace(shape, lengths=lengths, slots=tuple(tiles.slots_for(each, shape.stages) for each in lengths))


def in_turns(stages: int, item: int, items: int, **others) -> Shape:
    """A shape whose two warpgroups take `items` work items of `item` K blocks in turns."""
    return Shape(stages=stages, k_blocks=item * items, item=item, pingpong=True, **others)


def choices(seed: int, eager: float):
    """Random steps; `eager` is how often the first one is taken, so that single agents run far ahead."""
    rng = random.Random(seed)
    return lambda n: 0 if rng.random() < eager else rng.randrange(n)


@given(SHAPES, st.integers(0, 12), st.integers(1, 2), st.integers(0, 1 << 32), st.sampled_from([0.0, 0.5, 0.95]))
def test_every_order_ends_well(shape: Shape, pass_blocks: int, passes: int, seed: int, eager: float) -> None:
    run(scaled(shape, pass_blocks, passes) if pass_blocks else shape, choices(seed, eager))


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("pass_blocks", [1, 3, 4, 6])
@pytest.mark.parametrize("stages", [4, 6, 9])
@pytest.mark.parametrize("pingpong", [False, True])
def test_half_as_many_slots_for_scales_are_found(pingpong: bool, stages: int, pass_blocks: int, kind: int) -> None:
    shape = in_turns(stages, pass_blocks, 24 // pass_blocks) if pingpong else Shape(stages=stages, k_blocks=24)
    good = scaled(shape, pass_blocks, 1)
    run(good, choices(1, 0.5))
    bad = replace(good, slots=tuple(n // 2 if k == kind else n for k, n in enumerate(good.slots)))
    with pytest.raises(Broken, match=f"of kind {kind} wanted"):
        for seed in range(200):
            run(bad, choices(seed, 0.5))


@given(SHAPES, st.integers(1, 6), st.booleans(), st.integers(0, 1 << 32), st.sampled_from([0.0, 0.5, 0.95]))
def test_scales_are_in_order_when_they_are_read(shape: Shape, item: int, told: bool, seed: int, eager: float) -> None:
    whole = max(shape.k_blocks // item, 1) * item
    swapped = replace(shape, warpgroups=2, k_blocks=whole, item=item, told=told, ordered=True)
    run(scaled(swapped, item, 1), choices(seed, eager))


def test_scales_read_before_they_are_in_order_are_found() -> None:
    shape = scaled(Shape(stages=3, k_blocks=12, ordered=True, patient=False), 4, 1)
    with pytest.raises(Broken, match="the table has"):
        for seed in range(100):
            run(shape, choices(seed, 0.5))


@given(SHAPES, st.integers(1, 6), st.integers(0, 1 << 32), st.sampled_from([0.0, 0.5, 0.95]))
def test_items_to_come_find_room(shape: Shape, item: int, seed: int, eager: float) -> None:
    whole = max(shape.k_blocks // item, 1) * item
    run(
        replace(shape, k_blocks=whole, item=item, queue=tiles.slots_for([item], shape.stages + 2)), choices(seed, eager)
    )


def test_too_few_places_for_items_to_come_are_found() -> None:
    shape = Shape(stages=4, k_blocks=12, rows=2, item=1, queue=2)
    with pytest.raises(Broken, match="which nobody has read"):
        for seed in range(300):
            run(shape, choices(seed, 0.5))


@given(
    st.builds(
        in_turns,
        stages=st.integers(2, 5),
        item=st.integers(1, 8),
        items=st.integers(0, 5),
        rows=st.integers(1, 2),
        cols=st.integers(1, 2),
        warps=st.integers(1, 2),
        told=st.booleans(),
    ),
    st.integers(0, 2),
    st.integers(0, 1 << 32),
    st.sampled_from([0.0, 0.5, 0.95]),
)
def test_turns_end_well(shape: Shape, passes: int, seed: int, eager: float) -> None:
    """Also with the slots for scales and for items to come that the kernels have."""
    if passes and shape.length % passes == 0:
        shape = scaled(shape, shape.length // passes, passes)
    if shape.told:
        shape = replace(shape, queue=tiles.slots_for([shape.length], shape.stages + 2))
    run(shape, choices(seed, eager))


@pytest.mark.parametrize(
    "fault,found",
    [
        (dict(turns=False), "item 1 wanted"),  # a parity says nothing of a stage that is two rounds ahead
        (dict(counted=2), "nobody can go on"),  # both warpgroups, as without turns
        (dict(told=True, warps=2, last_words=False), "nobody can go on"),  # the other's turn never comes
    ],
    ids=str,
)
def test_faults_of_turns_are_found(fault: dict, found: str) -> None:
    run(in_turns(3, 5, 4, told="told" in fault), choices(1, 0.5))
    with pytest.raises(Broken, match=found):
        for seed in range(200):
            run(in_turns(3, 5, 4, **fault), choices(seed, 0.5))


def test_arrivals_of_one_cta_for_an_items_warpgroups_are_found() -> None:
    with pytest.raises(Broken):
        for seed in range(200):
            run(in_turns(3, 2, 6, cols=2, counted=1), choices(seed, 0.5))


@pytest.mark.parametrize("eager", [0.0, 0.5])
def test_counting_only_the_own_warpgroups_is_found(eager: float) -> None:
    """Without the other CTA's arrivals its part of A lands on a stage that is still read, or a phase ends early."""
    shape = Shape(stages=2, k_blocks=12, cols=2, counted=2)
    with pytest.raises(Broken):
        for seed in range(200):
            run(shape, choices(seed, eager))


def test_a_single_stage_is_found() -> None:
    """Math warps await the next stage before they release one, so they would wait for the stage that they hold."""
    with pytest.raises(Broken, match="nobody can go on"):
        run(Shape(stages=1, k_blocks=2), choices(1, 0.0))


@pytest.mark.parametrize("fault", [dict(counted=3), dict(full=2)])
def test_too_many_arrivals_counted_is_found(fault: dict) -> None:
    with pytest.raises(Broken, match="nobody can go on"):
        run(Shape(stages=3, k_blocks=6, **fault), choices(1, 0.0))
