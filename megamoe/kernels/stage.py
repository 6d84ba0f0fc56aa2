"""Stage: tokens become FP8 row records in the arena; routes are checked and counted."""

from __future__ import annotations

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Boolean, Float32, Int32, Int64

from .. import wire
from ..config import MoEConfig
from ..errors import BadInput, Cause, Phase
from . import control as ctl
from . import prims, quantize, trace
from .trace import Role

THREADS = 256
CHUNK = 512  # columns a warp quantises at once: 16 a lane, 8 lanes a scale group
ROUTES_PER_CTA = 1024


@dataclass(frozen=True)
class StageSpec:
    """What the stage kernel compiles in. prequantized: x is FP8 codes (and scales) already.
    trace: see trace.py."""

    hidden: int
    top_k: int
    num_experts: int
    world_size: int
    fp8: str
    block: bool
    prequantized: bool = False
    check_routes: bool = False
    trace: int = 0

    @classmethod
    def from_config(
        cls, cfg: MoEConfig, world_size: int, *, prequantized: bool = False, check_routes: bool = False
    ) -> StageSpec:
        """The spec of a config."""
        block = cfg.scale == "block"
        return cls(cfg.hidden, cfg.top_k, cfg.num_experts, world_size, cfg.fp8, block, prequantized, check_routes)

    @property
    def row(self) -> wire.RowFormat:
        """The record that stage writes."""
        return wire.RowFormat(self.hidden, wire.scale_columns(self.hidden, 128, self.block))


def stage_grid(hidden: int, tokens: int, top_k: int, num_sms: int) -> int:
    """CTAs of a launch: one warp a chunk, at most eight CTAs an SM; at least one, also for T = 0."""
    items = tokens * -(-hidden // CHUNK)
    wanted = max(-(-items // (THREADS // 32)), -(-tokens * top_k // ROUTES_PER_CTA), 1)
    return min(wanted, 8 * num_sms)


@cute.jit
def group_amax(words: list) -> Float32:
    """Largest magnitude of 16 bf16 in each of 8 neighbour lanes, that is of a group of 128 columns."""
    pair = words[0] & 0x7FFF7FFF
    for i in cutlass.range_constexpr(1, 8):
        pair = prims.bf16_pair_max(pair, words[i] & 0x7FFF7FFF)
    for step in cutlass.range_constexpr(3):
        pair = prims.bf16_pair_max(pair, cute.arch.shuffle_sync_bfly(pair, 1 << step))
    low, high = prims.bf16_pair_to_f32(pair)
    return prims.fmax(low, high)


class Stage:
    """ARGS: control, deltas (addresses); rank; x, x_scales (0 unless prequantized block); ids, ids_are_64;
    weights, weights_are_bf16; tokens; x_scale (tensor mode); x_rows (arena), ids_out, weights_out,
    send_counts, send_cursors; timeout_ns; grid."""

    ARGS = (
        *(Int64, Int64, Int32),
        *(Int64, Int64, Int64, Int32, Int64, Int32),
        *(Int32, Float32),
        *(Int64, Int64, Int64, Int64, Int64),
        *(Int64, Int32),
    )

    def __init__(self, spec: StageSpec) -> None:
        self.spec = spec

    @cute.jit
    def load_chunk(self, x: Int64, token: Int32, column: Int32, inside: Boolean) -> list:
        """A lane's 16 columns of x: eight words of bf16, or four of FP8 codes; zeros outside."""
        words = [Int32(0)] * (4 if self.spec.prequantized else 8)
        if inside:
            at = x + (Int64(token) * self.spec.hidden + column) * (len(words) // 4)
            words = list(prims.ld_stream_v4(at))
            if cutlass.const_expr(not self.spec.prequantized):
                words += list(prims.ld_stream_v4(at + 16))
        return words

    @cute.jit
    def store_chunk(
        self,
        words: list,
        x_scales: Int64,
        x_scale: Float32,
        x_rows: Int64,
        token: Int32,
        column: Int32,
        inside: Boolean,
    ):
        """Quantise a lane's 16 columns (all lanes call it) and store codes and scale into the token's record."""
        spec = self.spec
        at = x_rows + Int64(token) * spec.row.pitch
        codes, scale = words, x_scale
        if cutlass.const_expr(not spec.prequantized):
            if cutlass.const_expr(spec.block):
                scale = quantize.group_scale(group_amax(words), spec.fp8)
            values = []
            for i in cutlass.range_constexpr(8):
                values += list(prims.bf16_pair_to_f32(words[i]))
            codes = quantize.codes_of(values, scale, spec.block, spec.fp8)
        if inside:
            prims.st_v4(at + column, codes[0], codes[1], codes[2], codes[3])
            if cutlass.const_expr(spec.block):
                group = column // 128
                if column % 128 == 0:
                    if cutlass.const_expr(spec.prequantized):
                        scale = prims.ld_f32(x_scales + (Int64(token) * (spec.hidden // 128) + group) * 4)
                    prims.st_f32(at + spec.hidden + group * 4, scale)

    @cute.jit
    def quantize(self, x: Int64, x_scales: Int64, tokens: Int32, x_scale: Float32, x_rows: Int64):
        """All warps of the grid: rows of x -> records. Two chunks a turn, so that their loads overlap."""
        spec = self.spec
        chunks = -(-spec.hidden // CHUNK)
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        lane = cute.arch.lane_idx()
        warps = grid * (THREADS // 32)
        for item in range(block * (THREADS // 32) + tid // 32, tokens * chunks, 2 * warps):
            loaded = []
            for turn in cutlass.range_constexpr(2):
                token = (item + turn * warps) // chunks
                column = (item + turn * warps - token * chunks) * CHUNK + lane * 16
                inside = Boolean(token < tokens and column < spec.hidden)
                loaded.append((self.load_chunk(x, token, column, inside), token, column, inside))
            for words, token, column, inside in loaded:
                self.store_chunk(words, x_scales, x_scale, x_rows, token, column, inside)

    @cute.jit
    def load_id(self, ids: Int64, ids_are_64: Int32, route: Int32) -> Int32:
        """A route's expert id; int64 ids outside int32 become -2, which is out of range as well."""
        expert = Int32(0)
        if ids_are_64 != 0:
            wide = prims.ld_i64(ids + Int64(route) * 8)
            expert = Int32(wide & 0x7FFFFFFF)
            if wide < 0 or wide > 0x7FFFFFFF:
                expert = Int32(-2)
            if wide == -1:
                expert = Int32(-1)
        else:
            expert = prims.ld_i32(ids + Int64(route) * 4)
        return expert

    @cute.jit
    def fault_of(self, expert: Int32, weight: Int32, ids: Int64, ids_are_64: Int32, route: Int32) -> Int32:
        """check_routes: the BadInput code of a route, or 0."""
        spec = self.spec
        fault = Int32(0)
        if expert >= spec.num_experts or expert < -1:
            fault = Int32(int(BadInput.ID_OUT_OF_RANGE))
        elif expert >= 0:
            if (weight & 0x7F800000) == 0x7F800000:
                fault = Int32(int(BadInput.WEIGHT_NOT_FINITE))
            first = (route // spec.top_k) * spec.top_k
            for k in cutlass.range_constexpr(spec.top_k):
                if first + k < route:
                    if self.load_id(ids, ids_are_64, first + k) == expert:
                        fault = Int32(int(BadInput.DUPLICATE_EXPERT))
        return fault

    @cute.jit
    def count_routes(
        self,
        control: Int64,
        deltas: Int64,
        rank: Int32,
        epoch: Int64,
        ids: Int64,
        ids_are_64: Int32,
        weights: Int64,
        weights_are_bf16: Int32,
        routes: Int32,
        ids_out: Int64,
        weights_out: Int64,
        counts: Int64,
    ):
        """The first CTAs: check routes, write them clean, add this CTA's histogram to `counts` [E]."""
        spec = self.spec
        hist = prims.smem_addr(cutlass.memory.SmemAllocator().allocate_array(Int32, spec.num_experts))
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        workers = cutlass.min(grid, (routes + ROUTES_PER_CTA - 1) // ROUTES_PER_CTA)
        if block < workers:
            for e in range(tid, spec.num_experts, THREADS):
                prims.smem_st(hist + e * 4, Int32(0))
            cute.arch.sync_threads()
            for route in range(block * THREADS + tid, routes, workers * THREADS):
                expert = self.load_id(ids, ids_are_64, route)
                weight = Int32(0)
                if weights_are_bf16 != 0:
                    weight = prims.ld_u16(weights + Int64(route) * 2) << 16
                else:
                    weight = prims.ld_i32(weights + Int64(route) * 4)
                if cutlass.const_expr(spec.check_routes):
                    fault = self.fault_of(expert, weight, ids, ids_are_64, route)
                    if fault != 0:
                        token = Int64(route // spec.top_k)
                        ctl.abort_all(
                            control,
                            deltas,
                            spec.world_size,
                            rank,
                            Cause.BAD_INPUT,
                            Phase.STAGE,
                            rank,
                            expert,
                            Int64(fault),
                            token,
                            epoch,
                        )
                if expert < 0 or expert >= spec.num_experts:
                    expert = Int32(-1)
                else:
                    prims.smem_add(hist + expert * 4, Int32(1))
                prims.st_i32(ids_out + Int64(route) * 4, expert)
                prims.st_i32(weights_out + Int64(route) * 4, weight)
            cute.arch.sync_threads()
            for e in range(tid, spec.num_experts, THREADS):
                count = prims.smem_ld(hist + e * 4)
                if count > 0:
                    prims.atom_add_i32(counts + e * 4, count)

    @cute.kernel
    def stage_kernel(
        self,
        control: Int64,
        deltas: Int64,
        rank: Int32,
        x: Int64,
        x_scales: Int64,
        ids: Int64,
        ids_are_64: Int32,
        weights: Int64,
        weights_are_bf16: Int32,
        tokens: Int32,
        x_scale: Float32,
        x_rows: Int64,
        ids_out: Int64,
        weights_out: Int64,
        send_counts: Int64,
        send_cursors: Int64,
        timeout_ns: Int64,
        trace_at: Int64 | None,
    ):
        spec = self.spec
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        pen = trace.tracer(spec.trace, trace_at, Int32(0), tid == 0)
        began = trace.begin(pen)
        epoch = ctl.running_epoch(control)
        this_set = Int64(epoch & 1) * (spec.num_experts * 4)
        other_set = spec.num_experts * 4 - this_set
        if block == 0:
            if tid == 0:
                prims.st_i64(control + 8 * wire.DEADLINE, prims.globaltimer() + timeout_ns)
        if ctl.cta_aborted(control) == 0:
            if block == 0:
                for e in range(tid, spec.num_experts, THREADS):
                    prims.st_i32(send_counts + other_set + e * 4, Int32(0))
                    prims.st_i32(send_cursors + other_set + e * 4, Int32(0))
            self.count_routes(
                control,
                deltas,
                rank,
                epoch,
                ids,
                ids_are_64,
                weights,
                weights_are_bf16,
                tokens * spec.top_k,
                ids_out,
                weights_out,
                send_counts + this_set,
            )
            since = trace.end(pen, began, Role.CTA, trace.Phase.COUNT, block)
            self.quantize(x, x_scales, tokens, x_scale, x_rows)
            trace.end(pen, since, Role.CTA, trace.Phase.QUANTIZE, block)

    @cute.jit
    def __call__(
        self,
        control: Int64,
        deltas: Int64,
        rank: Int32,
        x: Int64,
        x_scales: Int64,
        ids: Int64,
        ids_are_64: Int32,
        weights: Int64,
        weights_are_bf16: Int32,
        tokens: Int32,
        x_scale: Float32,
        x_rows: Int64,
        ids_out: Int64,
        weights_out: Int64,
        send_counts: Int64,
        send_cursors: Int64,
        timeout_ns: Int64,
        grid: Int32,
        stream: cuda.CUstream,
        trace_at: Int64 | None = None,
    ):
        self.stage_kernel(
            control,
            deltas,
            rank,
            x,
            x_scales,
            ids,
            ids_are_64,
            weights,
            weights_are_bf16,
            tokens,
            x_scale,
            x_rows,
            ids_out,
            weights_out,
            send_counts,
            send_cursors,
            timeout_ns,
            trace_at,
        ).launch(grid=(grid, 1, 1), block=(THREADS, 1, 1), min_blocks_per_mp=1, stream=stream)
