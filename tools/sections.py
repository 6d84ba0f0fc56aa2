"""The sections of tools/bench.py but e2e and gemm: what is launched, and which rows come of it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from statistics import median
from typing import TYPE_CHECKING, Any

import floors
import layers
import timing
from forwards import run_e2e
from gemms import run_gemm

if TYPE_CHECKING:
    from bench import Bench
    from inputs import Problem
    from layers import Setup

ALIGNED = ("pull", "token_back", "reduce")
"""Kernels before which ranks meet outside of the timed stretch."""

REPEATS = 4
"""How often pull and token_back run in a row in the second pass of `link`. Both may be repeated within a forward:
they read what the first launch read and write the same again, flags included, and ranks meet before reduce."""


def run_ceilings(b: Bench) -> None:
    """Rows of the speeds that were measured at the start."""
    for speed in b.speeds:
        row: dict[str, Any] = dict(what="ceilings", name=speed.name, us=speed.us, runs=b.args.runs // 2)
        if speed.nbytes:
            row |= dict(bytes=speed.nbytes, gbps=speed.nbytes / speed.us / 1e3)
        if speed.flops:
            row["tflops"] = speed.flops / speed.us / 1e6
        b.add(**row)


def run_forwards(b: Bench, s: Setup, what: str, kind: str, tokens: int, names: Collection[str]) -> None:
    """Rows of the kernels `names`, timed inside whole forwards of `tokens` tokens a rank."""
    from megamoe.forward import STAGES

    b.say(f"{what} {s.scale} {kind} T={tokens}")
    used, made = s.layers(tokens), b.problem(s.cfg, kind, tokens)
    rates = b.rates(s.cfg, made.most_rows)
    sets = [layers.steps(b, moe, made) for moe in used]
    everyone = b.gather(_times(b, sets), f"{what} times")
    again = everyone
    if what == "link":
        repeated = [name in names for name in STAGES]
        sets = [[layers.repeated(go, REPEATS) if r else go for go, r in zip(steps, repeated)] for steps in sets]
        again = b.gather(_times(b, sets), f"{what} times, repeated")
    layers.finish(used[0], made)
    tile = b.knobs(s.cfg, b.world.size, tokens).tile_rows
    for index, name in enumerate(STAGES):
        if name not in names:
            continue
        rank = max(range(len(everyone)), key=lambda r: everyone[r][index]["us"])
        costs = [floors.stage_costs(s.cfg, t)[name] for t in made.traffics]
        cost, times = floors.together(costs) if b.virtual else costs[rank], everyone[rank][index]
        row = floors.measured(cost, times["us"], b.ceilings, rates.get(name, 0.0)) | times
        if name in ("stage", "reduce"):
            row["copy_share"] = 1e9 * row["gbps"] / b.ceilings.hbm_copy
        if what == "link":
            each = [(more[index]["us"] - one[index]["us"]) / (REPEATS - 1) for more, one in zip(again, everyone)]
            row |= _each(cost, each[rank])
            if min(each) > 0:
                row |= floors.directions(costs, made.traffics, each)
        point = dict(what=what, name=name, impl="megamoe", scale=s.scale, routing=kind, T=tokens, tile_rows=tile)
        point |= dict(runs=b.args.runs, packs=len(used), traffic=floors.spread(made.traffics))
        b.add(**point, **row, **({} if b.virtual else {"rank": rank}))


def _times(b: Bench, sets: list[list[layers.Launch]]) -> list[dict[str, float]]:
    """Each launch's summary, of rounds that take turns with the sets."""
    from megamoe.forward import STAGES

    aligned = [STAGES.index(name) for name in ALIGNED]
    samples = b.clock.steps(layers.steps_in_turns(sets), b.args.runs, aligned=aligned)
    return [timing.summary(sample) for sample in samples]


def _each(cost: floors.Cost, us: float) -> dict[str, float]:
    """Keys of a launch among others in a row, without the event pair and the launch itself."""
    if us <= 0:  # less than the clock's noise
        return {}
    row = {"us_each": us, "gbps_each": cost.moved / us / 1e3}
    return row | ({"link_gbps_each": cost.link / us / 1e3} if cost.link else {})


def run_stages(b: Bench, s: Setup) -> None:
    """Every kernel at every routing and T."""
    from megamoe.forward import STAGES

    for kind in b.args.routing:
        for tokens in b.args.tokens:
            run_forwards(b, s, "stages", kind, tokens, STAGES)


def run_link(b: Bench, s: Setup) -> None:
    """pull and token_back with every route remote."""
    for tokens in floors.link_tokens(s.cfg, b.args.quick):
        if tokens <= s.cfg.max_tokens:
            run_forwards(b, s, "link", "all_remote", tokens, ("pull", "token_back"))


def run_host(b: Bench, s: Setup) -> None:
    """Host time of a forward at the smallest T, y allocated by the call, and of its launches alone: 5 batches of
    calls, the collector off."""
    moe, tokens = s.layer(), b.args.tokens[0]
    for kind in b.args.routing:
        b.say(f"host {s.scale} {kind}")
        made: Problem = b.problem(s.cfg, kind, tokens)
        launches = layers.steps(b, moe, made)
        calls = {
            "eager": lambda: moe(made.xs, made.ids, made.weights) if b.virtual else moe(*made.first),  # noqa: B023
            "launches": lambda: [launch() for launch in launches],  # noqa: B023
        }
        size = 50 // len(b.world.local_ranks)
        for name, call in calls.items():
            b.clock.host(call, batches=1, batch=20 // len(b.world.local_ranks))
            batches = b.clock.host(call, batches=5, batch=size)
            moe.synchronize()
            middle = [median(batch) for batch in batches]
            times = timing.summary([us for batch in batches for us in batch])
            times |= dict(us=median(middle), us_min=min(middle))
            times = max(b.gather(times, "host times"), key=lambda of_rank: of_rank["us"])
            point = dict(what="host", name=name, impl="megamoe", scale=s.scale, routing=kind, T=tokens)
            b.add(**point, **times, runs=5 * size, batches=5, note="garbage collector off within a batch, no pinning")


RUN: dict[str, Callable[[Bench, Setup], None]] = {
    "stages": run_stages,
    "link": run_link,
    "gemm": run_gemm,
    "e2e": run_e2e,
    "host": run_host,
}
"""Sections of a scale mode by name; options.SECTIONS has their order."""
