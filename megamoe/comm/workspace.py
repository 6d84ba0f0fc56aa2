"""Workspace: the memory, epoch and flags of one MoEConfig on one World, shared by its layers.

It only places things and repairs them after an abort; what the regions hold is wire.py's business, and
kernels get addresses.
"""

from __future__ import annotations

import logging
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

import torch

from .. import wire
from ..config import MoEConfig
from ..errors import AbortRecord, ArgumentError, MegaMoEError, WorldError, aborted
from .device import plain_tensors
from .memory import aligned_bytes
from .ordering import StreamOrder

if TYPE_CHECKING:
    from .world import World

_log = logging.getLogger(__name__)

CLEARED = ("send_counts", "send_cursors", "tickets")
"""Local regions that are zero between forwards."""

KEPT = ("control", *CLEARED)
"""Regions that poison() leaves alone: they carry state from one forward to the next."""

MOST_FORWARDS = 1 << 62
"""No epoch is as large as this: a control block that says so was overwritten."""


class Workspace:
    """Regions of wire.arena_layout and wire.local_layout for every local rank. Made by World.workspace().

    Attributes: cfg, world, arena_layout, local_layout, layers (how many layers took a number), order (of its
    forwards, across threads and streams), enqueueing (a forward's launches have begun and not all been made).
    Addresses are device addresses as ints; `rank` is always one of world.local_ranks.
    """

    def __init__(self, cfg: MoEConfig, world: World) -> None:
        """Collective. Raises WorldError on every rank when memory runs out on one."""
        self.cfg, self.world, self.layers = cfg, world, 0
        self.enqueueing = False
        self.order = StreamOrder()
        self.arena_layout = wire.arena_layout(cfg, world.size)
        self.local_layout = wire.local_layout(cfg, world.size)
        self._local: dict[int, torch.Tensor] = {}
        self._host: dict[int, torch.Tensor] = {}
        self._words: dict[int, Any] = {}  # numpy views of _host: record() is on the path of every forward
        self._scratch: dict[int, torch.Tensor] = {}
        self._scratch_host: dict[int, torch.Tensor] = {}
        self._arena = world.allocate(self.arena_layout.nbytes)
        error: WorldError | None = None
        for rank in world.local_ranks:
            try:
                self._allocate_local(rank)
            except RuntimeError as problem:  # torch's out-of-memory errors are RuntimeErrors
                text = f"cannot allocate {self.local_layout.nbytes} bytes of pools for rank {rank}: {problem}"
                error = WorldError(f"{text} (see memory_estimate)")
                break
        failure = world.failure("allocating pools", error)
        if failure is not None:
            self.free()
            raise failure
        _log.info("%s: %s, for %s", self.world, self.sizes(), cfg)

    def sizes(self) -> str:
        """Memory of a rank in words."""
        return (
            f"arena {self.arena_layout.nbytes / 2**20:.1f} MiB, pools {self.local_layout.nbytes / 2**20:.1f} MiB a rank"
        )

    def _allocate_local(self, rank: int) -> None:
        device = self.world.device(rank)
        pinned = device.type == "cuda"
        with self.world.on(rank), plain_tensors():
            self._local[rank] = aligned_bytes(self.local_layout.nbytes, device, zero=False)
            for name in CLEARED:
                self._bytes(rank, name).zero_()
            self._scratch[rank] = torch.zeros(wire.CONTROL_WORDS, dtype=torch.int64, device=device)
            self._scratch[rank][wire.ABORT] = 1 + rank
            # Pinned memory has one address for host and device (CUDA's unified addressing).
            pin = dict(dtype=torch.int64, device="cpu", pin_memory=pinned)
            self._host[rank] = torch.zeros(wire.HOST_WORDS, **pin)
            self._words[rank] = self._host[rank].numpy()
            self._scratch_host[rank] = torch.zeros(wire.HOST_WORDS, **pin)
        self.world.synchronize()

    def next_layer(self) -> int:
        """The number of a new layer on this workspace: 1, 2, ... It travels in every list header."""
        self.layers += 1
        return self.layers

    def _bytes(self, rank: int, name: str) -> torch.Tensor:
        self.world.require_open(f"workspace region {name!r}")
        for layout, memory in ((self.arena_layout, self._arena.tensors), (self.local_layout, self._local)):
            if name in layout:
                region = layout[name]
                return memory[rank][region.offset : region.offset + region.nbytes]
        raise ArgumentError("region", name, f"one of {', '.join([*self.arena_layout, *self.local_layout])}")

    def address(self, rank: int, region: str) -> int:
        """Device address of a region; a multiple of 256."""
        return self._bytes(rank, region).data_ptr()

    def tensor(self, rank: int, region: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """A view of a region's first bytes. Raises ArgumentError when `shape` does not fit."""
        raw = self._bytes(rank, region)
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if nbytes > raw.numel():
            raise ArgumentError("shape", shape, f"at most {raw.numel()} bytes, the size of {region!r}")
        return raw[:nbytes].view(dtype).view(shape)

    def control(self, rank: int) -> torch.Tensor:
        """The control block: int64 [wire.CONTROL_WORDS]."""
        return self.tensor(rank, "control", torch.int64, (wire.CONTROL_WORDS,))

    def deltas(self, rank: int) -> int:
        """Address of int64 [W]: peer arena address = local arena address + entry."""
        self.world.require_open("workspace deltas")
        return self._arena.deltas[rank].data_ptr()

    def host_address(self, rank: int) -> int:
        """Device address of the rank's pinned host block (wire.HOST_WORDS int64)."""
        self.world.require_open("workspace host block")
        return self._host[rank].data_ptr()

    def scratch_control(self, rank: int) -> int:
        """Address of a control block that reads as aborted, for dry launches.

        A kernel that is given it, with scratch_host, runs to its end and touches no peer.
        """
        self.world.require_open("workspace scratch")
        return self._scratch[rank].data_ptr()

    def scratch_host(self, rank: int) -> int:
        """Device address of a pinned host block that nobody reads, for dry launches."""
        self.world.require_open("workspace scratch")
        return self._scratch_host[rank].data_ptr()

    def record(self, rank: int) -> list[int] | None:
        """The record that an aborted forward left: wire.RECORD_FIELDS ints, or None. Never blocks."""
        self.world.require_open("workspace record")
        words = self._words.get(rank)
        if words is None:  # another thread is closing the world
            raise WorldError("workspace record: its world is being closed")
        if words[wire.HOST_STATE] == 0:
            return None
        # Read after the state word: the device wrote the record before it.
        return words[wire.HOST_RECORD : wire.HOST_RECORD + wire.RECORD_FIELDS].tolist()

    def raise_if_aborted(self) -> None:
        """Raises the MegaMoEAborted of the first local rank that has a record. Never blocks."""
        for rank in self.world.local_ranks:
            words = self.record(rank)
            if words is not None:
                try:
                    error: MegaMoEError = aborted(words)
                except ValueError:  # no Cause or Phase has this number
                    error = self._lost(rank, f"record {words}")
                raise error

    def raise_if_unusable(self) -> None:
        """raise_if_aborted(), and MegaMoEError when an exception left a forward half enqueued. Never blocks."""
        if self.enqueueing:
            raise MegaMoEError("an exception interrupted a forward while it was being enqueued: call reset()")
        self.raise_if_aborted()

    def raise_if_aborted_on_device(self) -> None:
        """Raises the MegaMoEAborted that a local rank's control block holds; waits for the device.

        A control block that no forward can have left is a MegaMoEError, which says to call reset().
        """
        for rank in self.world.local_ranks:
            control = self.control(rank).tolist()
            epoch, abort = control[wire.EPOCH], control[wire.ABORT]
            if not (0 <= epoch < MOST_FORWARDS and 0 <= abort <= self.world.size):
                raise self._lost(rank, f"epoch {epoch}, abort word {abort}")
            error = wire.abort_in(control)
            if error is not None:
                raise error

    def _lost(self, rank: int, seen: str) -> MegaMoEError:
        text = "its memory was overwritten, or mapped anew by an allocator that had put it to sleep: call reset()"
        return MegaMoEError(f"the control block of rank {rank} holds no state of a forward ({seen}); {text}")

    # ---- what the reference backend does on the host ---------------------------------------------

    def epoch(self) -> int:
        """Number of the last forward that ended on the first local rank; waits for the device."""
        return int(self.control(self.world.local_ranks[0])[wire.EPOCH])

    def advance(self) -> None:
        """Count a forward that the host computed."""
        for rank in self.world.local_ranks:
            self.control(rank)[wire.EPOCH] += 1

    def post(self, record: AbortRecord) -> None:
        """Abort on every local rank as a kernel of rank `record.origin` would. An earlier record stays."""
        words = [int(word) for word in astuple(record)]
        for rank in self.world.local_ranks:
            control = self.control(rank)
            if int(control[wire.ABORT]) == 0:
                first = wire.RECORDS + record.origin * wire.RECORD_FIELDS
                control[first : first + wire.RECORD_FIELDS] = torch.tensor(words, device=control.device)
                control[wire.ABORT] = 1 + record.origin
                self._words[rank][wire.HOST_RECORD : wire.HOST_RECORD + wire.RECORD_FIELDS] = words
                self._words[rank][wire.HOST_STATE] = 1

    # ---- repair ----------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Set epoch and flags of the local ranks and clear all state between forwards.

        Not collective, and only safe while no kernel runs on any rank; reset() sees to that. Nothing that a
        forward needs to find in device memory is taken from there: it may have been lost.
        """
        self._arena.restore()
        for rank in self.world.local_ranks:
            with self.world.on(rank):
                self._scratch[rank].zero_()
                self._scratch[rank][wire.ABORT] = 1 + rank
                control = self.control(rank)
                control.zero_()  # abort, claim, deadline, records, counters of CTAs
                control[wire.EPOCH] = epoch
                control[wire.LIST_FLAG : wire.LIST_FLAG + 2 * wire.MAX_RANKS] = epoch
                control[wire.RETURN_FLAG : wire.RETURN_FLAG + wire.MAX_RANKS] = epoch
                for name in CLEARED:
                    self._bytes(rank, name).zero_()
        self.world.synchronize()
        for rank in self.world.local_ranks:
            self._host[rank].zero_()
        self.enqueueing = False

    def reset(self) -> None:
        """Make the workspace usable after an abort, or after its memory lost what it held. Collective, bounded.

        Waits for the devices, then sets every rank's epoch and flags to the largest epoch + 2 (DESIGN promise 6).
        Raises WorldError naming ranks that do not come within timeout_s; the workspace stays aborted, try again.
        """
        self.world.require_open("reset")
        with self.order.lock:
            self.world.synchronize()
            # Nobody writes before all have arrived idle: a forward in flight still touches its peers' arenas.
            found = [int(self.control(rank)[wire.EPOCH]) for rank in self.world.local_ranks]
            epochs = [epoch if 0 <= epoch < MOST_FORWARDS - 2 else 0 for epoch in found]
            self.set_epoch(max(self.world.gather(epochs, "reset: epochs")) + 2)
            self.world.barrier("reset: flags set")

    def poison(self, byte: int = 0xFF) -> None:
        """For tests: fill every region except KEPT with a byte, so that stale data cannot pass unseen."""
        for rank in self.world.local_ranks:
            with self.world.on(rank):
                for name in [*self.arena_layout, *self.local_layout]:
                    if name not in KEPT:
                        self._bytes(rank, name).fill_(byte)
        self.world.synchronize()

    def free(self) -> None:
        """Give the memory back; collective, called by World.close()."""
        for held in (self._local, self._words, self._host, self._scratch, self._scratch_host):
            held.clear()
        self.world.release(self._arena)
