"""Every kernel in every mode that changes its code: what the CPU tests compile and `make demo` reports.

Two shapes stand for all: DeepSeek-V3's, and DeepSeek-V2-Lite's, whose intermediate size is an odd multiple of
128. A mode of supported_modes() meets the first with route_weight "output" and the second with "activation".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..config import Knobs, MoEConfig, supported_modes
from ..sched import heuristics
from .build import DeviceKernel
from .copy_rows import WARPS, slot_bytes
from .exchange import Exchange, ExchangeSpec
from .fc1 import FC1, FC1Spec
from .fc2 import FC2, FC2Spec
from .pull import Pull, PullSpec
from .reduce import Reduce, ReduceSpec
from .stage import Stage, StageSpec
from .token_back import TokenBack, TokenBackSpec

NAMES = ("stage", "exchange", "pull", "fc1", "fc2", "token_back", "reduce")
"""The kernels, in the order of a forward."""

V3 = dict(hidden=7168, intermediate=2048, num_experts=256, top_k=8, max_tokens=8192)
V2_LITE = dict(hidden=2048, intermediate=1408, num_experts=64, top_k=6, max_tokens=8192)
RANKS = (1, 8)
CLUSTERS = tuple(dict(cluster_rows=rows, cluster_cols=cols) for rows in (1, 2) for cols in (1, 2))
TILES = tuple(Knobs(tile_rows=r, tile_cols=c, **shape) for r in (64, 128) for c in (128, 256) for shape in CLUSTERS)
"""Every tile and cluster; each compiles for E4M3 block scales, those that heuristics pick in all modes."""
WIDE_MMA = tuple(Knobs(tile_rows=r, tile_cols=256, mma_cols=256, **shape) for r in (64, 128) for shape in CLUSTERS)
"""The same of WGMMAs of 256 columns; each compiles for E4M3 and accum "single"."""

ATOMIC = tuple(Knobs(tile_cols=256, schedule="atomic", **shape) for shape in CLUSTERS)
"""An atomic schedule; each compiles for E4M3 block scales."""
PINGPONG = tuple(Knobs(tile_rows=64, tile_cols=c, pingpong=True, **shape) for c in (128, 256) for shape in CLUSTERS)
PINGPONG += (Knobs(tile_rows=64, tile_cols=256, pingpong=True, schedule="atomic", cluster_rows=2),)
"""Math warpgroups in turns; each compiles for E4M3 block scales."""
WIDE_MMA_PINGPONG = tuple(
    Knobs(tile_rows=64, tile_cols=256, mma_cols=256, pingpong=True, **shape) for shape in CLUSTERS
)
"""The same of WGMMAs of 256 columns; each compiles for E4M3 and accum "single"."""


SWAPPED = (
    Knobs(swap_ab=True, tile_rows=96, tile_cols=256, cluster_rows=2, schedule="atomic"),
    *(Knobs(swap_ab=True, tile_rows=rows, tile_cols=256) for rows in (8, 16, 32, 64, 96)),
    *(Knobs(swap_ab=True, tile_rows=64, tile_cols=256, **shape) for shape in CLUSTERS[1:]),
)
"""Swapped operands; each compiles for E4M3 block scales, the first in all modes of block scales."""

SWAPPED_NARROW = tuple(Knobs(swap_ab=True, tile_rows=rows) for rows in (64, 128, 256))
"""Swapped operands with tiles of 128 columns; each compiles for E4M3 and tensor scales, promoted."""


@dataclass(frozen=True)
class CatalogEntry:
    """One kernel in one mode. name: of NAMES. mode: what sets it apart from the kernel's other entries.

    make returns a new DeviceKernel with the spec that a forward would use.
    """

    name: str
    mode: str
    make: Callable[[], DeviceKernel]

    def __str__(self) -> str:
        return f"{self.name} {self.mode}".replace(" ", "-")


def _entry(name: str, mode: str, kind: type, spec: object) -> CatalogEntry:
    return CatalogEntry(name, mode, lambda: kind(spec))


def _number_format(cfg: MoEConfig, act_group: bool = True) -> str:
    """As in "e4m3 block128" or "e5m2 single"; without act_group "e4m3 block" or "e5m2 tensor"."""
    if act_group:
        return f"{cfg.fp8} " + (f"block{cfg.act_group}" if cfg.scale == "block" else cfg.accum)
    return f"{cfg.fp8} {cfg.scale}"


def _data_kernels(cfg: MoEConfig, ranks: int, stage_variants: tuple[tuple[bool, bool], ...]) -> Iterator[CatalogEntry]:
    """The kernels that move data; their default copy depth. stage_variants: (prequantized, check_routes)."""
    knobs = Knobs()
    where = f"H{cfg.hidden} W{ranks}"
    for prequantized, check_routes in stage_variants:
        variant = " prequantized" * prequantized + " check_routes" * check_routes
        spec = StageSpec.from_config(cfg, ranks, prequantized=prequantized, check_routes=check_routes)
        yield _entry("stage", f"{_number_format(cfg, False)} {where}{variant}", Stage, spec)
    yield _entry("exchange", f"E{cfg.num_experts} W{ranks}", Exchange, ExchangeSpec.from_config(cfg, ranks))
    yield _entry("pull", f"{cfg.scale} {where}", Pull, PullSpec.from_config(cfg, ranks, knobs))
    yield _entry("token_back", where, TokenBack, TokenBackSpec.from_config(cfg, ranks, knobs))
    yield _entry("reduce", where, Reduce, ReduceSpec.from_config(cfg, ranks))


def _gemms(cfg: MoEConfig, ranks: int, knobs: Knobs) -> Iterator[CatalogEntry]:
    local = cfg.experts_local(ranks)
    tile = f"tile{knobs.tile_rows}x{knobs.tile_cols} cluster{knobs.cluster_rows}x{knobs.cluster_cols}"
    tile += " swapped" * knobs.swap_ab + " wide" * (knobs.mma_cols > 128)
    tile += " pingpong" * knobs.pingpong + " atomic" * (knobs.schedule == "atomic")
    mode = f"{_number_format(cfg)} {cfg.route_weight} H{cfg.hidden} I{cfg.intermediate} {tile}"
    yield _entry("fc1", mode, FC1, FC1Spec.from_config(cfg, local, knobs))
    yield _entry("fc2", mode, FC2, FC2Spec.from_config(cfg, local, knobs))


def _everything() -> Iterator[CatalogEntry]:
    flags = (False, True)
    variants = tuple((prequantized, check_routes) for prequantized in flags for check_routes in flags)
    for mode in supported_modes():
        cfg = MoEConfig(**(V3 if mode["route_weight"] == "output" else V2_LITE), **mode)
        for ranks in RANKS:
            yield from _data_kernels(cfg, ranks, variants)
        for knobs in heuristics.candidates(cfg):
            yield from _gemms(cfg, max(RANKS), knobs)
        if mode["route_weight"] == "output" and mode["scale"] == "block":
            yield from _gemms(cfg, max(RANKS), SWAPPED[0])
    for knobs in (*TILES, *ATOMIC, *PINGPONG, *SWAPPED):
        yield from _gemms(MoEConfig(**V3), max(RANKS), knobs)
    for knobs in SWAPPED_NARROW:
        yield from _gemms(MoEConfig(**V3, scale="tensor"), max(RANKS), knobs)
    for knobs in (*WIDE_MMA, *WIDE_MMA_PINGPONG):
        yield from _gemms(MoEConfig(**V3, scale="tensor", accum="single"), max(RANKS), knobs)


def catalog(quick: bool = False, *, scale: str = "block", fp8: str = "e4m3") -> list[CatalogEntry]:
    """Each kernel in each mode, one entry a (class, spec), in the order of NAMES.

    quick: each kernel once, for DeepSeek-V3 on eight ranks with this scale mode and FP8 format (of MoEConfig;
    without quick they are not read). Raises ConfigError.
    """
    entries = _everything()
    if quick:
        cfg, ranks = MoEConfig(**V3, scale=scale, fp8=fp8), max(RANKS)
        entries = iter([*_data_kernels(cfg, ranks, ((False, False),)), *_gemms(cfg, ranks, heuristics.large(cfg))])
    unique: dict[tuple[type, object], CatalogEntry] = {}
    for entry in entries:
        kernel = entry.make()
        unique.setdefault((type(kernel), kernel.spec), entry)
    return sorted(unique.values(), key=lambda entry: NAMES.index(entry.name))


def shared_bytes(kernel: DeviceKernel) -> int:
    """Dynamic shared memory of a CTA: as the kernel class says it, else from its spec."""
    spec = kernel.spec
    if hasattr(kernel, "smem_bytes"):
        return kernel.smem_bytes
    if isinstance(spec, StageSpec):
        return 4 * spec.num_experts
    if isinstance(spec, ExchangeSpec):
        return 4 * (4 * spec.num_experts + 1)
    if isinstance(spec, PullSpec):
        experts = spec.experts_local * spec.world_size
        return WARPS * spec.depth * (slot_bytes(spec.row.row_bytes) + 8) + 4 * (2 * experts + 1 + spec.world_size)
    if isinstance(spec, TokenBackSpec):
        return WARPS * spec.depth * (slot_bytes(spec.piece_bytes) + 8)
    return 0
