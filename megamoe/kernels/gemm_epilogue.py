"""From accumulators to memory: SwiGLU and quantisation after FC1, routing weight and bf16 after FC2.

Each thread stores its own rows in 16-byte pieces (wire.interleave_gate_up and interleave_down put the
weight rows in the order that makes this possible). Functions take the destination address of each of the
thread's two rows and whether it is live, so rows may go anywhere, a peer included. A span is 64 columns of
activations, what a weight tile of gate and up gives.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from . import prims, quantize

LOG2_E = 1.4426950408889634


@cute.jit
def row_address(base: Int64, pitch: cutlass.Constexpr, row: Int32) -> Int64:
    """Address of a row in a plain array of rows `pitch` bytes apart."""
    return base + Int64(row) * pitch


@cute.jit
def silu(x: Float32) -> Float32:
    """x / (1 + exp(-x)) with the hardware's exp2 and reciprocal (a few 1e-7 relative)."""
    return x * cute.arch.rcp_approx(1.0 + cute.math.exp2(x * -LOG2_E, fastmath=True))


@cute.jit
def swiglu(clamp: cutlass.Constexpr, gate: Float32, up: Float32) -> Float32:
    """silu(gate) * up, both clamped before if clamp is not None. Clamps keep NaN."""
    if cutlass.const_expr(clamp is not None):
        gate = cute.arch.fmin(gate, clamp, nan=True)
        up = cute.arch.fmax(cute.arch.fmin(up, clamp, nan=True), -clamp, nan=True)
    return silu(gate) * up


@cute.jit
def activate(
    clamp: cutlass.Constexpr,
    acc: cute.Tensor,
    span: cutlass.Constexpr,
    factor: Float32,
    scaled: cutlass.Constexpr,
    weights: tuple,
    values: cute.Tensor,
):
    """SwiGLU of one pass: values[32 * span + 16h + v] = silu(gate) * up of row half h, column 16 * quad + v.

    scaled: multiply gate and up by `factor` first (tensor mode). weights: a factor of each row half, or ().
    Gate sits in even and up in odd chunks of acc (fragment order, MathThread).
    """
    for h in cutlass.range_constexpr(2):
        for v in cutlass.range_constexpr(16):
            at = 8 * (v // 2) + 2 * h + v % 2
            gate, up = acc[at], acc[at + 4]
            if cutlass.const_expr(scaled):
                gate, up = gate * factor, up * factor
            value = swiglu(clamp, gate, up)
            if cutlass.const_expr(len(weights) == 2):
                value *= weights[h]
            values[32 * span + 16 * h + v] = value


@cute.jit
def quad_max(value: Float32) -> Float32:
    """Maximum over the four lanes that share a row; NaN loses."""
    value = prims.fmax(value, cute.arch.shuffle_sync_bfly(value, offset=1))
    return prims.fmax(value, cute.arch.shuffle_sync_bfly(value, offset=2))


@cute.jit
def group_amax(values: cute.Tensor, first: cutlass.Constexpr, last: cutlass.Constexpr, h: cutlass.Constexpr) -> Float32:
    """Largest magnitude of a row half in spans first .. last - 1, which the lanes of a quad share."""
    amax = Float32(0.0)
    for span in cutlass.range_constexpr(first, last):
        for v in cutlass.range_constexpr(16):
            amax = prims.fmax(amax, prims.fabs(values[32 * span + 16 * h + v]))
    return quad_max(amax)


@cute.jit
def store_activation(
    fp8: cutlass.Constexpr,
    group: cutlass.Constexpr,
    intermediate: cutlass.Constexpr,
    spans: cutlass.Constexpr,
    values: cute.Tensor,
    act_scale: Float32,
    column: Int32,
    quad: Int32,
    dests: tuple,
    live: tuple,
):
    """Quantise `values` of activate() and store codes, and in block mode the scales, into two row records.

    spans: of 64 columns each. column: the work item's column tile; its codes start at 64 * spans * column.
    group: columns that share a scale, which is stored behind the codes; 0 in tensor mode, with act_scale for all.
    """
    together = group // 64 if group else spans
    for h in cutlass.range_constexpr(2):
        for first in cutlass.range_constexpr(0, spans, together):
            scale = act_scale
            if cutlass.const_expr(group):
                scale = quantize.group_scale(group_amax(values, first, first + together, h), fp8)
            for span in cutlass.range_constexpr(first, first + together):
                words = quantize.codes_of([values[32 * span + 16 * h + i] for i in range(16)], scale, group > 0, fp8)
                if live[h]:
                    prims.st_v4(dests[h] + Int64((column * spans + span) * 64 + quad * 16), *words)
            if cutlass.const_expr(group):
                if live[h] and quad == 0:
                    number = (column * spans + first) // together
                    prims.st_f32(dests[h] + intermediate + Int64(number) * 4, scale)


@cute.jit
def store_debug(spans: cutlass.Constexpr, values: cute.Tensor, column: Int32, quad: Int32, dests: tuple, live: tuple):
    """Store the fp32 `values` of activate() as they are into two rows of an fp32 array."""
    for h in cutlass.range_constexpr(2):
        for span in cutlass.range_constexpr(spans):
            for w in cutlass.range_constexpr(4):
                at = 32 * span + 16 * h + 4 * w
                words = [prims.f32_to_bits(values[at + i]) for i in range(4)]
                offset = ((column * spans + span) * 64 + quad * 16 + 4 * w) * 4
                if live[h]:
                    prims.st_v4(dests[h] + Int64(offset), *words)


def row_values(acc: cute.Tensor, chunks: range, h: int) -> list[Float32]:
    """A thread's values of row half h in some chunks of 8 columns, two of each (fragment order, MathThread)."""
    return [acc[4 * chunk + 2 * h + e] for chunk in chunks for e in range(2)]


@cute.jit
def bf16_words(values: list, factor: Float32 | None) -> list:
    """Words of two bf16 each, the first in the low half: values, times a factor if there is one."""
    words = []
    for i in cutlass.range_constexpr(0, len(values), 2):
        low, high = values[i], values[i + 1]
        if cutlass.const_expr(factor is not None):
            low, high = low * factor, high * factor
        words.append(prims.f32_pair_to_bf16(low, high))
    return words


@cute.jit
def store_preactivation(
    intermediate: cutlass.Constexpr,
    acc: cute.Tensor,
    span: Int32,
    factor: Float32,
    scaled: cutlass.Constexpr,
    quad: Int32,
    dests: tuple,
    live: tuple,
):
    """Store one pass' gate and up, before clamp and SwiGLU, into two bf16 rows [2 * intermediate], gate first.

    span: the pass' number in its row; its columns start at 64 * span. scaled and factor: as in activate().
    """
    for h in cutlass.range_constexpr(2):
        if live[h]:
            at = dests[h] + Int64(span * 64 + quad * 16) * 2
            for part in cutlass.range_constexpr(2):
                for piece in cutlass.range_constexpr(2):
                    chunks = range(8 * piece + part, 8 * piece + 8, 2)
                    words = bf16_words(row_values(acc, chunks, h), factor if cutlass.const_expr(scaled) else None)
                    prims.st_v4(at + (2 * intermediate * part + 16 * piece), *words)


@cute.jit
def store_output(acc: cute.Tensor, factors: tuple, column: Int32, quad: Int32, dests: tuple, live: tuple):
    """FC2's accumulators, times a factor for each row half (or none), to two bf16 rows."""
    for h in cutlass.range_constexpr(2):
        for piece in cutlass.range_constexpr(4):
            values = row_values(acc, range(4 * piece, 4 * piece + 4), h)
            words = bf16_words(values, factors[h] if cutlass.const_expr(len(factors) == 2) else None)
            if live[h]:
                prims.st_v4(dests[h] + Int64(column * 256 + 64 * piece + quad * 16), *words)


class Late(NamedTuple):
    """What a math thread has yet to store of its last work item: registers, which loops and ifs may change.

    words int32: whether there is any, its column tile, whether each of its two rows is live. at int64, factors fp32: of
    each row, as store_output's dests and factors.
    """

    words: cute.Tensor
    at: cute.Tensor
    factors: cute.Tensor


@cute.jit
def make_late() -> Late:
    """A Late of a thread that has stored all."""
    late = Late(*(cute.make_rmem_tensor(n, kind) for n, kind in ((4, Int32), (2, Int64), (2, Float32))))
    late.words[0] = Int32(0)
    return late


@cute.jit
def keep_late(late: Late, factors: tuple, column: Int32, dests: tuple, live: tuple):
    """What store_late then stores, in place of store_output: its arguments, for accumulators that stay as they are."""
    late.words[0], late.words[1] = Int32(1), column
    for h in cutlass.range_constexpr(2):
        late.words[2 + h], late.at[h], late.factors[h] = Int32(live[h]), dests[h], factors[h]


@cute.jit
def store_late(late: Late, acc: cute.Tensor, quad: Int32):
    """store_output of what keep_late was given last, if it ever was."""
    if late.words[0] != 0:
        live = (late.words[2] != 0, late.words[3] != 0)
        store_output(acc, (late.factors[0], late.factors[1]), late.words[1], quad, (late.at[0], late.at[1]), live)


@cute.jit
def row_live(row: Int32, end: Int32) -> Boolean:
    """Whether a pool row belongs to the tile's expert, which ends at `end`."""
    return row < end
