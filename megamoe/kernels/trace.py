"""A timeline of what each warp role did: records that kernels write when their spec asks for it.

With `spec.trace` = 0 every function here compiles to nothing. Else `spec.trace` is the number of records that a
recording warp has room for, and the launch takes the address of a buffer after the stream (build.py). The buffer is
int64 [CTAs, SLOTS, 1 + spec.trace, FIELDS]: each recording warp owns the slice of its CTA and slot and writes it with
one lane, so there are no atomics. Record 0 of a slice is its header: word 0 counts the records that were asked for,
also those past the end, which are dropped. A count that is not cleared goes on in the next launch.

A record: start ns; end ns; role | phase << 8 | SM << 16 | tile << 32; ns of it waited | the SM's cycles at its end
<< 32. Times are %globaltimer's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from enum import IntEnum
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Boolean, Int32, Int64

from . import build, prims

SLOTS = 4
FIELDS = 4
NO_TILE = -1
ROOM, OTHER_ROOM = {"fc1": 4096, "fc2": 4096}, 256
"""Records of a recording warp that buffers() has room for: of the GEMMs, 32768 tokens on one GPU."""
GEMMS, LARGEST_CLUSTER = ("fc1", "fc2"), 4
"""CTAs of a cluster of any Knobs, 2 x 2: gemm_tiles.whole_clusters launches one cluster even where SMs are fewer."""


class Role(IntEnum):
    """Which warps of a CTA a record is about."""

    CTA = 0  # all warps do the same; the first one stands for them
    COPIER = 1
    TMA = 2
    MATH = 3


class Phase(IntEnum):
    """What they did. tools/timeline.py says which of these wait, and for what."""

    WAIT_LISTS = 0
    WAIT_ROWS = 1
    COUNT = 2
    QUANTIZE = 3
    SEND = 4
    PUBLISH = 5
    LAY_OUT = 6
    COPY = 7
    DRAIN = 8
    LOAD = 9
    MAIN_LOOP = 10
    ACTIVATE = 11
    STORE = 12
    SUM = 13
    FINISH = 14


class Tracer(NamedTuple):
    """One thread's pen. at: address of its slice, 0 in threads that only keep time; room: records that fit;
    cells: int32 registers, records so far and ns waited since the last one."""

    at: Int64
    room: Int32
    cells: cute.Tensor


@cute.jit
def tracer(records: cutlass.Constexpr, buffer: Int64 | None, slot: Int32, writes: Boolean):
    """This thread's Tracer for slot 0 .. SLOTS - 1 of its CTA, or None when tracing is compiled out (records = 0).

    writes: true in one lane of the warp that owns the slot, and nowhere else.
    """
    pen = None
    if cutlass.const_expr(records > 0):
        block, _, _ = cute.arch.block_idx()
        cells = cute.make_rmem_tensor(2, Int32)
        cells.fill(0)
        at = Int64(0)
        if writes:
            at = buffer + Int64(block * SLOTS + slot) * ((1 + records) * FIELDS * 8)
            cells[0] = Int32(prims.ld_i64(at))
        pen = Tracer(at, Int32(records), cells)
    return pen


@cute.jit
def begin(pen: Tracer | None):
    """The time, for end() or waited() later; None when tracing is compiled out."""
    return prims.globaltimer() if pen is not None else None


@cute.jit
def waited(pen: Tracer | None, since: Int64 | None):
    """Count the time since begin() as waiting, in the record that end() writes next."""
    if cutlass.const_expr(pen is not None):
        pen.cells[1] += Int32(prims.globaltimer() - since)


@cute.jit
def mbarrier_wait(pen: Tracer | None, barrier: cute.Pointer, parity: Int32):
    """cute.arch.mbarrier_wait, its time counted as waiting."""
    since = begin(pen)
    cute.arch.mbarrier_wait(barrier, parity)
    waited(pen, since)


@cute.jit
def end(pen: Tracer | None, since: Int64 | None, role: cutlass.Constexpr, phase: cutlass.Constexpr, tile: Int32):
    """Write the record of a phase that began at `since`; returns its end, where the next phase may begin."""
    now = None
    if cutlass.const_expr(pen is not None):
        now = prims.globaltimer()
        if pen.at != 0:
            if pen.cells[0] < pen.room:
                at = pen.at + Int64(pen.cells[0] + 1) * (FIELDS * 8)
                prims.st_i64(at, since)
                prims.st_i64(at + 8, now)
                prims.st_i32(at + 16, Int32(int(role) | int(phase) << 8) | (prims.smid() << 16))
                prims.st_i32(at + 20, tile)
                prims.st_i32(at + 24, pen.cells[1])
                prims.st_i32(at + 28, prims.clock())
            pen.cells[0] += 1
            prims.st_i64(pen.at, Int64(pen.cells[0]))
        pen.cells[1] = Int32(0)
    return now


# ---- host ----------------------------------------------------------------------------------------


def traced(kernel: build.DeviceKernel, records: int) -> build.DeviceKernel:
    """A kernel like `kernel` whose recording warps have room for `records` records each."""
    return type(kernel)(replace(kernel.spec, trace=records))


def most_ctas(name: str, num_sms: int) -> int:
    """CTAs that a launch of a kernel may have: stage_grid gives stage eight an SM, all others have one, but a GEMM
    at least a whole cluster."""
    if name in GEMMS:
        return max(num_sms, LARGEST_CLUSTER)
    return num_sms * (8 if name == "stage" else 1)


def buffers(names: Collection[str], num_sms: int, device: torch.device | str) -> dict[str, torch.Tensor]:
    """A cleared buffer, int64 [CTAs, SLOTS, 1 + records, FIELDS], for each kernel of catalog.NAMES in `names`.

    num_sms: at least that of the layer (its world's share, unless it was given another).
    """
    return {
        name: torch.zeros(
            *(most_ctas(name, num_sms), SLOTS, 1 + ROOM.get(name, OTHER_ROOM), FIELDS),
            dtype=torch.int64,
            device=device,
        )
        for name in names
    }


def launcher(kernel: build.DeviceKernel, buffer: torch.Tensor | None) -> Callable[..., None]:
    """build.build(kernel), or with a buffer the same of the traced kernel: it takes the arguments of the plain one."""
    if buffer is None:
        return build.build(kernel)
    launch, address = build.build(traced(kernel, buffer.shape[2] - 1)), buffer.data_ptr()
    return lambda *args: launch(*args, address)
