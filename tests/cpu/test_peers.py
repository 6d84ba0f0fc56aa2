"""tools/peers without a GPU: why peers do not run, torch's expert parallelism with a stand-in for its product, and
the calls that FlashInfer and DeepGEMM get, recorded by stand-ins."""

from __future__ import annotations

import importlib
import importlib.util
import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megamoe import numerics, reference
from megamoe.config import MoEConfig
from megamoe.weights import ExpertWeights

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
modules = ("peers", "peers.measure", "peers.torch_ep", "peers.gemm", "peers.flashinfer_base", "peers.flashinfer_moe")
peers, measure, torch_ep, gemm, flashinfer_base, flashinfer_moe = (importlib.import_module(n) for n in modules)

CPU = torch.device("cpu")
SHAPE = dict(hidden=256, intermediate=128, num_experts=8, top_k=3, max_tokens=64)


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors: waiting threads would only take a busy machine's cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def stub_grouped_mm(codes, scale, w, w_scale, ends):
    """torch_ep.grouped_mm by dequantised products; rows behind the last end are NaN."""
    assert codes.dtype == w.dtype == torch.float8_e4m3fn and ends.dtype == torch.int32
    assert scale.shape == codes.shape[:1] and scale.is_contiguous() and w_scale.shape == w.shape[:2]
    assert codes.stride(-1) == 1 and codes.stride(0) % 16 == 0
    out = torch.full((codes.shape[0], w.shape[1]), float("nan"), dtype=torch.bfloat16)
    first = 0
    for expert, end in enumerate(ends.tolist()):
        product = codes[first:end].float() @ w[expert].float().T
        out[first:end] = (product * scale[first:end, None] * w_scale[expert]).to(torch.bfloat16)
        first = end
    return out


def make_pack(cfg, rank=0, world_size=1):
    """One rank's pack; all ranks' together are the pack of one rank."""
    g = torch.Generator().manual_seed(7)
    w13 = torch.randn(cfg.num_experts, 2 * cfg.intermediate, cfg.hidden, generator=g) * cfg.hidden**-0.5
    w2 = torch.randn(cfg.num_experts, cfg.hidden, cfg.intermediate, generator=g) * cfg.intermediate**-0.5
    statics = dict(x_scale=0.02, act_scale=0.02) if cfg.scale == "tensor" else {}
    return ExpertWeights.from_bf16(cfg, *ExpertWeights.shard(rank, world_size, w13, w2), **statics)


def make_inputs(cfg, tokens, seed=0, masked=0.0):
    g = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, cfg.num_experts, generator=g).topk(cfg.top_k, dim=1).indices.to(torch.int32)
    ids[torch.rand(ids.shape, generator=g) < masked] = -1
    weights = torch.rand(tokens, cfg.top_k, generator=g) + 0.1
    x = torch.randn(tokens, cfg.hidden, generator=g).to(torch.bfloat16)
    return x, ids, weights / weights.sum(1, keepdim=True)


def unquantised(cfg, pack, inputs):
    """The oracle on the bf16 weights that peers get."""
    w13, w2 = next(peers.Experts(pack).chunks(pack.experts_local))
    return reference.unquantised_layer(cfg, w13, w2, *inputs)


# ---------------------------------------------------------------- what peers get and say


@pytest.mark.parametrize("scale", ["block", "tensor"])
def test_bf16_experts_quantise_to_the_same_codes(scale):
    pack = make_pack(MoEConfig(**SHAPE, scale=scale))
    chunks = list(peers.Experts(pack).chunks(3))
    assert [w13.shape[0] for w13, _ in chunks] == [3, 3, 2]
    quantize = numerics.quantize_weight_blocks if scale == "block" else numerics.quantize_weight_tensor
    canonical = pack.canonical()
    for index, codes in enumerate((canonical.w13, canonical.w2)):
        again, _ = quantize(torch.cat([chunk[index] for chunk in chunks]), "e4m3")
        assert torch.equal(again.view(torch.uint8), codes.view(torch.uint8))


@pytest.mark.parametrize("name", [*peers.LAYER_PEERS, *peers.GEMM_PEERS])
def test_every_peer_says_that_it_needs_a_gpu(name):
    layer = name in peers.LAYER_PEERS
    (peer,) = peers.make([name], peers.LAYER_PEERS if layer else peers.GEMM_PEERS)
    cfg = MoEConfig(**SHAPE | dict(top_k=4))
    point = peers.Point(cfg, 1, 0, 8, CPU) if layer else peers.GemmPoint(cfg, "fc1", 2, 16, CPU)
    assert peer.name == name and "Hopper GPU" in peer.why_not(point)
    peer.close()


def test_unknown_name():
    with pytest.raises(ValueError, match=r"deepep.*torch, flashinfer_pull, flashinfer_push"):
        peers.make(["torch", "deepep"])


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("torch", dict(fp8="e5m2"), "E4M3 only"),
        ("torch", dict(route_weight="activation"), "FC2's rows only"),
        ("flashinfer_pull", {}, "flashinfer is not installed"),
        ("flashinfer_push", dict(scale="tensor"), "block scales"),
        ("flashinfer_push", dict(clamp=10.0), "no clamp"),
        ("flashinfer_push", {}, "1, 2, 4, 6 or 8, not 3"),
        ("scaled_mm", dict(fp8="e5m2"), "E4M3 only"),
        ("deep_gemm", dict(scale="tensor"), "block scales only"),
        ("deep_gemm", {}, "deep_gemm is not installed"),
    ],
)
def test_other_reasons(monkeypatch, name, changes, why):
    for module in (torch_ep, gemm, flashinfer_base):
        monkeypatch.setattr(module, "why_no_hopper", lambda device: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    known = peers.LAYER_PEERS if name in peers.LAYER_PEERS else peers.GEMM_PEERS
    cfg = MoEConfig(**SHAPE, **changes)
    point = peers.Point(cfg, 1, 0, 8, CPU) if known is peers.LAYER_PEERS else peers.GemmPoint(cfg, "fc1", 2, 16, CPU)
    assert why in peers.make([name], known)[0].why_not(point)


# ---------------------------------------------------------------- torch's expert parallelism


def test_sorted_routes_are_exact():
    ids = torch.tensor([[2, 0, -1], [1, 2, 9], [0, -1, 2]], dtype=torch.int32)
    order, ends = torch_ep.sort_routes(ids, 4)
    assert order.tolist() == [1, 6, 3, 0, 4, 8, 2, 5, 7]  # -1 and 9 last, ties as they were
    assert ends.tolist() == [2, 3, 6, 6] and ends.dtype == torch.int32
    assert order[torch_ep.inverse(order)].tolist() == list(range(9))


def test_received_rows_are_sorted_by_expert():
    counts = torch.tensor([[1, 0, 2], [2, 1, 0]], dtype=torch.int32)
    order, ends = torch_ep.sort_received(counts, 6)
    assert order.tolist() == [0, 3, 4, 5, 1, 2] and ends.tolist() == [3, 4, 6] and ends.dtype == torch.int32


def test_records_hold_codes_and_scales():
    x = torch.randn(5, 256).to(torch.bfloat16)
    x[2], x[3] = 0.0, x[3] * 1e4
    codes, scale = torch_ep.unpack_records(torch_ep.pack_records(x), 256)
    expected, expected_scale = numerics.quantize_groups(x, 256, "e4m3")
    assert torch.equal(scale, expected_scale.flatten()) and scale.is_contiguous()
    assert torch.equal(codes.float(), expected.float())


@pytest.mark.parametrize("scale", ["block", "tensor"])
@pytest.mark.parametrize(("masked", "clamp"), [(0.0, None), (0.4, 2.0)])
def test_torch_peer_computes_the_layer(monkeypatch, scale, masked, clamp):
    monkeypatch.setattr(torch_ep, "grouped_mm", stub_grouped_mm)
    cfg = MoEConfig(**SHAPE, scale=scale, clamp=clamp)
    pack, peer = make_pack(cfg), torch_ep.TorchEP()
    experts = peers.Experts(pack)
    for tokens in (64, 1, 33):
        inputs = make_inputs(cfg, tokens, seed=tokens, masked=masked)
        peer.prepare(peers.Point(cfg, 1, 0, tokens, CPU), experts, inputs)
        ref = unquantised(cfg, pack, inputs)
        y = peer.run()
        assert y.shape == ref.shape and y.dtype == torch.bfloat16 and reference.cosine(y, ref) > 0.997
        ours = reference.layer(cfg, [pack.canonical()], *([value] for value in inputs))[0]
        assert measure.differs(y, ours) is None
        assert measure.differs(y, ours.flip(1)) is not None
    assert peer.graphable and "scale a row" in peer.note and "host" not in peer.note
    peer.close()


@pytest.mark.parametrize("clamp", [None, 0.5])
def test_torch_peer_in_its_own_numbers(monkeypatch, clamp):
    monkeypatch.setattr(torch_ep, "grouped_mm", stub_grouped_mm)
    cfg = MoEConfig(**SHAPE, clamp=clamp)
    pack, peer, inputs = make_pack(cfg), torch_ep.TorchEP(), make_inputs(cfg, 48, masked=0.2)
    peer.prepare(peers.Point(cfg, 1, 0, 48, CPU), peers.Experts(pack), inputs)

    def rows(x):  # as FP8 with a scale a row
        codes, scale = numerics.quantize_groups(x, x.shape[-1], "e4m3")
        return numerics.dequantize_groups(codes, scale)

    w13, w2 = (rows(w) for w in next(peers.Experts(pack).chunks(8)))
    x, ids, weights = inputs
    expected = torch.zeros(48, cfg.hidden)
    for token, slot in (ids >= 0).nonzero().tolist():
        expert = ids[token, slot]
        gate, up = (rows(x[token]) @ w13[expert].T).to(torch.bfloat16).split(cfg.intermediate)
        act = numerics.swiglu(gate, up, clamp)
        expected[token] += weights[token, slot] * (rows(act) @ w2[expert].T)
    assert reference.relative_error(peer.run(), expected) < 5e-3


def torch_peer_rank(rank, world_size, port, folder):
    """One process of test_torch_peer_over_processes."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch_ep.grouped_mm = stub_grouped_mm
    results = []
    cfg = MoEConfig(**SHAPE)
    peer, experts = torch_ep.TorchEP(), peers.Experts(make_pack(cfg, rank, world_size))
    for number, case in enumerate(PROCESS_CASES):
        inputs = case_inputs(cfg, number, rank)
        peer.prepare(peers.Point(cfg, world_size, rank, max(case[0]), CPU), experts, inputs)
        results.append(peer.run())
    torch.save((results, peer.note, peer.graphable), Path(folder) / f"{rank}.pt")
    peer.close()
    dist.destroy_process_group()


PROCESS_CASES = (((40, 40), 0.0), ((0, 9), 0.3), ((7, 5), "to rank 1"))
"""T of both ranks; share of masked routes."""


def case_inputs(cfg, number, rank):
    tokens, masked = PROCESS_CASES[number]
    x, ids, weights = make_inputs(cfg, tokens[rank], 10 * number + rank, 0.0 if masked == "to rank 1" else masked)
    if masked == "to rank 1":  # rank 0's experts get nothing
        ids = ids % (cfg.num_experts // 2) + cfg.num_experts // 2
    return x, ids, weights


def test_torch_peer_over_processes(monkeypatch, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(torch_peer_rank, (2, port, str(tmp_path)), nprocs=2)
    monkeypatch.setattr(torch_ep, "grouped_mm", stub_grouped_mm)
    cfg = MoEConfig(**SHAPE)
    alone, experts = torch_ep.TorchEP(), peers.Experts(make_pack(cfg))
    for rank in range(2):
        results, note, graphable = torch.load(tmp_path / f"{rank}.pt")
        assert "waits for the host" in note and not graphable
        for number, y in enumerate(results):
            inputs = case_inputs(cfg, number, rank)
            if len(inputs[0]) == 0:
                assert y.shape == (0, cfg.hidden)
                continue
            alone.prepare(peers.Point(cfg, 1, 0, len(y), CPU), experts, inputs)
            assert reference.relative_error(y, alone.run()) < 2e-3  # the same rows, summed by another product size


# ---------------------------------------------------------------- GEMM peers


@pytest.mark.parametrize("name", ["fc1", "fc2"])
@pytest.mark.parametrize("each", [128, 5])
def test_deep_gemm_gets_the_layers_numbers(monkeypatch, name, each):
    cfg = MoEConfig(**SHAPE)
    pack, point = make_pack(cfg), peers.GemmPoint(cfg, name, 3, each, CPU)
    x = torch.randn(point.rows, point.size[1])
    codes, scales = numerics.quantize_groups(x, 128, "e4m3")
    calls = []

    def product(a, b, out, which):
        for expert in which.unique().tolist():
            rows = which == expert
            x = numerics.dequantize_groups(*a)[rows]
            out[rows] = (x @ numerics.dequantize_weight_blocks(b[0][expert], b[1][expert]).T).to(torch.bfloat16)

    def contiguous(a, b, out, which):
        calls.append("contiguous")
        product(a, b, out, which)

    def masked(a, b, out, live, expected):
        calls.append(f"masked {expected}")
        for expert, count in enumerate(live.tolist()):
            part = (a[0][expert, :count], a[1][expert, :count])
            product(part, b, out[expert, :count], torch.full((count,), expert))

    fake = SimpleNamespace(m_grouped_fp8_gemm_nt_contiguous=contiguous, m_grouped_fp8_gemm_nt_masked=masked)
    monkeypatch.setitem(sys.modules, "deep_gemm", fake)
    utils = SimpleNamespace(
        get_mk_alignment_for_contiguous_layout=lambda: 128, get_mn_major_tma_aligned_tensor=lambda sf: sf
    )
    monkeypatch.setitem(sys.modules, "deep_gemm.utils", utils)
    monkeypatch.setattr(gemm, "why_no_hopper", lambda device: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: package)
    peer = gemm.DeepGEMM()
    assert peer.why_not(point) is None
    peer.prepare(point, pack, (codes, scales))
    out = peer.run().flatten(0, -2)
    assert calls[-1] == ("contiguous" if each == 128 else "masked 5")
    canonical = pack.canonical()
    w, w_scale = (canonical.w13, canonical.w13_scale) if name == "fc1" else (canonical.w2, canonical.w2_scale)
    a, b = numerics.dequantize_groups(codes, scales), numerics.dequantize_weight_blocks(w, w_scale)
    for expert in range(3):
        rows = slice(expert * each, (expert + 1) * each)
        assert reference.relative_error(out[rows], a[rows] @ b[expert].T) < 5e-3
    peer.close()
    with pytest.raises(RuntimeError, match="not prepared"):
        peer.run()


def test_torch_gemms(monkeypatch):
    monkeypatch.setattr(torch_ep, "grouped_mm", stub_grouped_mm)
    sizes = []

    def scaled_mm(a, b, scale_a, scale_b, out_dtype, use_fast_accum):
        sizes.append((tuple(a.shape), tuple(b.shape)))
        return (a.float() @ b.float()).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    cfg = MoEConfig(**SHAPE)
    pack, point = make_pack(cfg), peers.GemmPoint(cfg, "fc1", 2, 5, CPU)
    codes = torch.randn(10, 256).to(torch.float8_e4m3fn)
    dense, grouped = peers.make(["scaled_mm", "scaled_grouped_mm"], peers.GEMM_PEERS)
    for peer in (dense, grouped):
        peer.prepare(point, pack, (codes, torch.ones(10, 2)))
    assert sizes[0] == ((16, 256), (256, 256)) and dense.run().shape == (10, 256)
    assert torch.equal(grouped.run()[:5], dense.run()[:5])  # the first expert's rows
    assert reference.relative_error(grouped.run()[5:], codes[5:].float() @ pack.w13[1].float().T) < 5e-3


# ---------------------------------------------------------------- FlashInfer


class FakeFlashInfer:
    """Stands in for flashinfer.moe_ep and records what it is asked for."""

    def __init__(self):
        self.log, self.layers = [], []
        for name in ("BootstrapConfig", "FleetParams", "MegaConfig", "MoEEpTensors", "MoEWeightPack"):
            setattr(self, name, SimpleNamespace)
        self.Sm90_Fp8_Fp8_Bf16_PullCutedsl_MegaMoeConfig = SimpleNamespace
        self.core = SimpleNamespace(sm90_pull_fp8_runtime_requirements=lambda boot: frozenset({"nvshmem"}))

    def bootstrap_moe_ep_runtime(self, boot, needs):
        self.log.append(("start", boot.world_size, *needs))
        return "runtime"

    def finalize_moe_ep_runtime(self, runtime):
        self.log.append(("finalize", runtime))

    def preprocess_sm90_pull_fp8_mega_weights(self, pack, **kwargs):
        self.log.append(("convert", pack.w13.shape[0], kwargs["kind"], kwargs["fp8_scale_mode"]))
        legs = []
        for w in (pack.w13, pack.w2):
            codes, scale = numerics.quantize_weight_tensor(w, "e4m3")
            legs.append((codes.transpose(1, 2), torch.ones(len(w), 4).to(torch.float8_e5m2), torch.ones(1), scale))
        return tuple(legs)

    def MoEEpLayer(self, **kwargs):
        layer = SimpleNamespace(**kwargs, alive=True)
        layer.forward = lambda tensors: tensors.hidden_states * 2
        layer.stage_inputs = lambda tensors: self.log.append(("stage",))
        layer.compute_staged = lambda output: self.log.append(("compute", output))
        layer.destroy = lambda: self.log.append(("destroy", kwargs["fleet_params"].max_tokens_per_rank))
        self.layers.append(layer)
        return layer


def test_flashinfer_pull_calls(monkeypatch):
    fake = FakeFlashInfer()
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(moe_ep=fake))
    monkeypatch.setitem(sys.modules, "flashinfer.moe_ep", fake)
    monkeypatch.setitem(sys.modules, "flashinfer.moe_ep.core", SimpleNamespace(runtime=fake.core))
    monkeypatch.setitem(sys.modules, "flashinfer.moe_ep.core.runtime", fake.core)
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: package)
    monkeypatch.setattr(flashinfer_base, "why_no_hopper", lambda device: None)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    cfg = MoEConfig(**SHAPE | dict(num_experts=10, scale="tensor"))
    pack, peer = make_pack(cfg), flashinfer_moe.Pull()
    experts = peers.Experts(pack)
    for tokens in (8, 16):
        point = peers.Point(cfg, 1, 0, tokens, CPU)
        assert peer.why_not(point) is None
        inputs = make_inputs(cfg, tokens)
        peer.prepare(point, experts, inputs)
        assert torch.equal(peer.run(), inputs[0] * 2)
    assert os.environ["MEGA_NO_DIST"] == "1" and os.environ["FLASHINFER_MOE_EP_KNOB_CACHE"] == "off"
    made = fake.layers[-1]
    kernel = made.backend.megakernel
    assert (kernel.kind, kernel.fp8_scale_mode, kernel.top_k) == ("fp8_e4m3", "per_tensor", 3)
    assert kernel.fc1_activation_dequant_scale == pack.x_scale and kernel.load_balance_mode == "atomic_counter"
    (w13, plane, act, scale), _ = made.backend.transformed_weights
    whole, whole_scale = numerics.quantize_weight_tensor(next(experts.chunks(10))[0], "e4m3")
    assert w13.shape == (10, 256, 256) and w13.stride(1) == 1 and plane.shape == (10, 4) and act.shape == (1,)
    assert torch.equal(w13.transpose(1, 2).view(torch.uint8), whole.view(torch.uint8))
    assert torch.equal(scale, whole_scale)
    peer.parts()["compute"]()
    peer.close()
    peer.close()
    modes = ("fp8_e4m3", "per_tensor")
    expected = [("start", 1, "nvshmem"), ("convert", 8, *modes), ("convert", 2, *modes), ("destroy", 8)]
    assert fake.log == [*expected, ("stage",), ("compute", None), ("destroy", 16), ("finalize", "runtime")]
    assert not dist.is_initialized()


def test_one_ranks_group_lives_as_long_as_its_users():
    group, first, second = flashinfer_base._Group, flashinfer_moe.Pull(), flashinfer_moe.Push()
    for peer in (first, second):
        group.join(peer, CPU)
    first.close()
    first.close()
    assert dist.is_initialized()
    second.close()
    assert not dist.is_initialized()


# ---------------------------------------------------------------- measuring


class OtherRankFails:
    """A world of two whose rank 1 gives another reason."""

    def __init__(self, other):
        self.other = other

    def gather(self, values, what):
        return [values[0], self.other(what)]


class FakePeer(peers.Peer):
    name = "fake"

    def __init__(self, error=None):
        self.error, self.log = error, []

    def why_not(self, point):
        return None

    def prepare(self, point, weights, inputs):
        self.log.append("prepare")
        if self.error:
            raise self.error

    def run(self):
        return torch.zeros(1)

    def close(self):
        self.log.append("close")


def test_ready_on_all_ranks_or_none():
    peer = FakePeer()
    assert measure.ready(OtherRankFails(lambda what: None), peer, None, None, ()) is None and peer.log == ["prepare"]
    peer = FakePeer()
    assert measure.ready(OtherRankFails(lambda what: "no nvcc"), peer, None, None, ()) == "rank 1: no nvcc"
    assert peer.log == []
    peer = FakePeer(MemoryError("no room\nfor it"))
    assert measure.ready(OtherRankFails(lambda what: None), peer, None, None, ()) == "rank 0: MemoryError: no room"
    assert peer.log == ["prepare", "close"]
    peer = FakePeer()
    world = OtherRankFails(lambda what: "OSError: x" if "prepared" in what else None)
    assert measure.ready(world, peer, None, None, ()) == "rank 1: OSError: x" and peer.log == ["prepare", "close"]


def test_launches_take_turns():
    order = []
    clock = SimpleNamespace(op=lambda launch, runs, warmup: [float(launch())] * runs)
    launches = {name: (lambda name=name: order.append(name) or len(order)) for name in "abc"}
    samples = measure.interleave(clock, launches, runs=3, warmup=1)
    assert order == list("abc") + list("bca") + list("cab") + list("abc")
    assert samples == {"a": [6.0, 8.0, 10.0], "b": [4.0, 9.0, 11.0], "c": [5.0, 7.0, 12.0]}
    assert measure.ratios(50.0, {"torch": 100.0, "none": 0.0}) == {"over_torch": 0.5}
