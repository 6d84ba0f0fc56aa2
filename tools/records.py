"""Rows of tools/bench.py, read back for figures: whose they are, which belong together, and what is compared."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]

OURS = "megamoe"
SCALES = ("block", "tensor")
SETTING = ("gpu", "W", "hidden", "intermediate", "num_experts", "top_k", "fp8", "accum", "knobs", "execution", "world")
USUAL = {
    "fp8": "e4m3",
    "accum": "promoted",
    "knobs": "auto",
    "routing": "balanced",
    "execution": "staged",
    "world": "processes",
    "skew": "balanced",
    "experts": 32,
}
"""Values that file names leave out."""


def load(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """The rows of the files, in order. ValueError names the line that is not a JSON object."""
    rows: list[dict[str, Any]] = []
    for path in paths:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if line.strip():
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"{path}:{number}: {error}") from None
                if not isinstance(row, dict):
                    raise ValueError(f"{path}:{number}: not a JSON object")
                rows.append(row)
    return rows


def impl(row: Row) -> str:
    """Who was measured."""
    return row.get("impl") or OURS


def timed(rows: Iterable[Row], what: str) -> list[Row]:
    """Rows of a section that have a time."""
    return [row for row in rows if row.get("what", row.get("section")) == what and row.get("us")]


def setting(row: Row) -> tuple[tuple[str, Any], ...]:
    """What rows of one figure have in common."""
    return tuple((key, row.get(key) or USUAL.get(key)) for key in (*SETTING, "routing", "skew", "experts"))


def preset(row: Row) -> str | None:
    """The preset of the run, None for another shape: a key of the row, or, in rows that are older than the key,
    read from its command line (bench.py's default: v3)."""
    if "preset" in row:
        return row["preset"]
    command = row.get("command")
    given = re.search(r"--preset[= ](\S+)", command or "")
    return given[1] if given else "v3" if command else None


def by_setting(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows split by setting, in order of first appearance."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(setting(row), []).append(row)
    return list(groups.values())


def slug(row: Row) -> str:
    """A setting as part of a file name, such as v3-e256-h200x2."""
    name = preset(row) or "h{hidden}-i{intermediate}-k{top_k}".format_map(row)
    gpu = str(row.get("gpu", "gpu")).removeprefix("NVIDIA ")
    unusual = [str(row[key]) for key, usual in USUAL.items() if row.get(key) not in (None, usual)]
    unusual += ["experts"] * (row.get("experts") not in (None, USUAL["experts"]))  # behind their number
    text = "-".join([name, f"e{row.get('num_experts')}", f"{gpu}x{row.get('W', 1)}", *unusual])
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def by_scale(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows of each scale mode that there is, in the order of SCALES."""
    found = sorted({row["scale"] for row in rows}, key=lambda scale: (scale not in SCALES, scale))
    return {scale: [row for row in rows if row["scale"] == scale] for scale in found}


def in_mode(rows: Sequence[Row], mode: str) -> list[Row]:
    """Each implementation's rows launched as `mode` says, or, where it has none, in the one way that it has."""
    kept: list[Row] = []
    for who in dict.fromkeys(map(impl, rows)):
        own = [row for row in rows if impl(row) == who]
        names = {row.get("name"): None for row in own}
        chosen = next((name for name in (mode, "eager") if name in names), next(iter(names)))
        kept += [row for row in own if row.get("name") == chosen]
    return kept


def points(rows: Iterable[Row], x: str, y: Callable[[Row], float | None]) -> tuple[list[float], list[float]]:
    """Coordinates in ascending x; of rows that have a y, the last one of an x counts."""
    found = {row[x]: value for row in rows if (value := y(row))}
    sizes = sorted(found)
    return sizes, [found[size] for size in sizes]


def own_like(rows: Iterable[Row], theirs: Iterable[Row], mode: str) -> list[Row]:
    """Those of megamoe's rows that were launched like a peer's, else those that in_mode chooses."""
    names = {row.get("name") for row in theirs}
    own = [row for row in rows if impl(row) == OURS]
    return [row for row in own if row.get("name") in names] or in_mode(own, mode)


def speedups(rows: Sequence[Row], peer: str, mode: str = "eager") -> dict[int, float]:
    """T: the peer's time over megamoe's, of the last run that has both; launched alike where megamoe was.

    rows: e2e rows of one scale mode; in_mode has chosen the peer's but not megamoe's.
    """
    theirs = [row for row in rows if impl(row) == peer]
    run = lambda row: (row["T"], row.get("date"), row.get("commit"))  # noqa: E731
    ours = {run(row): row["us"] for row in own_like(rows, theirs, mode)}
    return {row["T"]: row["us"] / ours[run(row)] for row in theirs if run(row) in ours}


def tflops_at_floor(row: Row) -> float | None:
    """TFLOPS of a GEMM that takes just its floor."""
    return row["tflops"] * row["us"] / row["floor_us"] if row.get("floor_us") else None
