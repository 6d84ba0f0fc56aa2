"""tools/bench.py without a GPU: its arguments, and a dry run in which every launch and clock is a stand-in."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import megamoe
from megamoe import kernels
from megamoe.comm import SingleWorld
from megamoe.forward import STAGES
from megamoe.kernels import build
from megamoe.sched import heuristics

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
bench, floors, sections, timing = (importlib.import_module(n) for n in ("bench", "floors", "sections", "timing"))

SHAPE = dict(hidden=256, intermediate=128, num_experts=16, top_k=4)
GB = 1 << 30


class FakeLayer:
    """Stands in for MegaMoE: its launches do nothing, its results are zero."""

    def __init__(self, cfg, pack, world, knobs=None):
        self.cfg, self.device = cfg, pack.device
        steps = SimpleNamespace(steps=lambda call, stream: [lambda: None] * len(STAGES))
        self._forwards = {choice: [steps] for choice in heuristics.candidates(cfg)}

    def __call__(self, x, ids, weights, out=None):
        return torch.zeros_like(x) if out is None else out.zero_()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass

    def warmup(self):
        pass

    def synchronize(self):
        pass


class TwoRanks(SingleWorld):
    """A world of two whose other rank says what this one says, but routes the other way round."""

    def gather(self, values, what="gather"):
        other = values[0]
        if what == "counts":
            half = len(other) // 2
            other = other[half:] + other[:half]
        return [values[0], other]


def world_of(size):
    world = (SingleWorld if size == 1 else TwoRanks)("cpu")
    world.size = size
    return world


def fake_steps(self, launches, runs, warmup=3, *, aligned=()):
    for launch in launches:
        launch()
    return [[10.0 + i] * runs for i in range(len(launches))]


@pytest.fixture
def dry(monkeypatch):
    monkeypatch.setitem(bench.PRESETS, "small", SHAPE)
    monkeypatch.setattr(megamoe, "MegaMoE", FakeLayer)
    monkeypatch.setattr(build, "stream_handle", lambda device: 0)
    monkeypatch.setattr(kernels, "fc1", lambda x, start, pack, weights, knobs, out: out)
    monkeypatch.setattr(kernels, "fc2", lambda x, start, pack, weights, knobs, out: out.zero_())
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)  # launches write nothing
    monkeypatch.setattr(timing, "FLUSH_BYTES", 1024)
    monkeypatch.setattr(timing, "HBM_BYTES", 1024)
    monkeypatch.setattr(timing.Clock, "steps", fake_steps)
    monkeypatch.setattr(timing.Dense, "rate", lambda self, m, n, k: 1e15)
    speeds = [timing.Speed(f"peer {way}, kernel", 100.0, 10**9) for way in ("read", "write")]
    monkeypatch.setattr(timing, "measure_link", lambda clock, runs: speeds if clock.world.size > 1 else [])
    gpu = SimpleNamespace(name="stand-in")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (64 * GB, 64 * GB))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, capture_error_mode: contextlib.nullcontext())


@pytest.mark.parametrize("size", [1, 2])
def test_dry_run(dry, tmp_path, capsys, size):
    out = tmp_path / "rows.jsonl"
    args = bench.parse(["--preset", "small", "--tokens", "8,8192", "--out", str(out)], size)
    with world_of(size) as world:
        bench.run(args, world)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["what"] for row in rows} == set(floors.COLUMNS) - ({"link"} if size == 1 else {"gemm"})
    assert sum(row["what"] == "stages" for row in rows) == 2 * 2 * 8
    assert all(row["W"] == size and row["gpu"] == "stand-in" for row in rows)
    columns = {column for wanted in floors.COLUMNS.values() for column in wanted}
    described = bench.__doc__
    for key in {key for row in rows for key in row} | columns - {"experts"}:
        assert key in described, f"{key} is not in the docstring of bench.py"
    printed = capsys.readouterr().out
    assert printed.rstrip().endswith("bars pass.") and "### host" in printed
    barred = {(row["what"], row["name"]) for row in rows if "bar" in row}
    assert barred == {("stages", "stage"), ("stages", "reduce"), ("host", "eager")} | (
        {("gemm", "fc1"), ("gemm", "fc2")} if size == 1 else {("link", "pull"), ("link", "token_back")}
    )
    forwards = [row for row in rows if row["what"] in ("stages", "link", "e2e")]
    assert all(row["traffic"]["sent"] == row["T"] * 4 for row in forwards)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--what", "stages,nothing"], "--what nothing"),
        (["--what", "link"], "several ranks"),
        (["--knobs", "tile_rows=96"], "--knobs tile_rows=96"),
    ],
)
def test_refused_arguments(words, why, capsys):
    with pytest.raises(SystemExit):
        bench.parse(words, 1)
    assert why in capsys.readouterr().err


def test_defaults():
    args = bench.parse([], 1)
    assert args.scales == ("block", "tensor") and args.knobs is None and "gemm" in args.what and "link" not in args.what
    args = bench.parse(["--quick", "--knobs", "tile_rows=64"], 2)
    assert args.scales == ("block",) and args.knobs.tile_rows == 64 and "link" in args.what


def test_plan_keeps_what_fits():
    args = bench.parse([], 1)
    configs = bench.plan(args, 1, 139 * GB)
    assert configs["block"].num_experts == 256 and configs["tensor"].max_tokens == 32768
    args = bench.parse([], 1)
    configs = bench.plan(args, 1, 32 * GB)
    assert configs["block"].num_experts < 256 and configs["block"].max_tokens == args.tokens[-1] < 32768
    args = bench.parse(["--tokens", "8"], 2)
    configs = bench.plan(args, 2, 139 * GB)
    assert configs["tensor"].max_tokens == max(floors.link_tokens(configs["tensor"]))


def test_command_line_hides_the_output_path(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench.py", "--quick", "--out", "/somewhere/rows.jsonl", "--tokens", "8"])
    assert bench.command_line(1) == "python tools/bench.py --quick --tokens 8"
    monkeypatch.setattr(sys, "argv", ["bench.py", "--out=/somewhere/rows.jsonl"])
    assert bench.command_line(2) == "torchrun --standalone --nproc-per-node=2 tools/bench.py"
