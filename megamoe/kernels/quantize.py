"""Quantisation on the device, to the bit what numerics.py defines, with a fraction of the instructions."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from ..config import FP8_MAX
from ..numerics import AMAX_FLOOR
from . import prims


@cute.jit
def group_scale(amax: Float32, fp8: cutlass.Constexpr) -> Float32:
    """Scale of a group: max(amax, floor) / fp8_max."""
    return prims.div_rn(prims.fmax(amax, Float32(AMAX_FLOOR)), Float32(FP8_MAX[fp8]))


@cute.jit
def codes_of(values: list, scale: Float32, bounded: cutlass.Constexpr, fp8: cutlass.Constexpr) -> list:
    """FP8 codes of values / scale, four in a word, the first in the lowest byte; len(values) % 4 == 0.

    The quotient is IEEE division's: with r = 1 / scale correctly rounded and q = value * r, the excess
    q * scale - value is exact in one fma and q - excess * r is the correctly rounded quotient (P.
    Markstein, IBM J. Res. Dev. 34, 1990). One division for all values, then three instructions each. In
    this order of signs -0 stays -0.
    bounded: |value| <= scale * fp8_max holds (block scales); else q is first held to twice fp8_max, so that
    an overflow saturates. NaN stays NaN. In a group that holds an infinity every code is NaN.
    """
    reciprocal = prims.div_rn(Float32(1.0), scale)
    limit = Float32(2.0 * FP8_MAX[fp8])
    quotients = []
    for i in cutlass.range_constexpr(len(values)):
        rough = values[i] * reciprocal
        if cutlass.const_expr(not bounded):
            rough = prims.fmax(-limit, -prims.fmax(-limit, -rough))
        excess = prims.fma(rough, scale, -values[i])
        quotients.append(prims.fma(excess, -reciprocal, rough))
    return [
        prims.f32_quad_to_fp8(quotients[i], quotients[i + 1], quotients[i + 2], quotients[i + 3], fp8)
        for i in range(0, len(quotients), 4)
    ]
