"""A warp's bulk-copy ring: rows from any address through shared memory to any address.

Pull and token-back are this loop with other addresses.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Int32, Int64

from . import prims, trace

SMEM_BUDGET = 192 * 1024
WARPS = 4
MAX_PIECE = 16 * 1024 + 1024


def slot_bytes(nbytes: int) -> int:
    """Shared memory of a row: a multiple of 128 B, so that source, buffer and target are aligned alike.

    With buffers 7392 B apart the pull ran at 288 GB/s where 7168 B gave 331; alignment is the likely cause.
    """
    return -(-nbytes // 128) * 128


def ring_depth(nbytes: int, depth: int | None) -> int:
    """Rows in flight a warp: what is asked, else as many of 2..8 as fit the budget with WARPS warps."""
    fits = SMEM_BUDGET // (WARPS * slot_bytes(nbytes))
    return max(2, min(8, fits)) if depth is None else max(2, min(depth, fits))


def pieces(nbytes: int) -> int:
    """Equal pieces, each a multiple of 16 B and at most MAX_PIECE, that a row is copied in."""
    count = -(-nbytes // MAX_PIECE)
    while nbytes % (16 * count):
        count += 1
    return count


class Ring(NamedTuple):
    """One warp's buffers and barriers, by shared address."""

    buffers: Int32
    barriers: Int32


@cute.jit
def make_ring(nbytes: cutlass.Constexpr, depth: cutlass.Constexpr) -> Ring:
    """Allocate rings for WARPS warps and return this warp's. All threads call it; it ends with a barrier."""
    smem = cutlass.memory.SmemAllocator()
    buffers = smem.allocate(WARPS * depth * slot_bytes(nbytes), 128)
    barriers = smem.allocate_array(Int64, WARPS * depth, byte_alignment=8)
    tid, _, _ = cute.arch.thread_idx()
    warp = tid // 32
    ring = Ring(
        prims.smem_addr(buffers) + warp * (depth * slot_bytes(nbytes)),
        prims.smem_addr(barriers) + warp * (depth * 8),
    )
    if tid % 32 == 0:
        for i in cutlass.range_constexpr(depth):
            prims.mbar_init(ring.barriers + 8 * i, Int32(1))
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    return ring


@cute.jit
def copy_batch(
    ring: Ring,
    moved: Int32,
    source: Int64,
    target: Int64,
    rows: Int32,
    nbytes: cutlass.Constexpr,
    depth: cutlass.Constexpr,
    pen: trace.Tracer | None,
):
    """One warp: copy `rows` (0 to 32) rows of nbytes; lane i holds row i's addresses.

    moved: rows this ring has copied before (its barrier phases); the caller adds `rows`. On return the
    buffers are free, but the writes may still be in flight: bulk_wait(0) in lane 0 ends them.
    """
    lane = cute.arch.lane_idx()
    pitch = slot_bytes(nbytes)
    for i in cutlass.range_constexpr(depth):
        first = cute.arch.shuffle_sync(source, i)
        if i < rows and lane == 0:
            slot = (moved + i) % depth
            prims.mbar_expect(ring.barriers + 8 * slot, Int32(nbytes))
            prims.bulk_load(ring.buffers + slot * pitch, first, Int32(nbytes), ring.barriers + 8 * slot)
    for i in range(rows):
        ahead = i - 1 + depth
        next_source = cute.arch.shuffle_sync(source, ahead & 31)
        this_target = cute.arch.shuffle_sync(target, i)
        if lane == 0:
            slot = (moved + i) % depth
            since = trace.begin(pen)
            prims.mbar_wait(ring.barriers + 8 * slot, ((moved + i) // depth) & 1)
            trace.waited(pen, since)
            prims.bulk_store(this_target, ring.buffers + slot * pitch, Int32(nbytes))
            prims.bulk_commit()
            if i > 0 and ahead < rows:
                free = (moved + ahead) % depth
                since = trace.begin(pen)
                prims.bulk_wait_read(1)
                trace.waited(pen, since)
                prims.mbar_expect(ring.barriers + 8 * free, Int32(nbytes))
                prims.bulk_load(ring.buffers + free * pitch, next_source, Int32(nbytes), ring.barriers + 8 * free)
    if lane == 0:
        prims.bulk_wait_read(0)
    cute.arch.sync_warp()
