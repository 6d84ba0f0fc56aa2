"""Section e2e of tools/bench.py: whole forwards, in turns with those of one peer after the other.

A peer runs all its points before the next peer starts, so that it makes its weights once and only one peer's memory
is held. At each point its forwards and ours take turns; our row is of the samples of all its turns, and its
over_<peer> of those beside that peer alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import floors
import layers
import peers
import timing
import torch
from peers import measure
from records import OURS

if TYPE_CHECKING:
    from bench import Bench
    from inputs import Problem
    from layers import Setup

Point = tuple[str, int]
HALVED_TOKENS = 2048
"""Above this T half as many samples are taken, and the usual sleep is enough."""

LONG_GAP_US = 3000


class Ours(NamedTuple):
    """What a point's rows share, and our samples and ratios by way of launching."""

    shared: dict[str, Any]
    flops: float
    traffic: dict[str, int]
    samples: dict[str, list[float]]
    ratios: dict[str, dict[str, float]]


def run_e2e(b: Bench, s: Setup) -> None:
    """Rows at every routing and T: eager behind a GPU sleep (so launches do not count), and replays of a graph."""
    points = [(kind, tokens) for kind in b.args.routing for tokens in b.args.tokens]
    found: dict[Point, Ours] = {}
    try:
        for peer in peers.make(b.args.layer_peers):
            peer.compiling = b.turns.lent
            try:
                for point in points:
                    _beside(b, s, peer, point, found)
            finally:
                peer.close()
                torch.cuda.empty_cache()
        for point in points:
            if point not in found:
                _alone(b, s, point, found)
    finally:  # also of a run that ends here
        for point in points:
            if point in found:
                _add_ours(b, s, point, found[point])


def _samples(b: Bench, tokens: int) -> int:
    """Rounds at a T."""
    return b.args.runs * 3 // (2 if tokens <= HALVED_TOKENS else 4)


def _measure(b: Bench, launches: dict[Any, layers.Launch], tokens: int) -> dict[Any, list[float]]:
    """Samples of launches in turns, behind a sleep that covers a peer's host time too where forwards are short."""
    gap = contextlib.nullcontext() if tokens > HALVED_TOKENS else b.clock.gap(LONG_GAP_US)
    with gap:
        return measure.interleave(b.clock, launches, _samples(b, tokens))


def _launches(s: Setup, made: Problem) -> dict[str, layers.Launch]:
    """Our forwards by way of launching; layers take turns where there are several."""
    each = [layers.forward(moe, made) for moe in s.layers(made.tokens)]
    return {"eager": layers.in_turns(each), "graph": layers.in_turns([layers.captured(one) for one in each])}


def _note(b: Bench, s: Setup, made: Problem, samples: dict[str, list[float]], found: dict[Point, Ours]) -> Ours:
    """Keep our samples of a point."""
    point = made.kind, made.tokens
    if point not in found:
        rates = b.rates(s.cfg, made.most_rows)
        floor = floors.forward_floor(s.cfg, made.traffics, b.ceilings, rates, b.virtual)
        flops = floors.forward_flops(s.cfg, made.traffics)
        found[point] = Ours(floor, flops, floors.spread(made.traffics), {}, {})
    for name, values in samples.items():
        found[point].samples.setdefault(name, []).extend(values)
    return found[point]


def _alone(b: Bench, s: Setup, point: Point, found: dict[Point, Ours]) -> None:
    """Measure a point without a peer."""
    b.say(f"e2e {s.scale} {point[0]} T={point[1]}")
    made = b.problem(s.cfg, *point)
    samples = _measure(b, _launches(s, made), point[1])
    _note(b, s, made, {name: b.clock.slowest(values, f"e2e {name}") for name, values in samples.items()}, found)
    layers.finish(s.layer(), made)


def _beside(b: Bench, s: Setup, peer: peers.Peer, point: Point, found: dict[Point, Ours]) -> None:
    """Measure a point in turns with a peer, and add the peer's rows, or one that says why it has none."""
    kind, tokens = point
    b.say(f"e2e {s.scale} {kind} T={tokens} {peer.name}")
    head = dict(what="e2e", impl=peer.name, scale=s.scale, routing=kind, T=tokens)
    if b.virtual:
        b.add(**head, name="eager", skipped="ranks of --virtual share a process, its are one each")
        return
    made = b.problem(s.cfg, kind, tokens)
    where = peers.Point(s.cfg, b.world.size, b.rank, tokens, b.device)
    reason = measure.ready(b.world, peer, where, s.experts(), made.first)
    theirs: dict[str, layers.Launch] = {}
    if reason is None:
        theirs, reason, skipped = _peer_launches(b, s, peer, made)
        for name, why in skipped.items():
            b.add(**head, name=name, note=peer.note, skipped=why)
    if reason is not None:
        b.add(**head, name="eager", note=peer.note, skipped=reason)
        return
    ours = _launches(s, made)
    named = {(OURS, name): go for name, go in ours.items()} | {(peer.name, name): go for name, go in theirs.items()}
    samples = _measure(b, named, tokens)
    slowest = {(who, name): b.clock.slowest(v, f"e2e {who} {name}") for (who, name), v in samples.items()}
    layers.finish(s.layer(), made)
    kept = _note(b, s, made, {name: slowest[OURS, name] for name in ours}, found)
    for name in theirs:
        times = timing.summary(slowest[peer.name, name])
        row = dict(times, runs=_samples(b, tokens), note=peer.note, **_figures(times["us"], kept))
        if name in ours:
            row["ours_us"] = median(slowest[OURS, name])
            kept.ratios.setdefault(name, {}).update(measure.ratios(row["ours_us"], {peer.name: times["us"]}))
        b.add(**head, name=name, **row)


def _peer_launches(
    b: Bench, s: Setup, peer: peers.Peer, made: Problem
) -> tuple[dict[str, layers.Launch], str | None, dict[str, str]]:
    """A prepared peer's launches by name, or why its result is not this layer's; and why some are left out.
    Collective."""
    layers.forward(s.layer(), made)()
    reason = measure.first_reason(b.world, measure.differs(peer.run(), made.ys[0]), f"{peer.name} result")
    found, skipped = {"eager": peer.run}, {}
    if reason is not None:
        return {}, reason, {}
    makers: dict[str, Callable[[], layers.Launch]] = {"compute": lambda: peer.parts().get("compute")}
    if peer.graphable:
        makers["graph"] = lambda: measure.capture(peer).replay
    for name, maker in makers.items():
        why = launch = None
        try:
            launch = maker()
        except Exception as error:  # whatever a library raises
            why = f"{type(error).__name__}: {error}".splitlines()[0]
        why = measure.first_reason(b.world, why, f"{peer.name} {name}")
        if why is not None:
            skipped[name] = why
        elif launch is not None:
            found[name] = launch
    return found, None, skipped


def _figures(us: float, kept: Ours) -> dict[str, Any]:
    """Keys that follow from a time: TFLOPS of a rank, the floor and the distance from it."""
    floor = kept.shared["floor_us"]
    return dict(kept.shared, tflops=kept.flops / us / 1e6, over_floor=us / floor if floor else float("nan"))


def _add_ours(b: Bench, s: Setup, point: Point, kept: Ours) -> None:
    """Our rows of a point."""
    kind, tokens = point
    tile, packs = b.knobs(s.cfg, b.world.size, tokens).tile_rows, len(s.layers(tokens))
    head = dict(what="e2e", impl=OURS, scale=s.scale, routing=kind, T=tokens, tile_rows=tile, packs=packs)
    for name, values in kept.samples.items():
        times = timing.summary(values)
        row = dict(times, runs=len(values), traffic=kept.traffic, **_figures(times["us"], kept))
        b.add(**head, name=name, **row, **kept.ratios.get(name, {}))
