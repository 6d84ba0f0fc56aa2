"""The one check of a tensor whose address goes to a kernel, and of what stands where a tensor should be."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .errors import InputError

_PLAIN = (Tensor, torch.nn.Parameter)


def check_type(name: str, value: object) -> None:
    """Raise InputError unless `value` is a tensor with elements of its own: dense, and no wrapper around another.

    Refused are DTensor and other wrapper subclasses, FakeTensor, functional and vmapped tensors, and other layouts
    than strided: their address is 0 or belongs to something else. Subclasses that only add attributes pass, as do
    meta tensors, which a check of the device refuses.
    """
    if not isinstance(value, Tensor):
        raise InputError(name, type(value).__name__, "a torch.Tensor")
    if type(value) not in _PLAIN:
        _check_subclass(name, value)
    if value.layout is not torch.strided or value.is_nested:
        found = "nested" if value.is_nested else value.layout
        raise InputError(f"{name}.layout", found, "torch.strided: pass a dense tensor")
    if torch._C._functorch.is_functorch_wrapped_tensor(value):
        raise InputError(name, "a tensor inside vmap or grad", "a plain tensor: call it outside torch.func transforms")
    if torch._is_functional_tensor(value):
        raise InputError(name, "a functional tensor", "a plain tensor; traced code calls torch.ops.megamoe.forward")


def _check_subclass(name: str, value: Tensor) -> None:
    from torch._subclasses.fake_tensor import is_fake
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    kind = type(value).__name__
    if is_fake(value):
        raise InputError(name, f"a {kind}", "a tensor with data; traced code calls torch.ops.megamoe.forward")
    if hasattr(value, "to_local"):
        raise InputError(name, f"a {kind}", f"this rank's plain tensor: pass {name}.to_local()")
    if is_traceable_wrapper_subclass(value) or hasattr(value, "__tensor_flatten__"):
        raise InputError(name, f"a {kind}", "a plain tensor, not a wrapper around others")


def check_storage(name: str, value: Tensor) -> None:
    """Raise InputError unless the storage of a tensor of check_type, of any strides, holds its last element.

    A storage that was resized under the tensor (FSDP frees parameters so) is found by its size.
    """
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride()))
    held, need = value.untyped_storage().nbytes(), (value.storage_offset() + last + 1) * value.element_size()
    if held < need and value.numel():
        what = f"a tensor of {need} bytes on a storage of {held}"
        raise InputError(name, what, "in memory: its storage was resized or freed (untyped_storage().resize_)")


def check_memory(name: str, value: Tensor, align: int) -> None:
    """Raise InputError unless a tensor of check_type is contiguous, aligned to `align` bytes and really in memory."""
    if not value.is_contiguous():
        raise InputError(f"{name}.stride", value.stride(), "contiguous")
    if value.is_neg():
        raise InputError(name, "a view with the negative bit", "a plain tensor: pass its resolve_neg()")
    check_storage(name, value)
    address = value.data_ptr()
    if address % align:
        raise InputError(f"{name}.data_ptr", address, f"a multiple of {align}")
    if address == 0 and value.numel():
        raise InputError(name, f"a {type(value).__name__} without memory", "a plain tensor in memory")


def check_tensor(
    name: str,
    value: object,
    dtypes: tuple[torch.dtype, ...],
    shape: tuple[int | None, ...],
    device: torch.device | None = None,
    align: int | None = None,
) -> None:
    """Raise InputError, naming the argument, its value and what is allowed, unless a kernel can read `value` as it is.

    dtypes: the allowed ones. shape: sizes, None for any. device: where it must lie, None for any CUDA device.
    align: bytes of which the address must be a multiple; the element size by default.
    """
    check_type(name, value)
    assert isinstance(value, Tensor)
    if value.dtype not in dtypes:
        raise InputError(f"{name}.dtype", value.dtype, " or ".join(map(str, dtypes)))
    found = value.shape
    if len(found) != len(shape) or any(w not in (None, s) for w, s in zip(shape, found)):
        allowed = f"({', '.join('any' if w is None else str(w) for w in shape)}{',' * (len(shape) == 1)})"
        raise InputError(f"{name}.shape", tuple(found), allowed)
    if device is None:
        if not value.is_cuda:
            raise InputError(f"{name}.device", str(value.device), "a CUDA device")
    elif value.device != device:
        raise InputError(f"{name}.device", str(value.device), str(device))
    check_memory(name, value, align or value.element_size())


def all_readable(tensors: Sequence[object], device: torch.device) -> bool:
    """Whether all are plain tensors on `device`, contiguous and in memory, in few calls: the path of every forward.

    False may also be said of good ones (empty tensors have no address, parameters are a subclass): check_tensor knows.
    """
    try:
        for t in tensors:
            if type(t) is not Tensor or t.device != device or not t.data_ptr() or not t.is_contiguous() or t.is_neg():
                return False
            offset = t.storage_offset()
            need = t.nbytes + offset * t.element_size() if offset else t.nbytes
            if t.untyped_storage().nbytes() < need:
                return False
    except RuntimeError:  # no storage: sparse, or inside a torch.func transform
        return False
    return True
