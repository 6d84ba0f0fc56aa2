"""Exchange: order the live routes by (owner, local expert) straight into the owners' arenas, with counts; publish.

A launch of its own after stage: it needs the counts of every CTA of stage, and a grid-wide barrier inside one
launch would need all CTAs resident.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Int32, Int64

from .. import wire
from ..config import MoEConfig
from . import control as ctl
from . import prims, trace
from .faults import NO_FAULTS, Faults, random_delay
from .routes import pack_word, scan_exclusive
from .trace import Phase, Role

THREADS = 256
PER_THREAD = 8
CHUNK = THREADS * PER_THREAD


@dataclass(frozen=True)
class ExchangeSpec:
    """What the exchange kernel compiles in. trace: see trace.py."""

    top_k: int
    experts_local: int
    world_size: int
    faults: Faults = NO_FAULTS
    trace: int = 0

    @classmethod
    def from_config(cls, cfg: MoEConfig, world_size: int, faults: Faults = NO_FAULTS) -> ExchangeSpec:
        """The spec of a config."""
        return cls(cfg.top_k, cfg.experts_local(world_size), world_size, faults)

    @property
    def num_experts(self) -> int:
        """Experts of all ranks."""
        return self.experts_local * self.world_size


def exchange_grid(tokens: int, top_k: int, num_sms: int) -> int:
    """CTAs of a launch: one a chunk of routes; at least one, which sends the counts also at T = 0."""
    return min(max(-(-tokens * top_k // CHUNK), 1), num_sms)


class Places(NamedTuple):
    """Shared memory of place_chunk, by address: starts int32 [E + 1], hist int32 [E], targets int64 [E]."""

    starts: Int32
    hist: Int32
    targets: Int32


@cute.jit
def make_places(spec: cutlass.Constexpr) -> Places:
    """Allocate them."""
    smem = cutlass.memory.SmemAllocator()
    targets = prims.smem_addr(smem.allocate_array(Int64, spec.num_experts, byte_alignment=8))
    starts = prims.smem_addr(smem.allocate_array(Int32, spec.num_experts + 1))
    hist = prims.smem_addr(smem.allocate_array(Int32, spec.num_experts))
    return Places(starts, hist, targets)


@cute.jit
def send_counts(
    spec: cutlass.Constexpr, places: Places, counted: list, away: list, layer: Int32, counts_out: Int64, start: Int64
):
    """One CTA: store counted[i], of expert tid + i * THREADS, at its owner (away[i] bytes away), the headers, and
    send_start (start), which needs the sums in places.starts."""
    tid, _, _ = cute.arch.thread_idx()
    for i in cutlass.range_constexpr(len(counted)):
        expert = tid + i * THREADS
        if expert < spec.num_experts:
            local = expert % spec.experts_local
            prims.st_i32(counts_out + away[i] + (wire.HEADER + local) * 4, counted[i])
            if local == 0:
                prims.st_i32(counts_out + away[i] + wire.HEADER_LAYER * 4, layer)
    if tid <= spec.world_size:
        prims.st_i32(start + tid * 4, prims.smem_ld(places.starts + tid * (spec.experts_local * 4)))


@cute.jit
def send_chunk(
    spec: cutlass.Constexpr,
    places: Places,
    first: Int32,
    routes: Int32,
    ids: Int64,
    weights: Int64,
    counts: Int64,
    cursors: Int64,
    deltas: Int64,
    layer: Int32,
    counts_out: Int64,
    list_out: Int64,
    send_start: Int64,
):
    """One CTA: store routes first .. first + CHUNK - 1 at their owners; with first == 0 also counts and headers.

    counts, cursors int32 [E]: this forward's set. counts_out, list_out: where this rank's counts and list of the
    epoch's slot lie in its own arena, and deltas[owner] bytes further in an owner's. Does not publish. Order
    within an expert is that of integer atomics and differs from run to run; no result depends on it.
    """
    experts = spec.num_experts
    tid, _, _ = cute.arch.thread_idx()
    counted, away, mine, bits = [], [], [], []
    for i in cutlass.range_constexpr(-(-experts // THREADS)):  # all loads first, so that they overlap
        expert = tid + i * THREADS
        count, delta = Int32(0), Int64(0)
        if expert < experts:
            count = prims.ld_i32(counts + expert * 4)
            delta = ctl.delta_of(deltas, expert // spec.experts_local)
        counted.append(count)
        away.append(delta)
    for i in cutlass.range_constexpr(PER_THREAD):
        route = first + i * THREADS + tid
        expert, weight = Int32(-1), Int32(0)
        if route < routes:
            expert = prims.ld_i32(ids + Int64(route) * 4)
            weight = prims.ld_i32(weights + Int64(route) * 4)
        mine.append(expert)
        bits.append(weight)
    for i in cutlass.range_constexpr(-(-experts // THREADS)):
        expert = tid + i * THREADS
        if expert < experts:
            prims.smem_st(places.starts + expert * 4, counted[i])
            prims.smem_st(places.hist + expert * 4, Int32(0))
    cute.arch.sync_threads()
    ranks = []
    for i in cutlass.range_constexpr(PER_THREAD):
        place = Int32(0)
        if mine[i] >= 0:
            place = prims.smem_add(places.hist + mine[i] * 4, Int32(1))
        ranks.append(place)
    if tid < 32:
        scan_exclusive(places.starts, experts)
    cute.arch.sync_threads()
    if first == 0:
        send_counts(spec, places, counted, away, layer, counts_out, send_start)
    for i in cutlass.range_constexpr(-(-experts // THREADS)):
        expert = tid + i * THREADS
        if expert < experts:
            here = prims.smem_ld(places.hist + expert * 4)
            if here > 0:
                owner_first = expert // spec.experts_local * spec.experts_local
                place = prims.smem_ld(places.starts + expert * 4) - prims.smem_ld(places.starts + owner_first * 4)
                place += prims.atom_add_i32(cursors + expert * 4, here)
                prims.smem_st_i64(places.targets + expert * 8, list_out + Int64(place) * 8 + away[i])
    cute.arch.sync_threads()
    for i in cutlass.range_constexpr(PER_THREAD):
        if mine[i] >= 0:
            at = prims.smem_ld_i64(places.targets + mine[i] * 8) + Int64(ranks[i]) * 8
            prims.st_i64(at, pack_word(first + i * THREADS + tid, bits[i]))
    cute.arch.sync_threads()


class Exchange:
    """ARGS: control, deltas; rank, layer, tokens; ids, weights (clean), send_counts, send_cursors, send_start;
    counts, lists (arena); list_capacity (words of one list: max_tokens * K); grid."""

    ARGS = (
        *(Int64, Int64, Int32, Int32, Int32),
        *(Int64, Int64, Int64, Int64, Int64),
        *(Int64, Int64, Int32, Int32),
    )

    def __init__(self, spec: ExchangeSpec) -> None:
        self.spec = spec

    @cute.kernel
    def exchange_kernel(
        self,
        control: Int64,
        deltas: Int64,
        rank: Int32,
        layer: Int32,
        tokens: Int32,
        ids: Int64,
        weights: Int64,
        send_counts: Int64,
        send_cursors: Int64,
        send_start: Int64,
        counts: Int64,
        lists: Int64,
        list_capacity: Int32,
        trace_at: Int64 | None,
    ):
        spec = self.spec
        places = make_places(spec)
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        epoch = ctl.running_epoch(control)
        slot = Int32(epoch & 1)
        random_delay(spec.faults)
        pen = trace.tracer(spec.trace, trace_at, Int32(0), tid == 0)
        began = trace.begin(pen)
        if ctl.cta_aborted(control) == 0:
            this_set = Int64(slot) * (spec.num_experts * 4)
            slot_source = Int64(slot * spec.world_size + rank)
            routes = tokens * spec.top_k
            for first in range(block * CHUNK, cutlass.max(routes, 1), grid * CHUNK):
                send_chunk(
                    *(spec, places, first, routes, ids, weights, send_counts + this_set, send_cursors + this_set),
                    *(deltas, layer, counts + slot_source * (wire.counts_pitch(spec.experts_local) * 4)),
                    *(lists + slot_source * list_capacity * 8, send_start),
                )
        since = trace.end(pen, began, Role.CTA, Phase.SEND, block)
        cute.arch.sync_threads()
        if tid == 0:
            flag = control + 8 * (Int64(wire.list_flag(0, 0)) + slot * wire.MAX_RANKS + rank)
            ctl.publish(control, deltas, spec.world_size, control + 8 * wire.DONE_EXCHANGE, grid, flag, epoch)
        trace.end(pen, since, Role.CTA, Phase.PUBLISH, block)

    @cute.jit
    def __call__(
        self,
        control: Int64,
        deltas: Int64,
        rank: Int32,
        layer: Int32,
        tokens: Int32,
        ids: Int64,
        weights: Int64,
        send_counts: Int64,
        send_cursors: Int64,
        send_start: Int64,
        counts: Int64,
        lists: Int64,
        list_capacity: Int32,
        grid: Int32,
        stream: cuda.CUstream,
        trace_at: Int64 | None = None,
    ):
        self.exchange_kernel(
            *(control, deltas, rank, layer, tokens, ids, weights, send_counts, send_cursors, send_start),
            *(counts, lists, list_capacity, trace_at),
        ).launch(grid=(grid, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1)
