"""Results of swapped operands, transposed through shared memory: a math thread has 2 weight rows (columns of the
result) times a quarter of the tile's rows, and stores want neighbouring columns of one row.

A batch of GemmSpec.batch_rows rows at a time goes through a buffer of fp32 with transpose_pitch words a row. FC1 puts
activations there, 64 columns of each weight tile, for both math warpgroups: afterwards 4 * halves lanes share a row, as
its scales want. FC2's math warpgroups have a buffer each, of 64 columns. Within 64 columns the order is that of the
weight rows (chunks of 8), so that no bank is met twice on the way in; wire's orders make runs of it on the way out.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from . import prims
from .gemm_main import MathThread
from .gemm_tiles import WARPGROUP, split_width

FIRST_BARRIER = 1
"""Named barrier of both math warpgroups (FC1), or of the first one (FC2); the next one is the second's."""


@cute.jit
def meet(gemm: cutlass.Constexpr, math: MathThread):
    """Barrier of the threads that share a buffer."""
    if cutlass.const_expr(gemm.paired):
        cute.arch.barrier(barrier_id=FIRST_BARRIER, number_of_threads=2 * WARPGROUP)
    else:
        cute.arch.barrier(barrier_id=FIRST_BARRIER + math.first // 64, number_of_threads=WARPGROUP)


def batches(gemm: cutlass.Constexpr, width: int) -> list[range]:
    """Chunks of 8 rows of each batch of a tile of `width` rows."""
    step = gemm.batch_rows // 8
    return [range(first, min(first + step, width // 8)) for first in range(0, width // 8, step)]


def value_at(gemm: cutlass.Constexpr, width: int, part: int, chunk: int) -> tuple[int, int]:
    """(accumulator, first of its 4 values) of rows `chunk` of the tile, and of block `part` of 64 weight rows."""
    across, inner = divmod(8 * chunk, split_width(width)[1])
    return part + gemm.halves * across, inner // 2


@cute.jit
def put(gemm: cutlass.Constexpr, base: Int32, math: MathThread, place: cutlass.Constexpr, word: Int32, values: list):
    """Store one value of each of this thread's two rows in chunk `place` of the batch; word: where in a row."""
    pitch = gemm.transpose_pitch
    for e in cutlass.range_constexpr(2):
        prims.smem_st_f32(base + 4 * ((8 * place + 2 * math.quad + e) * pitch + word), values[e])


class Reader(NamedTuple):
    """A thread on the way out. row: its row of a batch. part: which 16 of the row's columns it has; at: address of its
    first pair of them; live: whether the batch has that row at all."""

    row: Int32
    part: Int32
    at: Int32
    live: Boolean


@cute.jit
def make_reader(gemm: cutlass.Constexpr, base: Int32) -> Reader:
    """This thread's Reader of the buffer at `base`."""
    thread, _, _ = cute.arch.thread_idx()
    lanes = 4
    if cutlass.const_expr(gemm.paired):
        lanes = 4 * gemm.halves
    else:
        thread = thread % WARPGROUP
    row, part = thread // lanes, thread % lanes
    at = base + 4 * (cutlass.min(row, gemm.batch_rows - 1) * gemm.transpose_pitch + part // 4 * 64 + part % 4 * 2)
    return Reader(row, part, at, row < gemm.batch_rows)


@cute.jit
def take(gemm: cutlass.Constexpr, math: MathThread, reader: Reader) -> list[Float32]:
    """After everybody's put(), before the next: the reader's 16 values, those of its quad's two places in each of 8
    chunks of weight rows."""
    meet(gemm, math)
    values = []
    for chunk in cutlass.range_constexpr(8):
        values += list(prims.smem_ld_v2_f32(reader.at + 32 * chunk))
    meet(gemm, math)
    return values
