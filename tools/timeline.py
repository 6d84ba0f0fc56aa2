"""Records of traced kernels (megamoe/kernels/trace.py) as arrays, as shares of time, and as Chrome trace events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megamoe.kernels.trace import Phase, Role

Records = np.ndarray
"""Of dtype RECORD: one entry a record."""

RECORD = np.dtype(
    [
        *(("rank", "i4"), ("gpu", "i4"), ("kernel", "U16"), ("cta", "i4"), ("slot", "i4")),
        *(("sm", "i4"), ("role", "i4"), ("phase", "i4"), ("tile", "i4")),
        *(("start", "i8"), ("end", "i8"), ("waited", "i8"), ("cycles", "u4")),
    ]
)
"""start, end: ns of the GPU's %globaltimer; waited: ns of the record in which its warp waited; cycles: of its SM at the
record's end, modulo 2**32."""

LEAST_CLOCK_NS = 20_000
"""Between a warp's first and last record, for its SM's clock to be told: %globaltimer steps by about 1 us."""


class Look(NamedTuple):
    """A phase to a reader. waits_for: what it waits for, all the time (`only`) or for the ns of `waited`."""

    label: str
    color: str
    waits_for: str | None = None
    only: bool = False


MEETING = "barrier, fence, publish"
"""What PUBLISH and FINISH are, told apart by no record: waiting for the CTA's other warps and for the fence, then one
thread's count of CTAs and, in the last CTA, its stores to peers (FINISH: to the host). None of it moves rows."""

LOOKS = {
    Phase.WAIT_LISTS: Look("wait for lists", "#bbbbbb", "the peers' lists", True),
    Phase.WAIT_ROWS: Look("wait for rows", "#999999", "the owners' rows", True),
    Phase.COUNT: Look("check and count routes", "#88ccee"),
    Phase.QUANTIZE: Look("quantise tokens", "#009e73"),
    Phase.SEND: Look("order and send routes", "#000000"),
    Phase.PUBLISH: Look("barrier, fence, publish", "#777777", MEETING, True),
    Phase.LAY_OUT: Look("lay out the pool", "#aa4499"),
    Phase.COPY: Look("copy rows", "#e69f00", "bytes of a row"),
    Phase.DRAIN: Look("end of own writes", "#dd7788", "its own writes", True),
    Phase.LOAD: Look("issue TMA loads", "#d55e00", "an empty stage"),
    Phase.MAIN_LOOP: Look("main loop", "#0072b2", "a full stage"),
    Phase.ACTIVATE: Look("SwiGLU", "#44aa99"),
    Phase.STORE: Look("epilogue's stores", "#56b4e9"),
    Phase.SUM: Look("sum slots", "#cc79a7"),
    Phase.FINISH: Look("end the forward", "#777777", MEETING, True),
}

ROLES = {Role.CTA: "all warps", Role.COPIER: "copier", Role.TMA: "TMA", Role.MATH: "math"}

TOP = 4
"""Phases that a cell of the table names."""


def decode(buffer: np.ndarray, kernel: str, rank: int = 0, gpu: int = 0) -> tuple[Records, int]:
    """(records, dropped) of one kernel's buffer, int64 [CTAs, SLOTS, 1 + room, FIELDS].

    Records are in the order of CTAs, slots, and time. dropped: records that found no room.
    """
    room = buffer.shape[2] - 1
    counts = buffer[:, :, 0, 0]
    kept = np.arange(room) < counts[:, :, None]
    words = buffer[:, :, 1:][kept]
    found = np.zeros(len(words), RECORD)
    found["cta"], found["slot"], _ = np.nonzero(kept)
    found["rank"], found["gpu"], found["kernel"] = rank, gpu, kernel
    found["start"], found["end"], found["waited"] = words[:, 0], words[:, 1], words[:, 3] & 0xFFFFFFFF
    found["cycles"] = words[:, 3] >> 32 & 0xFFFFFFFF
    found["role"], found["phase"] = words[:, 2] & 0xFF, words[:, 2] >> 8 & 0xFF
    found["sm"], found["tile"] = words[:, 2] >> 16 & 0xFFFF, words[:, 2] >> 32
    return found, int(np.maximum(counts - room, 0).sum())


def decode_all(buffers: Mapping[str, Any], rank: int = 0, gpu: int = 0) -> tuple[Records, dict[str, int]]:
    """(records, dropped records by kernel) of a rank's buffers, torch tensors on any device, in their order."""
    parts = {name: decode(buffer.cpu().numpy(), name, rank, gpu) for name, buffer in buffers.items()}
    found = [part for part, _ in parts.values()]
    return np.concatenate([np.zeros(0, RECORD), *found]), {name: n for name, (_, n) in parts.items() if n}


def keys(records: Records, fields: Sequence[str]) -> np.ndarray:
    """An integer for each record, equal where all `fields` are, in their order."""
    key = np.zeros(len(records), np.int64)
    for field in fields:
        values, inverse = np.unique(records[field], return_inverse=True)
        key = key * len(values) + inverse
    return key


def groups(records: Records, fields: Sequence[str]) -> Iterator[Records]:
    """The records of each combination of `fields`, in order of first appearance."""
    if len(records):
        _, first, inverse, counts = np.unique(
            keys(records, fields), return_index=True, return_inverse=True, return_counts=True
        )
        parts = np.split(records[np.argsort(inverse, kind="stable")], np.cumsum(counts)[:-1])
        yield from (parts[index] for index in np.argsort(first))


def ordinals(records: Records, group: Sequence[str], within: Sequence[str]) -> np.ndarray:
    """For each record the place, from 0, of its `within` fields among those of its `group` fields."""
    if not len(records):
        return np.zeros(0, int)
    both, first, inverse = np.unique(keys(records, [*group, *within]), return_index=True, return_inverse=True)
    outer = keys(records, group)[first]
    places = np.arange(len(both))
    starts = np.maximum.accumulate(np.where(np.append(True, outer[1:] != outer[:-1]), places, 0))
    return (places - starts)[inverse]


# ---- shares of time ------------------------------------------------------------------------------


def shares(records: Records) -> list[dict[str, Any]]:
    """A row for each kernel and role: where its warps' share of the kernel's time went.

    us: mean over ranks from the kernel's first record to its last. warps: that recorded. mhz: median of their SMs'
    clocks, None where no warp recorded for long enough. waits, works: {what: share}.
    between: share between a warp's records. outside: before its first and after its last. All shares add up to 1.
    """
    rows = []
    for kernel in groups(records, ["kernel"]):
        spans = {
            int(part["rank"][0]): int(part["end"].max() - part["start"].min()) for part in groups(kernel, ["rank"])
        }
        for mine in groups(kernel, ["role"]):
            warps = list(groups(mine, ["rank", "cta", "slot"]))
            whole = max(1, sum(spans[int(warp["rank"][0])] for warp in warps))
            inside = sum(int(warp["end"].max() - warp["start"].min()) for warp in warps)
            waits, works = _split(mine)
            busy = sum(waits.values()) + sum(works.values())
            rows.append(
                dict(
                    kernel=str(mine["kernel"][0]),
                    role=ROLES[Role(int(mine["role"][0]))],
                    warps=len(warps),
                    us=sum(spans.values()) / len(spans) / 1000,
                    mhz=_clock(warps),
                    waits={what: ns / whole for what, ns in waits.items()},
                    works={what: ns / whole for what, ns in works.items()},
                    between=(inside - busy) / whole,
                    outside=1 - inside / whole,
                )
            )
    return rows


def _clock(warps: Sequence[Records]) -> float | None:
    """Median over warps of the SM clock between the ends of their first and last record, in MHz."""
    if not all("cycles" in warp.dtype.names for warp in warps):
        return None  # records of an earlier version
    rates = []
    for warp in warps:
        ns = int(warp["end"][-1] - warp["end"][0])
        if LEAST_CLOCK_NS <= ns < 1_000_000_000:  # the count of cycles comes round after two seconds
            rates.append(1000 * (int(warp["cycles"][-1]) - int(warp["cycles"][0]) & 0xFFFFFFFF) / ns)
    return float(np.median(rates)) if rates else None


def _split(records: Records) -> tuple[dict[str, int], dict[str, int]]:
    """Nanoseconds that records of one role waited, by what for, and worked, by phase."""
    waits: dict[str, int] = {}
    works: dict[str, int] = {}
    for part in groups(records, ["phase"]):
        look = LOOKS[Phase(int(part["phase"][0]))]
        total = int((part["end"] - part["start"]).sum())
        waited = total if look.only else int(part["waited"].sum())
        if look.waits_for:
            waits[look.waits_for] = waits.get(look.waits_for, 0) + waited
        if not look.only:
            works[look.label] = total - waited
    return waits, works


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """shares() as Markdown: percentages of the kernel's time."""
    heads = ("kernel", "role", "warps", "us", "MHz", "waits", "for", "works", "at", "between", "outside")
    lines = [heads, ("---", "---", *["--:"] * 4, "---", "--:", "---", "--:", "--:")]
    for row in rows:
        waits, works = row["waits"], row["works"]
        lines.append(
            (
                *(row["kernel"], row["role"], str(row["warps"]), f"{row['us']:.1f}"),
                "" if row["mhz"] is None else f"{row['mhz']:.0f}",
                *(percent(sum(waits.values())), named(waits), percent(sum(works.values())), named(works)),
                *(percent(row["between"]), percent(row["outside"])),
            )
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def percent(share: float) -> str:
    """A share as text."""
    return f"{100 * share:.1f} %"


def named(parts: Mapping[str, float]) -> str:
    """The largest parts by name."""
    ranked = sorted(parts.items(), key=lambda item: -item[1])
    return ", ".join(f"{what} {percent(share)}" for what, share in ranked[:TOP] if share > 0)


# ---- Chrome trace events -------------------------------------------------------------------------


def chrome_events(records: Records) -> Iterator[dict[str, Any]]:
    """Events of the Trace Event Format ("JSON Array Format"), for chrome://tracing and ui.perfetto.dev.

    A process is a rank, a thread one warp of an SM, a complete event ("X") a record; ts and dur in us from the first.
    """
    if not len(records):
        return
    kth = ordinals(records, ["kernel", "rank", "gpu", "sm", "role"], ["slot", "cta"])
    tids = (records["sm"].astype(int) * len(Role) + records["role"]) * 32 + kth + 1  # 0 means idle to viewers
    pids = records["rank"] + 1
    for rank, gpu in np.unique(records[["rank", "gpu"]]).tolist():
        yield dict(name="process_name", ph="M", pid=rank + 1, args={"name": f"rank {rank}, GPU {gpu}"})
    for pid, tid in np.unique(np.stack([pids, tids], 1), axis=0).tolist():
        sm, role = divmod((tid - 1) // 32, len(Role))
        name = f"SM {sm:03d} {ROLES[Role(role)]} {(tid - 1) % 32}"
        yield dict(name="thread_name", ph="M", pid=pid, tid=tid, args={"name": name})
        yield dict(name="thread_sort_index", ph="M", pid=pid, tid=tid, args={"sort_index": tid})
    zero = int(records["start"].min())
    for record, pid, tid in zip(records.tolist(), pids.tolist(), tids.tolist()):
        _, _, kernel, cta, _, _, _, phase, tile, start, end, waited = record[:12]
        look = LOOKS[Phase(phase)]
        args: dict[str, Any] = dict(kernel=kernel, cta=cta, tile=tile)
        if look.waits_for and not look.only:
            args["waited_us"] = waited / 1000
        times = dict(ts=(start - zero) / 1000, dur=(end - start) / 1000)
        yield dict(name=look.label, cat=kernel, ph="X", pid=pid, tid=tid, **times, args=args)


def write_chrome(records: Records, path: Path) -> None:
    """Write chrome_events() to a JSON file, one event a line."""
    with path.open("w") as file:
        file.write('{"displayTimeUnit": "ns", "traceEvents": [\n')
        for index, event in enumerate(chrome_events(records)):
            file.write((",\n" if index else "") + json.dumps(event))
        file.write("\n]}\n")
