"""Section gemm of tools/bench.py without a GPU: settings of knobs in turns, uneven rows, gaps and memory."""

from __future__ import annotations

import importlib
import os
from types import SimpleNamespace

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")  # read when cutlass is imported

import pytest
import torch

from megamoe import Knobs, MoEConfig, kernels
from megamoe.kernels.fc1 import FC1Spec
from megamoe.kernels.fc2 import FC2Spec
from tests.cpu.bench_stand_ins import GB, FakeGemm, described, go, install, use, world_of

gemms, inputs, timing = map(importlib.import_module, ("gemms", "inputs", "timing"))
WORDS = ["--preset", "small", "--scale", "block", "--gemm-rows", "64", "--what"]
REFUSED = "tile_cols=256,cluster_cols=2"  # of the stand-ins' shape: one column tile in either product


class Launched:
    """Stands in for fc1 and fc2: their specs are made, so that knobs are refused as always, and calls recorded."""

    def __init__(self, monkeypatch):
        self.calls, self.sleeps, self.wrong = [], [], {}
        for name, spec in ("fc1", FC1Spec), ("fc2", FC2Spec):
            monkeypatch.setattr(
                kernels, name, lambda *args, out, tickets, s=spec, n=name: self.launch(n, s, *args, out)
            )
        monkeypatch.setattr(timing.Clock, "steps", self.steps)

    def launch(self, name, spec, rows, start, pack, weights, knobs, out):
        spec.from_config(pack.cfg, pack.experts_local, knobs)
        assert start.dtype is torch.int32 and len(start) == pack.experts_local + 1 and int(start[-1]) == len(rows)
        self.calls.append((name, knobs, start.tolist()))
        out.zero_()
        if (name, knobs) in self.wrong:
            out.view(torch.uint8)[-1, -1] = self.wrong[name, knobs]

    def steps(self, launches, runs, warmup=3, *, aligned=()):
        self.sleeps.append(self.clock.sleep_cycles)
        for launch in launches:
            launch()
        return [[10.0 + len(self.calls) % 7] * runs for _ in launches]


@pytest.fixture
def launched(monkeypatch):
    install(monkeypatch)
    use(monkeypatch, gemm=[FakeGemm("scaled_mm"), FakeGemm("deep_gemm", "not here")])
    found = Launched(monkeypatch)
    init = timing.Clock.__init__

    def keep(self, world):
        init(self, world)
        found.clock = self

    monkeypatch.setattr(timing.Clock, "__init__", keep)
    return found


def measured(words, tmp_path):
    rows = go([*WORDS, *words], world_of(1), tmp_path)
    described(rows)
    return rows, [row for row in rows if row["what"] == "gemm"]


def test_settings_take_turns(launched, tmp_path, capsys):
    every, rows = measured(["gemm", "--knobs", f"tile_rows=128; {REFUSED}; auto; tile_rows=64,stages=3"], tmp_path)
    assert [(row["name"], row["impl"], row["knobs"], "skipped" in row) for row in rows] == [
        (name, impl, knobs, skipped)
        for name in ("fc1", "fc2")
        for impl, knobs, skipped in (
            ("megamoe", REFUSED, True),
            ("deep_gemm", "tile_rows=128", True),  # of a peer: the first setting
            ("megamoe", "tile_rows=128", False),
            ("megamoe", "auto", False),
            ("megamoe", "tile_rows=64,stages=3", False),
            ("scaled_mm", "tile_rows=128", False),
        )
    ]
    of = {(row["name"], row["impl"], row["knobs"]): row for row in rows}
    assert of["fc2", "megamoe", REFUSED]["skipped"].startswith("cluster_cols = 2: must be 1 for fc2")
    ours = [of["fc1", "megamoe", text] for text in ("tile_rows=128", "auto", "tile_rows=64,stages=3")]
    assert [row["tile_rows"] for row in ours] == [128, 128, 64] and all("over_scaled_mm" in row for row in ours)
    assert of["fc1", "scaled_mm", "tile_rows=128"]["ours_us"] == ours[0]["us"]
    assert {row["knobs"] for row in every if row["what"] != "gemm"} == {"tile_rows=128"}
    assert "tile_cols=256,cluster_cols=2" in capsys.readouterr().out  # the table has a column of settings
    turns = [knobs for name, knobs, _ in launched.calls if name == "fc1"]
    first, auto, small = Knobs(tile_rows=128), Knobs(tile_cols=256, schedule="atomic"), Knobs(tile_rows=64, stages=3)
    assert turns[:3] == [first, auto, small]  # each once, then in turns
    assert turns[3:12] == [first, auto, small, auto, small, first, small, first, auto]
    assert turns[-1] == auto and [name for name, _, _ in launched.calls].index("fc2") == len(turns)  # fc2's input


def test_a_single_setting_that_is_refused(launched, tmp_path):
    rows = measured(["fc2", "--knobs", REFUSED], tmp_path)[1]
    assert [(row["impl"], row["knobs"], "us" in row) for row in rows] == [
        ("megamoe", REFUSED, False),
        ("deep_gemm", REFUSED, False),
        ("scaled_mm", REFUSED, True),
    ]
    assert "ours_us" not in rows[-1] and "over_scaled_mm" not in rows[0]


def test_uneven_rows(launched, tmp_path):
    words = ["fc1", "--gemm-skew", "balanced,zipf", "--gemm-experts", "8", "--gemm-rows", "2,512", "--seed", "3"]
    rows = measured(words, tmp_path)[1]
    assert [(row["rows_per_expert"], row.get("skew")) for row in rows if row["impl"] == "megamoe"] == [
        *((2, None), (2, "zipf"), (512, None), (512, "zipf"))
    ]
    assert {row["experts"] for row in rows} == {8} and all(row.get("skew") for row in rows if "most_rows" in row)
    few, many = (inputs.zipf_counts(8 * each, 8, 3) for each in (2, 512))
    ours = {(r["rows_per_expert"], r.get("skew")): r for r in rows if r["impl"] == "megamoe"}
    one, even, skewed = ours[2, "zipf"], ours[512, None], ours[512, "zipf"]
    assert (one["most_rows"], one["experts_hit"]) == (max(few), sum(n > 0 for n in few)) and one["experts_hit"] < 8
    assert skewed["most_rows"] == max(many) and skewed["bytes"] == even["bytes"]
    assert one["bytes"] < ours[2, None]["bytes"]  # fewer experts' weights
    assert "bar" in even and "bar" not in skewed
    starts = [start for _, _, start in launched.calls if start[-1] == 8 * 512]
    assert [512 * min(e, 8) for e in range(17)] in starts
    assert [b - a for a, b in zip(starts[-1], starts[-1][1:])] == [*many, *[0] * 8]


def test_samples_of_gemms_are_behind_a_gap(launched, tmp_path):
    rows = measured(["fc1", "--gap-us", "700"], tmp_path)[1]
    assert {row["gap_us"] for row in rows} == {700}
    assert {2_000_000, 1_400_000} == set(launched.sleeps) and launched.sleeps[-1] == 1_400_000
    assert launched.clock.sleep_cycles == 2_000_000


@pytest.mark.parametrize("product", ["fc1", "fc2"])
def test_a_setting_whose_result_differs_is_not_timed(launched, tmp_path, product):
    """By one bit, even that of -0; the first setting that runs is the one to equal."""
    launched.wrong[product, Knobs(tile_rows=64, stages=3)] = 0x80
    settings = f"{REFUSED};tile_rows=64;tile_rows=64,stages=3;tile_rows=128"
    rows = [row for row in measured(["gemm", "--knobs", settings], tmp_path)[1] if row["impl"] == "megamoe"]
    skipped = {(row["name"], row["knobs"]): row["skipped"] for row in rows if "skipped" in row}
    assert skipped.pop((product, "tile_rows=64,stages=3")) == "its result differs from that of tile_rows=64"
    assert set(skipped) == {("fc1", REFUSED), ("fc2", REFUSED)} and len(rows) == 8
    times = [knobs for name, knobs, _ in launched.calls if name == product]
    assert times.count(Knobs(tile_rows=64, stages=3)) == 1 and times.count(Knobs(tile_rows=128)) > 3


def test_a_setting_that_leaves_something_unwritten_differs(launched, monkeypatch, tmp_path):
    """What the setting before it wrote there does not count."""

    def fc1(x, start, pack, weights, knobs, out, tickets):
        out[: len(out) - (knobs.tile_rows == 128)].zero_()

    monkeypatch.setattr(kernels, "fc1", fc1)
    rows = measured(["fc1", "--knobs", "tile_rows=64;tile_rows=128"], tmp_path)[1]
    assert [("differs" in row.get("skipped", "")) for row in rows if row["impl"] == "megamoe"] == [True, False]


def test_a_result_that_is_not_finite_ends_the_run(launched, monkeypatch, tmp_path):
    monkeypatch.setattr(kernels, "fc2", lambda *args, out, tickets: out[1:].zero_())
    with pytest.raises(RuntimeError, match="not finite with knobs auto"):
        measured(["fc2"], tmp_path)


@pytest.mark.parametrize(("gigabytes", "experts"), [(128, 128), (64, 128), (16, 64), (4, 16), (0, 1)])
def test_experts_that_fit(monkeypatch, gigabytes, experts):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (gigabytes * GB, 0))
    b = SimpleNamespace(gather=lambda value, what: [value, 256 * GB], device="cpu")
    peers = ("scaled_mm", "scaled_grouped_mm", "deep_gemm")
    b.args = SimpleNamespace(gemm_peers=peers, settings={"auto": None})
    cfg = MoEConfig(hidden=7168, intermediate=2048, num_experts=256, top_k=8, max_tokens=8)
    assert gemms.fit_experts(b, cfg, 128, 1024) == experts


def test_row_starts():
    assert gemms.row_starts((3, 0, 2), 5).tolist() == [0, 3, 3, 5, 5, 5]
    assert gemms.row_starts((1,), 1).tolist() == [0, 1]
