"""Reduce: wait for the owners that routes were sent to, sum each token's slots in fp32, end the forward."""

from __future__ import annotations

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from .. import wire
from ..config import MoEConfig
from ..errors import Phase
from . import control as ctl
from . import prims, trace
from .faults import NO_FAULTS, Faults, random_delay
from .trace import Role

THREADS = 1024
COLUMNS = 256  # a warp's columns of one token: 8 a lane
GROUP = 8  # slots loaded before any is summed
NAN_PAIR = 0x7FC07FC0


@dataclass(frozen=True)
class ReduceSpec:
    """What the reduce kernel compiles in. trace: see trace.py."""

    hidden: int
    top_k: int
    world_size: int
    faults: Faults = NO_FAULTS
    trace: int = 0

    @classmethod
    def from_config(cls, cfg: MoEConfig, world_size: int, faults: Faults = NO_FAULTS) -> ReduceSpec:
        """The spec of a config."""
        return cls(cfg.hidden, cfg.top_k, world_size, faults)


def reduce_grid(hidden: int, tokens: int, num_sms: int) -> int:
    """CTAs of a launch: at most one an SM, because it waits; at least one, which ends the forward."""
    return min(max(-(-tokens * -(-hidden // COLUMNS) // (THREADS // 32)), 1), num_sms)


@cute.jit
def look_at_owners(spec: cutlass.Constexpr, control: Int64, send_start: Int64):
    """What can be read before the epoch is known: (seen, sent).

    seen: lane o has acquired the return flag of owner o, lane MAX_RANKS the abort word. sent: how many routes o got.
    """
    tid, _, _ = cute.arch.thread_idx()
    seen, sent = Int64(0), Int32(0)
    if tid <= wire.MAX_RANKS:
        first, end = Int32(0), Int32(0)
        if tid < spec.world_size:
            first, end = prims.ld_i32(send_start + tid * 4), prims.ld_i32(send_start + tid * 4 + 4)
        word = wire.RETURN_FLAG + tid
        if tid == wire.MAX_RANKS:
            word = Int32(wire.ABORT)
        seen = prims.ld_acquire_sys(control + 8 * Int64(word))
        sent = end - first
    return seen, sent


@cute.jit
def wait_owners(
    spec: cutlass.Constexpr, control: Int64, deltas: Int64, rank: Int32, epoch: Int64, seen: Int64, sent: Int32
) -> Int32:
    """The CTA: wait for the return flag of every owner that got a route from us; 1 in each thread on success.

    seen, sent: what look_at_owners found.
    """
    tid, _, _ = cute.arch.thread_idx()
    failed = Int32(0)
    if tid == wire.MAX_RANKS and seen != 0:
        failed = Int32(1)
    if cutlass.const_expr(not spec.faults.skip_return_wait):
        if sent > 0:
            flag = control + 8 * (wire.RETURN_FLAG + Int64(tid))
            failed = ctl.await_flag(control, deltas, spec.world_size, rank, Phase.REDUCE, tid, flag, seen, epoch)
    return 1 - prims.cta_any(failed)


@cute.jit
def sum_slots(spec: cutlass.Constexpr, first_slot: Int64, live: Int32, column: Int32):
    """A lane's 8 columns of one token: fp32 sum over its live slots, k = 0 first; returns four bf16 pairs."""
    sums = [Float32(0.0)] * 8
    for group in cutlass.range_constexpr(-(-spec.top_k // GROUP)):
        words = []
        for k in cutlass.range_constexpr(group * GROUP, min((group + 1) * GROUP, spec.top_k)):
            a, b, c, d = Int32(0), Int32(0), Int32(0), Int32(0)
            if (live >> k) & 1 != 0:
                a, b, c, d = prims.ld_stream_v4(first_slot + (Int64(k * spec.hidden) + column) * 2)
            words.append((a, b, c, d))
        for quad in words:
            for i in cutlass.range_constexpr(4):
                low, high = prims.bf16_pair_to_f32(quad[i])
                sums[2 * i] = sums[2 * i] + low
                sums[2 * i + 1] = sums[2 * i + 1] + high
    return [prims.f32_pair_to_bf16(sums[2 * i], sums[2 * i + 1]) for i in range(4)]


@cute.jit
def end_forward(control: Int64, host: Int64, epoch: Int64) -> Int32:
    """One thread of the last CTA: bump the epoch, or after an abort copy its record to the host; 1 if aborted."""
    word = prims.ld_relaxed_sys(control + 8 * wire.ABORT)
    failed = Int32(0)
    if word != 0:
        failed = Int32(1)
        prims.fence_sys()
        record = control + 8 * (wire.RECORDS + (word - 1) * wire.RECORD_FIELDS)
        for i in cutlass.range_constexpr(wire.RECORD_FIELDS):
            prims.st_relaxed_sys(host + 8 * (wire.HOST_RECORD + i), prims.ld_relaxed_sys(record + 8 * i))
        prims.st_release_sys(host + 8 * wire.HOST_STATE, Int64(1))
    else:
        prims.st_i64(control + 8 * wire.EPOCH, epoch)
    return failed


class Reduce:
    """ARGS: control, deltas; rank; tokens; ids (clean), send_start; slots (arena); y; host (pinned); grid."""

    ARGS = (Int64, Int64, Int32, Int32, Int64, Int64, Int64, Int64, Int64, Int32)

    def __init__(self, spec: ReduceSpec) -> None:
        self.spec = spec

    @cute.jit
    def reduce_tokens(self, tokens: Int32, ids: Int64, slots: Int64, y: Int64):
        """All warps of the grid, COLUMNS of a token at a time."""
        spec = self.spec
        chunks = -(-spec.hidden // COLUMNS)
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        lane = cute.arch.lane_idx()
        for item in range(block * (THREADS // 32) + tid // 32, tokens * chunks, grid * (THREADS // 32)):
            token = item // chunks
            column = (item - token * chunks) * COLUMNS + lane * 8
            expert = Int32(-1)
            if lane < spec.top_k:
                expert = prims.ld_i32(ids + (Int64(token) * spec.top_k + lane) * 4)
            live = cute.arch.vote_ballot_sync(expert >= 0)
            if column < spec.hidden:
                first_slot = slots + Int64(token) * (spec.top_k * spec.hidden * 2)
                a, b, c, d = sum_slots(spec, first_slot, live, column)
                prims.st_v4(y + (Int64(token) * spec.hidden + column) * 2, a, b, c, d)

    @cute.kernel
    def reduce_kernel(
        self,
        control: Int64,
        deltas: Int64,
        rank: Int32,
        tokens: Int32,
        ids: Int64,
        send_start: Int64,
        slots: Int64,
        y: Int64,
        host: Int64,
        trace_at: Int64 | None,
    ):
        spec = self.spec
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        ended = ctl.ended_epoch(control)
        random_delay(spec.faults)
        pen = trace.tracer(spec.trace, trace_at, Int32(0), tid == 0)
        began = trace.begin(pen)
        seen, sent = look_at_owners(spec, control, send_start)
        epoch = ended + 1  # not earlier: the sum would wait for its load before the others go out
        if wait_owners(spec, control, deltas, rank, epoch, seen, sent) != 0:
            since = trace.end(pen, began, Role.CTA, trace.Phase.WAIT_ROWS, block)
            self.reduce_tokens(tokens, ids, slots, y)
            trace.end(pen, since, Role.CTA, trace.Phase.SUM, block)
        summed = trace.begin(pen)
        cute.arch.sync_threads()
        failed = Int32(0)
        if tid == 0:
            prims.fence_gpu()
            if ctl.arrive_last(control + 8 * wire.DONE_REDUCE, grid):
                failed = end_forward(control, host, epoch)
        if prims.cta_any(failed) != 0:
            # The last CTA alone overwrites all of y, so that no half result is left whenever the abort came.
            nan = Int32(NAN_PAIR)
            for i in range(tid, tokens * (spec.hidden // 8), THREADS):
                prims.st_v4(y + Int64(i) * 16, nan, nan, nan, nan)
        trace.end(pen, summed, Role.CTA, trace.Phase.FINISH, block)

    @cute.jit
    def __call__(
        self,
        control: Int64,
        deltas: Int64,
        rank: Int32,
        tokens: Int32,
        ids: Int64,
        send_start: Int64,
        slots: Int64,
        y: Int64,
        host: Int64,
        grid: Int32,
        stream: cuda.CUstream,
        trace_at: Int64 | None = None,
    ):
        self.reduce_kernel(control, deltas, rank, tokens, ids, send_start, slots, y, host, trace_at).launch(
            grid=(grid, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1
        )
