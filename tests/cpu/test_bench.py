"""tools/bench.py without a GPU: dry runs of every section, in which launches and clocks are stand-ins."""

from __future__ import annotations

import importlib
import json

import pytest
import torch

from megamoe.comm import VirtualWorld
from megamoe.forward import STAGES
from tests.cpu.bench_stand_ins import GB, FakeGemm, FakeLayer, FakePeer, described, go, install, use, world_of

options, timing = map(importlib.import_module, ("options", "timing"))
LEFT_OUT = {1: {"link"}, 2: {"gemm"}}


@pytest.fixture
def dry(monkeypatch):
    install(monkeypatch)


@pytest.mark.parametrize("size", [1, 2])
def test_dry_run(dry, monkeypatch, tmp_path, capsys, size):
    use(monkeypatch, [FakePeer("torch"), FakePeer("flashinfer_pull", "not here")], [FakeGemm("scaled_mm")])
    rows = go(["--preset", "small", "--tokens", "8,8192"], world_of(size), tmp_path, size)
    assert {row["what"] for row in rows} == {*options.SECTIONS, "gpu"} - LEFT_OUT[size]
    assert sum(row["what"] == "stages" for row in rows) == 2 * 2 * len(STAGES)
    shared = dict(W=size, gpu="stand-in", preset="small", event_pair_us=14.5, world="processes", execution="staged")
    assert all({key: row[key] for key in shared} == shared for row in rows)
    described(rows)
    printed = capsys.readouterr().out
    assert printed.rstrip().endswith("bars pass.") and "### host" in printed and "- torch: a stand-in" in printed
    barred = {(row["what"], row["name"]) for row in rows if "bar" in row}
    assert barred == {("stages", "stage"), ("stages", "reduce"), ("host", "eager")} | (
        {("gemm", "fc1"), ("gemm", "fc2")} if size == 1 else {("link", "pull"), ("link", "token_back")}
    )
    forwards = [row for row in rows if row["what"] in ("stages", "link", "e2e") and row["impl"] == "megamoe"]
    assert all(row["traffic"]["sent"] == row["T"] * 4 for row in forwards)
    assert all(row["p10"] <= row["us"] <= row["p90"] and row["us_min"] <= row["p10"] for row in forwards)
    gpu = [row for row in rows if row["what"] == "gpu"]
    assert gpu[0]["name"] == "start" and len(gpu) == 1 + 2 * (len(options.SECTIONS) - 1 - len(LEFT_OUT[size]))
    assert (gpu[0]["sm_mhz"], gpu[0]["watts"], "clock_reasons" in gpu[0]) == (1980, 412.5, False)


def test_a_run_lends_its_turn_to_compilers(dry, monkeypatch, tmp_path):
    turns, events = importlib.import_module("turns"), []
    monkeypatch.setattr(turns.Turns, "take", lambda self: events.append("take"))
    monkeypatch.setattr(turns.Turns, "give", lambda self: events.append("give"))
    monkeypatch.setattr(FakeLayer, "warmup", lambda self: events.append("warmup"))

    def prepare(self, point, weights, inputs):
        self.x = inputs[0]
        with self.compiling():
            events.append("prepare")

    monkeypatch.setattr(FakePeer, "prepare", prepare)
    use(monkeypatch, [FakePeer("a")], [])
    words = ["--preset", "small", "--what", "e2e", "--scale", "block", "--tokens", "128", "--experts", "16"]
    go([*words, "--turns", str(tmp_path / "turns")], world_of(1), tmp_path)
    lent = lambda what: ["give", what, "take"]  # noqa: E731
    assert sorted(events) == sorted(["take", *lent("warmup"), *lent("prepare")])
    for what in ("warmup", "prepare"):
        assert events[events.index(what) - 1 : events.index(what) + 2] == lent(what)


def test_peers_take_turns_with_ours(dry, monkeypatch, tmp_path):
    broken = FakePeer("b", parts="broken")
    wrong, late = FakePeer("c", sign=-1), FakePeer("d", reason="at 8192")
    late.graphable = False
    use(monkeypatch, [FakePeer("a", parts=True), broken, wrong, late])
    rows = go(["--preset", "small", "--what", "e2e", "--tokens", "8,8192"], world_of(1), tmp_path)
    rows = [row for row in rows if row["what"] == "e2e" and row["scale"] == "block"]
    of = {(row["impl"], row["T"], row["name"]): row for row in rows}
    assert len(of) == len(rows) and [row["impl"] for row in rows[-4:]] == ["megamoe"] * 4
    assert {key[1:] for key in of if key[0] == "a"} == {
        (tokens, name) for tokens in (8, 8192) for name in ("eager", "graph", "compute")
    }
    assert of["b", 8, "compute"]["skipped"] == "RuntimeError: no half" and of["b", 8, "graph"]["us"]
    assert "cosine -1.0" in of["c", 8, "eager"]["skipped"] and ("c", 8, "graph") not in of
    assert of["d", 8192, "eager"]["skipped"] == "at 8192" and of["d", 8, "eager"]["us"]
    assert of["a", 8, "eager"]["ours_us"] == of["a", 8, "eager"]["us"] and "ours_us" not in of["a", 8, "compute"]
    eager, graph = of["megamoe", 8, "eager"], of["megamoe", 8192, "graph"]
    assert {key for key in eager if key.startswith("over_")} == {"over_floor", "over_a", "over_b", "over_d"}
    assert {key for key in graph if key.startswith("over_")} == {"over_floor", "over_a", "over_b"}
    assert (eager["runs"], graph["runs"]) == (3 * 30, 2 * 15) and (eager["packs"], graph["packs"]) == (2, 1)
    assert eager["tflops"] == pytest.approx(6 * 8 * 4 * 256 * 128 / eager["us"] / 1e6)
    # One peer at a time, of whose weights the source is the same at every T of a scale mode.
    log = [entry for entry in FakePeer.log if entry[0] == "a"]
    assert [entry[1] for entry in log] == ["block", "block", "close", "tensor", "tensor", "close"]
    assert log[0][3] == log[1][3]
    first = FakePeer.log.index(("a", "close"))
    assert all(entry[0] == "a" for entry in FakePeer.log[:first])


def test_points_without_a_peer_are_measured_alone(dry, monkeypatch, tmp_path):
    use(monkeypatch, [FakePeer("a", reason="not here")])
    words = ["--hidden", "128", "--preset", "small", "--what", "e2e", "--tokens", "8", "--scale", "block"]
    rows = go([*words, "--routing", "random,zipf,hot_expert"], world_of(1), tmp_path)
    rows = [row for row in rows if row["what"] == "e2e"]
    assert [(row["routing"], row["name"]) for row in rows if row["impl"] == "megamoe"] == [
        (kind, name) for kind in ("random", "zipf", "hot_expert") for name in ("eager", "graph")
    ]
    assert [row["skipped"] for row in rows if row["impl"] == "a"] == ["not here"] * 3
    assert all(row["preset"] is None and row["hidden"] == 128 for row in rows)


def test_a_run_that_breaks_off_keeps_our_rows(dry, monkeypatch, tmp_path):
    peer = FakePeer("a")
    monkeypatch.setattr(peer, "why_not", lambda point: None if point.tokens == 8 else 1 / 0)
    use(monkeypatch, [peer])
    with pytest.raises(ZeroDivisionError):
        go(["--preset", "small", "--what", "e2e", "--tokens", "8,16"], world_of(1), tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["impl"] for row in rows if row["what"] == "e2e"] == ["a", "a", "megamoe", "megamoe"]
    assert FakePeer.log[-1] == ("a", "close")


def test_gemm_rows(dry, monkeypatch, tmp_path):
    every = [FakeGemm("scaled_mm"), FakeGemm("deep_gemm", sign=-1), FakeGemm("scaled_grouped_mm", "no")]
    use(monkeypatch, gemm=every)
    rows = go(["--preset", "small", "--what", "fc2"], world_of(1), tmp_path)
    rows = [row for row in rows if row["what"] == "gemm"]
    assert {row["name"] for row in rows} == {"fc2"} and len(rows) == 2 * 2 * 4
    ours = next(row for row in rows if row["impl"] == "megamoe" and row["rows_per_expert"] == 512)
    assert "over_scaled_mm" in ours and "over_deep_gemm" not in ours and ours["experts"] == 16
    reasons = {row["impl"]: row["skipped"] for row in rows if "skipped" in row}
    assert reasons["scaled_grouped_mm"] == "no" and "differs" in reasons["deep_gemm"]
    dense = next(row for row in rows if row["impl"] == "scaled_mm")
    assert dense["ours_us"] and dense["tflops"] and dense["over_floor"] and "bar" not in dense


def test_link_times_a_launch_among_others(dry, monkeypatch, tmp_path):
    calls = []

    def steps(self, launches, runs, warmup=3, *, aligned=()):
        before = sum(FakeLayer.calls.values())
        times = []
        for launch in launches:
            launch()
            calls.append(sum(FakeLayer.calls.values()) - before)
            before += calls[-1]
            times.append([7.0 + 100.0 * calls[-1]] * runs)
        return times

    monkeypatch.setattr(timing.Clock, "steps", steps)
    rows = go(["--preset", "small", "--what", "link", "--quick"], world_of(2), tmp_path, 2)
    rows = [row for row in rows if row["what"] == "link"]
    assert {row["name"] for row in rows} == {"pull", "token_back"} and 4 in calls
    for row in rows:
        assert (row["us"], row["us_each"]) == (107.0, 100.0) and row["routing"] == "all_remote"
        assert row["gbps_each"] == pytest.approx(row["bytes"] / 100 / 1e3)
        assert row["link_gbps_each"] > row["link_gbps"]
        assert max(row["out_gbps"]) == pytest.approx(row["link_gbps_each"]) and row["out_even"] == 1


def test_virtual_world(dry, monkeypatch, tmp_path):
    use(monkeypatch, [FakePeer("torch")])
    world = VirtualWorld(2, devices=["cpu"])
    words = ["--virtual", "2", "--preset", "small", "--tokens", "8,128", "--routing", "balanced,empty_rank"]
    rows = go([*words, "--scale", "block"], world, tmp_path)
    assert world.forks and {row["what"] for row in rows} == {"gpu", "ceilings", "stages", "e2e", "host"}
    assert all(row["world"] == "virtual" and row["W"] == 2 and "bar" not in row for row in rows)
    described(rows)
    skipped = [row["skipped"] for row in rows if row.get("impl") == "torch"]
    assert len(skipped) == 4 and "share a process" in skipped[0]
    (pulls,) = [r for r in rows if (r["what"], r.get("name"), r.get("routing")) == ("stages", "pull", "balanced")][:1]
    record = 272  # 256 codes and 2 scales, a multiple of 16
    assert pulls["bytes"] == 2 * 8 * 4 * record and "link_bytes" not in pulls and "rank" not in pulls
    empty = [row for row in rows if row.get("routing") == "empty_rank" and row["name"] == "pull"]
    assert [row["bytes"] for row in empty] == [8 * 4 * record, 128 * 4 * record]


def test_empty_rank_over_processes(dry, monkeypatch, tmp_path):
    use(monkeypatch)
    words = ["--preset", "small", "--what", "e2e,host", "--tokens", "8", "--routing", "empty_rank", "--peers", "none"]
    rows = go(words, world_of(2), tmp_path, 2)
    assert {row["routing"] for row in rows if row["what"] in ("e2e", "host")} == {"empty_rank"}


def test_small_batches_rotate_layers(dry, monkeypatch, tmp_path):
    use(monkeypatch)
    go(["--preset", "small", "--what", "stages", "--tokens", "8", "--scale", "block"], world_of(1), tmp_path)
    assert FakeLayer.calls == {0: len(STAGES), 1: len(STAGES)}
    FakeLayer.calls.clear()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GB, GB))
    rows = go(["--preset", "small", "--what", "e2e", "--tokens", "8", "--scale", "block"], world_of(1), tmp_path)
    assert list(FakeLayer.calls) == [0] and rows[-2]["packs"] == 1
