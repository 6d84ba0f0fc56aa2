"""Section gemm of tools/bench.py: fc1 and fc2 alone, in every setting of --knobs and in turns with the peers' products.

All that is measured at a point runs on the same rows and weights, in turns, each sample behind the same idle gap
(--gap-us): heat, clocks and the power limit are shared, and nobody gains by running first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import floors
import inputs
import layers
import peers
import timing
import torch
from peers import measure
from records import OURS

from megamoe.config import Knobs, MoEConfig
from megamoe.errors import ConfigError

if TYPE_CHECKING:
    from bench import Bench
    from layers import Setup

CHUNK = 8192
"""Tokens quantised at a time: the reference takes several times their memory."""

MEMORY_SHARE = 0.8
"""Of the free memory, what rows may take."""


class Pool(NamedTuple):
    """Rows for the largest size. x, act: records that fc1 reads and writes. y bf16 [R, H]; weights fp32 [R]."""

    x: torch.Tensor
    act: torch.Tensor
    y: torch.Tensor
    weights: torch.Tensor


class Products(NamedTuple):
    """One product at a point. run(knobs) launches it; knobs by text of --knobs; inputs: what peers read; out: what it
    writes, records (fc1) or y (fc2)."""

    point: peers.GemmPoint
    skew: str
    run: Callable[[Knobs], Any]
    knobs: dict[str, Knobs]
    inputs: tuple
    out: torch.Tensor


def run_gemm(b: Bench, s: Setup) -> None:
    """Rows of fc1 and fc2 on rows of the first --gemm-experts experts; fc2 reads what fc1 wrote."""
    from megamoe import wire

    cfg, sizes = s.cfg, b.args.gemm_rows
    experts = fit_experts(b, cfg, min(b.args.gemm_experts, s.packs()[0].experts_local), sizes[-1])
    most = experts * sizes[-1]
    pool = Pool(
        _records(b, s, most),
        torch.zeros(most, wire.activation_format(cfg).pitch, dtype=torch.uint8, device=b.device),
        torch.zeros(most, cfg.hidden, dtype=torch.bfloat16, device=b.device),
        torch.ones(most, device=b.device),
    )
    with b.clock.gap(b.args.gap_us):
        for each in sizes:
            for skew in b.args.gemm_skew:
                _run_size(b, s, pool, experts, each, skew)


def fit_experts(b: Bench, cfg: MoEConfig, wanted: int, each: int) -> int:
    """`wanted`, halved until `each` rows of so many experts fit in free memory, copies of peers included."""
    from megamoe import wire

    torch.cuda.empty_cache()
    free = min(b.gather(torch.cuda.mem_get_info(b.device)[0], "free"))
    widest = max(2 * cfg.intermediate, cfg.hidden)
    row = 2 * wire.input_format(cfg).pitch + wire.activation_format(cfg).pitch + 2 * cfg.hidden + 4
    row += len(b.args.gemm_peers) * (wire.input_format(cfg).pitch + 2 * widest)
    if len(b.args.settings) > 1:  # the first one's result and a comparison's flags
        row += max(wire.activation_format(cfg).pitch, 2 * cfg.hidden) * 9 // 8
    weights = floors.weight_bytes(cfg, widest, cfg.hidden)  # DeepGEMM's copy
    while wanted > 1 and wanted * (each * row + weights) > MEMORY_SHARE * free:
        wanted //= 2
    return wanted


def _records(b: Bench, s: Setup, rows: int) -> torch.Tensor:
    """Row records of random tokens, uint8 [rows, pitch]."""
    from megamoe import kernels, reference, wire

    fmt = wire.input_format(s.cfg)
    records = torch.empty(rows, fmt.pitch, dtype=torch.uint8, device=b.device)
    for first in range(0, rows, CHUNK):
        part = records[first : first + CHUNK]
        tokens = torch.randn(len(part), s.cfg.hidden, device=b.device, dtype=torch.bfloat16)
        part.copy_(kernels.pack_rows(*reference.stage(s.cfg, tokens, s.packs()[0].x_scale), fmt))
    return records


def row_starts(counts: tuple[int, ...], local: int) -> torch.Tensor:
    """int32 [local + 1]: where the rows of each of `local` experts start, and the last end; counts: of the first."""
    starts = torch.full((local + 1,), sum(counts))
    starts[0] = 0
    starts[1 : len(counts) + 1] = torch.tensor(counts).cumsum(0)
    return starts.to(torch.int32)


def _run_size(b: Bench, s: Setup, pool: Pool, experts: int, each: int, skew: str) -> None:
    """Rows of both products at one number of rows and one skew."""
    from megamoe import kernels, wire
    from megamoe.sched import heuristics

    cfg, pack, rows = s.cfg, s.packs()[0], experts * each
    uneven = None if skew == "balanced" else inputs.zipf_counts(rows, experts, b.args.seed)
    counts = uneven or (each,) * experts
    start = row_starts(counts, pack.experts_local).to(b.device)
    x, act, y, weights = (tensor[:rows] for tensor in pool)
    auto = heuristics.choose_knobs(cfg, 1, each * cfg.num_experts // cfg.top_k)
    knobs = {text: given or auto for text, given in b.args.settings.items()}
    tickets = torch.zeros(2, dtype=torch.int32, device=b.device)
    run = {
        "fc1": lambda how: kernels.fc1(x, start, pack, weights, how, out=act, tickets=tickets),
        "fc2": lambda how: kernels.fc2(act, start, pack, weights, how, out=y, tickets=tickets),
    }
    read = {"fc1": (x, wire.input_format(cfg)), "fc2": (act, wire.activation_format(cfg))}
    for name in b.args.gemms:
        if name == "fc2":
            run["fc1"](auto)  # its input, whatever the settings of fc1 left there
        b.say(f"gemm {s.scale} {name} {each} rows {skew}")
        point = peers.GemmPoint(cfg, name, experts, each, b.device, uneven)
        records, fmt = read[name]
        operands = kernels.unpack_rows(records, fmt, cfg.fp8)
        _point(b, s, Products(point, skew, run[name], knobs, operands, y if name == "fc2" else act))


def _launches(b: Bench, made: Products) -> tuple[dict[str, layers.Launch], dict[str, str]]:
    """Our launches by text of --knobs, each having run once, and why settings are not timed: they cannot run, or give
    other bits than the first that ran. RuntimeError when one leaves something in y that is not finite. Collective."""
    launches, refused = {}, {}
    first: torch.Tensor | None = None
    for text, how in made.knobs.items():
        made.out.view(torch.uint8).fill_(0xFF)  # NaN in every format
        try:
            made.run(how)
        except ConfigError as error:
            refused[text] = str(error)
            continue
        if made.out.is_floating_point() and not bool(made.out.sum(dtype=torch.float32).isfinite()):
            raise RuntimeError(f"fc2's result is not finite with knobs {text}")
        bits = made.out.view(torch.int64)
        if first is None:
            first = bits.clone() if len(made.knobs) > 1 else bits
        else:
            why = None if torch.equal(bits, first) else f"its result differs from that of {next(iter(launches))}"
            why = measure.first_reason(b.world, why, f"{made.point.name} {text}")
            if why is not None:
                refused[text] = why
                continue
        launches[text] = lambda how=how: made.run(how)
    return launches, refused


def _point(b: Bench, s: Setup, made: Products) -> None:
    """Measure one product in turns with all peers that can run it, and add everyone's rows."""
    pack, point = s.packs()[0], made.point
    hit = sum(count > 0 for count in point.counts)
    cost = floors.gemm_costs(point.cfg, point.rows, hit)[point.name]
    rate = b.rates(point.cfg, point.rows)[point.name]
    head: dict[str, Any] = dict(what="gemm", name=point.name, scale=s.scale, rows_per_expert=point.rows_per_expert)
    head |= dict(experts=point.experts, gap_us=b.args.gap_us)
    if point.uneven is not None:
        head |= dict(skew=made.skew, most_rows=max(point.counts), experts_hit=hit)
    own = {text: dict(knobs=text) if len(made.knobs) > 1 else {} for text in made.knobs}
    ours, refused = _launches(b, made)
    for text, why in refused.items():
        b.add(**head, impl=OURS, **own[text], skipped=why)
    running = []
    launches: dict[Any, layers.Launch] = {(OURS, text): go for text, go in ours.items()}
    chosen = peers.make(b.args.gemm_peers, peers.GEMM_PEERS)
    try:
        for peer in chosen:
            reason = measure.ready(b.world, peer, point, pack, made.inputs)
            if reason is None:
                why = measure.differs(*peer.check(point, pack, *made.inputs))
                reason = measure.first_reason(b.world, why, f"{peer.name} result")
            if reason is not None:
                b.add(**head, impl=peer.name, note=peer.note, skipped=reason)
                continue
            running.append(peer)
            launches[peer.name, ""] = peer.run
        samples = measure.interleave(b.clock, launches, b.args.runs)
    finally:
        for peer in chosen:
            peer.close()
    times = {who: timing.summary(b.clock.slowest(v, f"gemm {' '.join(who)}")) for who, v in samples.items()}
    rows = {
        who: floors.measured(cost, of["us"], b.ceilings, rate) | of | dict(runs=b.args.runs)
        for who, of in times.items()
    }
    theirs = {peer.name: times[peer.name, ""]["us"] for peer in running}
    for text in ours:
        ratios = measure.ratios(times[OURS, text]["us"], theirs)
        b.add(**head, impl=OURS, **own[text], tile_rows=made.knobs[text].tile_rows, **rows[OURS, text], **ratios)
    first = {"ours_us": times[OURS, next(iter(ours))]["us"]} if ours else {}
    for peer in running:
        b.add(**head, impl=peer.name, note=peer.note, **first, **rows[peer.name, ""])
