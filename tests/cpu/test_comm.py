"""comm without a GPU: worlds on CPU tensors, memory estimates, reset and records, NVSHMEM's bookkeeping."""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import pickle
import warnings
from types import SimpleNamespace

import pytest
import torch

from megamoe import comm, errors, wire
from megamoe.comm import MemoryEstimate, SingleWorld, VirtualWorld, device, memory_estimate, nvshmem_runtime
from megamoe.comm import virtual as virtual_module
from megamoe.comm.workspace import CLEARED, KEPT
from megamoe.config import MoEConfig

SMALL = MoEConfig(hidden=256, intermediate=128, num_experts=8, top_k=2, max_tokens=16)
CONFIGS = [
    SMALL,
    MoEConfig(7168, 2048, 256, 8, 512, pool_rows=5000),
    MoEConfig(2048, 768, 128, 8, 64, fp8="e5m2", scale="tensor", accum="single"),
    MoEConfig(4096, 1536, 8, 2, 300, act_group=64),
]


def virtual(size: int = 2) -> VirtualWorld:
    # A CPU device for every rank; on CPU all of them are one device.
    return VirtualWorld(size, devices=["cpu"], timeout_s=5)


@pytest.fixture
def two():
    with virtual() as world:
        yield world, world.workspace(SMALL, "test")


# --- memory -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 8])
@pytest.mark.parametrize("cfg", CONFIGS, ids=range(len(CONFIGS)))
def test_estimate_is_sum_of_layouts(cfg: MoEConfig, size: int) -> None:
    found = memory_estimate(cfg, size)
    arena, local = wire.arena_layout(cfg, size), wire.local_layout(cfg, size)
    assert set(found) == {*arena, *local, "arena", "pools", "layer_weights", "total"}
    assert found["arena"] == arena.nbytes and found["pools"] == local.nbytes
    assert found["arena"] == pytest.approx(sum(found[name] for name in arena), rel=0.02, abs=wire.ALIGN * len(arena))
    assert found["pools"] == pytest.approx(sum(found[name] for name in local), rel=0.02, abs=wire.ALIGN * len(local))
    experts, inner, hidden = cfg.num_experts // size, cfg.intermediate, cfg.hidden
    weights = experts * 2 * inner * hidden + experts * hidden * inner
    if cfg.scale == "block":
        weights += 4 * experts * (2 * (inner // 128) * (hidden // 128) + (hidden // 128) * (inner // 128))
    else:
        weights += 4 * experts * 2
    assert found["layer_weights"] == weights
    assert found["total"] == arena.nbytes + local.nbytes + weights


def test_estimate_is_what_a_workspace_takes() -> None:
    cfg = MoEConfig(hidden=1024, intermediate=512, num_experts=8, top_k=4, max_tokens=64)
    with virtual() as world:
        ws = world.workspace(cfg, "")
        held = ws._arena.tensors[1].untyped_storage().nbytes() + ws._local[1].untyped_storage().nbytes()
        held += 8 * ws._scratch[1].numel() + 8 * world.size
    estimate = memory_estimate(cfg, 2)
    assert estimate["arena"] + estimate["pools"] == pytest.approx(held, rel=0.02)


def test_estimate_is_a_dict_that_prints_as_a_table() -> None:
    cfg = MoEConfig(7168, 2048, 256, 8, 512)
    found = memory_estimate(cfg, 8)
    plain = dict(found)
    for twin in (
        copy.copy(found),
        copy.deepcopy(found),
        pickle.loads(pickle.dumps(found)),
        json.loads(json.dumps(found)),
    ):
        assert twin == found == plain
    assert isinstance(copy.copy(found), MemoryEstimate) and list(found) == list(plain)
    lines = repr(found).splitlines()
    names = [line.split()[0] for line in lines]
    arena, local = wire.arena_layout(cfg, 8), wire.local_layout(cfg, 8)
    assert names == ["arena", *arena, "pools", *local, "layer_weights", "total"]
    assert all(line.startswith("  ") == (name in (*arena, *local)) for name, line in zip(names, lines))
    units = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
    for name, line in zip(names, lines):
        _, number, unit = line.split()
        assert abs(float(number) * units[unit] - found[name]) <= 0.005 * units[unit]
    assert lines[-1].endswith(" GiB") and len(max(lines, key=len)) < 40
    del found["total"]
    assert repr(found) == repr(dict(found))  # one that was changed prints as it is


def test_estimate_refuses_a_world_that_does_not_fit() -> None:
    with pytest.raises(errors.ConfigError, match="num_experts = 8"):
        memory_estimate(SMALL, 3)


# --- worlds -------------------------------------------------------------------------------------------------


def test_single_world() -> None:
    with SingleWorld("cpu") as world:
        assert (world.kind, world.size, world.local_ranks, world.timeout_s) == ("single", 1, [0], 30.0)
        assert world.stream(0) is None and world.num_sms(0) == 1 and world.device(0) == torch.device("cpu")
        block = world.allocate(1000)
        assert block.tensors[0].numel() == 1000 and not block.tensors[0].any()
        assert block.tensors[0].data_ptr() % wire.ALIGN == 0
        assert block.deltas[0].tolist() == [0]
        world.barrier("here")
        assert world.gather(["value"]) == ["value"]


def test_virtual_world_reaches_peers_by_deltas() -> None:
    with virtual(4) as world:
        assert world.kind == "virtual" and world.local_ranks == [0, 1, 2, 3]
        assert world.gather([3, 1, 4, 1], "digits") == [3, 1, 4, 1]
        world.agree("colour", "red")
        block = world.allocate(512)
        bases = [block.tensors[rank].data_ptr() for rank in range(4)]
        assert len(set(bases)) == 4 and all(base % wire.ALIGN == 0 for base in bases)
        for rank in range(4):
            assert [bases[rank] + delta for delta in block.deltas[rank].tolist()] == bases
            assert block.deltas[rank][rank] == 0


@pytest.mark.parametrize(
    "kwargs, name",
    [
        (dict(size=0), "size"),
        (dict(size=9), "size"),
        (dict(size=True), "size"),
        (dict(size=2, devices=[]), "devices"),
        (dict(size=1, devices=["cpu", "cpu"]), "devices"),
        (dict(size=2, devices=["cpu", "cpu"]), "devices"),
        (dict(size=2, devices=["meta"]), "device"),
        (dict(size=2, devices=["cpu"], timeout_s=0), "timeout_s"),
        (dict(size=2, devices=["cpu"], timeout_s=float("nan")), "timeout_s"),
    ],
)
def test_virtual_world_refuses(kwargs: dict, name: str) -> None:
    with pytest.raises(errors.ArgumentError) as info:
        VirtualWorld(**kwargs)
    assert info.value.name == name


def test_world_factory_without_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    with comm.world(device="cpu", timeout_s=7) as world:
        assert world.kind == "single" and world.timeout_s == 7
    with pytest.raises(errors.ArgumentError, match="timeout_s = -1"):
        comm.world(timeout_s=-1)
    with pytest.raises(errors.ArgumentError, match=r"torch\.distributed"):
        comm.world(object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(errors.MissingDependency, match="Hopper"):
        comm.world()


def test_device_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    current = 0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d: (8, 0) if d.index == 3 else (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda d: "A100")
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert device.default_device().index == 2  # nobody chose one
    monkeypatch.setenv("LOCAL_RANK", "4")
    assert device.default_device().index == 0  # each process sees its own GPU only
    monkeypatch.setenv("LOCAL_RANK", "2")
    current = 1
    assert device.default_device().index == 1  # the caller chose one
    assert device.resolve_device(3).index == 3 and device.resolve_device("cuda:0").index == 0
    with pytest.raises(errors.ArgumentError, match="device = 4"):
        device.resolve_device(4)
    device.require_hopper(torch.device("cuda", 0))
    with pytest.raises(errors.WorldError, match=r"A100.*8\.0.*needs 9\.0"):
        device.require_hopper(torch.device("cuda", 3))


def test_out_of_memory_is_a_world_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with virtual() as world:
        with pytest.raises(errors.WorldError, match=r"rank 0 \(see memory_estimate\)"):
            world.allocate(1 << 60)
        with monkeypatch.context() as patch:
            patch.setattr(comm.workspace, "aligned_bytes", no_memory)
            with pytest.raises(errors.WorldError, match=r"bytes of pools for rank 0: CUDA out .*memory_estimate"):
                world.workspace(SMALL, "")
        assert world.workspace(SMALL, "").cfg == SMALL  # still usable


def test_virtual_ranks_share_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comm.World, "num_sms", lambda self, rank: 132)
    assert [virtual_sms(size) for size in (1, 2, 4, 8)] == [132, 66, 33, 16]


def virtual_sms(size: int) -> int:
    with virtual(size) as world:
        return world.num_sms(size - 1)


def test_peer_access(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    gpus = [torch.device("cuda", index) for index in range(3)]
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda here, there: there.index != 2)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch, "zeros", lambda *args, **kwargs: None)
    with pytest.raises(errors.WorldError, match="cuda:0 has no peer access to cuda:2"):
        virtual_module._enable_peer_access(gpus)
    results = [driver.CUresult.CUDA_SUCCESS, driver.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED]
    monkeypatch.setattr(driver, "cuCtxGetCurrent", lambda: (driver.CUresult.CUDA_SUCCESS, "context"))
    monkeypatch.setattr(driver, "cuCtxEnablePeerAccess", lambda context, flags: (results.pop(),))
    virtual_module._enable_peer_access(gpus[:2])
    assert results == []
    results = [driver.CUresult.CUDA_ERROR_PEER_ACCESS_UNSUPPORTED]
    with pytest.raises(errors.WorldError, match="from cuda:0 to cuda:1: CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"):
        virtual_module._enable_peer_access(gpus[:2])
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(errors.WorldError, match="expandable_segments"):
        virtual_module._enable_peer_access(gpus[:2])


# --- closing ------------------------------------------------------------------------------------------------


def test_close_twice_and_use_after_close() -> None:
    world = virtual()
    ws = world.workspace(SMALL, "")
    world.close()
    world.close()
    for call in (
        lambda: world.allocate(1),
        lambda: world.workspace(SMALL, ""),
        lambda: world.barrier("late"),
        lambda: world.agree("late", "x"),
        lambda: ws.address(0, "x"),
        lambda: ws.deltas(0),
        lambda: ws.record(0),
        lambda: ws.reset(),
        lambda: world.__enter__(),
    ):
        with pytest.raises(errors.WorldError, match="virtual world of 2 is closed"):
            call()


def test_exit_frees_quietly_in_one_process() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ZeroDivisionError), virtual() as world:
            world.workspace(SMALL, "")
            raise ZeroDivisionError
    with pytest.raises(errors.WorldError, match="closed"):
        world.allocate(1)


def test_exit_warns_when_nothing_can_be_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("CUDA error")

    with pytest.warns(ResourceWarning, match="nothing was freed"), pytest.raises(ZeroDivisionError):  # noqa: SIM117
        with virtual() as world:
            monkeypatch.setattr(world, "synchronize", broken)
            raise ZeroDivisionError
    with pytest.raises(errors.WorldError, match="abandoned"):
        world.allocate(1)
    world.close()


def test_forgotten_world_warns() -> None:
    world = virtual()
    world.workspace(SMALL, "")
    with pytest.warns(ResourceWarning, match="virtual world of 2 was never closed"):
        del world
        gc.collect()


# --- workspace ----------------------------------------------------------------------------------------------


def test_workspace_is_shared_by_equal_configs(two) -> None:
    world, ws = two
    assert ws.next_layer() == 1
    assert world.workspace(MoEConfig(256, 128, 8, 2, 16), "other scale") is ws
    assert ws.next_layer() == 2
    other = world.workspace(MoEConfig(256, 128, 8, 2, 32), "test")
    assert other is not ws and other.next_layer() == 1


def test_workspace_refuses_a_config_that_does_not_fit(two) -> None:
    with pytest.raises(errors.ConfigError, match="num_experts = 7"):
        two[0].workspace(MoEConfig(256, 128, 7, 2, 16), "")


def test_regions(two) -> None:
    _, ws = two
    addresses = []
    for rank in (0, 1):
        for layout in (ws.arena_layout, ws.local_layout):
            base = ws.address(rank, next(iter(layout)))
            for name, region in layout.items():
                assert ws.address(rank, name) == base + region.offset and ws.address(rank, name) % wire.ALIGN == 0
        addresses += [ws.host_address(rank), ws.scratch_host(rank), ws.scratch_control(rank), ws.deltas(rank)]
        for name in KEPT:
            assert not ws._bytes(rank, name).any()
        assert ws._scratch[rank][wire.ABORT] == 1 + rank and ws._scratch[rank].count_nonzero() == 1
    assert len(set(addresses)) == len(addresses)
    slots = ws.tensor(1, "slots", torch.bfloat16, (16, 2, 256))
    slots.fill_(1)
    assert slots.data_ptr() == ws.address(1, "slots") and (ws._bytes(1, "slots").view(torch.bfloat16) == 1).all()
    assert ws.tensor(0, "expert_start", torch.int32, (5,)).shape == (5,)
    with pytest.raises(errors.ArgumentError, match="shape"):
        ws.tensor(0, "slots", torch.bfloat16, (17, 2, 256))
    with pytest.raises(errors.ArgumentError, match="region = 'slot': must be one of control, counts"):
        ws.address(0, "slot")


def test_poison_keeps_state(two) -> None:
    _, ws = two
    ws.set_epoch(5)
    before = ws.control(1).clone()
    ws.poison(0xAB)
    for rank in (0, 1):
        for name in [*ws.arena_layout, *ws.local_layout]:
            if name not in KEPT:
                assert (ws._bytes(rank, name) == 0xAB).all(), name
        assert not any(ws._bytes(rank, name).any() for name in CLEARED)
    assert torch.equal(ws.control(1), before)


def abort_words(cause: errors.Cause) -> list[int]:
    expected = 1 if cause == errors.Cause.BAD_INPUT else 9
    return [cause, 1, 0, errors.Phase.PULL, -1, expected, 8, 9]


@pytest.mark.parametrize("cause", list(errors.Cause))
def test_record_is_read_and_raised(two, cause: errors.Cause) -> None:
    _, ws = two
    assert ws.record(0) is None and ws.record(1) is None
    ws.raise_if_aborted()
    words = abort_words(cause)
    ws._host[1][wire.HOST_RECORD : wire.HOST_RECORD + 8] = torch.tensor([int(w) for w in words])
    ws.raise_if_aborted()  # not complete before the state word
    ws._host[1][wire.HOST_STATE] = 1
    assert ws.record(0) is None and ws.record(1) == words
    with pytest.raises(errors.ABORTED[cause]) as info:
        ws.raise_if_aborted()
    assert info.value.record.origin == 1 and info.value.record.epoch == 9


def test_reset(two) -> None:
    _, ws = two
    for rank, epoch in ((0, 40), (1, 41)):
        ws.control(rank).fill_(77)
        ws.control(rank)[wire.EPOCH] = epoch
        ws._bytes(rank, "send_counts").fill_(1)
        ws._bytes(rank, "send_cursors").fill_(1)
        ws._host[rank].fill_(1)
    ws.reset()
    for rank in (0, 1):
        control = ws.control(rank)
        flags = [*range(wire.LIST_FLAG, wire.LIST_FLAG + 16), *range(wire.RETURN_FLAG, wire.RETURN_FLAG + 8)]
        assert (control[[wire.EPOCH, *flags]] == 43).all()
        control[[wire.EPOCH, *flags]] = 0
        assert not control.any()
        assert not ws._bytes(rank, "send_counts").any() and not ws._bytes(rank, "send_cursors").any()
        assert not ws._host[rank].any() and ws.record(rank) is None
        assert ws._scratch[rank][wire.ABORT] == 1 + rank


# --- NVSHMEM's bookkeeping ----------------------------------------------------------------------------------


def facts(rank: int, **changed) -> nvshmem_runtime.Facts:
    base = dict(host="node", uuid=f"GPU-{rank}", name="H200", capability=(9, 0))
    return nvshmem_runtime.Facts(**{**base, **changed})


def test_refusal_gives_the_reason() -> None:
    def refused(changed: object) -> str | None:
        second = changed if isinstance(changed, str) else facts(1, **changed)
        return nvshmem_runtime.refusal([facts(0), second, facts(2)])

    assert refused({}) is None
    assert "rank 1: no nvshmem4py" in refused("no nvshmem4py")
    assert "different hosts (rank 0 on node, rank 1 on other" in refused(dict(host="other"))
    assert "ranks 1, 2 use one GPU" in refused(dict(uuid="GPU-2"))
    assert "capability 8.0, megamoe needs 9.0" in refused(dict(capability=(8, 0), name="A100"))
    assert "rank 1 has no peer access to rank 2" in refused(dict(unreachable=frozenset({"GPU-2", "GPU-7"})))
    assert refused(dict(unreachable=frozenset({"GPU-7"}))) is None
    assert "already runs" in refused(dict(ranks=(1, 2)))
    assert "already runs" in refused(dict(foreign=True))


@pytest.mark.parametrize(
    "text, size",
    [("", 1 << 29), ("2097152", 1 << 21), ("2m", 1 << 21), ("1G", 1 << 30), ("0.5g", 1 << 29), ("many", 1 << 29)],
)
def test_granularity(monkeypatch: pytest.MonkeyPatch, text: str, size: int) -> None:
    monkeypatch.setenv("NVSHMEM_CUMEM_GRANULARITY", text)
    assert nvshmem_runtime.granularity() == size


def test_runtime_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    core = SimpleNamespace(my_pe=lambda: 1, n_pes=lambda: 2, finalize=lambda: calls.append("finalize"))
    monkeypatch.setattr(nvshmem_runtime, "_core", lambda: core)
    monkeypatch.setattr(nvshmem_runtime, "_initialize", lambda *args: calls.append("init"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    cpu = torch.device("cpu")
    nvshmem_runtime.acquire(cpu, b"id", [4, 5], 1)
    nvshmem_runtime.acquire(cpu, None, [4, 5], 1)
    with pytest.raises(errors.WorldError, match=r"serves global ranks \[4, 5\].*over \[5, 6\]"):
        nvshmem_runtime.acquire(cpu, None, [5, 6], 1)
    nvshmem_runtime.release()
    assert calls == ["init"]
    nvshmem_runtime.release()
    assert calls == ["init", "finalize"]
    nvshmem_runtime.acquire(cpu, None, [4, 5], 1)  # somebody else started it: not ours to stop
    nvshmem_runtime.release()
    assert calls == ["init", "finalize"]
    with pytest.raises(errors.WorldError, match="PE 1 of 2, this group needs 0 of 4"):
        nvshmem_runtime.acquire(cpu, b"id", [0, 1, 2, 3], 0)
    assert nvshmem_runtime._current is None


def test_missing_nvshmem_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "nvshmem.core", None)
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    with pytest.raises(errors.MissingDependency, match=r'pip install -e "\.\[cu12\]"'):
        nvshmem_runtime._core()


def test_nvshmem_api_is_as_expected() -> None:
    """The names and parameters that comm uses, on the installed nvshmem4py."""
    import inspect

    import numpy

    core = pytest.importorskip("nvshmem.core")
    assert {"device", "uid", "rank", "nranks", "initializer_method"} <= set(inspect.signature(core.init).parameters)
    assert "except_on_del" in inspect.signature(core.tensor).parameters
    for name in ("finalize", "free_tensor", "tensor_get_buffer", "get_peer_buffer", "my_pe", "n_pes", "init_status"):
        assert callable(getattr(core, name)), name
    first, second = core.get_unique_id(empty=True), core.get_unique_id(empty=True)
    first._data.view(numpy.int8)[:] = numpy.arange(128)
    second._data[:] = numpy.frombuffer(first._data.tobytes(), dtype=second._data.dtype)
    assert first == second
