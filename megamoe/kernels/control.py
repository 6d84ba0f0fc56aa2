"""Bounded waits, the abort protocol and last-CTA counters: DESIGN promises 5 and 6, device side.

`control` is the address of the rank's control block (wire.py); `deltas` the address of int64 [W] with
peer address = local address + delta.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from .. import wire
from ..errors import Cause
from . import prims


@cute.jit
def ended_epoch(control: Int64) -> Int64:
    """The number of the last forward that ended."""
    return prims.ld_i64(control + 8 * wire.EPOCH)


@cute.jit
def running_epoch(control: Int64) -> Int64:
    """The number of the forward in flight: the epoch of the last one that ended, plus one."""
    return ended_epoch(control) + 1


@cute.jit
def aborted(control: Int64) -> Boolean:
    """Whether this rank or a peer has aborted; polled, so never cached."""
    return prims.ld_relaxed_sys(control + 8 * wire.ABORT) != 0


@cute.jit
def cta_aborted(control: Int64) -> Int32:
    """Barrier of the CTA; the same answer (0 or 1) in all its threads, even when an abort arrives meanwhile."""
    flag = Int32(0)
    if aborted(control):
        flag = Int32(1)
    return prims.cta_any(flag)


@cute.jit
def delta_of(deltas: Int64, peer: Int32) -> Int64:
    """What to add to a local arena address to reach `peer`'s."""
    return prims.ld_i64(deltas + Int64(peer) * 8)


@cute.jit
def abort_all(
    control: Int64,
    deltas: Int64,
    world_size: cutlass.Constexpr,
    rank: Int32,
    cause: cutlass.Constexpr,
    phase: cutlass.Constexpr,
    blamed: Int32,
    expert: Int32,
    expected: Int64,
    seen: Int64,
    epoch: Int64,
):
    """One thread: write this rank's record at every peer, then every abort word. First caller only.

    The abort word is taken by compare and swap, so when two ranks abort at once each reader still
    finds one complete record, that of the rank that came first there.
    """
    if prims.cas_sys_i64(control + 8 * wire.CLAIM, Int64(0), Int64(1)) == 0:
        record_of = (int(cause), rank, blamed, int(phase), expert, expected, seen, epoch)  # AbortRecord's order
        record = control + 8 * (wire.RECORDS + Int64(rank) * wire.RECORD_FIELDS)
        for peer in cutlass.range_constexpr(world_size):
            at = record + delta_of(deltas, Int32(peer))
            for i in cutlass.range_constexpr(wire.RECORD_FIELDS):
                prims.st_relaxed_sys(at + 8 * i, Int64(record_of[i]))
        prims.fence_sys()
        for peer in cutlass.range_constexpr(world_size):
            word = control + 8 * wire.ABORT + delta_of(deltas, Int32(peer))
            prims.cas_sys_i64(word, Int64(0), Int64(rank) + 1)


@cute.jit
def wait_flag(flag: Int64, seen: Int64, epoch: Int64, control: Int64):
    """Poll `flag`, acquired at system scope, until it holds `epoch` or later, an abort, or the deadline.

    seen: the flag's value when the caller first acquired it, which it may do before it knows the epoch. Returns
    (seen, timed_out): seen >= epoch is success; timed_out is set only when the deadline passed without an abort,
    and then the caller must abort_all.
    """
    timed_out = Boolean(False)
    stop = Boolean(False)
    polls = Int32(0)
    deadline = Int64(0)
    if seen < epoch:
        deadline = prims.ld_i64(control + 8 * wire.DEADLINE)
    while seen < epoch and not stop:
        if polls > 64:
            prims.nanosleep(Int32(100))
        if aborted(control):
            stop = Boolean(True)
        elif prims.globaltimer() > deadline:
            stop = Boolean(True)
            timed_out = Boolean(True)
        polls += 1
        seen = prims.ld_acquire_sys(flag)
    if seen >= epoch:
        timed_out = Boolean(False)
    return seen, timed_out


@cute.jit
def await_flag(
    control: Int64,
    deltas: Int64,
    world_size: cutlass.Constexpr,
    rank: Int32,
    phase: cutlass.Constexpr,
    source: Int32,
    flag: Int64,
    seen: Int64,
    epoch: Int64,
) -> Int32:
    """One thread: wait_flag for what rank `source` publishes; 1 unless it came. A timeout aborts and blames source."""
    seen, timed_out = wait_flag(flag, seen, epoch, control)
    if timed_out:
        abort_all(*(control, deltas, world_size, rank, Cause.TIMEOUT, phase), *(source, Int32(-1), epoch, seen, epoch))
    return Int32(seen < epoch)


@cute.jit
def arrive_last(counter: Int64, ctas: Int32) -> Boolean:
    """One thread a CTA: count it in; true in the last of `ctas`, which also clears the counter.

    The release half covers what the CTA's other threads wrote before the barrier that precedes it.
    """
    last = prims.atom_add_acq_rel_i64(counter, Int64(1)) == Int64(ctas) - 1
    if last:
        prims.st_i64(counter, Int64(0))
    return last


@cute.jit
def publish(
    control: Int64,
    deltas: Int64,
    world_size: cutlass.Constexpr,
    counter: Int64,
    ctas: Int32,
    flag: Int64,
    epoch: Int64,
):
    """One thread a CTA, after a barrier: the last of `ctas` stores `epoch` in `flag` of every peer, unless aborted.

    Fence, counter, fence and then relaxed stores are a release of what every CTA wrote. A release store a peer would
    each fence again and wait for the one before: at W = 8 that is eight round trips over the link.
    """
    away = [delta_of(deltas, Int32(peer)) for peer in range(world_size)]
    prims.fence_sys()
    if arrive_last(counter, ctas):
        prims.fence_sys()
        if not aborted(control):
            for peer in cutlass.range_constexpr(world_size):
                prims.st_relaxed_sys(flag + away[peer], epoch)
