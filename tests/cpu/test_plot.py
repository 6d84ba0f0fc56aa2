"""tools/plot.py on stored rows of an H200 (tests/data/bench_h200.jsonl) and on peers made up from them."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="figures need matplotlib: pip install -e '.[dev]'")

HERE = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(HERE.parent / "tools"))
plot, panels, records = (importlib.import_module(name) for name in ("plot", "panels", "records"))

STORED = HERE / "data" / "bench_h200.jsonl"
FACTORS = {"torch": 3.0, "flashinfer_pull": 1.5, "flashinfer_push": 1.25, "unheard_of": 0.8}


@pytest.fixture(scope="module")
def rows():
    return records.load([STORED])


@pytest.fixture(scope="module")
def with_peers(rows):
    """The stored rows, ours named, with peers that take FACTORS of our eager time; one could not run its last point."""
    named = [{**row, "impl": "megamoe"} for row in rows]
    eager = [row for row in named if row["what"] == "e2e" and row["name"] == "eager"]
    peers = [{**row, "impl": who, "us": by * row["us"]} for row in eager for who, by in FACTORS.items()]
    for row in peers:
        row["over_floor"] = row["us"] / row.pop("floor_us")
        if row["impl"] == "flashinfer_push" and row["T"] == 32768:
            del row["us"], row["over_floor"]
            row["why"] = "out of memory"
    return named + peers


@pytest.fixture(params=["ours", "peers"])
def either(request, rows, with_peers):
    return rows if request.param == "ours" else with_peers


def drawn(ax):
    """Points of the labelled lines of a panel."""
    lines = {line.get_label(): line for line in ax.lines}
    return {label: dict(zip(*line.get_data())) for label, line in lines.items() if not label.startswith("_")}


def words(fig):
    return " ".join(text.get_text() for text in fig.texts)


def test_every_figure_is_written(either, rows, tmp_path, capsys):
    source = tmp_path / "rows.jsonl"
    source.write_text("\n".join(map(json.dumps, either)))
    assert plot.main([str(source), "--out", str(tmp_path / "new" / "plots")]) == 0
    written = capsys.readouterr().out.split()
    names = [name for name in plot.FIGURES if name != "speedup" or either is not rows]
    assert [Path(path).name for path in written] == [
        f"{name}-v3-e256-h200x1.{kind}" for name in names for kind in ("png", "svg")
    ]
    for path in map(Path, written):
        head = path.read_bytes()[:400]
        assert head.startswith(b"\x89PNG") if path.suffix == ".png" else b"<svg" in head or b"<!DOCTYPE svg" in head
        assert 10_000 < path.stat().st_size < 400_000


def test_same_rows_same_svg(rows, tmp_path):
    first, second = (plot.write(rows, tmp_path / name, ["floor"])[1].read_bytes() for name in "ab")
    assert first == second


@pytest.mark.parametrize("name", list(plot.FIGURES))
def test_titles_axes_and_background(with_peers, name):
    fig = plot.FIGURES[name](with_peers, "eager")
    for text in ("1 × NVIDIA H200 (W = 1)", "v3: H 7168, I 2048, E 256, top-8", "commit dev", "2026-11-29"):
        assert text in words(fig)
    assert fig.get_facecolor() == (1, 1, 1, 1) and fig.legends
    scales = {"latency": ("log", "log"), "stages": ("linear", "linear")}.get(name, ("log", "linear"))
    for ax in fig.axes:
        assert (ax.get_xscale(), ax.get_yscale()) == scales
        assert ax.get_xlabel() == ("rows on each expert" if name == "gemm" else "tokens on each rank, T")
        assert ax.get_title(loc="left")
    assert fig.axes[0].get_ylabel() and len(fig.axes) == (1 if name == "stages" else 2)


def test_latency(with_peers):
    fig = plot.latency(with_peers)
    assert [ax.get_title(loc="left") for ax in fig.axes] == ["block scales", "tensor scales"]
    lines = drawn(fig.axes[0])
    assert set(lines) == {"megamoe", "torch", "FlashInfer pull", "FlashInfer push", "unheard_of", "floor"}
    assert list(lines["megamoe"]) == [8, 512, 32768] and list(lines["FlashInfer push"]) == [8, 512]
    assert lines["megamoe"][8] == 690.896 and lines["floor"][32768] == 15414.3
    assert lines["torch"][512] == pytest.approx(3 * lines["megamoe"][512])
    low, high = fig.axes[0].get_ylim()
    assert low <= min(lines["floor"].values()) and high >= max(lines["torch"].values())
    labels = [text.get_text() for text in fig.legends[0].get_texts()]
    assert labels[0] == "megamoe" and labels[-1] == "floor" and "eager" in words(fig)
    assert drawn(plot.latency(with_peers, "graph").axes[0])["megamoe"][8] == 683.056


def test_time_over_floor(rows, with_peers):
    ours = drawn(plot.floor(rows).axes[1])
    assert ours["megamoe"] == pytest.approx({8: 1.08912, 512: 1.03778, 32768: 1.67037}, rel=1e-5)
    assert set(ours["floor"].values()) == {1}
    theirs = drawn(plot.floor(with_peers).axes[1])  # peers' rows have no floor of their own
    assert theirs["FlashInfer pull"][8] == pytest.approx(1.5 * 1.08912, rel=1e-5)


def test_speedup(rows, with_peers):
    assert plot.speedup(rows) is None
    lines = drawn(plot.speedup(with_peers).axes[0])
    assert lines["over torch"] == pytest.approx({8: 3.0, 512: 3.0, 32768: 3.0})
    assert lines["over FlashInfer push"] == pytest.approx({8: 1.25, 512: 1.25})
    assert lines["over unheard_of"][8] == pytest.approx(0.8) and set(lines["as fast as the peer"].values()) == {1}


def test_speedup_stays_within_a_run_and_a_way_of_launching(with_peers):
    later = [{**row, "date": "2027-01-01T00:00:00+00:00", "us": 1.0} for row in with_peers if row["impl"] == "megamoe"]
    again = drawn(plot.speedup(with_peers + later).axes[0])
    assert again["over torch"][8] == pytest.approx(3.0)
    assert drawn(plot.speedup(with_peers, "graph").axes[0])["over torch"][8] == pytest.approx(3.0)
    only_graph = [{**row, "name": "graph"} if row["impl"] == "torch" else row for row in with_peers]
    fig = plot.speedup(only_graph)
    assert drawn(fig.axes[0])["over torch"][8] == pytest.approx(3.0 * 690.896 / 683.056)
    assert "CUDA graph: megamoe, torch" in words(fig)


def test_last_row_of_a_point_is_drawn(rows):
    newer = [{**row, "us": 500.0, "commit": "abc"} for row in rows if row["what"] == "e2e" and row["T"] == 8]
    fig = plot.latency([*rows, *newer])
    assert drawn(fig.axes[0])["megamoe"][8] == 500.0 and "commit dev, abc" in words(fig)


def test_gemm(rows):
    fig = plot.gemm(rows)
    assert [ax.get_title(loc="left")[:3] for ax in fig.axes] == ["fc1", "fc2"]
    lines = drawn(fig.axes[0])
    assert set(lines) == {"block scales", "tensor scales", "dense torch._scaled_mm", "floor"}
    assert list(lines["block scales"]) == [1, 256, 1024] and fig.axes[0].get_ylim()[0] == 0
    for label, ys in lines.items():
        assert label in ("floor", "dense torch._scaled_mm") or all(ys[x] < lines["floor"][x] for x in ys)
    assert lines["floor"][1024] == pytest.approx(lines["dense torch._scaled_mm"][1024], rel=1e-3)
    assert "32 experts" in words(fig)


def test_gemm_peers_have_lines_of_their_own(rows):
    both = [{**row, "impl": "deep_gemm"} for row in rows if row["what"] == "gemm"]
    one = [{**row, "impl": "scaled_grouped_mm"} for row in both if row["scale"] == "tensor"]
    dense = [{**row, "impl": "scaled_mm", "tflops": 1400.0, "rows_per_expert": 4096} for row in one]
    lines = drawn(plot.gemm([*rows, *both, *one, *dense]).axes[1])
    ours = {"block scales", "tensor scales", "dense torch._scaled_mm", "floor"}
    assert set(lines) - ours == {"DeepGEMM, block", "DeepGEMM, tensor", "torch._scaled_grouped_mm"}
    assert lines["dense torch._scaled_mm"][4096] == 1400 and 1024 in lines["dense torch._scaled_mm"]


def test_stages_add_up(rows):
    (ax,) = plot.stages(rows).axes
    layers = {bars.get_label(): [bar.get_height() for bar in bars] for bars in ax.containers}
    assert tuple(layers) == plot.KERNELS
    assert [sum(heights) for heights in zip(*layers.values())] == pytest.approx([100, 100])
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["8", "32,768"]
    assert {"730 µs", "29.2 ms"} <= {text.get_text() for text in ax.texts}
    (ax,) = plot.stages([row for row in rows if row["name"] != "sort"]).axes
    assert [bars.get_label() for bars in ax.containers] == [name for name in plot.KERNELS if name != "sort"]


def test_settings_get_their_own_files(rows, tmp_path):
    other = [{**row, "W": 2, "routing": "random", "command": "torchrun tools/bench.py --preset v4-pro"} for row in rows]
    names = {path.stem for path in plot.write([*rows, *other], tmp_path, ["latency"])}
    assert names == {"latency-v3-e256-h200x1", "latency-v4-pro-e256-h200x2-random"}
    mine = [{**row, "skew": "zipf", "knobs": "tile_rows=64"} for row in rows if row["what"] == "gemm"]
    names = {path.stem for path in plot.write([*rows, *mine], tmp_path, ["gemm", "latency"])}
    assert names == {f"{name}-v3-e256-h200x1" for name in ("gemm", "latency")} | {
        "gemm-v3-e256-h200x1-tile-rows-64-zipf"
    }


def test_other_ways_to_name_a_section_and_a_preset(rows):
    row = next(row for row in rows if row["what"] == "e2e")
    assert records.timed([{"section": "e2e", "us": 1.0}, {"section": "e2e", "why": "no"}], "e2e") == [
        {"section": "e2e", "us": 1.0}
    ]
    assert records.preset(row) == "v3" and records.preset({**row, "preset": "kimi-k2"}) == "kimi-k2"
    assert records.preset({**row, "command": "python tools/bench.py --preset=small --quick"}) == "small"
    own = {**row, "preset": None}
    assert records.preset(own) is None and records.slug(own) == "h7168-i2048-k8-e256-h200x1"
    virtual = {**row, "W": 4, "world": "virtual"}
    assert records.slug(virtual) == "v3-e256-h200x4-virtual" and records.setting(virtual) != records.setting(row)
    assert records.setting({**row, "world": "processes"}) == records.setting(row)
    many = {**row, "experts": 96}
    assert records.slug(many) == "v3-e256-h200x1-96-experts" and records.setting(many) != records.setting(row)
    assert records.setting({**row, "experts": 32}) == records.setting(row)
    with plot.panels.style():
        assert "1 × NVIDIA H200 (W = 4)" in words(plot.latency([virtual]))
    bare = {key: value for key, value in row.items() if key != "command"}
    assert records.preset(bare) is None and records.slug(bare) == "h7168-i2048-k8-e256-h200x1"


def test_default_preset_is_that_of_bench():
    text = (HERE.parent / "tools" / "options.py").read_text()
    assert re.search(r'"--preset".*default="v3"', text), "records.preset takes v3 for granted"


def test_looks_differ():
    peers = panels.marks(["megamoe", "torch", "flashinfer_pull", "flashinfer_push", "b", "a", "c"])
    assert next(iter(peers)) == "megamoe" and len(peers) == 7
    assert len({mark.color for mark in peers.values()}) == len({mark.marker for mark in peers.values()}) == 7
    assert len({fill.color for fill in panels.FILLS.values()}) == len(plot.KERNELS)


def test_many_points_keep_the_axes_readable(rows):
    row = next(row for row in rows if row["what"] == "e2e")
    many = [{**row, "T": 2**power, "us": 2.0**power, "floor_us": 2.0 ** (power - 1)} for power in range(3, 16)]
    for figure in (plot.latency, plot.floor):
        (ax,) = figure(many).axes
        assert len(ax.get_xticks()) <= 8 and ax.get_xticks()[-1] in (8, 32768) and not ax.texts
    assert plot.latency(many[:1]) is not None


def test_refusals(rows, tmp_path, capsys):
    with pytest.raises(SystemExit):
        plot.main([str(STORED), "--out", str(tmp_path), "--what", "latency,pie"])
    assert "--what pie: one of latency" in capsys.readouterr().err
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"what": "e2e"}\n\n{"what": \n')
    with pytest.raises(SystemExit):
        plot.main([str(broken), "--out", str(tmp_path)])
    assert "broken.jsonl:3" in capsys.readouterr().err
    broken.write_text('{"what": "e2e", "impl": "torch", "why": "not built"}\n')
    assert plot.main([str(broken), "--out", str(tmp_path)]) == 1
    assert "no rows for: latency, floor" in capsys.readouterr().err
