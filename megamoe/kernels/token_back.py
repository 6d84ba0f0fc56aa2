"""Token-back: store each FC2 row straight into its home's slot (token, k), then publish to every home."""

from __future__ import annotations

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from .. import wire
from ..config import Knobs, MoEConfig
from . import control as ctl
from . import prims, trace
from .copy_rows import WARPS, Ring, copy_batch, make_ring, pieces, ring_depth
from .faults import NO_FAULTS, Faults, random_delay
from .routes import high_word, low_word
from .trace import Phase, Role

THREADS = 32 * WARPS


@dataclass(frozen=True)
class TokenBackSpec:
    """What the token-back kernel compiles in. pieces: bulk copies a row of 2 * hidden bytes takes.
    trace: see trace.py."""

    hidden: int
    experts_local: int
    world_size: int
    pieces: int
    depth: int
    faults: Faults = NO_FAULTS
    trace: int = 0

    @classmethod
    def from_config(cls, cfg: MoEConfig, world_size: int, knobs: Knobs, faults: Faults = NO_FAULTS) -> TokenBackSpec:
        """The spec of a config."""
        count = pieces(2 * cfg.hidden)
        depth = ring_depth(2 * cfg.hidden // count, knobs.copy_depth)
        return cls(cfg.hidden, cfg.experts_local(world_size), world_size, count, depth, faults)

    @property
    def piece_bytes(self) -> int:
        """Bytes of one bulk copy."""
        return 2 * self.hidden // self.pieces


class TokenBack:
    """ARGS: control, deltas; rank; expert_start, pool_meta, pool_y; slots (arena); grid."""

    ARGS = (Int64, Int64, Int32, Int64, Int64, Int64, Int64, Int32)

    def __init__(self, spec: TokenBackSpec) -> None:
        self.spec = spec

    @cute.jit
    def return_rows(
        self,
        ring: Ring,
        control: Int64,
        deltas: Int64,
        total: Int32,
        pool_meta: Int64,
        pool_y: Int64,
        slots: Int64,
        pen: trace.Tracer | None,
    ):
        """One warp's share of the pool; stops storing once a rank has aborted."""
        spec = self.spec
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        lane = cute.arch.lane_idx()
        stride = grid * WARPS
        units = total * spec.pieces
        base = block * WARPS + tid // 32
        moved = Int32(0)
        while base < units:
            since = trace.begin(pen)
            unit = base + lane * stride
            source = Int64(0)
            target = Int64(0)
            # Before anything is read: after an abort some of the pool's rows may never have been pulled.
            dead = cute.arch.vote_any_sync(ctl.aborted(control))
            if unit < units and not dead:
                row = unit // spec.pieces
                within = (unit - row * spec.pieces) * spec.piece_bytes
                meta = prims.ld_i64(pool_meta + Int64(row) * 8)
                source = pool_y + Int64(row) * (2 * spec.hidden) + within
                target = slots + Int64(low_word(meta)) * (2 * spec.hidden) + within
                target += ctl.delta_of(deltas, high_word(meta))
            batch = cutlass.min((units - base + stride - 1) // stride, 32)
            if dead:
                batch = Int32(0)
            copy_batch(ring, moved, source, target, batch, spec.piece_bytes, spec.depth, pen)
            trace.end(pen, since, Role.COPIER, Phase.COPY, base)
            moved += batch
            base += stride * 32
        since = trace.begin(pen)
        if lane == 0:
            prims.bulk_wait(0)
            prims.fence_proxy_async()
            prims.fence_sys()
        trace.end(pen, since, Role.COPIER, Phase.DRAIN, Int32(trace.NO_TILE))

    @cute.kernel
    def token_back_kernel(
        self,
        control: Int64,
        deltas: Int64,
        rank: Int32,
        expert_start: Int64,
        pool_meta: Int64,
        pool_y: Int64,
        slots: Int64,
        trace_at: Int64 | None,
    ):
        spec = self.spec
        ring = make_ring(spec.piece_bytes, spec.depth)
        tid, _, _ = cute.arch.thread_idx()
        grid, _, _ = cute.arch.grid_dim()
        epoch = ctl.running_epoch(control)
        random_delay(spec.faults)
        prims.fence_proxy_async()
        total = prims.ld_i32(expert_start + 4 * spec.experts_local)
        pen = trace.tracer(spec.trace, trace_at, tid // 32, tid % 32 == 0)
        self.return_rows(ring, control, deltas, total, pool_meta, pool_y, slots, pen)
        since = trace.begin(pen)
        cute.arch.sync_threads()
        if tid == 0:
            flag = control + 8 * (wire.RETURN_FLAG + Int64(rank))
            ctl.publish(control, deltas, spec.world_size, control + 8 * wire.DONE_RETURN, grid, flag, epoch)
        trace.end(pen, since, Role.COPIER, Phase.PUBLISH, Int32(trace.NO_TILE))

    @cute.jit
    def __call__(
        self,
        control: Int64,
        deltas: Int64,
        rank: Int32,
        expert_start: Int64,
        pool_meta: Int64,
        pool_y: Int64,
        slots: Int64,
        grid: Int32,
        stream: cuda.CUstream,
        trace_at: Int64 | None = None,
    ):
        self.token_back_kernel(control, deltas, rank, expert_start, pool_meta, pool_y, slots, trace_at).launch(
            grid=(grid, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1
        )
