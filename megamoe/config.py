"""The problem (:class:`MoEConfig`) and how to run it (:class:`Knobs`): frozen, hashable, validated."""

from __future__ import annotations

import hashlib
import math
from dataclasses import asdict, dataclass, fields
from typing import Literal

from .errors import ConfigError

MAX_RANKS = 8
MAX_EXPERTS = 512
MAX_TOP_K = 16
MAX_HIDDEN = 16384
MAX_INTERMEDIATE = 65536
MAX_TOKENS = 1 << 18
BLOCK = 128
"""Columns of an activation scale and edge of a weight scale block (DeepSeek-V3 report, section 3.3.2)."""

FP8_MAX = {"e4m3": 448.0, "e5m2": 57344.0}
"""Largest finite magnitude of each format (OCP 8-bit floating point specification, table 1)."""


def _require(ok: bool, name: str, value: object, allowed: str) -> None:
    if not ok:
        raise ConfigError(name, value, allowed)


def _require_int(name: str, value: object, low: int, high: int) -> None:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    _require(is_int and low <= value <= high, name, value, f"an int from {low} to {high}")  # type: ignore[operator]


def check_num_sms(num_sms: object, most: float = math.inf) -> None:
    """Raise ConfigError unless num_sms is None or an int from 1 to `most`."""
    fits = num_sms is None or (type(num_sms) is int and 1 <= num_sms <= most)
    _require(fits, "num_sms", num_sms, "None or an int of at least 1")


def _require_word(name: str, value: object, words: tuple[str, ...], note: str = "") -> None:
    _require(isinstance(value, str) and value in words, name, value, " or ".join(map(repr, words)) + note)


@dataclass(frozen=True)
class MoEConfig:
    """What a layer computes. Equal configs share a workspace; every rank must hold an equal one.

    hidden: H, columns of a token; a multiple of 128.
    intermediate: I, columns after SwiGLU; a multiple of 128.
    num_experts: E over all ranks (1 to 512, not only powers of two).
    top_k: K, routes of a token (1 to 16, at most E).
    max_tokens: the largest T of one rank and forward; buffers are sized by it, time is not.
    fp8: "e4m3" or "e5m2", of weights and activations.
    scale: "block" (1x128 activations, 128x128 weights, fp32) or "tensor" (static scalars).
    act_group: columns that share a scale in FC1's output, 128 or 64 ("block" only; results differ).
    accum: "promoted" (a second fp32 sum every 128 of K) or "single" ("tensor" only): one accumulator of the tensor
        cores over all of K. It keeps about 14 bits and cuts off the rest, so sums of terms of one sign come out too
        small, the more so the longer K is: FC1 is within 5e-3 on zero-mean data, but was 0.13 to 0.15 off on
        all-positive data with K = 7168.
    route_weight: where the routing weight is applied: "output" (FC2's fp32 sum) or "activation"
        (SwiGLU's result before it is quantised).
    clamp: None, or c > 0: gate <= c and |up| <= c before SwiGLU.
    pool_rows: None for the worst case (see pool_capacity), or a bound on the routes one rank receives; a
        forward that receives more aborts with cause pool_overflow. Where tokens name distinct experts and K is above
        E_local, W * max_tokens * min(K, E_local) rows are enough.

    Raises ConfigError, which names the field, its value and what is allowed.
    """

    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    max_tokens: int
    fp8: Literal["e4m3", "e5m2"] = "e4m3"
    scale: Literal["block", "tensor"] = "block"
    act_group: int = 128
    accum: Literal["promoted", "single"] = "promoted"
    route_weight: Literal["output", "activation"] = "output"
    clamp: float | None = None
    pool_rows: int | None = None

    def __post_init__(self) -> None:
        _require_int("hidden", self.hidden, BLOCK, MAX_HIDDEN)
        _require(self.hidden % BLOCK == 0, "hidden", self.hidden, f"a multiple of {BLOCK}")
        _require_int("intermediate", self.intermediate, BLOCK, MAX_INTERMEDIATE)
        _require(self.intermediate % BLOCK == 0, "intermediate", self.intermediate, f"a multiple of {BLOCK}")
        _require_int("num_experts", self.num_experts, 1, MAX_EXPERTS)
        _require_int("top_k", self.top_k, 1, MAX_TOP_K)
        _require(self.top_k <= self.num_experts, "top_k", self.top_k, f"at most num_experts ({self.num_experts})")
        _require_int("max_tokens", self.max_tokens, 1, MAX_TOKENS)
        _require_word("fp8", self.fp8, tuple(FP8_MAX))
        _require_word("scale", self.scale, ("block", "tensor"))
        _require(type(self.act_group) is int and self.act_group in (64, 128), "act_group", self.act_group, "64 or 128")
        block = self.scale == "block"
        _require(block or self.act_group == 128, "act_group", self.act_group, "128 with scale='tensor'")
        _require_word("accum", self.accum, ("promoted", "single"))
        _require(not block or self.accum == "promoted", "accum", self.accum, "'promoted' with scale='block'")
        note = " (the weight on FC1's input, as in Llama-4, is not supported)"
        _require_word("route_weight", self.route_weight, ("output", "activation"), note)
        if self.clamp is not None:
            number = isinstance(self.clamp, (int, float)) and not isinstance(self.clamp, bool)
            ok = number and 0 < self.clamp < float("inf")
            _require(ok, "clamp", self.clamp, "None or a finite number above 0")
            object.__setattr__(self, "clamp", float(self.clamp))
        if self.pool_rows is not None:
            _require_int("pool_rows", self.pool_rows, 1, (1 << 31) - 1)

    def experts_local(self, world_size: int) -> int:
        """E_local = E / W. Raises ConfigError unless 1 <= W <= 8 divides E."""
        _require_int("world_size", world_size, 1, MAX_RANKS)
        divides = self.num_experts % world_size == 0
        _require(divides, "num_experts", self.num_experts, f"a multiple of world_size ({world_size})")
        return self.num_experts // world_size

    def pool_capacity(self, world_size: int) -> int:
        """Rows of one rank's pool: the worst case W * max_tokens * K, or pool_rows where that is less.

        The worst case counts tokens that name one expert K times (padding rows of zeros, say): unless check_routes
        refuses them, each such route takes a row. Raises ConfigError for 2**31 rows, or when W does not divide E.
        """
        self.experts_local(world_size)
        worst = world_size * self.max_tokens * self.top_k
        rows = worst if self.pool_rows is None else min(self.pool_rows, worst)
        _require(rows < 1 << 31, "pool_rows", rows, "below 2**31 rows a rank; set pool_rows or lower max_tokens")
        return rows

    def fingerprint(self) -> str:
        """Hex digest of every field; equal on two ranks only when the configs are equal."""
        return hashlib.sha256(repr(sorted(asdict(self).items())).encode()).hexdigest()


@dataclass(frozen=True, repr=False)
class Knobs:
    """How to run a problem; never changes what it computes or what travels between ranks.

    The defaults are the plainest tile, not the fastest: sched.heuristics.choose_knobs(cfg, world_size, tokens) is what
    a layer picks.

    tile_rows: pool rows of a GEMM tile, 64 (one math warpgroup) or 128 (two); with swap_ab 8, 16, 32, 64,
        96, 128 or 256.
    tile_cols: columns of a GEMM tile, 128 or 256 (2 * intermediate and hidden must be multiples of it). FC1 with
        scale="block" and act_group=128 runs two tiles of 128 as one work item, for a scale needs both.
    mma_cols: columns of one WGMMA, 128 or 256; with 256 (accum="single" and tile_cols=256 only) it reads the rows in
        shared memory once instead of twice.
    cluster_rows, cluster_cols: shape of a cluster of CTAs, 1 or 2 each. Its columns run neighbouring column tiles and
        share the loads of rows; its rows run neighbouring row tiles of an expert and share the loads of weights. Both
        GEMMs must have a multiple of cluster_rows * cluster_cols column tiles. Of clusters of 2 x 2, 132 SMs hold
        only 30: without num_sms=120 a GEMM takes twice as long.
    pingpong: with tile_rows=64, two math warpgroups take tiles in turns, so that one stores a tile's results while the
        other multiplies the next tile.
    schedule: which CTA runs which tile. "static": in turns; "atomic": whoever is free takes the next one.
    swap_ab: weights become WGMMA's first operand (M) and rows its second (N), so that a tile costs what its live rows
        do, not 64 or 128. Two math warpgroups share out the tile's columns. Not with tile_rows=256 and tile_cols=256;
        scale="block" takes at most 96 rows with tile_cols=256, which act_group=128 needs, else 128.
    stages: K blocks of 128 held in shared memory, 2 to 12; None fills it.
    copy_depth: rows in flight a warp in pull and token-back, 2 to 8; None picks by row size.
    """

    tile_rows: int = 128
    tile_cols: int = 128
    mma_cols: int = 128
    cluster_rows: int = 1
    cluster_cols: int = 1
    pingpong: bool = False
    schedule: Literal["static", "atomic"] = "static"
    swap_ab: bool = False
    stages: int | None = None
    copy_depth: int | None = None

    def __post_init__(self) -> None:
        for name in ("swap_ab", "pingpong"):
            _require(type(getattr(self, name)) is bool, name, getattr(self, name), "True or False")
        rows = (8, 16, 32, 64, 96, 128, 256) if self.swap_ab else (64, 128)
        note = f"{', '.join(map(str, rows[:-1]))} or {rows[-1]}"
        note += " with swap_ab" if self.swap_ab else ", or 8 to 256 with swap_ab=True"
        _require(type(self.tile_rows) is int and self.tile_rows in rows, "tile_rows", self.tile_rows, note)
        columns, pair = (128, 256), (1, 2)
        allowed_of = dict(tile_cols=columns, mma_cols=columns, cluster_rows=pair, cluster_cols=pair)
        for name, allowed in allowed_of.items():
            value = getattr(self, name)
            _require(type(value) is int and value in allowed, name, value, " or ".join(map(str, allowed)))
        if self.swap_ab:
            wide = self.tile_rows > 128 and self.tile_cols > 128
            _require(
                not wide, "tile_cols", self.tile_cols, "128 with swap_ab and tile_rows=256: registers hold no more"
            )
            _require(
                self.mma_cols == 128, "mma_cols", self.mma_cols, "128 with swap_ab, whose WGMMAs have rows for columns"
            )
            thin = self.tile_rows == 8 and self.cluster_cols > 1
            _require(not thin, "cluster_cols", self.cluster_cols, "1 with tile_rows=8: two CTAs can't load 4 rows each")
        why = "swap_ab" if self.swap_ab else "tile_rows=128"
        alone = self.tile_rows == 64 and not self.swap_ab
        _require(
            not self.pingpong or alone, "pingpong", self.pingpong, f"False with {why}: two warpgroups share a tile"
        )
        _require_word("schedule", self.schedule, ("static", "atomic"))
        if self.stages is not None:
            _require_int("stages", self.stages, 2, 12)
        if self.copy_depth is not None:
            _require_int("copy_depth", self.copy_depth, 2, 8)

    def __repr__(self) -> str:
        """The call that makes it, with the fields that are not the defaults: Knobs(tile_rows=64, pingpong=True)."""
        given = (f.name for f in fields(self) if getattr(self, f.name) != f.default)
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in given)})"

    def describe(self) -> str:
        """One line, field=value."""
        return " ".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self))


def supported_modes() -> list[dict[str, object]]:
    """Every combination of number format fields that kernels support; tests and CI iterate it."""
    modes: list[dict[str, object]] = []
    for fp8 in FP8_MAX:
        for place in ("output", "activation"):
            for group in (128, 64):
                modes.append(dict(fp8=fp8, scale="block", act_group=group, route_weight=place))
            for accum in ("promoted", "single"):
                modes.append(dict(fp8=fp8, scale="tensor", accum=accum, route_weight=place))
    return modes
