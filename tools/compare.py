"""Whether two runs of tools/bench.py agree: times of B over those of A, row by row.

    python tools/compare.py A.jsonl B.jsonl
    python tools/compare.py A.jsonl B.jsonl --limit 10    # percent

Rows with a time belong together when all of KEY are equal, and for ours the setting of --knobs too (peers have none).
Where a file has several rows of a key, the last one counts. Prints a Markdown table by section and implementation:
rows, the median of B/A and of |B/A - 1|, and the row that differs most; then what only one file has; last "median point
differs by x %", of all rows. Exit status: 0; 1 when that is above --limit (default: 5); 2 when no rows belong together
or a file cannot be read.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

if str(Path(__file__).resolve().parent) not in sys.path:
    sys.path.insert(0, str(Path(__file__).resolve().parent))

import records

Key = tuple[Any, ...]

KEY = (
    *("what", "name", "impl", "scale", "routing", "T", "rows_per_expert", "preset", "W", "knobs", "experts", "skew"),
    *("hidden", "intermediate", "num_experts", "top_k", "fp8", "accum", "execution", "world"),
)
"""What equal rows have in common. A key that an older row lacks has its usual value (records.USUAL)."""

POINT = ("name", "scale", "routing", "T", "rows_per_expert", "skew", "knobs")
"""Those that name a row within its section and implementation."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("a", type=Path, metavar="A.jsonl", help="rows that --out of bench.py wrote")
    top.add_argument("b", type=Path, metavar="B.jsonl", help="rows of the other run")
    top.add_argument(
        "--limit", type=float, default=5.0, metavar="PERCENT", help="allowed median difference (default: 5)"
    )
    return top


def who(row: records.Row) -> str:
    """Who was measured; of a ceiling, the machine."""
    return "machine" if row["what"] == "ceilings" else records.impl(row)


def knobs(row: records.Row) -> str:
    """Our setting of --knobs, whatever the order of its fields; empty for others."""
    if who(row) != records.OURS:
        return ""
    fields = re.split(r"[ ,]+", row.get("knobs") or "auto")
    return ",".join(sorted(field for field in fields if not field.endswith("=None")))


def key(row: records.Row) -> Key:
    """The values of KEY."""
    made = {"impl": who(row), "knobs": knobs(row), "preset": records.preset(row)}
    return tuple(made[name] if name in made else row.get(name) or records.USUAL.get(name) for name in KEY)


def times(rows: Iterable[records.Row]) -> dict[Key, float]:
    """Microseconds by key of rows that have a time, in order of first appearance."""
    return {key(row): row["us"] for row in rows if row.get("what") and row.get("us")}


def ratios(a: Mapping[Key, float], b: Mapping[Key, float]) -> dict[Key, float]:
    """B / A of the keys that both have, in A's order."""
    return {row: b[row] / us for row, us in a.items() if row in b}


def apart(values: Iterable[float]) -> float:
    """The median of |ratio - 1|, in percent."""
    return 100 * median(abs(value - 1) for value in values)


def point(row: Key) -> str:
    """A row's name in its group, such as "fc1 block rows_per_expert=512"."""
    of = dict(zip(KEY, row))
    shown = {name: of[name] for name in POINT if of[name] not in (None, "", records.USUAL.get(name))}
    plain = {"name", "scale", "routing", "skew", "knobs"}
    return " ".join(str(value) if name in plain else f"{name}={value}" for name, value in shown.items())


def table(found: Mapping[Key, float]) -> str:
    """A Markdown table of ratios by section and implementation."""
    groups: dict[tuple[str, str], dict[Key, float]] = {}
    for row, value in found.items():
        of = dict(zip(KEY, row))
        groups.setdefault((of["what"], of["impl"]), {})[row] = value
    lines = [
        "| section | impl | rows | median B/A | median difference | worst row | its B/A |",
        "|---|---|--:|--:|--:|---|--:|",
    ]
    for (what, impl), part in groups.items():
        worst = max(part, key=lambda row: abs(part[row] - 1))
        middle, away = median(part.values()), apart(part.values())
        cells = (what, impl, len(part), f"{middle:.3f}", f"{away:.1f} %", point(worst), f"{part[worst]:.3f}")
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run a command line; see above for the exit status."""
    args = parser().parse_args(argv)
    try:
        a, b = (times(records.load([path])) for path in (args.a, args.b))
    except (OSError, ValueError) as error:
        print(f"compare.py: {error}", file=sys.stderr)
        return 2
    found = ratios(a, b)
    if not found:
        print(f"compare.py: no row of {args.a} belongs to one of {args.b}", file=sys.stderr)
        return 2
    difference = apart(found.values())
    print(table(found))
    print(f"\n{len(a) - len(found)} rows only in A, {len(b) - len(found)} only in B")
    print(f"median point differs by {difference:.1f} %")
    return 1 if difference > args.limit else 0


if __name__ == "__main__":
    sys.exit(main())
