"""Host checks of what a caller hands to forward. Nothing here touches the device."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from . import numerics
from .config import BLOCK, MoEConfig
from .errors import InputError
from .tensors import all_readable, check_tensor, check_type

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


_IDS, _WEIGHTS = (torch.int32, torch.int64), (torch.float32, torch.bfloat16)
_BF16 = torch.bfloat16


def quick_inputs(cfg: MoEConfig, device: torch.device, x: Any, topk_ids: Any, topk_weights: Any, out: Any) -> Any:
    """The Inputs of good bf16 arguments, or None of others, which check_inputs and check_out judge. Saves host time."""
    tensors = (x, topk_ids, topk_weights) if out is None else (x, topk_ids, topk_weights, out)
    if not all_readable(tensors, device):
        return None
    try:
        shape = x.shape
        if len(shape) != 2 or shape[1] != cfg.hidden or x.dtype is not _BF16 or x.data_ptr() % 16:
            return None
        tokens = shape[0]
        routes = (tokens, cfg.top_k)
        good = tokens <= cfg.max_tokens and topk_ids.shape == routes and topk_weights.shape == routes
        good = good and topk_ids.dtype in _IDS and topk_weights.dtype in _WEIGHTS
        if out is not None:
            good = (
                good and out.shape == shape and out.dtype is _BF16 and not out.data_ptr() % 16 and not out.requires_grad
            )
    except RuntimeError:  # nested tensors have no shape
        return None
    return Inputs(x, None, topk_ids, topk_weights, tokens) if good else None


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
    if type(x) is not torch.Tensor or x.is_nested:
        check_type("x", x)
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
        if x.dtype is fp8:
            raise InputError("x.dtype", x.dtype, "torch.bfloat16, or (codes, scales) with scale='block'")
    check_tensor("x", x, dtypes, (tokens, cfg.hidden), device, align=16)
    if scales is not None:
        check_tensor("x scales", scales, (torch.float32,), (tokens, cfg.hidden // BLOCK), device)
    check_tensor("topk_ids", topk_ids, _IDS, (tokens, cfg.top_k), device)
    check_tensor("topk_weights", topk_weights, _WEIGHTS, (tokens, cfg.top_k), device)
    return Inputs(x, scales, topk_ids, topk_weights, tokens)


def check_out(cfg: MoEConfig, device: torch.device, out: torch.Tensor, tokens: int) -> None:
    """Check a caller's output tensor: bf16 [T, H], contiguous, no part of an autograd graph. Raises InputError."""
    if isinstance(out, torch.Tensor) and out.requires_grad and torch.is_grad_enabled():
        raise InputError("out", "a tensor that requires grad", "one that does not, or used under torch.no_grad()")
    check_tensor("out", out, (torch.bfloat16,), (tokens, cfg.hidden), device, align=16)
