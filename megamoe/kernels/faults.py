"""Switches that tests compile into kernels to prove that what they guard is needed. Off in any layer."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from . import prims


@dataclass(frozen=True)
class Faults:
    """skip_list_wait, skip_return_wait: leave the flag wait of pull or reduce out.

    delay_us: each CTA sleeps a pseudo-random time up to this before it publishes or consumes.
    """

    skip_list_wait: bool = False
    skip_return_wait: bool = False
    delay_us: int = 0


NO_FAULTS = Faults()


@cute.jit
def random_delay(faults: cutlass.Constexpr):
    """Sleep up to faults.delay_us, a different time in each CTA and run; nothing at all when it is 0."""
    if cutlass.const_expr(faults.delay_us > 0):
        block, _, _ = cute.arch.block_idx()
        start = prims.globaltimer()
        mixed = (Int32(start & 0xFFFFF) * 1103515 + block * 7919) & 0x7FFFFFFF
        until = start + Int64(mixed % (faults.delay_us * 1000))
        while prims.globaltimer() < until:
            prims.nanosleep(Int32(500))
