"""Block scales of swapped operands: one warp multiplies them, and math threads read products.

With rows across a WGMMA a math thread has a quarter of all rows, thus as many scales a K block. A second warp of the
producer warpgroup makes, for every stage, factors fp32 [groups, w_scales, table_rows] (a row's scale times a weight
scale) in the order in which a thread reads them, four in 16 bytes. They live as long as the stage: math warps release
it after they read them, and the warp writes them when the stage is full again.
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
"""Bytes of factors of 16 rows, two chunks of WGMMA's columns."""


@cute.jit
def make_factors(gemm: cutlass.Constexpr, at: Int32, place: ScalePlace, kb: Int32):
    """One warp: the table of K block kb at shared address `at`. place: of the warp's first row, 0.

    Row 8i + 2q + e is element 16 * (i // 2) + 4q + 2 * (i % 2) + e of its factors.
    """
    lane = cute.arch.lane_idx()
    slot = (place.window + kb // WINDOW) & (gemm.window_slots - 1)
    first = place.rows + slot * gemm.window_bytes + kb % WINDOW * (4 * gemm.groups)
    weights = [prims.smem_ld_f32(place.weights[w] + 4 * kb) for w in range(gemm.w_scales)]
    for part in cutlass.range((gemm.tile_rows + 63) // 64, unroll=1):
        pair = lane + 32 * part
        if pair < gemm.tile_rows // 2:
            to = at + (pair // 8 * 64 + pair % 4 * 16 + pair // 4 % 2 * 8)
            for e in cutlass.range_constexpr(2):
                for g in cutlass.range_constexpr(gemm.groups):
                    scale = prims.smem_ld_f32(first + (2 * pair + e) * (4 * WINDOW * gemm.groups) + 4 * g)
                    for w in cutlass.range_constexpr(gemm.w_scales):
                        offset = 4 * (g * gemm.w_scales + w) * gemm.table_rows + 4 * e
                        prims.smem_st_f32(to + offset, scale * weights[w])


@cute.jit
def factor_role(gemm: cutlass.Constexpr, ring: Ring, schedule: Schedule):
    """The warp that makes factors: those of every K block of this CTA."""
    stage, phase, item = Int32(0), Int32(0), Int32(0)
    index, step, total = items_to_hear(gemm, schedule)
    while index < total:
        cute.arch.mbarrier_wait(ring.full + stage, phase)
        tile = hear_tile(ring, stage, index)
        if cutlass.const_expr(gemm.atomic):
            if tile.expert < 0:
                total = index
        if index < total:
            place = gemm_scales.place(gemm, ring.scales, tile, item, 0, Int32(0))
            for kb in cutlass.range(gemm.k_blocks, unroll=1):
                cute.arch.mbarrier_wait(ring.full + stage, phase)
                make_factors(gemm, ring.factors + stage * gemm.table_bytes, place, kb)
                cute.arch.mbarrier_arrive(ring.ready + stage)
                stage, phase = advance(gemm, stage, phase)
        item += 1
        index += step


@cute.jit
def read_pair(at: Int32, rows: cutlass.Constexpr) -> list[Float32]:
    """Factors of this thread's rows of two chunks of WGMMA's columns, or with rows = 8 of a single one."""
    if cutlass.const_expr(rows == 8):
        return [prims.smem_ld_f32(at), prims.smem_ld_f32(at + 4)]
    return [prims.bits_to_f32(word) for word in prims.smem_ld_v4(at)]


@cute.jit
def add(
    gemm: cutlass.Constexpr,
    acc: cute.Tensor,
    temp: cute.Tensor,
    at: Int32,
    group: cutlass.Constexpr,
    part: cutlass.Constexpr,
    first: cutlass.Constexpr,
):
    """acc of part `part` += temp times the factors of scale group `group` at `at`, the stage's table for this thread.

    first: = instead of +=. FC1's gate is in the fragment's upper row halves and up in the lower ones.
    """
    columns = 2 * cute.size(acc)
    tables = 2 if gemm.paired else 1
    base = at + 4 * (group * gemm.w_scales * gemm.table_rows + part // gemm.halves * columns)
    pairs = (columns + 15) // 16
    for pair in cutlass.range_constexpr(pairs):
        factors = [read_pair(base + 4 * w * gemm.table_rows + PAIR * pair, columns) for w in range(tables)]
        for i in cutlass.range_constexpr(min(columns // 8, 2)):
            for h in cutlass.range_constexpr(2):
                for e in cutlass.range_constexpr(2):
                    n = 4 * (2 * pair + i) + 2 * h + e
                    product = temp[n] * factors[h * (tables - 1)][2 * i + e]
                    acc[n] = product if first else acc[n] + product
