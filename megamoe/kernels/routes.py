"""Device functions on route counts: prefix sums and searches in shared memory, and route words.

Arrays are int32 in shared memory, named by their 32-bit address.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from .. import wire
from ..sched import tiles
from . import prims


@cute.jit
def scan_exclusive(values: Int32, count: cutlass.Constexpr):
    """One warp: turn values[0 .. count-1] into their exclusive prefix sums, in place; values[count] = total.

    Each lane sums a run of neighbours, so that one warp scan of 32 sums is enough.
    """
    lane = cute.arch.lane_idx()
    run = -(-count // 32)
    mine = []
    total = Int32(0)
    for i in cutlass.range_constexpr(run):
        value = Int32(0)
        if lane * run + i < count:
            value = prims.smem_ld(values + (lane * run + i) * 4)
        mine.append(value)
        total += value
    sums = total
    for step in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(sums, 1 << step)
        if lane >= (1 << step):
            sums += below
    before = sums - total
    for i in cutlass.range_constexpr(run):
        if lane * run + i < count:
            prims.smem_st(values + (lane * run + i) * 4, before)
        before += mine[i]
    if lane == 31:
        prims.smem_st(values + count * 4, sums)


@cute.jit
def find_segment(starts: Int32, segments: cutlass.Constexpr, row: Int32) -> Int32:
    """The last j in 0 .. segments-1 with starts[j] <= row: row's segment, since later empty ones are skipped."""
    low, high = Int32(0), Int32(segments)
    for _ in cutlass.range_constexpr(wire.search_steps(segments + 1)):
        low, high = tiles.search_step(low, high, prims.smem_ld(starts + (low + high) // 2 * 4), row)
    return low


@cute.jit
def pack_word(low: Int32, high: Int32) -> Int64:
    """An int64 of two halves (route words and pool meta, wire.py)."""
    return (Int64(high) << 32) | (Int64(low) & 0xFFFFFFFF)


@cute.jit
def low_word(word: Int64) -> Int32:
    """Low half."""
    return Int32(word & 0xFFFFFFFF)


@cute.jit
def high_word(word: Int64) -> Int32:
    """High half."""
    return Int32((word >> 32) & 0xFFFFFFFF)
