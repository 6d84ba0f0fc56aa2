"""The math warpgroups of a grouped FP8 GEMM: fragments and the main loops of each mode.

A math warpgroup has 64 rows of the tile. It multiplies them with the `halves` weight tiles of a stage one after
the other, each into accumulators of its own, or with mma_cols = 256 with both at once; promoted sums go through
one temporary fragment, and while one warpgroup adds, the other keeps the tensor cores busy. With ping-pong a warpgroup
has every other tile of 64 rows to itself.

Source: PTX ISA, "wgmma.mma_async" (fragment layout, fences).
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import warpgroup

from ..config import BLOCK
from . import gemm_columns, gemm_epilogue, gemm_scales, gemm_tiles, prims, trace
from .gemm_ring import Ring, advance, pass_turn, release
from .gemm_scales import ScalePlace
from .gemm_tiles import WARPGROUP, Tile


class MathThread(NamedTuple):
    """A math thread's operands, its accumulators, and where it stands in a tile.

    a, b: descriptors (prims.sw128_descriptor) of its warpgroup's rows and of the weights in stage 0.
    acc [halves] are fp32 [64], temp [mma_cols / 2]; value 4i + 2h + e is row `row + 8h`, column 8i + 2 * quad + e of a
    half. sums are what WGMMAs add to: acc, or with mma_cols = 256 one fp32 [128], of which acc are views. scales (rows
    [2 * groups], weights [w_scales]) and factors [2 * groups, w_scales] are fp32, of a K block. row counts from the
    tile's first row, as does first, the first row of the warpgroup's 64. group: the warpgroup. pen: see trace.py. late:
    with GemmSpec.late, what the last half of acc still holds of the last work item.

    Swapped operands (swapped_thread): a is of its weights, b of the rows. acc and temp are fp32 [columns / 2] of 64
    weight rows times up to 128 rows each (GemmSpec.part_steps); their "rows" are weights and their "columns" rows.
    scales: weights' only; factors as gemm_columns.read says. table: this thread's place in the ordered scales of stage
    0, None without block scales.
    """

    a: Int32
    b: Int32
    acc: tuple
    sums: tuple
    temp: cute.Tensor
    scales: tuple
    factors: cute.Tensor
    row: Int32
    first: Int32
    quad: Int32
    group: Int32
    pen: trace.Tracer | None
    table: Int32 | None
    late: gemm_epilogue.Late | None = None


@cute.jit
def make_math_thread(
    gemm: cutlass.Constexpr, ring: Ring, thread: Int32, records: cutlass.Constexpr, buffer: Int64 | None
) -> MathThread:
    """Views of math thread `thread` (0 .. 128 * warpgroups - 1). records, buffer: see trace.tracer."""
    group = cute.arch.make_warp_uniform(thread // WARPGROUP)
    pen = trace.tracer(records, buffer, group, thread % WARPGROUP == 0)
    if cutlass.const_expr(gemm.swapped):  # a stand-in: the width is known only with the tile
        return swapped_thread(gemm, ring, thread, gemm.widths[0], pen)
    first = group * 64
    if cutlass.const_expr(gemm.pingpong):
        first, thread = Int32(0), thread % WARPGROUP
    a = prims.sw128_descriptor(prims.smem_addr(ring.a.iterator) + first * BLOCK)
    b = prims.sw128_descriptor(prims.smem_addr(ring.b.iterator))
    parts = BLOCK * gemm.halves // gemm.mma_cols
    sums = tuple(cute.make_rmem_tensor(gemm.mma_cols // 2, Float32) for _ in range(parts))
    acc = sums
    if cutlass.const_expr(gemm.mma_cols > BLOCK):
        acc = tuple(cute.make_tensor(sums[0].iterator + 64 * half, cute.make_layout(64)) for half in range(gemm.halves))
    temp = cute.make_rmem_tensor(gemm.mma_cols // 2, Float32)
    row = prims.keep(thread // 32 * 16 + thread % 32 // 4)
    scales = tuple(cute.make_rmem_tensor(n, Float32) for n in (2 * gemm.groups, gemm.w_scales))
    factors = cute.make_rmem_tensor((2 * gemm.groups, gemm.w_scales), Float32)
    late = gemm_epilogue.make_late() if gemm.late else None
    return MathThread(a, b, acc, sums, temp, scales, factors, row, first, thread % 4, group, pen, None, late)


@cute.jit
def swapped_thread(
    gemm: cutlass.Constexpr, ring: Ring, thread: Int32, width: cutlass.Constexpr, pen: trace.Tracer | None
) -> MathThread:
    """make_math_thread with swapped operands, for tiles of `width` rows (of gemm.widths)."""
    group = cute.arch.make_warp_uniform(thread // WARPGROUP)
    a = prims.sw128_descriptor(prims.smem_addr(ring.b.iterator) + group * (64 * gemm.halves * BLOCK))
    b = prims.sw128_descriptor(prims.smem_addr(ring.a.iterator))
    across, columns = gemm_tiles.split_width(width)
    acc = tuple(cute.make_rmem_tensor(columns // 2, Float32) for _ in range(gemm.halves * across))
    temp = cute.make_rmem_tensor(columns // 2, Float32)
    table, factors, scales = None, temp, ()
    if cutlass.const_expr(gemm.scaled):
        table = ring.ordered + thread % 4 * 16
        scales = (cute.make_rmem_tensor(2 if gemm.paired else 1, Float32),)
        factors = cute.make_rmem_tensor(cute.size(scales[0]) * gemm.groups * width // 4, Float32)
    row = prims.keep(thread % WARPGROUP // 32 * 16 + thread % 32 // 4)
    return MathThread(a, b, acc, acc, temp, scales, factors, row, group * 64, thread % 4, group, pen, table)


@cute.jit
def operands_of(gemm: cutlass.Constexpr, math: MathThread, stage: Int32) -> tuple[Int32, Int32]:
    """Descriptors of this warpgroup's rows and of the weights in a stage.

    sum_promoted carries those of the next stage from turn to turn: made at a turn's start they would come between the
    last additions and the first WGMMA, where the tensor cores wait for them.
    """
    rows, weights = gemm.tile_rows * BLOCK // 16, gemm.halves * BLOCK * BLOCK // 16
    a, b = (weights, rows) if gemm.swapped else (rows, weights)
    return math.a + stage * a, math.b + stage * b


@cute.jit
def thread_rows(math: MathThread, tile: Tile) -> tuple:
    """Pool rows of this thread's two row halves; they may lie past tile.end."""
    return (tile.row + math.row, tile.row + math.row + 8)


@cute.jit
def safe_rows(math: MathThread, tile: Tile) -> tuple:
    """thread_rows, with rows past the expert's end replaced by its last row: fine to read."""
    mine = thread_rows(math, tile)
    return (cutlass.min(mine[0], tile.end - 1), cutlass.min(mine[1], tile.end - 1))


@cute.jit
def multiply(
    gemm: cutlass.Constexpr,
    into: cute.Tensor,
    operands: tuple,
    part: cutlass.Constexpr,
    first: cutlass.Constexpr,
    count: cutlass.Constexpr,
    keep: cutlass.Constexpr,
):
    """Issue `count` WGMMAs of K = 32 from slice `first` of a stage (operands_of), into part `part` of the sums.

    keep: add to what `into` holds; else the first one overwrites it.
    """
    a, b = gemm.part_steps(part, 2 * cute.size(into))
    for k in cutlass.range_constexpr(first, first + count):
        prims.wgmma(into, operands[0] + (a + 2 * k), operands[1] + (b + 2 * k), gemm.fp8, keep or k > first)


@cute.jit
def multiply_stage(gemm: cutlass.Constexpr, math: MathThread, operands: tuple, keep: cutlass.Constexpr):
    """Issue a stage's WGMMAs into all sums and commit them as one group."""
    warpgroup.fence()
    for part in cutlass.range_constexpr(len(math.sums)):
        multiply(gemm, math.sums[part], operands, part, 0, 4, keep)
    warpgroup.commit_group()


@cute.jit
def sum_single(
    gemm: cutlass.Constexpr, ring: Ring, math: MathThread, stage: Int32, phase: Int32, ends: cutlass.Constexpr
) -> tuple[Int32, Int32]:
    """acc = the whole of K in the tensor cores' own accumulator, when its last WGMMAs, in flight on return, are done.
    Returns the ring state of the last stage.

    The next K block's WGMMAs are issued before the last one's stage is released.
    """
    trace.mbarrier_wait(math.pen, ring.full + stage, phase)
    multiply_stage(gemm, math, operands_of(gemm, math, stage), False)
    for _ in cutlass.range(gemm.k_blocks - 1, unroll=1):
        last = stage
        stage, phase = advance(gemm, stage, phase)
        trace.mbarrier_wait(math.pen, ring.full + stage, phase)
        multiply_stage(gemm, math, operands_of(gemm, math, stage), True)
        warpgroup.wait_group(1)
        release(gemm, ring, last)
    if cutlass.const_expr(ends and gemm.pingpong):
        pass_turn(gemm, ring, math.group)
    return stage, phase


@cute.jit
def await_stage(
    gemm: cutlass.Constexpr,
    ring: Ring,
    math: MathThread,
    stage: Int32,
    phase: Int32,
    place: ScalePlace | None,
    kb: Int32 | int,
):
    """Wait for K block kb in `stage` and start to read its scales, if any, to math.scales; with swapped operands wait
    until they are in order instead."""
    trace.mbarrier_wait(math.pen, ring.full + stage, phase)
    if cutlass.const_expr(gemm.scaled and gemm.swapped):
        trace.mbarrier_wait(math.pen, ring.ready + stage, phase)
    elif cutlass.const_expr(gemm.scaled):
        gemm_scales.read(gemm, place, kb, *math.scales)


@cute.jit
def multiply_scales(gemm: cutlass.Constexpr, math: MathThread):
    """math.factors[2g + h, w] = scale of row half h in group g times weight scale w, of what was read last."""
    rows, weights = math.scales
    for i in cutlass.range_constexpr(2 * gemm.groups):
        for w in cutlass.range_constexpr(gemm.w_scales):
            math.factors[i, w] = rows[i] * weights[w]


@cute.jit
def add_promoted(
    gemm: cutlass.Constexpr,
    math: MathThread,
    half: cutlass.Constexpr,
    g: cutlass.Constexpr,
    first: cutlass.Constexpr = False,
):
    """acc of a half += temp, times the scales of group g in "block" mode. first: = instead of +=."""
    acc = math.acc[half]
    if cutlass.const_expr(not gemm.scaled):
        acc.store(math.temp.load() if cutlass.const_expr(first) else acc.load() + math.temp.load())
    elif cutlass.const_expr(gemm.swapped):
        gemm_columns.add(gemm, acc, math.temp, math.factors, g, half, len(math.acc), first)
    else:
        parts = gemm.factor_chunks(half)
        for h in cutlass.range_constexpr(2):  # all additions of a factor in a row: operands are read less often
            for p in cutlass.range_constexpr(len(parts)):
                part, chunks = parts[p]
                factor = math.factors[2 * g + h, part]
                for n in cutlass.range_constexpr(len(chunks)):
                    for e in cutlass.range_constexpr(2):
                        at = 4 * chunks[n] + 2 * h + e
                        product = math.temp[at] * factor
                        acc[at] = product if first else acc[at] + product


def holds_scales(gemm: cutlass.Constexpr, math: MathThread) -> bool:
    """Whether a K block with swapped operands' scales goes into a single accumulator: then some of the scales that were
    read from its stage may not have been waited for until its last additions are made."""
    return gemm.scaled and gemm.swapped and len(math.acc) == 1


@cute.jit
def hold(ring: Ring, stage: Int32, phase: Int32):
    """Keep ptxas from moving what stands before and behind it past each other: a wait that is over already, for a stage
    that this warp has read and not released yet, so that nobody can have filled it again.

    Without it ptxas puts the stores of a finished half behind the WGMMAs of the other one (gemm-notes.md).
    """
    cute.arch.mbarrier_wait(ring.full + stage, phase)


@cute.jit
def first_block(
    gemm: cutlass.Constexpr,
    ring: Ring,
    math: MathThread,
    stage: Int32,
    phase: Int32,
    operands: tuple,
) -> tuple[Int32, Int32, tuple]:
    """The first K block of several of an unscaled sum_promoted: its products are the sums. Returns what promote_block
    does."""
    warpgroup.fence()
    for half in cutlass.range_constexpr(len(math.acc)):
        multiply(gemm, math.acc[half], operands, half, 0, 4, False)
    warpgroup.commit_group()
    next_stage, next_phase = advance(gemm, stage, phase)
    next_operands = operands_of(gemm, math, next_stage)
    await_stage(gemm, ring, math, next_stage, next_phase, None, 1)
    warpgroup.wait_group(0)
    release(gemm, ring, stage)
    return next_stage, next_phase, next_operands


@cute.jit
def promote_block(
    gemm: cutlass.Constexpr,
    ring: Ring,
    math: MathThread,
    stage: Int32,
    phase: Int32,
    operands: tuple,
    place: ScalePlace | None,
    kb: Int32,
    last: cutlass.Constexpr,
    first: cutlass.Constexpr = False,
) -> tuple[Int32, Int32, tuple]:
    """One K block of sum_promoted. Returns the ring state and the operands of the next block; of the last one, its own.

    first: its (scaled) products are the sums so far; with GemmSpec.late the last half's accumulators are stored before
    them. last: of the pass; its last batch of WGMMAs is then left in flight.
    """
    groups = gemm.groups if gemm.scaled else 1
    next_stage, next_phase, next_operands = stage, phase, operands
    held = holds_scales(gemm, math)
    for half in cutlass.range_constexpr(len(math.acc)):
        for g in cutlass.range_constexpr(groups):
            warpgroup.fence()
            multiply(gemm, math.temp, operands, half, 4 // groups * g, 4 // groups, False)
            warpgroup.commit_group()
            if cutlass.const_expr(gemm.scaled and half == 0 and g == 0):
                if cutlass.const_expr(gemm.swapped):
                    at, columns = math.table + stage * gemm.table_bytes, 2 * cute.size(math.temp)
                    gemm_columns.read(gemm, at, place, kb, columns, len(math.acc), math.factors, math.scales[0])
                else:
                    multiply_scales(gemm, math)
            if cutlass.const_expr(gemm.late and first and half == 0):
                hold(ring, stage, phase)
                gemm_epilogue.store_late(math.late, math.acc[len(math.acc) - 1], math.quad)
                hold(ring, stage, phase)
            end = cutlass.const_expr(half == len(math.acc) - 1 and g == groups - 1)
            if cutlass.const_expr(end and not last):
                next_stage, next_phase = advance(gemm, stage, phase)
                next_operands = operands_of(gemm, math, next_stage)
                await_stage(gemm, ring, math, next_stage, next_phase, place, kb + 1)
            if cutlass.const_expr(end and last and gemm.early > 0):
                hold(ring, stage, phase)
            if cutlass.const_expr(not (end and last)):
                warpgroup.wait_group(0)
                if cutlass.const_expr(end and not held):
                    release(gemm, ring, stage)
                add_promoted(gemm, math, half, g, first and g == 0)
                if cutlass.const_expr(end and held):
                    release(gemm, ring, stage)
    return next_stage, next_phase, next_operands


@cute.jit
def sum_promoted(
    gemm: cutlass.Constexpr,
    ring: Ring,
    math: MathThread,
    stage: Int32,
    phase: Int32,
    place: ScalePlace | None,
    ends: cutlass.Constexpr,
) -> tuple[Int32, Int32]:
    """acc = sum over K groups in fp32 registers, times scales in "block" mode, but for the last batch of WGMMAs, which
    is in flight. Returns the ring state of the last stage.

    The next stage is awaited and its scales are read while the tensor cores run a stage's last WGMMAs; they are
    multiplied only under the next stage's first WGMMAs, when they have arrived. So nothing but additions stands between
    two batches (tests/cpu/ring_model.py has this order too).
    """
    await_stage(gemm, ring, math, stage, phase, place, 0)
    operands = operands_of(gemm, math, stage)
    if cutlass.const_expr(gemm.cleared):
        for half in cutlass.range_constexpr(len(math.acc)):
            math.acc[half].fill(-0.0)  # what changes no sum, not even one of -0
    elif cutlass.const_expr(gemm.scaled or gemm.late):
        stage, phase, operands = promote_block(gemm, ring, math, stage, phase, operands, place, Int32(0), False, True)
    else:
        stage, phase, operands = first_block(gemm, ring, math, stage, phase, operands)
    if cutlass.const_expr(gemm.k_blocks > 1):
        # A loop that is known to run once or never would be dissolved, and ptxas then serialises what stands around it.
        end = gemm.k_blocks - 1 if gemm.k_blocks > 3 else prims.keep(Int32(gemm.k_blocks - 1))
        for kb in cutlass.range(0 if gemm.cleared else 1, end, unroll=1):
            stage, phase, operands = promote_block(gemm, ring, math, stage, phase, operands, place, kb, False)
    if cutlass.const_expr(ends and gemm.pingpong):
        pass_turn(gemm, ring, math.group)
    promote_block(gemm, ring, math, stage, phase, operands, place, Int32(gemm.k_blocks - 1), True)
    return stage, phase


@cute.jit
def start_tile(
    gemm: cutlass.Constexpr,
    ring: Ring,
    math: MathThread,
    stage: Int32,
    phase: Int32,
    place: ScalePlace | None,
    ends: cutlass.Constexpr = True,
) -> tuple[Int32, Int32]:
    """The main loop of gemm.mode, one pass of a work item, up to its last WGMMAs, which are in flight on return.

    The first gemm.early halves of math.acc may be used then; finish_tile completes the others. Returns what finish_tile
    takes. place: gemm_scales.place of the pass, None without block scales. ends: whether it is the item's last pass.
    """
    if cutlass.const_expr(gemm.mode == "single"):
        stage, phase = sum_single(gemm, ring, math, stage, phase, ends)
    else:
        stage, phase = sum_promoted(gemm, ring, math, stage, phase, place, ends)
    return stage, phase


@cute.jit
def finish_tile(
    gemm: cutlass.Constexpr, ring: Ring, math: MathThread, stage: Int32, phase: Int32
) -> tuple[Int32, Int32]:
    """After start_tile: math.acc = one pass of a work item. Returns the ring state after it."""
    if cutlass.const_expr(gemm.early > 0):
        hold(ring, stage, phase)
    warpgroup.wait_group(0)
    held = holds_scales(gemm, math)
    if cutlass.const_expr(not held):
        release(gemm, ring, stage)
    if cutlass.const_expr(gemm.mode != "single"):
        add_promoted(gemm, math, len(math.acc) - 1, (gemm.groups if gemm.scaled else 1) - 1)
    if cutlass.const_expr(held):
        release(gemm, ring, stage)
    return advance(gemm, stage, phase)
