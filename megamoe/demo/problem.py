"""The demo's layer: experts made one by one from their number, tokens of each rank, and the oracle over them.

An expert depends on its number and the seed alone, so any rank can make any expert again and nobody ever
holds all of them unquantised. That every rank gets the same bits needs GPUs of one model, as a node has.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import numerics, reference
from ..config import MoEConfig
from ..weights import ExpertWeights, calibrate

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 7168, 2048, 256, 8
"""DeepSeek-V3's routed experts (its technical report, section 4.2)."""

SAMPLE = 2048
"""Tokens of a rank that the oracle computes at most."""

_CALIBRATION_TOKENS = 128


def progress(items: Iterable, what: str, quiet: bool = False) -> Iterable:
    """items behind a tqdm bar on stderr; no bar when quiet or when stderr is no terminal."""
    from tqdm import tqdm

    return tqdm(items, desc=what, file=sys.stderr, disable=True if quiet else None, leave=False)


def cosine_bound(cfg: MoEConfig) -> float:
    """Least cosine of the FP8 layer with the unquantised one on randn data (DESIGN, Numbers)."""
    return 0.997 if cfg.fp8 == "e4m3" else 0.990


@dataclass(frozen=True)
class DemoProblem:
    """A config, and what its layer is fed. x_scale, act_scale: set with scale="tensor" (see calibrated)."""

    cfg: MoEConfig
    device: torch.device
    seed: int = 0
    x_scale: float | None = None
    act_scale: float | None = None
    quiet: bool = False

    def _generator(self, kind: int, number: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed((self.seed * 3 + kind) * 1_000_003 + number)

    def expert_bf16(self, expert: int) -> tuple[Tensor, Tensor]:
        """w13 [2I, H] and w2 [H, I], bf16, scaled so that outputs are of order one."""
        hidden, inner, g = self.cfg.hidden, self.cfg.intermediate, self._generator(0, expert)
        like: dict[str, Any] = dict(generator=g, device=self.device, dtype=torch.bfloat16)
        w13, w2 = torch.randn(2 * inner, hidden, **like), torch.randn(hidden, inner, **like)
        return w13.mul_(hidden**-0.5), w2.mul_(inner**-0.5)

    def expert(self, expert: int) -> ExpertWeights:
        """One expert, quantised, as a pack of its own."""
        alone = replace(self.cfg, num_experts=1, top_k=1)
        w13, w2 = self.expert_bf16(expert)
        return ExpertWeights.from_bf16(alone, w13[None], w2[None], x_scale=self.x_scale, act_scale=self.act_scale)

    def pack(self, rank: int, world_size: int) -> ExpertWeights:
        """A rank's experts in kernel layout, filled expert by expert."""
        local = self.cfg.experts_local(world_size)
        whole: list[Tensor] = []
        for slot in progress(range(local), f"weights of rank {rank}", self.quiet):
            one = self.expert(rank * local + slot)
            parts = (one.w13, one.w13_scale, one.w2, one.w2_scale)
            whole = whole or [torch.empty(local, *p.shape[1:], dtype=p.dtype, device=p.device) for p in parts]
            for target, part in zip(whole, parts):
                target[slot].copy_(part[0])
        return ExpertWeights(self.cfg, *whole, self.x_scale, self.act_scale)

    def routes(self, rank: int, tokens: int) -> tuple[Tensor, Tensor]:
        """ids int32 [T, K] of distinct experts, uniform, and weights fp32 [T, K] that sum to one."""
        g = self._generator(1, rank)
        scores = torch.rand(tokens, self.cfg.num_experts, generator=g, device=self.device)
        weights = torch.rand(tokens, self.cfg.top_k, generator=g, device=self.device) + 0.1
        ids = scores.topk(self.cfg.top_k, dim=1).indices.to(torch.int32)
        return ids.contiguous(), weights / weights.sum(1, keepdim=True)

    def tokens(self, rank: int, tokens: int) -> Tensor:
        """x bf16 [T, H], randn."""
        like: dict[str, Any] = dict(generator=self._generator(2, rank), device=self.device, dtype=torch.bfloat16)
        return torch.randn(tokens, self.cfg.hidden, **like)

    def calibrated(self, group: dist.ProcessGroup | None = None) -> DemoProblem:
        """With scale="tensor" the problem with static scales from sample tokens, equal over `group`."""
        cfg = self.cfg
        if cfg.scale != "tensor":
            return self
        x, (_, weights) = self.tokens(0, _CALIBRATION_TOKENS), self.routes(0, _CALIBRATION_TOKENS)
        ids = torch.arange(cfg.top_k, device=self.device).expand(_CALIBRATION_TOKENS, -1)
        w13 = [self.expert_bf16(expert)[0] for expert in range(cfg.top_k)]
        scales = calibrate(cfg, w13, x, ids, weights, expert_ids=range(cfg.top_k), group=group)
        return replace(self, x_scale=scales[0], act_scale=scales[1])

    def oracle(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """y bf16 [T, H] as reference.layer computes it, from experts made one at a time."""
        cfg = self.cfg
        codes, scales = reference.stage(cfg, x, self.x_scale)
        ids, weights = reference.clean_routes(cfg, ids, weights)
        slots = torch.zeros(*ids.shape, cfg.hidden, dtype=torch.bfloat16, device=x.device)
        hit = [expert for expert in ids.unique().tolist() if expert >= 0]
        for expert in progress(hit, "oracle", self.quiet):
            rows = (ids.flatten() == expert).nonzero().flatten()
            token, weight = rows // cfg.top_k, weights.flatten()[rows]
            pack, mine = self.expert(expert).canonical(), torch.zeros_like(rows)
            picked = numerics.take_rows(codes, token), None if scales is None else scales[token]
            act = reference.fc1(cfg, *picked, mine, pack, weight)
            slots.view(-1, cfg.hidden)[rows] = reference.fc2(cfg, act["codes"], act["scales"], mine, pack, weight)
        return reference.reduce(slots, ids)

    def unquantised(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """y fp32 [T, H] of the layer without FP8. Holds all experts in bf16: for small layers."""
        w13, w2 = (torch.stack(w) for w in zip(*map(self.expert_bf16, range(self.cfg.num_experts))))
        return reference.unquantised_layer(self.cfg, w13, w2, x, ids, weights)


def sample_rows(tokens: int, device: torch.device) -> Tensor:
    """int64: at most SAMPLE of 0 .. T-1, evenly spread, ascending."""
    count = min(tokens, SAMPLE)
    return torch.arange(count, device=device) * tokens // max(count, 1)
