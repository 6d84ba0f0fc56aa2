"""The oracle: each stage and the whole layer in plain torch, on CPU or GPU, accumulating in fp32 or fp64.

It reads canonical experts (numerics.CanonicalExperts) and computes what DESIGN's "Numbers" says, expert
by expert, so that only one expert's dequantised weights exist at a time. Codes and scales are what the
kernels should produce up to the order of their sums; with dtype=torch.float64 the sums are as good as exact.

Nothing here is differentiable: results never require grad, also where inputs do, and no graph is kept. Autocast,
TF32 and the default device change no bit (numerics.exact_matmul), and torch.inference_mode() is fine.

"Experts" of rows are ids into the pack that is handed in (local experts). A row whose id is outside the
pack is skipped: zeros come back for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from . import numerics
from .config import BLOCK, MoEConfig
from .errors import InputError
from .numerics import CanonicalExperts, exact_matmul

CODE_TOLERANCE = 5e-3
"""How far a dequantised value may be off, in rms of its group, when its code is not a neighbour."""


def _static(name: str, value: float | None) -> float:
    if value is None or not 0 < value < math.inf:
        raise InputError(name, value, "a finite number above 0 with scale='tensor'")
    return value


def _check_shape(name: str, x: Tensor, *shape: int) -> None:
    if tuple(x.shape) != shape:
        raise InputError(f"{name}.shape", tuple(x.shape), str(shape))


@torch.no_grad()
@exact_matmul()
def stage(cfg: MoEConfig, x: Tensor, x_scale: float | None = None) -> tuple[Tensor, Tensor | None]:
    """Quantise tokens: x [T, H] -> codes FP8 [T, H], and scales fp32 [T, H/128] or None in tensor mode.

    Raises InputError for another shape, or without x_scale in tensor mode.
    """
    if x.ndim != 2 or x.shape[1] != cfg.hidden:
        raise InputError("x.shape", tuple(x.shape), f"[T, {cfg.hidden}]")
    if cfg.scale == "tensor":
        return numerics.quantize_static(x, _static("x_scale", x_scale), cfg.fp8), None
    return numerics.quantize_groups(x, BLOCK, cfg.fp8)


def clean_routes(cfg: MoEConfig, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Routes as the kernels see them: ids int32 [T, K], -1 where outside 0..E-1, and weights fp32 [T, K]."""
    live = (ids >= 0) & (ids < cfg.num_experts)
    return torch.where(live, ids, -1).to(torch.int32), weights.detach().float()


def _by_expert(experts: Tensor, count: int) -> Iterator[tuple[int, Tensor]]:
    """(expert, its row indices in ascending order) for each of 0..count-1 that has rows."""
    experts = experts.long()
    bucket = torch.where((experts >= 0) & (experts < count), experts, count)
    order = torch.argsort(bucket, stable=True)
    start = 0
    for expert, rows in enumerate(torch.bincount(bucket, minlength=count + 1).tolist()[:count]):
        if rows:
            yield expert, order[start : start + rows]
        start += rows


def _product(cfg: MoEConfig, codes: Tensor, scales, name: str, static, w: Tensor, w_scale: Tensor, dtype) -> Tensor:
    """[R, N] accumulators of one expert: codes [R, K] times w [N, K], all scales applied; `static` is called name."""
    if cfg.scale == "block":
        a = numerics.dequantize_groups(codes, scales, dtype)
        return a @ numerics.dequantize_weight_blocks(w, w_scale, dtype).T
    return (codes.to(dtype) @ w.to(dtype).T) * (_static(name, static) * w_scale.to(dtype))


def _gate_and_up(cfg: MoEConfig, codes, scales, expert: int, pack: CanonicalExperts, dtype) -> Tensor:
    """FC1's output [R, 2I] of one expert's rows, gate then up."""
    return _product(cfg, codes, scales, "x_scale", pack.x_scale, pack.w13[expert], pack.w13_scale[expert], dtype)


def _fc1_rows(cfg: MoEConfig, codes, scales, expert: int, pack: CanonicalExperts, weights, dtype) -> Tensor:
    """SwiGLU results [R, I] of one expert's rows, the routing weight included where the config puts it here."""
    gate, up = _gate_and_up(cfg, codes, scales, expert, pack, dtype).split(cfg.intermediate, dim=1)
    act = numerics.swiglu(gate, up, cfg.clamp)
    return act * weights.to(dtype)[:, None] if cfg.route_weight == "activation" else act


def _fc2_rows(cfg: MoEConfig, codes, scales, expert: int, pack: CanonicalExperts, weights, dtype) -> Tensor:
    """FC2 rows [R, H] of one expert, before they are rounded to bf16."""
    rows = _product(cfg, codes, scales, "act_scale", pack.act_scale, pack.w2[expert], pack.w2_scale[expert], dtype)
    return rows * weights.to(dtype)[:, None] if cfg.route_weight == "output" else rows


@torch.no_grad()
@exact_matmul()
def quantize_activation(cfg: MoEConfig, act: Tensor, act_scale: float | None = None) -> tuple[Tensor, Tensor | None]:
    """FC1's output as FC2 reads it: act [R, I] -> codes FP8 [R, I], scales fp32 [R, I/act_group] or None."""
    if cfg.scale == "tensor":
        return numerics.quantize_static(act, _static("act_scale", act_scale), cfg.fp8), None
    return numerics.quantize_groups(act, cfg.act_group, cfg.fp8)


def _check_rows(cfg: MoEConfig, name: str, codes: Tensor, scales: Tensor | None, columns: int, group: int) -> None:
    if codes.ndim != 2 or codes.shape[1] != columns:
        raise InputError(f"{name}.shape", tuple(codes.shape), f"[R, {columns}]")
    if codes.dtype != numerics.fp8_dtype(cfg.fp8):
        raise InputError(f"{name}.dtype", codes.dtype, str(numerics.fp8_dtype(cfg.fp8)))
    if (scales is not None) != (cfg.scale == "block"):
        raise InputError("scales", scales, "a tensor with scale='block', None with scale='tensor'")
    if scales is not None:
        _check_shape("scales", scales, codes.shape[0], columns // group)


def _check_weights(cfg: MoEConfig, place: str, weights: Tensor | None, rows: int) -> None:
    if weights is not None:
        _check_shape("weights", weights, rows)
    elif cfg.route_weight == place:
        raise InputError("weights", None, f"the rows' routing weights with route_weight={place!r}")


def _take(x: Tensor | None, rows: Tensor) -> Tensor | None:
    return None if x is None else numerics.take_rows(x, rows)


@torch.no_grad()
@exact_matmul()
def fc1(
    cfg: MoEConfig,
    codes: Tensor,
    scales: Tensor | None,
    experts: Tensor,
    pack: CanonicalExperts,
    weights: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor | None]:
    """FC1, clamp, SwiGLU and quantisation of pool rows.

    codes FP8 [R, H]; scales fp32 [R, H/128] or None in tensor mode; experts int [R]; weights [R], needed with
    route_weight="activation". Returns "act" [R, I] in dtype (what is quantised, so with the routing weight
    in "activation" mode), "codes" FP8 [R, I] and "scales" fp32 [R, I/act_group] or None.
    """
    _check_rows(cfg, "codes", codes, scales, cfg.hidden, BLOCK)
    _check_weights(cfg, "activation", weights, codes.shape[0])
    act = torch.zeros(codes.shape[0], cfg.intermediate, dtype=dtype, device=codes.device)
    for expert, rows in _by_expert(experts, pack.w13.shape[0]):
        picked = (_take(codes, rows), _take(scales, rows))
        act[rows] = _fc1_rows(cfg, *picked, expert, pack, _take(weights, rows), dtype)
    out, out_scales = quantize_activation(cfg, act, pack.act_scale)
    return {"act": act, "codes": out, "scales": out_scales}


@torch.no_grad()
@exact_matmul()
def fc1_preactivation(
    cfg: MoEConfig,
    codes: Tensor,
    scales: Tensor | None,
    experts: Tensor,
    pack: CanonicalExperts,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """FC1's output before clamp and SwiGLU, all scales applied: [R, 2I] in dtype, gate then up. Arguments as in fc1."""
    _check_rows(cfg, "codes", codes, scales, cfg.hidden, BLOCK)
    both = torch.zeros(codes.shape[0], 2 * cfg.intermediate, dtype=dtype, device=codes.device)
    for expert, rows in _by_expert(experts, pack.w13.shape[0]):
        picked = (_take(codes, rows), _take(scales, rows))
        both[rows] = _gate_and_up(cfg, *picked, expert, pack, dtype)
    return both


@torch.no_grad()
@exact_matmul()
def fc2(
    cfg: MoEConfig,
    codes: Tensor,
    scales: Tensor | None,
    experts: Tensor,
    pack: CanonicalExperts,
    weights: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    rounded: bool = True,
) -> Tensor:
    """FC2 rows [R, H] in bf16, or in dtype before that rounding with rounded=False.

    codes FP8 [R, I]; scales fp32 [R, I/act_group] or None in tensor mode; experts int [R]; weights [R], needed
    with route_weight="output", where they multiply the accumulators.
    """
    _check_rows(cfg, "codes", codes, scales, cfg.intermediate, cfg.act_group)
    _check_weights(cfg, "output", weights, codes.shape[0])
    out_dtype = torch.bfloat16 if rounded else dtype
    out = torch.zeros(codes.shape[0], cfg.hidden, dtype=out_dtype, device=codes.device)
    for expert, rows in _by_expert(experts, pack.w2.shape[0]):
        picked = (_take(codes, rows), _take(scales, rows))
        out[rows] = _fc2_rows(cfg, *picked, expert, pack, _take(weights, rows), dtype).to(out_dtype)
    return out


@torch.no_grad()
@exact_matmul()
def reduce(slots: Tensor, ids: Tensor) -> Tensor:
    """Sum a token's rows: slots bf16 [T, K, H], ids [T, K] (below 0 = masked, never read) -> bf16 [T, H].

    fp32 sum from zero in the order k = 0..K-1; a token with every route masked gets zeros.
    """
    total = torch.zeros(slots.shape[0], slots.shape[2], dtype=torch.float32, device=slots.device)
    for k in range(slots.shape[1]):
        total = torch.where(ids[:, k, None] >= 0, total + slots[:, k].float(), total)
    return total.to(torch.bfloat16)


@torch.no_grad()
@exact_matmul()
def layer(
    cfg: MoEConfig,
    experts: Sequence[CanonicalExperts],
    xs: Sequence[Tensor | tuple[Tensor, Tensor | None]],
    ids: Sequence[Tensor],
    weights: Sequence[Tensor],
    world_size: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """The whole layer of W ranks: the list of y bf16 [T_r, H].

    experts: packs that hold experts 0..E-1 together, in rank order (one pack of all E is fine too).
    xs, ids, weights: one entry a rank, x [T_r, H] or (codes, scales) already quantised, ids and weights
    [T_r, K]. world_size, when given, must be their number. All tensors on one device. The tokens of all
    ranks are computed together, so a result depends on W only through which rank asked for it. Raises
    InputError for packs that aren't canonical, tensors or other lengths instead of lists, and shapes that don't fit.
    """
    if not all(isinstance(pack, CanonicalExperts) for pack in experts):
        allowed = "numerics.CanonicalExperts, as experts.canonical() gives"
        raise InputError("experts", [type(pack).__name__ for pack in experts], allowed)
    ranks = len(xs) if world_size is None else world_size
    for name, values in (("xs", xs), ("ids", ids), ("weights", weights)):
        if isinstance(values, Tensor):
            raise InputError(name, "Tensor", "a list, one entry a rank")
        if len(values) != ranks:
            raise InputError(f"len({name})", len(values), f"{ranks}, one a rank")
    held = sum(pack.w13.shape[0] for pack in experts)
    if held != cfg.num_experts:
        raise InputError("experts", held, f"packs with num_experts ({cfg.num_experts}) experts together")
    if len({(pack.x_scale, pack.act_scale) for pack in experts}) > 1:
        raise InputError("experts", [(p.x_scale, p.act_scale) for p in experts], "packs with equal static scales")
    tokens = [x if isinstance(x, tuple) else stage(cfg, x, experts[0].x_scale) for x in xs]
    routes = [clean_routes(cfg, i, w) for i, w in zip(ids, weights)]
    counts = [codes.shape[0] for codes, _ in tokens]
    for count, (token_codes, token_scales), (rank_ids, rank_weights) in zip(counts, tokens, routes):
        _check_rows(cfg, "x", token_codes, token_scales, cfg.hidden, BLOCK)
        _check_shape("topk_ids", rank_ids, count, cfg.top_k)
        _check_shape("topk_weights", rank_weights, count, cfg.top_k)
    codes = torch.cat([c.view(torch.uint8) for c, _ in tokens]).view(tokens[0][0].dtype)
    scales = None if cfg.scale == "tensor" else torch.cat([s for _, s in tokens])
    all_ids = torch.cat([i for i, _ in routes])
    slots = _slots(cfg, experts, codes, scales, all_ids, torch.cat([w for _, w in routes]), dtype)
    return list(reduce(slots, all_ids).split(counts))


def _slots(cfg: MoEConfig, packs, codes: Tensor, scales, ids: Tensor, weights: Tensor, dtype) -> Tensor:
    """bf16 [T, K, H] of all tokens; masked slots hold NaN, which reduce must not read."""
    slots = torch.full((*ids.shape, cfg.hidden), math.nan, dtype=torch.bfloat16, device=codes.device)
    flat = slots.view(-1, cfg.hidden)
    owners = [(pack, local) for pack in packs for local in range(pack.w13.shape[0])]
    for expert, rows in _by_expert(ids.flatten(), len(owners)):
        pack, local = owners[expert]
        token, weight = rows // cfg.top_k, weights.flatten()[rows]
        act = _fc1_rows(cfg, _take(codes, token), _take(scales, token), local, pack, weight, dtype)
        act_codes, act_scales = quantize_activation(cfg, act, pack.act_scale)
        flat[rows] = _fc2_rows(cfg, act_codes, act_scales, local, pack, weight, dtype).to(torch.bfloat16)
    return slots


@torch.no_grad()
@exact_matmul()
def unquantised_layer(
    cfg: MoEConfig,
    w13: Tensor,
    w2: Tensor,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The layer without FP8 and without bf16 slots: y [T, H] in dtype.

    w13 [E, 2I, H] (gate rows, then up rows), w2 [E, H, I], x [T, H], ids and weights [T, K]; any float dtypes.
    """
    ids, weights = clean_routes(cfg, ids, weights)
    y = torch.zeros(x.shape[0], cfg.hidden, dtype=dtype, device=x.device)
    for expert, rows in _by_expert(ids.flatten(), cfg.num_experts):
        token = rows // cfg.top_k
        gate, up = (x[token].to(dtype) @ w13[expert].to(dtype).T).split(cfg.intermediate, dim=1)
        out = numerics.swiglu(gate, up, cfg.clamp) @ w2[expert].to(dtype).T
        y.index_add_(0, token, out * weights.flatten()[rows, None].to(dtype))
    return y


def live_routes(cfg: MoEConfig, ids: Tensor | Sequence[Tensor]) -> int:
    """How many routes of ids [T, K], or of a list of them, name an expert and are not masked. Waits for the device."""
    return sum(int(((i >= 0) & (i < cfg.num_experts)).sum()) for i in ([ids] if isinstance(ids, Tensor) else ids))


def layer_bound(cfg: MoEConfig, live: int) -> float:
    """DESIGN's bound on the relative error of the whole layer against this oracle, over tokens with `live` live routes.

    The tensor cores drop low bits of products, so FC1's output is off by `noise` of its rms, and a SwiGLU value next
    to the middle of two FP8 numbers may get the other code: a step of up to 1/8 of the value (E4M3) or 1/4 (E5M2).
    About noise / (2 step) of all codes do. Over many of the live * I codes these steps average out to `mean`, and
    `many` bounds the error. Over few, one flip of the largest value counts, because products of gate and up have long
    tails: the largest of n is about ln n and the mean square about 1/3 (1/4 here, as routing weights differ), so that
    its share of the sum of squares is (ln n)^2 / ((ln n)^2 + codes / 4). n is such that a larger one flips once in 1e5
    calls. Simulated flips on randn data stay at least 5 % below this in all but one of 1e5 calls.

    It holds for zero-mean data, different tokens, tokens and routing weights of like size, and static scales as
    calibrate finds: a route whose weight is far below another's hardly counts as live. With accum="single" it supposes
    that FC1 is within 5e-3 (E4M3) or 2.6e-3 (E5M2, where more would pass `many`), which it is not on data of one sign
    (see MoEConfig).
    Without live routes it is 0, because y is exactly 0.
    Raises InputError unless live is an int of at least 0.
    """
    if isinstance(live, bool) or not isinstance(live, int) or live < 0:
        raise InputError("live", live, "the number of live routes, an int of at least 0 (see live_routes)")
    if live == 0:
        return 0.0
    single, e4m3 = cfg.accum == "single", cfg.fp8 == "e4m3"
    many = 3e-2 if single else 1e-2 if e4m3 else 1.5e-2
    mean = many * (0.75 if single else 0.5)
    noise, step = 5e-3 if single else 3e-4, 0.125 if e4m3 else 0.25
    codes = live * cfg.intermediate
    largest = math.log(codes * noise / (2 * step) / 1e-5)
    share = largest**2 / (largest**2 + codes / 4)
    return max(many, math.hypot(mean, step * math.sqrt(share)))


@torch.no_grad()
@exact_matmul()
def relative_error(out: Tensor, ref: Tensor) -> float:
    """||out - ref|| / ||ref|| (Frobenius, fp64). inf when either holds NaN or infinity; 0 against 0 is 0."""
    _check_shape("out", out, *ref.shape)
    out, ref = out.double(), ref.double()
    error, size = (out - ref).norm().item(), ref.norm().item()
    if not (math.isfinite(error) and math.isfinite(size)):
        return math.inf
    if size == 0:
        return 0.0 if error == 0 else math.inf
    return error / size


@torch.no_grad()
@exact_matmul()
def cosine(a: Tensor, b: Tensor) -> float:
    """Cosine of two tensors as flat fp64 vectors. -inf when either holds NaN or infinity; two zeros give 1."""
    _check_shape("a", a, *b.shape)
    a, b = a.double().flatten(), b.double().flatten()
    sizes = (a.norm().item(), b.norm().item())
    if not all(map(math.isfinite, sizes)):
        return -math.inf
    if 0 in sizes:
        return 1.0 if sizes[0] == sizes[1] else 0.0
    return torch.dot(a / sizes[0], b / sizes[1]).item()


@torch.no_grad()
@exact_matmul()
def code_faults(codes: Tensor, scales: Tensor | None, ref_codes: Tensor, ref_scales: Tensor | None, group: int) -> int:
    """How many codes differ from the oracle's by more than DESIGN allows.

    A code passes when it is at most one step from the oracle's, or when its value is within CODE_TOLERANCE
    of the rms of its group in the oracle. codes [R, C]; scales [R, C/group], or None for one static scale.
    """
    _check_shape("codes", codes, *ref_codes.shape)
    if scales is None:
        value, ref = codes.float(), ref_codes.float()
    else:
        value, ref = numerics.dequantize_groups(codes, scales), numerics.dequantize_groups(ref_codes, ref_scales)
    grouped = ref.unflatten(-1, (-1, group))
    rms = grouped.square().mean(-1, keepdim=True).sqrt().expand_as(grouped).flatten(-2)
    near = (value - ref).abs() <= CODE_TOLERANCE * rms
    return int((~(near | (numerics.code_distance(codes, ref_codes) <= 1))).sum().item())
