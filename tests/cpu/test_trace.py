"""tools/trace.py on made-up records, and what tracing adds to kernels: nothing when off, no local memory when on."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import sys
from dataclasses import fields
from pathlib import Path

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")  # read when cutlass is imported

import numpy as np
import pytest
import torch

from megamoe import layer
from megamoe.comm import SingleWorld
from megamoe.comm.ordering import StreamOrder
from megamoe.config import Knobs, MoEConfig
from megamoe.errors import ConfigError
from megamoe.forward import RankForward
from megamoe.kernels import build, trace
from megamoe.kernels.catalog import NAMES, CatalogEntry, catalog
from megamoe.kernels.exchange import exchange_grid
from megamoe.kernels.reduce import reduce_grid
from megamoe.kernels.report import report
from megamoe.kernels.stage import stage_grid
from megamoe.kernels.trace import FIELDS, NO_TILE, SLOTS, Phase, Role
from tests.cpu import traces
from tests.problems import make_weights
from tests.ptx import check, count

TOOLS = Path(__file__).resolve().parents[2] / "tools"
if str(TOOLS) not in sys.path:
    sys.path.insert(0, str(TOOLS))
timeline = importlib.import_module("timeline")
tool = importlib.import_module("tools.trace")

CLOCKS = {"stage": 1, "pull": 1, "reduce": 1}
"""Reads of the clock in an untraced kernel: stage sets the deadline, pull and reduce hold waits to it."""

# ---- kernels -------------------------------------------------------------------------------------


def both(scale: str) -> list[CatalogEntry]:
    """Every kernel once in a scale mode, as a forward compiles it."""
    return catalog(quick=True, scale=scale)


@pytest.mark.parametrize("entry", both("block"), ids=str)
def test_tracing_is_compiled_out_by_default(entry: CatalogEntry) -> None:
    kernel = entry.make()
    assert kernel.spec.trace == 0
    ptx = report(kernel).ptx
    assert count("%globaltimer", ptx) == CLOCKS.get(entry.name, 0)
    assert "%smid" not in ptx
    if not entry.name.startswith("fc"):  # a parameter for each argument but the grid, none for a buffer
        assert len(re.findall(r"^\s*\.param \.\w+ \w+_param_\d+", ptx, re.MULTILINE)) == len(kernel.ARGS) - 1


@pytest.mark.parametrize("entry", [*both("block"), *(e for e in both("tensor") if e.name in ("fc1", "fc2"))], ids=str)
def test_traced_kernels_compile_without_local_memory(entry: CatalogEntry) -> None:
    kernel = trace.traced(entry.make(), 64)
    found = report(kernel)
    check(found, kernel.spec)
    assert "%smid" in found.ptx and count("%globaltimer", found.ptx) > CLOCKS.get(entry.name, 0) + 1


def test_a_traced_forward_passes_its_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The traced kernels, and no others, get the address of their buffer behind the stream."""
    calls: dict[str, list[tuple]] = {}

    def built(kernel):
        name = type(kernel).__name__.lower().replace("tokenback", "token_back")
        return lambda *args: calls.setdefault(name, []).append((kernel, args))

    monkeypatch.setattr(build, "build", built)
    cfg = MoEConfig(hidden=256, intermediate=128, num_experts=4, top_k=2, max_tokens=16)
    with SingleWorld("cpu") as world:
        workspace, buffers = world.workspace(cfg, ""), trace.buffers(("stage", "fc1"), 4, "cpu")
        pack = make_weights(cfg, 1, 0, "cpu")[0]
        forward = RankForward(cfg, Knobs(), workspace, 0, pack, layer=1, timeout_s=1, num_sms=4, traces=buffers)
        forward.load(77)
    assert set(calls) == set(NAMES)
    for name, launched in calls.items():
        for kernel, args in launched:
            tail = (77, buffers[name].data_ptr()) if name in buffers else (77,)
            assert args[-len(tail) :] == tail and len(args) == len(kernel.ARGS) + len(tail)
            assert kernel.spec.trace == (buffers[name].shape[2] - 1 if name in buffers else 0)


@pytest.mark.parametrize("sms", [1, 3, 6])
def test_buffers_have_room_for_every_cta(sms: int) -> None:
    made = trace.buffers(NAMES, sms, "cpu")
    sizes = (0, 1, 10, 1000, 100_000)
    grids = {
        "stage": [stage_grid(7168, tokens, 8, sms) for tokens in sizes],
        "exchange": [exchange_grid(tokens, 8, sms) for tokens in sizes],
        "reduce": [reduce_grid(7168, tokens, sms) for tokens in sizes],
        "fc1": [sms, 4],  # one whole cluster of 2 x 2, even on one SM
        "fc2": [sms, 4],
    }
    assert tuple(made) == NAMES
    for name, buffer in made.items():
        assert buffer.dtype == torch.int64 and not buffer.any()
        assert buffer.shape == (
            max(grids[name]) if name in grids else sms,
            SLOTS,
            1 + trace.ROOM.get(name, trace.OTHER_ROOM),
            FIELDS,
        )


def test_no_knobs_have_a_larger_cluster() -> None:
    largest = 1
    for name in [field.name for field in fields(Knobs) if field.name.startswith("cluster")]:
        taken = []
        for size in range(1, 17):
            with contextlib.suppress(ConfigError):
                taken.append(getattr(Knobs(**{name: size}), name))
        largest *= max(taken)
    assert 1 < largest <= trace.LARGEST_CLUSTER


def test_a_buffer_that_is_too_small_is_refused() -> None:
    cfg = MoEConfig(hidden=256, intermediate=128, num_experts=4, top_k=2, max_tokens=16)
    with SingleWorld("cpu") as world, pytest.raises(ConfigError, match="'pull'"):
        workspace, pack = world.workspace(cfg, ""), make_weights(cfg, 1, 0, "cpu")[0]
        small = trace.buffers(("pull",), 3, "cpu")
        RankForward(cfg, Knobs(), workspace, 0, pack, layer=1, timeout_s=1, num_sms=4, traces=small)


# ---- records -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def records() -> np.ndarray:
    found, dropped = timeline.decode_all(traces.forward())
    assert not dropped
    return found


def test_decoding_gives_back_what_was_written() -> None:
    buffer = torch.zeros(3, SLOTS, 1 + 4, FIELDS, dtype=torch.int64)
    written = [(Phase.MAIN_LOOP, 10, 3, 2**31 - 1), (Phase.STORE, 5, 0, NO_TILE)]
    traces.put(buffer, 2, 1, 131, Role.MATH, written, 10**18)
    found, dropped = timeline.decode(buffer.numpy(), "fc1", rank=5, gpu=1)
    cycles = [(10**18 + ns) * traces.CYCLES_PER_NS % 2**32 for ns in (10, 15)]
    assert dropped == 0 and found.dtype == timeline.RECORD
    assert found.tolist() == [
        (5, 1, "fc1", 2, 1, 131, Role.MATH, Phase.MAIN_LOOP, 2**31 - 1, 10**18, 10**18 + 10, 3, cycles[0]),
        (5, 1, "fc1", 2, 1, 131, Role.MATH, Phase.STORE, NO_TILE, 10**18 + 10, 10**18 + 15, 0, cycles[1]),
    ]


def test_records_without_room_are_counted() -> None:
    buffer = torch.zeros(1, SLOTS, 1 + 4, FIELDS, dtype=torch.int64)
    traces.put(buffer, 0, 3, 0, Role.COPIER, [(Phase.COPY, 10, 3, at) for at in range(9)], 1000)
    found, dropped = timeline.decode(buffer.numpy(), "pull")
    assert found["tile"].tolist() == [0, 1, 2, 3] and dropped == 5
    assert timeline.decode_all({"pull": buffer})[1] == {"pull": 5}


def test_every_phase_and_role_has_a_look() -> None:
    assert set(timeline.LOOKS) == set(Phase) and set(timeline.ROLES) == set(Role)
    assert list(Phase) == list(range(len(Phase)))  # timeline_png.paint indexes by them
    assert all(look.waits_for for look in timeline.LOOKS.values() if look.only)
    assert max(Role) < 256 and max(Phase) < 256


def test_shares_add_up(records: np.ndarray) -> None:
    rows = timeline.shares(records)
    assert [(row["kernel"], row["role"]) for row in rows] == [
        ("stage", "all warps"),
        ("pull", "copier"),
        ("fc1", "math"),
        ("fc1", "TMA"),
        ("reduce", "all warps"),
    ]
    for row in rows:
        total = sum(row["waits"].values()) + sum(row["works"].values()) + row["between"] + row["outside"]
        assert total == pytest.approx(1) and row["outside"] >= 0
    stage, pull, math, tma, reduce = rows
    assert [row["warps"] for row in rows] == [64, 32, 16, 8, 8]
    clocks = [None, 2000, 2000, 2000, 2000]  # a warp of stage is too short to tell
    assert [row["mhz"] for row in rows] == [c and pytest.approx(c) for c in clocks]
    assert math["us"] == pytest.approx(0.5 + 20 * 13.5)  # from the TMA warp's first record on
    assert math["waits"] == {"a full stage": pytest.approx(20 * 1500 / 270_500)}
    assert math["outside"] == pytest.approx(500 / 270_500)
    assert tma["waits"] == {"an empty stage": pytest.approx(20 * 11_000 / 270_500)}
    assert reduce["waits"] == {
        "the owners' rows": pytest.approx(8 / 28.9),
        "barrier, fence, publish": pytest.approx(0.9 / 28.9),
    }
    assert set(pull["waits"]) == {"the peers' lists", "bytes of a row", "its own writes"} and not stage["waits"]
    text = timeline.table(rows)
    assert "| fc1 | math | 16 | 270.5 | 2000 | 11.1 % | a full stage 11.1 % |" in text
    assert len({line.count("|") for line in text.splitlines()}) == 1


def test_shares_count_each_ranks_own_time(records: np.ndarray) -> None:
    later = records.copy()
    later["rank"], later["start"], later["end"] = 1, later["start"] + 10**9, later["end"] + 10**9
    one, two = timeline.shares(records), timeline.shares(np.concatenate([records, later]))
    for a, b in zip(one, two):
        assert b["warps"] == 2 * a["warps"] and b["us"] == pytest.approx(a["us"])
        assert b["works"] == pytest.approx(a["works"]) and b["outside"] == pytest.approx(a["outside"])


def test_gaps_are_between_records() -> None:
    buffer = torch.zeros(1, SLOTS, 1 + 4, FIELDS, dtype=torch.int64)
    traces.put(buffer, 0, 0, 0, Role.CTA, [(Phase.SUM, 30, 0, 0)], 1000)
    traces.put(buffer, 0, 0, 0, Role.CTA, [(Phase.SUM, 30, 0, 0)], 1070)
    (row,) = timeline.shares(timeline.decode(buffer.numpy(), "reduce")[0])
    assert row["works"] == {"sum slots": pytest.approx(0.6)} and row["between"] == pytest.approx(0.4)


def test_chrome_events(records: np.ndarray, tmp_path: Path) -> None:
    timeline.write_chrome(records, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["rank 0, GPU 0"]
    assert len(threads) == len(set(threads.values())) == 8 * (8 + 4 + 2 + 1)
    drawn = [e for e in events if e["ph"] == "X"]
    assert len(drawn) == len(records) and min(e["ts"] for e in drawn) == 0
    last: dict[tuple, float] = {}
    for event in sorted(drawn, key=lambda e: (e["ts"], e["dur"])):
        place = event["pid"], event["tid"]
        assert place in threads and event["ts"] >= last.get(place, 0) - 1e-6  # nothing of a thread overlaps
        last[place] = event["ts"] + event["dur"]
    loop = next(e for e in drawn if e["name"] == "main loop" and e["args"]["waited_us"])
    assert loop["cat"] == "fc1" and (loop["dur"], loop["args"]["waited_us"]) == (12.0, 3.0)
    assert threads[loop["pid"], loop["tid"]] == "SM 000 math 1"
    assert not list(timeline.chrome_events(records[:0]))


def test_figure(records: np.ndarray) -> None:
    pytest.importorskip("matplotlib", reason="figures need matplotlib: pip install -e '.[dev]'")
    png = importlib.import_module("timeline_png")
    places = records["sm"].astype(int)
    image = png.paint(records, 8, places)
    assert image.shape == (8 * png.ROW, png.WIDTH, 3) and image.min() >= 0 and image.max() <= 1
    _, span = png.time_range(records)
    middle = (60_000 + 1500 + 6000) * png.WIDTH // span  # in the first main loop of fc1
    blue = np.array(png.to_rgb(timeline.LOOKS[Phase.MAIN_LOOP].color), np.float32)
    assert np.allclose(image[0, middle], blue, atol=1e-3)  # math 0 of SM 0 waits for nothing
    pale = image[png.ROW // 3, middle]
    assert np.allclose(pale, blue * 0.8 + 0.2, atol=1e-3)  # math 1 waits a quarter of the time
    assert (image[:, -1] != 1).any() and np.allclose(image[:, (300_000 + 60_000) * png.WIDTH // span], 1)
    figure = png.draw(records, "title")
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "main loop" in labels and "sum slots" in labels and "order and send routes" not in labels
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == [str(sm) for sm in range(8)]
    two = np.concatenate([records, records])
    two["rank"][len(records) :] = two["gpu"][len(records) :] = 1
    assert png.draw(two, "title").axes[0].get_yticklabels()[8].get_text() == "1:0"


# ---- the command line ----------------------------------------------------------------------------


def test_stored_records_make_the_same_files(
    records: np.ndarray, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tool.write(records, "what ran", tmp_path / "first")
    first = capsys.readouterr().out
    assert first.startswith("what ran\n\n| kernel | role |")
    assert (
        tool.main(["--read", str(tmp_path / "first" / "trace.npz"), "--out", str(tmp_path / "second"), "--sms", "2"])
        == 0
    )
    assert capsys.readouterr().out == first
    names = {path.name for path in (tmp_path / "second").iterdir()}
    assert names - {"trace.png"} == {"trace.npz", "trace.json"}
    events = json.loads((tmp_path / "second" / "trace.json").read_text())["traceEvents"]
    assert {e["args"]["name"][:6] for e in events if e["name"] == "thread_name"} == {"SM 000", "SM 001"}


def test_dropped_records_are_named_above_the_table(
    records: np.ndarray, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tool.write(records, "what ran", tmp_path / "first", None, {"fc1 of rank 0": 7})
    first = capsys.readouterr().out
    assert 0 < first.index("INCOMPLETE: no room for the last 7 records of fc1 of rank 0") < first.index("| kernel |")
    assert tool.main(["--read", str(tmp_path / "first" / "trace.npz"), "--out", str(tmp_path / "second")]) == 1
    assert capsys.readouterr().out == first


def test_no_records_and_no_gpu(records: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "none.npz", records=records[:0], title=np.array(""))
    assert tool.main(["--read", str(tmp_path / "none.npz"), "--out", str(tmp_path)]) == 1
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tool.main(["--out", str(tmp_path)]) == 2


def test_one_forward_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything of the tool but the kernels: of its forwards (one of them dry), the last one's records are kept."""
    launches: list[str] = []

    def launcher(kernel, buffer):
        def launch(*args):
            launches.append(type(kernel).__name__)
            if buffer is not None:
                traces.put(buffer, 0, 0, 5, Role.MATH, [(Phase.STORE, 10, 0, len(launches))], 1000)

        return launch

    monkeypatch.setattr(trace, "launcher", launcher)
    monkeypatch.setattr(layer, "choose_backend", lambda backend, world: "kernels")
    for name in ("prepare", "enter", "leave"):
        monkeypatch.setattr(StreamOrder, name, lambda *args: 0)
    monkeypatch.setattr(build, "stream_handle", lambda device: 0)
    monkeypatch.setattr(build, "on_device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 << 30, 140 << 30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "no GPU")
    shape = ["--hidden", "256", "--intermediate", "128", "--experts", "4", "--top-k", "2"]
    args = tool.parse(["--kernel", "fc1,reduce", *shape, "--tokens", "8", "--knobs", "tile_rows=64", "--out", "x"])
    with SingleWorld("cpu") as world:
        records, dropped, title = tool.measure(args, world)
    assert len(launches) == len(NAMES) * (2 + tool.WARM_UP + 1) and not dropped
    assert [(r["kernel"], r["gpu"], r["sm"]) for r in records] == [("fc1", 0, 5), ("reduce", 0, 5)]
    assert title == "no GPU: T 8, H 256, I 128, E 4, top-2, W 1, balanced routing, block scales"


@pytest.mark.parametrize(
    "args,message",
    [
        (["--kernel", "fc1,gemm"], "--kernel gemm: forward, or some of stage"),
        (["--virtual", "9"], "--virtual 9: 2 to 8"),
        (["--devices", "0,1"], "--devices: with --virtual"),
        (["--routing", "empty_rank"], "needs several ranks"),
        (["--knobs", "tile_rows=96"], "--knobs tile_rows=96: auto, or fields of Knobs"),
        (["--knobs", "auto;tile_rows=64"], "--knobs auto;tile_rows=64: auto, or fields of Knobs"),
    ],
)
def test_refusals(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tool.parse([*args, "--out", "x"])
    assert message in capsys.readouterr().err


def test_plan_takes_the_shape_and_fits_memory() -> None:
    args = tool.parse(["--tokens", "64", "--scale", "tensor", "--accum", "single", "--hidden", "512", "--out", "x"])
    assert args.kernels == NAMES
    cfg = tool.plan(args, 2, 60 << 30)
    assert (cfg.hidden, cfg.max_tokens, cfg.scale, cfg.accum) == (512, 64, "tensor", "single")
    args = tool.parse(["--kernel", "fc2,pull", "--knobs", "tile_cols=256,cluster_cols=2", "--out", "x"])
    assert args.kernels == ("fc2", "pull") and args.knobs == Knobs(tile_cols=256, cluster_cols=2)
    assert tool.parse(["--out", "x"]).knobs is None
