"""Pull: wait for every source's list, lay the pool out by expert, fetch its rows from their homes."""

from __future__ import annotations

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Int32, Int64

from .. import wire
from ..config import Knobs, MoEConfig
from ..errors import Cause, Phase
from ..sched.order import source_at
from . import control as ctl
from . import prims, trace
from .copy_rows import WARPS, Ring, copy_batch, make_ring, ring_depth
from .faults import NO_FAULTS, Faults, random_delay
from .routes import find_segment, high_word, low_word, pack_word, scan_exclusive
from .trace import Role

THREADS = 32 * WARPS


@dataclass(frozen=True)
class PullSpec:
    """What the pull kernel compiles in. trace: see trace.py."""

    experts_local: int
    world_size: int
    top_k: int
    row: wire.RowFormat
    depth: int
    faults: Faults = NO_FAULTS
    trace: int = 0

    @classmethod
    def from_config(cls, cfg: MoEConfig, world_size: int, knobs: Knobs, faults: Faults = NO_FAULTS) -> PullSpec:
        """The spec of a config."""
        row = wire.input_format(cfg)
        depth = ring_depth(row.row_bytes, knobs.copy_depth)
        return cls(cfg.experts_local(world_size), world_size, cfg.top_k, row, depth, faults)


@cute.jit
def look_at_lists(control: Int64) -> Int64:
    """What can be read before the epoch is known, in one load: lane slot * MAX_RANKS + source acquires the flag of
    that list, lane 2 * MAX_RANKS the abort word."""
    tid, _, _ = cute.arch.thread_idx()
    seen = Int64(0)
    if tid <= 2 * wire.MAX_RANKS:
        word = wire.LIST_FLAG + tid
        if tid == 2 * wire.MAX_RANKS:
            word = Int32(wire.ABORT)
        seen = prims.ld_acquire_sys(control + 8 * Int64(word))
    return seen


@cute.jit
def wait_lists(spec: cutlass.Constexpr, control: Int64, deltas: Int64, rank: Int32, epoch: Int64, seen: Int64) -> Int32:
    """The CTA: wait for all W lists of this epoch; 1 in every thread when they are there and nobody aborted.

    seen: what look_at_lists found.
    """
    tid, _, _ = cute.arch.thread_idx()
    source = tid % wire.MAX_RANKS
    failed = Int32(0)
    if tid == 2 * wire.MAX_RANKS and seen != 0:
        failed = Int32(1)
    if cutlass.const_expr(not spec.faults.skip_list_wait):
        if tid // wire.MAX_RANKS == Int32(epoch & 1) and source < spec.world_size:
            flag = control + 8 * (wire.LIST_FLAG + Int64(tid))
            failed = ctl.await_flag(control, deltas, spec.world_size, rank, Phase.PULL, source, flag, seen, epoch)
    return 1 - prims.cta_any(failed)


@cute.jit
def lay_out_pool(
    spec: cutlass.Constexpr,
    control: Int64,
    deltas: Int64,
    rank: Int32,
    layer: Int32,
    epoch: Int64,
    counts: Int64,
    segments: Int32,
    offsets: Int32,
) -> Int32:
    """The CTA: check the lists' layer, sum up their counts in shared memory; returns the number of rows.

    segments [E + 1]: first pool row of (expert, place of source_at), expert-major. offsets [W * (E_local + 1)]: where
    each expert begins in each source's list. 0 rows after a layer mismatch, which aborts.
    """
    tid, _, _ = cute.arch.thread_idx()
    ranks = spec.world_size
    width = spec.experts_local + 1
    lists = counts + Int64(epoch & 1) * (ranks * wire.counts_pitch(spec.experts_local) * 4)
    failed = Int32(0)
    header = layer
    if tid < ranks:
        at = lists + Int64(tid) * (wire.counts_pitch(spec.experts_local) * 4)
        header = prims.ld_i32(at + 4 * wire.HEADER_LAYER)
    counted = []
    for i in cutlass.range_constexpr(-(-spec.experts_local * ranks // THREADS)):  # all loads, then all stores
        entry, count = tid + i * THREADS, Int32(0)
        if entry < spec.experts_local * ranks:
            expert = entry // ranks
            source = source_at(entry - expert * ranks, rank, ranks)
            at = lists + Int64(source * wire.counts_pitch(spec.experts_local) + wire.HEADER + expert) * 4
            count = prims.ld_i32(at)
        counted.append(count)
    for i in cutlass.range_constexpr(len(counted)):
        entry = tid + i * THREADS
        if entry < spec.experts_local * ranks:
            expert = entry // ranks
            source = source_at(entry - expert * ranks, rank, ranks)
            prims.smem_st(segments + entry * 4, counted[i])
            prims.smem_st(offsets + (source * width + expert) * 4, counted[i])
    if cutlass.const_expr(not spec.faults.skip_list_wait):  # else the header may be anything
        if header != layer:
            failed = Int32(1)
            ctl.abort_all(
                *(control, deltas, spec.world_size, rank, Cause.LAYER, Phase.PULL),
                *(tid, Int32(-1), Int64(layer), Int64(header), epoch),
            )
    total = Int32(0)
    if prims.cta_any(failed) == 0:
        warp = tid // 32
        if warp == 0:
            scan_exclusive(segments, spec.experts_local * ranks)
        for source in cutlass.range_constexpr(ranks):
            if warp == (source + 1) % WARPS:
                scan_exclusive(offsets + source * width * 4, spec.experts_local)
        cute.arch.sync_threads()
        total = prims.smem_ld(segments + spec.experts_local * ranks * 4)
    return total


class Pull:
    """ARGS: control, deltas; rank, layer; counts, lists (arena); list_capacity; x_rows (arena); pool_x,
    pool_meta, pool_weight, expert_start; pool_rows; grid (at most one CTA an SM: this kernel waits)."""

    ARGS = (Int64, Int64, Int32, Int32, Int64, Int64, Int32, Int64, Int64, Int64, Int64, Int64, Int32, Int32)

    def __init__(self, spec: PullSpec) -> None:
        self.spec = spec

    @cute.jit
    def pull_rows(
        self,
        ring: Ring,
        deltas: Int64,
        rank: Int32,
        slot: Int64,
        segments: Int32,
        offsets: Int32,
        total: Int32,
        lists: Int64,
        list_capacity: Int32,
        x_rows: Int64,
        pool_x: Int64,
        pool_meta: Int64,
        pool_weight: Int64,
        pen: trace.Tracer | None,
    ):
        """One warp's share of the pool, in batches of 32 rows: a lane finds its row's route, then the ring copies."""
        spec = self.spec
        ranks = spec.world_size
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        lane = cute.arch.lane_idx()
        stride = grid * WARPS
        base = block * WARPS + tid // 32
        moved = Int32(0)
        while base < total:
            since = trace.begin(pen)
            row = base + lane * stride
            source_address = Int64(0)
            if row < total:
                segment = find_segment(segments, spec.experts_local * ranks, row)
                expert = segment // ranks
                source = source_at(segment - expert * ranks, rank, ranks)
                index = prims.smem_ld(offsets + (source * (spec.experts_local + 1) + expert) * 4)
                index += row - prims.smem_ld(segments + segment * 4)
                word = prims.ld_i64(lists + ((slot * ranks + source) * list_capacity + index) * 8)
                route = low_word(word)
                source_address = x_rows + Int64(route // spec.top_k) * spec.row.pitch + ctl.delta_of(deltas, source)
                prims.st_i64(pool_meta + Int64(row) * 8, pack_word(route, source))
                prims.st_i32(pool_weight + Int64(row) * 4, high_word(word))
            batch = cutlass.min((total - base + stride - 1) // stride, 32)
            target = pool_x + Int64(row) * spec.row.pitch
            copy_batch(ring, moved, source_address, target, batch, spec.row.row_bytes, spec.depth, pen)
            trace.end(pen, since, Role.COPIER, trace.Phase.COPY, base)
            moved += batch
            base += stride * 32
        since = trace.begin(pen)
        if lane == 0:
            prims.bulk_wait(0)
        trace.end(pen, since, Role.COPIER, trace.Phase.DRAIN, Int32(trace.NO_TILE))

    @cute.kernel
    def pull_kernel(
        self,
        control: Int64,
        deltas: Int64,
        rank: Int32,
        layer: Int32,
        counts: Int64,
        lists: Int64,
        list_capacity: Int32,
        x_rows: Int64,
        pool_x: Int64,
        pool_meta: Int64,
        pool_weight: Int64,
        expert_start: Int64,
        pool_rows: Int32,
        trace_at: Int64 | None,
    ):
        spec = self.spec
        ring = make_ring(spec.row.row_bytes, spec.depth)
        smem = cutlass.memory.SmemAllocator()
        experts = spec.experts_local * spec.world_size
        segments = prims.smem_addr(smem.allocate_array(Int32, experts + 1))
        offsets = prims.smem_addr(smem.allocate_array(Int32, experts + spec.world_size))
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        ended = ctl.ended_epoch(control)
        random_delay(spec.faults)
        pen = trace.tracer(spec.trace, trace_at, tid // 32, tid % 32 == 0)
        began = trace.begin(pen)
        seen = look_at_lists(control)
        epoch = ended + 1  # not earlier: the sum would wait for its load before the others go out
        slot = Int64(epoch & 1)
        total = Int32(0)
        if wait_lists(spec, control, deltas, rank, epoch, seen) != 0:
            since = trace.end(pen, began, Role.COPIER, trace.Phase.WAIT_LISTS, Int32(trace.NO_TILE))
            total = lay_out_pool(spec, control, deltas, rank, layer, epoch, counts, segments, offsets)
            trace.end(pen, since, Role.COPIER, trace.Phase.LAY_OUT, Int32(trace.NO_TILE))
            if total > pool_rows:
                if tid == 0:
                    ctl.abort_all(
                        *(control, deltas, spec.world_size, rank, Cause.POOL_OVERFLOW, Phase.PULL),
                        *(rank, Int32(-1), Int64(pool_rows), Int64(total), epoch),
                    )
                total = Int32(0)
        prims.fence_proxy_async()  # ahead of the stores, so that it has none to wait for
        if block == 0:
            for expert in range(tid, spec.experts_local + 1, THREADS):
                first = Int32(0)
                if total > 0:
                    first = prims.smem_ld(segments + expert * (spec.world_size * 4))
                prims.st_i32(expert_start + expert * 4, first)
        self.pull_rows(
            *(ring, deltas, rank, slot, segments, offsets, total, lists, list_capacity),
            *(x_rows, pool_x, pool_meta, pool_weight, pen),
        )

    @cute.jit
    def __call__(
        self,
        control: Int64,
        deltas: Int64,
        rank: Int32,
        layer: Int32,
        counts: Int64,
        lists: Int64,
        list_capacity: Int32,
        x_rows: Int64,
        pool_x: Int64,
        pool_meta: Int64,
        pool_weight: Int64,
        expert_start: Int64,
        pool_rows: Int32,
        grid: Int32,
        stream: cuda.CUstream,
        trace_at: Int64 | None = None,
    ):
        self.pull_kernel(
            *(control, deltas, rank, layer, counts, lists, list_capacity, x_rows),
            *(pool_x, pool_meta, pool_weight, expert_start, pool_rows, trace_at),
        ).launch(grid=(grid, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1)
