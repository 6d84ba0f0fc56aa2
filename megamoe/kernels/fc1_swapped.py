"""FC1's work items with swapped operands: main loops by live rows, and the epilogue through shared memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from . import gemm_epilogue, gemm_main, gemm_ring, gemm_scales, gemm_tiles, gemm_transpose, prims, quantize, trace
from .trace import Phase, Role


@cute.jit
def put_batch(
    spec: cutlass.Constexpr,
    width: cutlass.Constexpr,
    what: cutlass.Constexpr,
    base: Int32,
    math: gemm_main.MathThread,
    batch: cutlass.Constexpr,
    factor: Float32,
):
    """Put this thread's values of one batch (gemm_transpose.batches): activations, or with `what` "gate" or "up" those
    as they leave the GEMM. factor: of the tile (tensor mode)."""
    gemm = spec.gemm
    # Of 16 weight rows 8 are gate and 8 up; with two weight tiles a warpgroup has a whole one, else half of one.
    word = math.row - math.row // 16 * 8 + math.first // (3 - gemm.halves)
    for part in cutlass.range_constexpr(gemm.halves):
        for place in cutlass.range_constexpr(len(batch)):
            which, at = gemm_transpose.value_at(gemm, width, part, batch[place])
            acc, values = math.acc[which], []
            for e in cutlass.range_constexpr(2):
                gate, up = acc[at + e], acc[at + 2 + e]
                if cutlass.const_expr(not gemm.scaled):
                    gate, up = gate * factor, up * factor
                if cutlass.const_expr(what == "gate"):
                    values.append(gate)
                elif cutlass.const_expr(what == "up"):
                    values.append(up)
                else:
                    values.append(gemm_epilogue.swiglu(spec.clamp, gate, up))
            gemm_transpose.put(gemm, base, math, place, word + 32 * part, values)


@cute.jit
def keep_batch(
    spec: cutlass.Constexpr,
    width: cutlass.Constexpr,
    base: Int32,
    math: gemm_main.MathThread,
    batch: cutlass.Constexpr,
    factor: Float32,
    reader: gemm_transpose.Reader,
    dest: Int64,
    live: Boolean,
):
    """Store gate and up of one batch into bf16 rows [2 * intermediate]; dest: address of the reader's own 16 gates."""
    for what in ("gate", "up"):
        put_batch(spec, width, what, base, math, batch, factor)
        values = gemm_transpose.take(spec.gemm, math, reader)
        words = gemm_epilogue.bf16_words(values, None)
        if live:
            at = dest + (2 * spec.intermediate if what == "up" else 0)
            prims.st_v4(at, *words[:4])
            prims.st_v4(at + 16, *words[4:])


@cute.jit
def store_batch(
    spec: cutlass.Constexpr,
    values: list,
    act_scale: Float32,
    tile: gemm_tiles.Tile,
    reader: gemm_transpose.Reader,
    dest: Int64,
    live: Boolean,
):
    """Quantise the reader's 16 activations and store codes, and in block mode scales; dest: the row's record."""
    gemm = spec.gemm
    scale = act_scale
    if cutlass.const_expr(gemm.scaled):
        amax = gemm_epilogue.group_amax(values, 0, 1, 0)
        if cutlass.const_expr(spec.act_group == 128):
            amax = prims.fmax(amax, cute.arch.shuffle_sync_bfly(amax, offset=4))
        scale = quantize.group_scale(amax, gemm.fp8)
    words = quantize.codes_of(values, scale, gemm.scaled, gemm.fp8)
    first = (tile.column * gemm.halves + reader.part // 4) * 64
    if live:
        prims.st_v4(dest + Int64(first + reader.part % 4 * 16), *words)
        if cutlass.const_expr(gemm.scaled):
            if reader.part % (spec.act_group // 16) == 0:
                prims.st_f32(dest + Int64(spec.intermediate + first // spec.act_group * 4), scale)


@cute.jit
def fc1_width(
    spec: cutlass.Constexpr,
    width: cutlass.Constexpr,
    load_scale: cutlass.Constexpr,
    ring: gemm_ring.Ring,
    pen: trace.Tracer | None,
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
) -> tuple[Int32, Int32]:
    """Math warps: one work item of at most `width` live rows. Arguments as of fc1.fc1_tile."""
    gemm = spec.gemm
    thread, _, _ = cute.arch.thread_idx()
    math = gemm_main.swapped_thread(gemm, ring, thread, width, pen)
    factor = Float32(1.0)
    if cutlass.const_expr(not gemm.scaled):
        factor = x_scale * load_scale(w_scale + Int64(tile.expert) * 4)
    place = gemm_scales.math_place(gemm, ring.scales, tile, item, math.group) if gemm.scaled else None
    stage, phase = gemm_main.start_tile(gemm, ring, math, stage, phase, place)
    stage, phase = gemm_main.finish_tile(gemm, ring, math, stage, phase)
    since = trace.end(pen, since, Role.MATH, Phase.MAIN_LOOP, tile.index)
    reader = gemm_transpose.make_reader(gemm, ring.transpose)
    column = tile.column * (64 * gemm.halves) + 16 * reader.part
    batches = gemm_transpose.batches(gemm, width)
    for number in cutlass.range_constexpr(len(batches)):
        row = tile.row + number * gemm.batch_rows + reader.row
        live = reader.live and row < tile.end
        row_kept = gemm_epilogue.row_address(kept, spec.kept_pitch, row)
        if cutlass.const_expr(spec.keep_preactivation):
            at = row_kept + Int64(column) * 2
            keep_batch(spec, width, ring.transpose, math, batches[number], factor, reader, at, live)
        put_batch(spec, width, "act", ring.transpose, math, batches[number], factor)
        values = gemm_transpose.take(gemm, math, reader)
        if cutlass.const_expr(spec.weighted):
            safe = cutlass.min(row, tile.end - 1)
            weight = load_scale(gemm_epilogue.row_address(pool_weight, 4, safe))
            values = [value * weight for value in values]
        store_batch(spec, values, act_scale, tile, reader, gemm_epilogue.row_address(act, spec.act_pitch, row), live)
        if cutlass.const_expr(spec.debug):
            if live:
                for i in cutlass.range_constexpr(0, 16, 4):
                    words = [prims.f32_to_bits(value) for value in values[i : i + 4]]
                    prims.st_v4(row_kept + Int64(column + i) * 4, *words)
    trace.end(pen, since, Role.MATH, Phase.STORE, tile.index)
    return stage, phase
