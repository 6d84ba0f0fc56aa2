"""The grouped FP8 GEMM without its epilogue: shared memory, the TMA producer, the math main loops.

A CTA has one math warpgroup for each 64 rows of its tile and one producer warpgroup, of which one warp
issues TMA. They share a ring of stages, each one K block of 128: A [tile_rows, 128] and B [128, 128] FP8
in rows of 128 bytes (SW128). Ring state (stage, phase) is two Int32 that callers carry from tile to tile,
so that a bigger kernel can run several GEMMs through one ring.

Sources: PTX ISA, "wgmma.mma_async" (fragment layout, fences), "mbarrier", "cp.async.bulk.tensor".
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import AddressSpace, Boolean, Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.utils import hopper_helpers

from ..config import BLOCK
from . import trace
from .gemm_tiles import WARPGROUP, GemmSpec, Schedule, Tile, fill_schedule, find_tile, make_schedule, total_tiles
from .trace import Phase, Role

PRODUCER_REGISTERS = 24
MATH_REGISTERS = 240
SMEM_ALIGN = 1024  # of a SW128 operand
FP8_TYPES = {"e4m3": cutlass.Float8E4M3FN, "e5m2": cutlass.Float8E5M2}


class Operands(NamedTuple):
    """TMA of one GEMM: atoms and coordinate tensors of A [R, k] and B [experts * n, k]."""

    atom_a: cute.CopyAtom
    a: cute.Tensor
    atom_b: cute.CopyAtom
    b: cute.Tensor


class Ring(NamedTuple):
    """Shared memory stages: a [tile_rows, 128, stages], b [128, 128, stages]; barriers [stages] each."""

    a: cute.Tensor
    b: cute.Tensor
    full: cute.Pointer
    empty: cute.Pointer


class MathThread(NamedTuple):
    """Fragment views of a math thread, its two accumulators, and where it stands in a tile.

    acc and temp are fp32 [64]; value 4i + 2h + e is row `row + 8h`, column 8i + 2 * quad + e. row counts
    from the tile's first row. zero and more are the MMA without and with accumulation. pen: see trace.py.
    """

    zero: cute.TiledMma
    more: cute.TiledMma
    a: cute.Tensor
    b: cute.Tensor
    acc: cute.Tensor
    temp: cute.Tensor
    row: Int32
    quad: Int32
    pen: trace.Tracer | None


# ---- set-up --------------------------------------------------------------------------------------


def smem_layout(gemm: GemmSpec, rows: int) -> cute.ComposedLayout:
    """K-major SW128 layout [rows, 128, stages] of an operand."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, FP8_TYPES[gemm.fp8])
    return cute.tile_to_shape(atom, (rows, BLOCK, gemm.stages), order=(0, 1, 2))


def make_operands(gemm: GemmSpec, a: Int64, b: Int64, rows_total: Int32) -> Operands:
    """Host side: TMA descriptors of A (records of `pitch` bytes) and B, from device addresses.

    rows_total may be the pool's capacity; a tile that reads past it gets zeros.
    """
    dtype = FP8_TYPES[gemm.fp8]

    def tma(address, rows, stride, tile_rows):
        pointer = cute.make_ptr(dtype, address, AddressSpace.gmem, assumed_align=BLOCK)
        tensor = cute.make_tensor(pointer, cute.make_layout((rows, gemm.k), stride=(stride, 1)))
        layout = cute.slice_(smem_layout(gemm, tile_rows), (None, None, 0))
        atom, coordinates = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), tensor, layout, (tile_rows, BLOCK)
        )
        return atom, coordinates

    return Operands(
        *tma(a, rows_total, gemm.pitch, gemm.tile_rows), *tma(b, Int32(gemm.experts * gemm.n), gemm.k, BLOCK)
    )


@cute.jit
def make_ring(gemm: cutlass.Constexpr) -> Ring:
    """Allocate a ring; one thread of the CTA must call init_ring before a barrier."""
    smem = cutlass.memory.SmemAllocator()
    dtype = FP8_TYPES[gemm.fp8]
    layout_a = smem_layout(gemm, gemm.tile_rows)
    layout_b = smem_layout(gemm, BLOCK)
    a = smem.allocate_tensor(dtype, layout_a.outer, byte_alignment=SMEM_ALIGN, swizzle=layout_a.inner)
    b = smem.allocate_tensor(dtype, layout_b.outer, byte_alignment=SMEM_ALIGN, swizzle=layout_b.inner)
    barriers = smem.allocate_array(Int64, 2 * gemm.stages)
    return Ring(a, b, barriers, barriers + gemm.stages)


@cute.jit
def init_ring(gemm: cutlass.Constexpr, ring: Ring):
    """One thread: initialise the barriers. full: one arrival and the bytes; empty: one a math warp."""
    for stage in cutlass.range_constexpr(gemm.stages):
        cute.arch.mbarrier_init(ring.full + stage, 1)
        cute.arch.mbarrier_init(ring.empty + stage, 4 * gemm.warpgroups)
    cute.arch.mbarrier_init_fence()


@cute.jit
def advance(gemm: cutlass.Constexpr, stage: Int32, phase: Int32) -> tuple[Int32, Int32]:
    """Ring state of the next stage."""
    stage += 1
    if stage == gemm.stages:
        stage = Int32(0)
        phase ^= 1
    return stage, phase


# ---- producer ------------------------------------------------------------------------------------


@cute.jit
def produce_tile(
    gemm: cutlass.Constexpr,
    ops: Operands,
    ring: Ring,
    tile: Tile,
    stage: Int32,
    phase: Int32,
    pen: trace.Tracer | None,
) -> tuple[Int32, Int32]:
    """Producer warp, all lanes: load every K block of a work item. Returns the ring state after it."""
    one = cute.make_layout(1)
    shifted = cute.domain_offset((tile.row, 0), ops.a)
    ga = cute.local_tile(shifted, (gemm.tile_rows, BLOCK), (0, None))
    to_a, from_a = cpasync.tma_partition(ops.atom_a, 0, one, cute.group_modes(ring.a, 0, 2), cute.group_modes(ga, 0, 2))
    for item in cutlass.range_constexpr(gemm.passes):
        n_tile = tile.expert * (gemm.n // BLOCK) + tile.column * gemm.passes + item
        gb = cute.local_tile(ops.b, (BLOCK, BLOCK), (n_tile, None))
        to_b, from_b = cpasync.tma_partition(
            ops.atom_b, 0, one, cute.group_modes(ring.b, 0, 2), cute.group_modes(gb, 0, 2)
        )
        for kb in cutlass.range(gemm.k_blocks, unroll=1):
            full = ring.full + stage
            trace.mbarrier_wait(pen, ring.empty + stage, phase ^ 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, gemm.stage_bytes)
            cute.copy(ops.atom_a, from_a[(None, kb)], to_a[(None, stage)], tma_bar_ptr=full)
            cute.copy(ops.atom_b, from_b[(None, kb)], to_b[(None, stage)], tma_bar_ptr=full)
            stage, phase = advance(gemm, stage, phase)
    return stage, phase


# ---- math ----------------------------------------------------------------------------------------


@cute.jit
def make_math_thread(
    gemm: cutlass.Constexpr, ring: Ring, thread: Int32, records: cutlass.Constexpr, buffer: Int64 | None
) -> MathThread:
    """Views of math thread `thread` (0 .. 128 * warpgroups - 1). records, buffer: see trace.tracer."""
    dtype = FP8_TYPES[gemm.fp8]
    zero, more = (
        hopper_helpers.make_trivial_tiled_mma(
            dtype,
            dtype,
            OperandMajorMode.K,
            OperandMajorMode.K,
            Float32,
            atom_layout_mnk=(gemm.warpgroups, 1, 1),
            tiler_mn=(64, BLOCK),
        )
        for _ in range(2)
    )
    zero.set(warpgroup.Field.ACCUMULATE, False)
    more.set(warpgroup.Field.ACCUMULATE, True)
    group = cute.arch.make_warp_uniform(thread // WARPGROUP)
    mine = zero.get_slice(group * WARPGROUP)
    a = zero.make_fragment_A(mine.partition_A(ring.a))
    b = zero.make_fragment_B(mine.partition_B(ring.b))
    shape = zero.partition_shape_C((gemm.tile_rows, BLOCK))
    acc = cute.make_rmem_tensor(shape, Float32)
    temp = cute.make_rmem_tensor(shape, Float32)
    pen = trace.tracer(records, buffer, group, thread % WARPGROUP == 0)
    return MathThread(zero, more, a, b, acc, temp, thread // 32 * 16 + thread % 32 // 4, thread % 4, pen)


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
def release(ring: Ring, stage: Int32):
    """All lanes of a math warp, after its WGMMAs have read the stage: hand it back to the producer."""
    if cute.arch.lane_idx() == 0:
        cute.arch.mbarrier_arrive(ring.empty + stage)


@cute.jit
def multiply(
    math: MathThread,
    into: cute.Tensor,
    stage: Int32,
    first: cutlass.Constexpr,
    count: cutlass.Constexpr,
    keep: cutlass.Constexpr,
):
    """Issue `count` WGMMAs of K = 32 from slice `first` of a stage and commit them as one group.

    keep: add to what `into` holds; else the first one overwrites it.
    """
    warpgroup.fence()
    for k in cutlass.range_constexpr(first, first + count):
        mma = math.more if keep or k > first else math.zero
        cute.gemm(mma, into, math.a[(None, None, k, stage)], math.b[(None, None, k, stage)], into)
    warpgroup.commit_group()


@cute.jit
def sum_single(
    gemm: cutlass.Constexpr, ring: Ring, math: MathThread, stage: Int32, phase: Int32
) -> tuple[Int32, Int32]:
    """acc = the whole of K in the tensor cores' own accumulator. Returns the ring state after it.

    The next K block's WGMMAs are issued before the last one's stage is released.
    """
    trace.mbarrier_wait(math.pen, ring.full + stage, phase)
    multiply(math, math.acc, stage, 0, 4, False)
    last = stage
    stage, phase = advance(gemm, stage, phase)
    for _ in cutlass.range(gemm.k_blocks - 1, unroll=1):
        trace.mbarrier_wait(math.pen, ring.full + stage, phase)
        multiply(math, math.acc, stage, 0, 4, True)
        warpgroup.wait_group(1)
        release(ring, last)
        last = stage
        stage, phase = advance(gemm, stage, phase)
    warpgroup.wait_group(0)
    release(ring, last)
    return stage, phase


@cute.jit
def sum_promoted(
    gemm: cutlass.Constexpr, ring: Ring, math: MathThread, stage: Int32, phase: Int32
) -> tuple[Int32, Int32]:
    """acc = sum over K blocks in fp32 registers. Returns the ring state after it."""
    math.acc.fill(0.0)
    for _ in cutlass.range(gemm.k_blocks, unroll=1):
        trace.mbarrier_wait(math.pen, ring.full + stage, phase)
        multiply(math, math.temp, stage, 0, 4, False)
        warpgroup.wait_group(0)
        release(ring, stage)
        math.acc.store(math.acc.load() + math.temp.load())
        stage, phase = advance(gemm, stage, phase)
    return stage, phase


@cute.jit
def load_scales(
    gemm: cutlass.Constexpr,
    load_scale: cutlass.Constexpr,
    row_scales: tuple,
    w_scales: tuple,
    kb: Int32,
    rows: cute.Tensor,
    weights: cute.Tensor,
):
    """Scales of K block kb: rows[2g + h] for group g of the block and row half h, weights[w]."""
    groups = BLOCK // gemm.group
    for g in cutlass.range_constexpr(groups):
        for h in cutlass.range_constexpr(2):
            rows[2 * g + h] = load_scale(row_scales[h] + Int64(kb) * (4 * groups) + 4 * g)
    for w in cutlass.range_constexpr(gemm.w_scales):
        weights[w] = load_scale(w_scales[w] + Int64(kb) * 4)


@cute.jit
def sum_scaled(
    gemm: cutlass.Constexpr,
    load_scale: cutlass.Constexpr,
    ring: Ring,
    math: MathThread,
    row_scales: tuple,
    w_scales: tuple,
    stage: Int32,
    phase: Int32,
):
    """acc = sum over K groups of (partial sum * row scale * weight scale). Returns the ring state after it.

    row_scales: addresses of the first scale of this thread's two rows; w_scales: of the first weight scale
    of even and odd chunks (or one for both). One K block's scales are loaded while the last one runs.
    """
    groups = BLOCK // gemm.group
    rows, weights = cute.make_rmem_tensor(2 * groups, Float32), cute.make_rmem_tensor(gemm.w_scales, Float32)
    next_rows, next_weights = cute.make_rmem_tensor_like(rows), cute.make_rmem_tensor_like(weights)
    factors = cute.make_rmem_tensor((2 * groups, gemm.w_scales), Float32)
    math.acc.fill(0.0)
    load_scales(gemm, load_scale, row_scales, w_scales, Int32(0), rows, weights)
    # unrolled by two, so that the two sets of scales change roles without moves
    for kb in cutlass.range(gemm.k_blocks, unroll=2):
        following = cutlass.min(kb + 1, gemm.k_blocks - 1)
        load_scales(gemm, load_scale, row_scales, w_scales, following, next_rows, next_weights)
        trace.mbarrier_wait(math.pen, ring.full + stage, phase)
        for g in cutlass.range_constexpr(groups):
            multiply(math, math.temp, stage, 4 // groups * g, 4 // groups, False)
            if cutlass.const_expr(g == 0):  # after the first WGMMAs: a tile's first scales come late
                for i in cutlass.range_constexpr(2 * groups):
                    for w in cutlass.range_constexpr(gemm.w_scales):
                        factors[i, w] = rows[i] * weights[w]
            warpgroup.wait_group(0)
            if cutlass.const_expr(g == groups - 1):
                release(ring, stage)
            for chunk in cutlass.range_constexpr(16):
                for i in cutlass.range_constexpr(4):
                    factor = factors[2 * g + i // 2, chunk % gemm.w_scales]
                    math.acc[4 * chunk + i] += math.temp[4 * chunk + i] * factor
        rows.store(next_rows.load())
        weights.store(next_weights.load())
        stage, phase = advance(gemm, stage, phase)
    return stage, phase


@cute.jit
def sum_tile(
    gemm: cutlass.Constexpr,
    load_scale: cutlass.Constexpr,
    ring: Ring,
    math: MathThread,
    row_scales: tuple,
    w_scales: tuple,
    stage: Int32,
    phase: Int32,
):
    """The main loop of gemm.mode; scale addresses are not used outside "block"."""
    if cutlass.const_expr(gemm.mode == "single"):
        stage, phase = sum_single(gemm, ring, math, stage, phase)
    elif cutlass.const_expr(gemm.mode == "promoted"):
        stage, phase = sum_promoted(gemm, ring, math, stage, phase)
    else:
        stage, phase = sum_scaled(gemm, load_scale, ring, math, row_scales, w_scales, stage, phase)
    return stage, phase


# ---- roles ---------------------------------------------------------------------------------------


@cute.jit
def start(gemm: cutlass.Constexpr, ops: Operands, expert_start: Int64) -> tuple[Ring, Schedule]:
    """The whole CTA: (ring, schedule), ready for use."""
    ring = make_ring(gemm)
    schedule = make_schedule(gemm)
    warp = cute.arch.warp_idx()
    if warp == 0:
        fill_schedule(gemm, schedule, expert_start)
    if warp == 4 * gemm.warpgroups:
        cpasync.prefetch_descriptor(ops.atom_a)
        cpasync.prefetch_descriptor(ops.atom_b)
        with cute.arch.elect_one():
            init_ring(gemm, ring)
    cute.arch.sync_threads()
    return ring, schedule


@cute.jit
def producer_role(
    gemm: cutlass.Constexpr,
    ops: Operands,
    ring: Ring,
    schedule: Schedule,
    records: cutlass.Constexpr,
    buffer: Int64 | None,
):
    """The producer warpgroup of a staged kernel: every tile of this CTA, by one of its warps."""
    cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
    if cute.arch.warp_idx() == 4 * gemm.warpgroups:
        stage, phase = Int32(0), Int32(0)
        index, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        total = total_tiles(gemm, schedule)
        pen = trace.tracer(records, buffer, Int32(gemm.warpgroups), cute.arch.lane_idx() == 0)
        while index < total:
            tile = find_tile(gemm, schedule, index)
            since = trace.begin(pen)
            stage, phase = produce_tile(gemm, ops, ring, tile, stage, phase, pen)
            trace.end(pen, since, Role.PRODUCER, Phase.LOAD, index)
            index += grid


@cute.jit
def is_producer(gemm: cutlass.Constexpr) -> Boolean:
    """Whether this warp is in the producer warpgroup, the last of the CTA."""
    return cute.arch.warp_idx() >= 4 * gemm.warpgroups
