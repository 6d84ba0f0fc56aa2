"""Row records as torch tensors, and what the plain GEMM functions need of a rank's experts."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from .. import numerics
from ..config import Knobs, MoEConfig, check_num_sms
from ..errors import InputError
from ..tensors import check_tensor, check_type
from ..wire import RowFormat

MOST_CTAS = 2**31 - 1  # of a grid (CUDA C programming guide, compute capabilities)


class Experts(Protocol):
    """One rank's experts in kernel layout; megamoe.weights.ExpertWeights is one.

    w13 FP8 [E_local, 2I, H] and w2 FP8 [E_local, H, I], rows in kernel order. Block mode: w13_scale fp32
    [E_local, 2, I/128, H/128], w2_scale fp32 [E_local, H/128, I/128]. Tensor mode: both fp32 [E_local],
    x_scale and act_scale floats.
    """

    cfg: MoEConfig
    w13: Tensor
    w13_scale: Tensor
    w2: Tensor
    w2_scale: Tensor
    x_scale: float | None
    act_scale: float | None


def config_of(experts: Experts) -> MoEConfig:
    """The config of a rank's experts. Raises InputError for anything else, such as bare tensors."""
    if not hasattr(experts, "cfg"):
        raise InputError("experts", type(experts).__name__, "an ExpertWeights")
    return experts.cfg


def check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    """Raise InputError unless `tensor` is on `device`, where the rows are and the kernel runs."""
    if tensor.device != device:
        raise InputError(f"{name}.device", str(tensor.device), f"{device}, as the rows")


def check(
    name: str,
    tensor: Tensor,
    dtype: torch.dtype | tuple[torch.dtype, ...],
    *shape: int | None,
    align: int = 16,
    device: torch.device | None = None,
) -> None:
    """Raise InputError unless `tensor` is a contiguous CUDA tensor of (one) dtype and shape (None: any size) at a
    multiple of `align` bytes. device: the one that it must be on, None for any."""
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    check_type(name, tensor)
    if device is not None:
        check_device(name, tensor, device)
    check_tensor(name, tensor, dtypes, shape, device, align)


def check_rows(name: str, tensor: Tensor, pitch: int) -> None:
    """Raise InputError unless `tensor` holds row records: uint8 [R, pitch] on a GPU, at a multiple of 128."""
    check(name, tensor, torch.uint8, None, pitch, align=128)


def weight_address(cfg: MoEConfig, place: str, weights: Tensor | None, rows: int, device: torch.device) -> int:
    """Address of the rows' routing weights fp32 [rows] on `device` where cfg.route_weight is `place`, else 0."""
    if cfg.route_weight != place:
        return 0
    if weights is None:
        raise InputError("weights", None, f"the rows' routing weights with route_weight={place!r}")
    check("weights", weights, torch.float32, rows, device=device)
    return weights.data_ptr()


def ctas(like: Tensor, num_sms: int | None) -> int:
    """CTAs of a persistent launch: num_sms, or every SM of the device. Raises ConfigError for what is no number."""
    check_num_sms(num_sms, MOST_CTAS)
    return num_sms or torch.cuda.get_device_properties(like.device).multi_processor_count


def tickets(given: Tensor | None, knobs: Knobs, device: torch.device) -> Tensor:
    """What an atomic schedule counts in (gemm_queue.py), int32 [2] of 0: `given`, or new; [0] with a static one."""
    if given is not None:
        check("tickets", given, torch.int32, 2, align=4, device=device)
        return given
    return torch.zeros(2 if knobs.schedule == "atomic" else 0, dtype=torch.int32, device=device)


def pack_rows(codes: Tensor, scales: Tensor | None, fmt: RowFormat) -> Tensor:
    """Row records uint8 [R, fmt.pitch] from codes (any 1-byte dtype) [R, columns] and scales.

    scales: fp32 [R, fmt.scales], or None when the format has none. The padding is zero.
    """
    rows = codes.shape[0]
    if codes.element_size() != 1 or codes.shape != (rows, fmt.columns):
        raise InputError("codes", f"{codes.dtype} {tuple(codes.shape)}", f"one byte each, [R, {fmt.columns}]")
    out = torch.zeros(rows, fmt.pitch, dtype=torch.uint8, device=codes.device)
    out[:, : fmt.columns] = codes.contiguous().view(torch.uint8)
    found = None if scales is None else tuple(scales.shape)
    if found != ((rows, fmt.scales) if fmt.scales else None):
        raise InputError("scales.shape", found, f"[{rows}, {fmt.scales}]" if fmt.scales else "None")
    if scales is not None and rows:  # an empty tensor's strides cannot be viewed as bytes
        end = fmt.columns + 4 * fmt.scales
        out[:, fmt.columns : end] = scales.float().contiguous().view(torch.uint8)
    return out


def unpack_rows(rows: Tensor, fmt: RowFormat, fp8: str = "e4m3") -> tuple[Tensor, Tensor | None]:
    """(codes FP8 [R, columns], scales fp32 [R, fmt.scales] or None) of row records uint8 [R, fmt.pitch]."""
    if rows.dtype != torch.uint8 or rows.ndim != 2 or rows.shape[1] != fmt.pitch:
        raise InputError("rows", f"{rows.dtype} {tuple(rows.shape)}", f"uint8 [R, {fmt.pitch}]")
    codes = rows[:, : fmt.columns].contiguous().view(numerics.fp8_dtype(fp8))
    if not fmt.scales:
        return codes, None
    return codes, rows[:, fmt.columns : fmt.columns + 4 * fmt.scales].contiguous().view(torch.float32)
