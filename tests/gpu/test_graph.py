"""Graph capture, layers sharing a workspace, compile counts, and cost of large buffers."""

import cutlass.cute as cute
import pytest
import torch

from megamoe import MegaMoE, MegaMoEError, MoEConfig, VirtualWorld, memory_estimate
from megamoe.comm import SingleWorld
from megamoe.kernels import build
from tests.gpu.layers import DEVICE, check, open_layer, oracle
from tests.problems import Problem, make_inputs, make_weights

CFG = MoEConfig(hidden=512, intermediate=256, num_experts=16, top_k=4, max_tokens=200)


@pytest.mark.parametrize("world_size", [1, 4, 8])
def test_one_capture_replays_new_tokens(world_size):
    tokens = [200, 100, 0, 57, 1, 64, 200, 33][:world_size]
    with open_layer(CFG, world_size) as (_, packs, moe):
        static = make_inputs(CFG, tokens, "random", 0, DEVICE)
        outs = [torch.empty_like(x) for x in static.xs]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            moe(static.xs, static.ids, static.weights, out=outs)
        kinds = ("random", "zipf", "masked", "one_expert", "all_masked")
        for i in range(200):
            fresh = make_inputs(CFG, tokens, kinds[i % len(kinds)], i, DEVICE)
            for name in ("xs", "ids", "weights"):
                for to, source in zip(getattr(static, name), getattr(fresh, name)):
                    to.copy_(source)
            for out in outs:
                out.fill_(float("nan"))
            graph.replay()
            moe.synchronize()
            check(CFG, outs, oracle(CFG, packs, fresh), fresh.ids)


def test_capture_before_warmup_is_refused():
    cfg = MoEConfig(hidden=640, intermediate=128, num_experts=4, top_k=2, max_tokens=20)
    with SingleWorld() as world, MegaMoE(cfg, make_weights(cfg, 1, 0, DEVICE)[0], world) as moe:
        p = make_inputs(cfg, [20], "random", 0, DEVICE)
        out = torch.empty_like(p.xs[0])
        with pytest.raises(MegaMoEError, match="warmup"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            moe(p.xs[0], p.ids[0], p.weights[0], out=out)
        torch.cuda.synchronize()
        y = moe(p.xs[0], p.ids[0], p.weights[0])
        check(cfg, [y], oracle(cfg, make_weights(cfg, 1, 0, DEVICE), p), p.ids)


@pytest.mark.parametrize("world_size", [1, 4])
def test_two_layers_share_a_workspace(world_size):
    tokens = [150, 0, 31, 200][:world_size]
    with VirtualWorld(world_size) as world:
        packs = [make_weights(CFG, world_size, seed, DEVICE) for seed in (1, 2)]
        layers = [MegaMoE(CFG, pack, world) for pack in packs]
        assert layers[0]._workspace is layers[1]._workspace
        for layer in layers:
            layer.warmup()
        p = make_inputs(CFG, tokens, "random", 3, DEVICE)
        for _ in range(5):
            first = layers[0](p.xs, p.ids, p.weights)
            second = layers[1](first, p.ids, p.weights)
        layers[1].synchronize()
        check(CFG, first, oracle(CFG, packs[0], p), p.ids)
        check(CFG, second, oracle(CFG, packs[1], Problem(first, p.ids, p.weights)), p.ids)
        graph = torch.cuda.CUDAGraph()
        outs = [[torch.empty_like(x) for x in p.xs] for _ in range(2)]
        with torch.cuda.graph(graph):
            layers[0](p.xs, p.ids, p.weights, out=outs[0])
            layers[1](outs[0], p.ids, p.weights, out=outs[1])
        for _ in range(10):
            graph.replay()
            eager = layers[0](p.xs, p.ids, p.weights)
        layers[0].synchronize()
        assert all(torch.equal(a, b) for a, b in zip(eager, first))
        assert all(torch.equal(a, b) for a, b in zip(outs[1], second))
        for layer in layers:
            layer.close()


def test_one_compile_a_kernel(monkeypatch):
    cfg = MoEConfig(hidden=768, intermediate=256, num_experts=24, top_k=3, max_tokens=2000)
    calls = []
    real = cute.compile
    monkeypatch.setattr(build.cute, "compile", lambda kernel, *a, **k: calls.append(kernel) or real(kernel, *a, **k))
    with SingleWorld() as world:
        packs = make_weights(cfg, 1, 0, DEVICE)
        with MegaMoE(cfg, packs[0], world) as moe:
            moe.warmup()
            built = [(type(k).__name__, k.spec) for k in calls]
            assert len(set(built)) == len(built)
            names = [name for name, _ in built]
            assert sorted(names) == sorted(  # two Stage variants, and GEMMs for both Knobs that T can choose
                ["Stage"] * 2 + ["Exchange", "Pull", "TokenBack", "Reduce"] + ["FC1", "FC2"] * 2
            )
            for tokens in (0, 1, 7, 64, 1000, 2000):
                p = make_inputs(cfg, [tokens], "random", tokens, DEVICE)
                y = moe(p.xs[0], p.ids[0], p.weights[0])
                moe.synchronize()
                check(cfg, [y], oracle(cfg, packs, p), p.ids)
            assert len(calls) == len(built)
        with MegaMoE(cfg, packs[0], world) as again:
            again.warmup()
        assert len(calls) == len(built)


@pytest.mark.parametrize("world_size", [1, 4])
def test_forward_neither_allocates_nor_waits(world_size):
    with open_layer(CFG, world_size) as (_, packs, moe):
        p = make_inputs(CFG, [200, 0, 64, 1][:world_size], "random", 1, DEVICE)
        outs = [torch.empty_like(x) for x in p.xs]
        moe(p.xs, p.ids, p.weights, out=outs)
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            moe(p.xs, p.ids, p.weights, out=outs)
            moe.check()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        moe.synchronize()
        check(CFG, outs, oracle(CFG, packs, p), p.ids)


@pytest.mark.parametrize("world_size", [1, 2])
def test_memory_estimate_is_what_is_allocated(world_size):
    cfg = MoEConfig(hidden=2048, intermediate=768, num_experts=16, top_k=4, max_tokens=4096)
    torch.cuda.empty_cache()
    with VirtualWorld(world_size) as world:
        before = torch.cuda.memory_allocated()
        packs = make_weights(cfg, world_size, 0, DEVICE)
        weights = torch.cuda.memory_allocated() - before
        with MegaMoE(cfg, packs, world):
            buffers = torch.cuda.memory_allocated() - before - weights
        estimate = memory_estimate(cfg, world_size)
        for got, want in (
            (weights, world_size * estimate["layer_weights"]),
            (buffers, world_size * (estimate["arena"] + estimate["pools"])),
        ):
            assert abs(got - want) <= 0.02 * want, (got, want)


def time_of(moe, p, runs=60):
    """Median microseconds of a captured forward."""
    graph = torch.cuda.CUDAGraph()
    out = torch.empty_like(p.xs[0])
    with torch.cuda.graph(graph):
        moe(p.xs[0], p.ids[0], p.weights[0], out=out)
    times = []
    for _ in range(runs):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def test_cost_follows_live_tokens():
    shape = dict(hidden=2048, intermediate=768, num_experts=64, top_k=8)
    medians = {}
    for capacity in (8, 8192):
        cfg = MoEConfig(**shape, max_tokens=capacity)
        with open_layer(cfg, 1, virtual=False) as (_, _packs, moe):
            p = make_inputs(cfg, [8], "random", 1, DEVICE)
            medians[capacity] = min(time_of(moe, p) for _ in range(3))
    assert medians[8192] <= 1.1 * medians[8], medians
