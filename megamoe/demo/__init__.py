"""python -m megamoe demo: a DeepSeek-V3-shaped layer through the kernels, checked against the oracle and timed.

One process and one GPU; one process a GPU under torchrun; or --virtual N ranks on one GPU. Without a Hopper
GPU, compile_table.py does what can be done without one. Importing this imports neither CuTeDSL nor NVSHMEM.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from .. import reference
from ..comm import VirtualWorld, World, memory_estimate
from ..comm import world as group_world
from ..config import MoEConfig
from ..errors import ArgumentError, ConfigError, MegaMoEError, WorldError
from .problem import EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, DemoProblem, sample_rows

if TYPE_CHECKING:
    from .timing import Floor, Times

TOKENS = 512
RESERVE = 6 << 30
"""Bytes of a GPU left for the oracle, the ceilings, and what CUDA, NCCL and NVSHMEM take or round up."""


def why_no_gpu() -> str | None:
    """Why the kernels cannot run on this machine, or None."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    return None if (major, minor) == (9, 0) else f"this GPU is sm_{major}{minor}, not a Hopper GPU (sm_90)"


def choose_config(args: argparse.Namespace, world: World, free: int) -> MoEConfig:
    """The layer of the flags; without --experts DeepSeek-V3's 256, halved until they fit in `free` bytes of a GPU.

    Raises ConfigError when nothing fits, or when the flags' layer is not supported or doesn't fit.
    """

    def config(experts: int) -> MoEConfig:
        sizes = dict(hidden=HIDDEN, intermediate=INTERMEDIATE, num_experts=experts, top_k=min(TOP_K, experts))
        return MoEConfig(**sizes, max_tokens=args.tokens or TOKENS, fp8=args.fp8, scale=args.scale)

    def needed(cfg: MoEConfig) -> int:
        return len(world.local_ranks) * memory_estimate(cfg, world.size)["total"] + RESERVE

    experts = args.experts or EXPERTS // world.size * world.size
    while needed(config(experts)) > free:
        fewer = experts // 2 // world.size * world.size
        if args.experts or fewer < max(world.size, TOP_K):
            need, have = needed(config(experts)) >> 20, free >> 20
            raise ConfigError("experts", experts, f"fewer, or take fewer tokens: {need} MiB needed, {have} MiB free")
        experts = fewer
    return config(experts)


def print_times(stages: Times, whole: Times, floor: Floor, world: World) -> None:
    """The tables of rank 0."""
    several = world.size > 1
    print(f"\n{'kernel':12}{'us':>9}   events between the launches{' of rank 0' if several else ''}, median")
    for name, ms in stages.items():
        note = "   with its wait for other ranks" if several and name in ("pull", "reduce") else ""
        print(f"{name:12}{ms * 1e3:9.1f}{note}")
    print(f"{'sum':12}{sum(stages.values()) * 1e3:9.1f}")
    print(f"\n{'forward':12}{'us':>9}   time / floor")
    for name, ms in whole.items():
        print(f"{name:12}{ms * 1e3:9.1f}   {ms / floor.ms:.2f}")
    shared = "" if world.kind != "virtual" else ", for all ranks, which share this GPU"
    print(f"\n{'floor':12}{floor.ms * 1e3:9.1f}   the larger of{shared}")
    print(f"{'  weights':12}{floor.weights_ms * 1e3:9.1f}   {floor.experts_hit} experts hit", end="")
    print(f" at {floor.copy_speed / 1e12:.2f} TB/s (a device copy, read + written)")
    print(f"{'  products':12}{floor.products_ms * 1e3:9.1f}   {floor.rows} rows", end="")
    print(f" at {floor.rate / 1e12:.0f} TFLOPS (dense torch._scaled_mm of as many rows)")


def run_layer(args: argparse.Namespace, world: World) -> int:
    """Build the layer on an open world, check it, time it; 0 when the error is within its bound."""
    from ..layer import MegaMoE
    from .timing import Bench, forward_times, measure_floor, stage_times

    ranks = world.local_ranks
    device, quiet = world.device(ranks[0]), ranks[0] != 0
    say = (lambda text: None) if quiet else print
    cfg = choose_config(args, world, min(world.gather([torch.cuda.mem_get_info(device)[0]] * len(ranks), "memory")))
    tokens = cfg.max_tokens
    say(f"megamoe demo: {torch.cuda.get_device_name(device)}, {world.kind} world of {world.size} rank(s)")
    say(f"layer    hidden {cfg.hidden}, intermediate {cfg.intermediate}, {cfg.num_experts} experts, top-{cfg.top_k}")
    say(f"         {cfg.fp8}, {cfg.scale} scales; {tokens} bf16 tokens a rank, routed uniformly")
    group = dist.group.WORLD if world.kind == "nvshmem" else None
    problem = DemoProblem(cfg, device, quiet=quiet).calibrated(group)
    packs = [problem.pack(rank, world.size) for rank in ranks]
    torch.cuda.empty_cache()  # NVSHMEM takes its memory outside torch's allocator
    with MegaMoE(cfg, packs if world.kind == "virtual" else packs[0], world) as moe:
        say("         compiling and loading the kernels")
        moe.warmup()
        xs = [problem.tokens(rank, tokens) for rank in ranks]
        routes = [problem.routes(rank, tokens) for rank in range(world.size)]
        ids, weights = ([routes[rank][part] for rank in ranks] for part in (0, 1))
        bench = Bench(moe, problem, xs, ids, weights, [torch.full_like(x, float("nan")) for x in xs])
        bench.forward()
        moe.synchronize()
        rows = sample_rows(tokens, device)  # of each rank; the oracle computes no others
        error, bound = max(bench.errors()), reference.layer_bound(cfg, reference.live_routes(cfg, ids[0][rows]))
        good = error <= bound
        say(f"error    relative {error:.2e} (bound {bound:.2g}): {'good' if good else 'OUT OF BOUNDS'}; the worst rank")
        say(f"         against the torch oracle, {len(rows)} of its {tokens} tokens")
        stages, whole = stage_times(bench), forward_times(bench, device)
        floor = measure_floor(problem, [rank_ids for rank_ids, _ in routes], ranks, packs[0])
        if not quiet:
            print_times(stages, whole, floor, world)
    return 0 if good else 1


def open_world(args: argparse.Namespace, processes: int) -> World:
    """The world that the flags and torchrun's variables ask for. Raises ArgumentError, WorldError."""
    if processes > 1:
        if args.virtual:
            raise ArgumentError("--virtual", args.virtual, "left out under torchrun")
        local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local >= count:
            raise WorldError(f"process {local} of this node has no GPU of its own: start {count} at most")
        torch.cuda.set_device(local)
        dist.init_process_group("cpu:gloo,cuda:nccl")
    if args.virtual:
        return VirtualWorld(args.virtual, timeout_s=args.timeout_s)
    return group_world(timeout_s=args.timeout_s)


def main(args: argparse.Namespace) -> int:
    """Run the demo of the parsed flags (see __main__.parser) and return the exit status."""
    processes, reason = int(os.environ.get("WORLD_SIZE", "1")), why_no_gpu()
    try:
        if reason is not None:
            from . import compile_table

            return compile_table.main(args, reason, processes) if os.environ.get("RANK", "0") == "0" else 0
        with open_world(args, processes) as world:
            status = run_layer(args, world)
        if processes > 1:
            dist.destroy_process_group()
        return status
    except MegaMoEError as error:
        print(f"megamoe demo: {error}", file=sys.stderr)
        return 1
