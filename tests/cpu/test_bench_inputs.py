"""The random problems of tools/inputs.py: routes, traffic and experts."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from megamoe import MoEConfig
from megamoe.weights import ExpertWeights

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
inputs, peers = map(importlib.import_module, ("inputs", "peers"))


@pytest.mark.parametrize(("experts", "top_k"), [(16, 4), (12, 5), (6, 6)])
@pytest.mark.parametrize("tokens", [0, 1, 7, 64])
def test_balanced_routes(experts, top_k, tokens):
    cfg = MoEConfig(hidden=128, intermediate=128, num_experts=experts, top_k=top_k, max_tokens=64)
    ids = inputs.make_ids("balanced", cfg, 0, 1, tokens, 3, "cpu")
    assert ids.shape == (tokens, top_k) and ids.dtype is torch.int32
    assert all(len(set(row)) == top_k for row in ids.tolist())
    counts = torch.bincount(ids.flatten().long(), minlength=experts)
    assert counts.max() - counts.min() <= 1
    if (experts, tokens) == (16, 64):
        assert len({tuple(sorted(row)) for row in ids.tolist()}) > experts // top_k  # more than one permutation


def config(experts=16, top_k=4, hidden=128):
    return MoEConfig(hidden=hidden, intermediate=128, num_experts=experts, top_k=top_k, max_tokens=64)


@pytest.mark.parametrize("kind", [*inputs.ROUTINGS, "all_remote"])
def test_routes(kind):
    cfg = config()
    x, ids, weights = inputs.make_inputs(kind, cfg, 1, 2, 64, 5, "cpu")
    assert x.shape == (64, 128) and x.dtype is torch.bfloat16 and torch.allclose(weights.sum(1), torch.ones(64))
    assert ids.shape == (64, 4) and ids.dtype is torch.int32 and ids.is_contiguous()
    assert all(len(set(row)) == 4 for row in ids.tolist()) and int(ids.min()) >= 0 and int(ids.max()) < 16
    assert torch.equal(ids, inputs.make_ids(kind, cfg, 1, 2, 64, 5, "cpu"))
    if kind == "all_remote":
        assert int(ids.max()) < 8
        with pytest.raises(ValueError, match="all_remote"):
            inputs.make_ids(kind, cfg, 0, 1, 64, 5, "cpu")
    with pytest.raises(ValueError, match=r"'skewed': one of balanced, .*all_remote"):
        inputs.make_ids("skewed", cfg, 0, 1, 64, 5, "cpu")


@pytest.mark.parametrize("top_k", [1, 4])
def test_one_hot_expert(top_k):
    ids = inputs.make_ids("hot_expert", config(top_k=top_k), 1, 2, 60, 5, "cpu")
    counts = torch.bincount(ids.flatten().long(), minlength=16)
    assert counts[0] == 60 and counts[1:].max() - counts[1:].min() <= 1 and counts.sum() == 60 * top_k


def test_zipf_counts_fall_as_wanted():
    ids = inputs.make_ids("zipf", config(32, 1), 0, 2, 40_000, 5, "cpu")
    counts, order = torch.bincount(ids.flatten().long(), minlength=32).sort(descending=True)
    wanted = 1 / torch.arange(1, 33)
    assert torch.allclose(counts / 40_000, wanted / wanted.sum(), atol=0.01)
    other = inputs.make_ids("zipf", config(32, 1), 1, 2, 40_000, 5, "cpu")
    same = torch.bincount(other.flatten().long(), minlength=32).argsort(descending=True)
    assert not torch.equal(ids, other) and torch.equal(order[:4], same[:4])
    several = inputs.make_ids("zipf", config(32, 8), 0, 1, 4000, 6, "cpu")
    assert torch.bincount(several.flatten().long(), minlength=32).max() > 2 * 1000


@given(st.integers(0, 5000), st.integers(1, 64), st.integers(0, 9))
def test_zipf_counts_are_exact(total, experts, seed):
    counts = inputs.zipf_counts(total, experts, seed)
    assert len(counts) == experts and sum(counts) == total and all(type(n) is int and n >= 0 for n in counts)
    wanted = [n**-1.2 for n in range(1, experts + 1)]
    for count, share in zip(sorted(counts, reverse=True), wanted):
        assert abs(count - total * share / sum(wanted)) < 1
    assert counts == inputs.zipf_counts(total, experts, seed)


def test_zipf_counts_are_in_an_order_of_the_seed():
    one, two = (inputs.zipf_counts(32 * 512, 32, seed) for seed in (0, 1))
    assert one != two and sorted(one) == sorted(two) and list(one) != sorted(one, reverse=True)


class TwoRanks:
    """Rank 1 of a world of two; rank 0 sends nothing."""

    size, local_ranks = 2, (1,)

    def device(self, rank):
        return "cpu"

    def gather(self, values, what):
        return [[0] * len(values[0]), values[0]]


@pytest.mark.parametrize(("kind", "tokens"), [("balanced", 24), ("empty_rank", 0)])
def test_problem(kind, tokens):
    made = inputs.make_problem(config(), kind, 24, TwoRanks(), 3)
    assert made.first[0].shape == made.ys[0].shape == (tokens, 128) and made.first[1].shape == (tokens, 4)
    assert [t.tokens for t in made.traffics] == [24, tokens] and made.most_rows == 2 * tokens
    assert [t.sent for t in made.traffics] == [0, 4 * tokens]


def test_tokens_are_not_rows_of_weights():
    """With equal seeds they would be, and static scales would clip the sums of squares that come out."""
    cfg = MoEConfig(hidden=256, intermediate=128, num_experts=2, top_k=1, max_tokens=64, scale="tensor")
    for seed in (0, 7):
        x = inputs.make_inputs("balanced", cfg, 0, 1, 64, seed, "cpu")[0].float()
        pack = inputs.random_experts(cfg, 1, seed, "cpu")
        gates = next(peers.Experts(pack).chunks())[0].flatten(0, 1).float() @ x.T
        assert gates.abs().max() < 6.5 and 0.9 < gates.std() < 1.1  # of standard normals


@pytest.mark.parametrize("scale", ["block", "tensor"])
def test_random_experts_are_what_from_bf16_makes(scale):
    cfg = MoEConfig(hidden=256, intermediate=128, num_experts=4, top_k=2, max_tokens=8, scale=scale)
    pack = inputs.random_experts(cfg, 2, 11, "cpu")
    g = inputs.generator("cpu", "experts", 11)
    pairs = [
        [torch.randn(1, n, k, generator=g, dtype=torch.bfloat16).mul_(k**-0.5) for n, k in ((256, 256), (256, 128))]
        for _ in range(2)
    ]
    w13, w2 = (torch.cat(parts) for parts in zip(*pairs))
    statics = dict(x_scale=0.02, act_scale=0.02) if scale == "tensor" else {}
    whole = ExpertWeights.from_bf16(cfg, w13, w2, **statics)
    assert pack.cfg is cfg and pack.x_scale == whole.x_scale and pack.experts_local == 2
    for name in ("w13", "w13_scale", "w2", "w2_scale"):
        assert torch.equal(getattr(pack, name).view(torch.uint8), getattr(whole, name).view(torch.uint8)), name
