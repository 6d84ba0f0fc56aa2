"""Host checks of what a layer is made of."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from .comm.world import World
from .config import Knobs, MoEConfig, check_num_sms
from .errors import ConfigError
from .forward import check_knobs
from .weights import ExpertWeights


def check_layer(cfg: MoEConfig, packs: list[ExpertWeights], world: World, knobs: Knobs | None, num_sms: Any) -> None:
    """Refuse arguments that cannot make a layer on this rank. Raises ConfigError."""
    if not isinstance(cfg, MoEConfig):
        raise ConfigError("cfg", type(cfg).__name__, "a MoEConfig")
    if not all(isinstance(pack, ExpertWeights) for pack in packs):
        raise ConfigError("experts", [type(pack).__name__ for pack in packs], "ExpertWeights")
    if len(packs) != len(world.local_ranks):
        raise ConfigError("experts", f"{len(packs)} packs", f"{len(world.local_ranks)}, one a rank of this process")
    if knobs is not None and not isinstance(knobs, Knobs):
        raise ConfigError("knobs", type(knobs).__name__, "None or Knobs")
    check_num_sms(num_sms)
    local = cfg.experts_local(world.size)
    for rank, pack in zip(world.local_ranks, packs):
        if pack.cfg != cfg:
            of_pack, of_layer = ({f.name: getattr(c, f.name) for f in fields(cfg)} for c in (pack.cfg, cfg))
            other = {name: value for name, value in of_pack.items() if value != of_layer[name]}
            raise ConfigError("experts.cfg", other, f"as in cfg ({ ({name: of_layer[name] for name in other}) })")
        if pack.experts_local != local:
            raise ConfigError("experts", f"{pack.experts_local} experts", f"num_experts / W = {local}")
        if pack.device != world.device(rank):
            raise ConfigError("experts.device", str(pack.device), str(world.device(rank)))
        if (pack.x_scale, pack.act_scale) != (packs[0].x_scale, packs[0].act_scale):
            scales = [(p.x_scale, p.act_scale) for p in packs]
            raise ConfigError("experts", f"(x_scale, act_scale) {scales}", "equal static scales on every rank")
    if knobs is not None:
        check_knobs(cfg, world.size, knobs)


def choose_backend(backend: Any, world: World) -> str:
    """ "kernels" or "reference". Raises ConfigError for a backend that the world cannot run."""
    on_cpu = any(world.device(rank).type == "cpu" for rank in world.local_ranks)
    if backend is None:
        return "reference" if on_cpu else "kernels"
    if backend not in ("kernels", "reference"):
        raise ConfigError("backend", backend, "None, 'kernels' or 'reference'")
    if backend == "kernels" and on_cpu:
        raise ConfigError("backend", backend, "None or 'reference' on a CPU")
    if backend == "reference" and world.kind == "nvshmem":
        raise ConfigError("backend", backend, "None or 'kernels' with one process a GPU: the oracle sends nothing")
    return backend
