"""Figures of the rows that tools/bench.py wrote, as PNG and SVG.

    python tools/plot.py tools/results/h200.jsonl --out tools/results/plots

Figures (--what, a comma list; default: every one that has rows):
latency  time of a forward over T, both axes logarithmic, with the floor and the peers
floor    the same time over its floor
speedup  each peer's time over megamoe's
gemm     TFLOPS of fc1 and fc2 over rows per expert, with a dense GEMM and the floor
stages   share of each kernel in their sum over T

Each setting (GPU, W, shape, number format, accumulation, knobs, routing, skew and experts of GEMM rows) gets its own
files, FIGURE-SETTING.png and .svg. Rows name who was measured in `impl`; without it they are megamoe's. Of several
rows of a point the last one is drawn, but a speed-up compares two rows of the same run. Rows without a time (a peer
that could not run) are skipped.

Needs matplotlib; neither torch nor megamoe.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import panels
import records
from panels import DENSE, FILLS, FLOOR, SCALE_MARKS
from records import OURS, Row, impl, points

Figure = panels.Figure

KERNELS = ("stage", "sort", "exchange", "pull", "fc1", "fc2", "token_back", "reduce")
"""The kernels of a forward in launch order. sort is part of exchange since, but older rows have it."""

TOKENS = "tokens on each rank, T"
LINES = {"block": "-", "tensor": ":"}


def latency(rows: Sequence[Row], mode: str = "eager") -> Figure | None:
    """Time over T with the floor and every peer, a panel for each scale mode."""
    drawn = records.in_mode(records.timed(rows, "e2e"), mode)
    if not drawn:
        return None
    parts = records.by_scale(drawn)
    fig, axes = panels.canvas([f"{scale} scales" for scale in parts])
    looks = panels.marks(map(impl, drawn))
    for ax, part in zip(axes, parts.values()):
        panels.limit(ax, FLOOR, *points(part, "T", lambda row: row.get("floor_us")))
        for place, (who, mark) in enumerate(looks.items()):
            series = points([row for row in part if impl(row) == who], "T", lambda row: row["us"])
            panels.line(ax, *series, mark, place)
        panels.log_axis(ax, [row["T"] for row in drawn], TOKENS)
    times = [row[key] for row in drawn for key in ("us", "floor_us") if row.get(key)]
    panels.time_axis(axes, times, "time of a forward")
    return panels.finish(fig, "Time of one MoE layer", drawn, f"{panels.launched(drawn)}, lower is better")


def floor(rows: Sequence[Row], mode: str = "eager") -> Figure | None:
    """Time over floor over T, a panel for each scale mode. Rows without a floor take megamoe's."""
    drawn = records.in_mode(records.timed(rows, "e2e"), mode)
    floors = {(row["scale"], row["T"]): row["floor_us"] for row in drawn if row.get("floor_us")}
    drawn = [row for row in drawn if (row["scale"], row["T"]) in floors]
    if not drawn:
        return None
    over = lambda row: row["us"] / (row.get("floor_us") or floors[row["scale"], row["T"]])  # noqa: E731
    parts = records.by_scale(drawn)
    fig, axes = panels.canvas([f"{scale} scales" for scale in parts])
    looks = panels.marks(map(impl, drawn))
    for ax, part in zip(axes, parts.values()):
        panels.limit(ax, FLOOR)
        for place, (who, mark) in enumerate(looks.items()):
            panels.line(ax, *points([row for row in part if impl(row) == who], "T", over), mark, place)
        ours = points([row for row in part if impl(row) == OURS], "T", over)
        panels.values(ax, *ours, panels.MARKS[OURS], "{:.2f}", below=len(looks) > 1, level=1)
        panels.log_axis(ax, [row["T"] for row in drawn], TOKENS)
    panels.ratio_axis(axes[0], "time / floor")
    return panels.finish(fig, "Distance from the machine's limits", drawn, f"{panels.launched(drawn)}, lower is better")


def speedup(rows: Sequence[Row], mode: str = "eager") -> Figure | None:
    """Each peer's time over megamoe's over T, a panel for each scale mode; None without peers."""
    every = records.timed(rows, "e2e")
    drawn = [row for row in records.in_mode(every, mode) if impl(row) != OURS]
    looks = panels.marks(map(impl, drawn))
    both = [*drawn, *(row for row in every if impl(row) == OURS)]
    parts = {
        scale: {who: records.speedups(part, who, mode) for who in looks}
        for scale, part in records.by_scale(both).items()
    }
    parts = {scale: ratios for scale, ratios in parts.items() if any(ratios.values())}
    if not parts:
        return None
    fig, axes = panels.canvas([f"{scale} scales" for scale in parts])
    sizes = [tokens for ratios in parts.values() for of in ratios.values() for tokens in of]
    for ax, ratios in zip(axes, parts.values()):
        panels.limit(ax, FLOOR._replace(label="as fast as the peer"))
        for place, (who, mark) in enumerate(looks.items()):
            xs = sorted(ratios[who])
            panels.line(ax, xs, [ratios[who][x] for x in xs], mark._replace(label=f"over {mark.label}"), place)
        name_outermost(ax, ratios, looks)
        panels.log_axis(ax, sizes, TOKENS)
    panels.ratio_axis(axes[0], "speed-up: time of peer / megamoe")
    used = [*records.own_like(every, drawn, mode), *drawn]
    return panels.finish(fig, "Speed-up over each peer", used, f"{panels.launched(used)}, higher is better")


def name_outermost(
    ax: panels.Axes, series: dict[str, dict[int, float]], looks: dict[str, panels.Mark], form: str = "{:.2f}"
) -> None:
    """Figures above the highest and below the lowest series at each x: those between would cover each other."""
    at: dict[int, list[float]] = {}
    for ys in series.values():
        for x, y in ys.items():
            at.setdefault(x, []).append(y)
    for who, ys in series.items():
        xs = sorted(ys)
        for below, end in (False, max), (True, min):
            shown = {x for x in xs if ys[x] == end(at[x]) and not (below and len(at[x]) == 1)}
            panels.values(ax, xs, [ys[x] for x in xs], looks[who], form, below, only=shown, level=1)


def gemm(rows: Sequence[Row], mode: str = "eager") -> Figure | None:
    """TFLOPS over rows per expert, a panel for each of fc1 and fc2."""
    drawn = [row for row in records.timed(rows, "gemm") if row.get("tflops")]
    titles = {"fc1": "fc1: [rows, H] × [H, 2I], SwiGLU, quantise", "fc2": "fc2: [rows, I] × [I, H]"}
    names = [name for name in titles if any(row["name"] == name for row in drawn)]
    if not names:
        return None
    fig, axes = panels.canvas([titles[name] for name in names])
    x, tflops = "rows_per_expert", lambda row: row["tflops"]
    peers = panels.marks({impl(row) for row in drawn} - {OURS, "scaled_mm"})
    for ax, name in zip(axes, names):
        part = [row for row in drawn if row["name"] == name]
        own = [row for row in part if impl(row) == OURS]
        dense = [{**row, "dense_tflops": row["tflops"]} for row in part if impl(row) == "scaled_mm"]
        panels.limit(ax, DENSE, *points([*dense, *own], x, lambda row: row.get("dense_tflops")))
        panels.limit(ax, FLOOR, *points(own, x, records.tflops_at_floor))
        for place, (scale, mark) in enumerate(SCALE_MARKS.items()):
            xs, ys = points([row for row in own if row["scale"] == scale], x, tflops)
            panels.line(ax, xs, ys, mark, place)
            best = max(zip(ys, xs), default=(0, 0))[1]
            panels.values(ax, xs, ys, mark, "{:,.0f}", below=scale == "block", only={best})
        for place, (who, mark) in enumerate(peers.items(), len(SCALE_MARKS)):
            theirs = records.by_scale([row for row in part if impl(row) == who])
            for scale, series in theirs.items():
                look = mark if len(theirs) == 1 else mark._replace(label=f"{mark.label}, {scale}", line=LINES[scale])
                panels.line(ax, *points(series, x, tflops), look, place)
        panels.log_axis(ax, [row[x] for row in drawn], "rows on each expert")
    axes[0].set_ylim(bottom=0)
    axes[0].set_ylabel("TFLOPS")
    experts = "/".join(str(n) for n in sorted({row["experts"] for row in drawn if row.get("experts")}))
    return panels.finish(fig, "Grouped FP8 GEMMs", drawn, f"rows on {experts or 'all'} experts, higher is better")


def stages(rows: Sequence[Row], mode: str = "eager") -> Figure | None:
    """Shares of the kernels in their sum, a stacked bar for each T, a panel for each scale mode."""
    drawn = [row for row in records.timed(rows, "stages") if impl(row) == OURS and row["name"] in KERNELS]
    if not drawn:
        return None
    kernels = [name for name in KERNELS if any(row["name"] == name for row in drawn)]
    parts = records.by_scale(drawn)
    fig, axes = panels.canvas([f"{scale} scales" for scale in parts], right=1.5)
    for ax, part in zip(axes, parts.values()):
        us = {(row["T"], row["name"]): row["us"] for row in part}
        sizes = sorted({tokens for tokens, _ in us})
        totals = [sum(us.get((tokens, name), 0.0) for name in kernels) for tokens in sizes]
        base = [0.0] * len(sizes)
        for name in kernels:
            share = [100 * us.get((tokens, name), 0.0) / total for tokens, total in zip(sizes, totals)]
            panels.bars(ax, base, share, FILLS[name], name)
            base = [low + height for low, height in zip(base, share)]
        turn = 0 if len(sizes) <= panels.MOST_VALUES else 90
        for index, total in enumerate(totals):
            text = panels.duration(float(f"{total:.3g}"))
            ax.text(index, 101, text, ha="center", va="bottom", fontsize=8, rotation=turn)
        ax.set_xticks(range(len(sizes)), [f"{tokens:,}" for tokens in sizes], rotation=turn)
        ax.set_xlabel(TOKENS)
        ax.grid(axis="x", visible=False)
    axes[0].set_ylim(0, 124 if turn else 108)
    fig.subplots_adjust(bottom=(0.95 if turn else 0.6) / panels.HEIGHT)
    axes[0].set_yticks(range(0, 101, 20))
    axes[0].set_ylabel("share of the sum of kernel times, %")
    panels.legend_beside(fig)
    return panels.finish(fig, "Where the time of a forward goes", drawn, "above each bar: sum of the kernels' times")


FIGURES: dict[str, Callable[[Sequence[Row], str], Figure | None]] = {
    "latency": latency,
    "floor": floor,
    "speedup": speedup,
    "gemm": gemm,
    "stages": stages,
}
"""Figures by name: each takes the rows of one setting and the way of launching, and is None when it has no rows."""


def write(rows: Sequence[Row], out: Path, what: Iterable[str] = tuple(FIGURES), mode: str = "eager") -> list[Path]:
    """Draw the figures `what` of every setting into the folder `out`; the paths written."""
    out.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    with panels.style():
        for group in records.by_setting(rows):
            for name in what:
                figure = FIGURES[name](group, mode)
                for kind in ("png", "svg") if figure else ():
                    path = out / f"{name}-{records.slug(group[0])}.{kind}"
                    figure.savefig(path, dpi=160, metadata={"Date": None} if kind == "svg" else None)
                    paths.append(path)
    return paths


def main(argv: list[str] | None = None) -> int:
    """Run a command line; 1 when nothing could be drawn."""
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("files", nargs="+", type=Path, metavar="FILE.jsonl", help="rows of tools/bench.py")
    top.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the figures")
    top.add_argument("--what", type=lambda text: text.split(","), default=list(FIGURES), help="figures, a comma list")
    top.add_argument("--mode", choices=("eager", "graph"), default="eager", help="forwards drawn (default: eager)")
    args = top.parse_args(argv)
    for name in args.what:
        if name not in FIGURES:
            top.error(f"--what {name}: one of {', '.join(FIGURES)}")
    try:
        rows = records.load(args.files)
    except (OSError, ValueError) as error:
        top.error(str(error))
    paths = write(rows, args.out, args.what, args.mode)
    print("\n".join(map(str, paths)))
    missing = [name for name in args.what if not any(path.name.startswith(f"{name}-") for path in paths)]
    if missing:
        print(f"no rows for: {', '.join(missing)}", file=sys.stderr)
    return 0 if paths else 1


if __name__ == "__main__":
    sys.exit(main())
