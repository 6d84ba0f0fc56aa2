"""A layer as torch operators, for torch.compile, torch.export and other tracers.

    torch.ops.megamoe.forward(x, topk_ids, topk_weights, x_scale, layer) -> y
    torch.ops.megamoe.forward_out(x, topk_ids, topk_weights, x_scale, layer, *, out) -> ()

x, topk_ids, topk_weights, out: as in MegaMoE.__call__, of one rank. x_scale: None, or the fp32 [T, H/128] scales of
pre-quantised x. layer: MegaMoE.handle, a CPU int64 tensor without dimensions that holds the layer's number in this
process. As a tensor it is an input of the traced graph, so that all layers of a model share one graph.

The operators are marked as unfit for capture by the compiler, which splits its CUDA graphs around them: a graph would
keep the layer that it was recorded with, whatever `layer` says later. Captures by the caller are not affected.
"""

from __future__ import annotations

import itertools
import secrets
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .errors import InputError, MegaMoEError

_ARGS = "Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor? x_scale, Tensor layer"
_TAGS = [getattr(torch.Tag, name) for name in ("cudagraph_unsafe", "pt2_compliant_tag") if hasattr(torch.Tag, name)]

_library = torch.library.Library("megamoe", "DEF")
_library.define(f"forward({_ARGS}) -> Tensor", tags=_TAGS)
_library.define(f"forward_out({_ARGS}, *, Tensor(a!) out) -> ()", tags=_TAGS)
_library.define("inference_only(Tensor grad, Tensor like) -> Tensor", tags=_TAGS)

_NO_DERIVATIVE = "megamoe is for inference only: call layers under torch.no_grad(), no derivative passes through them"

_PRE_DISPATCH = torch._C.DispatchKey.PreDispatch
_modes, _transform = torch._C._len_torch_dispatch_stack, torch._C._functorch.peek_interpreter_stack
_jit_trace, _key_included = torch._C._get_tracing_state, torch._C._dispatch_tls_is_dispatch_key_included

_layers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_at: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # by the address of the handle's number
_numbers = itertools.count(secrets.randbits(62))  # so that a number of another process names no layer here


def register(layer: object) -> Tensor:
    """The handle of a new layer; it names the layer for as long as that lives and is open."""
    number = next(_numbers)
    with torch.inference_mode(False):
        handle = torch.tensor(number, dtype=torch.int64, device="cpu")
    _layers[number] = _at[handle.data_ptr()] = layer
    return handle


def forget(handle: Tensor) -> None:
    """End a handle: the operators refuse it from now on."""
    _layers.pop(int(handle), None)
    _at.pop(handle.data_ptr(), None)


def _find(handle: Tensor) -> Callable[..., Any]:
    """What runs the layer of a handle: f(x, topk_ids, topk_weights, out). Raises InputError or MegaMoEError."""
    if not isinstance(handle, Tensor):
        raise InputError("layer", handle, "MegaMoE.handle, a CPU int64 tensor without dimensions")
    layer = _at.get(handle.data_ptr())  # faster than the number; a layer keeps its handle, so no other one is there
    if layer is not None:
        return layer.run
    if handle.device.type != "cpu" or handle.dtype is not torch.int64 or handle.ndim:
        found = f"{handle.dtype} {list(handle.shape)} on {handle.device}"
        raise InputError("layer", found, "MegaMoE.handle, a CPU int64 tensor without dimensions")
    layer = _layers.get(handle.item())
    if layer is None:
        raise MegaMoEError(f"layer {handle.item()} is closed, or of another process")
    return layer.run


# ---- kernels -------------------------------------------------------------------------------------


def _forward(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, x_scale: Tensor | None, layer: Tensor) -> Tensor:
    return _find(layer)(x if x_scale is None else (x, x_scale), topk_ids, topk_weights, None)


def _forward_out(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, x_scale: Tensor | None, layer: Tensor, *, out: Tensor
) -> None:
    _find(layer)(x if x_scale is None else (x, x_scale), topk_ids, topk_weights, out)


def _inference_only(grad: Tensor, like: Tensor) -> Tensor:
    raise MegaMoEError(
        "megamoe is for inference only: its layers have no backward pass; call them under torch.no_grad()"
    )


def _fake_forward(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, x_scale: Tensor | None, layer: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)


def _fake_forward_out(*args: Any, **kwargs: Any) -> None:
    return None


def _fake_inference_only(grad: Tensor, like: Tensor) -> Tensor:
    return torch.empty_like(like)


for _name, _kernel, _fake in (
    ("forward", _forward, _fake_forward),
    ("forward_out", _forward_out, _fake_forward_out),
    ("inference_only", _inference_only, _fake_inference_only),
):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _kernel, _key)
    torch.library.register_fake(f"megamoe::{_name}", _fake, lib=_library)


# ---- gradients -----------------------------------------------------------------------------------


class _InferenceOnly(torch.autograd.Function):
    """Ties a result to the inputs that want gradients, so that a backward pass raises instead of dropping them."""

    @staticmethod
    def forward(y: Tensor, *wanted: Tensor) -> Tensor:
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.mark_dirty(inputs[0])
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # An operator, because compilers trace a backward pass that the program may never run.
        return None, *(torch.ops.megamoe.inference_only(grad, like) for like in ctx.saved_tensors)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        raise MegaMoEError(_NO_DERIVATIVE)


def _follows(t: Tensor | None) -> bool:
    """Whether autograd follows a tensor now, backward or forward."""
    if t is None:
        return False
    if t.requires_grad and torch.is_grad_enabled():
        return True
    return has_tangent(t)


def inference_only(y: Tensor, inputs: Sequence[Tensor | None]) -> Tensor:
    """y, the result of a forward of `inputs`; a derivative through it raises MegaMoEError.

    Inside torch.func.grad and the like it raises at once: there the derivative is certain to follow.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise MegaMoEError(_NO_DERIVATIVE)
    return _InferenceOnly.apply(y, *(t for t in inputs if _follows(t)))


def has_tangent(t: Tensor) -> bool:
    """Whether a tensor carries a tangent of forward-mode AD."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(t).tangent is not None


def records_graph() -> bool:
    """Whether make_fx or jit.trace records operators now; other modes only watch them."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return _jit_trace() is not None or _key_included(_PRE_DISPATCH) or get_proxy_mode() is not None


def differentiates() -> bool:
    """Whether there can be anything that autograd follows."""
    return torch.is_grad_enabled() or forward_ad._current_level >= 0


def wants_gradient(inputs: Sequence[Tensor | None]) -> bool:
    """Whether autograd follows one of them now."""
    return any(map(_follows, inputs))


def is_traced() -> bool:
    """Whether a mode, a torch.func transform or jit.trace watches operators: it would miss launches, which are none."""
    return bool(_modes() or _transform() is not None or _jit_trace() is not None or _key_included(_PRE_DISPATCH))


def _nothing_below(x: Tensor) -> bool:
    """Whether no tracer or mode waits below autograd: then its kernel calls ours, which saves half of the host time."""
    return type(x) is Tensor and not is_traced() and x.device.type in ("cuda", "cpu")


def _autograd_forward(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, x_scale: Tensor | None, layer: Tensor
) -> Tensor:
    if _nothing_below(x):
        y = _forward(x, topk_ids, topk_weights, x_scale, layer)
    else:
        with torch._C._AutoDispatchBelowAutograd():
            y = torch.ops.megamoe.forward.default(x, topk_ids, topk_weights, x_scale, layer)
    inputs = (x, topk_weights, x_scale)
    return inference_only(y, inputs) if wants_gradient(inputs) else y


def _autograd_forward_out(
    x: Tensor, topk_ids: Tensor, topk_weights: Tensor, x_scale: Tensor | None, layer: Tensor, *, out: Tensor
) -> None:
    if _nothing_below(x):
        _forward_out(x, topk_ids, topk_weights, x_scale, layer, out=out)
    else:
        with torch._C._AutoDispatchBelowAutograd():
            torch.ops.megamoe.forward_out.default(x, topk_ids, topk_weights, x_scale, layer, out=out)
    inputs = (x, topk_weights, x_scale)
    if wants_gradient(inputs):
        inference_only(out, inputs)


_library.impl("forward", _autograd_forward, "Autograd")
_library.impl("forward_out", _autograd_forward_out, "Autograd")

forward = torch.ops.megamoe.forward.default
forward_out = torch.ops.megamoe.forward_out.default
