"""Stage, second launch: order the checked routes by (owner, local expert), that is by expert."""

from __future__ import annotations

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Int32, Int64

from ..config import MoEConfig
from . import control as ctl
from . import prims, trace
from .routes import pack_word, scan_exclusive
from .trace import Phase, Role

THREADS = 256
PER_THREAD = 8
CHUNK = THREADS * PER_THREAD


@dataclass(frozen=True)
class SortSpec:
    """What the sort kernel compiles in. trace: see trace.py."""

    top_k: int
    num_experts: int
    world_size: int
    trace: int = 0

    @classmethod
    def from_config(cls, cfg: MoEConfig, world_size: int) -> SortSpec:
        """The spec of a config."""
        return cls(cfg.top_k, cfg.num_experts, world_size)


def sort_grid(tokens: int, top_k: int, num_sms: int) -> int:
    """CTAs of a launch; at least one, which also writes send_start at T = 0."""
    return min(max(-(-tokens * top_k // CHUNK), 1), num_sms)


class Sort:
    """ARGS: control; tokens; ids, weights (clean), send_counts, send_cursors, send_start, sorted; grid.

    Order within an expert is that of integer atomics and differs from run to run; no result depends on it.
    """

    ARGS = (Int64, Int32, Int64, Int64, Int64, Int64, Int64, Int64, Int32)

    def __init__(self, spec: SortSpec) -> None:
        self.spec = spec

    @cute.jit
    def place_chunk(
        self,
        first: Int32,
        routes: Int32,
        starts: Int32,
        hist: Int32,
        ids: Int64,
        weights: Int64,
        cursors: Int64,
        out: Int64,
    ):
        """One CTA: count CHUNK routes, reserve room in every expert's run at once, then write them."""
        experts = self.spec.num_experts
        tid, _, _ = cute.arch.thread_idx()
        for e in range(tid, experts, THREADS):
            prims.smem_st(hist + e * 4, Int32(0))
        cute.arch.sync_threads()
        mine = []
        ranks = []
        for i in cutlass.range_constexpr(PER_THREAD):
            route = first + i * THREADS + tid
            expert = Int32(-1)
            if route < routes:
                expert = prims.ld_i32(ids + Int64(route) * 4)
            place = Int32(0)
            if expert >= 0:
                place = prims.smem_add(hist + expert * 4, Int32(1))
            mine.append(expert)
            ranks.append(place)
        cute.arch.sync_threads()
        for e in range(tid, experts, THREADS):
            count = prims.smem_ld(hist + e * 4)
            if count > 0:
                prims.smem_st(hist + e * 4, prims.smem_ld(starts + e * 4) + prims.atom_add_i32(cursors + e * 4, count))
        cute.arch.sync_threads()
        for i in cutlass.range_constexpr(PER_THREAD):
            expert = mine[i]
            if expert >= 0:
                route = first + i * THREADS + tid
                place = prims.smem_ld(hist + expert * 4) + ranks[i]
                prims.st_i64(out + Int64(place) * 8, pack_word(route, prims.ld_i32(weights + Int64(route) * 4)))
        cute.arch.sync_threads()

    @cute.kernel
    def sort_kernel(
        self,
        control: Int64,
        tokens: Int32,
        ids: Int64,
        weights: Int64,
        send_counts: Int64,
        send_cursors: Int64,
        send_start: Int64,
        out: Int64,
        trace_at: Int64 | None,
    ):
        spec = self.spec
        smem = cutlass.memory.SmemAllocator()
        starts = prims.smem_addr(smem.allocate_array(Int32, spec.num_experts + 1))
        hist = prims.smem_addr(smem.allocate_array(Int32, spec.num_experts))
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        pen = trace.tracer(spec.trace, trace_at, Int32(0), tid == 0)
        began = trace.begin(pen)
        this_set = Int64(ctl.running_epoch(control) & 1) * (spec.num_experts * 4)
        if ctl.cta_aborted(control) == 0:
            for e in range(tid, spec.num_experts, THREADS):
                prims.smem_st(starts + e * 4, prims.ld_i32(send_counts + this_set + e * 4))
            cute.arch.sync_threads()
            if tid < 32:
                scan_exclusive(starts, spec.num_experts)
            cute.arch.sync_threads()
            if block == 0:
                if tid <= spec.world_size:
                    owner_first = tid * (spec.num_experts // spec.world_size)
                    prims.st_i32(send_start + tid * 4, prims.smem_ld(starts + owner_first * 4))
            routes = tokens * spec.top_k
            for first in range(block * CHUNK, routes, grid * CHUNK):
                self.place_chunk(first, routes, starts, hist, ids, weights, send_cursors + this_set, out)
        trace.end(pen, began, Role.CTA, Phase.PLACE, block)

    @cute.jit
    def __call__(
        self,
        control: Int64,
        tokens: Int32,
        ids: Int64,
        weights: Int64,
        send_counts: Int64,
        send_cursors: Int64,
        send_start: Int64,
        out: Int64,
        grid: Int32,
        stream: cuda.CUstream,
        trace_at: Int64 | None = None,
    ):
        self.sort_kernel(control, tokens, ids, weights, send_counts, send_cursors, send_start, out, trace_at).launch(
            grid=(grid, 1, 1), block=(THREADS, 1, 1), stream=stream
        )
