"""The staged layer on one GPU: every mode, 1 to 8 virtual ranks, every kind of routing."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from megamoe import ExpertWeights, MegaMoE, MoEConfig, calibrate, reference
from megamoe.comm import SingleWorld
from megamoe.config import supported_modes
from megamoe.sched import heuristics
from tests.gpu.layers import DEVICE, check, open_layer, oracle, poisoned_forward, run_and_check
from tests.problems import ROUTINGS, make_inputs

SMALL = dict(hidden=512, intermediate=384, num_experts=16, top_k=4, max_tokens=300)
PAIRED = dict(SMALL, intermediate=512)
"""A shape that heuristics give the knobs of DeepSeek-V3: 64x128 tiles, and 128x256 in clusters (cpu/test_host.py)."""


def name(mode):
    return "-".join(str(v) for v in mode.values())


def check_chosen(cfg, world_size, tokens, kind):
    """With every knobs that heuristics may choose, whatever T is."""
    for knobs in heuristics.candidates(cfg):
        with open_layer(cfg, world_size, knobs=knobs) as (_, packs, moe):
            run_and_check(cfg, moe, packs, tokens, kind, 5)


@pytest.mark.parametrize("mode", supported_modes(), ids=name)
def test_every_mode(mode):
    cfg = MoEConfig(**PAIRED, **mode)
    for world_size, tokens in ((1, [300]), (4, [290, 0, 7, 133])):
        check_chosen(cfg, world_size, tokens, "masked")


@pytest.mark.parametrize("mode", [{"scale": "block"}, {"scale": "tensor"}], ids=name)
def test_one_expert_a_rank(mode):
    cfg = MoEConfig(**(PAIRED | dict(num_experts=4)), **mode)
    check_chosen(cfg, 4, [290, 0, 7, 133], "random")


@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_every_routing(world_size, kind):
    cfg = MoEConfig(**SMALL)
    with open_layer(cfg, world_size) as (_, packs, moe):
        for seed in range(3):
            tokens = [(97 * (r + 1 + seed)) % 300 for r in range(world_size)]
            run_and_check(cfg, moe, packs, tokens, kind, seed)


@pytest.mark.parametrize("scale", ["block", "tensor"])
def test_many_items_a_cluster_leave_no_tickets(scale):
    """Forwards one after the other on the same words, with more work items than clusters."""
    cfg = MoEConfig(**PAIRED, scale=scale)
    with open_layer(cfg, 1, virtual=False, num_sms=8) as (_, packs, moe):
        moe._workspace.poison()
        for seed in range(3):
            p = make_inputs(cfg, [cfg.max_tokens], "random", seed, DEVICE)
            y = moe(p.xs[0], p.ids[0], p.weights[0])
            moe.synchronize()
            check(cfg, [y], oracle(cfg, packs, p), p.ids)
            assert not moe._workspace.tensor(0, "tickets", torch.int32, (2, 2)).any()


@pytest.mark.parametrize("clamp", [None, 0.5])
@pytest.mark.parametrize("mode", [{"scale": "block"}, {"scale": "tensor"}], ids=name)
def test_clamp(clamp, mode):
    cfg = MoEConfig(**SMALL, clamp=clamp, **mode)
    with open_layer(cfg, 2) as (_, packs, moe):
        run_and_check(cfg, moe, packs, [200, 99], "random", 8)


SHAPES = [
    dict(hidden=1408, intermediate=128, num_experts=1, top_k=1, max_tokens=200),
    dict(hidden=128, intermediate=1408, num_experts=60, top_k=6, max_tokens=400),
    dict(hidden=2048, intermediate=512, num_experts=512, top_k=10, max_tokens=300),
    dict(hidden=384, intermediate=256, num_experts=40, top_k=16, max_tokens=130),
    dict(hidden=7168, intermediate=2048, num_experts=8, top_k=8, max_tokens=512),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"H{s['hidden']}I{s['intermediate']}E{s['num_experts']}")
def test_odd_shapes(shape):
    cfg = MoEConfig(**shape)
    for world_size in (1, 2, 4, 8):
        if cfg.num_experts % world_size:
            continue
        with open_layer(cfg, world_size) as (_, packs, moe):
            tokens = [cfg.max_tokens, 1, 0, 63, 64, 65, 129, 2][:world_size]
            run_and_check(cfg, moe, packs, tokens, "random", 2)


@settings(max_examples=20)
@given(st.data())
def test_any_problem(data):
    world_size = data.draw(st.sampled_from([1, 2, 4, 8]), label="W")
    experts = world_size * data.draw(st.sampled_from([1, 2, 3, 5, 12]), label="E_local")
    cfg = MoEConfig(
        hidden=128 * data.draw(st.integers(1, 9), label="H/128"),
        intermediate=128 * data.draw(st.integers(1, 6), label="I/128"),
        num_experts=experts,
        top_k=data.draw(st.integers(1, min(16, experts)), label="K"),
        max_tokens=200,
        **data.draw(st.sampled_from(supported_modes()), label="mode"),
    )
    tokens = [data.draw(st.integers(0, 200), label=f"T{r}") for r in range(world_size)]
    kind = data.draw(st.sampled_from(ROUTINGS), label="routing")
    seed = data.draw(st.integers(0, 1 << 16), label="seed")
    with open_layer(cfg, world_size, seed=seed) as (_, packs, moe):
        run_and_check(cfg, moe, packs, tokens, kind, seed)


@pytest.mark.parametrize("fp8,least", [("e4m3", 0.997), ("e5m2", 0.990)])
@pytest.mark.parametrize("scale", ["block", "tensor"])
def test_near_the_unquantised_layer(fp8, least, scale):
    cfg = MoEConfig(**SMALL, fp8=fp8, scale=scale)
    g = torch.Generator(DEVICE).manual_seed(3)
    w13 = torch.randn(16, 768, 512, generator=g, device=DEVICE, dtype=torch.bfloat16) * 512**-0.5
    w2 = torch.randn(16, 512, 384, generator=g, device=DEVICE, dtype=torch.bfloat16) * 384**-0.5
    p = make_inputs(cfg, [300], "random", 3, DEVICE)
    scales = {}
    if scale == "tensor":
        scales = dict(zip(("x_scale", "act_scale"), calibrate(cfg, w13, p.xs[0], p.ids[0], p.weights[0])))
    with SingleWorld() as world, MegaMoE(cfg, ExpertWeights.from_bf16(cfg, w13, w2, **scales), world) as moe:
        y = moe(p.xs[0], p.ids[0], p.weights[0])
        moe.synchronize()
    want = reference.unquantised_layer(cfg, w13, w2, p.xs[0], p.ids[0], p.weights[0])
    assert reference.cosine(y, want) >= least


def test_prequantised_tokens_and_other_dtypes():
    for scale in ("block", "tensor"):
        cfg = MoEConfig(**SMALL, scale=scale)
        with open_layer(cfg, 2) as (_, packs, moe):
            p = make_inputs(cfg, [150, 80], "masked", 4, DEVICE)
            plain = poisoned_forward(moe, p)
            staged = [reference.stage(cfg, x, packs[0].x_scale) for x in p.xs]
            xs = [s if scale == "block" else s[0] for s in staged]
            ys = moe(xs, [i.long() for i in p.ids], p.weights)
            moe.synchronize()
            assert all(torch.equal(a, b) for a, b in zip(plain, ys))
            p.weights = [w.bfloat16() for w in p.weights]
            check(cfg, poisoned_forward(moe, p), oracle(cfg, packs, p), p.ids)


def test_nan_stays_in_its_token():
    cfg = MoEConfig(**SMALL)
    with open_layer(cfg, 2) as (_, _packs, moe):
        p = make_inputs(cfg, [100, 60], "random", 6, DEVICE)
        clean = poisoned_forward(moe, p)
        p.xs[0][13, 77] = float("nan")
        ys = poisoned_forward(moe, p)
        assert ys[0][13].isnan().all()
        keep = torch.arange(100, device=DEVICE) != 13
        assert torch.equal(ys[0][keep], clean[0][keep]) and torch.equal(ys[1], clean[1])


def test_unchecked_bad_ids_count_as_masked():
    cfg = MoEConfig(**SMALL)
    with open_layer(cfg, 2) as (_, _packs, moe):
        p = make_inputs(cfg, [90, 90], "random", 7, DEVICE)
        p.ids[0][::3, 1], p.ids[1][1::4, 0] = 16, -9
        masked = [torch.where((i < 0) | (i >= 16), -1, i) for i in p.ids]
        ys = poisoned_forward(moe, p)
        p.ids = masked
        assert all(torch.equal(a, b) for a, b in zip(ys, poisoned_forward(moe, p)))


@pytest.mark.parametrize("hot", [False, True])
def test_weights_and_pools_beyond_31_bits(hot):
    """w13 of 2.2e9 elements; a pool of more than 2^31 bytes whose last rows are live."""
    cfg = MoEConfig(hidden=7168, intermediate=2048, num_experts=80, top_k=8, max_tokens=40000)
    w13 = torch.randint(0, 0x77, (80, 4096, 7168), dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)
    w2 = torch.randint(0, 0x77, (80, 7168, 2048), dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)
    s13 = torch.full((80, 32, 56), 1e-4, device=DEVICE)
    s2 = torch.full((80, 56, 16), 1e-4, device=DEVICE)
    pack = ExpertWeights.from_fp8_blocks(cfg, w13, s13, w2, s2)
    del w13, w2
    tokens = 40000
    g = torch.Generator(DEVICE).manual_seed(1)
    x = torch.randn(tokens, 7168, generator=g, device=DEVICE, dtype=torch.bfloat16)
    ids = torch.rand(tokens, 80, generator=g, device=DEVICE).topk(8).indices.int()
    if hot:
        ids = torch.arange(72, 80, device=DEVICE, dtype=torch.int32).expand(tokens, 8).contiguous()
    weights = torch.full((tokens, 8), 0.125, device=DEVICE)
    with SingleWorld() as world, MegaMoE(cfg, pack, world) as moe:
        y = moe(x, ids, weights)
        moe.synchronize()
        some = torch.cat([torch.arange(0, 20), torch.arange(tokens - 20, tokens)]).to(DEVICE)
        want = reference.layer(cfg, [pack.canonical()], [x[some]], [ids[some]], [weights[some]])[0]
        assert reference.relative_error(y[some], want) <= 1e-2
