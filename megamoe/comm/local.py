"""Worlds whose ranks all live in this process: the single world, and the base of the virtual one."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from ..errors import WorldError
from .device import plain_tensors, require_hopper, resolve_device
from .memory import aligned_bytes
from .world import SymmetricBlock, World


class InProcessWorld(World):
    """W local ranks, a device each, in plain device memory; nothing is collective between processes."""

    def __init__(self, devices: list[torch.device], timeout_s: float) -> None:
        super().__init__(len(devices), list(range(len(devices))), timeout_s)
        self._devices = devices
        for device in set(devices):
            require_hopper(device)

    def device(self, rank: int) -> torch.device:
        return self._devices[rank]

    def allocate(self, nbytes: int) -> SymmetricBlock:
        self.require_open("allocate")
        tensors: dict[int, torch.Tensor] = {}
        for rank in self.local_ranks:
            # On the rank's own stream, so that memory of a forgotten world is reused after its kernels only.
            with self.on(rank), plain_tensors():
                try:
                    tensors[rank] = aligned_bytes(nbytes, self.device(rank), zero=True)
                except RuntimeError as error:
                    text = f"cannot allocate {nbytes} symmetric bytes for rank {rank} (see memory_estimate): {error}"
                    raise WorldError(text) from error
        bases = [tensors[rank].data_ptr() for rank in self.local_ranks]
        offsets = {rank: tuple(base - bases[rank] for base in bases) for rank in self.local_ranks}
        with plain_tensors():
            block = SymmetricBlock.of(nbytes, tensors, offsets)
        self.synchronize()
        return block

    def release(self, block: SymmetricBlock) -> None:
        self.require_open("release")
        block.tensors.clear()
        block.deltas.clear()

    def gather(self, values: list[Any], what: str = "gather") -> list[Any]:
        self.require_open(what)
        return list(values)

    def _shut_down(self) -> None:
        pass

    def _abandon(self) -> None:
        # No peers that could miss a call, so everything can be freed unless CUDA itself is in error.
        with contextlib.suppress(RuntimeError):
            self.close()
        if self._state == "open":
            super()._abandon()


class SingleWorld(InProcessWorld):
    """W = 1: one rank on one device, plain CUDA memory.

    device: None is the current CUDA device; a CPU device is for tests of the host side, no kernel runs
    there. timeout_s: seconds, see World. Raises MissingDependency without CUDA, WorldError if not Hopper.
    """

    kind = "single"

    def __init__(self, device: torch.device | str | int | None = None, *, timeout_s: float = 30.0) -> None:
        super().__init__([resolve_device(device)], timeout_s)
        self._state = "open"
