"""The layer over NVSHMEM, one process a GPU. Every rank builds the same problem and checks its own part."""

import random
import time

import pytest
import torch
import torch.distributed as dist

import megamoe
from megamoe import AbortedBadInput, AbortedTimeout, InputError, MegaMoE, MismatchError, MoEConfig, reference
from megamoe.config import supported_modes
from tests.problems import ROUTINGS, Problem, make_inputs, make_weights

DEVICE = "cuda"
CFG = dict(hidden=1024, intermediate=384, num_experts=16, top_k=4, max_tokens=400)


def name(mode):
    return "-".join(str(v) for v in mode.values())


@pytest.fixture(scope="module")
def world(group):
    with megamoe.world(group, timeout_s=20) as opened:
        yield opened


class Ranks:
    """A layer of one config on this rank, with what the oracle needs."""

    def __init__(self, cfg, world, seed=0, **kwargs):
        self.cfg, self.world, self.rank = cfg, world, world.local_ranks[0]
        self.packs = make_weights(cfg, world.size, seed, DEVICE)
        self.moe = MegaMoE(cfg, self.packs[self.rank], world, **kwargs)
        self.moe.warmup()

    def problem(self, tokens, kind, seed):
        return make_inputs(self.cfg, tokens, kind, seed, DEVICE)

    def forward(self, p: Problem, out=None):
        return self.moe(p.xs[self.rank], p.ids[self.rank], p.weights[self.rank], out=out)

    def check(self, y, p: Problem):
        want = reference.layer(self.cfg, [k.canonical() for k in self.packs], p.xs, p.ids, p.weights)[self.rank]
        limit = reference.layer_bound(self.cfg, reference.live_routes(self.cfg, p.ids[self.rank]))
        error = reference.relative_error(y, want)
        assert error <= limit, f"rank {self.rank}: {error:.3e}"

    def run(self, tokens, kind, seed):
        """One forward on poisoned buffers."""
        p = self.problem(tokens, kind, seed)
        self.poison()
        out = torch.full_like(p.xs[self.rank], float("nan"))
        self.forward(p, out)
        self.moe.synchronize()
        self.check(out, p)

    def poison(self):
        """Fill every buffer with 0xFF while no rank has a forward in flight."""
        torch.cuda.synchronize()
        self.world.barrier("poison: idle")
        self.moe._workspace.poison()
        self.world.barrier("poison: done")


def uneven(world, seed, most=400):
    """Different token counts, zero now and then, the same list on every rank."""
    rng = random.Random(seed)
    return [rng.choice([0, 1, rng.randrange(most + 1), most]) for _ in range(world.size)]


@pytest.mark.parametrize("mode", supported_modes(), ids=name)
def test_every_mode(world, mode):
    ranks = Ranks(MoEConfig(**CFG, **mode), world)
    ranks.run([400 - 57 * r for r in range(world.size)], "masked", 3)
    ranks.moe.close()


@pytest.mark.parametrize("kind", ROUTINGS)
def test_every_routing(world, kind):
    ranks = Ranks(MoEConfig(**CFG), world)
    for seed in range(4):
        ranks.run(uneven(world, seed), kind, seed)
    ranks.moe.close()


def test_deepseek_shape(world):
    ranks = Ranks(MoEConfig(hidden=7168, intermediate=2048, num_experts=16, top_k=8, max_tokens=1024), world)
    ranks.run([1024, 1000, 3, 512, 7, 64, 0, 1][: world.size], "random", 1)
    ranks.moe.close()


def test_same_bits_every_time(world):
    ranks = Ranks(MoEConfig(**CFG), world)
    p = ranks.problem(uneven(world, 5), "zipf", 5)
    first = None
    for run in range(20):
        ranks.poison()
        torch.cuda._sleep(random.Random(run * 7 + ranks.rank).randrange(1_000_000))
        y = ranks.forward(p)
        ranks.moe.synchronize()
        first = y if first is None else first
        assert torch.equal(first, y)
    ranks.check(first, p)
    ranks.moe.close()


def test_one_capture_replays_new_tokens(world):
    ranks = Ranks(MoEConfig(**CFG), world)
    tokens = uneven(world, 9)
    static = ranks.problem(tokens, "random", 0)
    out = torch.empty_like(static.xs[ranks.rank])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ranks.forward(static, out)
    kinds = ("random", "zipf", "masked", "all_remote", "all_masked")
    for i in range(200):
        fresh = ranks.problem(tokens, kinds[i % len(kinds)], i)
        for field in ("xs", "ids", "weights"):
            getattr(static, field)[ranks.rank].copy_(getattr(fresh, field)[ranks.rank])
        out.fill_(float("nan"))
        graph.replay()
        ranks.moe.synchronize()
        ranks.check(out, fresh)
    ranks.moe.close()


def test_two_layers_alternate(world):
    cfg = MoEConfig(**CFG)
    layers = [Ranks(cfg, world, seed) for seed in (1, 2)]
    assert layers[0].moe._workspace is layers[1].moe._workspace
    p = layers[0].problem(uneven(world, 12), "random", 4)
    for _ in range(6):
        ys = [layer.forward(p) for layer in layers]
    for layer, y in zip(layers, ys):
        layer.moe.synchronize()
        layer.check(y, p)
        layer.moe.close()


def test_soak(world):
    """500 forwards with no wait on the host: of two layers on one workspace, called and replayed, with the token counts
    and routes of sixteen problems, while ranks dawdle. Each gives the bits that the oracle approved of first."""
    layers = [Ranks(MoEConfig(**CFG), world, seed) for seed in (1, 2)]
    rank = layers[0].rank
    problems = [layers[0].problem(uneven(world, seed), ROUTINGS[seed % len(ROUTINGS)], seed) for seed in range(16)]
    wants, replays = [], []
    for layer in layers:
        wants.append([layer.forward(p) for p in problems])
        layer.moe.synchronize()
        for y, p in zip(wants[-1], problems):
            layer.check(y, p)
        graph, out = torch.cuda.CUDAGraph(), torch.empty_like(problems[0].xs[rank])
        with torch.cuda.graph(graph):
            layer.forward(problems[0], out)
        replays.append((graph, out))

    def differ(y, want):
        return (y.view(torch.int16) != want.view(torch.int16)).any()  # -0 is not 0 here

    shared, own = random.Random(11), random.Random(rank)
    wrong, runs = torch.zeros(500, dtype=torch.bool, device=DEVICE), []
    # A module load would wait for the ranks that wait for this one.
    torch.cuda._sleep(1)
    wrong[0] = differ(wants[0][0], wants[0][0])
    torch.cuda.synchronize()
    world.barrier("before the soak")
    for index in range(len(wrong)):
        which, number, replayed = shared.randrange(2), shared.randrange(len(problems)), shared.random() < 0.4
        if own.random() < 0.1:
            torch.cuda._sleep(own.randrange(1_000_000))
        if replayed:
            number = 0
            replays[which][0].replay()
            y = replays[which][1]
        else:
            y = layers[which].forward(problems[number])
        wrong[index] = differ(y, wants[which][number])
        runs.append((index, which, number, replayed))
    for layer in layers:
        layer.moe.synchronize()
        layer.moe.close()
    assert not [run for run, bad in zip(runs, wrong.tolist()) if bad]


def test_absent_rank(world):
    ranks = Ranks(MoEConfig(**CFG), world, timeout_s=0.5)
    tokens = [200] * world.size
    ranks.run(tokens, "random", 1)
    p = ranks.problem(tokens, "random", 2)
    absent = world.size - 1
    if ranks.rank != absent:
        start = time.perf_counter()
        y = ranks.forward(p)
        with pytest.raises(AbortedTimeout) as caught:
            ranks.moe.synchronize()
        assert time.perf_counter() - start < 1.5
        assert caught.value.record.blamed == absent
        assert y.isnan().all()
    world.barrier("after the absent forward")
    if ranks.rank == absent:  # its forward now finds the abort, publishes nothing, and says who blamed it
        y = ranks.forward(p)
        with pytest.raises(AbortedTimeout):
            ranks.moe.synchronize()
        assert y.isnan().all()
    assert float(torch.ones(8, device=DEVICE).sum()) == 8
    ranks.moe.reset()
    for seed in (3, 4):
        ranks.run(tokens, "random", seed)
    ranks.moe.close()


def test_late_rank(world):
    ranks = Ranks(MoEConfig(**CFG), world)
    p = ranks.problem([300] * world.size, "random", 2)
    world.barrier("together")
    if ranks.rank == 0:
        time.sleep(3)
    y = ranks.forward(p)
    ranks.moe.synchronize()
    ranks.check(y, p)
    ranks.moe.close()


def test_refusals(world):
    ranks = Ranks(MoEConfig(**CFG), world, check_routes=True)
    tokens = [100] * world.size
    p = ranks.problem(tokens, "random", 2)
    if ranks.rank == 0:  # a host refusal launches nothing; the corrected call completes the round
        with pytest.raises(InputError, match="topk_ids"):
            ranks.moe(p.xs[0], p.ids[0].short(), p.weights[0])
        time.sleep(0.5)
    y = ranks.forward(p)
    ranks.moe.synchronize()
    ranks.check(y, p)
    last = world.size - 1
    p.ids[last][9, 1] = 99
    y = ranks.forward(p)
    with pytest.raises(AbortedBadInput) as caught:
        ranks.moe.synchronize()
    assert caught.value.record.blamed == last and f"rank {last}" in str(caught.value)
    assert y.isnan().all()
    ranks.moe.reset()
    ranks.run(tokens, "random", 3)
    ranks.moe.close()


def test_another_current_device_does_not_matter(world):
    """A launch on the default stream goes to the current device unless it is switched."""
    ranks = Ranks(MoEConfig(**CFG), world)
    p = ranks.problem([200] * world.size, "random", 2)
    torch.cuda.synchronize()
    torch.cuda.set_device((ranks.rank + 1) % torch.cuda.device_count())
    try:
        y = ranks.forward(p)
        ranks.moe.synchronize()
    finally:
        torch.cuda.set_device(ranks.world.device(ranks.rank))
    ranks.check(y, p)
    ranks.moe.close()


def test_ranks_that_differ_are_refused(world):
    cfg = MoEConfig(**CFG, clamp=1.0 + world.local_ranks[0])
    with pytest.raises(MismatchError, match="clamp"):
        MegaMoE(cfg, make_weights(cfg, world.size, 0, DEVICE)[world.local_ranks[0]], world)
    world.barrier("after the mismatch")


def test_a_second_world_shares_nvshmem(group, world):
    with megamoe.world(group, timeout_s=20) as second:
        ranks = Ranks(MoEConfig(**CFG), second)
        ranks.run([50] * second.size, "random", 1)
        ranks.moe.close()
    dist.barrier()


def test_virtual_ranks_over_several_gpus(group):
    """Rank 0 alone plays W = 4 on all GPUs of the machine; peers are other devices of one process."""
    if dist.get_rank() == 0:
        from megamoe import VirtualWorld

        cfg = MoEConfig(**CFG)
        devices = [f"cuda:{i}" for i in range(dist.get_world_size())]
        with VirtualWorld(4, devices=devices, timeout_s=10) as virtual:
            packs = make_weights(cfg, 4, 0, DEVICE)
            local = [
                megamoe.ExpertWeights(cfg, *(t.to(virtual.device(r)) for t in (k.w13, k.w13_scale, k.w2, k.w2_scale)))
                for r, k in enumerate(packs)
            ]
            with MegaMoE(cfg, local, virtual) as moe:
                moe.warmup()
                p = make_inputs(cfg, [400, 0, 33, 200], "random", 1, DEVICE)
                to = [[t.to(virtual.device(r)) for r, t in enumerate(ts)] for ts in (p.xs, p.ids, p.weights)]
                ys = moe(*to)
                moe.synchronize()
                want = reference.layer(cfg, [k.canonical() for k in packs], p.xs, p.ids, p.weights)
                got = torch.cat([y.to(DEVICE) for y in ys])
                assert reference.relative_error(got, torch.cat(want)) <= 1e-2
    dist.barrier()
