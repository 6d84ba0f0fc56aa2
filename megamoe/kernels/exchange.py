"""Exchange: copy each owner's run of the sorted routes, and its counts, into that owner's arena; publish."""

from __future__ import annotations

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from .. import wire
from ..config import MoEConfig
from . import control as ctl
from . import prims, trace
from .faults import NO_FAULTS, Faults, random_delay
from .trace import Phase, Role

THREADS = 256


@dataclass(frozen=True)
class ExchangeSpec:
    """What the exchange kernel compiles in. trace: see trace.py."""

    experts_local: int
    world_size: int
    faults: Faults = NO_FAULTS
    trace: int = 0

    @classmethod
    def from_config(cls, cfg: MoEConfig, world_size: int, faults: Faults = NO_FAULTS) -> ExchangeSpec:
        """The spec of a config."""
        return cls(cfg.experts_local(world_size), world_size, faults)


def exchange_grid(tokens: int, top_k: int, num_sms: int) -> int:
    """CTAs of a launch: four routes a thread; at least one."""
    return min(max(-(-tokens * top_k // (4 * THREADS)), 1), num_sms)


@cute.jit
def send_lists(
    spec: cutlass.Constexpr,
    deltas: Int64,
    slot_source: Int64,
    layer: Int32,
    counts_set: Int64,
    send_start: Int64,
    ordered: Int64,
    counts: Int64,
    lists: Int64,
    list_capacity: Int32,
    worker: Int32,
    workers: Int32,
):
    """Store this rank's lists at their owners with `workers` threads, of which this is `worker`.

    slot_source: slot * W + rank, which list of an owner's arena is ours. Does not publish.
    """
    pitch = wire.counts_pitch(spec.experts_local)
    experts = spec.experts_local * spec.world_size
    starts = [prims.ld_i32(send_start + 4 * o) for o in range(spec.world_size + 1)]
    for route in range(worker, starts[-1], workers):
        owner = Int32(0)
        first = Int32(0)
        for o in cutlass.range_constexpr(1, spec.world_size):
            if route >= starts[o]:
                owner = Int32(o)
                first = starts[o]
        at = lists + (slot_source * list_capacity + (route - first)) * 8
        prims.st_i64(at + ctl.delta_of(deltas, owner), prims.ld_i64(ordered + Int64(route) * 8))
    for expert in range(worker, experts, workers):
        owner = expert // spec.experts_local
        at = counts + (slot_source * pitch + wire.HEADER + (expert - owner * spec.experts_local)) * 4
        prims.st_i32(at + ctl.delta_of(deltas, owner), prims.ld_i32(counts_set + Int64(expert) * 4))
    if worker < spec.world_size:
        header = counts + slot_source * pitch * 4 + ctl.delta_of(deltas, worker)
        prims.st_i32(header + 4 * wire.HEADER_LAYER, layer)


class Exchange:
    """ARGS: control, deltas; rank, layer; send_counts, send_start, sorted; counts, lists (arena);
    list_capacity (words of one list: max_tokens * K); grid."""

    ARGS = (Int64, Int64, Int32, Int32, Int64, Int64, Int64, Int64, Int64, Int32, Int32)

    def __init__(self, spec: ExchangeSpec) -> None:
        self.spec = spec

    @cute.kernel
    def exchange_kernel(
        self,
        control: Int64,
        deltas: Int64,
        rank: Int32,
        layer: Int32,
        send_counts: Int64,
        send_start: Int64,
        ordered: Int64,
        counts: Int64,
        lists: Int64,
        list_capacity: Int32,
        trace_at: Int64 | None,
    ):
        spec = self.spec
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        epoch = ctl.running_epoch(control)
        slot = Int32(epoch & 1)
        random_delay(spec.faults)
        pen = trace.tracer(spec.trace, trace_at, Int32(0), tid == 0)
        began = trace.begin(pen)
        if ctl.cta_aborted(control) == 0:
            send_lists(
                spec,
                deltas,
                Int64(slot * spec.world_size + rank),
                layer,
                send_counts + Int64(slot) * (spec.experts_local * spec.world_size * 4),
                send_start,
                ordered,
                counts,
                lists,
                list_capacity,
                block * THREADS + tid,
                grid * THREADS,
            )
        since = trace.end(pen, began, Role.CTA, Phase.SEND, block)
        cute.arch.sync_threads()
        if tid == 0:
            prims.fence_sys()
            if ctl.arrive_last(control + 8 * wire.DONE_EXCHANGE, grid):
                prims.fence_sys()
                if not ctl.aborted(control):
                    flag = control + 8 * (Int64(wire.list_flag(0, 0)) + slot * wire.MAX_RANKS + rank)
                    for owner in cutlass.range_constexpr(spec.world_size):
                        prims.st_release_sys(flag + ctl.delta_of(deltas, Int32(owner)), epoch)
        trace.end(pen, since, Role.CTA, Phase.PUBLISH, block)

    @cute.jit
    def __call__(
        self,
        control: Int64,
        deltas: Int64,
        rank: Int32,
        layer: Int32,
        send_counts: Int64,
        send_start: Int64,
        ordered: Int64,
        counts: Int64,
        lists: Int64,
        list_capacity: Int32,
        grid: Int32,
        stream: cuda.CUstream,
        trace_at: Int64 | None = None,
    ):
        self.exchange_kernel(
            control, deltas, rank, layer, send_counts, send_start, ordered, counts, lists, list_capacity, trace_at
        ).launch(grid=(grid, 1, 1), block=(THREADS, 1, 1), stream=stream)
