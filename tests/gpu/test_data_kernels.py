"""stage, exchange, pull, token_back, reduce, each alone against torch, on poisoned buffers."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from megamoe import kernels, numerics, reference, wire
from megamoe.config import MoEConfig
from tests.gpu.poison import poisoned_empty
from tests.problems import ROUTINGS, make_inputs, routing

DEVICE = "cuda"


def config(**changes):
    base = dict(hidden=384, intermediate=256, num_experts=12, top_k=3, max_tokens=512)
    return MoEConfig(**{**base, **changes})


def check_staged(cfg, x, staged, x_scale):
    codes, scales = reference.stage(cfg, x, x_scale)
    got_codes, got_scales = kernels.unpack_rows(staged.rows, wire.input_format(cfg), cfg.fp8)
    assert torch.equal(got_codes.view(torch.uint8), codes.view(torch.uint8))
    if scales is not None:
        assert torch.equal(got_scales, scales)


@pytest.mark.parametrize("fp8", ["e4m3", "e5m2"])
@pytest.mark.parametrize("scale", ["block", "tensor"])
@pytest.mark.parametrize("hidden", [128, 384, 1408, 7168])
def test_stage_quantises_to_the_bit(fp8, scale, hidden):
    cfg = config(hidden=hidden, fp8=fp8, scale=scale)
    p = make_inputs(cfg, [37], "random", 3, DEVICE)
    x = p.xs[0] * torch.logspace(-4, 3, 37, device=DEVICE)[:, None].bfloat16()
    x[5] = 0
    with poisoned_empty():
        staged = kernels.stage(cfg, x, p.ids[0], p.weights[0], x_scale=0.02)
    check_staged(cfg, x, staged, 0.02)


@pytest.mark.parametrize("scale", ["block", "tensor"])
def test_stage_keeps_nan_in_its_token(scale):
    cfg = config(scale=scale)
    p = make_inputs(cfg, [16], "random", 4, DEVICE)
    p.xs[0][7, 200] = math.nan
    with poisoned_empty():
        staged = kernels.stage(cfg, p.xs[0], p.ids[0], p.weights[0], x_scale=0.02)
    check_staged(cfg, p.xs[0], staged, 0.02)


def test_stage_takes_quantised_tokens():
    for scale in ("block", "tensor"):
        cfg = config(scale=scale, hidden=640)
        p = make_inputs(cfg, [21], "random", 5, DEVICE)
        codes, scales = reference.stage(cfg, p.xs[0], 0.02)
        with poisoned_empty():
            staged = kernels.stage(cfg, codes, p.ids[0], p.weights[0], x_scales=scales)
        check_staged(cfg, p.xs[0], staged, 0.02)


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16])
def test_stage_cleans_and_counts(ids_dtype, weights_dtype):
    cfg = config()
    p = make_inputs(cfg, [500], "masked", 6, DEVICE)
    ids, weights = p.ids[0].to(ids_dtype), p.weights[0].to(weights_dtype)
    ids[3, 1], ids[4, 0] = 12, -7
    if ids_dtype is torch.int64:
        ids[5, 2] = (1 << 40) + 3
    with poisoned_empty():
        staged = kernels.stage(cfg, p.xs[0], ids, weights)
    want_ids, want_weights = reference.clean_routes(cfg, ids, weights)
    assert torch.equal(staged.ids, want_ids)
    live = want_ids >= 0
    assert torch.equal(staged.weights[live], want_weights[live])
    want = torch.bincount(want_ids[live].long(), minlength=cfg.num_experts)
    assert torch.equal(staged.counts[1].long(), want)
    assert not staged.counts[0].any()


def unpack(words):
    """(low, high) int32 halves."""
    halves = words.view(torch.int32).view(-1, 2)
    return halves[:, 0], halves[:, 1]


def make_arenas(cfg, world_size, ready=True):
    """W arenas full of 0xFF bytes with fresh_control(ready=ready): their regions by name, and every rank's deltas."""
    layout, local = wire.arena_layout(cfg, world_size), cfg.experts_local(world_size)
    arenas = [torch.full((layout.nbytes,), 0xFF, dtype=torch.uint8, device=DEVICE) for _ in range(world_size)]

    def view(rank, name, dtype, *shape):
        region = layout[name]
        return arenas[rank][region.offset : region.offset + region.nbytes].view(dtype)[: math.prod(shape)].view(shape)

    regions = [
        dict(
            control=view(r, "control", torch.int64, wire.CONTROL_WORDS),
            counts=view(r, "counts", torch.int32, 2, world_size, wire.counts_pitch(local)),
            lists=view(r, "lists", torch.int64, 2, world_size, cfg.max_tokens * cfg.top_k),
            x=view(r, "x", torch.uint8, cfg.max_tokens, wire.input_format(cfg).pitch),
            slots=view(r, "slots", torch.bfloat16, cfg.max_tokens, cfg.top_k, cfg.hidden),
        )
        for r in range(world_size)
    ]
    for g in regions:
        g["control"].copy_(kernels.fresh_control(DEVICE, ready=ready))
    return regions, [kernels.peer_deltas(arenas, r) for r in range(world_size)]


def check_lists(cfg, world_size, rank, staged, start, regions, layer):
    """Every owner has rank's routes once, expert by expert, their counts and the layer in slot 1, and nothing else."""
    local = cfg.experts_local(world_size)
    flat = staged.ids.flatten()
    bits = staged.weights.flatten().view(torch.int32)
    counts = torch.bincount(flat[flat >= 0].long(), minlength=cfg.num_experts).view(world_size, local)
    assert start.tolist() == [0, *counts.sum(1).cumsum(0).tolist()]
    for owner, g in enumerate(regions):
        header, total = g["counts"][1, rank], int(counts[owner].sum())
        assert int(header[wire.HEADER_LAYER]) == layer
        assert torch.equal(header[wire.HEADER : wire.HEADER + local].long(), counts[owner])
        routes, got_bits = unpack(g["lists"][1, rank, :total])
        assert int(routes.min() if total else 0) >= 0 and int(routes.max() if total else -1) < flat.numel()
        experts = torch.repeat_interleave(torch.arange(local, device=DEVICE) + owner * local, counts[owner])
        assert torch.equal(flat[routes.long()].long(), experts)
        assert routes.unique().numel() == total
        assert torch.equal(got_bits, bits[routes.long()])
        assert torch.all(g["lists"][1, rank, total:] == -1)
        other = torch.arange(world_size, device=DEVICE) != rank
        assert torch.all(g["lists"][0] == -1) and torch.all(g["lists"][1][other] == -1)
        assert torch.all(g["counts"][0] == -1) and torch.all(g["counts"][1][other] == -1)
        assert int(g["control"][wire.list_flag(1, rank)]) == 1


@settings(max_examples=25)
@given(
    st.sampled_from(ROUTINGS),
    st.integers(0, 3000),
    st.sampled_from([(1, 1), (12, 3), (40, 6), (72, 10), (256, 8), (512, 16)]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([None, 1]),
    st.integers(0, 1 << 20),
)
def test_exchange_sends_every_live_route(kind, tokens, size, world_size, num_sms, seed):
    experts, k = size
    world_size = math.gcd(world_size, experts)
    rank = seed % world_size
    cfg = config(num_experts=experts, top_k=k, hidden=128, max_tokens=3000)
    ids, weights = routing(kind, cfg, rank, world_size, tokens, seed, DEVICE)
    x = torch.zeros(tokens, cfg.hidden, dtype=torch.bfloat16, device=DEVICE)
    regions, deltas = make_arenas(cfg, world_size, ready=False)
    g = regions[rank]
    with poisoned_empty():
        staged = kernels.stage(cfg, x, ids, weights, world_size=world_size, rank=rank)
        start = kernels.exchange(
            *(cfg, staged, g["counts"], g["lists"]),
            **dict(rank=rank, layer=7, world_size=world_size, num_sms=num_sms),
            **dict(control=g["control"], deltas=deltas[rank]),
        )
    check_lists(cfg, world_size, rank, staged, start, regions, 7)


def play_ranks(cfg, world_size, tokens, kind, seed, x_scale=0.02):
    """Stage, exchange and pull W ranks one after another on one GPU, every wait satisfied beforehand."""
    p = make_inputs(cfg, tokens, kind, seed, DEVICE)
    regions, deltas = make_arenas(cfg, world_size)
    ranks = []
    for r, g in enumerate(regions):
        at = dict(rank=r, world_size=world_size, control=g["control"], deltas=deltas[r])
        staged = kernels.stage(cfg, p.xs[r], p.ids[r], p.weights[r], x_scale=x_scale, world_size=world_size, rank=r)
        g["x"][: len(p.xs[r])].copy_(staged.rows)
        ranks.append((staged, kernels.exchange(cfg, staged, g["counts"], g["lists"], **at)))
    pools = []
    for r in range(world_size):
        g = regions[r]
        pools.append(
            kernels.pull(
                *(cfg, g["counts"], g["lists"], g["x"], max(cfg.pool_capacity(world_size), 1)),
                **dict(rank=r, world_size=world_size, control=g["control"], deltas=deltas[r]),
            )
        )
    torch.cuda.synchronize()
    return p, ranks, regions, deltas, pools


def check_pool(cfg, world_size, owner, ranks, pool):
    """Every route to `owner` once, in its expert's segment, with its home's record and weight."""
    local = cfg.experts_local(world_size)
    total = int(pool.expert_start[-1])
    routes, homes = unpack(pool.meta[:total])
    experts = torch.repeat_interleave(torch.arange(local, device=DEVICE), pool.expert_start.diff().long())
    places = experts * world_size + (homes - owner - 1) % world_size
    assert torch.equal(places, places.sort().values)  # within an expert the next rank's first, its own last
    got = sorted(zip(experts.tolist(), homes.tolist(), routes.tolist()))
    want = []
    for home, (staged, _) in enumerate(ranks):
        flat = staged.ids.flatten()
        mine = ((flat >= owner * local) & (flat < (owner + 1) * local)).nonzero().flatten()
        want += [(e - owner * local, home, route) for e, route in zip(flat[mine].tolist(), mine.tolist())]
    assert got == sorted(want)
    nbytes = wire.input_format(cfg).columns + 4 * wire.input_format(cfg).scales
    for home, (staged, _) in enumerate(ranks):
        mine = homes == home
        mine_routes = routes[mine].long()
        assert torch.equal(pool.rows[:total][mine][:, :nbytes], staged.rows[mine_routes // cfg.top_k][:, :nbytes])
        assert torch.equal(pool.weights[:total][mine], staged.weights.flatten()[mine_routes])


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", ROUTINGS)
def test_exchange_and_pull_build_the_pool(world_size, kind):
    cfg = config(num_experts=16, top_k=6, hidden=1408, max_tokens=160)
    tokens = [(61 * (r + 1)) % 160 for r in range(world_size)]
    with poisoned_empty():
        _, ranks, _, _, pools = play_ranks(cfg, world_size, tokens, kind, 11)
    for owner, pool in enumerate(pools):
        check_pool(cfg, world_size, owner, ranks, pool)


@settings(max_examples=12)
@given(
    st.sampled_from([1, 2, 4]),
    st.sampled_from([(8, 1), (12, 3), (40, 10)]),
    st.sampled_from([128, 640, 7168]),
    st.sampled_from(["block", "tensor"]),
    st.sampled_from(ROUTINGS),
    st.integers(0, 1 << 20),
    st.data(),
)
def test_pull_holds_for_any_problem(world_size, size, hidden, scale, kind, seed, data):
    cfg = config(num_experts=size[0], top_k=size[1], hidden=hidden, scale=scale, max_tokens=300)
    tokens = [data.draw(st.integers(0, 300)) for _ in range(world_size)]
    with poisoned_empty():
        _, ranks, _, _, pools = play_ranks(cfg, world_size, tokens, kind, seed)
    for owner, pool in enumerate(pools):
        check_pool(cfg, world_size, owner, ranks, pool)


@pytest.mark.parametrize("hidden", [128, 1408, 7168, 16384])
@pytest.mark.parametrize("world_size", [1, 4])
def test_token_back_and_reduce(hidden, world_size):
    cfg = config(num_experts=16, top_k=5, hidden=hidden, max_tokens=64)
    tokens = [64, 0, 17, 33][:world_size]
    with poisoned_empty():
        _, ranks, regions, deltas, pools = play_ranks(cfg, world_size, tokens, "masked", 23)
    want = [torch.full((cfg.max_tokens, cfg.top_k, hidden), math.nan, device=DEVICE).bfloat16() for _ in tokens]
    for owner, pool in enumerate(pools):
        total = int(pool.expert_start[-1])
        y = torch.randn(pool.rows.shape[0], hidden, device=DEVICE, dtype=torch.bfloat16)
        routes, homes = unpack(pool.meta[:total])
        for home in range(world_size):
            mine = homes == home
            want[home].view(-1, hidden)[routes[mine].long()] = y[:total][mine]
        g = regions[owner]
        kernels.token_back(
            *(cfg, pool, y, g["slots"]),
            **dict(rank=owner, world_size=world_size, control=g["control"], deltas=deltas[owner]),
        )
    torch.cuda.synchronize()
    for home, (staged, start) in enumerate(ranks):
        slots = regions[home]["slots"]
        assert torch.equal(slots.isnan(), want[home].isnan())
        assert torch.equal(slots.nan_to_num(), want[home].nan_to_num())
        with poisoned_empty():
            y = kernels.reduce(
                *(cfg, regions[home]["slots"], staged.ids),
                **dict(start=start, rank=home, world_size=world_size),
                **dict(control=regions[home]["control"], deltas=deltas[home]),
            )
        assert torch.equal(y, reference.reduce(want[home][: tokens[home]], staged.ids))
        assert int(regions[home]["control"][wire.EPOCH]) == 1


@settings(max_examples=15)
@given(st.integers(1, 16), st.sampled_from([128, 384, 2048, 7168]), st.integers(0, 700), st.integers(0, 1 << 20))
def test_reduce_sums_in_order(top_k, hidden, tokens, seed):
    cfg = config(top_k=top_k, hidden=hidden, num_experts=16, max_tokens=700)
    ids, _ = routing("masked", cfg, 0, 1, tokens, seed, DEVICE)
    slots = torch.randn(tokens, top_k, hidden, device=DEVICE).bfloat16()
    slots[ids < 0] = math.nan
    with poisoned_empty():
        y = kernels.reduce(cfg, slots, ids)
    assert torch.equal(y, reference.reduce(slots, ids))


def test_host_and_device_quantise_alike():
    x = torch.randn(64, 512, device=DEVICE)
    for fp8 in ("e4m3", "e5m2"):
        on_gpu = numerics.quantize_groups(x, 128, fp8)
        on_cpu = numerics.quantize_groups(x.cpu(), 128, fp8)
        assert torch.equal(on_gpu[0].cpu().view(torch.uint8), on_cpu[0].view(torch.uint8))
        assert torch.equal(on_gpu[1].cpu(), on_cpu[1])


@pytest.mark.parametrize("scale", ["block", "tensor"])
def test_stage_of_every_bf16_value(scale):
    """All 65536 bit patterns but infinities: signed zeros, denormals, NaN, and overflow of a static scale."""
    cfg = config(scale=scale, hidden=256, max_tokens=256)
    x = torch.arange(1 << 16, device=DEVICE, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256)
    x = torch.where(x.isinf(), torch.zeros_like(x), x)
    ids, weights = routing("random", cfg, 0, 1, 256, 0, DEVICE)
    with poisoned_empty():
        staged = kernels.stage(cfg, x, ids, weights, x_scale=0.02)
    codes, scales = reference.stage(cfg, x, 0.02)
    got, got_scales = kernels.unpack_rows(staged.rows, wire.input_format(cfg), cfg.fp8)
    nan = codes.float().isnan()
    assert torch.equal(got.float().isnan(), nan)
    assert torch.equal(got.view(torch.uint8)[~nan], codes.view(torch.uint8)[~nan])
    if scales is not None:
        assert torch.equal(got_scales, scales)
