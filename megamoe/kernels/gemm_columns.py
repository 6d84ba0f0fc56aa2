"""Block scales of swapped operands: one warp puts rows' scales in order, math threads multiply them by weights'.

With rows across a WGMMA a math thread has a quarter of all rows, thus as many scales a K block, and what it reads from
shared memory competes with the tensor cores' operands. A second warp of the producer warpgroup writes, for every stage,
row scales fp32 [groups, table_rows] in the order in which a thread reads them, four in 16 bytes. They live as long as
the stage: math warps release it after they read them, and the warp writes them when the stage is full again.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..sched.tiles import WINDOW
from . import gemm_scales, prims
from .gemm_ring import Ring, advance, hear_tile
from .gemm_scales import ScalePlace
from .gemm_tiles import Schedule, items_to_hear

PAIR = 64
"""Bytes of the scales of 16 rows, two chunks of WGMMA's columns."""


@cute.jit
def order_scales(gemm: cutlass.Constexpr, at: Int32, place: ScalePlace, kb: Int32):
    """One warp: the table of K block kb at shared address `at`. place: of the tile's first row.

    Row 8i + 2q + e is element 16 * (i // 2) + 4q + 2 * (i % 2) + e of its group.
    """
    lane = cute.arch.lane_idx()
    slot = (place.window + kb // WINDOW) & (gemm.window_slots - 1)
    first = place.rows + slot * gemm.window_bytes + kb % WINDOW * (4 * gemm.groups)
    for part in cutlass.range((gemm.tile_rows + 63) // 64, unroll=1):
        pair = lane + 32 * part
        if pair < gemm.tile_rows // 2:
            to = at + (pair // 8 * 64 + pair % 4 * 16 + pair // 4 % 2 * 8)
            for e in cutlass.range_constexpr(2):
                for g in cutlass.range_constexpr(gemm.groups):
                    scale = prims.smem_ld_f32(first + (2 * pair + e) * (4 * WINDOW * gemm.groups) + 4 * g)
                    prims.smem_st_f32(to + 4 * (g * gemm.table_rows + e), scale)


@cute.jit
def order_role(gemm: cutlass.Constexpr, ring: Ring, schedule: Schedule):
    """The warp that orders scales: those of every K block of this CTA."""
    stage, phase, item = Int32(0), Int32(0), Int32(0)
    index, step, total = items_to_hear(gemm, schedule)
    while index < total:
        cute.arch.mbarrier_wait(ring.full + stage, phase)
        tile = hear_tile(ring, stage)
        if cutlass.const_expr(gemm.atomic):
            if tile.expert < 0:
                total = index
        if index < total:
            place = gemm_scales.place(gemm, ring.scales, tile, item, 0, Int32(0))
            for kb in cutlass.range(gemm.k_blocks, unroll=1):
                cute.arch.mbarrier_wait(ring.full + stage, phase)
                order_scales(gemm, ring.ordered + stage * gemm.table_bytes, place, kb)
                cute.arch.mbarrier_arrive(ring.ready + stage)
                stage, phase = advance(gemm, stage, phase)
        item += 1
        index += step


@cute.jit
def read_pair(at: Int32, columns: cutlass.Constexpr) -> list[Float32]:
    """Scales of this thread's rows of two chunks of WGMMA's columns, or with 8 columns of a single one."""
    if cutlass.const_expr(columns == 8):
        return [prims.smem_ld_f32(at), prims.smem_ld_f32(at + 4)]
    return [prims.bits_to_f32(word) for word in prims.smem_ld_v4(at)]


@cute.jit
def read(
    gemm: cutlass.Constexpr,
    at: Int32,
    place: ScalePlace,
    kb: Int32,
    columns: cutlass.Constexpr,
    parts: cutlass.Constexpr,
    factors: cute.Tensor,
    weights: cute.Tensor,
):
    """Read K block kb's weight scales, and make its factors [w, group, row]: a row's scale times weight scale w.

    at: the stage's table for this thread.
    """
    count, across = cute.size(weights), parts // gemm.halves
    for w in cutlass.range_constexpr(count):
        weights[w] = prims.smem_ld_f32(place.weights[w] + 4 * kb)
    each = columns * across // 4
    for g in cutlass.range_constexpr(gemm.groups):
        for pair in cutlass.range_constexpr((columns * across + 15) // 16):
            scales = read_pair(at + 4 * g * gemm.table_rows + PAIR * pair, columns)
            for i in cutlass.range_constexpr(len(scales)):
                for w in cutlass.range_constexpr(count):
                    factors[(w * gemm.groups + g) * each + 4 * pair + i] = scales[i] * weights[w]


@cute.jit
def add(
    gemm: cutlass.Constexpr,
    acc: cute.Tensor,
    temp: cute.Tensor,
    factors: cute.Tensor,
    group: cutlass.Constexpr,
    part: cutlass.Constexpr,
    parts: cutlass.Constexpr,
    first: cutlass.Constexpr,
):
    """acc of part `part` of `parts` += temp times its factors of read() in scale group `group`; first: = instead of +=.

    FC1's gate is in the fragment's upper row halves and up in the lower ones.
    """
    columns = 2 * cute.size(acc)
    each = columns * (parts // gemm.halves) // 4
    lower = cute.size(factors) // each - gemm.groups  # FC2 has no factors of their own for lower row halves
    for i in cutlass.range_constexpr(columns // 8):
        for h in cutlass.range_constexpr(2):
            for e in cutlass.range_constexpr(2):
                n = 4 * i + 2 * h + e
                at = (h * lower + group) * each + part // gemm.halves * (columns // 4) + 2 * i + e
                product = temp[n] * factors[at]
                acc[n] = product if first else acc[n] + product
