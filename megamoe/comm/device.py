"""Which device a rank runs on, and whether the kernels can run there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from ..errors import ArgumentError, MissingDependency, WorldError

COMPUTE_CAPABILITY = (9, 0)
"""What the kernels are compiled for; sm_90a code runs on nothing else."""


def resolve_device(device: torch.device | str | int | None = None) -> torch.device:
    """A device with an index; None is the current CUDA device. Raises MissingDependency without CUDA."""
    try:
        if isinstance(device, bool):
            raise TypeError("a bool is no index")
        resolved = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
    except (TypeError, RuntimeError) as error:
        raise ArgumentError("device", device, "a CUDA device, such as 'cuda:1' or 1") from error
    if resolved.type not in ("cuda", "cpu"):
        raise ArgumentError("device", device, "a CUDA device")
    if resolved.type == "cpu":
        return resolved
    if not torch.cuda.is_available():
        why = "this torch has no CUDA" if torch.version.cuda is None else "torch sees no CUDA device"
        instead = "device='cpu' computes with the oracle, python -m megamoe demo compiles the kernels"
        raise MissingDependency(f"megamoe needs a Hopper GPU (compute capability 9.0): {why}; {instead}")
    index = torch.cuda.current_device() if resolved.index is None else resolved.index
    if not 0 <= index < torch.cuda.device_count():
        raise ArgumentError("device", device, f"one of the {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", index)


def require_hopper(device: torch.device) -> None:
    """Raises WorldError unless the kernels can run on this device. A CPU passes: tests use it."""
    if device.type == "cuda":
        found = torch.cuda.get_device_capability(device)
        if found != COMPUTE_CAPABILITY:
            name = torch.cuda.get_device_name(device)
            need = "{}.{}".format(*COMPUTE_CAPABILITY)
            raise WorldError(f"{device} ({name}) has compute capability {found[0]}.{found[1]}, megamoe needs {need}")


def default_device() -> torch.device:
    """The device of a rank that names none: the current one if the caller chose it, else LOCAL_RANK's.

    torch's current device is 0 until somebody sets it, so 0 counts as not chosen.
    """
    current = resolve_device(None)
    local = os.environ.get("LOCAL_RANK", "")
    if current.index == 0 and local.isdecimal() and int(local) < torch.cuda.device_count():
        return torch.device("cuda", int(local))
    return current


@contextlib.contextmanager
def plain_tensors() -> Iterator[None]:
    """Tensors made in here can be updated in place anywhere later, also when inference mode is on around it."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def require_real(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself. Raises WorldError for a FakeTensor and the like, which a mode around the caller made of it."""
    if type(tensor) is not torch.Tensor or torch._is_functional_tensor(tensor):
        kind = type(tensor).__name__
        raise WorldError(
            f"memory for kernels came as a {kind}: make worlds and layers outside FakeTensorMode and tracing"
        )
    return tensor
