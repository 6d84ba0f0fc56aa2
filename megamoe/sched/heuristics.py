"""Which Knobs a forward runs with: chosen on the host from this rank's T and the config alone."""

from __future__ import annotations

from ..config import Knobs, MoEConfig

SMALL = Knobs(tile_rows=64)
LARGE = Knobs(tile_rows=128)


def expected_rows(cfg: MoEConfig, world_size: int, tokens: int) -> float:
    """Rows an expert receives when every rank holds `tokens` and routing is uniform."""
    return tokens * world_size * cfg.top_k / cfg.num_experts


def candidates(cfg: MoEConfig) -> tuple[Knobs, ...]:
    """Every Knobs that choose_knobs can return; warmup compiles them all."""
    return (SMALL, LARGE)


def choose_knobs(cfg: MoEConfig, world_size: int, tokens: int) -> Knobs:
    """64-row tiles while experts get at most 64 rows on average (weights bound the time), else 128-row tiles."""
    return SMALL if expected_rows(cfg, world_size, tokens) <= 64 else LARGE
