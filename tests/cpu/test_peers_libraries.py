"""tools/peers without a GPU: torch's two FP8 products by stand-ins, and the calls that DeepGEMM and FlashInfer get."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megamoe import numerics, reference
from megamoe.config import MoEConfig
from tests.cpu.peer_problems import CPU, SHAPE, make_inputs, make_pack, peers, stub_grouped_mm

modules = ("peers.measure", "peers.torch_ep", "peers.gemm", "peers.flashinfer_base", "peers.flashinfer_moe")
measure, torch_ep, gemm, flashinfer_base, flashinfer_moe = map(importlib.import_module, modules)


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
    result, expected = peer.check(point, pack, codes, scales, rows=7)
    assert result.shape == (7, point.size[0]) and reference.relative_error(result, expected) < 5e-3
    assert measure.differs(result, expected) is None
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
    for peer in (dense, grouped):
        for scales in (torch.ones(10, 2), None):
            result, expected = peer.check(point, pack, codes, scales)
            assert result.shape == (10, 256) and measure.differs(result, expected) is None
    assert measure.differs(dense.run(), grouped.run()) is not None


@pytest.mark.parametrize("name", ["fc1", "fc2"])
def test_uneven_rows(monkeypatch, name):
    monkeypatch.setattr(torch_ep, "grouped_mm", stub_grouped_mm)
    monkeypatch.setattr(torch, "_scaled_mm", lambda a, b, **how: (a.float() @ b.float()).to(how["out_dtype"]))
    monkeypatch.setattr(gemm, "why_no_hopper", lambda device: None)
    cfg = MoEConfig(**SHAPE)
    pack, point = make_pack(cfg), peers.GemmPoint(cfg, name, 4, 5, CPU, (3, 0, 16, 1))
    assert point.rows == 20 and gemm.row_ends(point).tolist() == [3, 3, 19, 20]
    codes = torch.randn(20, point.size[1]).to(torch.float8_e4m3fn)
    dense, grouped, deep = peers.make(["scaled_mm", "scaled_grouped_mm", "deep_gemm"], peers.GEMM_PEERS)
    for peer in (dense, grouped):
        assert isinstance(peer, gemm.ScaledMM) or peer.why_not(point) is None
        peer.prepare(point, pack, (codes, torch.ones(20, 2)))
        for rows in (2, 3, 19, 32):
            result, expected = peer.check(point, pack, codes, None, rows)
            assert result.shape == (min(rows, 20), point.size[0]) and measure.differs(result, expected) is None
    w = gemm.weight_of(point, pack)
    assert reference.relative_error(grouped.run()[3:19], codes[3:19].float() @ w[2].float().T) < 5e-3
    assert reference.relative_error(dense.run()[3:19], codes[3:19].float() @ w[0].float().T) < 5e-3
    assert "equal rows only" in deep.why_not(point)


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
