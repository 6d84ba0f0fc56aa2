"""Stand-ins with which tools/bench.py runs without a GPU: layers, peers, worlds, clocks and nvidia-smi."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

import megamoe
from megamoe import kernels
from megamoe.comm import SingleWorld
from megamoe.forward import STAGES
from megamoe.inputs import check_inputs, check_out
from megamoe.kernels import build

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
names = ("bench", "machine", "options", "peers", "tables", "timing")
bench, machine, options, peers, tables, timing = map(importlib.import_module, names)

SHAPE = dict(hidden=256, intermediate=128, num_experts=16, top_k=4)
GB = 1 << 30


class FakeLayer:
    """Stands in for MegaMoE: its launches are only counted, its results are its tokens."""

    calls: dict[int, int]

    def __init__(self, cfg, pack, world, knobs=None):
        self.cfg, self.world, self.number = cfg, world, len(self.calls)
        self.calls[self.number] = 0
        assert isinstance(pack, list) == (world.kind == "virtual")

    def count(self):
        self.calls[self.number] += 1

    def steps(self, rank, x, ids, weights, out):
        check_inputs(self.cfg, self.world.device(rank), x, ids, weights)
        check_out(self.cfg, self.world.device(rank), out, len(x))
        return [self.count] * len(STAGES)

    def __call__(self, x, ids, weights, out=None):
        self.count()
        xs = x if isinstance(x, list) else [x]
        for source, target in zip(xs, out if isinstance(out, list) else [out] * len(xs)):
            if target is not None:
                target.copy_(source)
        return out

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass

    def warmup(self):
        pass

    def synchronize(self):
        pass

    def _fork(self):
        self.world.forks = getattr(self.world, "forks", 0) + 1

    def _join(self):
        assert self.world.kind == "virtual"


class FakePeer(peers.Peer):
    """Stands in for a layer peer: its result is its tokens."""

    graphable = True
    note = "a stand-in"
    log: list[tuple]

    def __init__(self, name, reason=None, sign=1, parts=False):
        self.name, self.reason, self.sign, self._parts = name, reason, sign, parts

    def why_not(self, point):
        return self.reason if self.reason != "at 8192" or point.tokens == 8192 else None

    def prepare(self, point, weights, inputs):
        self.log.append((self.name, point.cfg.scale, point.tokens, id(weights)))
        self.x = inputs[0]

    def run(self):
        return self.sign * self.x

    def parts(self):
        if self._parts == "broken":
            raise RuntimeError("no half\nof it")
        return {"compute": self.run} if self._parts else {}

    def close(self):
        self.log.append((self.name, "close"))


class FakeGemm(FakePeer):
    """Stands in for a GEMM peer."""

    def prepare(self, point, weights, inputs):
        codes, scales = inputs
        assert codes.shape == (point.rows, point.size[1]) and (scales is None) == (point.cfg.scale == "tensor")

    def run(self):
        return torch.ones(3, 4)

    def check(self, point, pack, codes, scales):
        return self.run(), self.sign * self.run()


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
    for _ in range(2):
        for launch in launches:
            launch()
    return [[10.0 + i + n for n in range(runs)] for i in range(len(launches))]


class Graph:
    """Stands in for a CUDA graph."""

    def replay(self):
        pass


def fake_smi(command, **how):
    """nvidia-smi of a driver that does not know the last field; git."""
    known = "clocks_event_reasons" not in command[1]
    text = "1980, 3201, 412.5, 51" if command[0] == "nvidia-smi" and known else "" if known else "not a field"
    return SimpleNamespace(stdout=text, returncode=0 if known else 2)


def install(monkeypatch):
    """Let all launches, clocks and readings be stand-ins."""
    monkeypatch.setitem(options.PRESETS, "small", SHAPE)
    monkeypatch.setattr(options, "GEMM_ROWS", (1, 512))
    monkeypatch.setattr(megamoe, "MegaMoE", FakeLayer)
    monkeypatch.setattr(FakeLayer, "calls", {}, raising=False)
    monkeypatch.setattr(FakePeer, "log", [], raising=False)
    monkeypatch.setattr(build, "stream_handle", lambda device: 0)
    monkeypatch.setattr(kernels, "fc1", lambda x, start, pack, weights, knobs, out, tickets: out)
    monkeypatch.setattr(kernels, "fc2", lambda x, start, pack, weights, knobs, out, tickets: out.zero_())
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)  # launches write nothing
    monkeypatch.setattr(timing, "FLUSH_BYTES", 1024)
    monkeypatch.setattr(timing, "HBM_BYTES", 1024)
    monkeypatch.setattr(timing.Clock, "steps", fake_steps)
    monkeypatch.setattr(timing.Dense, "rate", lambda self, m, n, k: 1e15)
    speeds = [timing.Speed(f"peer {way}, kernel", 100.0, 10**9) for way in ("read", "write")]
    apart = lambda world: len(world.local_ranks) < world.size  # noqa: E731
    monkeypatch.setattr(timing, "measure_link", lambda clock, runs: speeds if apart(clock.world) else [])
    gpu = SimpleNamespace(name="stand-in")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (64 * GB, 64 * GB))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, capture_error_mode: contextlib.nullcontext())
    monkeypatch.setattr(machine.subprocess, "run", fake_smi)


def use(monkeypatch, layer=(), gemm=()):
    """Let stand-ins be the peers of a run."""
    monkeypatch.setattr(
        peers, "make", lambda names, known=peers.LAYER_PEERS: list(gemm if known is peers.GEMM_PEERS else layer)
    )


def go(words, world, tmp_path, size=1):
    """Rows of a dry run."""
    out = tmp_path / "rows.jsonl"
    args = options.parse([*words, "--out", str(out)], size)
    with world:
        bench.run(args, world)
    return [json.loads(line) for line in out.read_text().splitlines()]


def described(rows):
    """Fail unless the docstring of bench.py explains every key and table column."""
    keys = {key for row in rows for key in row} | {name for wanted in tables.COLUMNS.values() for name in wanted}
    for key in keys - {"experts", "over_*"}:
        own = key.startswith("over_") and key != "over_floor"
        assert ("over_<peer>" if own else key) in bench.__doc__, f"{key} is not in the docstring of bench.py"
