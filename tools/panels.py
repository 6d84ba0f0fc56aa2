"""Pieces of the figures of tools/plot.py: looks of series, axes, titles and legends."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Container, Iterable, Sequence
from typing import Any, NamedTuple

try:
    import matplotlib as mpl
except ImportError:
    raise SystemExit('plot.py needs matplotlib: pip install -e ".[dev]"') from None
from matplotlib import patheffects
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator
from records import OURS, USUAL, Row, impl, preset


class Mark(NamedTuple):
    """How a series looks. Colours are those of Okabe and Ito, told apart with any kind of colour vision."""

    label: str
    color: str
    marker: str
    line: str = "-"


class Fill(NamedTuple):
    """How a layer of bars looks; ink: of the text on it."""

    color: str
    ink: str = "white"
    hatch: str = ""


MARKS = {
    OURS: Mark("megamoe", "#0072B2", "o"),
    "torch": Mark("torch", "#E69F00", "s"),
    "flashinfer_pull": Mark("FlashInfer pull", "#009E73", "^"),
    "flashinfer_push": Mark("FlashInfer push", "#CC79A7", "D"),
    "scaled_grouped_mm": Mark("torch._scaled_grouped_mm", "#E69F00", "s"),
    "deep_gemm": Mark("DeepGEMM", "#009E73", "^"),
}
SPARE = (("#56B4E9", "P"), ("#000000", "X"), ("#D55E00", "v"))  # for peers not listed
FLOOR = Mark("floor", "#555555", "", "--")
DENSE = Mark("dense torch._scaled_mm", "#aaaaaa", "")
SCALE_MARKS = {"block": Mark("block scales", "#0072B2", "o"), "tensor": Mark("tensor scales", "#D55E00", "s")}
FILLS = {
    "stage": Fill("#009E73"),
    "sort": Fill("#F0E442", "black"),
    "exchange": Fill("#000000"),
    "pull": Fill("#E69F00", "black", "///"),
    "fc1": Fill("#0072B2"),
    "fc2": Fill("#56B4E9", "black"),
    "token_back": Fill("#D55E00", "white", "\\\\\\"),
    "reduce": Fill("#CC79A7", "black"),
}
STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 11,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.8,
    "lines.markersize": 6,
    "hatch.linewidth": 0.6,
    "svg.hashsalt": "megamoe",  # the same rows give the same file
}
WIDTH, HEIGHT = 10.0, 4.9  # inches
MOST_VALUES = 8
LAUNCHES = {"eager": "eager", "graph": "CUDA graph"}
HALO = [patheffects.withStroke(linewidth=2.5, foreground="white")]


def style() -> contextlib.AbstractContextManager[None]:
    """matplotlib's settings while figures are drawn and written."""
    return mpl.rc_context(STYLE)


def marks(names: Iterable[str]) -> dict[str, Mark]:
    """Looks of implementations: megamoe first, then peers in the order of MARKS, then others by name."""
    known = list(MARKS)
    found = sorted(set(names), key=lambda name: (known.index(name) if name in known else len(known), name))
    spare = iter(SPARE * len(found))
    return {name: MARKS.get(name) or Mark(name, *next(spare)) for name in found}


def line(ax: Axes, xs: Sequence[float], ys: Sequence[float], mark: Mark, place: int = 0) -> None:
    """One series. place: 0 is on top and first in the legend."""
    look: dict[str, Any] = dict(color=mark.color, marker=mark.marker, linestyle=mark.line, label=mark.label)
    ax.plot(xs, ys, markeredgecolor="white", markeredgewidth=0.8, zorder=2.9 - place / 100, **look)


def limit(ax: Axes, mark: Mark, xs: Sequence[float] = (), ys: Sequence[float] = ()) -> None:
    """A line that cannot be crossed, behind the others and last in the legend; without xs the level 1."""
    look: dict[str, Any] = dict(color=mark.color, linestyle=mark.line, label=mark.label, zorder=2, linewidth=1.5)
    if xs:
        ax.plot(xs, ys, **look)
    else:
        ax.axhline(1, **look)


def values(
    ax: Axes,
    xs: Sequence[float],
    ys: Sequence[float],
    mark: Mark,
    form: str,
    below: bool = False,
    only: Container[float] | None = None,
    level: float | None = None,
) -> None:
    """Figures above or below the points of a drawn series (at the xs in `only`); none if there would be many.

    They are moved aside where the line is steep, but not out of the panel. Figures below points just above `level`,
    a line of the panel, go below that line.
    """
    steep, up = 0.08 * ax.dataLim.height, -1 if below else 1
    shown = [x for x in xs if only is None or x in only]
    ink = tuple(0.7 * part for part in to_rgb(mark.color))  # small text needs more contrast than lines
    for index, (x, y) in enumerate(zip(xs, ys)):
        before, after = (up * (near[0] - y) if near else 0 for near in (ys[:index][-1:], ys[index + 1 :]))
        aside = 0 if max(before, after) < steep else 11 if before > after else -11
        aside = 0 if x in (ax.dataLim.x0, ax.dataLim.x1) else aside
        if x in shown and len(shown) <= MOST_VALUES:
            place = dict(textcoords="offset points", ha="center", va="top" if below else "bottom")
            look = dict(fontsize=8, color=ink, path_effects=HALO)
            covers = below and level is not None and 0 < y - level < 0.1 * ax.dataLim.height
            ax.annotate(form.format(y), (x, level if covers else y), (aside, 7 * up), **place, **look)


def bars(ax: Axes, base: Sequence[float], heights: Sequence[float], fill: Fill, label: str) -> None:
    """One layer of stacked bars at 0, 1, 2, ..., with their heights as text where there is room."""
    look = dict(color=fill.color, hatch=fill.hatch, edgecolor="white", linewidth=0.6, width=0.78)
    ax.bar(range(len(base)), heights, bottom=base, label=label, **look)
    box = dict(boxstyle="square,pad=0.15", facecolor=fill.color, edgecolor="none") if fill.hatch else None
    for index, (low, height) in enumerate(zip(base, heights)):
        if height >= 6:
            place = dict(ha="center", va="center", fontsize=8)
            ax.text(index, low + height / 2, f"{height:.0f}", color=fill.ink, bbox=box, **place)


def log_axis(ax: Axes, seen: Iterable[float], label: str) -> None:
    """A logarithmic x axis that names the measured sizes, as many as there is room for."""
    sizes = sorted(set(seen))
    shown: list[float] = []
    gap = math.log2(sizes[-1] / sizes[0]) / 7
    for size in reversed(sizes):
        if not shown or math.log2(shown[-1] / size) >= gap:
            shown.append(size)
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(FixedLocator(shown))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:,.0f}"))
    ax.set_xlabel(label)


def time_axis(axes: Sequence[Axes], seen: Sequence[float], label: str) -> None:
    """A logarithmic y axis of microseconds from a tick below all that is seen to one above."""
    for ax in axes:
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=20))
        ax.yaxis.set_minor_locator(NullLocator())
        ax.yaxis.set_major_formatter(FuncFormatter(duration))
    axes[0].set_ylim(round_125(min(seen), down=True), round_125(max(seen)))
    axes[0].set_ylabel(label)


def ratio_axis(ax: Axes, label: str) -> None:
    """A linear y axis with the level 1 and room for values above and below the points."""
    low, high = ax.get_ylim()
    low, high = min(low, 1), max(high, 1.2)
    ax.set_ylim(low - 0.1 * (high - low), high + 0.05 * (high - low))
    ax.set_ylabel(label)


def duration(us: float, _: object = None) -> str:
    """Microseconds as text."""
    return f"{us / 1000:g} ms" if us >= 1000 else f"{us:g} µs"


def round_125(value: float, down: bool = False) -> float:
    """The next of 1, 2, 5, 10, 20, ... at or above (below) a positive value."""
    steps = [digit * 10.0**power for power in range(-6, 12) for digit in (1, 2, 5)]
    return max(s for s in steps if s <= value) if down else min(s for s in steps if s >= value)


def canvas(panels: Sequence[str], right: float = 0.25) -> tuple[Figure, list[Axes]]:
    """A figure with a panel for each title, side by side with one y axis; right: inches left free there."""
    fig = Figure(figsize=(WIDTH, HEIGHT), facecolor="white")
    axes = fig.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    fig.subplots_adjust(left=0.85 / WIDTH, bottom=0.6 / HEIGHT, right=1 - right / WIDTH, wspace=0.08)
    for ax, title in zip(axes, panels):
        ax.set_title(title, loc="left", color="#333333")
        ax.tick_params(left=ax is axes[0])
    return fig, list(axes)


def finish(fig: Figure, title: str, rows: Sequence[Row], note: str) -> Figure:
    """Add title and setting, and the legend of the series in all panels unless there is one."""
    first, left = rows[0], 0.15 / WIDTH
    name, shape = preset(first), "H {hidden}, I {intermediate}, E {num_experts}, top-{top_k}".format_map(first)
    gpus = 1 if first.get("world") == "virtual" else first.get("W", 1)
    ranks = f"{gpus} × {first.get('gpu', 'GPU')} (W = {first.get('W', 1)})"
    routing = next((f"{row['routing']} routing" for row in rows if row.get("routing")), None)
    unusual = [f"{k} {first[k]}" for k in USUAL if k != "routing" and first.get(k) not in (None, USUAL[k])]
    about = [ranks, f"{name}: {shape}" if name else shape, routing, *unusual]
    commits = list(dict.fromkeys(str(row.get("commit", "unknown")) for row in rows))
    dates = sorted({str(row["date"])[:10] for row in rows if row.get("date")})
    source = [f"commit {', '.join(commits[:3])}{', …' if len(commits) > 3 else ''}", *dates[-1:], note]
    fig.text(left, 1 - 0.12 / HEIGHT, title, fontsize=13, fontweight="bold", va="top")
    fig.text(left, 1 - 0.40 / HEIGHT, " · ".join(filter(None, about)), fontsize=9.5, va="top")
    fig.text(left, 1 - 0.62 / HEIGHT, " · ".join(filter(None, source)), fontsize=9, va="top", color="#555555")
    lines = 0 if fig.legends else legend_above(fig, left / 2, 1 - 0.80 / HEIGHT)
    fig.subplots_adjust(top=1 - (1.15 + 0.24 * lines) / HEIGHT)
    return fig


def legend_above(fig: Figure, left: float, top: float) -> int:
    """A legend in as many lines as its width asks for, ours first and limits last; the number of lines."""
    found = {label: handle for ax in fig.axes for handle, label in zip(*ax.get_legend_handles_labels())}
    labels = sorted(found, key=lambda label: -found[label].get_zorder())
    lines = math.ceil(sum(0.7 + 0.08 * len(label) for label in labels) / WIDTH)
    look = dict(frameon=False, handlelength=2.2, columnspacing=1.6, ncols=math.ceil(len(labels) / max(lines, 1)))
    fig.legend([found[label] for label in labels], labels, loc="upper left", bbox_to_anchor=(left, top), **look)
    return lines


def legend_beside(fig: Figure) -> None:
    """A legend to the right of the last panel, in the order in which its bars are stacked."""
    last = fig.axes[-1]
    handles, labels = last.get_legend_handles_labels()
    place = dict(loc="center left", bbox_to_anchor=(1.0, 0.5), bbox_transform=last.transAxes)
    fig.legend(handles[::-1], labels[::-1], frameon=False, **place)


def launched(rows: Sequence[Row]) -> str:
    """How forwards were launched: one word, or whose were launched how."""
    words: dict[str, list[str]] = {}
    for who, name in dict.fromkeys((impl(row), str(row.get("name"))) for row in rows):
        words.setdefault(LAUNCHES.get(name, name), []).append(marks([who])[who].label)
    if len(words) == 1:
        return next(iter(words))
    return "; ".join(f"{word}: {', '.join(whose)}" for word, whose in words.items())
