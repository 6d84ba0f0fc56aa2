"""Kernel layout and back, checkpoints of each kind, and every refusal."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe import numerics, reference, wire
from megamoe.config import FP8_MAX, MoEConfig
from megamoe.errors import ConfigError, InputError
from megamoe.weights import (
    ExpertWeights,
    calibrate,
    deinterleave_w13,
    interleave_w13,
    permute_w2,
    unpermute_w2,
)

quick = settings(max_examples=20, deadline=None)
FORMATS = ["e4m3", "e5m2"]
STATIC = dict(x_scale=0.5, act_scale=0.25)


def config(**fields):
    return MoEConfig(**{**dict(hidden=256, intermediate=384, num_experts=4, top_k=2, max_tokens=16), **fields})


def bf16_weights(cfg, experts=4, seed=0):
    g = torch.Generator().manual_seed(seed)
    w13 = torch.randn(experts, 2 * cfg.intermediate, cfg.hidden, generator=g) * 0.06
    return w13.bfloat16(), (torch.randn(experts, cfg.hidden, cfg.intermediate, generator=g) * 0.05).bfloat16()


def swap_halves(w):
    return torch.cat(w.chunk(2, dim=1)[::-1], dim=1)


def same(a, b):
    """Equal bits, FP8 included."""
    raw = [t.contiguous().view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and torch.equal(*raw)


def assert_same_pack(a, b):
    assert all(same(getattr(a, n), getattr(b, n)) for n in ("w13", "w13_scale", "w2", "w2_scale"))
    assert (a.x_scale, a.act_scale) == (b.x_scale, b.act_scale)


@quick
@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 3))
def test_layout_is_the_wire_permutation(experts, tiles, columns):
    """Each kernel row is where wire says, each canonical row appears once, and the inverse undoes it."""
    rows13, rows2 = 128 * tiles * 2, 128 * tiles
    w13 = torch.arange(experts * rows13, dtype=torch.int32).view(experts, rows13, 1).expand(-1, -1, columns)
    w2 = w13[:, :rows2]
    kernel13, kernel2 = interleave_w13(w13), permute_w2(w2)
    gate_up, down = wire.interleave_gate_up(), wire.interleave_down()
    for e in range(experts):
        base, half = e * rows13, rows13 // 2
        for tile in range(2 * tiles):
            for p, v in enumerate(gate_up):
                column = 64 * tile + v % 64
                assert kernel13[e, 128 * tile + p, 0] == base + column + (half if v >= 64 else 0)
        for tile in range(tiles):
            want = torch.tensor([base + 128 * tile + v for v in down], dtype=torch.int32)
            assert torch.equal(kernel2[e, 128 * tile : 128 * tile + 128, 0], want)
    assert torch.equal(kernel13.sort(1).values, w13) and torch.equal(kernel2.sort(1).values, w2)
    assert torch.equal(deinterleave_w13(kernel13), w13) and torch.equal(unpermute_w2(kernel2), w2)


def test_layout_of_fp8_and_of_one_expert():
    codes = torch.randint(0, 256, (2, 256, 128), dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert same(deinterleave_w13(interleave_w13(codes)), codes) and same(unpermute_w2(permute_w2(codes)), codes)
    assert same(interleave_w13(codes[1]), interleave_w13(codes)[1])
    assert same(permute_w2(codes[0]), permute_w2(codes)[0])
    strided = codes.view(torch.uint8).transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(interleave_w13(strided), interleave_w13(codes).view(torch.uint8))
    for function in (interleave_w13, deinterleave_w13, permute_w2, unpermute_w2):
        with pytest.raises(InputError):
            function(torch.zeros(100, 128))


@pytest.mark.parametrize("fp8", FORMATS)
@pytest.mark.parametrize("order", ["gate_up", "up_gate"])
def test_from_bf16_block(fp8, order):
    cfg = config(fp8=fp8)
    w13, w2 = bf16_weights(cfg, experts=2)
    pack = ExpertWeights.from_bf16(cfg, w13 if order == "gate_up" else swap_halves(w13), w2, order=order)
    assert pack.w13_scale.shape == (2, 2, 3, 2) and pack.w2_scale.shape == (2, 2, 3)
    assert pack.experts_local == 2 and pack.device.type == "cpu" and pack.x_scale is None
    weight_bytes = 2 * (768 * 256 + 256 * 384)
    assert pack.nbytes == weight_bytes + 4 * 2 * (12 + 6)
    codes13, scales13 = numerics.quantize_weight_blocks(w13, fp8)
    codes2, scales2 = numerics.quantize_weight_blocks(w2, fp8)
    assert same(pack.w13, interleave_w13(codes13)) and same(pack.w2, permute_w2(codes2))
    assert same(pack.w13_scale[:, 0], scales13[:, :3]) and same(pack.w13_scale[:, 1], scales13[:, 3:])
    canonical = pack.canonical()
    for got, want in zip(canonical, (codes13, scales13, codes2, scales2)):
        assert same(got, want)
    assert all(t.is_contiguous() for t in (pack.w13, pack.w13_scale, pack.w2, pack.w2_scale))


@pytest.mark.parametrize("fp8", FORMATS)
@pytest.mark.parametrize("order", ["gate_up", "up_gate"])
def test_from_bf16_tensor(fp8, order):
    cfg = config(fp8=fp8, scale="tensor")
    w13, w2 = bf16_weights(cfg)
    given13 = w13 if order == "gate_up" else swap_halves(w13)
    pack = ExpertWeights.from_bf16(cfg, given13, w2, x_scale=0.1, act_scale=torch.tensor(0.2), order=order)
    assert pack.x_scale == torch.tensor(0.1).item() and pack.act_scale == torch.tensor(0.2).item()
    canonical = pack.canonical()
    wants = (*numerics.quantize_weight_tensor(w13, fp8), *numerics.quantize_weight_tensor(w2, fp8))
    for got, want in zip(canonical, wants):
        assert same(got, want)
    assert canonical[4:] == (pack.x_scale, pack.act_scale) and pack.w13_scale.shape == (4,)


@pytest.mark.parametrize("fp8", FORMATS)
@pytest.mark.parametrize("order", ["gate_up", "up_gate"])
def test_fp8_checkpoints_give_the_pack_of_their_bf16(fp8, order):
    for cfg in (config(fp8=fp8), config(fp8=fp8, scale="tensor")):
        w13, w2 = bf16_weights(cfg)
        if order == "up_gate":
            w13 = swap_halves(w13)
        if cfg.scale == "block":
            want = ExpertWeights.from_bf16(cfg, w13, w2, order=order)
            pairs = (*numerics.quantize_weight_blocks(w13, fp8), *numerics.quantize_weight_blocks(w2, fp8))
            got = ExpertWeights.from_fp8_blocks(cfg, *pairs, order=order, device="cpu")
        else:
            want = ExpertWeights.from_bf16(cfg, w13, w2, order=order, **STATIC)
            pairs = (*numerics.quantize_weight_tensor(w13, fp8), *numerics.quantize_weight_tensor(w2, fp8))
            got = ExpertWeights.from_fp8_tensor(cfg, *pairs, order=order, **STATIC)
        assert_same_pack(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, getattr(torch, "float8_e8m0fnu", torch.float32)])
def test_scales_of_other_dtypes_become_fp32(dtype):
    cfg = config()
    w13, w2 = (numerics.quantize_weight_blocks(w, "e4m3")[0] for w in bf16_weights(cfg))
    scale13 = torch.full((4, 6, 2), 2.0**-7).to(dtype)
    scale2 = torch.full((4, 2, 3), 0.5).to(dtype)
    pack = ExpertWeights.from_fp8_blocks(cfg, w13, scale13, w2, scale2)
    assert pack.w13_scale.dtype == torch.float32 and (pack.w13_scale == 2.0**-7).all() and (pack.w2_scale == 0.5).all()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_shards_make_the_layer_of_all_experts(ranks):
    cfg = config()
    w13, w2 = bf16_weights(cfg)
    x = torch.randn(8, cfg.hidden).bfloat16()
    ids = torch.stack([torch.randperm(4)[:2] for _ in range(8)])
    weights = torch.rand(8, 2)
    packs = [ExpertWeights.from_bf16(cfg, *ExpertWeights.shard(r, ranks, w13, w2)).canonical() for r in range(ranks)]
    whole = ExpertWeights.from_bf16(cfg, w13, w2).canonical()
    (want,) = reference.layer(cfg, [whole], [x], [ids], [weights])
    (got,) = reference.layer(cfg, packs, [x], [ids], [weights])
    assert torch.equal(got, want)
    assert reference.cosine(got, reference.unquantised_layer(cfg, w13, w2, x, ids, weights)) >= 0.997


def sample(cfg, tokens=32, seed=5):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, cfg.hidden, generator=g).bfloat16()
    weights, ids = torch.rand(tokens, cfg.num_experts, generator=g).topk(cfg.top_k, dim=1)
    return x, ids, weights


@pytest.mark.parametrize("fp8", FORMATS)
@pytest.mark.parametrize("place", ["output", "activation"])
@pytest.mark.parametrize("order", ["gate_up", "up_gate"])
def test_calibrate_finds_what_the_oracle_sees(fp8, place, order):
    cfg = config(fp8=fp8, scale="tensor", route_weight=place, clamp=2.0)
    w13, w2 = bf16_weights(cfg)
    x, ids, weights = sample(cfg)
    ids[0] = -1
    given13 = w13 if order == "gate_up" else swap_halves(w13)
    x_scale, act_scale = calibrate(cfg, given13, x, ids, weights, margin=1.5, order=order)
    assert x_scale == pytest.approx(x.float().abs().max().item() * 1.5 / FP8_MAX[fp8], rel=1e-6)
    pack = ExpertWeights.from_bf16(cfg, w13, w2, x_scale=x_scale, act_scale=act_scale).canonical()
    codes, _ = reference.stage(cfg, x, x_scale)
    rows = ids.flatten().argsort()
    pool = numerics.take_rows(codes, rows // cfg.top_k)
    act = reference.fc1(cfg, pool, None, ids.flatten()[rows], pack, weights.flatten()[rows])["act"]
    assert act_scale == pytest.approx(act.abs().max().item() * 1.5 / FP8_MAX[fp8], rel=1e-4)
    parts = [
        calibrate(cfg, list(given13[e : e + 2]), x, ids, weights, margin=1.5, order=order, expert_ids=[e, e + 1])
        for e in (0, 2)
    ]
    assert [p[0] for p in parts] == [x_scale, x_scale] and max(p[1] for p in parts) == act_scale
    (y,) = reference.layer(cfg, [pack], [x], [ids], [weights])
    plain = reference.unquantised_layer(cfg, w13, w2, x, ids, weights)
    assert reference.cosine(y, plain) >= {"e4m3": 0.997, "e5m2": 0.990}[fp8]


def test_calibrate_over_a_group(tmp_path):
    cfg = config(scale="tensor")
    w13, _ = bf16_weights(cfg)
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        args = (cfg, w13, *sample(cfg))
        assert calibrate(*args, group=torch.distributed.group.WORLD) == calibrate(*args)
    finally:
        torch.distributed.destroy_process_group()


def test_calibrate_edges():
    cfg = config(scale="tensor")
    w13, _ = bf16_weights(cfg)
    x, ids, weights = sample(cfg)
    floor = torch.tensor(numerics.AMAX_FLOOR * 1.25 / 448).item()
    assert calibrate(cfg, w13, x[:0], ids[:0], weights[:0]) == (floor, floor)
    want = calibrate(cfg, w13, x[1:], ids[1:], weights[1:])
    x[0] = math.nan
    assert calibrate(cfg, w13, x, ids, weights) == want
    cases = [
        (dict(cfg=config()), "scale", ConfigError),
        (dict(w13=w13[:3]), "len(w13)", InputError),
        (dict(w13=w13[:1], expert_ids=[9]), "expert_ids", InputError),
        (dict(w13=w13[:, :128]), "w13.shape", InputError),
        (dict(w13=w13.to(torch.float8_e4m3fn)), "w13.dtype", InputError),
        (dict(x=x[:, :100]), "x.shape", InputError),
        (dict(x=x.to(torch.int32)), "x.dtype", InputError),
        (dict(topk_ids=ids[:3]), "topk_ids.shape", InputError),
        (dict(topk_weights=weights[:, :1]), "topk_weights.shape", InputError),
        (dict(margin=0.5), "margin", InputError),
        (dict(order="down"), "order", InputError),
        (dict(x=torch.full_like(x, math.inf)), "x", InputError),
    ]
    for change, name, error in cases:
        arguments = {**dict(cfg=cfg, w13=w13, x=x, topk_ids=ids, topk_weights=weights), **change}
        with pytest.raises(error) as caught:
            calibrate(**arguments)
        assert caught.value.name == name


@pytest.mark.parametrize("scale", ["block", "tensor"])
def test_repr_is_one_short_line(scale):
    cfg = config(scale=scale)
    statics = {} if scale == "block" else {"x_scale": 0.5, "act_scale": 0.25}
    pack = ExpertWeights.from_bf16(cfg, *bf16_weights(cfg), **statics)
    text = repr(pack)
    assert str(list(pack.w13.shape)) in text and f"{pack.nbytes:,} bytes on cpu" in text
    assert f"{cfg.fp8}, {scale} scales" in text and ("x_scale 0.5" in text) == (scale == "tensor")
    assert len(text) < 160 and "\n" not in text


def refused(error, name, call, text=""):
    with pytest.raises(error) as caught:
        call()
    assert caught.value.name == name and text in str(caught.value)


def test_from_bf16_refusals():
    cfg, tensor = config(), config(scale="tensor")
    w13, w2 = bf16_weights(cfg)
    make = ExpertWeights.from_bf16
    refused(InputError, "w13", lambda: make(cfg, None, w2), "torch.Tensor")
    refused(InputError, "w13.dtype", lambda: make(cfg, w13.to(torch.float8_e4m3fn), w2), "from_fp8_blocks")
    refused(InputError, "w2.dtype", lambda: make(cfg, w13, w2.to(torch.int8)))
    refused(InputError, "w13.shape", lambda: make(cfg, w13[0], w2))
    refused(InputError, "w13.shape", lambda: make(cfg, w13.mT, w2), "transposed")
    refused(InputError, "w2.shape", lambda: make(cfg, w13, w2.mT), "transposed")
    refused(InputError, "w2.shape", lambda: make(cfg, w13, w2[:2]))
    refused(InputError, "w13.shape[0]", lambda: make(cfg, w13[:3], w2[:3]), "divisor")
    refused(InputError, "w13.shape[0]", lambda: make(cfg, w13[:0], w2[:0]))
    refused(ConfigError, "world_size", lambda: make(config(num_experts=64), w13, w2))
    refused(InputError, "order", lambda: make(cfg, w13, w2, order="gate"))
    refused(InputError, "x_scale", lambda: make(cfg, w13, w2, x_scale=1.0))
    refused(InputError, "act_scale", lambda: make(cfg, w13, w2, act_scale=1.0))
    refused(InputError, "x_scale", lambda: make(tensor, w13, w2, act_scale=1.0), "calibrate")
    refused(InputError, "act_scale", lambda: make(tensor, w13, w2, x_scale=1.0), "calibrate")
    for bad in (0, -1.0, math.nan, math.inf, 1e-60, 1e60, True, "1", [1, 2]):
        refused(InputError, "x_scale", lambda bad=bad: make(tensor, w13, w2, x_scale=bad, act_scale=1.0))


def test_from_fp8_refusals():
    cfg, tensor = config(), config(scale="tensor")
    w13, w2 = (w.to(torch.float8_e4m3fn) for w in bf16_weights(cfg))
    s13, s2, one = torch.ones(4, 6, 2), torch.ones(4, 2, 3), torch.ones(4)
    blocks, per_tensor = ExpertWeights.from_fp8_blocks, ExpertWeights.from_fp8_tensor
    refused(ConfigError, "scale", lambda: blocks(tensor, w13, s13, w2, s2), "from_fp8_blocks")
    refused(ConfigError, "scale", lambda: per_tensor(cfg, w13, one, w2, one, **STATIC), "from_fp8_tensor")
    refused(InputError, "w13.dtype", lambda: blocks(config(fp8="e5m2"), w13, s13, w2, s2), "e5m2")
    refused(InputError, "w13.dtype", lambda: blocks(cfg, w13.bfloat16(), s13, w2, s2))
    refused(InputError, "w13_scale_inv.shape", lambda: blocks(cfg, w13, s13[:, :3], w2, s2))
    refused(InputError, "w13_scale_inv.shape", lambda: blocks(cfg, w13, s13.mT, w2, s2), "transposed")
    refused(InputError, "w2_scale_inv.dtype", lambda: blocks(cfg, w13, s13, w2, s2.int()))
    for bad in (math.nan, math.inf, -1.0):
        spoiled = s13.clone()
        spoiled[1, 2, 0] = bad
        refused(InputError, "w13_scale_inv", lambda s=spoiled: blocks(cfg, w13, s, w2, s2))
    refused(InputError, "order", lambda: blocks(cfg, w13, s13, w2, s2, order="x"))
    refused(InputError, "x_scale", lambda: per_tensor(tensor, w13, one, w2, one))
    refused(InputError, "w13_scale.shape", lambda: per_tensor(tensor, w13, torch.ones(4, 2), w2, one, **STATIC))
    for rows in (torch.ones(4, 768), torch.ones(4, 768, 1)):
        refused(InputError, "w13_scale_inv.shape", lambda s=rows: blocks(cfg, w13, s, w2, s2), "per-channel FP8")
        refused(
            InputError, "w13_scale.shape", lambda s=rows: per_tensor(tensor, w13, s, w2, one, **STATIC), "per-channel"
        )
    rows = torch.ones(4, 256, 1)
    refused(InputError, "w2_scale.shape", lambda: per_tensor(tensor, w13, one, w2, rows, **STATIC), "per-channel")


def test_devices_must_agree_or_be_named():
    cfg = config()
    w13, w2 = bf16_weights(cfg)
    refused(InputError, "w2.device", lambda: ExpertWeights.from_bf16(cfg, w13, w2.to("meta")))


@pytest.mark.parametrize("rank,world_size,name", [(2, 2, "rank"), (-1, 2, "rank"), (0, 3, "tensors")])
def test_shard_refusals(rank, world_size, name):
    refused(InputError, name, lambda: ExpertWeights.shard(rank, world_size, torch.zeros(4, 1)))
