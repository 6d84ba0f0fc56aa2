"""FC2's work items with swapped operands: main loops by live rows, and the epilogue through shared memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from . import gemm_epilogue, gemm_main, gemm_ring, gemm_scales, gemm_tiles, gemm_transpose, prims, trace
from .trace import Phase, Role


@cute.jit
def transpose_part(
    spec: cutlass.Constexpr,
    width: cutlass.Constexpr,
    part: cutlass.Constexpr,
    base: Int32,
    math: gemm_main.MathThread,
    batch: cutlass.Constexpr,
    reader: gemm_transpose.Reader,
) -> list[Float32]:
    """Transpose block `part` of 64 columns of this warpgroup, for the rows of one batch: the reader's 16 values."""
    for place in cutlass.range_constexpr(len(batch)):
        which, at = gemm_transpose.value_at(spec.gemm, width, part, batch[place])
        acc = math.acc[which]
        for h in cutlass.range_constexpr(2):
            values = [acc[at + 2 * h], acc[at + 2 * h + 1]]
            gemm_transpose.put(spec.gemm, base, math, place, math.row + 8 * h, values)
    return gemm_transpose.take(spec.gemm, math, reader)


@cute.jit
def store_part(values: list, factor: Float32 | None, dest: Int64, live: Boolean):
    """Two runs of 8 columns, 64 bytes apart, to a bf16 row, times factor if there is one."""
    for run in cutlass.range_constexpr(2):
        words = gemm_epilogue.bf16_words(values[8 * run : 8 * run + 8], factor)
        if live:
            prims.st_v4(dest + 64 * run, *words)


@cute.jit
def fc2_width(
    spec: cutlass.Constexpr,
    width: cutlass.Constexpr,
    load_scale: cutlass.Constexpr,
    ring: gemm_ring.Ring,
    pen: trace.Tracer | None,
    tile: gemm_tiles.Tile,
    w_scale: Int64,
    pool_weight: Int64,
    y: Int64,
    act_scale: Float32,
    stage: Int32,
    phase: Int32,
    item: Int32,
    since: Int64 | None,
) -> tuple[Int32, Int32]:
    """Math warps: one work item of at most `width` live rows. Arguments as of fc2.fc2_tile; y: bf16 rows [.., H]."""
    gemm = spec.gemm
    thread, _, _ = cute.arch.thread_idx()
    math = gemm_main.swapped_thread(gemm, ring, thread, width, pen)
    place = gemm_scales.math_place(gemm, ring.scales, tile, item, math.group) if gemm.scaled else None
    stage, phase = gemm_main.start_tile(gemm, ring, math, stage, phase, place)
    stage, phase = gemm_main.finish_tile(gemm, ring, math, stage, phase)
    since = trace.end(pen, since, Role.MATH, Phase.MAIN_LOOP, tile.index)
    base = ring.transpose + math.first // 64 * (gemm.transpose_bytes // 2)
    reader = gemm_transpose.make_reader(gemm, base)
    column = tile.column * (128 * gemm.halves) + math.first * gemm.halves + 8 * reader.part
    batches = gemm_transpose.batches(gemm, width)
    for number in cutlass.range_constexpr(len(batches)):
        row = tile.row + number * gemm.batch_rows + reader.row
        live = reader.live and row < tile.end
        factor = Float32(1.0)
        if cutlass.const_expr(spec.weighted):
            factor = load_scale(gemm_epilogue.row_address(pool_weight, 4, cutlass.min(row, tile.end - 1)))
        if cutlass.const_expr(not gemm.scaled):
            factor = act_scale * load_scale(w_scale + Int64(tile.expert) * 4) * factor
        dest = gemm_epilogue.row_address(y, 2 * gemm.n, row) + Int64(column) * 2
        for part in cutlass.range_constexpr(gemm.halves):
            values = transpose_part(spec, width, part, base, math, batches[number], reader)
            factored = factor if cutlass.const_expr(spec.weighted or not gemm.scaled) else None
            store_part(values, factored, dest + 128 * part, live)
    trace.end(pen, since, Role.MATH, Phase.STORE, tile.index)
    return stage, phase
