"""reference.layer_bound against layers whose FC1 is as imprecise as on tensor cores, on few and on many live routes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megamoe import numerics, reference
from megamoe.config import FP8_MAX, MoEConfig, supported_modes
from megamoe.errors import InputError
from megamoe.numerics import CanonicalExperts

MANY = {"e4m3": 1e-2, "e5m2": 1.5e-2}
NOISE = {"promoted": 3e-4, "single": 2.6e-3}


def config(**fields) -> MoEConfig:
    return MoEConfig(**{**dict(hidden=512, intermediate=384, num_experts=8, top_k=2, max_tokens=512), **fields})


def problem(cfg: MoEConfig, tokens: int, seed: int) -> tuple[CanonicalExperts, Tensor, Tensor, Tensor]:
    """A pack of all experts, x, ids, weights: randn data, outputs of order one."""
    g = torch.Generator().manual_seed(seed)
    w13 = torch.randn(cfg.num_experts, 2 * cfg.intermediate, cfg.hidden, generator=g) / cfg.hidden**0.5
    w2 = torch.randn(cfg.num_experts, cfg.hidden, cfg.intermediate, generator=g) / cfg.intermediate**0.5
    quantize = numerics.quantize_weight_blocks if cfg.scale == "block" else numerics.quantize_weight_tensor
    statics = [] if cfg.scale == "block" else [6 / FP8_MAX[cfg.fp8], 15 / FP8_MAX[cfg.fp8]]
    pack = CanonicalExperts(*quantize(w13, cfg.fp8), *quantize(w2, cfg.fp8), *statics)
    x = torch.randn(tokens, cfg.hidden, generator=g)
    weights, ids = torch.rand(tokens, cfg.num_experts, generator=g).topk(cfg.top_k, dim=1)
    return pack, x, ids, weights


class Rows:
    """A layer's rows, one a route, with FC1 done; y() finishes it for whatever FC1 gave."""

    def __init__(self, cfg: MoEConfig, tokens: int, seed: int) -> None:
        self.cfg, (self.pack, x, self.ids, self.weights) = cfg, problem(cfg, tokens, seed)
        codes, scales = reference.stage(cfg, x, self.pack.x_scale)
        token = torch.arange(self.ids.numel()) // cfg.top_k
        picked = numerics.take_rows(codes, token), None if scales is None else scales[token]
        self.both = reference.fc1_preactivation(cfg, *picked, self.ids.flatten(), self.pack)

    def activation(self, both: Tensor) -> tuple[Tensor, Tensor | None]:
        """Codes and scales of FC1's output [R, 2I]."""
        act = numerics.swiglu(*both.chunk(2, 1), self.cfg.clamp)
        if self.cfg.route_weight == "activation":
            act = act * self.weights.flatten()[:, None]
        return reference.quantize_activation(self.cfg, act, self.pack.act_scale)

    def y(self, codes: Tensor, scales: Tensor | None) -> Tensor:
        rows = reference.fc2(self.cfg, codes, scales, self.ids.flatten(), self.pack, self.weights.flatten())
        return reference.reduce(rows.view(*self.ids.shape, -1), self.ids)


def test_one_flip_of_the_largest_code_on_two_live_routes() -> None:
    """A single token's error above four times the bound of many, which no bound by tokens alone should refuse."""
    cfg = config(scale="tensor")
    errors = []
    for seed in range(30):
        rows = Rows(cfg, 1, seed)
        codes, _ = rows.activation(rows.both)
        flipped = codes.view(torch.uint8).clone()
        flipped.view(-1)[codes.float().abs().argmax()] ^= 1  # a neighbour: the last bit of the mantissa
        assert int(numerics.code_distance(codes, flipped.view(codes.dtype)).sum()) == 1
        errors.append(reference.relative_error(rows.y(flipped.view(codes.dtype), None), rows.y(codes, None)))
    assert max(errors) > 4e-2
    assert max(errors) <= reference.layer_bound(cfg, 2) < 8.5e-2


CASES = [mode for mode in supported_modes() if mode["route_weight"] == "output"]
CASES += [mode for mode in supported_modes() if mode["route_weight"] == "activation" and mode["fp8"] == "e4m3"]


@pytest.mark.parametrize("tokens", [1, 8, 256])
@pytest.mark.parametrize("mode", CASES, ids=lambda m: "-".join(map(str, m.values())))
def test_imprecise_sums_stay_within_the_bound(mode: dict, tokens: int) -> None:
    """FC1 as far off as README allows (single: as far as layer_bound supposes in E5M2)."""
    cfg = config(**mode, clamp=None if tokens == 8 else 7.0)
    bound = reference.layer_bound(cfg, tokens * cfg.top_k)
    g = torch.Generator().manual_seed(tokens)
    for seed in range(3):
        rows = Rows(cfg, tokens, seed)
        exact = rows.y(*rows.activation(rows.both))
        size = rows.both.square().mean(1, keepdim=True).sqrt() * NOISE[cfg.accum]
        for _ in range(max(1, 24 // tokens)):
            noise = torch.randn(rows.both.shape, generator=g) * size
            error = reference.relative_error(rows.y(*rows.activation(rows.both + noise)), exact)
            assert error <= bound
    if tokens == 256:
        assert error > bound / 4  # the bound of many routes is not idle


def test_it_is_zero_without_live_routes_and_falls_to_the_bound_of_many() -> None:
    for mode in supported_modes():
        cfg = config(**mode)
        many = 3e-2 if cfg.accum == "single" else MANY[cfg.fp8]
        bounds = [reference.layer_bound(cfg, live) for live in (1, 2, 4, 16, 64, 256, 512, 2048, 10**6)]
        assert bounds == sorted(bounds, reverse=True) and bounds[-2:] == [many, many]
        assert bounds[0] < {"e4m3": 0.125, "e5m2": 0.25}[cfg.fp8]  # all codes one step off
        assert reference.layer_bound(cfg, 0) == 0.0
        wide = config(**mode, intermediate=2048)
        assert reference.layer_bound(wide, 3) < reference.layer_bound(cfg, 3)
    for bad in (-1, 1.0, True, None, torch.ones(2, 2)):
        with pytest.raises(InputError) as caught:
            reference.layer_bound(cfg, bad)
        assert caught.value.name == "live"


def test_without_live_routes_y_is_exact() -> None:
    cfg = config()
    pack, x, ids, weights = problem(cfg, 3, 0)
    masked = torch.full_like(ids, -1)
    (y,) = reference.layer(cfg, [pack], [x], [masked], [weights])
    assert reference.live_routes(cfg, masked) == 0
    assert reference.relative_error(torch.zeros_like(y), y) <= reference.layer_bound(cfg, 0)
    assert reference.relative_error(torch.ones_like(y), y) == math.inf


def test_live_routes_counts_ids_of_experts() -> None:
    cfg = config()
    ids = torch.tensor([[0, -1], [7, 8], [2**40, -(2**40)]])
    assert reference.live_routes(cfg, ids) == 2
    assert reference.live_routes(cfg, [ids, ids[:1].int(), ids[:0]]) == 3
