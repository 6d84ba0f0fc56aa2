"""Which Knobs a forward runs with: chosen on the host from this rank's T and the config alone."""

from __future__ import annotations

from ..config import Knobs, MoEConfig

SMALL = Knobs(tile_rows=64)
"""Weights bound the time, and 64-row tiles waste least."""


NARROW, WIDE, PAIRS = (Knobs(tile_cols=columns, cluster_cols=pair) for columns, pair in ((128, 1), (256, 1), (256, 2)))
"""128-row tiles, from one column tile a CTA to two CTAs side by side. Made here: a forward only picks."""


def large(cfg: MoEConfig) -> Knobs:
    """128-row tiles, as wide and in as large clusters as the shape allows: less of each operand is read again."""
    if cfg.hidden % 256:
        return NARROW
    columns = (2 * cfg.intermediate // 256, cfg.hidden // 256)
    return PAIRS if all(n % 2 == 0 for n in columns) else WIDE


def expected_rows(cfg: MoEConfig, world_size: int, tokens: int) -> float:
    """Rows an expert receives when every rank holds `tokens` and routing is uniform."""
    return tokens * world_size * cfg.top_k / cfg.num_experts


def candidates(cfg: MoEConfig) -> tuple[Knobs, ...]:
    """Every Knobs that choose_knobs can return; warmup compiles them all."""
    return (SMALL, large(cfg))


def choose_knobs(cfg: MoEConfig, world_size: int, tokens: int) -> Knobs:
    """64-row tiles while experts get at most 64 rows on average, else 128-row tiles."""
    return SMALL if expected_rows(cfg, world_size, tokens) <= 64 else large(cfg)
