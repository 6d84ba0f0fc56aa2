"""The producers' queue of work items with Knobs.schedule = "atomic": whoever is free takes the next one.

Global memory holds two words a GEMM: tickets taken beyond every cluster's first item, and clusters that are done; the
last one clears both, so that a launch finds them as it left them. Of a cluster the first CTA's producer takes a ticket
when it begins an item, so that the answer is there when the item ends, and sends it to the producers of all its CTAs.
Math warps hear of items, and of the end, from their CTA's ring (gemm_ring.tell_tile).

Source: PTX ISA, "st.async".
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Boolean, Int32, Int64

from . import prims


class Queue(NamedTuple):
    """tickets: address of the two words. items: shared address of int32 [queue_slots], numbers of items to come; full:
    a barrier for each."""

    tickets: Int64
    items: Int32
    full: cute.Pointer


@cute.jit
def make_queue(gemm: cutlass.Constexpr, tickets: Int64) -> Queue:
    """Allocate a queue; one thread of the CTA must call init_queue before a barrier of the cluster."""
    smem = cutlass.memory.SmemAllocator()
    full = smem.allocate_array(Int64, gemm.queue_slots)
    return Queue(tickets, prims.smem_addr(smem.allocate(4 * gemm.queue_slots, 4)), full)


@cute.jit
def init_queue(gemm: cutlass.Constexpr, queue: Queue):
    """One thread: initialise the barriers: the own producer arrives once, in a cluster expecting the item's bytes."""
    for slot in cutlass.range_constexpr(gemm.queue_slots):
        cute.arch.mbarrier_init(queue.full + slot, 1)


@cute.jit
def first_cta(gemm: cutlass.Constexpr) -> Boolean:
    """Whether this is the first CTA of its cluster, for one lane: gemm_tiles.cluster_rank waits for all of them."""
    first = Boolean(True)
    if cutlass.const_expr(gemm.cluster > 1):
        first = cute.arch.block_idx_in_cluster() == 0
    return first


@cute.jit
def request(gemm: cutlass.Constexpr, queue: Queue, item: Int32):
    """Producer, one lane, when the CTA begins its item number `item`: have the number of the next one sent.

    GemmSpec.queue_slots says why the slot is free.
    """
    slot = item & (gemm.queue_slots - 1)
    if cutlass.const_expr(gemm.cluster == 1):
        grid, _, _ = cute.arch.grid_dim()
        prims.smem_st(queue.items + 4 * slot, grid + prims.atom_add_i32(queue.tickets, Int32(1)))
        cute.arch.mbarrier_arrive(queue.full + slot)
    else:
        cute.arch.mbarrier_arrive_and_expect_tx(queue.full + slot, 4)
        if first_cta(gemm):
            grid, _, _ = cute.arch.grid_dim()
            following = grid // gemm.cluster + prims.atom_add_i32(queue.tickets, Int32(1))
            at, barrier = queue.items + 4 * slot, prims.smem_addr(queue.full + slot)
            for cta in cutlass.range_constexpr(gemm.cluster):
                prims.send_i32(prims.peer_smem(at, cta), following, prims.peer_smem(barrier, cta))


@cute.jit
def receive(gemm: cutlass.Constexpr, queue: Queue, item: Int32) -> Int32:
    """Producer, all lanes, after request(item): the next item of the cluster; past the last one when there is none."""
    slot = item & (gemm.queue_slots - 1)
    cute.arch.mbarrier_wait(queue.full + slot, item // gemm.queue_slots % 2)
    return cute.arch.make_warp_uniform(prims.smem_ld(queue.items + 4 * slot))


@cute.jit
def leave(gemm: cutlass.Constexpr, queue: Queue):
    """Producer of the first CTA, one lane, when its cluster has no more items: the last cluster clears the words."""
    if first_cta(gemm):
        grid, _, _ = cute.arch.grid_dim()
        if prims.atom_add_i32(queue.tickets + 4, Int32(1)) == grid // gemm.cluster - 1:
            prims.st_i32(queue.tickets, Int32(0))
            prims.st_i32(queue.tickets + 4, Int32(0))
