"""NVSHMEM of this process: whether the ranks fit together, start and stop, memory, peer addresses.

The only file that imports nvshmem4py, and only when a call needs it. NVSHMEM is one per process, so it
is counted here: worlds over the same ranks share it, the last one stops it, other ranks are refused.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import MissingDependency, WorldError
from ..packages import install
from .device import COMPUTE_CAPABILITY
from .host import name_ranks

ENVIRONMENT = {
    "NVSHMEM_REMOTE_TRANSPORT": "none",  # one node: do not probe network cards
    "NVSHMEM_DISABLE_NVLS": "1",  # no kernel uses multicast
}
"""Set before NVSHMEM starts, unless the caller has set them.

NVSHMEM_SYMMETRIC_SIZE is left alone: with CUDA's virtual memory management, the default on x86, the heap
starts empty and grows by NVSHMEM_CUMEM_GRANULARITY (512 MiB) up to NVSHMEM_MAX_MEMORY_PER_GPU (128 GiB),
and the size is not read. Only a static heap (NVSHMEM_DISABLE_CUDA_VMM=1) is limited by it (1 GiB).
"""


@dataclass(frozen=True)
class Facts:
    """What a rank tells the others before they form a world.

    uuid: of its GPU. unreachable: uuids of visible GPUs to which its GPU has no peer access; GPUs hidden
    from it (CUDA_VISIBLE_DEVICES) cannot be judged here and are left to NVSHMEM. ranks: global ranks of
    the group that NVSHMEM already serves in this process, () if none. foreign: NVSHMEM runs, but somebody
    else started it.
    """

    host: str
    uuid: str
    name: str
    capability: tuple[int, int]
    unreachable: frozenset[str] = field(default_factory=frozenset)
    ranks: tuple[int, ...] = ()
    foreign: bool = False


@dataclass
class _Runtime:
    ranks: tuple[int, ...]
    device: torch.device
    owned: bool  # whether this module started it and has to stop it
    users: int = 0


_current: _Runtime | None = None


def _core() -> Any:
    """The nvshmem.core module. Raises MissingDependency."""
    try:
        import nvshmem.core as core
    except (ImportError, OSError) as error:
        major = (torch.version.cuda or "13").split(".")[0]
        raise MissingDependency(
            f"several ranks need nvshmem4py ({error}): {install(f'cu{major}')}, the CUDA major of this torch"
        ) from error
    return core


def local_facts(device: torch.device) -> Facts:
    """Facts of this rank. Raises MissingDependency without nvshmem4py or CUDA, WorldError on a CPU device."""
    if device.type != "cuda":
        raise WorldError(f"a rank of an NVSHMEM world needs a CUDA device, not {device}")
    core = _core()
    torch.zeros(1, device=device)  # creates the context, or fails here rather than inside NVSHMEM
    uuids = {index: str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())}
    others = [index for index in uuids if index != device.index]
    unreachable = [uuids[index] for index in others if not torch.cuda.can_device_access_peer(device.index, index)]
    core.get_unique_id(empty=True)  # loads the library, which init_status does not
    return Facts(
        host=socket.gethostname(),
        uuid=uuids[device.index],
        name=torch.cuda.get_device_name(device),
        capability=torch.cuda.get_device_capability(device),
        unreachable=frozenset(unreachable),
        ranks=_current.ranks if _current is not None else (),
        foreign=_current is None and int(core.init_status()) > 1,  # 0 not started, 1 bootstrapped only
    )


def refusal(everyone: list[Facts | str]) -> str | None:
    """Why these ranks cannot form a world, or None. Every rank computes it from the same list."""
    for rank, facts in enumerate(everyone):
        if isinstance(facts, str):
            return f"rank {rank}: {facts}"
    facts = [entry for entry in everyone if isinstance(entry, Facts)]
    if len({entry.host for entry in facts}) > 1:
        hosts = ", ".join(f"rank {rank} on {entry.host}" for rank, entry in enumerate(facts))
        return f"they are on different hosts ({hosts}); one NVLink node is supported"
    for rank, entry in enumerate(facts):
        if entry.capability != COMPUTE_CAPABILITY:
            have, need = ("{}.{}".format(*pair) for pair in (entry.capability, COMPUTE_CAPABILITY))
            return f"rank {rank} has a {entry.name} of compute capability {have}, megamoe needs {need}"
    for rank, entry in enumerate(facts):
        same = [other for other, peer in enumerate(facts) if peer.uuid == entry.uuid]
        if len(same) > 1:
            return f"{name_ranks(same)} use one GPU ({entry.uuid}); give each its own (torch.cuda.set_device)"
        blind = [other for other, peer in enumerate(facts) if peer.uuid in entry.unreachable]
        if blind:
            return f"the GPU of rank {rank} has no peer access to {name_ranks(blind)} (NVLink is needed)"
    if len({(entry.ranks, entry.foreign) for entry in facts}) > 1:
        return "NVSHMEM already runs on some of them, for another group"
    return None


def running() -> bool:
    """Whether NVSHMEM runs in this process, whoever started it."""
    core = _core()
    core.get_unique_id(empty=True)  # loads the library
    return int(core.init_status()) > 1


def unique_id() -> bytes:
    """A new id of an NVSHMEM job; rank 0 makes it."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    return _core().get_unique_id()._data.tobytes()


def acquire(device: torch.device, uid: bytes | None, ranks: list[int], rank: int) -> None:
    """Start NVSHMEM over `ranks` (global ranks; `rank` is the own position), or share the running one.

    uid: of rank 0, None when NVSHMEM runs. Collective. Raises WorldError when NVSHMEM runs for others.
    """
    global _current
    core = _core()
    if _current is None:
        owned = uid is not None
        if owned:
            _initialize(core, device, uid, rank, len(ranks))
        if (core.my_pe(), core.n_pes()) != (rank, len(ranks)):
            raise WorldError(
                f"NVSHMEM already runs in this process as PE {core.my_pe()} of {core.n_pes()}, this group needs "
                f"{rank} of {len(ranks)}: it serves one set of ranks in the life of a process"
            )
        _current = _Runtime(tuple(ranks), device, owned)
    if _current.ranks != tuple(ranks) or _current.device != device:
        raise WorldError(
            f"NVSHMEM already serves global ranks {list(_current.ranks)} on {_current.device} in this process, "
            f"so a world over {ranks} on {device} is refused: close the other world first"
        )
    _current.users += 1


def _initialize(core: Any, device: torch.device, raw: bytes, rank: int, size: int) -> None:
    import numpy
    from cuda.core import Device

    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    cuda_device = Device(device.index)
    cuda_device.set_current()
    uid = core.get_unique_id(empty=True)
    uid._data[:] = numpy.frombuffer(raw, dtype=uid._data.dtype)
    core.init(device=cuda_device, uid=uid, rank=rank, nranks=size, initializer_method="uid")


def release() -> None:
    """One world less; the last one stops NVSHMEM, if this module started it. Collective."""
    global _current
    if _current is None:
        return
    _current.users -= 1
    if _current.users == 0:
        stopped, _current = _current, None
        if stopped.owned:
            torch.cuda.synchronize(stopped.device)
            _core().finalize()


def granularity() -> int:
    """Bytes by which NVSHMEM's dynamic heap grows: NVSHMEM_CUMEM_GRANULARITY, 512 MiB by default."""
    text = os.environ.get("NVSHMEM_CUMEM_GRANULARITY", "").strip().lower()
    digits = text.rstrip("kmgt")
    try:
        size = int(float(digits) * 1024 ** " kmgt".index(text[len(digits) : len(digits) + 1] or " "))
    except ValueError:
        size = 0
    return size if size > 0 else 1 << 29


def static_heap() -> bool:
    """Whether NVSHMEM was told to reserve its heap at the start (NVSHMEM_DISABLE_CUDA_VMM)."""
    return os.environ.get("NVSHMEM_DISABLE_CUDA_VMM", "0").lower() not in ("", "0", "false", "no", "n")


def free_memory(device: torch.device, need: int) -> int:
    """Free bytes of the device; torch's cache is given back first if they are fewer than `need`."""
    if torch.cuda.mem_get_info(device)[0] < need:
        torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def malloc(nbytes: int) -> torch.Tensor:
    """Symmetric memory, uint8 [nbytes]. Collective. It stays until free(), whatever is collected."""
    return _core().tensor((nbytes,), torch.uint8, except_on_del=False)


def free(tensor: torch.Tensor) -> None:
    """Free what malloc returned (the same tensor, not a view of a part). Collective."""
    _core().free_tensor(tensor)


def peer_address(tensor: torch.Tensor, pe: int) -> int:
    """Address of another PE's copy of a malloc'ed tensor. Raises nvshmem4py's error when it is not mapped."""
    core = _core()
    buffer, _, _ = core.tensor_get_buffer(tensor)
    return int(core.get_peer_buffer(buffer, pe).handle)
