"""Bits do not depend on torch's modes: autocast, TF32, default device and dtype, inference mode, autograd."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from megamoe import numerics, reference
from megamoe.config import MoEConfig, supported_modes
from megamoe.weights import (
    ExpertWeights,
    calibrate,
    deinterleave_w13,
    interleave_w13,
    permute_w2,
    unpermute_w2,
)

CFGS = [
    MoEConfig(hidden=256, intermediate=128, num_experts=4, top_k=2, max_tokens=32, **mode)
    for mode in supported_modes()
    if mode["route_weight"] == "activation" or mode["fp8"] == "e4m3"
]


def inputs(cfg: MoEConfig) -> dict[str, torch.Tensor]:
    """bf16 weights, tokens and routes on CPU."""
    g = torch.Generator().manual_seed(3)
    w13 = torch.randn(4, 2 * cfg.intermediate, cfg.hidden, generator=g) * 0.06
    w2 = torch.randn(4, cfg.hidden, cfg.intermediate, generator=g) * 0.05
    scores, ids = torch.rand(24, 4, generator=g).topk(2, dim=1)
    x = torch.randn(24, cfg.hidden, generator=g)
    return dict(w13=w13.bfloat16(), w2=w2.bfloat16(), x=x.bfloat16(), ids=ids, weights=scores)


def everything(cfg: MoEConfig, w13, w2, x, ids, weights) -> dict[str, object]:
    """What every public function of weights, numerics and reference gives for inputs()."""
    out: dict[str, object] = {}
    statics = {}
    if cfg.scale == "tensor":
        out["calibrate"] = calibrate(cfg, w13, x, ids, weights)
        statics = dict(x_scale=0.02, act_scale=torch.tensor(0.25, device="cpu"))
    pack = ExpertWeights.from_bf16(cfg, w13, w2, order="up_gate", **statics)
    load = ExpertWeights.from_fp8_blocks if cfg.scale == "block" else ExpertWeights.from_fp8_tensor
    quantize = numerics.quantize_weight_blocks if cfg.scale == "block" else numerics.quantize_weight_tensor
    pairs = (*quantize(w13, cfg.fp8), *quantize(w2, cfg.fp8))
    loaded = load(cfg, *pairs, order="up_gate", **statics)
    for name in ("w13", "w13_scale", "w2", "w2_scale"):
        out[f"pack.{name}"], out[f"loaded.{name}"] = getattr(pack, name), getattr(loaded, name)
    for function in (interleave_w13, deinterleave_w13, permute_w2, unpermute_w2):
        out[function.__name__] = function(pack.w13)
    canonical = pack.canonical()
    out["canonical"] = list(canonical[:4])
    codes, scales = reference.stage(cfg, x, pack.x_scale)
    routes, fp32 = reference.clean_routes(cfg, ids, weights)
    experts, row_weights = ids[:, 0], fp32[:, 0]
    first = reference.fc1(cfg, codes, scales, experts, canonical, row_weights)
    second = reference.fc2(cfg, first["codes"], first["scales"], experts, canonical, row_weights)
    out |= dict(stage=[codes, scales], routes=[routes, fp32], fc1=list(first.values()), fc2=second)
    out["fc1_preactivation"] = reference.fc1_preactivation(cfg, codes, scales, experts, canonical)
    out["quantize_activation"] = list(reference.quantize_activation(cfg, first["act"], pack.act_scale))
    out["reduce"] = reference.reduce(second[:, None].expand(-1, 2, -1), routes)
    (out["layer"],) = reference.layer(cfg, [canonical], [x], [ids], [weights])
    out["unquantised_layer"] = reference.unquantised_layer(cfg, w13, w2, x, ids, weights)
    halves = out["fc1_preactivation"].chunk(2, 1)
    out["swiglu"] = numerics.swiglu(*halves, 1.0)
    out["measures"] = [
        reference.relative_error(out["layer"], out["unquantised_layer"]),
        reference.cosine(out["layer"], out["unquantised_layer"]),
        reference.code_faults(first["codes"], first["scales"], first["codes"], first["scales"], cfg.act_group),
        reference.live_routes(cfg, [ids]),
    ]
    out["static"] = numerics.dequantize_static(numerics.quantize_static(x, 0.1, cfg.fp8), 0.1)
    out["groups"] = numerics.dequantize_groups(*numerics.quantize_groups(x, 64, cfg.fp8))
    dequantize = numerics.dequantize_weight_blocks if cfg.scale == "block" else numerics.dequantize_weight_tensor
    out["dequantised"] = dequantize(*pairs[:2])
    out["distance"] = numerics.code_distance(pairs[0], numerics.cast(w13.float(), cfg.fp8))
    return out


def assert_same(name: str, got: object, want: object) -> None:
    """Equal bits, dtypes and devices, in any nesting."""
    if isinstance(want, torch.Tensor):
        assert (got.dtype, got.device, got.shape) == (want.dtype, want.device, want.shape), name
        raw = [t.detach().contiguous().view(torch.uint8) for t in (got, want)]
        assert torch.equal(*raw), name
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want)
        for one, other in zip(got, want):
            assert_same(name, one, other)
    else:
        assert got == want, name


@contextmanager
def default_device(device: str) -> Iterator[None]:
    """torch.set_default_device, undone."""
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """torch.set_default_dtype, restored."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


MODES = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "device_context": lambda: torch.device("meta"),
    "default_device": lambda: default_device("meta"),
    "default_dtype": lambda: default_dtype(torch.bfloat16),
    "default_double": lambda: default_dtype(torch.float64),
    "inference": torch.inference_mode,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cfg", CFGS, ids=lambda c: f"{c.fp8}-{c.scale}-{c.act_group}-{c.accum}-{c.route_weight}")
def test_no_mode_changes_a_bit(cfg: MoEConfig, mode: str) -> None:
    given = inputs(cfg)
    want = everything(cfg, **given)
    with MODES[mode]():
        got = everything(cfg, **given)
    assert list(got) == list(want)
    for name in want:
        assert_same(name, got[name], want[name])


@pytest.mark.parametrize("scale", ["block", "tensor"])
def test_nothing_keeps_a_graph(scale: str) -> None:
    """Inputs that require grad give the same bits, and no result requires it."""
    cfg = MoEConfig(hidden=256, intermediate=128, num_experts=4, top_k=2, max_tokens=32, scale=scale)
    given = inputs(cfg)
    want = everything(cfg, **given)
    leaves = {name: t.clone().requires_grad_() if t.is_floating_point() else t for name, t in given.items()}
    got = everything(cfg, **leaves)
    formats = {"static", "groups", "dequantised", "swiglu", "distance"}  # numerics is plain torch
    for name in want:
        assert_same(name, got[name], want[name])
        for t in got[name] if isinstance(got[name], (list, tuple)) else [got[name]]:
            assert name in formats or not isinstance(t, torch.Tensor) or not t.requires_grad, name


def test_inference_tensors_are_fine_outside_inference_mode() -> None:
    cfg = CFGS[0]
    with torch.inference_mode():
        given = {name: t.clone() for name, t in inputs(cfg).items()}
    got, want = everything(cfg, **given), everything(cfg, **inputs(cfg))
    for name in want:
        assert_same(name, got[name], want[name])


@pytest.mark.parametrize("newer", [False, True])
def test_calibrate_and_the_oracle_switch_tf32_off(newer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of torch's two interfaces asked for TF32: inside products see full precision, afterwards it is back."""
    cfg = MoEConfig(hidden=256, intermediate=128, num_experts=4, top_k=2, max_tokens=32, scale="tensor")
    given, seen = inputs(cfg), []
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    swiglu, legacy = numerics.swiglu, torch.get_float32_matmul_precision
    before = legacy(), [backend.fp32_precision for backend in backends]
    monkeypatch.setattr(numerics, "swiglu", lambda *args: seen.append(state()) or swiglu(*args))

    def state() -> object:
        return [backend.fp32_precision for backend in backends] if newer else legacy()

    try:
        if newer:
            for backend in backends:
                backend.fp32_precision = "tf32"
        else:
            torch.set_float32_matmul_precision("medium")
        asked = state()
        calibrate(cfg, given["w13"], given["x"], given["ids"], given["weights"])
        reference.unquantised_layer(cfg, **given)
        assert state() == asked
        assert seen and all(value == (["ieee"] * 2 if newer else "highest") for value in seen)
    finally:
        for backend, precision in zip(backends, before[1]):
            backend.fp32_precision = precision
        torch.set_float32_matmul_precision(before[0])


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_exact_products_switch_autocast_off_for_each_device(kind: str) -> None:
    before = torch.is_autocast_enabled(kind)
    torch.set_autocast_enabled(kind, True)
    try:
        with numerics.exact_matmul():
            assert not torch.is_autocast_enabled(kind)
        assert torch.is_autocast_enabled(kind)
        with pytest.raises(RuntimeError, match="inside"), numerics.exact_matmul():
            raise RuntimeError("inside")
        assert torch.is_autocast_enabled(kind)
    finally:
        torch.set_autocast_enabled(kind, before)
