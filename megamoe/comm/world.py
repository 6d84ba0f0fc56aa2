"""World: the ranks that run a layer together, and everything symmetric that they own.

One interface for three kinds (DESIGN, Worlds): single and virtual live in one process and keep W local
ranks, NVSHMEM has one local rank a process. Ranks are positions in the group, 0 .. size-1.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..config import MAX_RANKS, MoEConfig
from ..errors import ArgumentError, ConfigError, MegaMoEError, MismatchError, WorldError
from ..wire import WIRE_VERSION
from .device import default_device
from .host import by_value, check_timeout, name_ranks
from .workspace import Workspace


@dataclass(frozen=True, eq=False)
class SymmetricBlock:
    """One allocation of equal size on every rank; both dicts hold the local ranks.

    tensors: uint8 [nbytes], zeroed at first, 256-byte aligned.
    deltas: int64 [W] on the rank's device; peer address = local address + deltas[peer], own delta 0.
    offsets: the same numbers on the host.
    """

    nbytes: int
    tensors: dict[int, torch.Tensor]
    deltas: dict[int, torch.Tensor]
    offsets: dict[int, tuple[int, ...]]

    @classmethod
    def of(cls, nbytes: int, tensors: dict[int, torch.Tensor], offsets: dict[int, tuple[int, ...]]) -> SymmetricBlock:
        """A block whose deltas are made from the offsets."""
        on = {rank: tensor.device for rank, tensor in tensors.items()}
        deltas = {rank: torch.tensor(found, dtype=torch.int64, device=on[rank]) for rank, found in offsets.items()}
        return cls(nbytes, tensors, deltas, offsets)

    def restore(self) -> None:
        """Write the deltas again, on each device's current stream, for memory that has lost what it held."""
        for rank, deltas in self.deltas.items():
            deltas.copy_(torch.tensor(self.offsets[rank], dtype=torch.int64, device="cpu"))


class World(ABC):
    """Base of all worlds. Use as a context manager, or call close(): it is collective.

    Attributes: kind ("single", "virtual" or "nvshmem"), size (W), local_ranks, timeout_s (seconds; bounds
    every collective call and is the default deadline of a forward).
    """

    kind: str
    _state = "opening"  # subclasses set "open" once everything stands

    def __init__(self, size: int, local_ranks: list[int], timeout_s: float) -> None:
        self.size, self.local_ranks, self.timeout_s = size, local_ranks, check_timeout(timeout_s)
        self._workspaces: dict[MoEConfig, Workspace] = {}
        self._life = threading.RLock()  # held while workspaces come and while all go; taken before their own locks

    def __repr__(self) -> str:
        if self._state == "opening":
            return f"<{self.kind} world that was not made>"
        ranks = "1 rank" if self.size == 1 else f"{self.size} ranks"
        if len(self.local_ranks) < self.size:
            ranks = f"rank {self.local_ranks[0]} of {self.size}"
        devices = ", ".join(dict.fromkeys(str(self.device(rank)) for rank in self.local_ranks))
        used = sum(w.arena_layout.nbytes + w.local_layout.nbytes for w in self._workspaces.values())
        held = f"{used / 2**20:.1f} MiB of workspaces a rank"
        return f"<{self._state} {self.kind} world: {ranks} on {devices}, {held}, timeout {self.timeout_s:g} s>"

    @abstractmethod
    def device(self, rank: int) -> torch.device:
        """The device of a local rank."""

    def stream(self, rank: int) -> torch.cuda.Stream | None:
        """The stream that a local rank must use; None: the caller's current stream."""
        return None

    def num_sms(self, rank: int) -> int:
        """SMs that one local rank may fill: all of its device (1 without CUDA)."""
        device = self.device(rank)
        return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1

    @abstractmethod
    def allocate(self, nbytes: int) -> SymmetricBlock:
        """Symmetric memory. Collective; a failure on one rank is a WorldError on every rank."""

    @abstractmethod
    def release(self, block: SymmetricBlock) -> None:
        """Give a block of allocate() back. Collective, in the same order on every rank."""

    @abstractmethod
    def gather(self, values: list[Any], what: str = "gather") -> list[Any]:
        """Given one picklable value a local rank, all W values in rank order. Collective, bounded.

        Raises WorldError naming ranks that did not arrive, MismatchError when ranks call different things.
        """

    def barrier(self, what: str = "barrier") -> None:
        """Return once every rank is here. Collective, bounded; raises as gather does."""
        self.gather([None] * len(self.local_ranks), what)

    def agree(self, what: str, value: str) -> None:
        """Raises MismatchError, listing who holds what, unless `value` is equal on every rank."""
        values = self.gather([value] * len(self.local_ranks), what)
        if len(set(values)) > 1:
            raise MismatchError(f"{what} differs between ranks: {by_value(values)}")

    def failure(self, what: str, error: Exception | None) -> Exception | None:
        """Collective end of a step that may have failed here: None on all ranks, or an error on all.

        A rank's own error comes back as it is, or inside a WorldError if it is not one of megamoe's; other
        ranks get a WorldError naming who failed. Raises as gather does, and then nothing collective may
        follow.
        """
        texts = self.gather([None if error is None else str(error)] * len(self.local_ranks), what)
        if error is None or not isinstance(error, MegaMoEError):
            failed = [rank for rank, text in enumerate(texts) if text is not None]
            cause, error = error, None
            if failed:
                error = WorldError(f"{what} failed on {name_ranks(failed)}: {texts[failed[0]]}")
                error.__cause__ = cause
        return error

    def workspace(self, cfg: MoEConfig, fingerprint: str) -> Workspace:
        """The workspace of `cfg`, made at the first call. Collective: one call a layer, in equal order.

        fingerprint: readable text of whatever else must match (scales, package version ...); compared
        across ranks together with cfg, wire format, world and layer number. Raises MismatchError when
        they differ, ConfigError when cfg does not fit size, WorldError when memory runs out.
        """
        self.require_open("workspace()")
        found = self._workspaces.get(cfg)
        layer = 1 + (found.layers if found else 0)
        value = f"layer {layer} of {cfg}, wire {WIRE_VERSION}, {self.kind} world of {self.size}; {fingerprint}"
        self.agree("configuration", value)
        if found is None:
            cfg.pool_capacity(self.size)  # ConfigError, on all ranks alike, before anything is allocated
            with self._life:
                self.require_open("workspace()")
                found = self._workspaces.get(cfg)  # another thread may have made it
                if found is None:
                    found = self._workspaces[cfg] = Workspace(cfg, self)
        return found

    @contextlib.contextmanager
    def on(self, rank: int) -> Iterator[None]:
        """Make the device and stream of a local rank current."""
        device = self.device(rank)
        if device.type != "cuda":
            yield
            return
        with torch.cuda.device(device), torch.cuda.stream(self.stream(rank)):
            yield

    def synchronize(self) -> None:
        """Wait for the devices of all local ranks."""
        for device in {self.device(rank) for rank in self.local_ranks}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def require_open(self, what: str) -> None:
        """Raises WorldError once the world is closed."""
        if self._state in ("closed", "abandoned"):
            raise WorldError(f"{what}: the {self.kind} world of {self.size} is {self._state}")

    def close(self) -> None:
        """Free everything and end the world. Collective, bounded; a second call does nothing."""
        if self._state != "open":
            return
        with self._life, contextlib.ExitStack() as forwards:
            if self._state != "open":  # another thread has closed it
                return
            workspaces = list(self._workspaces.values())
            for workspace in workspaces:  # of other threads none launches on memory that is given back
                forwards.enter_context(workspace.order.lock)
            self.synchronize()
            self.barrier("close")
            for workspace in workspaces:
                workspace.free()
            self._workspaces.clear()
            self._shut_down()
            self._state = "closed"

    @abstractmethod
    def _shut_down(self) -> None:
        """What close() does after the workspaces are freed."""

    def _abandon(self) -> None:
        """End without a collective call: peers may be elsewhere."""
        self._state = "abandoned"
        _abandoned.append(self)
        text = f"{self.kind} world of {self.size} left by an exception: nothing was freed, end the process"
        warnings.warn(text, ResourceWarning, stacklevel=3)

    def __enter__(self) -> World:
        self.require_open("with")
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        elif self._state == "open":
            self._abandon()

    def __del__(self) -> None:
        if getattr(self, "_state", "closed") == "open":
            text = f"{self.kind} world of {self.size} was never closed: call close() or use `with`"
            warnings.warn(text, ResourceWarning, stacklevel=2, source=self)


_abandoned: list[World] = []
"""Keeps memory that peers or running kernels may still touch from being collected."""


def world(
    group: dist.ProcessGroup | None = None,
    *,
    timeout_s: float = 30.0,
    device: torch.device | str | int | None = None,
) -> World:
    """The world of a torch.distributed group: NVSHMEM over its ranks, or a single one without peers.

    group: the expert-parallel group, not necessarily WORLD; None is the default group, or a single rank
    when torch.distributed is not initialised. Collective over the group's ranks only.
    timeout_s: bounds every collective call (seconds). device: None is the current CUDA device, or
    LOCAL_RANK's if none was set; "cpu" for a single rank whose layers the oracle computes.

    Raises WorldError with the reason when the ranks cannot form a world (another node, a shared GPU, no
    peer access, not Hopper, a rank that does not come), ConfigError above 8 ranks, MissingDependency
    without a CUDA device or without nvshmem4py.
    """
    check_timeout(timeout_s)
    ready = dist.is_available() and dist.is_initialized()
    if group is not None and not ready:
        raise ArgumentError("group", group, "None unless torch.distributed is initialised")
    if group not in (None, dist.GroupMember.NON_GROUP_MEMBER) and not isinstance(group, dist.ProcessGroup):
        raise ArgumentError("group", group, "None or a torch.distributed process group")
    size = dist.get_world_size(group) if ready else 1
    if size < 1:
        raise WorldError("this process is not a member of the group given to world()")
    if size > MAX_RANKS:
        raise ConfigError("world_size", size, f"at most {MAX_RANKS}")
    if size == 1:
        from .local import SingleWorld

        return SingleWorld(default_device() if ready and device is None else device, timeout_s=timeout_s)
    from .nvshmem_world import NvshmemWorld

    return NvshmemWorld(group if group is not None else dist.group.WORLD, timeout_s=timeout_s, device=device)
