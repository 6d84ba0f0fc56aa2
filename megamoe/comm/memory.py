"""How much memory a layer takes, and aligned allocations."""

from __future__ import annotations

import torch

from ..config import BLOCK, MoEConfig
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


def memory_estimate(cfg: MoEConfig, world_size: int = 1) -> dict[str, int]:
    """Bytes of GPU memory on each rank, by name.

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
    arena, local = arena_layout(cfg, world_size), local_layout(cfg, world_size)
    sizes = {region.name: region.nbytes for layout in (arena, local) for region in layout.values()}
    weights = layer_weight_bytes(cfg, world_size)
    sizes.update(arena=arena.nbytes, pools=local.nbytes, layer_weights=weights)
    sizes["total"] = arena.nbytes + local.nbytes + weights
    return sizes
