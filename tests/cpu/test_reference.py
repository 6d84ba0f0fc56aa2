"""The oracle against a route-by-route computation, against the unquantised layer, and its own promises."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe import numerics, reference
from megamoe.config import FP8_MAX, MoEConfig, supported_modes
from megamoe.errors import InputError
from megamoe.numerics import CanonicalExperts

MODES = supported_modes()
quick = settings(max_examples=12, deadline=None)


def config(mode=None, **fields):
    sizes = dict(hidden=256, intermediate=128, num_experts=8, top_k=3, max_tokens=64)
    return MoEConfig(**{**sizes, **(mode or {}), **fields})


def problem(cfg, tokens, seed=0, masked=0.2):
    """w13, w2 (bf16), a pack of all experts, x, ids, weights."""
    g = torch.Generator().manual_seed(seed)
    w13 = (torch.randn(cfg.num_experts, 2 * cfg.intermediate, cfg.hidden, generator=g) / cfg.hidden**0.5).bfloat16()
    w2 = (torch.randn(cfg.num_experts, cfg.hidden, cfg.intermediate, generator=g) / cfg.intermediate**0.5).bfloat16()
    x = torch.randn(tokens, cfg.hidden, generator=g).bfloat16()
    scores = torch.rand(tokens, cfg.num_experts, generator=g)
    weights, ids = scores.topk(cfg.top_k, dim=-1)
    ids = torch.where(torch.rand(ids.shape, generator=g) < masked, -1, ids)
    if cfg.scale == "block":
        pack = CanonicalExperts(*pairs(numerics.quantize_weight_blocks, cfg, w13, w2))
    else:
        scales = 5.0 / FP8_MAX[cfg.fp8], 8.0 / FP8_MAX[cfg.fp8]
        pack = CanonicalExperts(*pairs(numerics.quantize_weight_tensor, cfg, w13, w2), *scales)
    return w13, w2, pack, x, ids, weights


def pairs(quantize, cfg, w13, w2):
    return *quantize(w13, cfg.fp8), *quantize(w2, cfg.fp8)


def split_pack(pack, ranks):
    parts = [t.view(torch.uint8).chunk(ranks) if t.dtype.itemsize == 1 else t.chunk(ranks) for t in pack[:4]]
    return [CanonicalExperts(*(p[r].view(t.dtype) for p, t in zip(parts, pack)), *pack[4:]) for r in range(ranks)]


def naive_layer(cfg, pack, x, ids, weights):
    """One route at a time, fp64 sums, written from the definitions."""
    block = cfg.scale == "block"
    wide = lambda s: s.double().repeat_interleave(128, -1).repeat_interleave(128, -2)  # noqa: E731
    y = torch.zeros(x.shape)
    for t in range(x.shape[0]):
        for k in range(cfg.top_k):
            e = int(ids[t, k])
            if not 0 <= e < cfg.num_experts:
                continue
            w13, w2 = pack.w13[e].double(), pack.w2[e].double()
            w13 = w13 * (wide(pack.w13_scale[e]) if block else pack.w13_scale[e].double())
            w2 = w2 * (wide(pack.w2_scale[e]) if block else pack.w2_scale[e].double())
            gate, up = (w13 @ quantised(cfg, x[t].float(), 128, pack.x_scale)).chunk(2)
            if cfg.clamp is not None:
                gate, up = gate.clamp(max=cfg.clamp), up.clamp(-cfg.clamp, cfg.clamp)
            act = gate * torch.sigmoid(gate) * up
            if cfg.route_weight == "activation":
                act = act * weights[t, k].double()
            row = w2 @ quantised(cfg, act.float(), cfg.act_group, pack.act_scale)
            if cfg.route_weight == "output":
                row = row * weights[t, k].double()
            y[t] += row.bfloat16().float()
    return y.bfloat16()


def quantised(cfg, v, group, static):
    """fp64 values of v after quantisation."""
    limit = FP8_MAX[cfg.fp8]
    scale = torch.tensor([static]) if static else v.view(-1, group).abs().amax(1).clamp(min=1e-4) / torch.tensor(limit)
    scale = scale.repeat_interleave(v.numel() // scale.numel())
    return (v / scale).clamp(-limit, limit).to(numerics.fp8_dtype(cfg.fp8)).double() * scale.double()


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_layer_against_route_by_route(mode):
    cfg = config(mode, clamp=1.0)
    _, _, pack, x, ids, weights = problem(cfg, 9)
    (y,) = reference.layer(cfg, [pack], [x], [ids], [weights], dtype=torch.float64)
    assert y.dtype == torch.bfloat16
    want = naive_layer(cfg, pack, x, ids, weights)
    assert reference.relative_error(y, want) < 1e-4  # at most a few bf16 roundings apart
    (single,) = reference.layer(cfg, [pack], [x], [ids], [weights])
    assert reference.relative_error(single, want) < 3e-3


@pytest.mark.parametrize("fp8,bound", [("e4m3", 0.997), ("e5m2", 0.990)])
@pytest.mark.parametrize("scale", ["block", "tensor"])
@pytest.mark.parametrize("place", ["output", "activation"])
def test_cosine_to_the_unquantised_layer(fp8, bound, scale, place):
    cfg = config(fp8=fp8, scale=scale, route_weight=place)
    w13, w2, pack, x, ids, weights = problem(cfg, 48, seed=3)
    (y,) = reference.layer(cfg, [pack], [x], [ids], [weights])
    plain = reference.unquantised_layer(cfg, w13, w2, x, ids, weights)
    assert plain.dtype == torch.float32
    assert reference.cosine(y, plain) >= bound
    assert (
        reference.relative_error(plain, reference.unquantised_layer(cfg, w13, w2, x, ids, weights, torch.float64))
        < 1e-5
    )


@quick
@given(st.lists(st.integers(0, 6), min_size=1, max_size=8), st.sampled_from(MODES), st.integers(0, 99), st.data())
def test_world_size_does_not_change_bits(counts, mode, seed, data):
    cfg = config(mode)
    packs = data.draw(st.sampled_from([1, 2, 4, 8]))
    _, _, pack, x, ids, weights = problem(cfg, sum(counts), seed)
    (whole,) = reference.layer(cfg, [pack], [x], [ids], [weights])
    parts = [t.split(counts) for t in (x, ids, weights)]
    ys = reference.layer(cfg, split_pack(pack, packs), *parts, world_size=len(counts))
    assert [y.shape[0] for y in ys] == counts
    assert torch.equal(torch.cat(ys), whole)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_stages_compose_to_the_layer(mode):
    cfg = config(mode)
    _, _, pack, x, ids, weights = problem(cfg, 10)
    codes, scales = reference.stage(cfg, x, pack.x_scale)
    ids, weights = reference.clean_routes(cfg, ids, weights)
    rows = torch.randperm(ids.numel(), generator=torch.Generator().manual_seed(1))  # any pool order
    token = rows // cfg.top_k
    pool = numerics.take_rows(codes, token), None if scales is None else scales[token]
    experts, row_weights = ids.flatten()[rows], weights.flatten()[rows]
    first = reference.fc1(cfg, *pool, experts, pack, row_weights)
    assert first["act"].shape == (len(rows), cfg.intermediate) and first["act"].dtype == torch.float32
    assert (first["act"][experts < 0] == 0).all()
    both = reference.fc1_preactivation(cfg, *pool, experts, pack)
    act = numerics.swiglu(*both.split(cfg.intermediate, 1), cfg.clamp)
    act *= row_weights[:, None] if cfg.route_weight == "activation" else 1
    assert torch.equal(act[experts >= 0], first["act"][experts >= 0])
    out = reference.fc2(cfg, first["codes"], first["scales"], experts, pack, row_weights)
    slots = torch.empty(out.shape, dtype=out.dtype)
    slots[rows] = out
    y = reference.reduce(slots.view(*ids.shape, -1), ids)
    # The order of rows within an expert may change how BLAS sums, so near, not equal.
    assert reference.relative_error(y, reference.layer(cfg, [pack], [x], [ids], [weights])[0]) < 3e-3
    exact = reference.fc2(cfg, first["codes"], first["scales"], experts, pack, row_weights, rounded=False)
    assert torch.equal(exact.bfloat16(), out)
    double = reference.fc1(cfg, *pool, experts, pack, row_weights, dtype=torch.float64)
    assert double["act"].dtype == torch.float64
    assert reference.relative_error(first["act"], double["act"]) < 1e-5
    group = cfg.act_group
    faults = reference.code_faults(first["codes"], first["scales"], double["codes"], double["scales"], group)
    assert faults == 0


def test_bad_ids_count_as_masked():
    cfg = config()
    _, _, pack, x, ids, weights = problem(cfg, 12)
    bad = ids.long().clone()
    bad[bad < 0] = torch.tensor([-7, cfg.num_experts, 2**32 + 1, -(2**40)]).repeat(99)[: int((bad < 0).sum())]
    clean, fp32 = reference.clean_routes(cfg, bad, weights.bfloat16())
    assert clean.dtype == torch.int32 and torch.equal(clean, ids.int())
    assert torch.equal(fp32, weights.bfloat16().float())
    a = reference.layer(cfg, [pack], [x], [bad], [weights])[0]
    assert torch.equal(a, reference.layer(cfg, [pack], [x], [ids], [weights])[0])


def test_masked_tokens_and_empty_ranks():
    cfg = config()
    w13, w2, pack, x, ids, weights = problem(cfg, 4)
    ids[1] = -1
    weights[1] = math.nan  # the weight of a masked route is never read
    none = (x[:0], ids[:0], weights[:0])
    ys = reference.layer(cfg, [pack], [x, none[0]], [ids, none[1]], [weights, none[2]], world_size=2)
    assert ys[0].isfinite().all() and (ys[0][1] == 0).all() and (ys[0][[0, 2, 3]] != 0).any(1).all()
    assert ys[1].shape == (0, cfg.hidden)
    assert (reference.unquantised_layer(cfg, w13, w2, x, ids, weights)[1] == 0).all()
    ids[:] = -1
    assert (reference.layer(cfg, [pack], [x], [ids], [weights])[0] == 0).all()


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_nan_stays_in_its_token(mode):
    cfg = config(mode)
    _, _, pack, x, ids, weights = problem(cfg, 8, masked=0)
    (clean,) = reference.layer(cfg, [pack], [x], [ids], [weights])
    x[2, 17] = math.nan
    weights[5, 1] = math.nan
    (y,) = reference.layer(cfg, [pack], [x], [ids], [weights])
    others = [0, 1, 3, 4, 6, 7]
    assert torch.equal(y[others], clean[others]) and y[2].isnan().all() and y[5].isnan().all()


def test_prequantised_tokens_give_the_same_bits():
    cfg = config()
    _, _, pack, x, ids, weights = problem(cfg, 8)
    (a,) = reference.layer(cfg, [pack], [x], [ids], [weights])
    (b,) = reference.layer(cfg, [pack], [reference.stage(cfg, x)], [ids], [weights])
    assert torch.equal(a, b)


def test_reduce_sums_in_order_and_skips_masked_slots():
    slots = torch.tensor([2.0**16, 2.0**-6, -(2.0**16)]).bfloat16()[None, :, None].expand(1, 3, 4).clone()
    ids = torch.tensor([[0, 1, 2]])
    assert (reference.reduce(slots, ids) == 2.0**-6).all()
    slots[0, 0] = math.nan
    assert (reference.reduce(slots, torch.tensor([[-1, 1, -1]])) == 2.0**-6).all()
    assert (reference.reduce(slots, torch.tensor([[-1, -1, -1]])) == 0).all()
    # fp32 order shows: (1 + 2^24) - 2^24 loses the 1, (2^24 - 2^24) + 1 keeps it
    lossy = torch.tensor([1.0, 2.0**24, -(2.0**24)]).bfloat16()[None, :, None]
    assert reference.reduce(lossy, ids).item() == 0
    assert reference.reduce(lossy.flip(1), ids).item() == 1


def test_error_measures():
    a = torch.tensor([3.0, 4.0])
    assert reference.relative_error(a, a) == 0 and reference.cosine(a, a) == pytest.approx(1)
    assert reference.relative_error(a * 1.1, a) == pytest.approx(0.1)
    assert reference.cosine(a, -2 * a) == pytest.approx(-1)
    zero, nan = torch.zeros(2), torch.tensor([3.0, math.nan])
    assert reference.relative_error(zero, zero) == 0 and reference.relative_error(a, zero) == math.inf
    assert reference.cosine(zero, zero) == 1 and reference.cosine(a, zero) == 0
    for pair in [(nan, a), (a, nan), (nan, nan), (a / 0, a)]:
        assert reference.relative_error(*pair) == math.inf and reference.cosine(*pair) == -math.inf
    assert reference.relative_error(a[:0], a[:0]) == 0
    with pytest.raises(InputError):
        reference.relative_error(a, a[None])


def test_code_faults_counts_what_is_far():
    ref = torch.randn(4, 128, generator=torch.Generator().manual_seed(0))
    codes, scales = numerics.quantize_groups(ref, 128, "e4m3")
    assert reference.code_faults(codes, scales, codes, scales, 128) == 0
    off = codes.view(torch.uint8).clone()
    off[0, 0] ^= 1  # one step
    assert reference.code_faults(off.view(codes.dtype), scales, codes, scales, 128) == 0
    off[1, :3] ^= 128  # signs
    off[2, 0] = 0x7F  # NaN
    big = (codes[1, :3].float() * scales[1]).abs() * 2 > 5e-3 * ref[1].square().mean().sqrt()
    assert reference.code_faults(off.view(codes.dtype), scales, codes, scales, 128) == int(big.sum()) + 1
    assert reference.code_faults(off.view(codes.dtype), None, codes, None, 128) >= 1


@pytest.mark.parametrize("setting", ["highest", "medium"])
def test_exact_matmul_restores_precision(setting):
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(setting)
        with reference.exact_matmul():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == setting
    finally:
        torch.set_float32_matmul_precision(before)


def test_errors_name_the_argument():
    cfg, tensor = config(), config(scale="tensor", route_weight="activation")
    _, _, pack, x, ids, weights = problem(cfg, 4)
    _, _, tensor_pack, *_ = problem(tensor, 4)
    codes, scales = reference.stage(cfg, x)
    row = torch.zeros(4, dtype=torch.int32)
    static, _ = reference.stage(tensor, x, 1.0)
    act, act_scales = numerics.quantize_groups(x[:, :128], 128, "e4m3")
    other = pack._replace(x_scale=2.0)
    cases = [
        (lambda: reference.stage(cfg, x[:, :128]), "x.shape"),
        (lambda: reference.stage(tensor, x), "x_scale"),
        (lambda: reference.fc1(cfg, codes, None, row, pack), "scales"),
        (lambda: reference.fc1(cfg, codes, scales[:2], row, pack), "scales.shape"),
        (lambda: reference.fc1(cfg, x, scales, row, pack), "codes.dtype"),
        (lambda: reference.fc1(tensor, static, None, row, tensor_pack), "weights"),
        (lambda: reference.fc1(tensor, static, None, row, tensor_pack, torch.ones(3)), "weights.shape"),
        (
            lambda: reference.fc1(tensor, static, None, row, tensor_pack._replace(x_scale=None), torch.ones(4)),
            "x_scale",
        ),
        (
            lambda: reference.fc1(tensor, static, None, row, tensor_pack._replace(act_scale=None), torch.ones(4)),
            "act_scale",
        ),
        (lambda: reference.fc2(cfg, act, act_scales, row, pack), "weights"),
        (lambda: reference.fc2(cfg, codes, scales, row, pack), "codes.shape"),
        (lambda: reference.layer(cfg, [pack], [x], [ids], [weights], world_size=2), "len(xs)"),
        (lambda: reference.layer(cfg, [object()], [x], [ids], [weights]), "experts"),
        (lambda: reference.layer(cfg, [pack], x, [ids], [weights]), "xs"),
        (lambda: reference.layer(cfg, [pack], [x], ids, [weights]), "ids"),
        (lambda: reference.layer(cfg, [pack], [x], [ids, ids], [weights]), "len(ids)"),
        (lambda: reference.layer(cfg, [pack, pack], [x], [ids], [weights]), "experts"),
        (
            lambda: reference.layer(cfg, split_pack(pack, 2)[:1] + split_pack(other, 2)[1:], [x], [ids], [weights]),
            "experts",
        ),
        (lambda: reference.layer(cfg, [pack], [x], [ids[:3]], [weights]), "topk_ids.shape"),
        (lambda: reference.layer(cfg, [pack], [x], [ids], [weights[:, :2]]), "topk_weights.shape"),
    ]
    for call, name in cases:
        with pytest.raises(InputError) as caught:
            call()
        assert caught.value.name == name
