"""Markdown tables of tools/bench.py's rows; no torch, no GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

COLUMNS = {
    "ceilings": ("name", "us", "bytes", "gbps", "tflops"),
    "stages": (
        *("scale", "routing", "T", "name", "us", "p10", "p90", "bytes", "gbps", "link_gbps", "tflops"),
        *("floor_us", "floor_by", "over_floor", "copy_share", "bar", "ok"),
    ),
    "link": (
        *("scale", "T", "name", "us", "us_each", "link_bytes", "link_gbps", "gbps_each", "link_gbps_each", "out_even"),
        *("floor_us", "over_floor", "bar", "ok"),
    ),
    "gemm": (
        *("scale", "rows_per_expert", "skew", "name", "impl", "knobs", "tile_rows", "us", "p10", "p90", "tflops"),
        *("weights_tbps", "floor_us", "floor_by", "over_floor", "over_*", "bar", "ok", "skipped"),
    ),
    "e2e": (
        *("scale", "routing", "T", "impl", "name", "us", "us_min", "p10", "p90", "tflops"),
        *("floor_us", "floor_by", "over_floor", "over_*", "skipped"),
    ),
    "host": ("scale", "routing", "T", "name", "us", "us_min", "p10", "p90", "bar", "ok"),
    "gpu": ("name", "seconds", "sm_mhz", "mem_mhz", "watts", "celsius", "clock_reasons"),
}
"""Sections of a run, in order, and the columns of their tables; over_* stands for the peers' ratios."""


def cell(value: object) -> str:
    """Text of a table cell: about three digits, thousands separated, booleans as pass or FAIL."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "pass" if value else "FAIL"
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value).replace("|", "/")
    size = abs(value)
    return f"{value:,.{0 if size >= 1000 else 1 if size >= 100 else 2 if size >= 0.1 or size == 0 else 4}f}"


def expand(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The columns with over_* replaced by the keys of that form which rows have and columns do not name."""
    found = dict.fromkeys(key for row in rows for key in row if key.startswith("over_") and key not in columns)
    return [name for column in columns for name in (found if column == "over_*" else (column,))]


def markdown(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """A Markdown table; columns that no row fills are left out, bytes are shown in MB (10^6)."""
    used = [name for name in expand(columns, rows) if any(row.get(name) is not None for row in rows)]
    lines = []
    for row in rows:
        values = {**row, **{k: row[k] / 1e6 for k in ("bytes", "link_bytes") if row.get(k) is not None}}
        lines.append([cell(values.get(column)) for column in used])
    heads = [column.replace("bytes", "MB") for column in used]
    widths = [max(len(text) for text in column) for column in zip(heads, *lines)]
    table = [heads, ["-" * width for width in widths], *lines]
    return "\n".join("| " + " | ".join(t.rjust(w) for t, w in zip(line, widths)) + " |" for line in table)


def notes(rows: Sequence[Mapping[str, Any]]) -> str:
    """A list of whom rows measure and how that differs from ours."""
    found = dict.fromkeys((row["impl"], row["note"]) for row in rows if row.get("note"))
    return "\n".join(f"- {who}: {note}" for who, note in found)


def report(rows: Sequence[Mapping[str, Any]]) -> str:
    """All sections' tables and notes under their names, and how many bars pass."""
    parts = []
    for what, columns in COLUMNS.items():
        found = [row for row in rows if row["what"] == what]
        if found:
            parts += [f"### {what}", markdown(found, columns), notes(found)]
    held = [row["ok"] for row in rows if "ok" in row]
    return "\n\n".join(filter(None, [*parts, f"{sum(map(bool, held))} of {len(held)} bars pass."]))
