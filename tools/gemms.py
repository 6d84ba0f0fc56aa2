"""Section gemm of tools/bench.py: fc1 and fc2 alone, in turns with the peers' products."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import floors
import layers
import peers
import timing
import torch
from peers import measure

if TYPE_CHECKING:
    from bench import Bench
    from layers import Setup

GEMM_ROWS, QUICK_GEMM_ROWS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096), (1, 64, 512)
"""Rows an expert, in ascending order."""

GEMM_EXPERTS = 32
CHUNK = 8192
"""Tokens quantised at a time: the reference takes several times their memory."""


def run_gemm(b: Bench, s: Setup) -> None:
    """Rows of fc1 and fc2 on equal rows of each of the first GEMM_EXPERTS experts; fc2 reads what fc1 wrote."""
    from megamoe import kernels, wire

    sizes = QUICK_GEMM_ROWS if b.args.quick else GEMM_ROWS
    pack, cfg = s.packs()[0], s.cfg
    experts = min(GEMM_EXPERTS, pack.experts_local)
    most = experts * max(sizes)
    x = _records(b, s, most)
    act = torch.zeros(most, wire.activation_format(cfg).pitch, dtype=torch.uint8, device=b.device)
    y = torch.zeros(most, cfg.hidden, dtype=torch.bfloat16, device=b.device)
    weights = torch.ones(most, device=b.device)
    for each in sizes:
        rows = experts * each
        ends = torch.arange(pack.experts_local + 1, device=b.device) * each
        start = ends.clamp(max=rows).to(torch.int32)
        tile = b.knobs(cfg, 1, rows * cfg.num_experts // (experts * cfg.top_k))
        run = {
            "fc1": lambda: kernels.fc1(x[:rows], start, pack, weights[:rows], tile, out=act[:rows]),  # noqa: B023
            "fc2": lambda: kernels.fc2(act[:rows], start, pack, weights[:rows], tile, out=y[:rows]),  # noqa: B023
        }
        run["fc1"]()
        read = {"fc1": (x, wire.input_format(cfg)), "fc2": (act, wire.activation_format(cfg))}
        for name in b.args.gemms:
            b.say(f"gemm {s.scale} {name} {each} rows")
            point = peers.GemmPoint(cfg, name, experts, each, b.device)
            records, fmt = read[name]
            operands = kernels.unpack_rows(records[:rows], fmt, cfg.fp8)
            _point(b, s, point, run[name], operands, tile.tile_rows)
    if not bool(y.isfinite().all()):
        raise RuntimeError("fc2's result is not finite")


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


def _point(b: Bench, s: Setup, point: peers.GemmPoint, ours: layers.Launch, operands: tuple, tile_rows: int) -> None:
    """Measure one product in turns with all peers that can run it, and add everyone's rows."""
    pack, cost = s.packs()[0], floors.gemm_costs(point.cfg, point.rows, point.experts)[point.name]
    rate = b.rates(point.cfg, point.rows)[point.name]
    head: dict[str, Any] = dict(what="gemm", name=point.name, scale=s.scale, rows_per_expert=point.rows_per_expert)
    head["experts"] = point.experts
    running, launches = [], {"megamoe": ours}
    chosen = peers.make(b.args.gemm_peers, peers.GEMM_PEERS)
    try:
        for peer in chosen:
            reason = measure.ready(b.world, peer, point, pack, operands)
            if reason is None:
                why = measure.differs(*peer.check(point, pack, *operands))
                reason = measure.first_reason(b.world, why, f"{peer.name} result")
            if reason is not None:
                b.add(**head, impl=peer.name, note=peer.note, skipped=reason)
                continue
            running.append(peer)
            launches[peer.name] = peer.run
        samples = measure.interleave(b.clock, launches, b.args.runs)
    finally:
        for peer in chosen:
            peer.close()
    times = {who: timing.summary(b.clock.slowest(v, f"gemm {who}")) for who, v in samples.items()}
    rows = {
        who: floors.measured(cost, of["us"], b.ceilings, rate) | of | dict(runs=b.args.runs)
        for who, of in times.items()
    }
    ratios = measure.ratios(times["megamoe"]["us"], {peer.name: times[peer.name]["us"] for peer in running})
    b.add(**head, impl="megamoe", tile_rows=tile_rows, **rows["megamoe"], **ratios)
    for peer in running:
        b.add(**head, impl=peer.name, note=peer.note, ours_us=times["megamoe"]["us"], **rows[peer.name])
