"""Shared memory of a grouped FP8 GEMM: a ring of stages between the producer warp and the math warpgroups.

A stage is one K block of 128: A [tile_rows, 128] and `halves` weight tiles B [128, 128], FP8 in rows of 128
bytes (SW128). Block scales come with some of the stages, into slots of their own (gemm_scales.py). Ring state
(stage, phase) is two Int32 that callers carry from tile to tile, so that a bigger kernel can run several GEMMs
through one ring.

With ping-pong a work item's stages are read by one of two math warpgroups, and the other jumps over them. A barrier
tells it only the parity of a stage's round, which says nothing of a stage two rounds ahead: so it looks at its item's
first stage on its turn, once the other one has seen all stages of the item before full.

Source: PTX ISA, "mbarrier".
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Boolean, Int32, Int64
from cutlass.cute.nvgpu import warpgroup

from ..config import BLOCK
from . import prims
from .gemm_scales import ScaleSlots, make_slots
from .gemm_tiles import TILE_BYTES, GemmSpec, Tile

SMEM_ALIGN = 1024  # of a SW128 operand
FP8_TYPES = {"e4m3": cutlass.Float8E4M3FN, "e5m2": cutlass.Float8E5M2}


class Ring(NamedTuple):
    """Shared memory stages: a [tile_rows, 128, stages], b [128, 128, stages * halves] (a stage's halves are
    neighbours), tiles: address of the Tile that begins at each stage; scales, None without block scales; barriers full
    and empty [stages] each; turns [GemmSpec.turn_words], with ping-pong. With swapped operands also transpose, address
    of gemm_transpose.py's buffer, and with block scales ordered, address of gemm_columns.py's tables, and barriers
    ready [stages] for them; else None."""

    a: cute.Tensor
    b: cute.Tensor
    tiles: Int32
    scales: ScaleSlots | None
    full: cute.Pointer
    empty: cute.Pointer
    turns: cute.Pointer
    transpose: Int32 | None
    ordered: Int32 | None
    ready: cute.Pointer | None


def smem_layout(gemm: GemmSpec, rows: int, tiles: int) -> cute.ComposedLayout:
    """K-major SW128 layout [rows, 128, tiles] of an operand."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, FP8_TYPES[gemm.fp8])
    return cute.tile_to_shape(atom, (rows, BLOCK, tiles), order=(0, 1, 2))


@cute.jit
def make_ring(gemm: cutlass.Constexpr) -> Ring:
    """Allocate a ring; one thread of the CTA must call init_ring before a barrier."""
    smem = cutlass.memory.SmemAllocator()
    dtype = FP8_TYPES[gemm.fp8]
    layout_a = smem_layout(gemm, gemm.tile_rows, gemm.stages)
    layout_b = smem_layout(gemm, BLOCK, gemm.stages * gemm.halves)
    a = smem.allocate_tensor(dtype, layout_a.outer, byte_alignment=SMEM_ALIGN, swizzle=layout_a.inner)
    b = smem.allocate_tensor(dtype, layout_b.outer, byte_alignment=SMEM_ALIGN, swizzle=layout_b.inner)
    scales = make_slots(gemm) if gemm.scaled else None  # right behind b: nothing is lost to its alignment
    tiles = prims.smem_addr(smem.allocate(gemm.stages * TILE_BYTES, 16))
    transpose, ordered, ready = None, None, None
    if cutlass.const_expr(gemm.swapped):
        transpose = prims.smem_addr(smem.allocate(gemm.transpose_bytes, 16))
        if cutlass.const_expr(gemm.scaled):
            ordered = prims.smem_addr(smem.allocate(gemm.stages * gemm.table_bytes, 16))
            ready = smem.allocate_array(Int64, gemm.stages)
    barriers = smem.allocate_array(Int64, 2 * gemm.stages + gemm.turn_words)
    empty, turns = barriers + gemm.stages, barriers + 2 * gemm.stages
    return Ring(a, b, tiles, scales, barriers, empty, turns, transpose, ordered, ready)


@cute.jit
def init_ring(gemm: cutlass.Constexpr, ring: Ring):
    """One thread: initialise the barriers. full: TMA's bytes; empty: one a math warp that reads the stage, of every CTA
    of the cluster; turns: one a warp of the other math warpgroup; ready: a lane of the warp that orders scales.

    In a cluster of 2 x 2 a CTA fills stages of its row and its column only, yet awaits all four: a superset costs
    little. Nor can arrivals be taken for those of an earlier or later round of the stage. All CTAs run the same work
    items, so each math warp (with ping-pong: of the warpgroup whose item it is, the same in all CTAs) releases a stage
    once a round. Before a warp's release number k + 1 its own producer has seen k times the number of warps arrive,
    when nobody had released more than k times: so everybody had, k times. The k-th phase of any of the barriers thus
    ends only after every warp's k-th release.
    """
    for stage in cutlass.range_constexpr(gemm.stages):
        cute.arch.mbarrier_init(ring.full + stage, 1)
        cute.arch.mbarrier_init(ring.empty + stage, 4 * gemm.sharing * gemm.cluster)
        if cutlass.const_expr(gemm.swapped and gemm.scaled):
            cute.arch.mbarrier_init(ring.ready + stage, 32)
    if cutlass.const_expr(gemm.pingpong):
        for group in cutlass.range_constexpr(gemm.turns):
            cute.arch.mbarrier_init(ring.turns + group, 4)
        if cutlass.const_expr(gemm.atomic):
            prims.smem_st_i64(prims.smem_addr(ring.turns + gemm.turns), Int64(0))
    cute.arch.mbarrier_init_fence()


@cute.jit
def advance(gemm: cutlass.Constexpr, stage: Int32, phase: Int32) -> tuple[Int32, Int32]:
    """Ring state of the next stage."""
    stage += 1
    if stage == gemm.stages:
        stage = Int32(0)
        phase ^= 1
    return stage, phase


@cute.jit
def advance_item(gemm: cutlass.Constexpr, stage: Int32, phase: Int32) -> tuple[Int32, Int32]:
    """Ring state a whole work item further on."""
    blocks = gemm.passes * gemm.k_blocks
    stage += blocks % gemm.stages
    phase ^= blocks // gemm.stages % 2
    if stage >= gemm.stages:
        stage -= gemm.stages
        phase ^= 1
    return stage, phase


@cute.jit
def release(gemm: cutlass.Constexpr, ring: Ring, stage: Int32):
    """All lanes of a math warp, after its reads of the stage: hand it back to the producers that fill it."""
    lane = cute.arch.lane_idx()
    if cutlass.const_expr(gemm.cluster == 1):
        if lane == 0:
            cute.arch.mbarrier_arrive(ring.empty + stage)
    elif lane < gemm.cluster:
        cute.arch.mbarrier_arrive(ring.empty + stage, lane)


@cute.jit
def tell_tile(ring: Ring, stage: Int32, tile: Tile):
    """One lane of the producer, before it arrives at the full barrier of a tile's first stage: what the tile is."""
    what = tile.expert << 16 | tile.column
    prims.smem_st_v4(ring.tiles + stage * TILE_BYTES, what, tile.row, tile.end, tile.index)


@cute.jit
def tell_end(ring: Ring, stage: Int32):
    """As tell_tile, where no tile begins any more: an expert below 0."""
    prims.smem_st_v4(ring.tiles + stage * TILE_BYTES, Int32(-1), Int32(0), Int32(0), Int32(0))


@cute.jit
def hear_tile(ring: Ring, stage: Int32) -> Tile:
    """Warps that read stages, at a tile's first one once that is full: what the tile is, without a search for it."""
    words = prims.smem_ld_v4(ring.tiles + stage * TILE_BYTES)
    what, row, end, index = (cute.arch.make_warp_uniform(word) for word in words)
    return Tile(what >> 16, row, end, what & 0xFFFF, index, None)


# ---- turns of math warpgroups (ping-pong) --------------------------------------------------------


@cute.jit
def await_turn(gemm: cutlass.Constexpr, ring: Ring, group: Int32, item: Int32) -> Boolean:
    """Math warps: wait for the turn of warpgroup `group` to run the CTA's item number `item`, its own. Returns whether
    the other one has heard of the end.

    The first warpgroup's first turn is the parity before the first phase, which counts as over.
    """
    cute.arch.mbarrier_wait(ring.turns + group, (item // 2 + 1 - group) % 2)
    ended = Boolean(False)
    if cutlass.const_expr(gemm.atomic):
        word = Int32(0)
        if cute.arch.lane_idx() == 0:  # the lane that passes the turn on, so its read comes before the other's write
            word = prims.smem_ld(prims.smem_addr(ring.turns + gemm.turns) + 4 * group)
        ended = cute.arch.make_warp_uniform(word) != 0
    return ended


@cute.jit
def pass_turn(gemm: cutlass.Constexpr, ring: Ring, group: Int32):
    """All lanes of a math warp of warpgroup `group` that has seen its item's last stage full: the other's turn."""
    if cute.arch.lane_idx() == 0:
        cute.arch.mbarrier_arrive(ring.turns + (1 - group))


@cute.jit
def end_turns(gemm: cutlass.Constexpr, ring: Ring, group: Int32):
    """As pass_turn, of a warpgroup that has heard of the end, all its warps: let the other one know, for the producer
    tells it at one stage only. Each has a word that only the other writes, so none is read while it is written."""
    first = cute.arch.warp_idx() % 4 == 0  # not below: all lanes take part in it
    if cute.arch.lane_idx() == 0:
        if first:
            prims.smem_st(prims.smem_addr(ring.turns + gemm.turns) + 4 * (1 - group), Int32(1))
        cute.arch.mbarrier_arrive(ring.turns + (1 - group))
