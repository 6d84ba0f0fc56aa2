"""tools/peers without a GPU: why peers do not run, and torch's expert parallelism with a stand-in for its product."""

from __future__ import annotations

import importlib
import importlib.util
import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megamoe import numerics, reference
from megamoe.config import MoEConfig
from tests.cpu.peer_problems import CPU, SHAPE, make_inputs, make_pack, peers, stub_grouped_mm, unquantised

modules = ("peers.measure", "peers.torch_ep", "peers.gemm", "peers.flashinfer_base")
measure, torch_ep, gemm, flashinfer_base = map(importlib.import_module, modules)


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
