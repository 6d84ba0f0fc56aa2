"""The producer warp of a grouped FP8 GEMM: it issues TMA of both operands, and of block scales (gemm_scales.py).

CTAs in a row of a cluster run neighbouring column tiles of the same rows: with two, each loads half of A for both.
CTAs in a column run two row tiles and the same columns: each loads half of every weight tile for both. Where all
CTAs run one row tile instead, an expert's odd last one (sched/tiles.py), each loads its own weights, and shares A: with
those in its row, or with a single column of CTAs with that.

Source: PTX ISA, "cp.async.bulk.tensor".
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Boolean, Int16, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from ..config import BLOCK
from . import gemm_columns, gemm_scales, trace
from .gemm_queue import Queue, init_queue, leave, make_queue, receive, request
from .gemm_ring import FP8_TYPES, Ring, advance, init_ring, make_ring, smem_layout, tell_end, tell_tile
from .gemm_scales import ScaleSource
from .gemm_tiles import (
    GemmSpec,
    Schedule,
    Tile,
    cluster_place,
    fill_schedule,
    find_tile,
    first_item,
    make_schedule,
    total_tiles,
)
from .trace import Phase, Role

PRODUCER_REGISTERS = 40


class Operands(NamedTuple):
    """TMA of one GEMM: atoms and coordinate tensors of A [R, k] and B [experts * n, k].

    alone: with two rows of CTAs, the atom and tensor of B without multicast; else (). both: those of A for all CTAs of
    such a cluster, where GemmSpec.shares_rows; else (). few: an atom and tensor of A for each of GemmSpec.loads.
    scales: None without block scales.
    """

    atom_a: cute.CopyAtom
    a: cute.Tensor
    atom_b: cute.CopyAtom
    b: cute.Tensor
    alone: tuple
    both: tuple
    few: tuple
    scales: ScaleSource | None


def make_operands(gemm: GemmSpec, a: Int64, b: Int64, w_scale: Int64, rows_total: Int32) -> Operands:
    """Host side: TMA descriptors of A (records of `pitch` bytes, scales behind the codes) and B, from device addresses.
    w_scale: address of B's block scales, fp32 [experts, n / 128, k_blocks]; without them, of anything.

    rows_total may be the pool's capacity; a tile that reads past it gets zeros.
    """
    dtype = FP8_TYPES[gemm.fp8]

    def tma(address, rows, stride, tile_rows, multicast):
        pointer = cute.make_ptr(dtype, address, AddressSpace.gmem, assumed_align=BLOCK)
        tensor = cute.make_tensor(pointer, cute.make_layout((rows, gemm.k), stride=(stride, 1)))
        layout = cute.slice_(smem_layout(gemm, tile_rows, 1), (None, None, 0))
        op = cpasync.CopyBulkTensorTileG2SOp()
        if multicast > 1:
            op = cpasync.CopyBulkTensorTileG2SMulticastOp()
        return cpasync.make_tiled_tma_atom(op, tensor, layout, (tile_rows, BLOCK), num_multicast=multicast)

    rows_b = Int32(gemm.experts * gemm.n)
    return Operands(
        *tma(a, rows_total, gemm.pitch, gemm.tile_rows, gemm.cluster_cols),
        *tma(b, rows_b, gemm.k, BLOCK, gemm.cluster_rows),
        tuple(tma(b, rows_b, gemm.k, BLOCK, 1)) if gemm.cluster_rows > 1 else (),
        tuple(tma(a, rows_total, gemm.pitch, gemm.tile_rows, gemm.cluster_rows)) if gemm.shares_rows else (),
        tuple(tuple(tma(a, rows_total, gemm.pitch, rows, 1)) for rows in gemm.loads),
        gemm_scales.make_source(gemm, a + gemm.k, w_scale, rows_total) if gemm.scaled else None,
    )


@cute.jit
def weight_tiles(
    gemm: cutlass.Constexpr,
    atom: cute.CopyAtom,
    b: cute.Tensor,
    ring: Ring,
    n_tile: Int32,
    part: Int32 | int,
    parts: cutlass.Constexpr,
) -> tuple[cute.Tensor, list[cute.Tensor]]:
    """TMA views of part `part` of `parts` of the ring's weight tiles, and of each half's source from n_tile on."""
    layout, sources = cute.make_layout(parts), []
    for half in cutlass.range_constexpr(gemm.halves):
        gb = cute.local_tile(b, (BLOCK, BLOCK), (n_tile + half, None))
        to, source = cpasync.tma_partition(
            atom, part, layout, cute.group_modes(ring.b, 0, 2), cute.group_modes(gb, 0, 2)
        )
        sources.append(source)
    return to, sources


@cute.jit
def copy_weights(
    gemm: cutlass.Constexpr,
    atom: cute.CopyAtom,
    sources: list[cute.Tensor],
    to: cute.Tensor,
    kb: Int32,
    stage: Int32,
    full: cute.Pointer,
    mask: Int16 | None,
):
    """Issue TMA of weight_tiles' halves of K block kb. mask: the CTAs it goes to, else this one."""
    for half in cutlass.range_constexpr(gemm.halves):
        here = to[(None, stage * gemm.halves + half)]
        if cutlass.const_expr(mask is None):
            cute.copy(atom, sources[half][(None, kb)], here, tma_bar_ptr=full)
        else:
            cute.copy(atom, sources[half][(None, kb)], here, tma_bar_ptr=full, mcast_mask=mask)


@cute.jit
def row_tiles(
    gemm: cutlass.Constexpr,
    atom: cute.CopyAtom,
    a: cute.Tensor,
    ring: Ring,
    tile: Tile,
    rows: cutlass.Constexpr,
    part: Int32,
    parts: cutlass.Constexpr,
) -> tuple[cute.Tensor, cute.Tensor]:
    """TMA views of part `part` of `parts` of the first `rows` rows of the ring's A, and of a tile's."""
    shifted = cute.domain_offset((tile.row, 0), a)
    source = cute.local_tile(shifted, (rows, BLOCK), (0, None))
    here = cute.local_tile(ring.a, (rows, BLOCK), (0, 0, None))
    layout = cute.make_layout(parts)
    return cpasync.tma_partition(atom, part, layout, cute.group_modes(here, 0, 2), cute.group_modes(source, 0, 2))


class RowLoads(NamedTuple):
    """TMA views (to, from) of a tile's rows, for each atom of Operands: all of them, all for both CTAs of a column (or
    ()), the first of GemmSpec.loads. count: how many to load, tile_rows or one of loads; due: a stage's bytes then."""

    whole: tuple
    both: tuple
    few: list
    count: Int32
    due: Int32


@cute.jit
def row_loads(gemm: cutlass.Constexpr, ops: Operands, ring: Ring, tile: Tile) -> RowLoads:
    """Views of a tile's rows, and how many of them this CTA loads: no more than the least of loads that holds the live
    ones."""
    place = cluster_place(gemm)
    whole = row_tiles(gemm, ops.atom_a, ops.a, ring, tile, gemm.tile_rows, place[1], gemm.cluster_cols)
    both, few, count = (), [], Int32(gemm.tile_rows)
    if cutlass.const_expr(gemm.shares_rows):
        both = row_tiles(gemm, *ops.both, ring, tile, gemm.tile_rows, place[0], gemm.cluster_rows)
    live = cute.arch.make_warp_uniform(tile.end - tile.row)
    for i in cutlass.range_constexpr(len(gemm.loads) - 1, -1, -1):
        few.insert(0, row_tiles(gemm, *ops.few[i], ring, tile, gemm.loads[i], 0, 1))
        if live <= gemm.loads[i]:
            count = Int32(gemm.loads[i])
    return RowLoads(whole, both, few, count, gemm.stage_bytes - (gemm.tile_rows - count) * BLOCK)


@cute.jit
def copy_rows(
    gemm: cutlass.Constexpr, ops: Operands, loads: RowLoads, tile: Tile, kb: Int32, stage: Int32, full: cute.Pointer
):
    """Issue TMA of a tile's rows (row_loads) of K block kb to a stage, whose full barrier counts the bytes: to this
    CTA, and what CTAs of a row or a column share to all of them."""
    to, source = loads.whole
    if cutlass.const_expr(gemm.cluster_cols > 1):
        place = cluster_place(gemm)
        mask = Int16(((1 << gemm.cluster_cols) - 1) << place[0] * gemm.cluster_cols)
        cute.copy(ops.atom_a, source[(None, kb)], to[(None, stage)], tma_bar_ptr=full, mcast_mask=mask)
    else:
        for i in cutlass.range_constexpr(len(gemm.loads)):
            if loads.count == gemm.loads[i]:
                to_few, few = loads.few[i]
                cute.copy(ops.few[i][0], few[(None, kb)], to_few[(None, stage)], tma_bar_ptr=full)
        if loads.count == gemm.tile_rows:
            together = not tile.stacked if gemm.shares_rows else False
            if together:
                if cutlass.const_expr(gemm.shares_rows):
                    everybody = Int16((1 << gemm.cluster_rows) - 1)
                    to_both, both = loads.both
                    there = to_both[(None, stage)]
                    cute.copy(ops.both[0], both[(None, kb)], there, tma_bar_ptr=full, mcast_mask=everybody)
            else:
                cute.copy(ops.atom_a, source[(None, kb)], to[(None, stage)], tma_bar_ptr=full)


@cute.jit
def produce_tile(
    gemm: cutlass.Constexpr,
    ops: Operands,
    ring: Ring,
    tile: Tile,
    stage: Int32,
    phase: Int32,
    item: Int32,
    pen: trace.Tracer | None,
) -> tuple[Int32, Int32]:
    """TMA warp, all lanes: load every K block of a work item. Returns the ring state after it.

    item: the CTA's number of it, from 0. pen: see trace.py.
    """
    place = cluster_place(gemm)
    rows = row_loads(gemm, ops, ring, tile)
    if cutlass.const_expr(gemm.scaled):
        windows = gemm_scales.row_windows(gemm, ops.scales, ring.scales, tile)
    trace.mbarrier_wait(pen, ring.empty + stage, phase ^ 1)  # here too: what the stage told of its last tile is read
    with cute.arch.elect_one():
        tell_tile(ring, stage, tile)
    for number in cutlass.range_constexpr(gemm.passes):
        n_tile = tile.expert * (gemm.n // BLOCK) + (tile.column * gemm.passes + number) * gemm.halves
        to_b, from_b = weight_tiles(gemm, ops.atom_b, ops.b, ring, n_tile, place[0], gemm.cluster_rows)
        if cutlass.const_expr(gemm.cluster_rows > 1):
            to_alone, from_alone = weight_tiles(gemm, *ops.alone, ring, n_tile, 0, 1)
        for kb in cutlass.range(gemm.k_blocks, unroll=1):
            full = ring.full + stage
            trace.mbarrier_wait(pen, ring.empty + stage, phase ^ 1)
            due = rows.due
            if cutlass.const_expr(gemm.scaled):
                due += gemm_scales.due_bytes(gemm, tile, number, kb)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, due)
            copy_rows(gemm, ops, rows, tile, kb, stage, full)
            if cutlass.const_expr(gemm.cluster_rows == 1):
                copy_weights(gemm, ops.atom_b, from_b, to_b, kb, stage, full, None)
            elif tile.stacked:
                column = Int16((1 + (1 << gemm.cluster_cols)) << place[1])
                copy_weights(gemm, ops.atom_b, from_b, to_b, kb, stage, full, column)
            else:
                copy_weights(gemm, ops.alone[0], from_alone, to_alone, kb, stage, full, None)
            if cutlass.const_expr(gemm.scaled):
                gemm_scales.copy_due(gemm, ops.scales, ring.scales, windows, tile, item, number, kb, full)
            stage, phase = advance(gemm, stage, phase)
    return stage, phase


# ---- roles ---------------------------------------------------------------------------------------


@cute.jit
def start(
    gemm: cutlass.Constexpr, ops: Operands, expert_start: Int64, tickets: Int64
) -> tuple[Ring, Schedule, Queue | None]:
    """The whole CTA: (ring, schedule, queue of an atomic schedule), ready for use."""
    ring = make_ring(gemm)
    queue = make_queue(gemm, tickets) if gemm.atomic else None
    schedule = make_schedule(gemm)
    warp = cute.arch.warp_idx()
    if warp == 0:
        fill_schedule(gemm, schedule, expert_start)
    if warp == 4 * gemm.warpgroups:
        cpasync.prefetch_descriptor(ops.atom_a)
        cpasync.prefetch_descriptor(ops.atom_b)
        if cutlass.const_expr(gemm.cluster_rows > 1):
            cpasync.prefetch_descriptor(ops.alone[0])
        if cutlass.const_expr(gemm.shares_rows):
            cpasync.prefetch_descriptor(ops.both[0])
        for i in cutlass.range_constexpr(len(gemm.loads)):
            cpasync.prefetch_descriptor(ops.few[i][0])
        if cutlass.const_expr(gemm.scaled):
            cpasync.prefetch_descriptor(ops.scales.atom)
        with cute.arch.elect_one():
            if cutlass.const_expr(gemm.atomic):
                init_queue(gemm, queue)
            init_ring(gemm, ring)
    meet(gemm)
    return ring, schedule, queue


@cute.jit
def meet(gemm: cutlass.Constexpr):
    """Barrier of all threads that share stages: the CTA, or its cluster."""
    if cutlass.const_expr(gemm.cluster == 1):
        cute.arch.sync_threads()
    else:
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()


@cute.jit
def producer_role(
    gemm: cutlass.Constexpr,
    ops: Operands,
    ring: Ring,
    schedule: Schedule,
    queue: Queue | None,
    records: cutlass.Constexpr,
    buffer: Int64 | None,
):
    """The producer warpgroup of a staged kernel: every tile of this CTA, by one of its warps.

    records, buffer: see trace.tracer; the slot of this warp comes after those of the math warpgroups.
    """
    cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
    if cute.arch.warp_idx() == 4 * gemm.warpgroups:
        pen = trace.tracer(records, buffer, Int32(gemm.warpgroups), cute.arch.lane_idx() == 0)
        stage, phase, item = Int32(0), Int32(0), Int32(0)
        index, step = first_item(gemm)
        total = total_tiles(gemm, schedule)
        while index < total:
            tile = find_tile(gemm, schedule, index)
            if cutlass.const_expr(gemm.atomic):
                with cute.arch.elect_one():
                    request(gemm, queue, item)
            since = trace.begin(pen)
            stage, phase = produce_tile(gemm, ops, ring, tile, stage, phase, item, pen)
            trace.end(pen, since, Role.TMA, Phase.LOAD, tile.index)
            if cutlass.const_expr(gemm.atomic):
                index = receive(gemm, queue, item)
            else:
                index += step
            item += 1
        if cutlass.const_expr(gemm.atomic):
            trace.mbarrier_wait(pen, ring.empty + stage, phase ^ 1)
            with cute.arch.elect_one():
                tell_end(ring, stage)
                cute.arch.mbarrier_arrive(ring.full + stage)
                leave(gemm, queue)
    if cutlass.const_expr(gemm.swapped and gemm.scaled):
        if cute.arch.warp_idx() == 4 * gemm.warpgroups + 1:
            gemm_columns.order_role(gemm, ring, schedule)


@cute.jit
def is_producer(gemm: cutlass.Constexpr) -> Boolean:
    """Whether this warp is in the producer warpgroup, the last of the CTA."""
    return cute.arch.warp_idx() >= 4 * gemm.warpgroups
