"""FC2: grouped GEMM over activation records, times the routing weight, to bf16 rows."""

from __future__ import annotations

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64
from torch import Tensor

from .. import wire
from ..config import Knobs, MoEConfig
from . import (
    build,
    gemm_epilogue,
    gemm_items,
    gemm_load,
    gemm_main,
    gemm_ring,
    gemm_scales,
    gemm_tiles,
    prims,
    rows,
    trace,
)
from .fc2_swapped import fc2_width
from .trace import Phase, Role


@dataclass(frozen=True)
class FC2Spec:
    """What the FC2 kernel compiles in. weighted: multiply by the routing weight. trace: see trace.py."""

    gemm: gemm_tiles.GemmSpec
    weighted: bool
    trace: int = 0

    @classmethod
    def from_config(cls, cfg: MoEConfig, experts_local: int, knobs: Knobs) -> FC2Spec:
        """The spec of a config. Raises ConfigError for knobs that don't fit it."""
        gemm = gemm_tiles.make_spec(
            *(knobs, "fc2"),
            experts=experts_local,
            k=cfg.intermediate,
            n=cfg.hidden,
            pitch=wire.activation_format(cfg).pitch,
            fp8=cfg.fp8,
            mode="block" if cfg.scale == "block" else cfg.accum,
            group=cfg.act_group,
            paired=False,
            passes=1,
        )
        return cls(gemm, cfg.route_weight == "output")


@cute.jit
def fc2_tile(
    spec: cutlass.Constexpr,
    load_scale: cutlass.Constexpr,
    ring: gemm_ring.Ring,
    math: gemm_main.MathThread,
    tile: gemm_tiles.Tile,
    w_scale: Int64,
    pool_weight: Int64,
    y: Int64,
    act_scale: Float32,
    stage: Int32,
    phase: Int32,
    item: Int32,
    since: Int64 | None,
):
    """Math warps: one work item from stages to bf16 rows, with GemmSpec.late the last half's under the next one
    (a trace counts those stores to its main loop). Returns the ring state after it.

    Addresses as in FC2.ARGS; the others as in gemm_items.run_item.
    """
    gemm = spec.gemm
    mine = gemm_main.thread_rows(math, tile)
    dests = tuple(gemm_epilogue.row_address(y, 2 * gemm.n, row) for row in mine)
    safe = gemm_main.safe_rows(math, tile)
    live = tuple(gemm_epilogue.row_live(row, tile.end) for row in mine)
    factors = ()
    if cutlass.const_expr(spec.weighted):
        factors = tuple(load_scale(gemm_epilogue.row_address(pool_weight, 4, row)) for row in safe)
    if cutlass.const_expr(not gemm.scaled):
        factor = act_scale * load_scale(w_scale + Int64(tile.expert) * 4)
        factors = tuple(factor * f for f in factors) if spec.weighted else (factor, factor)
    place = gemm_scales.place(gemm, ring.scales, tile, item, 0, math.row) if gemm.scaled else None
    stage, phase = gemm_main.start_tile(gemm, ring, math, stage, phase, place)
    for half in cutlass.range_constexpr(gemm.halves):
        if cutlass.const_expr(half == gemm.early):
            stage, phase = gemm_main.finish_tile(gemm, ring, math, stage, phase)
            since = trace.end(math.pen, since, Role.MATH, Phase.MAIN_LOOP, tile.index)
        column = tile.column * gemm.halves + half
        if cutlass.const_expr(gemm.late and half == gemm.halves - 1):
            gemm_epilogue.keep_late(math.late, factors, column, dests, live)
        else:
            gemm_epilogue.store_output(math.acc[half], factors, column, math.quad, dests, live)
    trace.end(math.pen, since, Role.MATH, Phase.STORE, tile.index)
    return stage, phase


class FC2:
    """The staged FC2 kernel. Launch: build.build(FC2(spec))(*ARGS, stream).

    ARGS: act, activation records [rows_total, pitch]; expert_start, int32 [E_local + 1]; w2, FP8
    [E_local, H, I] in kernel order; w2_scale, fp32 [E_local, H/128, I/128] (block) or [E_local] (tensor);
    pool_weight, fp32 [rows_total] (read with route_weight "output"); y, bf16 [rows_total, H] to write;
    then rows_total, grid (CTAs, at most one an SM is useful), act_scale (tensor mode; else not read), tickets (of an
    atomic schedule, int32 [2] of 0, which it leaves so). Addresses that aren't used may be 0.
    """

    ARGS = (Int64, Int64, Int64, Int64, Int64, Int64, Int32, Int32, Float32, Int64)

    def __init__(self, spec: FC2Spec) -> None:
        self.spec = spec

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""
        return self.spec.gemm.smem_bytes

    @cute.kernel
    def kernel(
        self,
        ops: gemm_load.Operands,
        act: Int64,
        expert_start: Int64,
        w_scale: Int64,
        pool_weight: Int64,
        y: Int64,
        act_scale: Float32,
        tickets: Int64,
        trace_at: Int64 | None,
    ):
        spec, gemm = self.spec, self.spec.gemm
        ring, schedule, queue = gemm_load.start(gemm, ops, expert_start, tickets)
        if gemm_load.is_producer(gemm):
            gemm_load.producer_role(gemm, ops, ring, schedule, queue, spec.trace, trace_at)
        else:
            args = (w_scale, pool_weight, y, act_scale)
            run = (fc2_tile, fc2_width, prims.ld_weak_f32)
            gemm_items.math_role(spec, *run, ring, schedule, args, trace_at)
        if cutlass.const_expr(gemm.cluster > 1):
            gemm_load.meet(gemm)  # no CTA ends while the other may still arrive at its barriers

    @cute.jit
    def __call__(
        self,
        act: Int64,
        expert_start: Int64,
        w2: Int64,
        w2_scale: Int64,
        pool_weight: Int64,
        y: Int64,
        rows_total: Int32,
        grid: Int32,
        act_scale: Float32,
        tickets: Int64,
        stream: cuda.CUstream,
        trace_at: Int64 | None = None,
    ):
        gemm = self.spec.gemm
        ops = gemm_load.make_operands(gemm, act, w2, w2_scale, rows_total)
        self.kernel(ops, act, expert_start, w2_scale, pool_weight, y, act_scale, tickets, trace_at).launch(
            grid=(gemm_tiles.whole_clusters(gemm, grid), 1, 1),
            block=(gemm.threads, 1, 1),
            cluster=(gemm.cluster, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )


FC2.kernel.set_name_prefix("megamoe_fc2", remove_cutlass_symbol=True, keep_mangled_name=False)


def fc2(
    act_rows: Tensor,
    expert_start: Tensor,
    experts: rows.Experts,
    weights: Tensor | None = None,
    knobs: Knobs = Knobs(),  # noqa: B008 (frozen)
    *,
    num_sms: int | None = None,
    out: Tensor | None = None,
    tickets: Tensor | None = None,
) -> Tensor:
    """FC2 of activation rows, on torch's current stream.

    act_rows: uint8 [R, pitch], records of wire.activation_format(cfg), as fc1 returns them. expert_start:
    int32 [E_local + 1]. weights: fp32 [R], needed with route_weight="output". num_sms: CTAs to launch,
    default all SMs. tickets: as of fc1. Returns bf16 [R, H] (in `out` if given); rows of no expert are left as they
    were. Raises InputError when an argument doesn't fit, ConfigError for knobs that don't.
    """
    cfg = rows.config_of(experts)
    rows.check_rows("act_rows", act_rows, wire.activation_format(cfg).pitch)
    local, total, device = experts.w2.shape[0], act_rows.shape[0], act_rows.device
    rows.check_device("experts", experts.w2, device)
    rows.check("expert_start", expert_start, torch.int32, local + 1, device=device)
    weight_address = rows.weight_address(cfg, "output", weights, total, device)
    if out is None:
        out = torch.empty(total, cfg.hidden, dtype=torch.bfloat16, device=device)
    rows.check("out", out, torch.bfloat16, total, cfg.hidden, device=device)
    tickets = rows.tickets(tickets, knobs, device)
    if total:
        build.run(
            *(FC2(FC2Spec.from_config(cfg, local, knobs)), device),
            *(act_rows.data_ptr(), expert_start.data_ptr(), experts.w2.data_ptr(), experts.w2_scale.data_ptr()),
            *(weight_address, out.data_ptr(), total, rows.ctas(act_rows, num_sms), experts.act_scale or 1.0),
            tickets.data_ptr(),
        )
    return out
