"""The sections of tools/bench.py: what is launched, and which rows come of it."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, Any

import floors
import torch

from megamoe import MegaMoE

if TYPE_CHECKING:
    from bench import Bench

GEMM_ROWS, QUICK_GEMM_ROWS = (1, 64, 256, 512, 1024), (1, 64, 512)
"""Rows an expert, in ascending order."""

GEMM_EXPERTS = 32
ALIGNED = ("pull", "token_back", "reduce")
"""Kernels before which ranks meet outside of the timed stretch."""


def run_ceilings(b: Bench) -> None:
    """Rows of the speeds that were measured at the start."""
    for speed in b.speeds:
        row: dict[str, Any] = dict(what="ceilings", name=speed.name, us=speed.us, runs=b.args.runs // 2)
        if speed.nbytes:
            row |= dict(bytes=speed.nbytes, gbps=speed.nbytes / speed.us / 1e3)
        if speed.flops:
            row["tflops"] = speed.flops / speed.us / 1e6
        b.add(**row)


def run_forwards(b: Bench, what: str, scale: str, kind: str, tokens: int, names: tuple[str, ...]) -> None:
    """Rows of the kernels `names`, timed inside whole forwards of `tokens` tokens a rank."""
    from megamoe.forward import STAGES, Call
    from megamoe.inputs import check_inputs
    from megamoe.kernels import build

    moe, cfg = b.layer(scale), b.configs[scale]
    b.say(f"{what} {scale} T={tokens}")
    made, traffics = b.problem(scale, kind, tokens)
    rates = b.rates(cfg, max(t.rows for t in traffics))
    knobs = b.knobs(cfg, b.world.size, tokens)
    y = torch.empty_like(made[0])
    call = Call.of(check_inputs(cfg, b.device, *made), y)
    launches = moe._forwards[knobs][0].steps(call, build.stream_handle(b.device))
    aligned = [STAGES.index(name) for name in ALIGNED]
    samples = b.clock.steps(launches, b.args.runs, aligned=aligned)
    finish(moe, y)
    medians = b.world.gather([[median(sample) for sample in samples]], f"{what} times")
    for index, name in enumerate(STAGES):
        if name in names:
            rank = max(range(b.world.size), key=lambda r: medians[r][index])
            cost = floors.stage_costs(cfg, traffics[rank])[name]
            row = floors.measured(cost, medians[rank][index], b.ceilings, rates.get(name, 0.0))
            if name in ("stage", "reduce"):
                row["copy_share"] = 1e9 * row["gbps"] / b.ceilings.hbm_copy
            point = dict(what=what, name=name, scale=scale, routing=kind, T=tokens, tile_rows=knobs.tile_rows)
            b.add(**point, **row, runs=b.args.runs, rank=rank, traffic=floors.spread(traffics))


def finish(moe: MegaMoE, y: torch.Tensor) -> None:
    """Raise if a forward aborted or its result is not finite: then the times mean nothing."""
    moe.synchronize()
    if not bool(y.isfinite().all()):
        raise RuntimeError("a forward's result is not finite")


def run_stages(b: Bench) -> None:
    """Every kernel at every T."""
    from megamoe.forward import STAGES

    for scale in b.args.scales:
        for tokens in b.args.tokens:
            run_forwards(b, "stages", scale, b.args.routing, tokens, STAGES)


def run_link(b: Bench) -> None:
    """pull and token_back with every route remote."""
    for scale in b.args.scales:
        for tokens in floors.link_tokens(b.configs[scale], b.args.quick):
            if tokens <= b.configs[scale].max_tokens:
                run_forwards(b, "link", scale, "all_remote", tokens, ("pull", "token_back"))


def run_gemm(b: Bench) -> None:
    """fc1 and fc2 alone on balanced rows of the first GEMM_EXPERTS experts; fc2 reads what fc1 wrote."""
    from megamoe import kernels, reference, wire

    sizes = QUICK_GEMM_ROWS if b.args.quick else GEMM_ROWS
    for scale in b.args.scales:
        pack, cfg = b.pack(scale), b.configs[scale]
        experts = min(GEMM_EXPERTS, pack.experts_local)
        most = experts * max(sizes)
        tokens = torch.randn(most, cfg.hidden, device=b.device, dtype=torch.bfloat16)
        x = kernels.pack_rows(*reference.stage(cfg, tokens, pack.x_scale), wire.input_format(cfg))
        act = torch.zeros(most, wire.activation_format(cfg).pitch, dtype=torch.uint8, device=b.device)
        y = torch.empty_like(tokens)
        weights = torch.ones(most, device=b.device)
        for each in sizes:
            b.say(f"gemm {scale} {each} rows")
            rows = experts * each
            ends = torch.arange(pack.experts_local + 1, device=b.device) * each
            start = ends.clamp(max=rows).to(torch.int32)
            tile = b.knobs(cfg, 1, rows * cfg.num_experts // (experts * cfg.top_k))
            args = {
                "fc1": (kernels.fc1, x[:rows], start, pack, weights[:rows], tile, act[:rows]),
                "fc2": (kernels.fc2, act[:rows], start, pack, weights[:rows], tile, y[:rows]),
            }
            costs, rates = floors.gemm_costs(cfg, rows, experts), b.rates(cfg, rows)
            for name, (kernel, *inputs, out) in args.items():
                samples = b.clock.op(bind(kernel, *inputs, out=out), b.args.runs)
                samples = b.clock.slowest(samples, "gemm times")
                row = floors.measured(costs[name], median(samples), b.ceilings, rates[name])
                point = dict(what="gemm", name=name, scale=scale, rows_per_expert=each, tile_rows=tile.tile_rows)
                b.add(**point, **row, us_min=min(samples), runs=b.args.runs, experts=experts)
        if not bool(y.isfinite().all()):
            raise RuntimeError("fc2's result is not finite")


def bind(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[[], Any]:
    """The call without arguments."""
    return lambda: function(*args, **kwargs)


def run_e2e(b: Bench) -> None:
    """Whole forwards at every T: eager behind a GPU sleep (so launches do not count), and replays of a graph."""
    runs = max(b.args.runs, 30)
    for scale in b.args.scales:
        moe, cfg = b.layer(scale), b.configs[scale]
        for tokens in b.args.tokens:
            b.say(f"e2e {scale} T={tokens}")
            made, traffics = b.problem(scale, b.args.routing, tokens)
            rates = b.rates(cfg, max(t.rows for t in traffics))
            y = torch.empty_like(made[0])
            eager = bind(moe, *made, out=y)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                eager()
            floor = 0.0, ""
            for t in traffics:
                costs = floors.stage_costs(cfg, t)
                dense = [rates.get(name, 0.0) for name in costs]
                floor = max(floor, floors.floor_us(list(costs.values()), b.ceilings, dense))
            for name, launch in (("eager", eager), ("graph", graph.replay)):
                samples = b.clock.slowest(b.clock.op(launch, runs), "e2e times")
                us = median(samples)
                point = dict(what="e2e", name=name, scale=scale, routing=b.args.routing, T=tokens)
                point |= dict(tile_rows=b.knobs(cfg, b.world.size, tokens).tile_rows, runs=runs)
                times = dict(us=us, us_min=min(samples), floor_us=floor[0], floor_by=floor[1], over_floor=us / floor[0])
                b.add(**point, **times, traffic=floors.spread(traffics))
            finish(moe, y)
            del graph


def run_host(b: Bench) -> None:
    """Host time of a forward at the smallest T, y allocated by the call."""
    for scale in b.args.scales:
        moe, tokens = b.layer(scale), b.args.tokens[0]
        b.say(f"host {scale}")
        made, _ = b.problem(scale, b.args.routing, tokens)
        call = bind(moe, *made)
        b.clock.host(call, 20)
        samples = b.clock.host(call, 200)
        moe.synchronize()
        us = max(b.world.gather([median(samples)], "host medians"))
        b.add(what="host", name="eager", scale=scale, T=tokens, us=us, us_min=min(samples), runs=len(samples))


RUN: dict[str, Callable[[Bench], None]] = {
    "ceilings": run_ceilings,
    "stages": run_stages,
    "link": run_link,
    "gemm": run_gemm,
    "e2e": run_e2e,
    "host": run_host,
}
"""Sections by name; floors.COLUMNS has their order."""
