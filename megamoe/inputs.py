"""Host checks of what a caller hands to forward. Nothing here touches the device."""

from __future__ import annotations

from typing import NamedTuple

import torch

from . import numerics
from .config import BLOCK, MoEConfig
from .errors import InputError

Activations = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class Inputs(NamedTuple):
    """Checked inputs of one rank. scales is None unless x came pre-quantised with block scales."""

    x: torch.Tensor
    scales: torch.Tensor | None
    ids: torch.Tensor
    weights: torch.Tensor
    tokens: int

    @property
    def prequantized(self) -> bool:
        """Whether x holds FP8 codes."""
        return self.x.dtype is not torch.bfloat16


def _check(
    name: str, t: torch.Tensor, shape: tuple[int, ...], dtypes: tuple, device: torch.device, align: int | None = None
) -> None:
    """Refuse a tensor that kernels could not read as it is. align: bytes, the element size by default."""
    if not isinstance(t, torch.Tensor):
        raise InputError(name, type(t).__name__, "a torch.Tensor")
    if t.dtype not in dtypes:
        raise InputError(f"{name}.dtype", t.dtype, " or ".join(str(d) for d in dtypes))
    if t.shape != shape:
        raise InputError(f"{name}.shape", tuple(t.shape), str(shape))
    if t.device != device:
        raise InputError(f"{name}.device", str(t.device), str(device))
    if not t.is_contiguous():
        raise InputError(f"{name}.stride", t.stride(), "contiguous")
    align = align or t.element_size()
    if t.data_ptr() % align:
        raise InputError(f"{name}.data_ptr", t.data_ptr(), f"{align}-byte aligned")


def check_inputs(
    cfg: MoEConfig, device: torch.device, x: Activations, topk_ids: torch.Tensor, topk_weights: torch.Tensor
) -> Inputs:
    """Check one rank's inputs.

    x: bf16 [T, H]; or pre-quantised, FP8 of cfg.fp8 [T, H] (scale="tensor") or (codes, scales fp32
    [T, H/128]) (scale="block"). topk_ids int32 or int64 [T, K]; topk_weights fp32 or bf16 [T, K].
    Raises InputError, which names the argument, its value and what is allowed.
    """
    scales = None
    fp8 = numerics.fp8_dtype(cfg.fp8)
    if isinstance(x, (tuple, list)):
        if cfg.scale != "block" or len(x) != 2:
            raise InputError("x", f"a tuple of {len(x)}", "one tensor, or (codes, scales) with scale='block'")
        x, scales = x
    if not isinstance(x, torch.Tensor):
        raise InputError("x", type(x).__name__, "a torch.Tensor")
    if x.dim() != 2:
        raise InputError("x.shape", tuple(x.shape), f"[T, {cfg.hidden}]")
    tokens = x.shape[0]
    if tokens > cfg.max_tokens:
        raise InputError("x.shape", tuple(x.shape), f"[T, {cfg.hidden}] with T at most max_tokens ({cfg.max_tokens})")
    if scales is not None:
        dtypes = (fp8,)
    elif cfg.scale == "tensor":
        dtypes = (torch.bfloat16, fp8)
    else:
        dtypes = (torch.bfloat16,)
    _check("x", x, (tokens, cfg.hidden), dtypes, device, align=16)
    if scales is not None:
        _check("x scales", scales, (tokens, cfg.hidden // BLOCK), (torch.float32,), device)
    _check("topk_ids", topk_ids, (tokens, cfg.top_k), (torch.int32, torch.int64), device)
    _check("topk_weights", topk_weights, (tokens, cfg.top_k), (torch.float32, torch.bfloat16), device)
    return Inputs(x, scales, topk_ids, topk_weights, tokens)


def check_out(cfg: MoEConfig, device: torch.device, out: torch.Tensor, tokens: int) -> None:
    """Check a caller's output tensor: bf16 [T, H], contiguous. Raises InputError."""
    _check("out", out, (tokens, cfg.hidden), (torch.bfloat16,), device, align=16)
