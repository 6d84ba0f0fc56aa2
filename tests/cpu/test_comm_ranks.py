"""HostGroup and NvshmemWorld over three real processes on CPU; NVSHMEM itself is replaced.

The processes run all scenarios in one start, each scenario on its own world, and every test looks at one.
"""

from __future__ import annotations

import json
import os
import socket
import time
import traceback
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megamoe import comm, errors, wire
from megamoe.comm import HostGroup, nvshmem_runtime, nvshmem_world
from megamoe.comm.memory import aligned_bytes
from megamoe.config import MoEConfig

RANKS = 3
CFG = MoEConfig(hidden=256, intermediate=128, num_experts=6, top_k=2, max_tokens=16)
SHORT, LONG = 1.0, 30.0


class FakeRuntime:
    """Stands in for comm.nvshmem_runtime: CPU memory, peers at made-up distances."""

    refusal = staticmethod(nvshmem_runtime.refusal)
    Facts = nvshmem_runtime.Facts

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.uuid = f"GPU-{self.rank}"
        self.free_bytes = 1 << 40
        self.malloc_fails = False
        self.calls: list[str] = []

    def local_facts(self, device: torch.device) -> nvshmem_runtime.Facts:
        return nvshmem_runtime.Facts("node", self.uuid, "H200", (9, 0))

    def running(self) -> bool:
        return False

    def unique_id(self) -> bytes:
        return b"the id"

    def acquire(self, device: torch.device, uid: bytes | None, ranks: list[int], rank: int) -> None:
        assert uid == b"the id"
        self.calls.append(f"acquire {ranks} {rank}")

    def release(self) -> None:
        self.calls.append("release")

    def static_heap(self) -> bool:
        return False

    def granularity(self) -> int:
        return 1 << 21

    def free_memory(self, device: torch.device, need: int) -> int:
        return self.free_bytes

    def malloc(self, nbytes: int) -> torch.Tensor:
        if self.malloc_fails:
            raise nvshmem_runtime_error("Failed to allocate")
        self.calls.append("malloc")
        return aligned_bytes(nbytes, torch.device("cpu"), zero=False)

    def free(self, tensor: torch.Tensor) -> None:
        self.calls.append("free")

    def peer_address(self, tensor: torch.Tensor, pe: int) -> int:
        return tensor.data_ptr() + 4096 * (pe + 1)


def nvshmem_runtime_error(text: str) -> Exception:
    return type("NvshmemError", (Exception,), {})(text)


def make_world(env: SimpleNamespace, timeout_s: float = LONG, group: object = None) -> comm.World:
    nvshmem_world.runtime = env.fake = FakeRuntime()
    return comm.world(group, timeout_s=timeout_s, device="cpu")


# --- scenarios; every rank runs every one --------------------------------------------------------------------


def gathers_in_order(env: SimpleNamespace) -> None:
    host = HostGroup.over(dist.group.WORLD, LONG)
    for turn in range(20):
        assert host.gather(f"turn {turn}", (env.rank, turn)) == [(rank, turn) for rank in range(RANKS)]
        host.barrier("between")


def finds_different_calls(env: SimpleNamespace) -> None:
    host = HostGroup.over(dist.group.WORLD, LONG)
    with pytest.raises(errors.MismatchError, match=r"ranks 0, 2: reset; rank 1: close"):
        host.barrier("close" if env.rank == 1 else "reset")
    host.barrier("after")


def names_a_late_rank_and_recovers(env: SimpleNamespace) -> None:
    host = HostGroup.over(dist.group.WORLD, SHORT)
    host.barrier("first")
    if env.rank == 2:
        time.sleep(2.5 * SHORT)
    else:
        start = time.monotonic()
        with pytest.raises(errors.WorldError, match=r"second: rank 2 did not arrive within 1 s"):
            host.barrier("second")
        assert SHORT <= time.monotonic() - start < 2.2 * SHORT
        time.sleep(1.8 * SHORT)
    start = time.monotonic()
    host.barrier("second")
    # The others are not there any more after they gave up, so the late rank had to wait for their second try.
    assert env.rank != 2 or time.monotonic() - start > 0.1 * SHORT
    assert host.gather("third", env.rank) == [0, 1, 2]


def construction_can_be_tried_again(env: SimpleNamespace) -> None:
    if env.rank == 0:
        time.sleep(2.5 * SHORT)
    else:
        with pytest.raises(errors.WorldError, match="rank 0 did not arrive"):
            make_world(env, SHORT)
        time.sleep(1.3 * SHORT)
    make_world(env, LONG).close()


def subgroup_without_the_others(env: SimpleNamespace) -> None:
    if env.rank == 0:
        with pytest.raises(errors.WorldError, match="not a member"):
            comm.world(env.pair, device="cpu")
        return
    with make_world(env, group=env.pair) as world:
        assert world.kind == "nvshmem" and world.size == 2 and world.local_ranks == [env.rank - 1]
        assert world.gather([env.rank]) == [1, 2]
        assert env.fake.calls == [f"acquire [1, 2] {env.rank - 1}"]


def world_of_one(env: SimpleNamespace) -> None:
    with comm.world(env.alone[env.rank], device="cpu") as world:
        assert world.kind == "single"


def workspace_from_start_to_end(env: SimpleNamespace) -> None:
    world = make_world(env)
    ws = world.workspace(CFG, "x_scale None")
    base = ws.address(env.rank, "control")
    assert ws._arena.deltas[env.rank].tolist() == [0 if r == env.rank else 4096 * (r + 1) for r in range(RANKS)]
    assert base == world._blocks[0].tensors[env.rank].data_ptr() and not ws.control(env.rank).any()
    assert ws.next_layer() == 1 and world.workspace(CFG, "x_scale None") is ws
    ws.control(env.rank)[wire.EPOCH] = 10 + env.rank
    ws.control(env.rank)[wire.ABORT] = 2
    ws.reset()
    assert ws.control(env.rank)[wire.EPOCH] == 14 and ws.control(env.rank)[wire.ABORT] == 0
    world.close()
    world.close()
    assert env.fake.calls[1:] == ["malloc", "free", "release"]
    with pytest.raises(errors.WorldError, match="nvshmem world of 3 is closed"):
        world.barrier("late")


def disagreement_is_listed(env: SimpleNamespace) -> None:
    with make_world(env) as world:
        scale = 0.5 if env.rank == 1 else 0.25
        with pytest.raises(errors.MismatchError, match=r"ranks 0, 2: .*scale 0\.25; rank 1: .*scale 0\.5"):
            world.workspace(CFG, f"scale {scale}")
        other = MoEConfig(256, 128, 6, 1 if env.rank == 2 else 2, 16)
        with pytest.raises(errors.MismatchError, match="top_k=1"):
            world.workspace(other, "")
        ws = world.workspace(CFG, "")
        for _ in range(2 if env.rank == 0 else 1):
            ws.next_layer()
        with pytest.raises(errors.MismatchError, match="rank 0: layer 3"):
            world.workspace(CFG, "")


def failure_on_one_rank_is_everyones(env: SimpleNamespace) -> None:
    with make_world(env) as world:
        env.fake.free_bytes = 0 if env.rank == 1 else 1 << 40
        with pytest.raises(errors.WorldError, match=r"rank 1 .*NVSHMEM_SYMMETRIC_SIZE"):
            world.workspace(CFG, "")
        env.fake.free_bytes, env.fake.malloc_fails = 1 << 40, True
        with pytest.raises(errors.WorldError, match=r"NVSHMEM_SYMMETRIC_SIZE"):
            world.workspace(CFG, "")
        env.fake.malloc_fails = False
        assert "malloc" not in env.fake.calls
        real = comm.Workspace._allocate_local
        if env.rank == 2:
            comm.Workspace._allocate_local = no_memory
        with pytest.raises(errors.WorldError, match=r"bytes of pools for rank 2: CUDA out of memory"):
            world.workspace(CFG, "")
        comm.Workspace._allocate_local = real
        assert env.fake.calls[1:] == ["malloc", "free"]
        world.workspace(CFG, "")


def no_memory(self: comm.Workspace, rank: int) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def shared_gpu_is_refused(env: SimpleNamespace) -> None:
    nvshmem_world.runtime = fake = FakeRuntime()
    fake.uuid = "GPU-0" if env.rank == 2 else fake.uuid
    with pytest.raises(errors.WorldError, match="ranks 0, 2 use one GPU"):
        comm.world(device="cpu")
    assert fake.calls == []


def missing_dependency_on_one_rank(env: SimpleNamespace) -> None:
    nvshmem_world.runtime = fake = FakeRuntime()

    def missing(device: torch.device) -> None:
        raise errors.MissingDependency("nvshmem4py is missing")

    if env.rank == 1:
        fake.local_facts = missing
    kind = errors.MissingDependency if env.rank == 1 else errors.WorldError
    with pytest.raises(kind, match="nvshmem4py is missing"):
        comm.world(device="cpu")


def reset_is_bounded(env: SimpleNamespace) -> None:
    world = make_world(env, SHORT)
    ws = world.workspace(CFG, "")
    if env.rank == 0:
        time.sleep(2.2 * SHORT)
    else:
        with pytest.raises(errors.WorldError, match="rank 0 did not arrive"):
            ws.reset()
        time.sleep(1.5 * SHORT)
    ws.reset()
    world.close()


def exception_frees_nothing_together(env: SimpleNamespace) -> None:
    world = make_world(env, SHORT)
    world.workspace(CFG, "")
    if env.rank == 0:
        with pytest.warns(ResourceWarning, match="nothing was freed"), pytest.raises(ZeroDivisionError), world:
            raise ZeroDivisionError
        world.close()
    else:
        with pytest.raises(errors.WorldError, match="close: rank 0 did not arrive"):
            world.close()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            world._abandon()
    assert "free" not in env.fake.calls and "release" not in env.fake.calls


SCENARIOS = [
    gathers_in_order,
    finds_different_calls,
    names_a_late_rank_and_recovers,
    construction_can_be_tried_again,
    subgroup_without_the_others,
    world_of_one,
    workspace_from_start_to_end,
    disagreement_is_listed,
    failure_on_one_rank_is_everyones,
    shared_gpu_is_refused,
    missing_dependency_on_one_rank,
    reset_is_bounded,
    exception_frees_nothing_together,
]


def worker(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.pop("LOCAL_RANK", None)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    env = SimpleNamespace(rank=rank, pair=dist.new_group([1, 2]), alone=[dist.new_group([r]) for r in range(RANKS)])
    outcomes = {}
    for scenario in SCENARIOS:
        dist.barrier()
        try:
            scenario(env)
        except BaseException:  # pytest's own failures are not Exceptions
            outcomes[scenario.__name__] = traceback.format_exc()
    Path(folder, f"{rank}.json").write_text(json.dumps(outcomes))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(worker, args=(port, str(folder)), nprocs=RANKS)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("name", [scenario.__name__ for scenario in SCENARIOS])
def test_three_processes(outcomes: list[dict[str, str]], name: str) -> None:
    failed = [f"rank {rank}:\n{found[name]}" for rank, found in enumerate(outcomes) if name in found]
    assert not failed, "\n".join(failed)
