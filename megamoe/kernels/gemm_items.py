"""The math warpgroups' loop over a CTA's work items: which are whose, and how each is run.

A GEMM gives two device functions, of a whole item (`run_tile`) and with swapped operands of an item with at most some
number of rows (`run_width`), and `args`, what both take between the tile and the ring state.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from . import gemm_epilogue, trace
from .gemm_main import MathThread, make_math_thread
from .gemm_ring import Ring, advance, advance_item, await_turn, end_turns, hear_tile, release
from .gemm_tiles import Schedule, Tile, items_to_hear
from .trace import Phase, Role

MATH_REGISTERS = 232  # with PRODUCER_REGISTERS, what 384 threads of 168 are allotted at launch (256 get more)


@cute.jit
def items_of(gemm: cutlass.Constexpr, schedule: Schedule, math: MathThread) -> tuple[Int32, Int32, Int32]:
    """items_to_hear of a math warp: with ping-pong every other one."""
    index, step, end = items_to_hear(gemm, schedule)
    if cutlass.const_expr(gemm.pingpong):
        index, step = index + math.group * step, gemm.turns * step
    return index, step, end


@cute.jit
def first_stage(gemm: cutlass.Constexpr, math: MathThread) -> tuple[Int32, Int32, Int32]:
    """(stage, phase, item): ring state at a math warp's first work item, and the CTA's number of that."""
    stage, phase, item = Int32(0), Int32(0), Int32(0)
    if cutlass.const_expr(gemm.pingpong):
        item = math.group
        if item > 0:
            stage, phase = advance_item(gemm, stage, phase)
    return stage, phase, item


@cute.jit
def next_item(gemm: cutlass.Constexpr, stage: Int32, phase: Int32, item: Int32) -> tuple[Int32, Int32, Int32]:
    """first_stage's state at a math warp's next work item, from the ring state after its last one, number `item`."""
    if cutlass.const_expr(gemm.pingpong):
        stage, phase = advance_item(gemm, stage, phase)
    return stage, phase, item + gemm.turns


@cute.jit
def await_tile(gemm: cutlass.Constexpr, ring: Ring, math: MathThread, stage: Int32, phase: Int32, item: Int32) -> Tile:
    """Wait for the first stage of the CTA's work item number `item`, and learn from the producer what it is.

    An expert below 0 says that there is none any more, once to each warp.
    """
    if cutlass.const_expr(not gemm.pingpong):
        trace.mbarrier_wait(math.pen, ring.full + stage, phase)
        tile = hear_tile(ring, stage)
    else:
        since = trace.begin(math.pen)
        ended = await_turn(gemm, ring, math.group, item)
        if not ended:
            cute.arch.mbarrier_wait(ring.full + stage, phase)
        trace.waited(math.pen, since)
        tile = hear_tile(ring, stage)
        if cutlass.const_expr(gemm.atomic):
            expert = tile.expert
            if ended:
                expert = Int32(-1)
            elif expert < 0:
                end_turns(gemm, ring, math.group)
            tile = tile._replace(expert=expert)
    return tile


@cute.jit
def has_rows(gemm: cutlass.Constexpr, math: MathThread, tile: Tile) -> Boolean:
    """Whether any of the warpgroup's rows belongs to the tile's expert."""
    some = Boolean(True)
    if cutlass.const_expr(gemm.sharing > 1):
        some = cute.arch.make_warp_uniform(tile.row + math.first) < tile.end
    return some


@cute.jit
def skip_tile(
    gemm: cutlass.Constexpr, ring: Ring, math: MathThread, tile: Tile, stage: Int32, phase: Int32, since: Int64 | None
) -> tuple[Int32, Int32]:
    """Of a warpgroup without rows: hand back the stages of a work item unread. Returns the ring state after it."""
    for _ in cutlass.range_constexpr(gemm.passes):
        for _ in cutlass.range(gemm.k_blocks, unroll=1):
            trace.mbarrier_wait(math.pen, ring.full + stage, phase)
            release(gemm, ring, stage)
            stage, phase = advance(gemm, stage, phase)
        since = trace.end(math.pen, since, Role.MATH, Phase.MAIN_LOOP, tile.index)
    trace.end(math.pen, since, Role.MATH, Phase.STORE, tile.index)
    return stage, phase


@cute.jit
def run_item(
    spec: cutlass.Constexpr,
    run_tile: cutlass.Constexpr,
    run_width: cutlass.Constexpr,
    load_scale: cutlass.Constexpr,
    ring: Ring,
    math: MathThread,
    tile: Tile,
    args: tuple,
    stage: Int32,
    phase: Int32,
    item: Int32,
    since: Int64 | None,
) -> tuple[Int32, Int32]:
    """One work item: with swapped operands by the narrowest main loop that holds its live rows, else whole, or not at
    all by a warpgroup without live rows. Returns the ring state after it.

    item: the CTA's number of it, from 0. since: when the item began (trace.begin). load_scale(address) reads an fp32
    scale.
    """
    gemm = spec.gemm
    rest = (tile, *args)
    if cutlass.const_expr(gemm.swapped):
        live = cute.arch.make_warp_uniform(cutlass.min(tile.end - tile.row, gemm.tile_rows))
        for i in cutlass.range_constexpr(len(gemm.widths)):
            fewer = gemm.widths[i - 1] if i else 0
            if live > fewer and live <= gemm.widths[i]:
                stage, phase = run_width(
                    spec, gemm.widths[i], load_scale, ring, math.pen, *rest, stage, phase, item, since
                )
    elif has_rows(gemm, math, tile):
        stage, phase = run_tile(spec, load_scale, ring, math, *rest, stage, phase, item, since)
    else:
        stage, phase = skip_tile(gemm, ring, math, tile, stage, phase, since)
    return stage, phase


@cute.jit
def math_role(
    spec: cutlass.Constexpr,
    run_tile: cutlass.Constexpr,
    run_width: cutlass.Constexpr,
    load_scale: cutlass.Constexpr,
    ring: Ring,
    schedule: Schedule,
    args: tuple,
    buffer: Int64 | None,
):
    """The math warpgroups of a staged kernel: every work item of theirs. buffer: see trace.tracer."""
    gemm = spec.gemm
    cute.arch.setmaxregister_increase(MATH_REGISTERS)
    thread, _, _ = cute.arch.thread_idx()
    math = make_math_thread(gemm, ring, thread, spec.trace, buffer)
    stage, phase, item = first_stage(gemm, math)
    index, step, total = items_of(gemm, schedule, math)
    while index < total:
        since = trace.begin(math.pen)
        tile = await_tile(gemm, ring, math, stage, phase, item)
        if cutlass.const_expr(gemm.atomic):
            if tile.expert < 0:
                total = index
        if index < total:
            stage, phase = run_item(
                spec, run_tile, run_width, load_scale, ring, math, tile, args, stage, phase, item, since
            )
        stage, phase, item = next_item(gemm, stage, phase, item)
        index += step
    if cutlass.const_expr(gemm.late):
        gemm_epilogue.store_late(math.late, math.acc[gemm.halves - 1], math.quad)
