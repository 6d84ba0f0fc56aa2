"""Options, clocks, peers taking turns and GPU readings of tools/bench.py, without a GPU."""

from __future__ import annotations

import importlib
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from megamoe import Knobs
from megamoe.comm import SingleWorld
from tests.cpu.bench_stand_ins import GB

# bench_stand_ins found them
names = ("bench", "forwards", "machine", "options", "peers", "peers.measure", "timing", "turns")
bench, forwards, machine, options, peers, measure, timing, turns = map(importlib.import_module, names)


@pytest.mark.parametrize(
    ("words", "processes", "why"),
    [
        (["--what", "stages,nothing"], 1, "--what nothing"),
        (["--what", "link"], 1, "several ranks"),
        (["--what", "link", "--virtual", "2"], 1, "GPUs of their own"),
        (["--what", "fc1", "--virtual", "2"], 1, "without --virtual"),
        (["--virtual", "9"], 1, "2 to 8"),
        (["--virtual", "2"], 2, "without torchrun"),
        (["--knobs", "tile_rows=96"], 1, "--knobs tile_rows=96"),
        (["--knobs", "auto;tile_row=64", "--what", "fc1"], 1, "--knobs tile_row=64: auto, or fields of Knobs"),
        (["--knobs", "auto;", "--what", "fc1"], 1, "--knobs : auto, or fields of Knobs"),
        (["--knobs", "auto;tile_rows=64; auto", "--what", "fc1"], 1, "a setting is there twice"),
        (["--knobs", "auto;tile_rows=64"], 1, "2 settings are for --what gemm, fc1 or fc2 alone, not for stages, e2e"),
        (["--knobs", "auto;tile_rows=64", "--what", "fc1,link"], 2, "alone, not for link"),
        (["--gemm-rows", "64,0"], 1, "--gemm-rows 0: 1 or more"),
        (["--gemm-experts", "0"], 1, "--gemm-experts 0: 1 or more"),
        (["--gemm-skew", "balanced,hot"], 1, "--gemm-skew hot: one of balanced, zipf"),
        (["--gap-us", "35"], 1, "--gap-us 35: 200 to 1000000"),
        (["--routing", "balanced,skewed"], 1, "--routing skewed: one of balanced, random, zipf"),
        (["--turns", "file", "--tokens", "8"], 1, "--turns: needs --experts and --tokens"),
        (["--turns", "file", "--tokens", "8", "--experts", "8"], 1, "--turns: not for section host"),
        (["--turns", ".", "--tokens", "8", "--experts", "8"], 1, "--turns .: a file in a folder"),
        (["--turns", "no/file", "--tokens", "8", "--experts", "8"], 1, "--turns no/file: a file in a folder"),
        (["--routing", "empty_rank"], 1, "several ranks"),
        (["--peers", "torch,deepep"], 1, "--peers deepep: one of torch, flashinfer_pull"),
    ],
)
def test_refused_arguments(words, processes, why, capsys):
    with pytest.raises(SystemExit):
        options.parse(words, processes)
    assert why in capsys.readouterr().err


def test_defaults(monkeypatch):
    monkeypatch.setattr(options.importlib.util, "find_spec", lambda name: None)
    args = options.parse([], 1)
    assert args.scales == ("block", "tensor") and args.knobs is None and "gemm" in args.what and "link" not in args.what
    assert (args.layer_peers, args.gemm_peers) == (("torch",), ("scaled_mm", "scaled_grouped_mm"))
    assert args.preset == "v3" and args.routing == args.gemm_skew == ["balanced"]
    assert (args.gemm_rows[0], args.gemm_rows[-1], args.gemm_experts, args.gap_us) == (1, 4096, 32, 2000)
    assert options.parse(["--gemm-rows", "512,64,512"], 1).gemm_rows == [64, 512]
    args = options.parse(["--quick", "--knobs", "tile_rows=64"], 2)
    assert args.scales == ("block",) and args.knobs.tile_rows == 64 and "link" in args.what
    monkeypatch.setattr(options.importlib.util, "find_spec", lambda name: name == "flashinfer" or None)
    assert options.parse([], 1).layer_peers == ("torch", "flashinfer_pull", "flashinfer_push")


def test_choices():
    args = options.parse(["--what", "fc1,host", "--peers", "none"], 1)
    assert args.what == ["gemm", "host"] and args.gemms == ("fc1",) and not args.layer_peers + args.gemm_peers
    args = options.parse(["--peers", "torch,deep_gemm"], 1)
    assert (args.layer_peers, args.gemm_peers) == (("torch",), ("scaled_mm", "scaled_grouped_mm", "deep_gemm"))
    args = options.parse(["--peers", "all", "--what", "gemm"], 2)
    assert len(args.layer_peers) == len(args.gemm_peers) == 3 and args.gemms == ("fc1", "fc2")
    args = options.parse(["--preset", "v4-pro", "--experts", "192"], 1)
    assert args.preset == "v4-pro" and args.shape == dict(hidden=7168, intermediate=3072, num_experts=192, top_k=6)
    args = options.parse(["--what", "ceilings,fc2", "--knobs", "auto; tile_rows=64, cluster_cols=2"], 1)
    assert args.settings == {"auto": None, "tile_rows=64,cluster_cols=2": Knobs(tile_rows=64, cluster_cols=2)}
    args_of = options.parse(["--knobs", "tile_rows=64,pingpong=True,schedule=atomic"], 1)
    assert args_of.knobs == Knobs(tile_rows=64, pingpong=True, schedule="atomic")
    assert args.knobs is None and options.parse(["--knobs", "stages=4"], 1).settings == {"stages=4": Knobs(stages=4)}
    args = options.parse(["--top-k", "4", "--intermediate", "1024"], 1)
    assert args.preset is None and args.shape["top_k"] == 4 and args.shape["intermediate"] == 1024


def test_plan_keeps_what_fits():
    args = options.parse([], 1)
    configs = options.plan(args, 1, 139 * GB)
    assert configs["block"].num_experts == 256 and configs["tensor"].max_tokens == 32768
    args = options.parse(["--preset", "v4-pro"], 1)
    configs = options.plan(args, 1, 139 * GB)
    assert configs["block"].num_experts == 384 and configs["tensor"].max_tokens == 32768
    args = options.parse([], 1)
    configs = options.plan(args, 1, 32 * GB)
    assert configs["block"].num_experts < 256 and configs["block"].max_tokens == args.tokens[-1] < 32768
    args = options.parse(["--tokens", "8"], 2)
    configs = options.plan(args, 2, 139 * GB)
    assert configs["tensor"].max_tokens == max(bench.floors.link_tokens(configs["tensor"]))


def test_command_line_hides_the_output_path(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench.py", "--quick", "--out", "/somewhere/rows.jsonl", "--tokens", "8"])
    assert machine.command_line(1) == "python tools/bench.py --quick --tokens 8"
    monkeypatch.setattr(sys, "argv", ["bench.py", "--out=/somewhere/rows.jsonl"])
    assert machine.command_line(2) == "torchrun --standalone --nproc-per-node=2 tools/bench.py"


def test_gpu_readings(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1-2"))
    asked = []

    def smi(command, **how):
        asked.append(command[-1])
        return SimpleNamespace(stdout="1980, 3201, [N/A], 51, 0x0000000000000004\n", returncode=0)

    monkeypatch.setattr(machine.subprocess, "run", smi)
    reading = machine.health(torch.device("cuda", 3))
    assert asked == ["GPU-1-2"] and (reading["sm_mhz"], reading["watts"]) == (1980, "[N/A]")
    merged = machine.over_ranks([reading, reading | dict(sm_mhz=1830.0, celsius=60.0, clock_reasons="0x8"), {}])
    assert merged == dict(sm_mhz=1830, mem_mhz=3201, watts="[N/A]", celsius=60, clock_reasons="0x0000000000000004,0x8")

    def missing(command, **how):
        raise FileNotFoundError

    monkeypatch.setattr(machine.subprocess, "run", missing)
    assert machine.health(torch.device("cuda", 0)) == {} and machine.over_ranks([{}]) == {}


def test_main_needs_a_gpu(capsys):
    if torch.cuda.is_available():
        pytest.skip("has one")
    assert bench.main(["--quick"]) == 2 and "Hopper GPU" in capsys.readouterr().err


def test_host_clock(monkeypatch):
    clock = object.__new__(timing.Clock)
    clock.world, clock.device = SingleWorld("cpu"), torch.device("cpu")
    states = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    batches = clock.host(lambda: states.append(timing.gc.isenabled()), batches=3, batch=4)
    assert [len(batch) for batch in batches] == [4, 4, 4] and states == [False] * 12 and timing.gc.isenabled()


def test_forwards_sleep_longer_while_they_are_short(monkeypatch):
    slept = []
    monkeypatch.setattr(timing, "FLUSH_BYTES", 1024)
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    clock = timing.Clock(SingleWorld("cpu"))
    clock.op = lambda launch, runs, warmup: clock.lead_in() or [1.0]
    b = SimpleNamespace(clock=clock, args=SimpleNamespace(runs=20))
    for tokens, cycles, runs in ((2048, 6_000_000, 30), (8192, 2_000_000, 15)):
        slept.clear()
        assert forwards._measure(b, {"a": int}, tokens) == {"a": [1.0] * runs} and set(slept) == {cycles}
    assert clock.sleep_cycles == 2_000_000


def test_a_gap_is_a_sleep_before_each_sample(monkeypatch):
    slept = []
    monkeypatch.setattr(timing, "FLUSH_BYTES", 1024)
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    clock = timing.Clock(SingleWorld("cpu"))
    with pytest.raises(KeyError), clock.gap(500):
        clock.lead_in()
        raise KeyError
    clock.lead_in()
    assert slept == [1_000_000, 2_000_000]  # cycles of 2 GHz


def test_runs_take_turns(tmp_path):
    seen, both = [], threading.Barrier(2, timeout=20)

    def run(name):
        both.wait()
        mine = turns.Turns(tmp_path / "turns", SingleWorld("cpu"))
        for part in range(3):
            seen.append((name, part, "in"))
            time.sleep(0.01)
            seen.append((name, part, "out"))
            with mine.lent():
                both.wait()  # only while both have lent it, neither holding the other up
        mine.close()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, "ab"))
    assert len(seen) == 12 and all(a[:2] == b[:2] for a, b in zip(seen[::2], seen[1::2]))  # never both at once


def test_a_run_alone_needs_no_turns():
    with turns.Turns(None, None).lent():
        pass


def test_summary():
    assert timing.summary([5.0, 1.0, 3.0]) == dict(us=3.0, us_min=1.0, p10=1.0, p90=5.0)
    assert timing.summary([float(n) for n in range(21)]) == dict(us=10.0, us_min=0.0, p10=2.0, p90=18.0)
    assert timing.summary([2.0])["p90"] == 2.0


# ---------------------------------------------------------------- peers


class OtherRankFails:
    """A world of two whose rank 1 gives another reason."""

    def __init__(self, other):
        self.other = other

    def gather(self, values, what):
        return [values[0], self.other(what)]


class FakePeer(peers.Peer):
    name = "fake"

    def __init__(self, error=None):
        self.error, self.log = error, []

    def why_not(self, point):
        return None

    def prepare(self, point, weights, inputs):
        self.log.append("prepare")
        if self.error:
            raise self.error

    def run(self):
        return torch.zeros(1)

    def close(self):
        self.log.append("close")


def test_ready_on_all_ranks_or_none():
    peer = FakePeer()
    assert measure.ready(OtherRankFails(lambda what: None), peer, None, None, ()) is None and peer.log == ["prepare"]
    peer = FakePeer()
    assert measure.ready(OtherRankFails(lambda what: "no nvcc"), peer, None, None, ()) == "rank 1: no nvcc"
    assert peer.log == []
    peer = FakePeer(MemoryError("no room\nfor it"))
    assert measure.ready(OtherRankFails(lambda what: None), peer, None, None, ()) == "rank 0: MemoryError: no room"
    assert peer.log == ["prepare", "close"]
    peer = FakePeer()
    world = OtherRankFails(lambda what: "OSError: x" if "prepared" in what else None)
    assert measure.ready(world, peer, None, None, ()) == "rank 1: OSError: x" and peer.log == ["prepare", "close"]


def test_launches_take_turns():
    order = []
    clock = SimpleNamespace(op=lambda launch, runs, warmup: [float(launch())] * runs)
    launches = {name: (lambda name=name: order.append(name) or len(order)) for name in "abc"}
    samples = measure.interleave(clock, launches, runs=3, warmup=1)
    assert order == list("abc") + list("bca") + list("cab") + list("abc")
    assert samples == {"a": [6.0, 8.0, 10.0], "b": [4.0, 9.0, 11.0], "c": [5.0, 7.0, 12.0]}
    assert measure.ratios(50.0, {"torch": 100.0, "none": 0.0}) == {"over_torch": 0.5}
