"""Random weights, routes and tokens for benchmarks, made on the device without temporaries of the whole."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import Any

import floors
import torch

from megamoe.config import MoEConfig
from megamoe.weights import ExpertWeights

STATIC_SCALE = 0.02
"""x_scale and act_scale of tensor mode: 448 times it is about nine deviations of randn data."""

ROUTINGS = ("balanced", "random", "zipf", "hot_expert", "empty_rank")
"""balanced: each rank uses its experts equally often. random: uniform. zipf: the n-th most wanted expert has weight
1 / n. hot_expert: expert 0 has a row of every token. empty_rank: the last rank has no tokens, the others balanced."""

SKEWS = ("balanced", "zipf")
"""Rows of experts in a GEMM alone. balanced: equal. zipf: as zipf_counts says."""

ZIPF_EXPONENT = 1.2


def generator(device: torch.device | str, what: str, *numbers: int) -> torch.Generator:
    """A generator on `device`, seeded by what it draws and for whom.

    Equal seeds for tokens and weights would make tokens equal rows of weights, and their products sums of squares.
    """
    return torch.Generator(device=device).manual_seed(zlib.crc32(repr((what, *numbers)).encode()))


def random_experts(cfg: MoEConfig, world_size: int, seed: int, device: torch.device | str) -> ExpertWeights:
    """One rank's experts: randn scaled so that outputs are of order one, quantised expert by expert."""
    local = cfg.experts_local(world_size)
    one = replace(cfg, num_experts=1, top_k=1, pool_rows=None)
    statics = dict(x_scale=STATIC_SCALE, act_scale=STATIC_SCALE) if cfg.scale == "tensor" else {}
    g = generator(device, "experts", seed)
    tensors: dict[str, torch.Tensor] = {}
    for index in range(local):
        w13 = torch.randn(1, 2 * cfg.intermediate, cfg.hidden, generator=g, device=device, dtype=torch.bfloat16)
        w2 = torch.randn(1, cfg.hidden, cfg.intermediate, generator=g, device=device, dtype=torch.bfloat16)
        w13.mul_(cfg.hidden**-0.5), w2.mul_(cfg.intermediate**-0.5)
        part = ExpertWeights.from_bf16(one, w13, w2, **statics)
        for name in ("w13", "w13_scale", "w2", "w2_scale"):
            piece = getattr(part, name)
            if name not in tensors:
                tensors[name] = torch.empty(local, *piece.shape[1:], dtype=piece.dtype, device=device)
            tensors[name][index] = piece[0]
    statics = {name: getattr(part, name) for name in ("x_scale", "act_scale")}
    return ExpertWeights(cfg, **tensors, **statics)


def balanced_ids(tokens: int, top_k: int, experts: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    """int32 [T, K] of distinct experts out of `experts` [N], each used equally often, within one.

    When K divides N, every N / K tokens share out a fresh permutation; else all tokens walk round one.
    """
    n, device = len(experts), experts.device
    if n % top_k == 0:
        blocks = -(-tokens * top_k // n)
        order = torch.rand(blocks, n, generator=g, device=device).argsort(1)
        chosen = order.view(-1, top_k)[:tokens]
    else:
        order = torch.rand(n, generator=g, device=device).argsort()
        slots = torch.arange(tokens * top_k, device=device).view(tokens, top_k)
        chosen = order[slots % n]
    return experts[chosen].to(torch.int32).contiguous()


def zipf_ids(tokens: int, top_k: int, num_experts: int, seed: int, g: torch.Generator) -> torch.Tensor:
    """int32 [T, K] of distinct experts, drawn without replacement: the n-th most wanted with weight 1 / n.

    Which expert is how wanted is a permutation of `seed`, the same on every rank.
    """
    order = (
        torch.rand(num_experts, generator=generator(g.device, "order of experts", seed), device=g.device)
        .argsort()
        .argsort()
    )
    noise = torch.rand(tokens, num_experts, generator=g, device=g.device).clamp_(min=1e-20).log_().neg_().log_()
    scores = noise.neg_() - (order + 1).float().log()  # Gumbel's trick: the largest K are such a draw
    return scores.topk(top_k, dim=1).indices.to(torch.int32).contiguous()


def zipf_counts(total: int, experts: int, seed: int) -> tuple[int, ...]:
    """Rows of each expert, `total` in all: the n-th most wanted has a share of n ** -ZIPF_EXPONENT, rounded so that
    those with the largest remainders get one more. Which expert is how wanted is a permutation of `seed`."""
    wanted = torch.arange(1, experts + 1, dtype=torch.float64) ** -ZIPF_EXPONENT
    wanted *= total / wanted.sum()
    counts = wanted.floor()
    remainders = (wanted - counts).argsort(descending=True, stable=True)
    counts[remainders[: total - int(counts.sum())]] += 1
    return tuple(counts[torch.randperm(experts, generator=generator("cpu", "order of experts", seed))].long().tolist())


def hot_ids(tokens: int, top_k: int, experts: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    """int32 [T, K]: the first of `experts` in every token, the others balanced."""
    hot = experts[:1].to(torch.int32).expand(tokens, 1)
    rest = [balanced_ids(tokens, top_k - 1, experts[1:], g)] if top_k > 1 else []
    return torch.cat([hot, *rest], dim=1).contiguous()


def make_ids(
    kind: str, cfg: MoEConfig, rank: int, world_size: int, tokens: int, seed: int, device: torch.device | str
) -> torch.Tensor:
    """int32 [T, K], distinct in a token: one of ROUTINGS, or "all_remote" (balanced over the experts of other
    ranks; there must be at least K)."""
    g = generator(device, "routes", seed, rank)
    experts = torch.arange(cfg.num_experts, device=device)
    if kind == "random":
        scores = torch.rand(tokens, cfg.num_experts, generator=g, device=device)
        return scores.topk(cfg.top_k, dim=1).indices.to(torch.int32).contiguous()
    if kind == "zipf":
        return zipf_ids(tokens, cfg.top_k, cfg.num_experts, seed, g)
    if kind == "hot_expert":
        return hot_ids(tokens, cfg.top_k, experts, g)
    if kind == "all_remote":
        experts = experts[experts // cfg.experts_local(world_size) != rank]
        if len(experts) < cfg.top_k:
            raise ValueError(f"all_remote needs {cfg.top_k} experts on other ranks, there are {len(experts)}")
    elif kind not in ("balanced", "empty_rank"):
        raise ValueError(f"kind = {kind!r}: one of {', '.join((*ROUTINGS, 'all_remote'))}")
    return balanced_ids(tokens, cfg.top_k, experts, g)


def tokens_of(kind: str, rank: int, world_size: int, tokens: int) -> int:
    """T of a rank: `tokens`, but none on the last rank with "empty_rank"."""
    return 0 if kind == "empty_rank" and rank == world_size - 1 else tokens


def make_inputs(
    kind: str, cfg: MoEConfig, rank: int, world_size: int, tokens: int, seed: int, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x bf16 [T, H] of randn, ids int32 [T, K], weights fp32 [T, K] of sum one)."""
    ids = make_ids(kind, cfg, rank, world_size, tokens, seed, device)
    g = generator(device, "tokens", seed, rank)
    x = torch.randn(tokens, cfg.hidden, generator=g, device=device, dtype=torch.bfloat16)
    weights = torch.rand(tokens, cfg.top_k, generator=g, device=device) + 0.1
    return x, ids, weights / weights.sum(1, keepdim=True)


@dataclass(frozen=True)
class Problem:
    """Inputs of this process's ranks, an output for each, and the traffic of every rank of the world.

    kind: routing. tokens: T of each rank that is not empty. Lists hold a tensor a local rank.
    """

    kind: str
    tokens: int
    xs: list[torch.Tensor]
    ids: list[torch.Tensor]
    weights: list[torch.Tensor]
    ys: list[torch.Tensor]
    traffics: list[floors.Traffic]

    @property
    def first(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(x, ids, weights) of the first local rank."""
        return self.xs[0], self.ids[0], self.weights[0]

    @property
    def most_rows(self) -> int:
        """Rows of the rank that receives most; the same number on every rank."""
        return max(t.rows for t in self.traffics)


def make_problem(cfg: MoEConfig, kind: str, tokens: int, world: Any, seed: int) -> Problem:
    """A fresh problem for a World. Collective."""
    made, counts = [], []
    for rank in world.local_ranks:
        live = tokens_of(kind, rank, world.size, tokens)
        made.append(make_inputs(kind, cfg, rank, world.size, live, seed, world.device(rank)))
        counts.append(torch.bincount(made[-1][1].flatten().long(), minlength=cfg.num_experts).tolist())
    sizes = [tokens_of(kind, rank, world.size, tokens) for rank in range(world.size)]
    traffics = floors.traffic(sizes, world.gather(counts, "counts"))
    xs, ids, weights = (list(tensors) for tensors in zip(*made))
    return Problem(kind, tokens, xs, ids, weights, [torch.empty_like(x) for x in xs], traffics)
