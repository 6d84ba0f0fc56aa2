"""Which Knobs a forward runs with: chosen on the host from this rank's T and the config alone.

What each choice rests on is in tools/results/gemm-notes.md.
"""

from __future__ import annotations

from ..config import Knobs, MoEConfig

# Knobs are made here once: a forward only picks.
_QUEUE = dict(schedule="atomic")

SMALL, SMALL_PAIRS = (Knobs(tile_rows=64, cluster_rows=pair, **_QUEUE) for pair in (1, 2))
"""64-row tiles, which waste least where weights bound the time. Pairs of CTAs share the weights of an expert that got
more rows than a tile has."""

MIDDLE, MIDDLE_PAIRS = (
    Knobs(swap_ab=True, tile_rows=128, tile_cols=256, cluster_rows=pair, **_QUEUE) for pair in (1, 2)
)
"""Swapped operands, for tensor scales: an expert's second tile costs what its rows do. With block scales they lose,
because a thread has a quarter of all rows' scales to multiply by."""

NARROW = Knobs(**_QUEUE)
WIDE, PAIRS = (Knobs(tile_cols=256, cluster_rows=pair, **_QUEUE) for pair in (1, 2))
"""128-row tiles, of 256 columns where the shape allows, and shared weights where it allows that too."""

WIDE_SINGLE, PAIRS_SINGLE = (Knobs(tile_cols=256, mma_cols=256, cluster_rows=pair, **_QUEUE) for pair in (1, 2))
"""The same for a single accumulator."""

SMALL_ROWS = 24
"""Most rows an expert gets on average for SMALL: with even routing it is the fastest up to 48 (by 2 %), with skewed
routing no more from 32 on (6 %)."""

MIDDLE_ROWS = 208
"""Most for MIDDLE: at 256 even rows, two full tiles, it loses."""


def _in_pairs(cfg: MoEConfig, columns: int) -> bool:
    """Whether FC2 has an even number of tiles of so many columns, and FC1 one of tiles of 256, thus of 128 too."""
    return cfg.intermediate % 256 == 0 and cfg.hidden % (2 * columns) == 0


def small(cfg: MoEConfig) -> Knobs:
    """64-row tiles, in pairs where the shape allows."""
    return SMALL_PAIRS if _in_pairs(cfg, 128) else SMALL


def middle(cfg: MoEConfig) -> Knobs:
    """Swapped operands with tensor scales where the shape allows; else large()."""
    if cfg.hidden % 256 or cfg.scale == "block":
        return large(cfg)
    return MIDDLE_PAIRS if _in_pairs(cfg, 256) else MIDDLE


def large(cfg: MoEConfig) -> Knobs:
    """128-row tiles, as wide as the shape allows and in pairs where it allows: less of each operand is read again."""
    if cfg.hidden % 256:
        return NARROW
    if cfg.accum == "single":
        return PAIRS_SINGLE if _in_pairs(cfg, 256) else WIDE_SINGLE
    return PAIRS if _in_pairs(cfg, 256) else WIDE


def expected_rows(cfg: MoEConfig, world_size: int, tokens: int) -> float:
    """Rows an expert receives when every rank holds `tokens` and routing is uniform."""
    return tokens * world_size * cfg.top_k / cfg.num_experts


def candidates(cfg: MoEConfig) -> tuple[Knobs, ...]:
    """Every Knobs that choose_knobs can return; warmup compiles them all."""
    return tuple(dict.fromkeys((small(cfg), middle(cfg), large(cfg))))


def choose_knobs(cfg: MoEConfig, world_size: int, tokens: int) -> Knobs:
    """By the rows that an expert gets on average: small, middle or large tiles."""
    rows = expected_rows(cfg, world_size, tokens)
    if rows <= SMALL_ROWS:
        return small(cfg)
    return middle(cfg) if rows <= MIDDLE_ROWS else large(cfg)
