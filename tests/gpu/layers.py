"""Whole layers on virtual ranks against the oracle."""

from __future__ import annotations

from contextlib import contextmanager

import torch

from megamoe import MegaMoE, MoEConfig, VirtualWorld, reference
from megamoe.comm import SingleWorld
from megamoe.forward import STAGES
from tests.problems import Problem, make_inputs, make_weights

DEVICE = "cuda"


@contextmanager
def open_layer(
    cfg: MoEConfig, world_size: int, *, seed: int = 0, virtual: bool = True, timeout_s: float = 20, **kwargs
):
    """(world, packs, layer), warmed up, on one GPU."""
    with VirtualWorld(world_size, timeout_s=timeout_s) if virtual else SingleWorld(timeout_s=timeout_s) as world:
        packs = make_weights(cfg, world_size, seed, DEVICE)
        with MegaMoE(cfg, packs if virtual else packs[0], world, **kwargs) as moe:
            moe.warmup()
            yield world, packs, moe


def oracle(cfg: MoEConfig, packs, p: Problem) -> list[torch.Tensor]:
    """The reference layer's y of each rank."""
    return reference.layer(cfg, [pack.canonical() for pack in packs], p.xs, p.ids, p.weights)


def poisoned_forward(moe: MegaMoE, p: Problem) -> list[torch.Tensor]:
    """Poison every buffer, run, check that nothing aborted."""
    moe._workspace.poison()
    outs = [torch.full_like(x, float("nan")) for x in p.xs]
    moe(p.xs, p.ids, p.weights, out=outs)
    moe.synchronize()
    return outs


def check(cfg: MoEConfig, ys: list[torch.Tensor], refs: list[torch.Tensor], ids: list[torch.Tensor]) -> float:
    """Assert DESIGN's bound on all ranks together, routed by ids; returns the error."""
    error = reference.relative_error(torch.cat(ys), torch.cat(refs))
    bound = reference.layer_bound(cfg, reference.live_routes(cfg, ids))
    assert error <= bound, f"relative error {error:.3e} above {bound:.1e}"
    return error


def run_and_check(cfg: MoEConfig, moe: MegaMoE, packs, tokens: list[int], kind: str, seed: int) -> float:
    """One poisoned forward against the oracle."""
    p = make_inputs(cfg, tokens, kind, seed, DEVICE)
    return check(cfg, poisoned_forward(moe, p), oracle(cfg, packs, p), p.ids)


def launch_one(moe: MegaMoE, p: Problem, outs: list[torch.Tensor], rank: int) -> None:
    """Enqueue the forward of one virtual rank on its stream."""
    for step in moe.steps(rank, p.xs[rank], p.ids[rank], p.weights[rank], outs[rank]):
        step()


def launch_held(moe: MegaMoE, p: Problem, outs: list[torch.Tensor], late: int, kernel: str, cycles: int) -> None:
    """Enqueue all ranks' forwards kernel by kernel; rank `late` sleeps for `cycles` in front of `kernel`."""
    torch.cuda._sleep(1)  # loads it: a module load would wait for the ranks that wait for the late one
    torch.cuda.synchronize()
    for rank in moe.world.local_ranks:
        steps = moe.steps(rank, p.xs[rank], p.ids[rank], p.weights[rank], outs[rank])
        for name, step in zip(STAGES, steps):
            if (rank, name) == (late, kernel):
                with torch.cuda.stream(moe.world.stream(rank)):
                    torch.cuda._sleep(cycles)
            step()
