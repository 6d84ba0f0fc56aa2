"""Layers in processes as hosts have them: threads, streams, default devices, inference mode, lost memory."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from megamoe import (
    AbortedBadInput,
    ExpertWeights,
    InputError,
    MegaMoE,
    MegaMoEError,
    MoEConfig,
    VirtualWorld,
    kernels,
    reference,
    wire,
)
from megamoe.comm import SingleWorld
from tests.gpu.layers import DEVICE, check, open_layer, oracle, run_and_check
from tests.problems import make_inputs, make_weights

ROOT = Path(__file__).resolve().parents[2]
CFG = MoEConfig(hidden=512, intermediate=256, num_experts=16, top_k=4, max_tokens=200)
LONG = 40_000_000  # cycles of a sleeping stream, some 20 ms: many forwards


def inputs(tokens: int, seed: int):
    """x, ids and weights of one rank."""
    p = make_inputs(CFG, [tokens], "random", seed, DEVICE)
    return p.xs[0], p.ids[0], p.weights[0]


@pytest.fixture
def two_layers():
    """Two layers on one workspace, warm."""
    with SingleWorld(timeout_s=20) as world:
        layers = [MegaMoE(CFG, make_weights(CFG, 1, seed, DEVICE)[0], world) for seed in (1, 2)]
        for moe in layers:
            moe.warmup()
        torch.cuda._sleep(1)
        torch.cuda.synchronize()
        yield layers
        for moe in layers:
            moe.close()


# ---- streams and threads -------------------------------------------------------------------------


def test_forwards_on_unordered_streams_follow_each_other(two_layers):
    cases = [(two_layers[i % 2], inputs(200 - 17 * i, i)) for i in range(8)]
    wants = [moe(*args) for moe, args in cases]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in cases]
    for first in range(len(cases)):  # the stream that is late differs
        outs = []
        for i, ((moe, args), stream) in enumerate(zip(cases, streams)):
            with torch.cuda.stream(stream):
                if i == first:
                    torch.cuda._sleep(LONG)
                outs.append(moe(*args))
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(outs, wants)), first
    two_layers[0].synchronize()


@pytest.mark.parametrize("size", [1, 2])
def test_replays_and_eager_forwards_on_unordered_streams_follow_each_other(size):
    """Whoever is launched first runs first, also when its stream is held up and the other's is free."""
    tokens = [200, 77][:size]
    with open_layer(CFG, size) as (_, _packs, moe):
        problems = [make_inputs(CFG, tokens, "random", i, DEVICE) for i in range(4)]
        wants = [moe(p.xs, p.ids, p.weights) for p in problems]
        torch.cuda._sleep(1)
        torch.cuda.synchronize()
        graphs = []
        for chosen in ((0, 1), (2, 3, 2)):
            outs = [[torch.empty_like(x) for x in problems[i].xs] for i in chosen]
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for i, out in zip(chosen, outs):
                    moe(problems[i].xs, problems[i].ids, problems[i].weights, out=out)
                torch.cuda._sleep(1000)  # something behind the last forward
            graphs.append((graph, chosen, outs))
        streams = [torch.cuda.Stream() for _ in range(4)]
        for turn in range(24):
            for _, _, outs in graphs:
                for ys in outs:
                    for y in ys:
                        y.fill_(float("nan"))
            torch.cuda.synchronize()
            eager = []
            for place in range(4):
                with torch.cuda.stream(streams[(place + turn) % 4]):
                    if place == turn % 4:
                        torch.cuda._sleep(LONG // 4)
                    if (place + turn // 4) % 2:
                        graphs[(place + turn) // 2 % 2][0].replay()
                    else:
                        p = problems[place]
                        eager.append((moe(p.xs, p.ids, p.weights), wants[place]))
            torch.cuda.synchronize()
            done = [(outs, [wants[i] for i in chosen]) for _, chosen, outs in graphs if not outs[0][0].isnan().any()]
            assert done, turn
            for got, want in (*eager, *((g, w) for gs, ws in done for g, w in zip(gs, ws))):
                assert all(torch.equal(a, b) for a, b in zip(got, want)), turn
        moe.synchronize()


def test_a_foreign_stream_may_be_gone_at_the_next_forward(two_layers):
    from cuda.bindings import driver

    moe, args = two_layers[0], inputs(100, 0)
    want = moe(*args)
    torch.cuda.synchronize()
    error, raw = driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
    assert error == driver.CUresult.CUDA_SUCCESS
    foreign = torch.cuda.ExternalStream(int(raw))
    with torch.cuda.stream(foreign):
        torch.cuda._sleep(LONG)
        first = moe(*args)
    driver.cuStreamDestroy(raw)  # its work goes on
    second = moe(*args)
    torch.cuda.synchronize()
    assert torch.equal(first, want) and torch.equal(second, want)


def test_a_capture_orders_forwards_on_its_streams(two_layers):
    cases = [(two_layers[i % 2], inputs(200 - 30 * i, i)) for i in range(4)]
    wants = [moe(*args) for moe, args in cases]
    outs = [torch.empty_like(want) for want in wants]
    streams = [torch.cuda.Stream() for _ in cases]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        for stream in streams:
            stream.wait_stream(main)
        for (moe, args), out, stream in zip(cases, outs, streams):
            with torch.cuda.stream(stream):
                moe(*args, out=out)
        for stream in streams:
            main.wait_stream(stream)
    for _ in range(20):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(outs, wants))
    again = [moe(*args) for moe, args in cases]  # eager after a capture, on streams that it left
    assert all(torch.equal(a, b) for a, b in zip(again, wants))
    two_layers[0].synchronize()


@pytest.mark.parametrize("own_streams", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
def test_threads(layers, own_streams, two_layers):
    cases = [(two_layers[i % layers], inputs(1 + 23 * i, i)) for i in range(8)]
    wants = [moe(*args) for moe, args in cases]
    torch.cuda.synchronize()

    def work(i: int) -> bool:
        stream = torch.cuda.Stream() if own_streams else torch.cuda.current_stream()
        moe, args = cases[i]
        with torch.cuda.stream(stream):
            same = [torch.equal(moe(*args), wants[i]) for _ in range(60)]
        return all(same)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
    two_layers[0].synchronize()


def test_threads_on_virtual_ranks():
    with open_layer(CFG, 2) as (_, _packs, moe):
        problems = [make_inputs(CFG, [50 + i, 120], "random", i, DEVICE) for i in range(4)]
        wants = [moe(p.xs, p.ids, p.weights) for p in problems]
        torch.cuda.synchronize()

        def work(i: int) -> bool:
            p = problems[i]
            with torch.cuda.stream(torch.cuda.Stream()):
                runs = [moe(p.xs, p.ids, p.weights) for _ in range(20)]
                return all(torch.equal(y, want) for ys in runs for y, want in zip(ys, wants[i]))

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(work, range(4)))
        moe.synchronize()


# ---- modes around a layer ------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["with", "set"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_default_device(size, how):
    def whole() -> None:
        with open_layer(CFG, size) as (_, packs, moe):
            run_and_check(CFG, moe, packs, [100, 37][:size], "random", 0)
            moe.reset()
            run_and_check(CFG, moe, packs, [100, 37][:size], "random", 1)

    if how == "with":
        with torch.device(DEVICE):
            whole()
    else:
        torch.set_default_device(DEVICE)
        try:
            whole()
        finally:
            torch.set_default_device(None)


def test_inference_mode_inside_and_reset_outside():
    with torch.inference_mode():
        world = VirtualWorld(2, timeout_s=5)
        packs = make_weights(CFG, 2, 0, DEVICE)
        moe = MegaMoE(CFG, packs, world, check_routes=True)
        moe.warmup()
        p = make_inputs(CFG, [64, 64], "random", 0, DEVICE)
        bad = [p.ids[0].clone(), p.ids[1]]
        bad[0][0, 0] = 99
        moe(p.xs, bad, p.weights)
    with pytest.raises(AbortedBadInput):
        moe.synchronize()
    moe.reset()
    check(CFG, moe(p.xs, p.ids, p.weights), oracle(CFG, packs, p), p.ids)
    moe.synchronize(), moe.close(), world.close()


def test_gradients_are_not_dropped_in_silence(two_layers):
    moe, (x, ids, weights) = two_layers[0], inputs(64, 0)
    want = moe(x, ids, weights)
    y = moe(x.requires_grad_(), ids, weights)
    assert torch.equal(y, want)
    with pytest.raises(MegaMoEError, match="inference only"):
        y.sum().backward()


def test_autocast_leaves_the_oracle_alone():
    packs, p = make_weights(CFG, 1, 0, DEVICE), make_inputs(CFG, [64], "random", 0, DEVICE)
    want = oracle(CFG, packs, p)[0]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert torch.equal(oracle(CFG, packs, p)[0], want)


def test_freed_memory_is_refused_before_a_launch(two_layers):
    moe, (x, ids, weights) = two_layers[0], inputs(64, 0)
    gone = x.clone()
    gone.untyped_storage().resize_(0)
    with pytest.raises(InputError, match="resized or freed"):
        moe(gone, ids, weights)
    moe(x, ids, weights)
    moe.synchronize()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("byte", [0xFF, 0x3F])
def test_reset_after_memory_lost_what_it_held(size, byte):
    with open_layer(CFG, size, timeout_s=5) as (_, packs, moe):
        p = make_inputs(CFG, [100, 37][:size], "random", 0, DEVICE)
        for _ in range(3):
            want = moe(p.xs, p.ids, p.weights)
        moe.synchronize()
        ws = moe._workspace
        for held in (ws._arena.tensors, ws._arena.deltas, ws._local, ws._scratch):
            for tensor in held.values():
                tensor.view(torch.uint8).fill_(byte)
        with pytest.raises(MegaMoEError, match="reset"):
            moe.synchronize()
        moe.reset()
        for _ in range(3):
            got = moe(p.xs, p.ids, p.weights)
            moe.synchronize()
            assert all(torch.equal(a, b) for a, b in zip(got, want))
        check(CFG, got, oracle(CFG, packs, p), p.ids)


@pytest.mark.parametrize(("size", "works"), [(1, True), (2, False)])
def test_blocking_launches(size, works):
    code = (
        "import torch, megamoe\n"
        "from tests.gpu.layers import *\n"
        "cfg = MoEConfig(hidden=128, intermediate=128, num_experts=4, top_k=2, max_tokens=8)\n"
        f"with open_layer(cfg, {size}) as (_, packs, moe):\n"
        "    run_and_check(cfg, moe, packs, [8], 'random', 0)\n"
        "    print('ran')\n"
    )
    env = os.environ | {"CUDA_LAUNCH_BLOCKING": "1", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=200)
    assert (done.returncode == 0) == works, done.stderr
    assert ("ran" in done.stdout) if works else ("CUDA_LAUNCH_BLOCKING=1: 2 virtual ranks" in done.stderr)


# ---- routes at the edges -------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 8])
def test_padding_rows_that_all_name_expert_0_fit_the_pool(size):
    cfg = MoEConfig(hidden=256, intermediate=128, num_experts=8, top_k=4, max_tokens=64)
    with open_layer(cfg, size, timeout_s=5) as (_, packs, moe):
        p = make_inputs(cfg, [64] * size, "random", 0, DEVICE)
        for ids in p.ids:
            ids.zero_()
        ys = moe(p.xs, p.ids, p.weights)
        moe.synchronize()
        check(cfg, ys, oracle(cfg, packs, p), p.ids)


def preactivation_error(accum: str) -> float:
    """Relative error of FC1 before SwiGLU on data without a negative number, K = 7168."""
    shape = dict(hidden=7168, intermediate=256, num_experts=1, top_k=1, max_tokens=128)
    cfg = MoEConfig(**shape, scale="tensor", accum=accum)
    g = torch.Generator(DEVICE).manual_seed(0)
    w13 = torch.rand(1, 512, 7168, generator=g, device=DEVICE) / 7168
    w2 = torch.rand(1, 7168, 256, generator=g, device=DEVICE)
    pack = ExpertWeights.from_bf16(cfg, w13, w2, x_scale=1 / 448, act_scale=1 / 448)
    x = torch.rand(128, 7168, generator=g, device=DEVICE).bfloat16()
    codes, _ = reference.stage(cfg, x, 1 / 448)
    start = torch.tensor([0, 128], dtype=torch.int32, device=DEVICE)
    rows = kernels.pack_rows(codes, None, wire.input_format(cfg))
    _, kept = kernels.fc1(rows, start, pack, keep_preactivation=True)
    experts = torch.zeros(128, dtype=torch.int64, device=DEVICE)
    want = reference.fc1_preactivation(cfg, codes, None, experts, pack.canonical(), torch.float64)
    return reference.relative_error(kept, want)


def test_sums_of_one_sign_in_a_single_accumulator():
    """What README and MoEConfig say of accum="single": the tensor cores truncate what they add."""
    promoted, single = preactivation_error("promoted"), preactivation_error("single")
    print(f"promoted {promoted:.2e}, single {single:.2e}")
    assert promoted <= 3e-3  # of which rounding to bf16 is 1.7e-3
    assert 0.05 <= single <= 0.2
