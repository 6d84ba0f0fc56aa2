"""VirtualWorld: W ranks in one process, on one GPU or several, for tests and notebooks.

Every rank has its arena, its stream and its share of SMs, so that W forwards launched one after the
other run at the same time and really wait for each other. Peers are reached as in any other world,
through address differences; between GPUs that needs peer access, which torch enables only for its own
copies.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import permutations

import torch

from ..config import MAX_RANKS
from ..errors import ArgumentError, ConfigError, MissingDependency, WorldError
from .device import resolve_device
from .local import InProcessWorld


class VirtualWorld(InProcessWorld):
    """W = `size` ranks in this process; inputs and outputs of a layer are lists of W tensors.

    size: 1 to 8. devices: None puts all ranks on the current CUDA device; several devices take
    consecutive blocks of ranks. CPU devices are for tests of the host side. timeout_s: see World.

    Raises ConfigError (size), ArgumentError (devices), WorldError with the reason when two of the
    devices cannot reach each other's memory.
    """

    kind = "virtual"

    def __init__(
        self,
        size: int,
        *,
        devices: Sequence[torch.device | str | int] | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= MAX_RANKS:
            raise ConfigError("size", size, f"an int from 1 to {MAX_RANKS}")
        if devices is not None and not 1 <= len(devices) <= size:
            raise ArgumentError("devices", devices, f"1 to {size} devices (or None) for {size} ranks")
        found = [resolve_device(device) for device in (devices if devices is not None else [None])]
        if len(set(found)) != len(found) or len({device.type for device in found}) != 1:
            raise ArgumentError("devices", devices, "different devices of one type")
        if found[0].type == "cuda":
            _require_queues(-(-size // len(found)))
            _require_asynchronous_launches(size)
        super().__init__([found[rank * len(found) // size] for rank in range(size)], timeout_s)
        self._streams: list[torch.cuda.Stream | None] = [None] * size
        if found[0].type == "cuda":
            _enable_peer_access(found)
            self._streams = [torch.cuda.Stream(device) for device in self._devices]
        self._state = "open"

    def stream(self, rank: int) -> torch.cuda.Stream | None:
        """The rank's own stream (None on CPU)."""
        return self._streams[rank]

    def num_sms(self, rank: int) -> int:
        """An equal share of the device's SMs, so that the kernels of all its ranks are resident at once."""
        return max(1, super().num_sms(rank) // self._devices.count(self._devices[rank]))


def _require_queues(ranks: int) -> None:
    """Refuse fewer hardware queues than ranks of a GPU: one rank's waiting kernel would hold up another's."""
    queues = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    if queues.isdigit() and int(queues) < ranks:
        raise WorldError(f"CUDA_DEVICE_MAX_CONNECTIONS={queues}: {ranks} virtual ranks of one GPU need {ranks} or more")


def _require_asynchronous_launches(ranks: int) -> None:
    """Refuse launches that wait for their kernel: the first rank's would wait for ranks that are not launched yet."""
    blocking = os.environ.get("CUDA_LAUNCH_BLOCKING", "0")
    if ranks > 1 and blocking not in ("", "0"):
        text = f"CUDA_LAUNCH_BLOCKING={blocking}: {ranks} virtual ranks need launches that do not wait"
        raise WorldError(f"{text}; unset it before the process starts, or use a world of one rank")


def _enable_peer_access(devices: list[torch.device]) -> None:
    """Map the memory of every device into every other. Raises WorldError with the reason."""
    if len(devices) == 1:
        return
    conf = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + os.environ.get("PYTORCH_ALLOC_CONF", "")
    if "expandable_segments:true" in conf.lower() or torch.cuda.get_allocator_backend() != "native":
        # Such memory is mapped device by device, and peer access of contexts does not reach it.
        raise WorldError("a virtual world over several GPUs needs torch's native allocator without expandable_segments")
    for here, there in permutations(devices, 2):
        if not torch.cuda.can_device_access_peer(here, there):
            raise WorldError(f"{here} has no peer access to {there}: a world needs NVLink between its GPUs")
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise MissingDependency("several GPUs need cuda-bindings: pip install cuda-python") from error
    contexts = {}
    for device in devices:
        with torch.cuda.device(device):
            torch.zeros(1, device=device)  # creates the primary context
            contexts[device] = _checked(driver, driver.cuCtxGetCurrent(), f"context of {device}")
    for here, there in permutations(devices, 2):
        with torch.cuda.device(here):
            result = driver.cuCtxEnablePeerAccess(contexts[there], 0)
            if result[0] != driver.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED:
                _checked(driver, result, f"peer access from {here} to {there}")


def _checked(driver: object, result: tuple, what: str) -> object:
    """The value of a driver call. Raises WorldError naming the CUresult."""
    if result[0] != driver.CUresult.CUDA_SUCCESS:  # type: ignore[attr-defined]
        raise WorldError(f"{what}: {result[0].name}")
    return result[1] if len(result) > 1 else None
