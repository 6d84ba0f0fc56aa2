"""torch.ops.megamoe and megamoe.nn.Experts on the reference backend: tracers, gradients, handles. No GPU."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck

from megamoe import ConfigError, InputError, MegaMoE, MegaMoEError, MoEConfig, VirtualWorld, reference
from megamoe.comm import SingleWorld
from megamoe.nn import Experts
from megamoe.weights import ExpertWeights
from tests.problems import make_inputs, make_weights

CFG = MoEConfig(hidden=128, intermediate=128, num_experts=8, top_k=2, max_tokens=64)
TENSOR = MoEConfig(hidden=128, intermediate=128, num_experts=8, top_k=2, max_tokens=64, scale="tensor")
COUNTS = (0, 1, 5, 33, 60)
forward, forward_out = torch.ops.megamoe.forward.default, torch.ops.megamoe.forward_out.default


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Recompilation limits are per process."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def world():
    with SingleWorld("cpu") as world:
        yield world


@pytest.fixture(scope="module")
def layers(world) -> list[MegaMoE]:
    """Twelve layers with different weights."""
    return [MegaMoE(CFG, make_weights(CFG, 1, seed, "cpu")[0], world) for seed in range(12)]


def tokens(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, topk_ids and topk_weights of one rank."""
    p = make_inputs(CFG, [count], "random", seed, "cpu")
    return p.xs[0], p.ids[0], p.weights[0]


class Block(torch.nn.Module):
    """What surrounds the experts in a model: a norm before, a residual around."""

    def __init__(self, moe: MegaMoE) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(CFG.hidden, dtype=torch.bfloat16).requires_grad_(False)
        self.experts = Experts(moe)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return x + self.experts(self.norm(x), ids, weights)


def test_every_way_to_call_gives_the_oracles_bits(layers) -> None:
    moe, args = layers[0], tokens(33)
    x, ids, weights = args
    want = reference.layer(CFG, [moe.experts[0].canonical()], [x], [ids], [weights])[0]
    out = torch.full_like(x, float("nan"))
    assert torch.equal(moe(*args), want)
    assert torch.equal(forward(*args, None, moe.handle), want)
    assert forward_out(*args, None, moe.handle, out=out) is None and torch.equal(out, want)
    assert torch.equal(Experts(moe)(*args), want)
    out.fill_(float("nan"))
    assert Experts(moe)(*args, out=out) is out and torch.equal(out, want)
    codes, scales = reference.stage(CFG, x)
    assert torch.equal(forward(codes, ids, weights, scales, moe.handle), want)
    assert torch.equal(Experts(moe)(codes, ids, weights, scales), want)


@pytest.mark.parametrize("count", [0, 1, 33])
@pytest.mark.parametrize("kind", ["bf16", "codes", "tensor"])
def test_opcheck(count, kind, layers, world) -> None:
    (x, ids, weights), scales, moe = tokens(count), None, layers[0]
    if kind == "codes":
        x, scales = reference.stage(CFG, x)
    if kind == "tensor":
        moe = MegaMoE(TENSOR, make_weights(TENSOR, 1, 0, "cpu")[0], world)
        x, _ = reference.stage(TENSOR, x, 0.02)
    args = (x, ids, weights, scales, moe.handle)
    out = torch.empty(count, CFG.hidden, dtype=torch.bfloat16)
    utils = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if kind == "bf16":
        utils.append("test_schema")  # it compares FP8 by a product that torch does not have
    for op, kwargs in ((forward, {}), (forward_out, dict(out=out))):
        found = opcheck(op, args, kwargs, test_utils=utils)
        assert set(found.values()) == {"SUCCESS"}, found


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_twelve_blocks_share_graphs_for_every_token_count(backend, mode, layers) -> None:
    counter = CompileCounterWithBackend(backend)
    blocks = [Block(moe) for moe in layers]
    compiled = [torch.compile(block, backend=counter, fullgraph=True, dynamic=True) for block in blocks]
    with mode():
        for count in COUNTS:
            x, ids, weights = tokens(count, count)
            got, want = x, x
            for block, fast in zip(blocks, compiled):
                got, want = fast(got, ids, weights), block(want, ids, weights)
            assert torch.equal(got, want), count
    assert counter.frame_count <= 3, "one graph each for T = 0, 1 and the others"


def test_a_compiled_function_may_call_the_layer_itself(layers) -> None:
    moe, other = layers[:2]

    def step(x, ids, weights, out):
        moe(x * 2, ids, weights, out=out)
        return other(out, ids, weights) + 1

    x, ids, weights = tokens(9)
    want = step(x, ids, weights, torch.empty_like(x))
    for backend in ("eager", "aot_eager", "inductor"):
        out = torch.empty_like(x)
        got = torch.compile(step, backend=backend, fullgraph=True)(x, ids, weights, out)
        assert torch.equal(got, want) and torch.equal(out, moe(x * 2, ids, weights))
    codes, scales = reference.stage(CFG, x)
    fast = torch.compile(lambda codes, scales: moe((codes, scales), ids, weights), backend="eager", fullgraph=True)
    assert torch.equal(fast(codes, scales), moe(x, ids, weights))


def test_virtual_ranks_break_the_graph_and_work() -> None:
    with VirtualWorld(2, devices=["cpu"]) as world, MegaMoE(CFG, make_weights(CFG, 2, 0, "cpu"), world) as moe:
        p = make_inputs(CFG, [5, 9], "random", 0, "cpu")

        def step(xs, ids, weights):
            return [y * 2 for y in moe([x + 1 for x in xs], ids, weights)]

        got = torch.compile(step, backend="eager")(p.xs, p.ids, p.weights)
        assert all(torch.equal(a, b) for a, b in zip(got, step(p.xs, p.ids, p.weights)))
        with pytest.raises(ConfigError, match=r"moe\.world"):
            Experts(moe)
        for trace in (make_fx, lambda f: lambda a: torch.jit.trace(f, a, check_trace=False)):
            with pytest.raises(MegaMoEError, match="cannot be traced"):
                trace(lambda a: moe([a, p.xs[1]], p.ids, p.weights)[0] * 1)(p.xs[0])


def test_export_with_any_token_count(layers) -> None:
    block = Block(layers[3])
    dims = ({0: torch.export.Dim("T", max=CFG.max_tokens)},) * 3
    program = torch.export.export(block, tokens(7), dynamic_shapes=dims).module()
    for count in COUNTS[1:]:
        args = tokens(count, count)
        assert torch.equal(program(*args), block(*args))


# ---- gradients -----------------------------------------------------------------------------------

CALLS = {
    "layer": lambda moe, x, ids, w, out: moe(x, ids, w),
    "layer-out": lambda moe, x, ids, w, out: moe(x, ids, w, out=out),
    "operator": lambda moe, x, ids, w, out: forward(x, ids, w, None, moe.handle),
    "module": lambda moe, x, ids, w, out: Experts(moe)(x, ids, w),
    "module-out": lambda moe, x, ids, w, out: Experts(moe)(x, ids, w, out=out),
}


@pytest.mark.parametrize("which", ["x", "weights", "both"])
@pytest.mark.parametrize("call", CALLS)
def test_a_backward_pass_says_inference_only(call, which, layers) -> None:
    x, ids, weights = tokens(5)
    want = layers[0](x, ids, weights)
    x.requires_grad_(which != "weights"), weights.requires_grad_(which != "x")
    y = CALLS[call](layers[0], x, ids, weights, torch.empty_like(x))
    assert torch.equal(y, want) and y.requires_grad
    with pytest.raises(MegaMoEError, match="inference only"):
        y.float().sum().backward()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert not CALLS[call](layers[0], x, ids, weights, torch.empty_like(x)).requires_grad


def test_virtual_ranks_say_so_too() -> None:
    with VirtualWorld(2, devices=["cpu"]) as world, MegaMoE(CFG, make_weights(CFG, 2, 0, "cpu"), world) as moe:
        p = make_inputs(CFG, [5, 9], "random", 0, "cpu")
        assert not any(y.requires_grad for y in moe(p.xs, p.ids, p.weights))
        p.xs[1].requires_grad_()
        ys = moe(p.xs, p.ids, p.weights)
        assert [y.requires_grad for y in ys] == [False, True]
        with pytest.raises(MegaMoEError, match="inference only"):
            ys[1].float().sum().backward()


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_code_may_have_a_backward_that_nobody_runs(backend, layers) -> None:
    moe = layers[0]
    x, ids, weights = tokens(5)
    x.requires_grad_()
    fast = torch.compile(lambda x: forward(x * 2, ids, weights, None, moe.handle) * 3, backend=backend, fullgraph=True)
    y = fast(x)
    assert torch.equal(y, moe(x.detach() * 2, ids, weights) * 3)
    with pytest.raises(MegaMoEError, match="inference only"):
        y.float().sum().backward()


def test_forward_mode_says_so_too(layers) -> None:
    x, ids, weights = tokens(5)
    for call in (CALLS["layer"], CALLS["operator"]):
        with fwAD.dual_level(), pytest.raises(MegaMoEError, match="inference only"):
            call(layers[0], fwAD.make_dual(x, torch.ones_like(x)), ids, weights, None)
        with fwAD.dual_level():
            assert torch.equal(call(layers[0], x, ids, weights, None), layers[0](x, ids, weights))


@pytest.mark.parametrize("call", [name for name in CALLS if name.endswith("out")])
def test_an_output_in_an_autograd_graph_is_refused(call, layers) -> None:
    x, ids, weights = tokens(5)
    leaf = torch.empty_like(x, requires_grad=True)
    for out in (leaf, leaf * 2):
        with pytest.raises(InputError, match="out = 'a tensor that requires grad'"):
            CALLS[call](layers[0], x, ids, weights, out)
        with torch.no_grad():
            assert torch.equal(CALLS[call](layers[0], x, ids, weights, out), layers[0](x, ids, weights))


@pytest.mark.parametrize("kind", ["inference", "view"])
def test_an_output_that_cannot_be_tied_is_refused_unwritten(kind, layers) -> None:
    x, ids, weights = tokens(5)
    with torch.inference_mode(kind == "inference"):
        out = torch.zeros_like(x) if kind == "inference" else torch.zeros(10, CFG.hidden, dtype=x.dtype)[5:]
    with pytest.raises(InputError, match=r"out = 'a (view|tensor of inference mode)'"):
        layers[0](x, ids, weights.clone().requires_grad_(), out=out)
    assert not out.any()
    assert torch.equal(layers[0](x, ids, weights, out=out), layers[0](x, ids, weights))


def test_an_output_with_a_tangent_is_refused(layers) -> None:
    x, ids, weights = tokens(5)
    with fwAD.dual_level(), pytest.raises(InputError, match="out = 'a dual tensor'"):
        layers[0](x, ids, weights, out=fwAD.make_dual(torch.zeros_like(x), torch.ones_like(x)))


@pytest.mark.parametrize("call", [name for name in CALLS if name.endswith("out")])
def test_autograd_learns_that_an_output_was_overwritten(call, layers) -> None:
    x, ids, weights = tokens(5)
    out, scale = torch.ones_like(x), torch.ones_like(x, requires_grad=True)
    product = (out * scale).sum()  # saved out
    with torch.no_grad():
        CALLS[call](layers[0], x, ids, weights, out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


# ---- other tracers -------------------------------------------------------------------------------

TRACED = {
    "layer": lambda moe, a, ids, w: moe(a, ids, w),
    "operator": lambda moe, a, ids, w: forward(a, ids, w, None, moe.handle),
}


@pytest.mark.parametrize("call", TRACED.values(), ids=TRACED)
def test_tracers_see_an_operator(call, layers) -> None:
    moe, (x, ids, weights) = layers[0], tokens(5)
    graph = make_fx(lambda a: call(moe, a, ids, weights) + 1)(x)
    assert "megamoe.forward" in graph.code
    other = torch.randn_like(x)
    assert torch.equal(graph(other), moe(other, ids, weights) + 1)
    early = make_fx(lambda a: call(moe, a, ids, weights) + 1, pre_dispatch=True)(x)
    assert "megamoe.forward" in early.code and torch.equal(early(other), moe(other, ids, weights) + 1)
    traced = torch.jit.trace(lambda a: call(moe, a, ids, weights) + 1, x, check_trace=False)
    assert torch.equal(traced(other), moe(other, ids, weights) + 1)
    with FakeTensorMode(allow_non_fake_inputs=True):
        y = call(moe, x, ids, weights)
    assert type(y).__name__ == "FakeTensor" and y.shape == x.shape and y.dtype == torch.bfloat16


@pytest.mark.parametrize("call", TRACED.values(), ids=TRACED)
def test_torch_func(call, layers) -> None:
    moe, (x, ids, weights) = layers[0], tokens(5)
    y = moe(x, ids, weights)
    pure = torch.func.functionalize(lambda a: call(moe, a, ids, weights) * 2)
    assert torch.equal(pure(x), y * 2)
    gradient = torch.func.grad(lambda a: (a * call(moe, x, ids, weights)).sum().float())
    assert torch.equal(gradient(torch.ones_like(x)), y)
    with pytest.raises(MegaMoEError, match="inference only"):
        torch.func.grad(lambda a: call(moe, a, ids, weights).sum().float())(x)
    with pytest.raises(MegaMoEError, match="inference only"):
        torch.func.jvp(lambda a: call(moe, a, ids, weights), (x,), (torch.ones_like(x),))


# ---- handles -------------------------------------------------------------------------------------


def test_handles_name_open_layers_only(world) -> None:
    args = tokens(3)
    moe = MegaMoE(CFG, make_weights(CFG, 1, 0, "cpu")[0], world)
    handle = moe.handle
    assert handle.device.type == "cpu" and handle.dtype == torch.int64 and handle.ndim == 0
    assert torch.equal(forward(*args, None, handle), forward(*args, None, handle.clone()))
    for wrong in (handle.int(), handle[None].clone(), None):
        with pytest.raises(InputError, match=r"layer = .*handle"):
            forward(*args, None, wrong)
    with pytest.raises(MegaMoEError, match="layer 12345 is closed, or of another process"):
        forward(*args, None, torch.tensor(12345))
    with pytest.raises(InputError, match=r"topk_ids\.dtype"):
        forward(args[0], args[1].float(), args[2], None, handle)
    moe.close()
    with pytest.raises(MegaMoEError, match=f"layer {int(handle)} is closed"):
        forward(*args, None, handle)
    forgotten = MegaMoE(CFG, make_weights(CFG, 1, 0, "cpu")[0], world)
    number = forgotten.handle.clone()
    del forgotten
    with pytest.raises(MegaMoEError, match="is closed, or of another process"):
        forward(*args, None, number)


def test_a_saved_program_does_not_find_another_processs_layer(layers, tmp_path) -> None:
    import subprocess
    import sys

    torch.export.save(torch.export.export(Block(layers[1]), tokens(7)), tmp_path / "block.pt2")
    again = torch.export.load(tmp_path / "block.pt2").module()
    assert torch.equal(again(*tokens(7)), Block(layers[1])(*tokens(7)))
    code = (
        "import sys, torch\n"
        "from tests.cpu.test_ops import *\n"
        "with SingleWorld('cpu') as world:\n"
        "    moe = [MegaMoE(CFG, make_weights(CFG, 1, seed, 'cpu')[0], world) for seed in range(3)]\n"
        "    try:\n"
        "        torch.export.load(sys.argv[1]).module()(*tokens(7))\n"
        "    except MegaMoEError as error:\n"
        "        print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "block.pt2"], capture_output=True, text=True)
    assert "is closed, or of another process" in done.stdout, done.stderr


def test_the_module_keeps_weights_to_itself(layers) -> None:
    block = Block(layers[2])
    assert list(block.state_dict()) == ["norm.weight"]
    assert not list(block.experts.parameters()) and not list(block.experts.buffers())
    assert "MegaMoE layer 3: H 128" in repr(block)
    twin = copy.deepcopy(block)
    assert twin.experts.moe is layers[2] is copy.copy(layers[2])
    assert torch.equal(twin(*tokens(3)), block(*tokens(3)))
    with pytest.raises(MegaMoEError, match="pickle"):
        pickle.dumps(block)
    with pytest.raises(ConfigError, match="moe = 'ExpertWeights'"):
        Experts(layers[2].experts[0])
    assert isinstance(layers[2].experts[0], ExpertWeights)


def test_importing_the_package_defines_the_operators() -> None:
    import subprocess
    import sys

    code = "import torch, megamoe; megamoe.nn.Experts; print(torch.ops.megamoe.forward.default._schema)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "Tensor? x_scale, Tensor layer" in done.stdout, done.stderr
