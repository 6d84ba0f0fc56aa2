"""NvshmemWorld: one process a GPU. NVSHMEM gives symmetric memory and peer addresses; host side only.

Kernels use plain loads, stores and bulk copies on `local address + delta`, so nothing of NVSHMEM is
linked into them. NVSHMEM's own collectives (init, malloc, free, finalize) have no time-out and hold the
interpreter's lock; each is entered right after a bounded exchange in which every rank said that it is
ready, so only a rank that dies in between can block the others.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..errors import WorldError
from ..wire import ALIGN, round_up
from . import nvshmem_runtime as runtime
from .device import default_device, plain_tensors, resolve_device
from .host import HostGroup
from .world import SymmetricBlock, World


class NvshmemWorld(World):
    """The ranks of a torch.distributed group on one node. Made by world().

    Attribute: rank, this process's position in the group (and its NVSHMEM PE number).
    """

    kind = "nvshmem"

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        timeout_s: float = 30.0,
        device: torch.device | str | int | None = None,
    ) -> None:
        """Collective over `group`. Arguments and errors: world()."""
        self._host = HostGroup.over(group, timeout_s)
        self.rank = self._host.rank
        super().__init__(self._host.size, [self.rank], timeout_s)
        facts: runtime.Facts | str
        error: Exception | None = None
        try:
            self._device = default_device() if device is None else resolve_device(device)
            facts = runtime.local_facts(self._device)
        except Exception as failure:  # the others must hear of it, whatever it is
            error, facts = failure, str(failure)
        everyone = self._host.gather("world(): facts", facts)
        if error is not None:
            raise error
        reason = runtime.refusal(everyone)  # of the same facts on every rank, so all refuse or none
        if reason is not None:
            raise WorldError(f"these ranks cannot form a world: {reason}")
        self._blocks: list[SymmetricBlock] = []
        self._start()
        self._state = "open"

    def _start(self) -> None:
        error: Exception | None = None
        uid = None
        try:
            uid = runtime.unique_id() if self.rank == 0 and not runtime.running() else None
        except Exception as problem:
            error = problem
        failure = self.failure("making an NVSHMEM id", error)
        if failure is not None:
            raise failure
        uid = self._host.gather("world(): NVSHMEM id", uid)[0]  # None: NVSHMEM runs already
        try:
            with self.on(self.rank):
                runtime.acquire(self._device, uid, self._host.ranks, self.rank)
        except Exception as problem:  # NVSHMEM's errors have no common base
            error = problem
        failure = self.failure("starting NVSHMEM", error)
        if failure is not None:
            raise failure

    def device(self, rank: int) -> torch.device:
        return self._device

    def gather(self, values: list[Any], what: str = "gather") -> list[Any]:
        self.require_open(what)
        return self._host.gather(what, values[0])

    def allocate(self, nbytes: int) -> SymmetricBlock:
        self.require_open("allocate")
        what = f"allocating {nbytes} bytes of NVSHMEM memory"
        # When memory runs out inside nvshmem_malloc, NVSHMEM drops its heap on that rank and the others
        # wait for ever, so make sure that it will not.
        failure = self.failure(what, self._shortage(nbytes))
        if failure is not None:
            raise failure
        error: Exception | None = None
        tensor = None
        with self.on(self.rank), plain_tensors():
            try:
                tensor = runtime.malloc(nbytes)
            except Exception as problem:
                hint = "raise NVSHMEM_SYMMETRIC_SIZE if its heap is static (NVSHMEM_DISABLE_CUDA_VMM=1)"
                error = WorldError(f"{what} failed on rank {self.rank}: {problem}; {hint}, else lower max_tokens")
            failure = self.failure(what, error)
            if failure is not None:  # NVSHMEM fails alike on all ranks, so there is nothing to free together
                raise failure
            try:
                block = self._block(nbytes, tensor)
            except Exception as problem:
                error = problem
            failure = self.failure("mapping the peers' memory", error)
            if failure is not None:
                runtime.free(tensor)
                raise failure
        self._blocks.append(block)
        return block

    def _shortage(self, nbytes: int) -> WorldError | None:
        """An error if the device cannot back `nbytes` more of NVSHMEM's dynamic heap."""
        if runtime.static_heap():
            return None
        need = round_up(nbytes + ALIGN, runtime.granularity())
        free = runtime.free_memory(self._device, need)
        if free >= need:
            return None
        return WorldError(
            f"{self._device} of rank {self.rank} has {free >> 20} MiB free, NVSHMEM needs {need >> 20} MiB "
            f"for {nbytes} bytes: lower max_tokens (see memory_estimate), or free memory. NVSHMEM takes multiples "
            "of NVSHMEM_CUMEM_GRANULARITY; NVSHMEM_SYMMETRIC_SIZE only matters to a static heap"
        )

    def _block(self, nbytes: int, tensor: torch.Tensor) -> SymmetricBlock:
        base = tensor.data_ptr()
        if base % ALIGN:
            raise WorldError(f"NVSHMEM memory at {base:#x} is not aligned to {ALIGN} bytes")
        tensor.zero_()
        peers = (0 if pe == self.rank else runtime.peer_address(tensor, pe) - base for pe in range(self.size))
        block = SymmetricBlock.of(nbytes, {self.rank: tensor}, {self.rank: tuple(peers)})
        self.synchronize()
        return block

    def release(self, block: SymmetricBlock) -> None:
        """See World. Views of the block must not be used afterwards."""
        self.require_open("release")
        tensor = block.tensors.pop(self.rank)
        block.deltas.clear()
        self._blocks.remove(block)
        with self.on(self.rank):
            self.synchronize()
            runtime.free(tensor)

    def _shut_down(self) -> None:
        for block in list(self._blocks):
            self.release(block)
        with self.on(self.rank):
            runtime.release()
