"""How much memory a layer takes, and aligned allocations."""

from __future__ import annotations

import torch

from ..config import BLOCK, MoEConfig
from ..errors import ConfigError
from ..wire import ALIGN, arena_layout, local_layout
from .device import require_real


def aligned_bytes(nbytes: int, device: torch.device, zero: bool) -> torch.Tensor:
    """uint8 [nbytes] whose address is a multiple of wire.ALIGN; zeroed or not."""
    make = torch.zeros if zero else torch.empty
    raw = require_real(make(nbytes + ALIGN, dtype=torch.uint8, device=device))
    start = -raw.data_ptr() % ALIGN
    return raw[start : start + nbytes]


def layer_weight_bytes(cfg: MoEConfig, world_size: int = 1) -> int:
    """Bytes of one layer's ExpertWeights on one rank: FP8 w13 and w2, and their fp32 scales."""
    experts, hidden, inner = cfg.experts_local(world_size), cfg.hidden, cfg.intermediate
    codes = experts * 3 * hidden * inner
    blocks = codes // (BLOCK * BLOCK) if cfg.scale == "block" else 2 * experts
    return codes + 4 * blocks


_SUMS = ("arena", "pools", "layer_weights", "total")


def _size(nbytes: int) -> str:
    """Bytes for people, numbers right-aligned."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:8.2f} {name}"
    return f"{nbytes:8d} B"


class MemoryEstimate(dict[str, int]):
    """What memory_estimate found: a dict of bytes by name that prints as a table of the arena's and pools' regions."""

    def __repr__(self) -> str:
        if not set(_SUMS) <= set(self) or not all(isinstance(value, int) for value in self.values()):
            return super().__repr__()  # somebody changed it
        symmetric = arena_layout(MoEConfig(BLOCK, BLOCK, 1, 1, 1), 1)  # for its names, which no config changes
        regions = [name for name in self if name not in _SUMS]
        lines: list[str] = []
        for total in _SUMS:
            lines.append(f"{total:18}{_size(self[total])}")
            if total in ("arena", "pools"):
                mine = (name for name in regions if (name in symmetric) == (total == "arena"))
                lines += [f"  {name:16}{_size(self[name])}" for name in mine]
        return "\n".join(lines)


def memory_estimate(cfg: MoEConfig, world_size: int = 1) -> MemoryEstimate:
    """Bytes of GPU memory on each rank, by name: a dict whose repr is a table in GiB and MiB.

    control, counts, lists, x, slots: regions of the arena, symmetric memory that peers read and write.
    send_counts ... pool_y: local regions. The two sums, which include alignment:
    arena, pools: once a workspace, that is, shared by all layers with equal MoEConfig on one World.
    layer_weights: FP8 weights and scales of one layer; every layer adds as much.
    total: arena + pools + layer_weights, one layer on its own.

    A virtual world holds world_size times this on its device or devices. NVSHMEM rounds what it takes
    for arenas up to its granularity (512 MiB unless NVSHMEM_CUMEM_GRANULARITY says otherwise). Not
    counted: under 1 KB of peer offsets and about 1 KB of scratch a workspace, outputs, and CUDA itself.

    Raises ConfigError when the config does not fit world_size.
    """
    if not isinstance(cfg, MoEConfig):
        raise ConfigError("cfg", cfg, "a MoEConfig")
    arena, local = arena_layout(cfg, world_size), local_layout(cfg, world_size)
    sizes = {region.name: region.nbytes for layout in (arena, local) for region in layout.values()}
    weights = layer_weight_bytes(cfg, world_size)
    sizes.update(arena=arena.nbytes, pools=local.nbytes, layer_weights=weights)
    sizes["total"] = arena.nbytes + local.nbytes + weights
    return MemoryEstimate(sizes)
