"""FC1: grouped GEMM over the pool, then clamp, SwiGLU and quantisation, into activation records."""

from __future__ import annotations

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64
from torch import Tensor

from .. import wire
from ..config import BLOCK, Knobs, MoEConfig
from ..errors import ConfigError
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
from .fc1_swapped import fc1_width
from .trace import Phase, Role


@dataclass(frozen=True)
class FC1Spec:
    """What the FC1 kernel compiles in. debug: also store fp32 activations before quantisation; or keep_preactivation:
    also store bf16 gate and up, before clamp and SwiGLU. trace: see trace.py."""

    gemm: gemm_tiles.GemmSpec
    act_pitch: int
    act_group: int
    clamp: float | None
    weighted: bool
    debug: bool = False
    keep_preactivation: bool = False
    trace: int = 0

    @classmethod
    def from_config(
        cls,
        cfg: MoEConfig,
        experts_local: int,
        knobs: Knobs,
        debug: bool = False,
        keep_preactivation: bool = False,
    ) -> FC1Spec:
        """The spec of a config. Raises ConfigError for knobs that don't fit, and debug with keep_preactivation."""
        if debug and keep_preactivation:
            raise ConfigError("keep_preactivation", True, "False with debug: both take too many registers")
        block = cfg.scale == "block"
        gemm = gemm_tiles.make_spec(
            *(knobs, "fc1"),
            experts=experts_local,
            k=cfg.hidden,
            n=2 * cfg.intermediate,
            pitch=wire.input_format(cfg).pitch,
            fp8=cfg.fp8,
            mode="block" if block else cfg.accum,
            group=BLOCK,
            paired=True,
            passes=2 if block and cfg.act_group == 128 else 1,
        )
        weighted = cfg.route_weight == "activation"
        pitch = wire.activation_format(cfg).pitch
        return cls(gemm, pitch, cfg.act_group, cfg.clamp, weighted, debug, keep_preactivation)

    @property
    def intermediate(self) -> int:
        return self.gemm.n // 2

    @property
    def kept_pitch(self) -> int:
        """Bytes of a row of what is kept: fp32 activations [I] (debug), or bf16 gate and up [2I]."""
        return 4 * self.intermediate


@cute.jit
def fc1_tile(
    spec: cutlass.Constexpr,
    load_scale: cutlass.Constexpr,
    ring: gemm_ring.Ring,
    math: gemm_main.MathThread,
    tile: gemm_tiles.Tile,
    w_scale: Int64,
    pool_weight: Int64,
    act: Int64,
    kept: Int64,
    x_scale: Float32,
    act_scale: Float32,
    stage: Int32,
    phase: Int32,
    item: Int32,
    since: Int64 | None,
):
    """Math warps: one work item from stages to activation records. Returns the ring state after it.

    Addresses as in FC1.ARGS; the others as in gemm_items.run_item.
    """
    gemm = spec.gemm
    spans = gemm.passes * gemm.halves
    mine = gemm_main.thread_rows(math, tile)
    safe = gemm_main.safe_rows(math, tile)
    live = tuple(gemm_epilogue.row_live(row, tile.end) for row in mine)
    factor = Float32(1.0)
    if cutlass.const_expr(not gemm.scaled):
        factor = x_scale * load_scale(w_scale + Int64(tile.expert) * 4)
    weights = ()
    if cutlass.const_expr(spec.weighted):
        weights = tuple(load_scale(gemm_epilogue.row_address(pool_weight, 4, row)) for row in safe)
    values = cute.make_rmem_tensor(32 * spans, Float32)
    for number in cutlass.range_constexpr(gemm.passes):
        place = gemm_scales.place(gemm, ring.scales, tile, item, number, math.row) if gemm.scaled else None
        stage, phase = gemm_main.start_tile(gemm, ring, math, stage, phase, place, number == gemm.passes - 1)
        stage, phase = gemm_main.finish_tile(gemm, ring, math, stage, phase)
        since = trace.end(math.pen, since, Role.MATH, Phase.MAIN_LOOP, tile.index)
        for half in cutlass.range_constexpr(gemm.halves):
            at = number * gemm.halves + half
            gemm_epilogue.activate(spec.clamp, math.acc[half], at, factor, not gemm.scaled, weights, values)
            if cutlass.const_expr(spec.keep_preactivation):
                dests = tuple(gemm_epilogue.row_address(kept, spec.kept_pitch, row) for row in mine)
                gemm_epilogue.store_preactivation(
                    *(spec.intermediate, math.acc[half], tile.column * spans + at),
                    *(factor, not gemm.scaled, math.quad, dests, live),
                )
        since = trace.end(math.pen, since, Role.MATH, Phase.ACTIVATE, tile.index)
    dests = tuple(gemm_epilogue.row_address(act, spec.act_pitch, row) for row in mine)
    gemm_epilogue.store_activation(
        *(gemm.fp8, spec.act_group if gemm.scaled else 0, spec.intermediate, spans),
        *(values, act_scale, tile.column, math.quad, dests, live),
    )
    if cutlass.const_expr(spec.debug):
        dests = tuple(gemm_epilogue.row_address(kept, spec.kept_pitch, row) for row in mine)
        gemm_epilogue.store_debug(spans, values, tile.column, math.quad, dests, live)
    trace.end(math.pen, since, Role.MATH, Phase.STORE, tile.index)
    return stage, phase


class FC1:
    """The staged FC1 kernel. Launch: build.build(FC1(spec))(*ARGS, stream).

    ARGS: x, records of the pool [rows_total, pitch]; expert_start, int32 [E_local + 1]; w13, FP8
    [E_local, 2I, H] in kernel order; w13_scale, fp32 [E_local, 2, I/128, H/128] (block) or [E_local]
    (tensor); pool_weight, fp32 [rows_total] (read with route_weight "activation"); act, activation
    records to write; kept, fp32 [rows_total, I] (spec.debug) or bf16 [rows_total, 2I] (keep_preactivation) to
    write; then rows_total, grid (CTAs, at most one an SM is useful), x_scale, act_scale (tensor mode; else not
    read), tickets (of an atomic schedule, int32 [2] of 0, which it leaves so). Addresses that aren't used may be 0.
    """

    ARGS = (Int64, Int64, Int64, Int64, Int64, Int64, Int64, Int32, Int32, Float32, Float32, Int64)

    def __init__(self, spec: FC1Spec) -> None:
        self.spec = spec

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a CTA."""
        return self.spec.gemm.smem_bytes

    @cute.kernel
    def kernel(
        self,
        ops: gemm_load.Operands,
        x: Int64,
        expert_start: Int64,
        w_scale: Int64,
        pool_weight: Int64,
        act: Int64,
        kept: Int64,
        x_scale: Float32,
        act_scale: Float32,
        tickets: Int64,
        trace_at: Int64 | None,
    ):
        spec, gemm = self.spec, self.spec.gemm
        ring, schedule, queue = gemm_load.start(gemm, ops, expert_start, tickets)
        if gemm_load.is_producer(gemm):
            gemm_load.producer_role(gemm, ops, ring, schedule, queue, spec.trace, trace_at)
        else:
            args = (w_scale, pool_weight, act, kept, x_scale, act_scale)
            run = (fc1_tile, fc1_width, prims.ld_weak_f32)
            gemm_items.math_role(spec, *run, ring, schedule, args, trace_at)
        if cutlass.const_expr(gemm.cluster > 1):
            gemm_load.meet(gemm)  # no CTA ends while the other may still arrive at its barriers

    @cute.jit
    def __call__(
        self,
        x: Int64,
        expert_start: Int64,
        w13: Int64,
        w13_scale: Int64,
        pool_weight: Int64,
        act: Int64,
        kept: Int64,
        rows_total: Int32,
        grid: Int32,
        x_scale: Float32,
        act_scale: Float32,
        tickets: Int64,
        stream: cuda.CUstream,
        trace_at: Int64 | None = None,
    ):
        gemm = self.spec.gemm
        ops = gemm_load.make_operands(gemm, x, w13, w13_scale, rows_total)
        self.kernel(
            ops, x, expert_start, w13_scale, pool_weight, act, kept, x_scale, act_scale, tickets, trace_at
        ).launch(
            grid=(gemm_tiles.whole_clusters(gemm, grid), 1, 1),
            block=(gemm.threads, 1, 1),
            cluster=(gemm.cluster, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )


FC1.kernel.set_name_prefix("megamoe_fc1", remove_cutlass_symbol=True, keep_mangled_name=False)


def fc1(
    x_rows: Tensor,
    expert_start: Tensor,
    experts: rows.Experts,
    weights: Tensor | None = None,
    knobs: Knobs = Knobs(),  # noqa: B008 (frozen)
    *,
    num_sms: int | None = None,
    debug: bool = False,
    keep_preactivation: bool = False,
    out: Tensor | None = None,
    tickets: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """FC1, clamp, SwiGLU and quantisation of pool rows, on torch's current stream.

    x_rows: uint8 [R, pitch], records of wire.input_format(cfg) (rows.pack_rows makes them), grouped by
    expert. expert_start: int32 [E_local + 1]; rows expert_start[e] to expert_start[e + 1] are expert e's.
    weights: fp32 [R], needed with route_weight="activation". num_sms: CTAs to launch, default all SMs. tickets:
    int32 [2] of 0, which an atomic schedule leaves so; without it such a call allocates and clears its own.
    Returns uint8 [R, pitch], records of wire.activation_format(cfg) (in `out` if given). With debug also
    fp32 [R, I], the activations before they are quantised; or with keep_preactivation also bf16 [R, 2I], what
    the GEMM gives with all scales applied, before clamp and SwiGLU: gate in the first I columns, up in the
    others. Rows of no expert are left as they were. Raises InputError when an argument doesn't fit, ConfigError
    for knobs that don't and for debug with keep_preactivation.
    """
    cfg = rows.config_of(experts)
    rows.check_rows("x_rows", x_rows, wire.input_format(cfg).pitch)
    fmt, total, local = wire.activation_format(cfg), x_rows.shape[0], experts.w13.shape[0]
    device = x_rows.device
    rows.check_device("experts", experts.w13, device)
    rows.check("expert_start", expert_start, torch.int32, local + 1, device=device)
    weight_address = rows.weight_address(cfg, "activation", weights, total, device)
    if out is None:
        out = torch.empty(total, fmt.pitch, dtype=torch.uint8, device=device)
    rows.check("out", out, torch.uint8, total, fmt.pitch, device=device)
    spec = FC1Spec.from_config(cfg, local, knobs, debug, keep_preactivation)
    columns, dtype = (2 * cfg.intermediate, torch.bfloat16) if keep_preactivation else (cfg.intermediate, torch.float32)
    kept = torch.empty(total if debug or keep_preactivation else 0, columns, dtype=dtype, device=device)
    tickets = rows.tickets(tickets, knobs, device)
    if total:
        build.run(
            *(FC1(spec), device),
            *(x_rows.data_ptr(), expert_start.data_ptr(), experts.w13.data_ptr(), experts.w13_scale.data_ptr()),
            *(weight_address, out.data_ptr(), kept.data_ptr(), total, rows.ctas(x_rows, num_sms)),
            *(experts.x_scale or 1.0, experts.act_scale or 1.0, tickets.data_ptr()),
        )
    return (out, kept) if debug or keep_preactivation else out
