"""A timeline of what each warp role did: records that kernels write when their spec asks for it.

With `spec.trace` = 0 every function here compiles to nothing. Else `spec.trace` is the number of records that a
recording warp has room for, and the launch takes the address of a buffer after the stream (build.py). The buffer is
int64 [CTAs, SLOTS, 1 + spec.trace, FIELDS]: each recording warp owns the slice of its CTA and slot and writes it with
one lane, so there are no atomics. Record 0 of a slice is its header: word 0 counts the records that were asked for,
also those past the end, which are dropped. A count that is not cleared goes on in the next launch.

A record: start ns; end ns; role | phase << 8 | SM << 16 | tile << 32; ns of it waited. Times are %globaltimer's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from enum import IntEnum
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Boolean, Int32, Int64

from . import prims

SLOTS = 4
FIELDS = 4
NO_TILE = -1


class Role(IntEnum):
    """Which warps of a CTA a record is about."""

    CTA = 0  # all warps do the same; the first one stands for them
    COPIER = 1
    PRODUCER = 2
    MATH = 3


class Phase(IntEnum):
    """What they did. tools/timeline.py says which of these wait, and for what."""

    SET_UP = 0
    WAIT_LISTS = 1
    WAIT_ROWS = 2
    COUNT = 3
    QUANTIZE = 4
    PLACE = 5
    SEND = 6
    PUBLISH = 7
    LAY_OUT = 8
    COPY = 9
    DRAIN = 10
    LOAD = 11
    MAIN_LOOP = 12
    ACTIVATE = 13
    STORE = 14
    SUM = 15
    FINISH = 16


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
                prims.st_i64(at + 24, Int64(pen.cells[1]))
            pen.cells[0] += 1
            prims.st_i64(pen.at, Int64(pen.cells[0]))
        pen.cells[1] = Int32(0)
    return now


# ---- host ----------------------------------------------------------------------------------------


def traced(kernel: Any, records: int) -> Any:
    """A kernel object like `kernel` that writes up to `records` records a slice; `kernel` itself when 0."""
    return type(kernel)(replace(kernel.spec, trace=records)) if records else kernel


def new_buffer(ctas: int, records: int, device: torch.device | str) -> torch.Tensor:
    """A cleared buffer, int64 [ctas, SLOTS, 1 + records, FIELDS], for launches of up to `ctas` CTAs."""
    return torch.zeros(ctas, SLOTS, 1 + records, FIELDS, dtype=torch.int64, device=device)


def with_buffer(launch: Callable[..., None], buffer: torch.Tensor) -> Callable[..., None]:
    """The launcher of a traced kernel that takes the arguments of an untraced one and writes to `buffer`."""
    address = buffer.data_ptr()
    return lambda *args: launch(*args, address)
