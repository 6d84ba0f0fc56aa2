"""MegaMoE's host side on CPU worlds: what it compares, shares, refuses. No kernel is compiled or runs."""

import os
import warnings

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")  # read when cutlass is imported

import pytest
import torch

from megamoe import ConfigError, InputError, Knobs, MegaMoE, MegaMoEError, MoEConfig, WorldError, memory_estimate
from megamoe.comm import SingleWorld, VirtualWorld
from megamoe.version import __version__
from megamoe.weights import ExpertWeights
from megamoe.wire import WIRE_VERSION
from tests.problems import make_weights

SHAPE = dict(hidden=256, intermediate=128, num_experts=4, top_k=2, max_tokens=16)
CFG = MoEConfig(**SHAPE)
TENSOR = MoEConfig(**SHAPE, scale="tensor")


def packs(cfg=CFG, world_size=1, **scales):
    return make_weights(cfg, world_size, 0, "cpu", **scales)


def cpu_world(size):
    return VirtualWorld(size, devices=["cpu"]) if size > 1 else SingleWorld("cpu")


def storage_bytes(workspace):
    """Bytes of every tensor that a workspace holds for its ranks."""
    held = [*workspace._arena.tensors.values(), *workspace._local.values()]
    return sum(t.untyped_storage().nbytes() for t in held)


@pytest.mark.parametrize("size", [1, 2])
def test_sixty_layers_cost_one(size):
    with cpu_world(size) as world:
        weights = packs(world_size=size)
        layers = [MegaMoE(CFG, weights if size > 1 else weights[0], world) for _ in range(60)]
        assert len({id(layer._workspace) for layer in layers}) == 1
        assert [layer.layer for layer in layers] == list(range(1, 61))
        estimate = memory_estimate(CFG, size)
        want = size * (estimate["arena"] + estimate["pools"])
        assert abs(storage_bytes(layers[0]._workspace) - want) <= 0.02 * want
        other = MoEConfig(**{**SHAPE, "max_tokens": 17})
        second = MegaMoE(other, packs(other, size) if size > 1 else packs(other)[0], world)
        assert second._workspace is not layers[0]._workspace
        for layer in (*layers, second):
            layer.close()


@pytest.mark.parametrize("mode", [{}, {"scale": "tensor"}, {"act_group": 64, "fp8": "e5m2"}])
def test_memory_estimate_counts_a_layers_weights(mode):
    cfg = MoEConfig(**{**SHAPE, **mode})
    for size in (1, 2, 4):
        assert memory_estimate(cfg, size)["layer_weights"] == packs(cfg, size)[0].nbytes


def test_everything_that_must_match_is_compared():
    texts = []

    class Spying(SingleWorld):
        def agree(self, what, value):
            texts.append(value)
            super().agree(what, value)

    with Spying("cpu") as world:
        MegaMoE(TENSOR, packs(TENSOR, x_scale=0.125, act_scale=0.375)[0], world).close()
        MegaMoE(TENSOR, packs(TENSOR)[0], world).close()
    for part in ("layer 1", "MoEConfig(hidden=256", "scale='tensor'", f"wire {WIRE_VERSION}", "single world of 1"):
        assert part in texts[0], part
    for part in ("x_scale 0.125", "act_scale 0.375", f"megamoe {__version__}"):
        assert part in texts[0], part
    assert "layer 2" in texts[1] and texts[0] != texts[1]


def test_reset_sets_flags_between_two_collectives():
    with SingleWorld("cpu") as world:
        moe = MegaMoE(CFG, packs()[0], world)
        steps = []
        world.gather = lambda values, what="gather": steps.append(what) or list(values)
        moe._workspace.set_epoch = lambda epoch: steps.append(epoch)
        moe.reset()
        assert [s if isinstance(s, int) else "collective" for s in steps] == ["collective", 2, "collective"]
        moe.close()


REFUSED = [
    ("cfg", lambda a: a.update(cfg={"hidden": 256})),
    ("experts", lambda a: a.update(experts=None)),
    ("experts", lambda a: a.update(experts=packs(world_size=2))),
    ("experts.cfg", lambda a: a.update(cfg=MoEConfig(**{**SHAPE, "max_tokens": 15}))),
    ("experts", lambda a: a.update(experts=packs(world_size=2)[0])),
    ("knobs", lambda a: a.update(knobs={"tile_rows": 64})),
    ("stages", lambda a: a.update(knobs=Knobs(stages=12))),
    ("num_sms", lambda a: a.update(num_sms=0)),
    ("num_sms", lambda a: a.update(num_sms=True)),
    ("timeout_s", lambda a: a.update(timeout_s=0)),
    ("timeout_s", lambda a: a.update(timeout_s=True)),
    ("timeout_s", lambda a: a.update(timeout_s=float("inf"))),
    ("world", lambda a: a.update(world=None)),
    ("_traces", lambda a: a.update(_traces=[{}, {}])),
    ("_traces", lambda a: a.update(_traces=[])),
]


@pytest.mark.parametrize("name,spoil", REFUSED, ids=[f"{n}-{i}" for i, (n, _) in enumerate(REFUSED)])
def test_construction_refuses_by_name(name, spoil):
    with SingleWorld("cpu") as world:
        args = dict(cfg=CFG, experts=packs()[0], world=world)
        spoil(args)
        with pytest.raises(MegaMoEError) as caught:
            MegaMoE(**args)
        assert caught.value.name == name
        MegaMoE(CFG, packs()[0], world).close()  # the refused one took no layer number and no memory


def test_virtual_packs_must_agree():
    with VirtualWorld(2, devices=["cpu"]) as world:
        uneven = [packs(TENSOR, 2)[0], packs(TENSOR, 2, x_scale=0.5)[1]]
        with pytest.raises(ConfigError, match="static scales"):
            MegaMoE(TENSOR, uneven, world)


def test_life():
    world = SingleWorld("cpu")
    moe = MegaMoE(CFG, packs()[0], world)
    moe.close()
    moe.close()
    for use in (moe.warmup, moe.reset, moe.synchronize, moe.__enter__, lambda: moe(None, None, None)):
        with pytest.raises(MegaMoEError, match="closed"):
            use()
    moe = MegaMoE(CFG, packs()[0], world)
    world.close()
    for use in (moe.warmup, moe.reset, lambda: moe(None, None, None)):
        with pytest.raises(WorldError, match="closed"):
            use()
    moe.close()


def test_a_forgotten_layer_warns_and_a_closed_one_does_not():
    with SingleWorld("cpu") as world:
        moe = MegaMoE(CFG, packs()[0], world)
        moe._forwards[Knobs()] = []  # as after warmup
        with pytest.warns(ResourceWarning, match="not closed"):
            del moe
        moe = MegaMoE(CFG, packs()[0], world)
        moe.close()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            del moe


@pytest.mark.parametrize(
    "name,change",
    [
        ("w13.dtype", lambda p: dict(w13=p.w13.to(torch.bfloat16))),
        ("w13.stride", lambda p: dict(w13=p.w13.transpose(1, 2).contiguous().transpose(1, 2))),
        ("w13.shape", lambda p: dict(w13=p.w13[:, :, :128].contiguous())),
        ("w2.device", lambda p: dict(w2=p.w2.to("meta"))),
        ("w2.shape", lambda p: dict(w2=p.w2[:3])),
        ("w2_scale", lambda p: dict(w2_scale=None)),
        ("w13_scale.shape", lambda p: dict(w13_scale=p.w13_scale.flatten(1, 2))),
        ("x_scale", lambda p: dict(x_scale=1.0)),
    ],
)
def test_a_pack_made_by_hand_is_checked(name, change):
    pack = packs()[0]
    fields = {f: getattr(pack, f) for f in ("w13", "w13_scale", "w2", "w2_scale", "x_scale", "act_scale")}
    ExpertWeights(CFG, **fields)
    with pytest.raises(InputError) as caught:
        ExpertWeights(CFG, **{**fields, **change(pack)})
    assert caught.value.name == name
