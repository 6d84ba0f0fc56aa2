"""A traced layer gives right results, and records that hold together."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from megamoe import Knobs, MoEConfig
from megamoe.kernels import trace
from megamoe.kernels.catalog import NAMES
from megamoe.kernels.trace import Phase, Role
from tests.gpu.layers import DEVICE, check, launch_held, open_layer, oracle
from tests.problems import make_inputs
from tools import trace as tool  # puts tools/ on sys.path

timeline = tool.timeline

CFG = MoEConfig(hidden=512, intermediate=256, num_experts=16, top_k=4, max_tokens=256)
SMALL, LARGE = Knobs(tile_rows=64), Knobs(tile_rows=128, tile_cols=256, cluster_cols=2)
PAIRS = Knobs(tile_rows=128, tile_cols=256, cluster_rows=2)
TURNS = Knobs(tile_rows=64, pingpong=True)
QUEUE = Knobs(tile_rows=128, tile_cols=256, cluster_rows=2, schedule="atomic")
PHASES = {
    "stage": {Phase.COUNT, Phase.QUANTIZE},
    "exchange": {Phase.SEND, Phase.PUBLISH},
    "pull": {Phase.WAIT_LISTS, Phase.LAY_OUT, Phase.COPY, Phase.DRAIN},
    "fc1": {Phase.LOAD, Phase.MAIN_LOOP, Phase.ACTIVATE, Phase.STORE},
    "fc2": {Phase.LOAD, Phase.MAIN_LOOP, Phase.STORE},
    "token_back": {Phase.COPY, Phase.DRAIN, Phase.PUBLISH},
    "reduce": {Phase.WAIT_ROWS, Phase.SUM, Phase.FINISH},
}
TICK_NS = 2_000
"""%globaltimer may step by about 1 us, and not on every SM at once."""


def share(world_size):
    """SMs of a rank, as VirtualWorld gives them out."""
    return torch.cuda.get_device_properties(DEVICE).multi_processor_count // world_size


def make_buffers(world_size, names=NAMES):
    return [trace.buffers(names, share(world_size), DEVICE) for _ in range(world_size)]


def clear(buffers):
    for buffer in [buffer for of_rank in buffers for buffer in of_rank.values()]:
        buffer.zero_()
    torch.cuda.synchronize()


def read(buffers):
    """All records; asserts that none was dropped."""
    torch.cuda.synchronize()
    parts = [timeline.decode_all(of_rank, rank) for rank, of_rank in enumerate(buffers)]
    assert not any(dropped for _, dropped in parts)
    return np.concatenate([records for records, _ in parts])


def tiles_of(p, n_tiles, rank, world_size, knobs):
    """Work items of a rank's GEMM, for whole clusters."""
    local = CFG.experts_local(world_size)
    ids = torch.cat([ids.flatten() for ids in p.ids]).long()
    rows = torch.bincount(ids[ids >= 0], minlength=CFG.num_experts)[rank * local : (rank + 1) * local]
    return int((-(-rows // knobs.tile_rows)).sum()) * n_tiles


def check_well_formed(records):
    """Times are in order in each record, in each warp's records, and from kernel to kernel of a rank."""
    assert (records["start"] > 0).all() and (records["end"] >= records["start"]).all()
    assert (records["waited"] >= 0).all()
    assert (records["waited"] <= records["end"] - records["start"]).all()
    assert set(records["role"].tolist()) <= set(Role) and set(records["phase"].tolist()) <= set(Phase)
    for warp in timeline.groups(records, ["rank", "kernel", "cta", "slot"]):
        assert (warp["start"][1:] >= warp["end"][:-1]).all()
        assert len(np.unique(warp["sm"])) == len(np.unique(warp["role"])) == 1
    for rank in timeline.groups(records, ["rank"]):
        spans = [rank[rank["kernel"] == name] for name in NAMES]
        for before, after in pairwise(spans):
            assert after["start"].min() >= before["end"].max() - TICK_NS


@pytest.mark.parametrize("world_size,knobs", [(1, SMALL), (2, SMALL), (1, LARGE), (1, PAIRS), (1, TURNS), (1, QUEUE)])
def test_a_traced_forward(world_size, knobs):
    buffers = make_buffers(world_size)
    with open_layer(CFG, world_size, knobs=knobs, _traces=buffers) as (_, packs, moe):
        p = make_inputs(CFG, [200, 256][:world_size], "random", 3, DEVICE)
        for _ in range(2):  # the second also finds kernels and caches warm
            clear(buffers)
            outs = [torch.full_like(x, float("nan")) for x in p.xs]
            moe(p.xs, p.ids, p.weights, out=outs)
            moe.synchronize()
            check(CFG, outs, oracle(CFG, packs, p), p.ids)
            records = read(buffers)
            check_well_formed(records)
            for rank in range(world_size):
                mine = records[records["rank"] == rank]
                assert {name: set(mine["phase"][mine["kernel"] == name].tolist()) for name in NAMES} == PHASES
                pull = mine[mine["kernel"] == "pull"]
                ctas = share(world_size)
                assert len(np.unique(pull["cta"])) == ctas and len(np.unique(pull[["cta", "slot"]])) == 4 * ctas
                if world_size == 1:  # its shared memory leaves no room for a second CTA on an SM
                    assert len(np.unique(pull["sm"])) == ctas
                for name, columns in ("fc1", CFG.intermediate // 128), ("fc2", CFG.hidden // knobs.tile_cols):
                    cluster = knobs.cluster_rows * knobs.cluster_cols
                    total = tiles_of(p, columns // cluster, rank, world_size, knobs)
                    loops = 1 if name == "fc2" or knobs.tile_cols == 256 else 2  # FC1's passes
                    times = {Phase.LOAD: 1, Phase.MAIN_LOOP: loops, Phase.STORE: 1}
                    for phase, each in times.items():
                        warps = 1 if phase == Phase.LOAD else knobs.tile_rows // 64
                        found = mine[(mine["kernel"] == name) & (mine["phase"] == phase)]["tile"]
                        assert sorted(found.tolist()) == sorted([*range(total)] * (each * warps * cluster))


def test_only_the_kernels_named_are_traced_and_replays_append():
    buffers = make_buffers(1, ("fc2", "reduce"))
    with open_layer(CFG, 1, virtual=False, knobs=SMALL, _traces=buffers) as (_, packs, moe):
        p = make_inputs(CFG, [100], "random", 3, DEVICE)
        y = torch.full_like(p.xs[0], float("nan"))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            moe(p.xs[0], p.ids[0], p.weights[0], out=y)
        clear(buffers)
        graph.replay()
        once = read(buffers)
        graph.replay()
        twice = read(buffers)
        moe.synchronize()
        check(CFG, [y], oracle(CFG, packs, p), p.ids)
        assert set(once["kernel"].tolist()) == {"fc2", "reduce"} and len(twice) == 2 * len(once)


def test_the_wait_for_a_late_rank_is_seen():
    buffers = make_buffers(2)
    with open_layer(CFG, 2, knobs=SMALL, _traces=buffers) as (_, packs, moe):
        p = make_inputs(CFG, [200, 256], "all_remote", 3, DEVICE)
        outs = [torch.full_like(x, float("nan")) for x in p.xs]
        clear(buffers)
        launch_held(moe, p, outs, 1, "stage", 20_000_000)  # about 10 ms
        moe.synchronize()
        check(CFG, outs, oracle(CFG, packs, p), p.ids)
        records = read(buffers)
        waits = records[(records["kernel"] == "pull") & (records["phase"] == Phase.WAIT_LISTS)]
        longest = {
            rank: int((w["end"] - w["start"]).max()) for rank, w in ((r, waits[waits["rank"] == r]) for r in (0, 1))
        }
        assert longest[0] > 2_000_000 > longest[1]
        row = next(row for row in timeline.shares(records[records["rank"] == 0]) if row["kernel"] == "pull")
        assert row["waits"]["the peers' lists"] > 0.5


def test_the_tool(tmp_path, capsys):
    args = ["--preset", "small", "--tokens", "64", "--knobs", "tile_rows=64", "--virtual", "2", "--out", str(tmp_path)]
    assert tool.main(args) == 0
    out = capsys.readouterr().out
    for name in NAMES:
        assert f"| {name} | " in out
    assert "INCOMPLETE" not in out
    assert {"trace.npz", "trace.json"} <= {path.name for path in tmp_path.iterdir()}
