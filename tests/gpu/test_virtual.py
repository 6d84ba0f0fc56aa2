"""Virtual ranks really wait for each other; results do not depend on timing."""

import random

import pytest
import torch

from megamoe import MoEConfig
from megamoe.forward import STAGES
from megamoe.kernels.faults import Faults
from tests.gpu.layers import DEVICE, check, launch_held, launch_one, open_layer, oracle
from tests.problems import make_inputs

CFG = MoEConfig(hidden=512, intermediate=256, num_experts=16, top_k=4, max_tokens=256)


def launch_in_order(moe, p, order, delays):
    """Whole forwards rank by rank in `order`, each behind a sleep of its own on the rank's stream."""
    outs = [torch.full_like(x, float("nan")) for x in p.xs]
    torch.cuda.synchronize()
    for rank in order:
        stream = moe.world.stream(rank)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(delays[rank])
        launch_one(moe, p, outs, rank)
    moe.synchronize()
    return outs


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_any_launch_order_and_delay(world_size):
    rng = random.Random(world_size)
    with open_layer(CFG, world_size) as (_, packs, moe):
        for seed in range(6):
            tokens = [rng.randrange(257) for _ in range(world_size)]
            p = make_inputs(CFG, tokens, "random", seed, DEVICE)
            order = rng.sample(range(world_size), world_size)
            moe._workspace.poison()
            ys = launch_in_order(moe, p, order, [rng.randrange(2_000_000) for _ in order])
            check(CFG, ys, oracle(CFG, packs, p), p.ids)


# In front of which kernel rank 3 is held up so that the wait named is the only guard.
@pytest.mark.parametrize("fault,held", [("skip_list_wait", "stage"), ("skip_return_wait", "fc1")])
@pytest.mark.parametrize("skip", [True, False])
def test_every_flag_wait_is_needed(fault, held, skip):
    """A rank is late: with the wait compiled out the result is wrong, with it right; so the tests here can fail."""
    with open_layer(CFG, 4, _faults=Faults(**{fault: skip})) as (_, packs, moe):
        p = make_inputs(CFG, [200, 150, 100, 256], "all_remote", 1, DEVICE)
        moe._workspace.poison()
        outs = [torch.full_like(x, float("nan")) for x in p.xs]
        launch_held(moe, p, outs, 3, held, 40_000_000)
        torch.cuda.synchronize()
        if skip:
            with pytest.raises(AssertionError):
                check(CFG, outs, oracle(CFG, packs, p), p.ids)
        else:
            check(CFG, outs, oracle(CFG, packs, p), p.ids)


def test_same_bits_whatever_the_timing():
    with open_layer(CFG, 4, _faults=Faults(delay_us=200)) as (_, packs, moe):
        p = make_inputs(CFG, [256, 77, 0, 130], "zipf", 9, DEVICE)
        first = None
        for _ in range(20):
            moe._workspace.poison()
            ys = moe(p.xs, p.ids, p.weights)
            moe.synchronize()
            if first is None:
                first = ys
                check(CFG, ys, oracle(CFG, packs, p), p.ids)
            assert all(torch.equal(a, b) for a, b in zip(first, ys))


def test_steps_are_the_kernels():
    with open_layer(CFG, 1) as (_, packs, moe):
        p = make_inputs(CFG, [64], "random", 2, DEVICE)
        y = torch.full_like(p.xs[0], float("nan"))
        steps = moe.steps(0, p.xs[0], p.ids[0], p.weights[0], y)
        assert len(steps) == len(STAGES)
        for step in steps:
            step()
            torch.cuda.synchronize()
        check(CFG, [y], oracle(CFG, packs, p), p.ids)
