"""What tests of tools/peers share: small packs and inputs, and torch's grouped product by plain torch."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import torch

from megamoe import reference
from megamoe.weights import ExpertWeights

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
peers = importlib.import_module("peers")

CPU = torch.device("cpu")
SHAPE = dict(hidden=256, intermediate=128, num_experts=8, top_k=3, max_tokens=64)


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
