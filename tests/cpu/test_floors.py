"""tools/floors.py and tables.py by hand-made numbers."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from megamoe import MoEConfig, memory_estimate

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
floors, inputs, tables = (importlib.import_module(name) for name in ("floors", "inputs", "tables"))

V3 = MoEConfig(hidden=7168, intermediate=2048, num_experts=256, top_k=8, max_tokens=8192)
STAGES = ["stage", "exchange", "pull", "fc1", "fc2", "token_back", "reduce"]
CEILINGS = floors.Ceilings(hbm_read=4e12, hbm_copy=4.2e12, link_read=330e9, link_write=360e9)


def test_traffic_by_hand():
    # Rank 0 sends 1, 2 to its own experts and 0, 4 to rank 1's; rank 1 sends 5, 0 and 0, 7.
    first, second = floors.traffic([2, 3], [[1, 2, 0, 4], [5, 0, 0, 7]])
    assert first == floors.Traffic(2, sent=7, sent_remote=4, rows=8, rows_remote=5, experts_hit=2, homes=(3, 5))
    assert second == floors.Traffic(3, sent=12, sent_remote=5, rows=11, rows_remote=4, experts_hit=1, homes=(4, 7))
    assert floors.spread([first, second])["rows"] == 11 and "homes" not in floors.spread([first, second])


def test_directions_by_hand():
    # Rows by home: rank 0 has 1 of its own, 2 of rank 1 and 3 of rank 2; and so on.
    homes = [(1, 2, 3), (4, 9, 0), (1, 1, 5)]
    traffics = [floors.Traffic(0, 0, 0, sum(h), sum(h) - h[r], 1, h) for r, h in enumerate(homes)]
    pulls = [floors.Cost(0, 0, link=10_000 * t.rows_remote) for t in traffics]
    found = floors.directions(pulls, traffics, [1.0, 2.0, 1.0])
    assert found["pair_gbps"] == [[0, 20, 10], [20, 0, 10], [30, 0, 0]]  # rank 1 takes twice the time
    assert found["out_gbps"] == [30, 30, 30] and found["in_gbps"] == [50, 20, 20] and found["out_even"] == 1
    stores = [floors.Cost(0, 0, link=10_000 * t.rows_remote, pushed=True) for t in traffics]
    found = floors.directions(stores, traffics, [1.0, 2.0, 1.0])
    assert found["pair_gbps"] == [[0, 20, 30], [20, 0, 0], [10, 10, 0]]
    assert found["out_gbps"] == [50, 20, 20] and found["out_even"] == 0.4
    alone = [floors.Traffic(0, 0, 0, 5, 0, 1, (5,))]
    assert floors.directions([floors.Cost(0, 0)], alone, [1.0])["out_even"] == 1


@given(st.integers(1, 8), st.integers(1, 5), st.data())
def test_what_is_sent_is_received(world_size, local, data):
    row = st.lists(st.integers(0, 9), min_size=world_size * local, max_size=world_size * local)
    counts = data.draw(st.lists(row, min_size=world_size, max_size=world_size))
    found = floors.traffic([0] * world_size, counts)
    assert sum(t.sent for t in found) == sum(t.rows for t in found) == sum(map(sum, counts))
    assert sum(t.sent_remote for t in found) == sum(t.rows_remote for t in found)
    assert all(t.sent - t.sent_remote == t.rows - t.rows_remote for t in found)


def test_costs_of_v3():
    traffic = floors.Traffic(tokens=512, sent=4096, sent_remote=2048, rows=4096, rows_remote=2048, experts_hit=256)
    costs = floors.stage_costs(V3, traffic)
    assert list(costs) == STAGES
    record = 7168 + 4 * 56
    assert costs["stage"].moved == 512 * (2 * 7168 + record) + 16 * 4096
    assert costs["exchange"].moved == costs["exchange"].hbm == 16 * 4096
    assert costs["exchange"].link == 8 * 2048 and costs["exchange"].pushed
    assert costs["pull"].moved == 4096 * record
    assert costs["pull"].link == 2048 * record and not costs["pull"].pushed
    assert costs["token_back"].moved == 4096 * 2 * 7168
    assert costs["token_back"].link == 2048 * 2 * 7168 and costs["token_back"].pushed
    assert costs["token_back"].hbm == 2 * costs["token_back"].moved
    assert costs["reduce"].moved == (4096 + 512) * 2 * 7168 + 4 * 4096
    assert costs["fc1"].flops == 2 * 4096 * 4096 * 7168
    assert costs["fc2"].flops == 2 * 4096 * 7168 * 2048
    assert costs["fc1"].weights + costs["fc2"].weights == memory_estimate(V3)["layer_weights"]
    nothing = floors.stage_costs(V3, floors.Traffic(0, 0, 0, 0, 0, 0))
    assert all(c.hbm == c.link == c.flops == 0 for c in nothing.values())


@pytest.mark.parametrize("scale", ["block", "tensor"])
def test_weight_bytes_are_those_of_the_pack(scale):
    cfg = MoEConfig(hidden=256, intermediate=384, num_experts=4, top_k=2, max_tokens=8, scale=scale)
    pack = inputs.random_experts(cfg, 2, 0, "cpu")
    costs = floors.gemm_costs(cfg, 0, pack.experts_local)
    assert costs["fc1"].weights + costs["fc2"].weights == pack.nbytes


def test_floor_is_the_largest_of_three():
    cost = floors.Cost(moved=10, hbm=4_200_000, link=330_000, flops=1_000_000_000)
    assert floors.times_us([cost], CEILINGS, [1e15]) == pytest.approx({"hbm": 1.0, "flops": 1.0, "link": 1.0})
    assert floors.floor_us([cost], CEILINGS, [1e14]) == (pytest.approx(10.0), "flops")
    pushed = floors.Cost(moved=10, hbm=0, link=720_000, pushed=True)
    assert floors.floor_us([pushed], CEILINGS, [0]) == (pytest.approx(2.0), "link")
    # The two ways of the link run at once; HBM bytes add up.
    both = floors.times_us([cost, pushed, cost], CEILINGS, [1e15, 0, 1e15])
    assert both == pytest.approx({"hbm": 2.0, "flops": 2.0, "link": 2.0})
    alone = floors.Ceilings(4e12, 4e12)
    assert floors.floor_us([floors.Cost(8, 4_000_000)], alone, [0]) == (pytest.approx(1.0), "hbm")


@pytest.mark.parametrize("shared", [False, True])
def test_floor_of_a_forward(shared):
    routes = [[4] * 16 + [0] * 16, [4] * 32]  # rank 0 receives twice what rank 1 does
    cfg = MoEConfig(hidden=1024, intermediate=512, num_experts=32, top_k=8, max_tokens=64)
    traffics = floors.traffic([8, 16], routes)
    rates = dict(fc1=1e15, fc2=1e15)
    found = floors.forward_floor(cfg, traffics, CEILINGS, rates, shared)
    each = [floors.stage_costs(cfg, t) for t in traffics]
    hbm = [sum(cost.hbm for cost in of_rank.values()) / 4.2e6 for of_rank in each]
    assert found == {"floor_us": pytest.approx(sum(hbm) if shared else hbm[0]), "floor_by": "hbm"} and hbm[0] > hbm[1]
    assert floors.forward_flops(cfg, traffics) == 6 * 512 * 1024 * (8 + 16) * 8 / 2
    slow = floors.forward_floor(cfg, traffics, CEILINGS, dict(fc1=1e9, fc2=2e9), shared)
    rows = 24 * 8 if shared else 2 * 4 * 16
    flops = 2 * rows * 512 * 1024
    assert slow == {"floor_us": pytest.approx(1e6 * (2 * flops / 1e9 + flops / 2e9)), "floor_by": "flops"}


def test_ranks_on_one_gpu_have_no_link():
    one, two = floors.Cost(1, 2, 3, True, 4, 5), floors.Cost(10, 20, 30, False, 40, 50)
    assert floors.together([one, two]) == floors.Cost(11, 22, flops=44, weights=55)


def test_measured_figures():
    cost = floors.Cost(moved=84_000_000, hbm=84_000_000, flops=10**11, weights=42_000_000)
    row = floors.measured(cost, 100.0, CEILINGS, 1e15)
    assert (row["gbps"], row["tflops"], row["weights_tbps"]) == pytest.approx((840.0, 1000.0, 0.42))
    assert (row["floor_us"], row["floor_by"]) == (pytest.approx(100.0), "flops")
    assert row["over_floor"] == pytest.approx(1.0) and row["dense_tflops"] == pytest.approx(1000.0)
    assert "link_gbps" not in row
    assert floors.measured(floors.Cost(0, 0), 3.0, CEILINGS)["floor_us"] == 0


@pytest.mark.parametrize(
    ("row", "ok"),
    [
        (dict(what="stages", name="stage", T=8192, copy_share=0.751), True),
        (dict(what="stages", name="reduce", T=32768, copy_share=0.74), False),
        (dict(what="stages", name="stage", T=2048, copy_share=0.1), None),
        (dict(what="stages", name="pull", T=8192), None),
        (dict(what="link", name="pull", link_bytes=64_000_000, link_gbps=321), True),
        (dict(what="link", name="token_back", link_bytes=64_000_000, link_gbps=339), False),
        (dict(what="link", name="pull", link_bytes=64_000_000, link_gbps=316, link_gbps_each=321), True),
        (dict(what="link", name="pull", link_bytes=64_000_000, link_gbps=321, link_gbps_each=319), False),
        (dict(what="link", name="pull", link_bytes=63_000_000, link_gbps=1), None),
        (dict(what="gemm", name="fc1", rows_per_expert=512, tflops=700), True),
        (dict(what="gemm", name="fc2", rows_per_expert=512, tflops=699), False),
        (dict(what="gemm", name="fc2", rows_per_expert=1024, tflops=699), None),
        (dict(what="host", name="eager", us=80.5), False),
        (dict(what="e2e", name="eager", us=80.5), None),
        (dict(what="gemm", name="fc1", impl="deep_gemm", rows_per_expert=512, tflops=1000), None),
        (dict(what="gemm", name="fc1", rows_per_expert=512, skipped="no room"), None),
    ],
)
def test_bars(row, ok):
    assert floors.with_bar(row).get("ok") is ok


def test_link_sizes_reach_the_bars():
    sizes = floors.link_tokens(V3)
    record = 7168 + 4 * 56
    assert any(64e6 <= t * 8 * record < 65e6 for t in sizes) and any(64e6 <= t * 8 * 14336 < 65e6 for t in sizes)
    assert set(floors.link_tokens(V3, quick=True)) < set(sizes)


@given(st.integers(1, 512), st.integers(1, 8), st.integers(1, 1 << 40))
def test_picked_experts_fit_or_are_least(wanted, world_size, budget):
    wanted = max(wanted // world_size, 1) * world_size
    experts = floors.pick_experts(wanted, 1 << 30, world_size, budget)
    halves = wanted // experts
    assert experts * halves == wanted and halves & (halves - 1) == 0 and experts >= world_size
    assert experts // world_size << 30 <= budget or experts % 2 or experts // 2 < world_size


def test_cells_and_table():
    cells = [tables.cell(v) for v in (None, True, False, 12345, 12345.6, 123.45, 1.234, 0.5, 0.01234, 0.0, "a")]
    assert cells == ["", "pass", "FAIL", "12,345", "12,346", "123.5", "1.23", "0.50", "0.0123", "0.00", "a"]
    rows = [dict(name="pull", us=1.5, bytes=2_500_000), dict(name="fc1", us=20.25, ok=True)]
    lines = tables.markdown(rows, ("name", "us", "bytes", "tflops", "ok")).splitlines()
    assert lines == [
        "| name |    us |   MB |   ok |",
        "| ---- | ----- | ---- | ---- |",
        "| pull |  1.50 | 2.50 |      |",
        "|  fc1 | 20.25 |      | pass |",
    ]
    rows = [dict(impl="a", over_floor=2.0, over_b=0.5, over_c=3.0), dict(impl="b|x", over_floor=1.0, skipped=None)]
    lines = tables.markdown(rows, ("impl", "over_floor", "over_*", "skipped")).splitlines()
    assert (
        lines[0] == "| impl | over_floor | over_b | over_c |" and lines[3] == "|  b/x |       1.00 |        |        |"
    )
    noted = [dict(what="e2e", impl="torch", note="as is", name=name, us=1.0) for name in "ab"]
    assert "\n\n- torch: as is\n\n" in tables.report(noted)
    text = tables.report([dict(what="host", name="eager", us=81.0, ok=False), dict(what="e2e", name="eager", us=9.0)])
    assert text.index("### e2e") < text.index("### host") and text.endswith("0 of 1 bars pass.")
