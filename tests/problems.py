"""Random problems for tests: configs, weights, routings and inputs of W ranks, on any device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megamoe.config import MoEConfig
from megamoe.weights import ExpertWeights

ROUTINGS = ("random", "balanced", "zipf", "one_expert", "all_remote", "masked", "all_masked", "one_rank_empty")


def generator(seed: int, device: str) -> torch.Generator:
    """A seeded generator."""
    return torch.Generator(device=device).manual_seed(seed)


def routing(
    kind: str, cfg: MoEConfig, rank: int, world_size: int, tokens: int, seed: int, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """ids int32 [T, K] of distinct experts (-1 where masked) and weights fp32 [T, K]."""
    g = generator(seed * 1009 + rank, device)
    experts, k = cfg.num_experts, cfg.top_k
    scores = torch.rand(tokens, experts, generator=g, device=device)
    local = experts // world_size
    if kind == "balanced":
        order = torch.randperm(experts, generator=g, device=device)
        scores.zero_()
        rows = torch.arange(tokens, device=device)[:, None]
        chosen = (rows * k + torch.arange(k, device=device)) % experts
        scores.scatter_(1, order[chosen], 1.0)
    elif kind == "zipf":
        scores = scores.log() / (1.0 / torch.arange(1, experts + 1, device=device) ** 1.2)
    elif kind == "one_expert":
        scores[:, experts - 1] = 2.0
    elif kind == "all_remote" and world_size > 1 and experts - local >= k:
        scores[:, rank * local : (rank + 1) * local] = -1.0
    ids = scores.topk(k, dim=1).indices.to(torch.int32)
    ids = ids.gather(1, torch.rand(tokens, k, generator=g, device=device).argsort(1))
    if kind == "masked":
        ids[torch.rand(tokens, k, generator=g, device=device) < 0.4] = -1
    if kind == "one_expert":
        ids[:, 1:] = torch.where(ids[:, 1:] == experts - 1, ids[:, :1], ids[:, 1:])
        ids[:, 0] = experts - 1
        ids[:, 1:] = -1
    if kind == "all_masked":
        ids.fill_(-1)
    weights = torch.rand(tokens, k, generator=g, device=device) + 0.1
    return ids.contiguous(), weights / weights.sum(1, keepdim=True)


def make_weights(
    cfg: MoEConfig, world_size: int, seed: int, device: str, x_scale: float = 0.02, act_scale: float = 0.02
) -> list[ExpertWeights]:
    """One pack a rank of randn weights scaled so that outputs are of order one."""
    g = generator(seed, device)
    local = cfg.experts_local(world_size)
    scales = dict(x_scale=x_scale, act_scale=act_scale) if cfg.scale == "tensor" else {}
    packs = []
    for _ in range(world_size):
        w13 = torch.randn(local, 2 * cfg.intermediate, cfg.hidden, generator=g, device=device, dtype=torch.bfloat16)
        w2 = torch.randn(local, cfg.hidden, cfg.intermediate, generator=g, device=device, dtype=torch.bfloat16)
        w13.mul_(cfg.hidden**-0.5), w2.mul_(cfg.intermediate**-0.5)
        packs.append(ExpertWeights.from_bf16(cfg, w13, w2, **scales))
    return packs


@dataclass
class Problem:
    """Inputs of W ranks."""

    xs: list[torch.Tensor]
    ids: list[torch.Tensor]
    weights: list[torch.Tensor]


def make_inputs(cfg: MoEConfig, tokens: list[int], kind: str, seed: int, device: str) -> Problem:
    """Tokens of each rank (their number is the list's), routed as `kind` says."""
    world_size = len(tokens)
    if kind == "one_rank_empty":
        tokens = [0, *tokens[1:]] if world_size > 1 else [0]
        kind = "random"
    g = generator(seed + 17, device)
    xs = [torch.randn(t, cfg.hidden, generator=g, device=device, dtype=torch.bfloat16) for t in tokens]
    routes = [routing(kind, cfg, r, world_size, t, seed, device) for r, t in enumerate(tokens)]
    return Problem(xs, [r[0] for r in routes], [r[1] for r in routes])
