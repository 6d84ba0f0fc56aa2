"""Block scales of a grouped FP8 GEMM on their way from global to shared memory, by the TMA warp alone.

Scales of rows lie behind the codes in their records: one TMA brings those of WINDOW K blocks for a whole tile. Scales
of weights, fp32 [experts, n / 128, k_blocks], come once a work item, a plain bulk copy for each of its scale blocks.
Both are counted by the full barrier of the stage that they come with, but are read longer, so they have slots of their
own; sched.tiles.slots_for says how many are enough without another barrier. Each CTA of a cluster loads its own.

Source: PTX ISA, "cp.async.bulk", "cp.async.bulk.tensor" (16 bytes are the least, and the alignment).
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import AddressSpace, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from ..config import BLOCK
from ..sched import tiles
from ..sched.tiles import WINDOW
from . import prims
from .gemm_tiles import GemmSpec, Tile


class ScaleSlots(NamedTuple):
    """Shared memory: rows fp32 [tile_rows, WINDOW * groups, window_slots]; weights, address of item_slots times
    w_scales rows of w_row_bytes each."""

    rows: cute.Tensor
    weights: Int32


class ScaleSource(NamedTuple):
    """Global memory: TMA of row scales [R, k / group], and the address of weight scales [experts, n/128, k_blocks]."""

    atom: cute.CopyAtom
    rows: cute.Tensor
    weights: Int64


class ScalePlace(NamedTuple):
    """Where a math thread finds the scales of one pass. weights: shared addresses of its weight scale rows, K block 0
    first; rows: that of its row's first window slot; window: number of the pass' first window."""

    weights: tuple
    rows: Int32
    window: Int32


def _window_layout(gemm: GemmSpec, slots: int) -> cute.Layout:
    """[tile_rows, WINDOW * groups, slots] of row scales; a row's lie side by side, as in its record."""
    columns = WINDOW * gemm.groups
    return cute.make_layout((gemm.tile_rows, columns, slots), stride=(columns, 1, gemm.tile_rows * columns))


@cute.jit
def make_slots(gemm: cutlass.Constexpr) -> ScaleSlots:
    """Allocate the slots."""
    smem = cutlass.memory.SmemAllocator()
    rows = smem.allocate_tensor(Float32, _window_layout(gemm, gemm.window_slots), byte_alignment=128)
    return ScaleSlots(rows, prims.smem_addr(smem.allocate(gemm.w_slots_bytes, 16)))


def make_source(gemm: GemmSpec, rows: Int64, weights: Int64, rows_total: Int32) -> ScaleSource:
    """Host side. rows: address of pool row 0's first scale; weights: as in ScaleSource."""
    pointer = cute.make_ptr(Float32, rows, AddressSpace.gmem, assumed_align=16)
    shape = (rows_total, gemm.k_blocks * gemm.groups)
    tensor = cute.make_tensor(pointer, cute.make_layout(shape, stride=(gemm.pitch // 4, 1)))
    box = cute.slice_(_window_layout(gemm, 1), (None, None, 0))
    return ScaleSource(*cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tensor, box, box.shape), weights)


# ---- which scales a tile has ---------------------------------------------------------------------


@cute.jit
def weight_row(gemm: cutlass.Constexpr, tile: Tile, w: cutlass.Constexpr) -> Int32:
    """Row of the weight scales, of [experts * n / 128, k_blocks], for scale w of a work item."""
    first = tile.column * (gemm.passes * gemm.halves) // gemm.scale_tiles
    return tile.expert * (gemm.n // BLOCK) + first + w * gemm.scale_step


@cute.jit
def weights_at(gemm: cutlass.Constexpr, slots: ScaleSlots, item: Int32, w: cutlass.Constexpr) -> Int32:
    """Shared address of the slot for scale row w of the CTA's work item number `item`."""
    return slots.weights + ((item & (gemm.item_slots - 1)) * gemm.w_scales + w) * gemm.w_row_bytes


# ---- producer ------------------------------------------------------------------------------------


@cute.jit
def row_windows(
    gemm: cutlass.Constexpr, source: ScaleSource, slots: ScaleSlots, tile: Tile
) -> tuple[cute.Tensor, cute.Tensor]:
    """TMA views of row scales: the slots, and the windows of a tile."""
    shifted = cute.domain_offset((tile.row, 0), source.rows)
    windows = cute.local_tile(shifted, (gemm.tile_rows, WINDOW * gemm.groups), (0, None))
    return cpasync.tma_partition(
        *(source.atom, 0, cute.make_layout(1)), cute.group_modes(slots.rows, 0, 2), cute.group_modes(windows, 0, 2)
    )


@cute.jit
def due_bytes(gemm: cutlass.Constexpr, tile: Tile, number: cutlass.Constexpr, kb: Int32) -> Int32:
    """Bytes of scales that come with K block kb of pass `number`."""
    due = Int32(0)
    if kb % WINDOW == 0:
        due += gemm.window_bytes
    if cutlass.const_expr(number == 0):
        if kb == 0:
            for w in cutlass.range_constexpr(gemm.w_scales):
                due += tiles.row_granules(weight_row(gemm, tile, w), gemm.k_blocks)
    return due


@cute.jit
def copy_due(
    gemm: cutlass.Constexpr,
    source: ScaleSource,
    slots: ScaleSlots,
    windows: tuple[cute.Tensor, cute.Tensor],
    tile: Tile,
    item: Int32,
    number: cutlass.Constexpr,
    kb: Int32,
    full: cute.Pointer,
):
    """TMA warp, all lanes: issue the copies of due_bytes. windows: of row_windows; item: the CTA's number of the work
    item, from 0."""
    if kb % WINDOW == 0:
        slot = (item * gemm.item_windows + number * gemm.windows + kb // WINDOW) & (gemm.window_slots - 1)
        to, from_rows = windows
        cute.copy(source.atom, from_rows[(None, kb // WINDOW)], to[(None, slot)], tma_bar_ptr=full)
    if cutlass.const_expr(number == 0):
        if kb == 0:
            for w in cutlass.range_constexpr(gemm.w_scales):
                row = weight_row(gemm, tile, w)
                address = source.weights + (Int64(row) * (4 * gemm.k_blocks) - tiles.row_misfit(row, gemm.k_blocks))
                to_row = weights_at(gemm, slots, item, w)
                with cute.arch.elect_one():
                    prims.bulk_load(
                        to_row, address, Int32(tiles.row_granules(row, gemm.k_blocks)), prims.smem_addr(full)
                    )


# ---- math ----------------------------------------------------------------------------------------


@cute.jit
def place(
    gemm: cutlass.Constexpr, slots: ScaleSlots, tile: Tile, item: Int32, number: cutlass.Constexpr, row: Int32
) -> ScalePlace:
    """Of pass `number` of work item `item`, for a thread whose first row is `row` of the tile."""
    weights = tuple(
        weights_at(gemm, slots, item, w) + tiles.row_misfit(weight_row(gemm, tile, w), gemm.k_blocks)
        for w in range(gemm.w_scales)
    )
    rows = prims.smem_addr(slots.rows.iterator) + row * (4 * WINDOW * gemm.groups)
    return ScalePlace(weights, rows, item * gemm.item_windows + number * gemm.windows)


@cute.jit
def math_place(gemm: cutlass.Constexpr, slots: ScaleSlots, tile: Tile, item: Int32, group: Int32) -> ScalePlace:
    """place for math warpgroup `group` with swapped operands: FC2's with two weight tiles have one each."""
    at = place(gemm, slots, tile, item, 0, Int32(0))
    if cutlass.const_expr(not gemm.paired and gemm.halves == 2):
        at = at._replace(weights=(at.weights[0] + group * (at.weights[1] - at.weights[0]),))
    return at


@cute.jit
def read(gemm: cutlass.Constexpr, at: ScalePlace, kb: Int32, rows: cute.Tensor, weights: cute.Tensor):
    """Start to read the scales of K block kb: rows[2g + h], of row half h in group g, and weights[w]."""
    for w in cutlass.range_constexpr(gemm.w_scales):
        weights[w] = prims.smem_ld_f32(at.weights[w] + 4 * kb)
    slot = (at.window + kb // WINDOW) & (gemm.window_slots - 1)
    first = at.rows + slot * gemm.window_bytes + kb % WINDOW * (4 * gemm.groups)
    for h in cutlass.range_constexpr(2):
        for g in cutlass.range_constexpr(gemm.groups):
            rows[2 * g + h] = prims.smem_ld_f32(first + 4 * (8 * h * WINDOW * gemm.groups + g))
