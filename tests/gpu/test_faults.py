"""Aborts and refusals on virtual ranks of one GPU: nothing hangs, everything is named, reset() repairs."""

import time
from dataclasses import replace

import pytest
import torch

from megamoe import (
    AbortedBadInput,
    AbortedLayerMismatch,
    AbortedPoolOverflow,
    AbortedTimeout,
    InputError,
    MegaMoE,
    MegaMoEError,
    MoEConfig,
    VirtualWorld,
    wire,
)
from megamoe.errors import BadInput, Cause, Phase
from megamoe.kernels.faults import Faults
from tests.gpu.layers import DEVICE, check, launch_held, launch_one, open_layer, oracle, run_and_check
from tests.problems import make_inputs, make_weights

CFG = MoEConfig(hidden=512, intermediate=256, num_experts=16, top_k=4, max_tokens=128)


def launch_some(moe, p, ranks):
    """Forwards of some ranks only."""
    outs = [torch.zeros_like(x) for x in p.xs]
    torch.cuda.synchronize()
    for rank in ranks:
        launch_one(moe, p, outs, rank)
    return outs


def recovers(moe, packs, tokens):
    """reset() and two right forwards."""
    moe.reset()
    moe.check()
    for seed in (50, 51):
        run_and_check(moe.cfg, moe, packs, tokens, "random", seed)


@pytest.mark.parametrize("absent", [0, 2])
def test_absent_rank(absent):
    tokens = [128, 60, 90, 128]
    with open_layer(CFG, 4, timeout_s=0.5) as (_, packs, moe):
        for before in range(2):  # both exchange slots
            run_and_check(CFG, moe, packs, tokens, "random", before)
        p = make_inputs(CFG, tokens, "random", 5, DEVICE)
        present = [r for r in range(4) if r != absent]
        start = time.perf_counter()
        outs = launch_some(moe, p, present)
        with pytest.raises(AbortedTimeout) as caught:
            moe.synchronize()
        assert time.perf_counter() - start < 1.5
        record = caught.value.record
        assert record.blamed == absent and record.phase == Phase.PULL and f"rank {absent}" in str(caught.value)
        assert all(outs[r].isnan().all() for r in present)
        assert float(torch.ones(8, device=DEVICE).sum()) == 8
        with pytest.raises(AbortedTimeout):
            moe(p.xs, p.ids, p.weights)
        late = launch_some(moe, p, range(4))  # queued anyway: publishes nothing, ends at once, NaN
        start = time.perf_counter()
        torch.cuda.synchronize()
        assert time.perf_counter() - start < 0.3
        assert all(y.isnan().all() for y in late)
        recovers(moe, packs, tokens)


def test_late_rank_is_fine():
    tokens = [100, 128]
    with open_layer(CFG, 2, timeout_s=20) as (_, packs, moe):
        p = make_inputs(CFG, tokens, "random", 6, DEVICE)
        outs = launch_some(moe, p, [0])
        time.sleep(3)
        launch_one(moe, p, outs, 1)
        moe.synchronize()
        check(CFG, outs, oracle(CFG, packs, p), p.ids)


BAD = [
    (BadInput.ID_OUT_OF_RANGE, lambda p: p.ids[1].__setitem__((7, 2), 16)),
    (BadInput.ID_OUT_OF_RANGE, lambda p: p.ids[1].__setitem__((7, 2), -2)),
    (BadInput.DUPLICATE_EXPERT, lambda p: p.ids[1].__setitem__((7, 2), p.ids[1][7, 0])),
    (BadInput.WEIGHT_NOT_FINITE, lambda p: p.weights[1].__setitem__((7, 2), float("inf"))),
    (BadInput.WEIGHT_NOT_FINITE, lambda p: p.weights[1].__setitem__((7, 2), float("nan"))),
]


def test_checked_routes_are_refused_on_every_rank():
    tokens = [128, 50, 0]
    cfg = MoEConfig(hidden=512, intermediate=256, num_experts=18, top_k=4, max_tokens=128)
    with VirtualWorld(3, timeout_s=5) as world:
        packs = make_weights(cfg, 3, 0, DEVICE)
        with MegaMoE(cfg, packs, world, check_routes=True) as moe:
            moe.warmup()
            run_and_check(cfg, moe, packs, tokens, "masked", 1)
            for code, spoil in BAD:
                p = make_inputs(cfg, tokens, "random", 2, DEVICE)
                if code == BadInput.ID_OUT_OF_RANGE and spoil is BAD[0][1]:
                    p.ids[1][7, 2] = 18
                else:
                    spoil(p)
                ys = moe(p.xs, p.ids, p.weights)
                with pytest.raises(AbortedBadInput) as caught:
                    moe.synchronize()
                record = caught.value.record
                assert (record.cause, record.blamed) == (Cause.BAD_INPUT, 1)
                assert (record.expected, record.seen) == (code, 7)
                assert "rank 1" in str(caught.value) and "topk_" in str(caught.value)
                assert all(moe._workspace.record(r) is not None for r in range(3))
                assert all(y.isnan().all() for y in ys)
                recovers(moe, packs, tokens)
            p = make_inputs(cfg, tokens, "random", 2, DEVICE)
            p.ids[1][7, 2], p.weights[1][7, 2] = -1, float("nan")  # a masked route's weight is nobody's business
            check(cfg, moe(p.xs, p.ids, p.weights), oracle(cfg, packs, p), p.ids)
            moe.synchronize()


def test_pool_overflow():
    cfg = MoEConfig(hidden=512, intermediate=256, num_experts=16, top_k=4, max_tokens=128, pool_rows=100)
    with open_layer(cfg, 2, timeout_s=5) as (_, packs, moe):
        run_and_check(cfg, moe, packs, [16, 20], "balanced", 1)
        p = make_inputs(cfg, [128, 128], "random", 2, DEVICE)
        ys = moe(p.xs, p.ids, p.weights)
        with pytest.raises(AbortedPoolOverflow) as caught:
            moe.synchronize()
        assert caught.value.record.expected == 100 and caught.value.record.seen > 100
        assert all(y.isnan().all() for y in ys)
        recovers(moe, packs, [16, 20])


def test_duplicates_take_rows_of_the_pool():
    """Padding tokens whose unchecked ids are all 0 fit, however many; only pool_rows makes them too many."""
    cfg = MoEConfig(hidden=128, intermediate=128, num_experts=2, top_k=2, max_tokens=64)
    for bound in (None, 128):  # half of what all tokens with duplicates need
        with open_layer(replace(cfg, pool_rows=bound), 2, timeout_s=5) as (_, packs, moe):
            p = make_inputs(cfg, [64, 64], "random", 2, DEVICE)
            for ids in p.ids:
                ids.zero_()
            ys = moe(p.xs, p.ids, p.weights)
            if bound is None:
                moe.synchronize()
                check(cfg, ys, oracle(moe.cfg, packs, p), p.ids)
                continue
            with pytest.raises(AbortedPoolOverflow):
                moe.synchronize()


def test_a_rank_that_skipped_a_layer_is_found():
    with VirtualWorld(2, timeout_s=5) as world:
        packs = make_weights(CFG, 2, 0, DEVICE)
        layers = [MegaMoE(CFG, packs, world) for _ in range(2)]
        for layer in layers:
            layer.warmup()
        p = make_inputs(CFG, [40, 40], "random", 2, DEVICE)
        launch_some(layers[0], p, [0])
        launch_one(layers[1], p, [torch.empty_like(x) for x in p.xs], 1)  # without waiting for rank 0's forward
        with pytest.raises(AbortedLayerMismatch) as caught:
            layers[0].synchronize()
        assert {caught.value.record.expected, caught.value.record.seen} == {1, 2}
        recovers(layers[1], packs, [40, 40])
        for layer in layers:
            layer.close()


HOST = [
    ("x.dtype", lambda a: a.update(x=a["x"].float())),
    ("x.shape", lambda a: a.update(x=a["x"][:, :256].contiguous())),
    ("x.shape", lambda a: a.update(x=a["x"].repeat(3, 1))),
    ("x.stride", lambda a: a.update(x=a["x"].t().contiguous().t())),
    ("x.device", lambda a: a.update(x=a["x"].cpu())),
    ("topk_ids.dtype", lambda a: a.update(topk_ids=a["topk_ids"].short())),
    ("topk_ids.shape", lambda a: a.update(topk_ids=a["topk_ids"][:-1])),
    ("topk_weights.dtype", lambda a: a.update(topk_weights=a["topk_weights"].double())),
    ("topk_weights.shape", lambda a: a.update(topk_weights=a["topk_weights"][:, :3].contiguous())),
    ("out.dtype", lambda a: a.update(out=a["out"].float())),
    ("out.shape", lambda a: a.update(out=a["out"][:-1])),
]


@pytest.mark.parametrize("name,spoil", HOST, ids=[f"{n}-{i}" for i, (n, _) in enumerate(HOST)])
def test_host_refusals_name_the_argument_and_launch_nothing(name, spoil):
    with open_layer(CFG, 2, timeout_s=5) as (_, packs, moe):
        p = make_inputs(CFG, [64, 64], "random", 3, DEVICE)
        outs = [torch.full_like(x, 7.0) for x in p.xs]
        bad = dict(x=p.xs[1], topk_ids=p.ids[1], topk_weights=p.weights[1], out=outs[1])
        spoil(bad)
        with pytest.raises(InputError) as caught:
            moe(
                *([p.xs[0], bad["x"]], [p.ids[0], bad["topk_ids"]], [p.weights[0], bad["topk_weights"]]),
                out=[outs[0], bad["out"]],
            )
        assert name in caught.value.name and "rank 1" in caught.value.name
        torch.cuda.synchronize()
        assert all((o == 7.0).all() for o in outs)
        check(CFG, moe(p.xs, p.ids, p.weights, out=outs), oracle(CFG, packs, p), p.ids)
        moe.synchronize()


def outside_state(moe, rank):
    """What peers write in a rank's arena: flags, lists and slots, as bytes."""
    ws = moe._workspace
    control = ws.control(rank)[wire.LIST_FLAG : wire.RETURN_FLAG + wire.MAX_RANKS].clone()
    regions = [ws._bytes(rank, name).clone() for name in ("counts", "lists", "slots")]
    return [control.view(torch.uint8), *regions]


def test_nothing_is_published_after_an_abort():
    tokens = [128, 60, 90, 128]
    with open_layer(CFG, 4, timeout_s=0.3) as (_, packs, moe):
        p = make_inputs(CFG, tokens, "random", 5, DEVICE)
        launch_some(moe, p, [0, 1, 3])
        with pytest.raises(AbortedTimeout):
            moe.synchronize()
        before = [outside_state(moe, r) for r in range(4)]
        for seed in (6, 7):
            launch_some(moe, make_inputs(CFG, tokens, "random", seed, DEVICE), range(4))
        torch.cuda.synchronize()
        for rank in range(4):
            assert all(torch.equal(a, b) for a, b in zip(before[rank], outside_state(moe, rank)))
        recovers(moe, packs, tokens)


def test_an_owner_that_never_returns_rows_is_blamed_by_reduce():
    """Rank 3 is held between FC2 and token-back for longer than the deadline."""
    tokens = [100, 128, 64, 90]
    with open_layer(CFG, 4, timeout_s=0.3) as (_, packs, moe):
        p = make_inputs(CFG, tokens, "random", 5, DEVICE)
        outs = [torch.zeros_like(x) for x in p.xs]
        launch_held(moe, p, outs, 3, "token_back", 2_000_000_000)
        with pytest.raises(AbortedTimeout) as caught:
            moe.synchronize()
        record = caught.value.record
        assert record.phase == Phase.REDUCE and record.blamed == 3
        assert all(y.isnan().all() for y in outs)
        for home in range(4):  # the held rank woke up to an abort: it returned no row and published nothing
            assert int(moe._workspace.control(home)[wire.RETURN_FLAG + 3]) == 0
        recovers(moe, packs, tokens)


def test_replays_after_an_abort_are_nan_until_reset():
    tokens = [100, 30]
    with open_layer(CFG, 2, timeout_s=0.3) as (_, packs, moe):
        p = make_inputs(CFG, tokens, "random", 5, DEVICE)
        outs = [torch.empty_like(x) for x in p.xs]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            moe(p.xs, p.ids, p.weights, out=outs)
        graph.replay()
        moe.synchronize()
        check(CFG, outs, oracle(CFG, packs, p), p.ids)
        launch_some(moe, p, [0])
        with pytest.raises(AbortedTimeout):
            moe.synchronize()
        start = time.perf_counter()
        graph.replay()
        graph.replay()
        torch.cuda.synchronize()
        assert time.perf_counter() - start < 0.3
        assert all(y.isnan().all() for y in outs)
        moe.reset()
        graph.replay()
        moe.synchronize()
        check(CFG, outs, oracle(CFG, packs, p), p.ids)


def test_an_abort_between_pull_ctas_reads_no_garbage():
    """One rank's pool overflows while the other's pull CTAs start at random times: some pull, some don't."""
    cfg = MoEConfig(hidden=512, intermediate=256, num_experts=16, top_k=4, max_tokens=128, pool_rows=150)
    with VirtualWorld(2, timeout_s=5) as world:
        packs = make_weights(cfg, 2, 0, DEVICE)
        with MegaMoE(cfg, packs, world, _faults=Faults(delay_us=300)) as moe:
            moe.warmup()
            p = make_inputs(cfg, [100, 100], "random", 1, DEVICE)
            for ids in p.ids:  # 160 routes to rank 0, 40 to rank 1
                ids[:80, :2], ids[80:, :2] = torch.tensor([0, 1], device=DEVICE), torch.tensor([8, 9], device=DEVICE)
                ids[:, 2:] = -1
            for _ in range(30):
                moe._workspace.poison(0x3F)  # as a rank number 0x3F3F3F3F, far outside every allocation
                ys = moe(p.xs, p.ids, p.weights)
                with pytest.raises(AbortedPoolOverflow):
                    moe.synchronize()
                assert all(y.isnan().all() for y in ys)
                moe.reset()
            assert float(torch.ones(8, device=DEVICE).sum()) == 8


def test_an_interrupted_launch_asks_for_a_reset(monkeypatch):
    with open_layer(CFG, 1, virtual=False, timeout_s=0.5) as (_, packs, moe):
        p = make_inputs(CFG, [64], "random", 3, DEVICE)
        forward = next(iter(moe._forwards.values()))[0]

        def interrupted(*args):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(forward, "_reduce", interrupted)
            with pytest.raises(KeyboardInterrupt):
                moe(p.xs[0], p.ids[0], p.weights[0])
        with pytest.raises(MegaMoEError, match="reset"):
            moe(p.xs[0], p.ids[0], p.weights[0])
        moe.reset()
        check(CFG, [moe(p.xs[0], p.ids[0], p.weights[0])], oracle(CFG, packs, p), p.ids)
        moe.synchronize()
