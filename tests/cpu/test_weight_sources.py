"""What packs and calibrate make of their sources: parameters leave no trace, bad values and tensors are named."""

import gc
import math
import weakref
from functools import partial

import numpy
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from megamoe import numerics, weights
from megamoe.config import MoEConfig
from megamoe.errors import ConfigError, InputError
from megamoe.weights import ExpertWeights, calibrate

STATIC = dict(x_scale=0.5, act_scale=0.25)
LAYOUTS = ("interleave_w13", "deinterleave_w13", "permute_w2", "unpermute_w2")
TENSORS = ("w13", "w13_scale", "w2", "w2_scale")


def config(**fields):
    return MoEConfig(**{**dict(hidden=256, intermediate=384, num_experts=4, top_k=2, max_tokens=16), **fields})


def bf16_weights(cfg, experts=4):
    g = torch.Generator().manual_seed(0)
    w13 = torch.randn(experts, 2 * cfg.intermediate, cfg.hidden, generator=g) * 0.06
    return w13.bfloat16(), (torch.randn(experts, cfg.hidden, cfg.intermediate, generator=g) * 0.05).bfloat16()


def sources(loader, fp8="e4m3"):
    """(cfg, tensors, keywords) of one of the three loaders."""
    scale = "tensor" if loader in ("from_fp8_tensor", "from_bf16_tensor") else "block"
    cfg = config(scale=scale, fp8=fp8)
    pair = bf16_weights(cfg)
    if loader.startswith("from_fp8"):
        quantize = numerics.quantize_weight_tensor if scale == "tensor" else numerics.quantize_weight_blocks
        pair = (*quantize(pair[0], fp8), *quantize(pair[1], fp8))
    return cfg, list(pair), STATIC if scale == "tensor" else {}


def load(loader, cfg, tensors, keywords):
    return getattr(ExpertWeights, loader.removesuffix("_tensor") if "bf16" in loader else loader)(
        cfg, *tensors, **keywords
    )


LOADERS = ["from_bf16", "from_bf16_tensor", "from_fp8_blocks", "from_fp8_tensor"]


def fields(pack):
    return [getattr(pack, name) for name in TENSORS]


def same(a, b):
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def refused(name, call, text="", error=InputError):
    with pytest.raises(error) as caught:
        call()
    assert caught.value.name == name and text in str(caught.value), caught.value


# ---- no graph, no inputs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["gate_up", "up_gate"])
@pytest.mark.parametrize("loader", LOADERS)
def test_a_pack_of_parameters_holds_itself_only(loader, order):
    cfg, tensors, keywords = sources(loader)
    keywords = {**keywords, "order": order}
    plain = load(loader, cfg, tensors, keywords)
    parameters = [Parameter(t) for t in tensors]
    alive = [weakref.ref(p) for p in parameters]
    pack = load(loader, cfg, parameters, keywords)
    assert all(same(a, b) for a, b in zip(fields(pack), fields(plain)))
    assert not any(t.requires_grad or t.grad_fn for t in fields(pack))
    own = {p.untyped_storage().data_ptr() for p in parameters}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in fields(pack)}
    assert sum(storages.values()) == pack.nbytes and not own & set(storages)
    del parameters, tensors
    gc.collect()
    assert not any(ref() is not None for ref in alive)
    canonical = pack.canonical()
    assert not any(t.requires_grad or t.grad_fn for t in canonical[:4])


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_parameters_are_plain_copies(name):
    w = torch.randn(2, 256, 128)
    parameter = Parameter(w.clone())
    alive = weakref.ref(parameter)
    out = getattr(weights, name)(parameter)
    assert not out.requires_grad and out.grad_fn is None and torch.equal(out, getattr(weights, name)(w))
    del parameter
    gc.collect()
    assert alive() is None


def test_a_pack_by_hand_of_parameters_shares_memory_without_their_graph():
    cfg, tensors, keywords = sources("from_fp8_tensor")
    made = load("from_fp8_tensor", cfg, tensors, keywords)
    given = [Parameter(t) for t in fields(made)]
    given[1] = given[1] * 1.0  # has a grad_fn
    pack = ExpertWeights(cfg, *given, 1, torch.tensor(0.1, dtype=torch.float64, requires_grad=True))
    assert not any(t.requires_grad or t.grad_fn for t in fields(pack))
    assert [t.data_ptr() for t in fields(pack)] == [t.data_ptr() for t in given]
    assert (pack.x_scale, pack.act_scale) == (1.0, torch.tensor(0.1).item()) and "act_scale 0.1" in repr(pack)


def test_calibrate_takes_parameters():
    cfg = config(scale="tensor", route_weight="activation")
    (w13, _), (x, ids, w) = bf16_weights(cfg), sample(cfg)
    want = calibrate(cfg, w13, x, ids, w)
    assert calibrate(cfg, Parameter(w13), Parameter(x), ids, Parameter(w)) == want
    assert calibrate(cfg, torch.nn.ParameterList([Parameter(e) for e in w13]), x, ids, w) == want


def sample(cfg, tokens=32):
    g = torch.Generator().manual_seed(5)
    x = torch.randn(tokens, cfg.hidden, generator=g).bfloat16()
    scores, ids = torch.rand(tokens, cfg.num_experts, generator=g).topk(cfg.top_k, dim=1)
    return x, ids, scores


# ---- values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("loader", ["from_bf16", "from_bf16_tensor"])
def test_weights_that_are_not_finite_are_named_by_their_expert(loader, dtype, bad):
    cfg, tensors, keywords = sources(loader)
    for place, name in enumerate(("w13", "w2")):
        spoiled = [t.to(dtype, copy=True) for t in tensors]
        spoiled[place][3, 17, 100] = bad
        what = "NaN values" if math.isnan(bad) else "infinite values"
        refused(f"{name}[3]", lambda s=spoiled: load(loader, cfg, s, keywords), f"'{what}': must be finite values")


@pytest.mark.parametrize("fp8,codes", [("e4m3", [0x7F, 0xFF]), ("e5m2", [0x7C, 0xFC, 0x7D, 0xFF])])
@pytest.mark.parametrize("loader", ["from_fp8_blocks", "from_fp8_tensor"])
def test_codes_that_are_not_finite_are_named_by_their_expert(loader, fp8, codes):
    for code in codes:
        cfg, tensors, keywords = sources(loader, fp8)
        tensors[2].view(torch.uint8)[1, 5, 5] = code
        refused("w2[1]", partial(load, loader, cfg, tensors, keywords), "must be finite")
    cfg, tensors, keywords = sources(loader, fp8)
    tensors[2].view(torch.uint8)[1, 5, 5:7] = torch.tensor([codes[0] - 1, codes[1] - 1], dtype=torch.uint8)
    load(loader, cfg, tensors, keywords)  # the largest finite ones


class Waits(TorchDispatchMode):
    """Counts what would wait for a device: reads of a scalar, and copies to the host of more."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function._schema.name in ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero")
        return function(*args, **(kwargs or {}))


def test_one_wait_for_all_experts(monkeypatch):
    lists, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: lists.append(t.shape) or tolist(t))
    for experts in (1, 2, 4):
        cfg = config()
        tensors = bf16_weights(cfg, experts)
        lists.clear()
        with Waits() as waits:
            ExpertWeights.from_bf16(cfg, *tensors)
        assert waits.count == 0 and lists == [(2, experts)]


def test_calibrate_names_an_expert_that_is_not_finite():
    cfg = config(scale="tensor")
    w13, (x, ids, w) = bf16_weights(cfg)[0], sample(cfg)
    for bad, text in ((math.inf, "infinite"), (math.nan, "NaN")):
        spoiled = w13.clone()
        spoiled[2, 3, 4] = bad
        refused("w13[2]", lambda s=spoiled: calibrate(cfg, s, x, ids, w), text)
    calibrate(cfg, spoiled, x, torch.where(ids == 2, -1, ids), w)  # without routes an expert is not read
    refused("x", lambda: calibrate(cfg, w13, torch.full_like(x, 1e36), ids, w), "1e30")


@pytest.mark.parametrize("name", ["x_scale", "act_scale"])
def test_static_scales_at_both_ends(name):
    cfg, tensors, _ = sources("from_bf16_tensor")

    def make(value):
        return getattr(ExpertWeights.from_bf16(cfg, *tensors, **{**STATIC, name: value}), name)

    low, high = torch.tensor([1e-30, 1e30]).tolist()  # the nearest fp32 numbers
    kinds = [float, numpy.float32, numpy.float64, torch.tensor, lambda v: torch.tensor([v], dtype=torch.float64)]
    for kind in [*kinds, lambda v: torch.tensor(v, requires_grad=True)]:
        assert make(kind(1e-30)) == low and make(kind(1e30)) == high
        below, above = torch.tensor([low, high]).nextafter(torch.tensor([0.0, math.inf])).tolist()
        for bad in (below, above, math.nan, math.inf, -1.0, 0.0):
            refused(name, partial(make, kind(bad)), "1e-30 to 1e30")
    assert make(10**30) == high and make(numpy.int64(3)) == 3.0 and make(torch.tensor(7)) == 7.0
    bools = (True, numpy.bool_(True), torch.tensor(True))
    for bad in (10**400, 10**31, *bools, b"1", torch.ones(2), torch.ones((), device="meta"), None):
        refused(name, lambda v=bad: make(v), "1e-30 to 1e30")
    pack = ExpertWeights.from_bf16(cfg, *tensors, **STATIC)
    by_hand = ExpertWeights(cfg, *fields(pack), **{**STATIC, name: 1e30})
    assert getattr(by_hand, name) == high


# ---- tensors without memory, wrappers -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def mesh():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def freed(t):
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


def cut(t):
    """A strided view whose storage was cut short behind it."""
    t = t.view(torch.uint8).mT.contiguous().mT.view(t.dtype) if t.element_size() == 1 and t.ndim > 1 else t.clone()
    t.untyped_storage().resize_(t.untyped_storage().nbytes() - 1)
    return t


def fake(t):
    with FakeTensorMode() as mode:
        return mode.from_tensor(t)


SPOILED = {
    "meta": (lambda t: t.to("meta"), "device", "a device with memory"),
    "fake": (fake, "", "a tensor with data"),
    "freed": (freed, "", "in memory"),
    "cut": (cut, "", "in memory"),
    "sparse": (lambda t: t.float().to_sparse().to(t.dtype), "layout", "torch.strided"),
}


def check_spoiled(kind, name, make):
    """make(spoil) must refuse the tensor `name`, which spoil changed."""
    spoil, attribute, text = SPOILED[kind]
    refused(f"{name}.{attribute}" if attribute else name, lambda: make(spoil), text)


@pytest.mark.parametrize("kind", SPOILED)
@pytest.mark.parametrize("loader", LOADERS)
def test_loaders_refuse_what_is_not_in_memory(loader, kind):
    cfg, tensors, keywords = sources(loader)
    suffix = "_inv" if loader == "from_fp8_blocks" else ""
    names = ["w13", "w2"] if "bf16" in loader else ["w13", f"w13_scale{suffix}", "w2", f"w2_scale{suffix}"]
    for index, name in enumerate(names):

        def make(spoil, index=index):
            given = [spoil(t) if i == index else t for i, t in enumerate(tensors)]
            return load(loader, cfg, given, keywords)

        if kind != "sparse" or "bf16" in loader:
            check_spoiled(kind, name, make)


@pytest.mark.parametrize("kind", SPOILED)
def test_layouts_and_calibrate_refuse_what_is_not_in_memory(kind):
    for name in LAYOUTS:
        check_spoiled(kind, name[-3:].lstrip("_"), lambda s, n=name: getattr(weights, n)(s(torch.ones(256, 128))))
    cfg = config(scale="tensor")
    arguments = dict(zip(("w13", "x", "topk_ids", "topk_weights"), (bf16_weights(cfg)[0], *sample(cfg))))
    for name, value in arguments.items():
        if kind != "sparse" or name != "topk_ids":
            check_spoiled(kind, name, lambda s, n=name, v=value: calibrate(cfg, **{**arguments, n: s(v)}))
    check_spoiled(kind, "w13", lambda s: calibrate(cfg, **{**arguments, "w13": [s(w) for w in arguments["w13"]]}))


@pytest.mark.parametrize("kind", ["meta", "fake", "freed"])
@pytest.mark.parametrize("name", TENSORS)
def test_a_pack_by_hand_refuses_what_is_not_in_memory(name, kind):
    cfg, tensors, keywords = sources("from_fp8_tensor")
    given = dict(zip(TENSORS, fields(load("from_fp8_tensor", cfg, tensors, keywords))))
    spoil, attribute, text = SPOILED[kind]
    text = text if name == "w13" or kind != "meta" else "must be cpu"
    wanted = f"{name}.{attribute}" if attribute else name
    refused(wanted, lambda: ExpertWeights(cfg, **{**given, name: spoil(given[name])}, **STATIC), text)


def test_a_pack_by_hand_on_meta_is_refused():
    cfg, tensors, keywords = sources("from_fp8_tensor")
    given = [t.to("meta") for t in fields(load("from_fp8_tensor", cfg, tensors, keywords))]
    refused("w13.device", lambda: ExpertWeights(cfg, *given, **STATIC), "a device with memory")


def test_dtensors_are_refused_with_the_way_out(mesh):
    def spread(t):
        return DTensor.from_local(t, mesh, [Replicate()], run_check=False)

    for loader in LOADERS:
        cfg, tensors, keywords = sources(loader)
        for given in (spread(tensors[0]), Parameter(spread(tensors[0]))):
            refused("w13", partial(load, loader, cfg, [given, *tensors[1:]], keywords), "pass w13.to_local()")
    pack = fields(load(loader, cfg, tensors, keywords))
    refused("w2", lambda: ExpertWeights(cfg, *pack[:2], spread(pack[2]), pack[3], **STATIC), "pass w2.to_local()")
    refused("w13", lambda: ExpertWeights(cfg, spread(pack[0]), *pack[1:], **STATIC), "pass w13.to_local()")
    for name in LAYOUTS:
        w = spread(torch.ones(256, 128))
        refused(name[-3:].lstrip("_"), lambda n=name, w=w: getattr(weights, n)(w), ".to_local()")
    refused("tensors", lambda: ExpertWeights.shard(0, 2, spread(tensors[0])), ".to_local()")
    w13, (x, ids, w) = bf16_weights(cfg)[0], sample(cfg)
    refused("w13", lambda: calibrate(cfg, spread(w13), x, ids, w), "pass w13.to_local()")
    refused("x", lambda: calibrate(cfg, w13, spread(x), ids, w), "pass x.to_local()")
    refused("topk_ids", lambda: calibrate(cfg, w13, x, spread(ids), w), "pass topk_ids.to_local()")


def test_strided_sources_are_fine():
    for loader in LOADERS:
        cfg, tensors, keywords = sources(loader)
        strided = [
            t.view(torch.uint8).mT.contiguous().mT.view(t.dtype) if t.element_size() == 1 else t for t in tensors
        ]
        strided = [t.mT.contiguous().mT if t.element_size() > 1 and t.ndim == 3 else t for t in strided]
        assert not strided[0].is_contiguous()
        plain, got = (load(loader, cfg, given, keywords) for given in (tensors, strided))
        assert all(same(a, b) for a, b in zip(fields(got), fields(plain)))


def test_targets():
    cfg, tensors, _ = sources("from_bf16")
    for bad in ("meta", torch.device("meta"), "meta:0"):
        refused("device", lambda d=bad: ExpertWeights.from_bf16(cfg, *tensors, device=d), "a device with memory")
    for bad in ("gpu", 1.5, "cuda:x"):
        refused("device", lambda d=bad: ExpertWeights.from_bf16(cfg, *tensors, device=d), "a torch device")


def test_calibrate_names_its_arguments():
    cfg = config(scale="tensor")
    w13, (x, ids, w) = bf16_weights(cfg)[0], sample(cfg)
    refused("topk_ids.dtype", lambda: calibrate(cfg, w13, x, ids.float(), w), "torch.int32 or torch.int64")
    refused("topk_ids", lambda: calibrate(cfg, w13, x, ids.tolist(), w), "a torch.Tensor")
    refused("topk_weights.dtype", lambda: calibrate(cfg, w13, x, ids, w.long()))
    refused("w13", lambda: calibrate(cfg, [None] * 4, x, ids, w), "a torch.Tensor")
    refused("scale", lambda: calibrate(config(), w13, x, ids, w), error=ConfigError)
