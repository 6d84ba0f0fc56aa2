"""The figure of tools/trace.py: one row an SM, colour a phase, time to the right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import timeline
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from megamoe.kernels.trace import Phase

WIDTH = 2400  # pixels of the time axis
ROW = 12  # pixels of an SM; its warps share them
DPI = 160
PALEST = 0.8  # share of white where all the time is waited
MARGINS = (0.7, 0.15, 0.75, 1.9)  # inches: left, right, top, bottom


def paint(records: timeline.Records, rows: int, row_of: np.ndarray) -> np.ndarray:
    """An RGB image, float [rows * ROW, WIDTH, 3]: each record in its phase's colour, paler the more it waited.

    row_of: the row of each record. The warps of a kernel on one SM lie below each other in its row. Every record
    is at least a pixel wide.
    """
    image = np.ones((rows * ROW, WIDTH, 3), np.float32)
    if not len(records):
        return image
    lane = timeline.ordinals(records, ["kernel", "gpu", "sm"], ["slot", "rank", "cta"])
    most = {str(name): int(lane[records["kernel"] == name].max()) + 1 for name in np.unique(records["kernel"])}
    lanes = np.array([most[name] for name in records["kernel"].tolist()])
    top = row_of * ROW + lane * ROW // lanes
    low = np.maximum(row_of * ROW + (lane + 1) * ROW // lanes, top + 1)
    zero, span = time_range(records)
    left = ((records["start"] - zero) * WIDTH // span).clip(0, WIDTH - 1)
    right = np.maximum((records["end"] - zero) * WIDTH // span, left + 1)
    colors = np.array([to_rgb(timeline.LOOKS[phase].color) for phase in Phase], np.float32)[records["phase"]]
    white = PALEST * (records["waited"] / np.maximum(records["end"] - records["start"], 1)).clip(0, 1)[:, None]
    colors = colors * (1 - white) + white
    for y0, y1, x0, x1, color in zip(top.tolist(), low.tolist(), left.tolist(), right.tolist(), colors):
        image[y0:y1, x0:x1] = color
    return image


def time_range(records: timeline.Records) -> tuple[int, int]:
    """(first ns, ns from there to the last); at least 1."""
    zero = int(records["start"].min())
    return zero, max(1, int(records["end"].max()) - zero)


def draw(records: timeline.Records, title: str) -> Figure:
    """The figure. Above the SMs, a line a rank shows when each of its kernels ran."""
    places, row_of = np.unique(records[["gpu", "sm"]], return_inverse=True)
    ranks = np.unique(records["rank"])
    left, right, above, below = MARGINS
    bar = 0.16 * len(ranks)
    width, height = left + WIDTH / DPI + right, above + bar + 0.05 + len(places) * ROW / DPI + below
    fig = Figure(figsize=(width, height), dpi=DPI, facecolor="white")
    box = lambda y, tall: (left / width, y / height, WIDTH / DPI / width, tall / height)  # noqa: E731
    ax = fig.add_axes(box(below, len(places) * ROW / DPI))
    zero, span = time_range(records)
    extent = (0, span / 1000, len(places), 0)
    ax.imshow(paint(records, len(places), row_of), aspect="auto", interpolation="nearest", extent=extent)
    step = max(1, len(places) // 16)
    several = len(np.unique(places["gpu"])) > 1
    names = [f"{gpu}:{sm}" if several else str(sm) for gpu, sm in places.tolist()]
    ax.set_yticks(np.arange(0, len(places), step) + 0.5, names[::step], fontsize=8)
    ax.set_ylabel("GPU:SM" if several else "SM")
    ax.set_xlabel("us from the first record")
    top = fig.add_axes(box(height - above - bar, bar), sharex=ax)
    draw_kernels(top, records, zero)
    fig.text(left / width, 1 - 0.2 / height, title, fontsize=12, fontweight="bold", va="top")
    seen = [Phase(phase) for phase in np.unique(records["phase"])]
    marks = [Patch(color=timeline.LOOKS[phase].color, label=timeline.LOOKS[phase].label) for phase in seen]
    names = ", ".join(f"{timeline.LOOKS[p].label}: {timeline.LOOKS[p].waits_for}" for p in seen if partly(p))
    note = "the warps of an SM lie below each other in its row"
    note += f"; the paler, the more of a record is waiting ({names})" if names else ""
    look = dict(loc="upper left", bbox_to_anchor=(left / width, (below - 0.5) / height), frameon=False, ncols=6)
    fig.legend(handles=marks, title=note, alignment="left", fontsize=9, title_fontsize=9, **look)
    return fig


def partly(phase: Phase) -> bool:
    """Whether records of a phase count waiting within them."""
    look = timeline.LOOKS[phase]
    return look.waits_for is not None and not look.only


def draw_kernels(ax: object, records: timeline.Records, zero: int) -> None:
    """A line a rank: the time of each kernel, by name where there is room."""
    whole = (int(records["end"].max()) - zero) / 1000
    for line, of_rank in enumerate(timeline.groups(records, ["rank"])):
        for index, kernel in enumerate(timeline.groups(of_rank, ["kernel"])):
            start, end = ((int(ns) - zero) / 1000 for ns in (kernel["start"].min(), kernel["end"].max()))
            ax.broken_barh([(start, end - start)], (line, 0.9), color=("#dddddd", "#c0c0c0")[index % 2])
            if (end - start) > 0.05 * whole:
                name = str(kernel["kernel"][0])
                ax.text((start + end) / 2, line + 0.45, name, ha="center", va="center", fontsize=8)
    ranks = [int(part["rank"][0]) for part in timeline.groups(records, ["rank"])]
    ax.set_yticks(np.arange(len(ranks)) + 0.45, [f"rank {rank}" for rank in ranks], fontsize=7)
    ax.set_ylim(len(ranks), 0)
    ax.tick_params(length=0, labelbottom=False)
    for side in ax.spines.values():
        side.set_visible(False)


def write(records: timeline.Records, path: Path, title: str) -> None:
    """Draw into a PNG file."""
    draw(records, title).savefig(path)
