"""ExpertWeights: bf16 or FP8 checkpoints in the layout that the kernels read, and back.

Kernels read the rows of w13 and w2 permuted in tiles of 128 (wire.interleave_gate_up, interleave_down), so
that a thread finds gate and up of the same column, and runs of output columns, in its own registers. Scales
are not permuted. Everything here works on one expert at a time: besides the result only one expert's
temporaries exist, and no index depends on the size of the whole tensor. Results hold no autograd graph and nothing
of the tensors that they were made from: parameters may be handed in as they are.

Shapes are checked, but H == 2I makes w13 square and H == I makes w2 square: a transposed weight cannot be
told from a right one then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import numerics, wire
from .config import BLOCK, FP8_MAX, MoEConfig
from .errors import ConfigError, InputError
from .numerics import CanonicalExperts
from .tensors import check_storage, check_tensor, check_type

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ORDERS = ("gate_up", "up_gate")
"""Which half of w13's 2I rows comes first."""

_HIGH = (torch.bfloat16, torch.float16, torch.float32)
_IDS = (torch.int32, torch.int64)
_LEAST_STATIC, _MOST_STATIC = numerics.fp32(1e-30), numerics.fp32(1e30)  # kernels also use the reciprocal
_SCALES = tuple(
    getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float8_e8m0fnu") if hasattr(torch, name)
)


# ---------------------------------------------------------------- layout


def _gate_up_rows(rows: int, device: torch.device) -> Tensor:
    """int64 [2I]: the canonical row of each kernel row of w13."""
    order = torch.tensor(wire.interleave_gate_up(), device=device)
    half = BLOCK // 2
    tiles = torch.arange(rows // BLOCK, device=device)[:, None] * half
    return (tiles + order % half + (order // half) * (rows // 2)).flatten()


def _down_rows(rows: int, device: torch.device) -> Tensor:
    """int64 [H]: the canonical row of each kernel row of w2."""
    order = torch.tensor(wire.interleave_down(), device=device)
    return (torch.arange(rows // BLOCK, device=device)[:, None] * BLOCK + order).flatten()


@torch.no_grad()
def _permute(name: str, w: Tensor, source: Callable[[int, torch.device], Tensor], inverse: bool) -> Tensor:
    _check_readable(name, w)
    if w.ndim not in (2, 3) or w.shape[-2] % BLOCK:
        raise InputError(f"{name}.shape", tuple(w.shape), f"[E_local, N, K] or [N, K] with N a multiple of {BLOCK}")
    rows = source(w.shape[-2], w.device)
    if inverse:
        rows = torch.argsort(rows)
    out = torch.empty(w.shape, dtype=w.dtype, device=w.device)
    for target, matrix in zip(out.unsqueeze(0).flatten(0, -3), w.unsqueeze(0).flatten(0, -3)):
        target.copy_(numerics.take_rows(matrix, rows))
    return out


def interleave_w13(w: Tensor) -> Tensor:
    """Canonical w13 [E_local, 2I, H] or [2I, H] (gate rows, then up rows; any dtype) -> a copy in kernel order.

    Row p of tile t holds column 64t + v % 64 with v = wire.interleave_gate_up()[p], gate if v < 64, else up.
    """
    return _permute("w13", w, _gate_up_rows, inverse=False)


def deinterleave_w13(w: Tensor) -> Tensor:
    """Inverse of interleave_w13."""
    return _permute("w13", w, _gate_up_rows, inverse=True)


def permute_w2(w: Tensor) -> Tensor:
    """Canonical w2 [E_local, H, I] or [H, I] (any dtype) -> a copy in kernel order.

    Row p of tile t holds row 128t + wire.interleave_down()[p].
    """
    return _permute("w2", w, _down_rows, inverse=False)


def unpermute_w2(w: Tensor) -> Tensor:
    """Inverse of permute_w2."""
    return _permute("w2", w, _down_rows, inverse=True)


# ---------------------------------------------------------------- checks


def _check_order(order: str) -> None:
    if order not in ORDERS:
        raise InputError("order", order, "'gate_up' or 'up_gate'")


def _check_readable(name: str, x: Tensor) -> None:
    """Refuse what torch could not read as this rank's data. Any strides will do, unlike for tensors.check_memory."""
    check_type(name, x)
    if x.is_meta:
        raise InputError(f"{name}.device", "meta", "a device with memory")
    check_storage(name, x)


def _check_dtype(name: str, x: Tensor, allowed: Sequence[torch.dtype], hint: str = "") -> None:
    _check_readable(name, x)
    if x.dtype not in allowed:
        raise InputError(f"{name}.dtype", x.dtype, " or ".join(map(str, allowed)) + hint)


def _check_shape(name: str, x: Tensor, shape: tuple[int, ...], symbols: str) -> None:
    if tuple(x.shape) == shape:
        return
    swapped = len(shape) > 1 and tuple(x.shape) == (*shape[:-2], shape[-1], shape[-2])
    hint = "; it looks transposed" if swapped else ""
    raise InputError(f"{name}.shape", tuple(x.shape), f"{symbols} = {shape}{hint}")


def _check_pair(cfg: MoEConfig, w13: Tensor, w2: Tensor, dtypes: Sequence[torch.dtype], hint: str) -> int:
    """Checks both weights against cfg; returns E_local."""
    for name, w in (("w13", w13), ("w2", w2)):
        _check_dtype(name, w, dtypes, hint)
        if w.ndim != 3:
            raise InputError(f"{name}.shape", tuple(w.shape), "three dimensions, experts first")
    local = w13.shape[0]
    if local < 1 or cfg.num_experts % local:
        raise InputError("w13.shape[0]", local, f"the experts of one rank, a divisor of {cfg.num_experts}")
    cfg.experts_local(cfg.num_experts // local)
    _check_shape("w13", w13, (local, 2 * cfg.intermediate, cfg.hidden), "[E_local, 2I, H]")
    _check_shape("w2", w2, (local, cfg.hidden, cfg.intermediate), "[E_local, H, I]")
    return local


def _check_scale(name: str, scale: Tensor, shape: tuple[int, ...], symbols: str, rows: int) -> None:
    _check_dtype(name, scale, _SCALES)
    got = tuple(scale.shape)
    if got != shape and got in ((shape[0], rows), (shape[0], rows, 1)):
        why = "per-channel FP8 (one scale a weight row) is neither scale='block' nor scale='tensor'"
        raise InputError(f"{name}.shape", got, f"{symbols} = {shape}; {why}: requantise from bf16")
    _check_shape(name, scale, shape, symbols)
    values = scale.float()
    if not bool((values.isfinite() & (values >= 0)).all()):
        raise InputError(name, "a tensor with negative, infinite or NaN values", "finite and at least 0 everywhere")


def _static_scale(cfg: MoEConfig, name: str, value: float | Tensor | None) -> float | None:
    """The static scale as the nearest fp32 number (kernels read fp32 and ranks compare it), None in block mode."""
    if cfg.scale == "block":
        if value is not None:
            raise InputError(name, value, "left out with scale='block' (scales come from each row)")
        return None
    allowed = "a number from 1e-30 to 1e30 with scale='tensor'; megamoe.calibrate finds one from sample tokens"
    kind = str(getattr(value, "dtype", type(value).__name__))  # numpy's and torch's booleans too
    if value is None or isinstance(value, (str, bytes, bytearray)) or kind.endswith("bool"):
        raise InputError(name, value, allowed)
    if isinstance(value, Tensor):
        check_type(name, value)
        value = value.detach()
    try:
        scale = numerics.fp32(float(value))
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InputError(name, value, allowed) from error
    if not _LEAST_STATIC <= scale <= _MOST_STATIC:
        raise InputError(name, value, allowed)
    return scale


def _check_mode(cfg: MoEConfig, scale: str, function: str) -> None:
    if cfg.scale != scale:
        raise ConfigError("scale", cfg.scale, f"{scale!r} for ExpertWeights.{function}")


def _device(w13: Tensor, w2: Tensor, device: torch.device | str | None) -> torch.device:
    if device is not None:
        try:
            target = torch.device(device)
        except (RuntimeError, TypeError, ValueError) as error:
            raise InputError("device", device, "a torch device, such as 'cuda:1' or 'cpu'") from error
        if target.type == "meta":
            raise InputError("device", "meta", "a device with memory")
        return target
    if w13.device != w2.device:
        raise InputError("w2.device", str(w2.device), f"w13's device ({w13.device}), or pass device=")
    return w13.device


# ---------------------------------------------------------------- the pack


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """One rank's experts in kernel layout. Make it with from_bf16, from_fp8_blocks or from_fp8_tensor.

    cfg: the config it was made for. w13 FP8 [E_local, 2I, H] and w2 FP8 [E_local, H, I], rows in kernel order,
    contiguous. "block": w13_scale fp32 [E_local, 2, I/128, H/128] (0 gate, 1 up), w2_scale fp32
    [E_local, H/128, I/128]; x_scale and act_scale None. "tensor": both weight scales fp32 [E_local]; x_scale
    and act_scale static, from 1e-30 to 1e30, kept as the nearest fp32 number, equal on every rank.

    Nothing in a pack requires grad. A pack made by hand from these fields shares memory with the tensors that it was
    given (detached from their graph), one of the loaders' shares none with their inputs.
    Raises InputError for what a kernel could not read: other dtypes, shapes and devices, DTensors and other wrappers,
    meta tensors, freed storages, strides, addresses that are no multiple of 16 bytes.
    """

    cfg: MoEConfig
    w13: Tensor
    w13_scale: Tensor
    w2: Tensor
    w2_scale: Tensor
    x_scale: float | None = None
    act_scale: float | None = None

    def __post_init__(self) -> None:
        """Refuse what kernels could not read: they get addresses, so nothing else looks at these tensors."""
        check_type("w13", self.w13)
        if self.w13.is_meta:
            raise InputError("w13.device", "meta", "a device with memory")
        cfg, count = self.cfg, self.w13.shape[0] if self.w13.ndim else 0
        hidden, inter, fp8 = cfg.hidden, cfg.intermediate, numerics.fp8_dtype(cfg.fp8)
        block = cfg.scale == "block"
        wanted = {
            "w13": (fp8, (count, 2 * inter, hidden)),
            "w13_scale": (torch.float32, (count, 2, inter // BLOCK, hidden // BLOCK) if block else (count,)),
            "w2": (fp8, (count, hidden, inter)),
            "w2_scale": (torch.float32, (count, hidden // BLOCK, inter // BLOCK) if block else (count,)),
        }
        for name, (dtype, shape) in wanted.items():
            tensor = getattr(self, name)
            check_tensor(name, tensor, (dtype,), shape, self.w13.device, align=16)
            object.__setattr__(self, name, tensor.detach())
        for name in ("x_scale", "act_scale"):
            object.__setattr__(self, name, _static_scale(cfg, name, getattr(self, name)))

    def __repr__(self) -> str:
        shapes = f"w13 {list(self.w13.shape)}, w2 {list(self.w2.shape)}"
        statics = f", x_scale {self.x_scale:.4g}, act_scale {self.act_scale:.4g}" if self.x_scale is not None else ""
        mode = f"{self.cfg.fp8}, {self.cfg.scale} scales{statics}"
        return f"ExpertWeights({shapes}, {mode}, {self.nbytes:,} bytes on {self.device})"

    @property
    def experts_local(self) -> int:
        """E_local."""
        return self.w13.shape[0]

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.w13.device

    @property
    def nbytes(self) -> int:
        """Bytes of weights and scales."""
        return sum(t.numel() * t.element_size() for t in (self.w13, self.w13_scale, self.w2, self.w2_scale))

    @classmethod
    def from_bf16(
        cls,
        cfg: MoEConfig,
        w13: Tensor,
        w2: Tensor,
        *,
        x_scale: float | None = None,
        act_scale: float | None = None,
        order: str = "gate_up",
        device: torch.device | str | None = None,
    ) -> ExpertWeights:
        """Quantise one rank's experts.

        w13 [E_local, 2I, H] and w2 [E_local, H, I], bf16 (or fp16, fp32). order: "gate_up" when w13's first I
        rows are gate (w1, then w3), "up_gate" for the other. x_scale, act_scale: needed with scale="tensor"
        (see calibrate), refused with "block". device: where the pack goes, else where w13 is.
        Raises InputError, or ConfigError when E / E_local is not 1 to 8 ranks. A NaN or infinite weight is named by
        its expert in this pack, as in w13[3].
        """
        hint = "; for FP8 checkpoints use from_fp8_blocks or from_fp8_tensor"
        _check_pair(cfg, w13, w2, _HIGH, hint)
        statics = _static_scale(cfg, "x_scale", x_scale), _static_scale(cfg, "act_scale", act_scale)
        _check_order(order)
        return _build(cfg, (w13, None), (w2, None), statics, order, _device(w13, w2, device))

    @classmethod
    def from_fp8_blocks(
        cls,
        cfg: MoEConfig,
        w13: Tensor,
        w13_scale_inv: Tensor,
        w2: Tensor,
        w2_scale_inv: Tensor,
        *,
        order: str = "gate_up",
        device: torch.device | str | None = None,
    ) -> ExpertWeights:
        """Experts of a checkpoint with 128x128 block scales (DeepSeek-V3, Qwen3 FP8); codes stay as they are.

        w13 [E_local, 2I, H], w2 [E_local, H, I] in cfg's FP8 format; w13_scale_inv [E_local, 2I/128, H/128] and
        w2_scale_inv [E_local, H/128, I/128] as the checkpoint's weight_scale_inv (value = code * scale_inv), fp32
        or a format that fp32 holds exactly. order covers codes and scales. Raises InputError (also for codes that are
        NaN or infinite, named by their expert as in w13[3]) or ConfigError.
        """
        _check_mode(cfg, "block", "from_fp8_blocks")
        local = _check_pair(cfg, w13, w2, (numerics.fp8_dtype(cfg.fp8),), f" (cfg.fp8 = {cfg.fp8!r})")
        h, i = cfg.hidden // BLOCK, cfg.intermediate // BLOCK
        shape13, shape2 = (local, 2 * i, h), (local, h, i)
        _check_scale("w13_scale_inv", w13_scale_inv, shape13, "[E_local, 2I/128, H/128]", 2 * cfg.intermediate)
        _check_scale("w2_scale_inv", w2_scale_inv, shape2, "[E_local, H/128, I/128]", cfg.hidden)
        _check_order(order)
        pairs = (w13, w13_scale_inv), (w2, w2_scale_inv)
        return _build(cfg, *pairs, (None, None), order, _device(w13, w2, device))

    @classmethod
    def from_fp8_tensor(
        cls,
        cfg: MoEConfig,
        w13: Tensor,
        w13_scale: Tensor,
        w2: Tensor,
        w2_scale: Tensor,
        *,
        x_scale: float | None = None,
        act_scale: float | None = None,
        order: str = "gate_up",
        device: torch.device | str | None = None,
    ) -> ExpertWeights:
        """Experts of a checkpoint with one scale an expert and weight; codes stay as they are.

        w13 [E_local, 2I, H], w2 [E_local, H, I] in cfg's FP8 format; w13_scale, w2_scale [E_local], value =
        code * scale. Gate and up must share w13's scale. x_scale and act_scale are needed.
        Raises InputError (also for codes that are NaN or infinite, named as in w13[3]) or ConfigError.
        """
        _check_mode(cfg, "tensor", "from_fp8_tensor")
        local = _check_pair(cfg, w13, w2, (numerics.fp8_dtype(cfg.fp8),), f" (cfg.fp8 = {cfg.fp8!r})")
        _check_scale("w13_scale", w13_scale, (local,), "[E_local]", 2 * cfg.intermediate)
        _check_scale("w2_scale", w2_scale, (local,), "[E_local]", cfg.hidden)
        statics = _static_scale(cfg, "x_scale", x_scale), _static_scale(cfg, "act_scale", act_scale)
        _check_order(order)
        return _build(cfg, (w13, w13_scale), (w2, w2_scale), statics, order, _device(w13, w2, device))

    def canonical(self) -> CanonicalExperts:
        """A copy in checkpoint order with gate before up, for the oracle."""
        scale = self.w13_scale if self.cfg.scale == "tensor" else self.w13_scale.flatten(1, 2)
        w13, w2 = deinterleave_w13(self.w13), unpermute_w2(self.w2)
        return CanonicalExperts(w13, scale, w2, self.w2_scale, self.x_scale, self.act_scale)

    @staticmethod
    def shard(rank: int, world_size: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Views of one rank's experts, [rank * E/W, (rank + 1) * E/W), of tensors [E, ...] of all experts."""
        if not 0 <= rank < world_size:
            raise InputError("rank", rank, f"0 to world_size - 1 ({world_size - 1})")
        for tensor in tensors:
            check_type("tensors", tensor)
            if tensor.ndim == 0 or tensor.shape[0] % world_size:
                raise InputError("tensors", tuple(tensor.shape), f"[E, ...] with E a multiple of {world_size} ranks")
        return tuple(t.narrow(0, rank * (t.shape[0] // world_size), t.shape[0] // world_size) for t in tensors)


@torch.no_grad()
def _build(
    cfg: MoEConfig,
    w13: tuple[Tensor, Tensor | None],
    w2: tuple[Tensor, Tensor | None],
    statics: tuple[float | None, float | None],
    order: str,
    device: torch.device,
) -> ExpertWeights:
    """The pack of checked (weights, scales) pairs; scales None means the weights are still to be quantised."""
    half = cfg.intermediate // BLOCK
    source = _gate_up_rows(2 * cfg.intermediate, device)
    scale_source = None
    if order == "up_gate":
        source = (source + cfg.intermediate) % (2 * cfg.intermediate)
        if cfg.scale == "block":
            scale_source = (torch.arange(2 * half, device=device) + half) % (2 * half)
    first, first_scale, first_largest = _convert(cfg, *w13, source, scale_source, device)
    second, second_scale, second_largest = _convert(cfg, *w2, _down_rows(cfg.hidden, device), None, device)
    for name, largest in zip(("w13", "w2"), torch.stack((first_largest, second_largest)).tolist()):  # waits once
        _check_finite(name, largest)
    if cfg.scale == "block":
        first_scale = first_scale.unflatten(1, (2, half))
    return ExpertWeights(cfg, first, first_scale, second, second_scale, *statics)


def _convert(
    cfg: MoEConfig, w: Tensor, scale: Tensor | None, source: Tensor, scale_source: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [E_local, N, K] with rows taken in `source` order, their fp32 scales, block rows in `scale_source`, and
    the largest magnitudes fp32 [E_local] of w."""
    experts, n, k = w.shape
    shape = (experts, n // BLOCK, k // BLOCK) if cfg.scale == "block" else (experts,)
    codes = torch.empty(w.shape, dtype=numerics.fp8_dtype(cfg.fp8), device=device)
    scales = torch.empty(shape, dtype=torch.float32, device=device)
    largest = torch.empty(experts, dtype=torch.float32, device=device)
    quantize = numerics.quantize_weight_blocks if cfg.scale == "block" else numerics.quantize_weight_tensor
    for index in range(experts):
        part = w[index : index + 1].to(device)
        largest[index] = _largest(part)
        part, part_scale = quantize(part, cfg.fp8) if scale is None else (part, scale[index : index + 1])
        codes[index] = numerics.take_rows(part[0], source)
        part_scale = part_scale.to(device=device, dtype=torch.float32)
        scales[index] = part_scale[0] if scale_source is None else part_scale[0][scale_source]
    return codes, scales, largest


def _largest(w: Tensor) -> Tensor:
    """fp32 []: the largest magnitude of weights or FP8 codes; NaN or infinite when one of them is."""
    if w.dtype in numerics.FP8_DTYPE.values():
        return (w.view(torch.uint8) & 0x7F).amax().view(w.dtype).float()
    return torch.stack(w.aminmax()).float().abs().amax()


def _check_finite(name: str, largest: Sequence[float]) -> None:
    """Refuse the first expert whose largest magnitude is not finite."""
    for index, value in enumerate(largest):
        if not math.isfinite(value):
            what = "NaN values" if math.isnan(value) else "infinite values"
            raise InputError(f"{name}[{index}]", what, "finite values")


# ---------------------------------------------------------------- calibration


@torch.no_grad()
@numerics.exact_matmul()
def calibrate(
    cfg: MoEConfig,
    w13: Tensor | Sequence[Tensor],
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    expert_ids: Sequence[int] | None = None,
    margin: float = 1.25,
    order: str = "gate_up",
    group: ProcessGroup | None = None,
) -> tuple[float, float]:
    """Static scales (x_scale, act_scale) of scale="tensor" from sample tokens: amax * margin / fp8_max.

    w13: bf16 (or fp16, fp32) [n, 2I, H], or n tensors [2I, H]; w2 does not matter. expert_ids: which experts
    these are, all of 0..E-1 when left out; routes to others are skipped. x [T, H], topk_ids and topk_weights
    [T, K]: tokens as the layer will see them. act's amax is taken with x and w13 quantised, after clamp and
    SwiGLU, with the routing weight when route_weight="activation". amax ignores NaN.

    The scales must be equal on every rank. Either compute them once and hand them round, or call this on every
    rank with `group`: both amax are then all-reduced (max) over it. For a rank that holds only some experts,
    feed the same tokens everywhere. Autocast, TF32 and the default device change no bit of them.
    Raises InputError (a NaN or infinite weight of an expert with routes is named by its place, as in w13[3]), or
    ConfigError for scale="block".
    """
    if cfg.scale != "tensor":
        raise ConfigError("scale", cfg.scale, "'tensor' for calibrate (block scales come from each row)")
    ids = list(range(cfg.num_experts) if expert_ids is None else expert_ids)
    _check_calibration(cfg, w13, ids, x, topk_ids, topk_weights, margin)
    _check_order(order)
    x_scale = _amax_scale(cfg, numerics.magnitude(x).flatten(), margin, group, "x")
    values = numerics.dequantize_static(numerics.quantize_static(x, x_scale, cfg.fp8), x_scale)
    largest = torch.zeros(1, dtype=torch.float32, device=x.device)
    weights_largest = [0.0] * len(ids)
    for index, (expert, weight) in enumerate(zip(ids, w13)):
        token, slot = (topk_ids == expert).nonzero(as_tuple=True)
        if token.numel() == 0:
            continue
        weight = weight.to(x.device)
        weights_largest[index] = _largest(weight).item()
        w = numerics.dequantize_weight_tensor(*numerics.quantize_weight_tensor(weight[None], cfg.fp8))
        halves = (values[token] @ w[0].T).split(cfg.intermediate, dim=1)
        act = numerics.swiglu(*(halves if order == "gate_up" else halves[::-1]), cfg.clamp)
        if cfg.route_weight == "activation":
            act = act * topk_weights[token, slot, None].float()
        largest = torch.maximum(largest, numerics.magnitude(act).amax())
    if not all(map(math.isfinite, weights_largest)):
        largest.fill_(math.inf)  # all ranks of the group then refuse, none waits for this one
    try:
        act_scale = _amax_scale(cfg, largest, margin, group, "FC1's activations")
    finally:
        _check_finite("w13", weights_largest)
    return x_scale, act_scale


def _check_calibration(cfg: MoEConfig, w13, ids: list[int], x: Tensor, topk_ids, topk_weights, margin: float) -> None:
    if len(ids) != len(w13):
        raise InputError("len(w13)", len(w13), f"{len(ids)}, one weight for each expert id")
    for expert in ids:
        if not 0 <= expert < cfg.num_experts:
            raise InputError("expert_ids", expert, f"0 to {cfg.num_experts - 1}")
    if isinstance(w13, Tensor):
        _check_readable("w13", w13)
    for weight in w13:
        _check_dtype("w13", weight, _HIGH)
        _check_shape("w13", weight, (2 * cfg.intermediate, cfg.hidden), "[2I, H] for each expert")
    _check_dtype("x", x, _HIGH)
    _check_shape("x", x, (x.shape[0] if x.ndim else 0, cfg.hidden), "[T, H]")
    for name, tensor, dtypes in (("topk_ids", topk_ids, _IDS), ("topk_weights", topk_weights, _HIGH)):
        _check_dtype(name, tensor, dtypes)
        if tensor.device != x.device:
            raise InputError(f"{name}.device", str(tensor.device), f"x's device ({x.device})")
        _check_shape(name, tensor, (x.shape[0], cfg.top_k), "[T, K]")
    if not 1 <= margin < math.inf:
        raise InputError("margin", margin, "a finite number of at least 1")


def _amax_scale(cfg: MoEConfig, magnitudes: Tensor, margin: float, group: ProcessGroup | None, what: str) -> float:
    """max(amax, floor) * margin / fp8_max as an fp32 number, amax over all ranks of `group`."""
    amax = magnitudes.amax().reshape(1) if magnitudes.numel() else magnitudes.new_zeros(1)
    if group is not None:
        torch.distributed.all_reduce(amax, op=torch.distributed.ReduceOp.MAX, group=group)
    value = max(amax.item(), numerics.AMAX_FLOOR) * margin / FP8_MAX[cfg.fp8]
    scale = numerics.fp32(value)
    if not scale <= _MOST_STATIC:
        raise InputError(what, amax.item(), "finite, and of a scale of at most 1e30")
    return scale
