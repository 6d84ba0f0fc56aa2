"""Bytes, FLOPs, floors and bars of tools/bench.py: plain arithmetic, no torch, no GPU.

The floor of a row is the largest of three times (DESIGN, Speed): HBM bytes at the measured HBM speed, FLOPs at
the measured rate of a dense FP8 GEMM of the same total M, N, K, and link bytes at the speed that a kernel's own
reads (pull) or writes (exchange, token-back) of a peer reach.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from megamoe import wire
from megamoe.config import BLOCK, MoEConfig

LINK_BYTES = 64_000_000
"""From this many link bytes on, pull and token-back are held to their bars."""


# ---------------------------------------------------------------- what a forward moves


@dataclass(frozen=True)
class Traffic:
    """Routes of one rank's forward.

    tokens: T. sent, sent_remote: its live routes, and those whose owner is another rank. rows, rows_remote:
    routes that it receives, and those whose home is another rank. experts_hit: its experts with a row. homes [W]: rows
    by home.
    """

    tokens: int
    sent: int
    sent_remote: int
    rows: int
    rows_remote: int
    experts_hit: int
    homes: tuple[int, ...] = ()


def traffic(tokens: Sequence[int], counts: Sequence[Sequence[int]]) -> list[Traffic]:
    """Traffic of every rank. tokens [W]: T of each; counts [W][E]: live routes of each rank to each expert."""
    world_size = len(counts)
    local = len(counts[0]) // world_size
    found = []
    for rank in range(world_size):
        mine = slice(rank * local, (rank + 1) * local)
        homes = tuple(sum(count[mine]) for count in counts)
        sent, kept, rows = sum(counts[rank]), homes[rank], sum(homes)
        hit = sum(1 for column in zip(*(count[mine] for count in counts)) if any(column))
        found.append(Traffic(tokens[rank], sent, sent - kept, rows, rows - kept, hit, homes))
    return found


@dataclass(frozen=True)
class Cost:
    """What one kernel has to do on one rank.

    moved: the bytes its GB/s counts. hbm: least bytes of this GPU's memory read and written. link: bytes over
    NVLink, one way, of which `pushed` says whether the kernel stores them at the peer or loads them.
    flops: of its GEMM. weights: bytes of expert weights and scales among hbm.
    """

    moved: int
    hbm: int
    link: int = 0
    pushed: bool = False
    flops: int = 0
    weights: int = 0


def weight_bytes(cfg: MoEConfig, rows: int, columns: int) -> int:
    """Bytes of one expert's FP8 matrix [rows, columns] and its fp32 scales."""
    scales = rows * columns // (BLOCK * BLOCK) if cfg.scale == "block" else 1
    return rows * columns + 4 * scales


def gemm_costs(cfg: MoEConfig, rows: int, experts_hit: int) -> dict[str, Cost]:
    """Costs of fc1 and fc2: weights of the experts hit and input rows read once, output rows written once."""
    hidden, inner = cfg.hidden, cfg.intermediate
    x, act = wire.input_format(cfg).row_bytes, wire.activation_format(cfg).row_bytes
    first = experts_hit * weight_bytes(cfg, 2 * inner, hidden)
    second = experts_hit * weight_bytes(cfg, hidden, inner)
    one, two = first + rows * (x + act), second + rows * (act + 2 * hidden)
    return {
        "fc1": Cost(one, one, flops=4 * rows * inner * hidden, weights=first),
        "fc2": Cost(two, two, flops=2 * rows * inner * hidden, weights=second),
    }


def stage_costs(cfg: MoEConfig, t: Traffic) -> dict[str, Cost]:
    """Costs of the seven kernels of a forward, in launch order, for int32 ids and fp32 weights.

    stage: bf16 tokens read, records written; ids and weights read and written. exchange: ids and
    weights read, a word a live route written at its owner. pull moves rows of row_bytes; memory also holds at
    least one read of each token, the list words, and 12 bytes written a row. token_back moves bf16 rows;
    memory also takes the slots that come back here. reduce: live slots and ids read, y written.
    """
    record, y = wire.input_format(cfg).row_bytes, 2 * cfg.hidden
    routes = t.tokens * cfg.top_k
    stage = t.tokens * (y + record) + 16 * routes
    pulled, returned = t.rows * record, t.rows * y
    reduce = (t.sent + t.tokens) * y + 4 * routes
    return {
        "stage": Cost(stage, stage),
        "exchange": Cost(8 * (routes + t.sent), 8 * (routes + t.rows), 8 * t.sent_remote, pushed=True),
        "pull": Cost(pulled, pulled + t.tokens * record + 20 * t.rows, t.rows_remote * record),
        **gemm_costs(cfg, t.rows, t.experts_hit),
        "token_back": Cost(returned, returned + t.sent * y, t.rows_remote * y, pushed=True),
        "reduce": Cost(reduce, reduce),
    }


def together(costs: Sequence[Cost]) -> Cost:
    """What ranks that share one GPU do between them, on one memory and over no link."""
    sums = {name: sum(getattr(cost, name) for cost in costs) for name in ("moved", "hbm", "flops", "weights")}
    return Cost(**sums)


def link_tokens(cfg: MoEConfig, quick: bool = False) -> list[int]:
    """T at which pull, and at which token-back, moves 64 MB a rank when every route is remote; then four times."""
    back, pull = 2 * cfg.hidden, wire.input_format(cfg).row_bytes
    sizes = [-(-LINK_BYTES // (cfg.top_k * row)) for row in (back, pull)]
    return sorted({*sizes} if quick else {*sizes, 4 * sizes[1]})


# ---------------------------------------------------------------- floors


@dataclass(frozen=True)
class Ceilings:
    """Measured speeds in bytes a second: HBM read, HBM copy (read + written), and a peer's memory read and
    written by plain kernels (0 without peers)."""

    hbm_read: float
    hbm_copy: float
    link_read: float = 0.0
    link_write: float = 0.0

    @property
    def hbm(self) -> float:
        """The faster of HBM read and copy."""
        return max(self.hbm_read, self.hbm_copy)


def times_us(costs: Sequence[Cost], ceilings: Ceilings, dense: Sequence[float]) -> dict[str, float]:
    """Least microseconds that HBM, tensor cores and link need for all `costs` together.

    dense: FLOP/s of a dense GEMM, one for each cost; not read where flops is 0. The two ways of the link are
    counted apart.
    """
    read = sum(c.link for c in costs if not c.pushed)
    write = sum(c.link for c in costs if c.pushed)
    link = max(read / ceilings.link_read if read else 0.0, write / ceilings.link_write if write else 0.0)
    compute = sum(c.flops / rate for c, rate in zip(costs, dense) if c.flops)
    hbm = sum(c.hbm for c in costs) / ceilings.hbm
    return {"hbm": 1e6 * hbm, "flops": 1e6 * compute, "link": 1e6 * link}


def floor_us(costs: Sequence[Cost], ceilings: Ceilings, dense: Sequence[float]) -> tuple[float, str]:
    """The floor of `costs` run together, perfectly overlapped, and what sets it: hbm, flops or link."""
    times = times_us(costs, ceilings, dense)
    bound = max(times, key=lambda name: times[name])
    return times[bound], bound


def forward_floor(
    cfg: MoEConfig, traffics: Sequence[Traffic], ceilings: Ceilings, rates: Mapping[str, float], shared: bool = False
) -> dict[str, Any]:
    """Keys floor_us and floor_by of a forward: of the rank with the most to do, or of all on one GPU (shared).

    rates: dense FLOP/s of fc1 and fc2.
    """
    costs = [stage_costs(cfg, t) for t in traffics]
    if shared:
        costs = [{name: together([of_rank[name] for of_rank in costs]) for name in costs[0]}]
    dense = [rates.get(name, 0.0) for name in costs[0]]
    us, bound = max(floor_us(list(of_rank.values()), ceilings, dense) for of_rank in costs)
    return {"floor_us": us, "floor_by": bound}


def forward_flops(cfg: MoEConfig, traffics: Sequence[Traffic]) -> float:
    """FLOPs of both products of a forward, a rank, on average."""
    return 6 * sum(t.rows for t in traffics) * cfg.intermediate * cfg.hidden / len(traffics)


def measured(cost: Cost, us: float, ceilings: Ceilings, dense: float = 0.0) -> dict[str, Any]:
    """A row's figures from its time; keys as in tools/bench.py. Figures that do not apply are left out."""
    floor, bound = floor_us([cost], ceilings, [dense])
    row: dict[str, Any] = {"us": us, "bytes": cost.moved, "gbps": cost.moved / us / 1e3}
    if cost.link:
        row |= {"link_bytes": cost.link, "link_gbps": cost.link / us / 1e3}
    if cost.flops:
        row |= {"tflops": cost.flops / us / 1e6, "dense_tflops": dense / 1e12}
    if cost.weights:
        row["weights_tbps"] = cost.weights / us / 1e6
    return row | {"floor_us": floor, "floor_by": bound, "over_floor": us / floor if floor else float("nan")}


# ---------------------------------------------------------------- bars


def bar(row: Mapping[str, Any]) -> tuple[str, bool] | None:
    """The bar that a row is held to and whether it passes, or None. Reads what, name, impl, T and figures."""
    if row.get("impl", "megamoe") != "megamoe" or "skipped" in row:
        return None
    what, name = row["what"], row["name"]
    if what == "stages" and name in ("stage", "reduce") and row["T"] >= 8192:
        return ">= 75 % of copy", row["copy_share"] >= 0.75
    if what == "link" and name in ("pull", "token_back") and row.get("link_bytes", 0) >= LINK_BYTES:
        least = 320 if name == "pull" else 340
        return f">= {least} GB/s", row.get("link_gbps_each", row["link_gbps"]) >= least
    if what == "gemm" and row["rows_per_expert"] == 512 and "skew" not in row:
        return ">= 700 TFLOPS", row["tflops"] >= 700
    if what == "host" and name == "eager":
        return "<= 80 us", row["us"] <= 80
    return None


def with_bar(row: dict[str, Any]) -> dict[str, Any]:
    """The row with `bar` (text) and `ok` (true or false) added where a bar holds."""
    held = bar(row)
    return row if held is None else row | {"bar": held[0], "ok": bool(held[1])}


# ---------------------------------------------------------------- choices


def pick_experts(wanted: int, bytes_per_expert: int, world_size: int, budget: int) -> int:
    """The largest wanted / 2^n whose experts of one rank take at most `budget` bytes; at least world_size."""
    experts = wanted
    while experts // world_size * bytes_per_expert > budget and experts % 2 == 0 and experts // 2 >= world_size:
        experts //= 2
    return experts


def spread(traffics: Sequence[Traffic]) -> dict[str, int]:
    """The largest value of each field over ranks, for a row's record; homes left out."""
    return {f.name: max(getattr(t, f.name) for t in traffics) for f in fields(Traffic) if f.name != "homes"}


def directions(costs: Sequence[Cost], traffics: Sequence[Traffic], us: Sequence[float]) -> dict[str, Any]:
    """A kernel's use of each link and direction, GB/s: keys pair_gbps [W][W], out_gbps and in_gbps [W], out_even.

    costs, us: of pull or token-back and its time on each rank, which loads rows of homes or stores them there.
    pair_gbps[a][b]: bytes from a to b over the time of the rank that moves them. out_gbps, in_gbps: its sums, what a
    link carries each way where each GPU has one to a switch. out_even: the least of out_gbps over the most.
    """
    rates = []
    for owner, (cost, t) in enumerate(zip(costs, traffics)):
        each_row = cost.link / max(t.rows_remote, 1) / us[owner] / 1e3
        rates.append([0.0 if home == owner else rows * each_row for home, rows in enumerate(t.homes)])
    pairs = rates if costs[0].pushed else [list(column) for column in zip(*rates)]
    out, into = [sum(row) for row in pairs], [sum(column) for column in zip(*pairs)]
    even = min(out) / max(out) if max(out) else 1.0
    return {"pair_gbps": pairs, "out_gbps": out, "in_gbps": into, "out_even": even}
