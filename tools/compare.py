"""Whether two runs of tools/bench.py agree: times of B over those of A, row by row.

    python tools/compare.py A.jsonl B.jsonl
    python tools/compare.py A.jsonl B.jsonl --limit 10    # percent
    python tools/compare.py A.jsonl B.jsonl --allow-missing    # B ran fewer sections or sizes

Rows with a time belong together when all of KEY are equal, and for ours the setting of --knobs too (peers have none).
Where a file has several rows of a key, the last one counts. Prints a Markdown table by section and implementation:
rows, the median of B/A and of |B/A - 1|, and the row that differs most; then what only one file has; last "median point
differs by x %", the largest median difference of megamoe in a section. Peers, the machine's ceilings and host times
(other work on the machine decides those) are shown, to explain it, but not judged.

Exit status: 0; 1 when that is above --limit (default: 5), or when B lacks rows of A, whose ever they are, without
--allow-missing; 2 when no row of megamoe is in both or a file cannot be read.
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
    *("hidden", "intermediate", "num_experts", "top_k", "fp8", "accum", "execution", "world", "gap_us"),
)
"""What equal rows have in common. A key that an older row lacks has its usual value (records.USUAL, OLD_GAP_US)."""

OLD_GAP_US = 1000
"""gap_us of gemm rows that are older than the key."""

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
    top.add_argument("--allow-missing", action="store_true", help="rows that only A has are no failure")
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
    if row["what"] == "gemm":
        made["gap_us"] = row.get("gap_us", OLD_GAP_US)
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


def groups(found: Mapping[Key, float]) -> dict[tuple[str, str], dict[Key, float]]:
    """Ratios by (section, implementation), in order of first appearance."""
    parts: dict[tuple[str, str], dict[Key, float]] = {}
    for row, value in found.items():
        of = dict(zip(KEY, row))
        parts.setdefault((of["what"], of["impl"]), {})[row] = value
    return parts


def table(found: Mapping[Key, float]) -> str:
    """A Markdown table of ratios by section and implementation."""
    lines = [
        "| section | impl | rows | median B/A | median difference | worst row | its B/A |",
        "|---|---|--:|--:|--:|---|--:|",
    ]
    for (what, impl), part in groups(found).items():
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
    missing = len(a) - len(found)
    print(table(found))
    print(f"\n{missing} rows only in A, {len(b) - len(found)} only in B")
    ours = {what: part for (what, impl), part in groups(found).items() if impl == records.OURS and what != "host"}
    judged = {what: apart(part.values()) for what, part in ours.items()}
    if not judged:
        print(f"compare.py: no row of {records.OURS} is in both", file=sys.stderr)
        return 2
    worst = max(judged, key=lambda what: judged[what])
    above = f", above {args.limit:g} %" if judged[worst] > args.limit else ""
    print(f"median point differs by {judged[worst]:.1f} % ({worst}){above}")
    lacks = missing > 0 and not args.allow_missing
    if lacks:
        print(f"compare.py: {args.b} lacks {missing} rows of {args.a} (see --allow-missing)", file=sys.stderr)
    return int(lacks or judged[worst] > args.limit)


if __name__ == "__main__":
    sys.exit(main())
