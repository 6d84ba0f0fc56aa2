"""torch.ops.megamoe and megamoe.nn.Experts on kernels: compilers, graphs, host time."""

from __future__ import annotations

import time

import pytest
import torch

from megamoe import MegaMoE, MoEConfig
from megamoe.comm import SingleWorld
from megamoe.nn import Experts
from tests.gpu.layers import DEVICE, check, oracle
from tests.problems import make_inputs, make_weights

CFG = MoEConfig(hidden=512, intermediate=256, num_experts=16, top_k=4, max_tokens=200)


def inputs(tokens: int, seed: int):
    """x, ids and weights of one rank."""
    p = make_inputs(CFG, [tokens], "random", seed, DEVICE)
    return p.xs[0], p.ids[0], p.weights[0]


class Block(torch.nn.Module):
    """What surrounds the experts in a model."""

    def __init__(self, moe: MegaMoE) -> None:
        super().__init__()
        self.experts = Experts(moe)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return x + self.experts(torch.relu(x), ids, weights)


@pytest.fixture(scope="module")
def layers():
    """Three layers on one workspace, warm."""
    with SingleWorld(timeout_s=20) as world:
        layers = [MegaMoE(CFG, make_weights(CFG, 1, seed, DEVICE)[0], world) for seed in range(3)]
        for moe in layers:
            moe.warmup()
        yield layers
        for moe in layers:
            moe.close()


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_the_operator_is_the_layer(layers):
    moe, args = layers[0], inputs(64, 0)
    want = moe(*args)
    assert torch.equal(torch.ops.megamoe.forward(*args, None, moe.handle), want)
    out = torch.full_like(want, float("nan"))
    torch.ops.megamoe.forward_out(*args, None, moe.handle, out=out)
    assert torch.equal(out, want)
    p = make_inputs(CFG, [64], "random", 0, DEVICE)
    check(CFG, [want], oracle(CFG, moe.experts, p), p.ids)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("how", [dict(backend="eager"), dict(), dict(mode="reduce-overhead")], ids=str)
def test_compiled_models_replay_eager_bits(how, mode, layers):
    blocks = [Block(moe) for moe in layers]
    compiled = [torch.compile(block, fullgraph=True, **how) for block in blocks]
    with mode():
        for turn in range(12):
            args = inputs(64, turn)
            # The order of layers changes, so that a graph that kept a layer would show.
            order = [0, 1, 2] if turn % 3 else [2, 0, 1]
            torch.compiler.cudagraph_mark_step_begin()
            got = want = args[0]
            for i in order:
                got, want = compiled[i](got, *args[1:]).clone(), blocks[i](want, *args[1:])
            assert torch.equal(got, want), turn
    layers[0].synchronize()


def test_any_token_count_is_one_graph(layers):
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("inductor")
    compiled = [torch.compile(Block(moe), backend=counter, fullgraph=True, dynamic=True) for moe in layers]
    with torch.no_grad():
        for tokens in (0, 1, 5, 33, 60, 200):
            args = inputs(tokens, tokens)
            for moe, fast in zip(layers, compiled):
                assert torch.equal(fast(*args), Block(moe)(*args))
    assert counter.frame_count <= 3


def test_a_compiled_function_may_call_the_layer_itself(layers):
    args = inputs(64, 1)

    def step(x, ids, weights):
        return layers[1](x * 2, ids, weights) + 1

    for backend in ("eager", "aot_eager", "inductor"):
        assert torch.equal(torch.compile(step, backend=backend, fullgraph=True)(*args), step(*args))


def test_compiled_code_inside_a_capture_of_the_caller(layers):
    x, ids, weights = inputs(64, 2)
    fast = torch.compile(Block(layers[0]), fullgraph=True)
    with torch.no_grad():
        fast(x, ids, weights)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = fast(x, ids, weights)
        for seed in range(5):
            for to, fresh in zip((x, ids, weights), inputs(64, seed)):
                to.copy_(fresh)
            graph.replay()
            assert torch.equal(y, Block(layers[0])(x, ids, weights))


def host_us(call, batches: int = 15, batch: int = 40) -> float:
    """Best median host time of a call; the device is idle at the start of each batch."""
    medians = []
    for _ in range(batches):
        torch.cuda.synchronize()
        samples = []
        for _ in range(batch):
            began = time.perf_counter()
            call()
            samples.append(1e6 * (time.perf_counter() - began))
        medians.append(sorted(samples)[batch // 2])
    return min(medians)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_operator_costs_the_host_little(mode, layers):
    moe, args = layers[0], inputs(8, 0)
    operator, module = torch.ops.megamoe.forward.default, Experts(moe)
    with mode():
        direct = host_us(lambda: moe(*args))
        through = host_us(lambda: operator(*args, None, moe.handle))
        around = host_us(lambda: module(*args))
    print(f"direct {direct:.1f} us, operator {through:.1f} us, module {around:.1f} us")
    assert through <= direct + 10 and around <= direct + 20  # a torch.nn.Module's call costs 5
