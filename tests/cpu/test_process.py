"""Layers in processes as hosts have them: threads, streams, default devices, inference mode, lost memory. No GPU.

The layers run on the reference backend; tests/gpu/test_process.py has the same on kernels.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from megamoe import (
    AbortedBadInput,
    AbortedPoolOverflow,
    ArgumentError,
    ConfigError,
    InputError,
    Knobs,
    MegaMoE,
    MegaMoEError,
    MoEConfig,
    VirtualWorld,
    WorldError,
    memory_estimate,
    reference,
    wire,
    world,
)
from megamoe.comm import SingleWorld, ordering, virtual
from tests.problems import make_inputs, make_weights

CFG = MoEConfig(hidden=128, intermediate=128, num_experts=8, top_k=2, max_tokens=64)


def layer_on(world, cfg=CFG, seed=0, **kwargs) -> MegaMoE:
    packs = make_weights(cfg, world.size, seed, "cpu")
    return MegaMoE(cfg, packs if world.kind == "virtual" else packs[0], world, **kwargs)


def oracle(moe: MegaMoE, p) -> list[torch.Tensor]:
    return reference.layer(moe.cfg, [pack.canonical() for pack in moe.experts], p.xs, p.ids, p.weights)


# ---- the reference backend -----------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["block", "tensor"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_reference_backend_is_the_oracle(size, scale) -> None:
    cfg = MoEConfig(**{**vars(CFG), "scale": scale})
    with VirtualWorld(size, devices=["cpu"]) as w, layer_on(w, cfg) as moe:
        assert moe.backend == "reference"
        for kind in ("random", "masked", "all_masked", "one_rank_empty"):
            p = make_inputs(cfg, [64, 0, 7, 1][:size], kind, 3, "cpu")
            got = moe(p.xs, p.ids, p.weights)
            moe.synchronize()
            assert all(torch.equal(a, b) for a, b in zip(got, oracle(moe, p)))
            codes = [reference.stage(cfg, x, moe.experts[0].x_scale) for x in p.xs]
            again = moe([c if s is None else (c, s) for c, s in codes], p.ids, p.weights)
            assert all(torch.equal(a, b) for a, b in zip(got, again))


def test_it_aborts_as_kernels_do() -> None:
    cfg = MoEConfig(**{**vars(CFG), "pool_rows": 20})
    with VirtualWorld(2, devices=["cpu"]) as w, layer_on(w, cfg, check_routes=True) as moe:
        good = make_inputs(cfg, [4, 5], "random", 0, "cpu")
        want = oracle(moe, good)

        def recovers() -> None:
            with pytest.raises(MegaMoEError):
                moe(good.xs, good.ids, good.weights)
            moe.reset()
            assert all(torch.equal(a, b) for a, b in zip(moe(good.xs, good.ids, good.weights), want))

        spoils = [
            (lambda p: p.ids[1].__setitem__((2, 1), 8), "outside -1 .. num_experts-1 .token 2, expert 8"),
            (lambda p: p.ids[1].__setitem__((2, 1), -2), "outside -1 .. num_experts-1 .token 2, expert -2"),
            (lambda p: p.ids[1].__setitem__((2, 1), p.ids[1][2, 0]), "names one expert twice in a token .token 2"),
            (lambda p: p.weights[1].__setitem__((2, 1), float("nan")), "not finite on a live route .token 2"),
        ]
        for spoil, text in spoils:
            p = make_inputs(cfg, [4, 5], "random", 0, "cpu")
            spoil(p)
            ys = moe(p.xs, p.ids, p.weights)
            assert all(y.isnan().all() for y in ys)
            with pytest.raises(AbortedBadInput, match=f"rank 1: .*{text}"):
                moe.check()
            recovers()
        p = make_inputs(cfg, [21, 0], "one_expert", 0, "cpu")
        assert all(y.isnan().all() for y in moe(p.xs, p.ids, p.weights))
        with pytest.raises(AbortedPoolOverflow, match="21 routes arrived at rank 1, its pool holds 20"):
            moe.synchronize()
        recovers()


def test_who_may_choose_a_backend() -> None:
    with SingleWorld("cpu") as w:
        with pytest.raises(ConfigError, match=r"backend = 'kernels'.*on a CPU"):
            layer_on(w, backend="kernels")
        with pytest.raises(ConfigError, match="backend = 'torch'"):
            layer_on(w, backend="torch")
        w.kind = "nvshmem"
        with pytest.raises(ConfigError, match=r"backend = 'reference'.*one process a GPU"):
            layer_on(w, backend="reference")
        w.kind = "single"
    assert world(device="cpu").kind == "single"


# ---- modes around a layer ------------------------------------------------------------------------


def test_a_layer_made_in_inference_mode_can_be_reset_outside() -> None:
    with torch.inference_mode():
        w = VirtualWorld(2, devices=["cpu"])
        moe = layer_on(w, check_routes=True)
        p = make_inputs(CFG, [4, 5], "random", 0, "cpu")
        bad = [ids.clone() for ids in p.ids]
        bad[0][0, 0] = 99
        moe(p.xs, bad, p.weights)
    with pytest.raises(AbortedBadInput):
        moe.synchronize()
    moe.reset()
    moe._workspace.poison()
    assert all(torch.equal(a, b) for a, b in zip(moe(p.xs, p.ids, p.weights), oracle(moe, p)))
    moe.close(), w.close()


def test_tensors_of_inference_mode_are_inputs_and_outputs_outside() -> None:
    with SingleWorld("cpu") as w, layer_on(w) as moe:
        p = make_inputs(CFG, [5], "random", 0, "cpu")
        args = (p.xs[0], p.ids[0], p.weights[0])
        want = moe(*args)
        with torch.inference_mode():
            copies, out = [t.clone() for t in args], torch.empty_like(want)
        assert torch.equal(moe(*copies), want) and torch.equal(moe(*copies, out=out), want)
        with torch.inference_mode():
            assert torch.equal(moe(*args), want) and torch.equal(moe(*args, out=torch.empty_like(want)), want)


@pytest.mark.parametrize("size", [1, 2])
def test_a_default_device_around_everything_changes_nothing(size) -> None:
    scales = dict(x_scale=0.5, act_scale=0.25)
    cfg = MoEConfig(**{**vars(CFG), "scale": "tensor"})
    packs = make_weights(cfg, size, 0, "cpu", **scales)
    p = make_inputs(cfg, [9] * size, "random", 0, "cpu")
    with torch.device("meta"), VirtualWorld(size, devices=["cpu"]) as w, MegaMoE(cfg, packs, w) as moe:
        got = moe(p.xs, p.ids, p.weights)
        moe.synchronize(), moe.reset()
        again = moe(p.xs, p.ids, p.weights)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(got, again, oracle_of(cfg, packs, p)))


def oracle_of(cfg, packs, p) -> list[torch.Tensor]:
    return reference.layer(cfg, [pack.canonical() for pack in packs], p.xs, p.ids, p.weights)


def test_a_layer_cannot_be_made_of_fake_memory() -> None:
    from torch._subclasses import FakeTensorMode

    packs = make_weights(CFG, 1, 0, "cpu")
    refused = pytest.raises(WorldError, match=r"FakeTensor.*outside FakeTensorMode")
    with SingleWorld("cpu") as w, refused, FakeTensorMode():
        MegaMoE(CFG, packs[0], w)


# ---- memory that lost what it held ---------------------------------------------------------------


@pytest.mark.parametrize("byte", [0xFF, 0x7F, 0x5A, 0x3F, 0])
def test_reset_restores_what_lost_memory_held(byte) -> None:
    with VirtualWorld(2, devices=["cpu"]) as w, layer_on(w) as moe:
        p = make_inputs(CFG, [9, 30], "random", 0, "cpu")
        want = moe(p.xs, p.ids, p.weights)
        workspace = moe._workspace
        deltas = [t.clone() for t in workspace._arena.deltas.values()]
        for held in (workspace._arena.tensors, workspace._arena.deltas, workspace._local, workspace._scratch):
            for tensor in held.values():
                tensor.view(torch.uint8).fill_(byte)
        if byte:
            with pytest.raises(MegaMoEError, match=r"control block of rank 0 .* call reset\(\)"):
                moe.synchronize()
        moe.reset()
        moe.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(workspace._arena.deltas.values(), deltas))
        for rank in range(2):
            control, scratch = workspace.control(rank).tolist(), workspace._scratch[rank].tolist()
            epoch = control[wire.EPOCH]
            flags = control[wire.LIST_FLAG : wire.RETURN_FLAG + wire.MAX_RANKS]
            assert epoch == workspace.control(0)[wire.EPOCH] >= 2 and set(flags) == {epoch}
            assert not any(control[wire.RETURN_FLAG + wire.MAX_RANKS :]) and not control[wire.ABORT]
            assert scratch[wire.ABORT] == 1 + rank and sum(map(bool, scratch)) == 1
            for name in ("send_counts", "send_cursors", "tickets"):
                assert not workspace._bytes(rank, name).any()
        assert all(torch.equal(a, b) for a, b in zip(moe(p.xs, p.ids, p.weights), want))


def test_a_last_possible_epoch_is_not_continued() -> None:
    with SingleWorld("cpu") as w, layer_on(w) as moe:
        moe._workspace.control(0)[wire.EPOCH] = (1 << 62) - 1
        moe.reset()
        moe.synchronize()


def test_a_record_of_garbage_asks_for_a_reset() -> None:
    with SingleWorld("cpu") as w, layer_on(w) as moe:
        moe._workspace._words[0][wire.HOST_STATE] = 1
        with pytest.raises(MegaMoEError, match=r"call reset\(\)"):
            moe.check()
        moe.reset()
        moe.check()


# ---- threads and streams -------------------------------------------------------------------------


def test_threads_on_layers_of_one_workspace_get_their_own_results() -> None:
    with SingleWorld("cpu") as w:
        layers = [layer_on(w, seed=seed) for seed in range(2)]
        problems = [make_inputs(CFG, [1 + 7 * i], "random", i, "cpu") for i in range(8)]
        wants = [oracle(layers[i % 2], p)[0] for i, p in enumerate(problems)]

        def work(i: int) -> bool:
            p = problems[i % 8]
            return torch.equal(layers[i % 8 % 2](p.xs[0], p.ids[0], p.weights[0]), wants[i % 8])

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(work, range(64)))
        assert moe_epoch(layers[0]) == 64
        for moe in layers:
            moe.close()


def moe_epoch(moe: MegaMoE) -> int:
    return moe._workspace.epoch()


class FakeStream:
    """A CUDA stream that notes what waits for what. foreign: not made by torch, so that its id is its handle."""

    def __init__(self, handle: int, log: list, foreign: bool = False) -> None:
        self.cuda_stream, self.stream_id, self.log, self.capture = handle, handle if foreign else 3, log, 0

    def record_event(self) -> str:
        return f"end of {self.cuda_stream}"

    def wait_event(self, event: object) -> None:
        self.log.append((self.cuda_stream, str(event)))


class FakeEvent:
    cuda_event = 1

    def record(self, stream: FakeStream) -> None:
        assert stream is not None
        self.stream = stream
        stream.log.append(f"record {stream.cuda_stream}")

    def __str__(self) -> str:
        return f"recorded on {self.stream.cuda_stream}"


class Streams:
    """torch.cuda and the driver with streams that only note; calls: the driver's, without those that look."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now: FakeStream | None = None
        self.calls: list[tuple] = []
        self.nodes = 0
        monkeypatch.setattr(ordering, "_current_handle", lambda index: self.now.cuda_stream)
        monkeypatch.setattr(ordering, "_is_capturing", lambda: bool(self.now.capture))
        monkeypatch.setattr(ordering, "_capture_info", self.capture_info)
        monkeypatch.setattr(ordering, "_call", self.call)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.now)
        monkeypatch.setattr(torch.cuda, "stream", self.switched)
        monkeypatch.setattr(torch.cuda, "Event", FakeEvent)

    @contextmanager
    def switched(self, stream: FakeStream):
        before, self.now = self.now, stream
        yield
        self.now = before

    def capture_info(self, stream: FakeStream) -> tuple:
        return stream.capture, f"graph {stream.capture}", (9, self.nodes)  # node 9 is never the last

    def call(self, name: str, *args: object) -> tuple:
        self.calls.append((name.removesuffix("_v2"), *args))
        return ("the record",)

    def order(self) -> ordering.StreamOrder:
        """An order whose event was recorded on stream 0."""
        order, self.now = ordering.StreamOrder(), FakeStream(0, [])
        order.prepare(torch.device("cuda", 0))
        return order

    def forward(self, order: ordering.StreamOrder, stream: FakeStream) -> None:
        self.now, self.nodes = stream, self.nodes + 1
        with order.lock:
            assert order.enter(torch.device("cuda", 0)) == stream.cuda_stream
            order.leave()


def test_a_change_of_streams_is_a_dependency(monkeypatch) -> None:
    streams, log = Streams(monkeypatch), []
    order = streams.order()
    a, b = FakeStream(1001, log), FakeStream(1002, log)
    for stream in (a, a, b, b, a):
        streams.forward(order, stream)
    first = [(1001, "recorded on 0"), "record 1001", (1002, "recorded on 1001")]
    assert log == [*first, "record 1002", (1001, "recorded on 1002")]  # nothing where the stream is the same


def test_streams_that_may_be_destroyed_leave_an_event(monkeypatch) -> None:
    streams, log = Streams(monkeypatch), []
    order = streams.order()
    own, foreign = FakeStream(1001, log), FakeStream(2002, log, foreign=True)
    streams.forward(order, foreign)
    assert log == [(2002, "recorded on 0"), "record 2002"]
    foreign.log = None  # as destroyed
    streams.forward(order, own)
    assert log[2:] == [(1001, "recorded on 2002"), "record 1001"]


def test_a_stream_under_capture_elsewhere_cannot_be_waited_for(monkeypatch) -> None:
    streams, log = Streams(monkeypatch), []
    order = streams.order()
    first, other = FakeStream(1001, log), FakeStream(1002, log)
    streams.forward(order, first)
    first.capture = 5
    for _ in range(2):  # a refused forward changes nothing
        with pytest.raises(MegaMoEError, match="captured in a graph by another thread"):
            streams.forward(order, other)
    first.capture = 0
    streams.forward(order, other)
    assert log[1:] == ["record 1001", (1002, "recorded on 1001")]


def test_graphs_wait_for_the_event_and_record_it_after_their_last_forward(monkeypatch) -> None:
    streams, log = Streams(monkeypatch), []
    order = streams.order()
    eager, one, two, other = (FakeStream(handle, log) for handle in (1001, 1002, 1003, 1004))
    one.capture = two.capture = 7
    other.capture = 8
    streams.forward(order, eager)
    log.clear()
    for stream in (one, one, two, other):
        streams.forward(order, stream)
    assert log == ["record 1001", (1003, "end of 1002")]  # the last eager one, then an edge within the capture
    waits = [(int(c[1]), c[3].name) for c in streams.calls if c[0] == "cuStreamWaitEvent"]
    assert waits == [(1002, "CU_EVENT_WAIT_EXTERNAL"), (1004, "CU_EVENT_WAIT_EXTERNAL")]
    changes = [c[:3] if "Node" in c[0] else (*c[:4], c[5]) for c in streams.calls if c[0] != "cuStreamWaitEvent"]
    assert changes == [
        ("cuGraphAddEventRecordNode", "graph 7", (9, 2)),
        ("cuGraphAddDependencies", "graph 7", [3], ["the record"], 1),
        ("cuGraphRemoveDependencies", "graph 7", [2], ["the record"], 1),
        ("cuGraphAddDependencies", "graph 7", [4], ["the record"], 1),
        ("cuGraphRemoveDependencies", "graph 7", [3], ["the record"], 1),
        ("cuGraphAddEventRecordNode", "graph 8", (9, 5)),
    ]
    log.clear()
    streams.forward(order, eager)  # on the stream of the eager forward before: a replay may have come in between
    assert log == [(1001, "recorded on 1001"), "record 1001"]
    for number in range(20, 60):
        other.capture = number
        streams.forward(order, other)
    assert len(order._captures) <= ordering.MOST_CAPTURES


def test_a_capture_that_cannot_wait_is_not_taken_for_one_that_does(monkeypatch) -> None:
    streams = Streams(monkeypatch)
    order = streams.order()
    stream = FakeStream(1002, [])
    stream.capture = 7

    def refuse(name: str, *args: object) -> tuple:
        raise MegaMoEError(name)

    for _ in range(2):
        monkeypatch.setattr(ordering, "_call", refuse)
        with pytest.raises(MegaMoEError, match="cuStreamWaitEvent"):
            streams.forward(order, stream)
    monkeypatch.setattr(ordering, "_call", streams.call)
    streams.forward(order, stream)
    assert streams.calls[0][0] == "cuStreamWaitEvent"


def test_what_the_driver_refuses_is_named(monkeypatch) -> None:
    from cuda.bindings import driver

    monkeypatch.setattr(driver, "cuEventCreate", lambda flags: (driver.CUresult.CUDA_ERROR_INVALID_VALUE, None))
    with pytest.raises(MegaMoEError, match="in a CUDA graph: cuEventCreate gave CUDA_ERROR_INVALID_VALUE"):
        ordering._call("cuEventCreate", 0)


def test_threads_wait_for_each_others_launches(monkeypatch) -> None:
    """A forward's launches are never among another's: the kernel path, with a launch that takes its time."""
    with SingleWorld("cpu") as w:
        moe = layer_on(w)
        moe.backend, moe._warm = "kernels", True
        streams, inside = Streams(monkeypatch), []
        streams.now = FakeStream(1001, [])
        moe._workspace.order.prepare(torch.device("cuda", 0))
        turn = threading.Event()

        class Slow:
            def launch(self, call, handle) -> None:
                inside.append(threading.get_ident())
                assert len(inside) == 1, "two threads launch at once"
                turn.wait(0.02)
                inside.pop()

        monkeypatch.setattr(moe, "_forward", lambda index, tokens: Slow())
        monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
        p = make_inputs(CFG, [3], "random", 0, "cpu")
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: moe(p.xs[0], p.ids[0], p.weights[0]), range(12)))
        moe.close()


@pytest.mark.parametrize("end", ["layer", "world"])
def test_closing_beside_a_call_is_named_and_harms_no_other_layer(end, monkeypatch) -> None:
    """The call is past its checks when another thread closes the layer or the world."""
    w = SingleWorld("cpu")
    moe, other = layer_on(w), layer_on(w, seed=1)
    moe.warmup(), other.warmup()
    p = make_inputs(CFG, [3], "random", 0, "cpu")
    checked = moe._check

    def slow(*args):
        found = checked(*args)
        thread = threading.Thread(target=moe.close if end == "layer" else w.close)
        thread.start(), thread.join()
        return found

    monkeypatch.setattr(moe, "_check", slow)
    with pytest.raises(MegaMoEError, match="closed"):
        moe(p.xs[0], p.ids[0], p.weights[0])
    if end == "layer":
        assert torch.equal(other(p.xs[0], p.ids[0], p.weights[0]), oracle(other, p)[0])
    other.close(), w.close()


def test_one_output_for_two_ranks_is_refused() -> None:
    with VirtualWorld(2, devices=["cpu"]) as w, layer_on(w) as moe:
        p = make_inputs(CFG, [3, 3], "random", 0, "cpu")
        out = torch.empty_like(p.xs[0])
        with pytest.raises(InputError, match="one tensor for several ranks"):
            moe(p.xs, p.ids, p.weights, out=[out, out])
        both = torch.empty(6, CFG.hidden, dtype=torch.bfloat16)
        with pytest.raises(InputError, match="one tensor for several ranks"):
            moe(p.xs, p.ids, p.weights, out=[both[:3], both[2:5]])
        moe(p.xs, p.ids, p.weights, out=[both[3:], both[:3]])


def test_a_world_is_closed_once_whoever_closes_it(monkeypatch) -> None:
    w = SingleWorld("cpu")
    layer_on(w).close()
    downs, started = [], threading.Event()
    monkeypatch.setattr(w, "_shut_down", lambda: downs.append(1))
    freed = w._workspaces[CFG].free
    monkeypatch.setattr(w._workspaces[CFG], "free", lambda: (started.set(), threading.Event().wait(0.1), freed()))
    first = threading.Thread(target=w.close)
    first.start(), started.wait()
    w.close()
    first.join()
    assert downs == [1] and w._state == "closed"
    with pytest.raises(WorldError, match="closed"):
        layer_on(w)


def test_warmup_of_a_layer_that_another_thread_closed() -> None:
    with SingleWorld("cpu") as w:
        moe, failures = layer_on(w), []

        def warm() -> None:
            try:
                moe.warmup()
            except MegaMoEError as error:
                failures.append(str(error))

        with moe._workspace.order.lock:
            thread = threading.Thread(target=warm)
            thread.start()
            threading.Event().wait(0.1)
            moe.close()
        thread.join()
        assert failures == ["this MegaMoE is closed"]


@pytest.mark.parametrize(("value", "ranks", "refused"), [("1", 2, True), ("1", 1, False), ("0", 2, False)])
def test_blocking_launches_refuse_several_virtual_ranks(value, ranks, refused, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", value)
    if refused:
        with pytest.raises(WorldError, match="CUDA_LAUNCH_BLOCKING=1: 2 virtual ranks need launches that do not wait"):
            virtual._require_asynchronous_launches(ranks)
    else:
        virtual._require_asynchronous_launches(ranks)
    VirtualWorld(ranks, devices=["cpu"]).close()  # no launches there


# ---- what a person sees --------------------------------------------------------------------------


def test_reprs_say_what_it_is() -> None:
    with VirtualWorld(2, devices=["cpu"]) as w:
        assert repr(w) == "<open virtual world: 2 ranks on cpu, 0.0 MiB of workspaces a rank, timeout 30 s>"
        moe = layer_on(w, knobs=Knobs(tile_rows=64))
        text = repr(moe)
        for part in ("layer 1", "H 128, I 128, E 8, top 2, T <= 64", "e4m3, block scales", "reference backend"):
            assert part in text
        estimate = memory_estimate(CFG, 2)
        held = f"{(estimate['arena'] + estimate['pools']) / 2**20:.1f} MiB of workspaces a rank"
        assert "not warmed up" in text and held in text and not held.startswith("0.0")
        moe.warmup()
        assert ", warm, " in repr(moe)
        moe.close()
        assert ", closed, " in repr(moe)
    assert repr(w).startswith("<closed virtual world")


def test_reprs_of_what_was_not_made() -> None:
    assert repr(MegaMoE.__new__(MegaMoE)) == "<MegaMoE that was not made>"
    assert repr(SingleWorld.__new__(SingleWorld)) == "<single world that was not made>"


@pytest.mark.parametrize("device", [True, "bogus", object(), "meta"])
def test_devices_are_refused_by_name(device) -> None:
    with pytest.raises(ArgumentError, match="device = "):
        SingleWorld(device)


def test_errors_name_the_argument() -> None:
    with pytest.raises(ConfigError, match="cfg = 8: must be a MoEConfig"):
        memory_estimate(8, CFG)
    other = MoEConfig(**{**vars(CFG), "max_tokens": 65})
    with SingleWorld("cpu") as w, pytest.raises(ConfigError) as caught:
        MegaMoE(other, make_weights(CFG, 1, 0, "cpu")[0], w)
    assert str(caught.value) == "experts.cfg = {'max_tokens': 64}: must be as in cfg ({'max_tokens': 65})"
    with SingleWorld("cpu") as w, layer_on(w) as moe:
        p = make_inputs(CFG, [3], "random", 0, "cpu")
        with pytest.raises(InputError, match=r"x\.dtype = .*e4m3fn: must be .*bfloat16, or \(codes, scales\)"):
            moe(reference.stage(CFG, p.xs[0])[0], p.ids[0], p.weights[0])
    with pytest.raises(MegaMoEError, match="closed"):
        moe.check()


def test_the_log_tells_memory_and_warmup(caplog) -> None:
    with caplog.at_level(logging.DEBUG, "megamoe"), SingleWorld("cpu") as w:
        moe = layer_on(w)
        moe.warmup()
        moe.close()
    text = caplog.text
    assert all(record.name.startswith("megamoe") for record in caplog.records)
    assert "arena 0.1 MiB, pools" in text and "MoEConfig(hidden=128" in text
    assert "warmup of <MegaMoE layer 1" in text


def test_the_log_tells_what_was_compiled(caplog) -> None:
    from megamoe.kernels import build
    from megamoe.kernels.reduce import Reduce, ReduceSpec

    kernel = Reduce(ReduceSpec.from_config(CFG, 1))
    with caplog.at_level(logging.INFO, "megamoe"):
        build.build(kernel), build.build(kernel)
    lines = [record.getMessage() for record in caplog.records if "compiled Reduce in " in record.getMessage()]
    assert len(lines) == 1 and "ReduceSpec(hidden=128" in lines[0]
