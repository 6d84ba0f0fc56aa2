"""The host side without a GPU: heuristics, input checks, errors and their records."""

import pickle
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import megamoe
from megamoe import ConfigError, InputError, Knobs, MoEConfig, errors
from megamoe.config import supported_modes
from megamoe.forward import check_knobs
from megamoe.inputs import check_inputs, check_out
from megamoe.sched import heuristics
from tests.gpu.test_layer import PAIRED

CPU = torch.device("cpu")
CFG = MoEConfig(hidden=256, intermediate=128, num_experts=8, top_k=2, max_tokens=32)
TENSOR = MoEConfig(hidden=256, intermediate=128, num_experts=8, top_k=2, max_tokens=32, scale="tensor")


def good(tokens=5, cfg=CFG):
    return dict(
        x=torch.zeros(tokens, cfg.hidden, dtype=torch.bfloat16),
        topk_ids=torch.zeros(tokens, cfg.top_k, dtype=torch.int32),
        topk_weights=torch.zeros(tokens, cfg.top_k),
    )


@given(st.integers(1, 512), st.integers(1, 8), st.integers(0, 1 << 18), st.integers(1, 16))
def test_knobs_are_among_the_warmed_up_ones(experts, world_size, tokens, top_k):
    cfg = MoEConfig(128, 128, experts, min(top_k, experts), 1 << 18)
    assert heuristics.choose_knobs(cfg, world_size, tokens) in heuristics.candidates(cfg)


def test_knobs_follow_the_rows_of_an_expert():
    block = MoEConfig(7168, 2048, 256, 8, 8192)
    small = Knobs(tile_rows=64, cluster_rows=2, schedule="atomic")
    large = Knobs(tile_rows=128, tile_cols=256, cluster_rows=2, schedule="atomic")
    for cfg in (block, replace(block, scale="tensor")):
        middle = large if cfg.scale == "block" else replace(large, swap_ab=True)
        want = [(8, small), (24 * 32, small), (25 * 32, middle), (208 * 32, middle), (209 * 32, large)]
        for tokens, knobs in want:
            assert heuristics.choose_knobs(cfg, 1, tokens) == knobs
        assert heuristics.choose_knobs(cfg, 8, 3 * 32) == small  # as many rows as 8 times the tokens on one rank


@pytest.mark.parametrize(
    "hidden,intermediate,want",
    [(7168, 2048, (256, 2)), (2048, 1408, (256, 1)), (768, 256, (256, 1)), (1408, 2048, (128, 1))],
)
def test_tiles_follow_the_shape(hidden, intermediate, want):
    cfg = MoEConfig(hidden, intermediate, 256, 8, 8192)
    knobs = heuristics.large(cfg)
    assert (knobs.tile_cols, knobs.cluster_rows) == want
    single = heuristics.large(MoEConfig(hidden, intermediate, 256, 8, 8192, scale="tensor", accum="single"))
    assert single == replace(knobs, mma_cols=want[0])
    check_knobs(cfg, 8, Knobs(tile_rows=64))
    for mode in supported_modes():
        again = MoEConfig(hidden, intermediate, 256, 8, 8192, **mode)
        for chosen in heuristics.candidates(again):
            check_knobs(again, 8, chosen)
        assert any(chosen.swap_ab for chosen in heuristics.candidates(again)) == (
            want[0] == 256 and again.scale == "tensor"
        )
    if want == (256, 1):
        with pytest.raises(ConfigError, match=r"cluster_rows = 2: .*column tiles"):
            check_knobs(cfg, 8, Knobs(tile_cols=256, cluster_rows=2))
    if want[0] == 128:
        with pytest.raises(ConfigError, match=r"tile_cols = 256: .*fc2"):
            check_knobs(cfg, 8, Knobs(tile_cols=256))


def test_gpu_tests_run_every_mode_with_the_knobs_of_v3():
    cfg = MoEConfig(**PAIRED)
    assert heuristics.candidates(cfg) == heuristics.candidates(MoEConfig(7168, 2048, 256, 8, 8192))
    for knobs in heuristics.candidates(cfg):
        for experts, world_size in ((16, 1), (16, 4), (4, 4)):
            check_knobs(replace(cfg, num_experts=experts), world_size, knobs)


@pytest.mark.parametrize("tokens", [0, 1, 32])
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16])
def test_good_inputs_pass(tokens, ids_dtype, weights_dtype):
    args = good(tokens)
    args.update(topk_ids=args["topk_ids"].to(ids_dtype), topk_weights=args["topk_weights"].to(weights_dtype))
    found = check_inputs(CFG, CPU, **args)
    assert found.tokens == tokens and not found.prequantized
    check_out(CFG, CPU, torch.zeros(tokens, 256, dtype=torch.bfloat16), tokens)


def test_prequantised_inputs():
    codes, scales = torch.zeros(5, 256).to(torch.float8_e4m3fn), torch.zeros(5, 2)
    assert check_inputs(CFG, CPU, **{**good(), "x": (codes, scales)}).prequantized
    assert check_inputs(TENSOR, CPU, **{**good(), "x": codes}).prequantized
    for cfg, x, name in (
        (CFG, codes, "x.dtype"),
        (CFG, (codes, scales[:, :1]), "x scales.shape"),
        (CFG, (codes, scales.bfloat16()), "x scales.dtype"),
        (CFG, (codes.to(torch.float8_e5m2), scales), "x.dtype"),
        (CFG, (good()["x"], scales), "x.dtype"),
        (CFG, (codes, scales, scales), "x"),
        (TENSOR, (codes, scales), "x"),
    ):
        with pytest.raises(InputError) as caught:
            check_inputs(cfg, CPU, **{**good(), "x": x})
        assert caught.value.name == name


BAD = [
    ("x", dict(x=[1.0])),
    ("x", dict(x="tokens")),
    ("x.shape", dict(x=torch.zeros(256, dtype=torch.bfloat16))),
    ("x.shape", dict(x=torch.zeros(33, 256, dtype=torch.bfloat16))),
    ("x.shape", dict(x=torch.zeros(5, 128, dtype=torch.bfloat16))),
    ("x.dtype", dict(x=torch.zeros(5, 256))),
    ("x.stride", dict(x=torch.zeros(256, 5, dtype=torch.bfloat16).t())),
    ("x.device", dict(x=torch.zeros(5, 256, dtype=torch.bfloat16, device="meta"))),
    ("x.data_ptr", dict(x=torch.zeros(5 * 256 + 1, dtype=torch.bfloat16)[1:].view(5, 256))),
    ("topk_ids", dict(topk_ids=None)),
    ("topk_ids.dtype", dict(topk_ids=torch.zeros(5, 2))),
    ("topk_ids.shape", dict(topk_ids=torch.zeros(5, 3, dtype=torch.int32))),
    ("topk_weights.shape", dict(topk_weights=torch.zeros(4, 2))),
    ("topk_weights.dtype", dict(topk_weights=torch.zeros(5, 2, dtype=torch.float16))),
]


@pytest.mark.parametrize("name,change", BAD, ids=[f"{n}-{i}" for i, (n, _) in enumerate(BAD)])
def test_bad_inputs_are_named(name, change):
    with pytest.raises(InputError) as caught:
        check_inputs(CFG, CPU, **{**good(), **change})
    assert caught.value.name == name
    assert name in str(caught.value) and "must be" in str(caught.value)


@given(
    st.sampled_from(list(errors.Cause)),
    st.integers(0, 7),
    st.integers(0, 7),
    st.sampled_from(list(errors.Phase)),
    st.integers(-1, 511),
    st.sampled_from(list(errors.BadInput)),
    st.integers(0, 1 << 40),
)
def test_a_record_becomes_its_error(cause, origin, blamed, phase, expert, expected, seen):
    error = errors.aborted([int(cause), origin, blamed, int(phase), expert, int(expected), seen, 7])
    assert type(error) is errors.ABORTED[cause] and isinstance(error, errors.MegaMoEAborted)
    assert error.record.blamed == blamed and error.record.epoch == 7
    assert "forward 7" in str(error) and (cause == errors.Cause.POOL_OVERFLOW or f"rank {blamed}" in str(error))
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and again.record == error.record


def test_public_names_resolve():
    import os

    os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
    for name in megamoe.__all__:
        assert getattr(megamoe, name) is not None
    with pytest.raises(AttributeError):
        megamoe.nothing  # noqa: B018
    from megamoe import kernels

    for name in kernels.__all__:
        assert callable(getattr(kernels, name))


@pytest.mark.parametrize("name", ["fc1", "fc2"])
def test_gemm_functions_refuse_what_is_no_pack(name):
    from megamoe import kernels

    rows, start = torch.empty(0, 128, dtype=torch.uint8), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(errors.InputError, match="experts = 'Tensor': must be an ExpertWeights"):
        getattr(kernels, name)(rows, start, rows)


class OnGPU:
    """Makes a CPU tensor say that it is on a GPU."""

    is_cuda = True


def on_gpu(tensor):
    kind = type("Fake", (OnGPU, torch.Tensor), {})
    return tensor.as_subclass(kind)


def test_what_a_kernel_is_given_is_checked():
    from megamoe.kernels import rows

    good = on_gpu(torch.zeros(4, 4, dtype=torch.int32))
    rows.check("x", good, torch.int32, 4, None)
    cases = [
        ([1], torch.int32, (4, 4), r"x = .list.: must be a torch.Tensor"),
        (torch.zeros(4, 4, dtype=torch.int32), torch.int32, (4, 4), r"x.device = .cpu.: must be a CUDA device"),
        (good, torch.float32, (4, 4), r"x.dtype = torch.int32"),
        (good, torch.int32, (4, 5), r"x.shape = \(4, 4\)"),
        (good.t(), torch.int32, (4, 4), r"x.stride = \(1, 4\)"),
        (good[0, 1:], torch.int32, (3,), r"x.data_ptr = .* multiple of 16"),
    ]
    for tensor, dtype, shape, text in cases:
        with pytest.raises(InputError, match=text):
            rows.check("x", tensor, dtype, *shape)
    rows.check("x", good[0, 1:], torch.int32, 3, align=4)
    assert rows.tickets(good[0, 1:3], Knobs(schedule="atomic"), good.device) is not None
    rows.check("a", good, torch.int32, 4, 4, device=good.device)
    with pytest.raises(InputError, match=r"b.device = 'cpu': must be cuda:1, as the rows"):
        rows.check("b", good, torch.int32, 4, 4, device=torch.device("cuda:1"))


@pytest.mark.parametrize("number", [0, -3, 2.5, True, "x", 1 << 40])
def test_num_sms_is_a_number_of_sms(number):
    from megamoe.kernels import rows

    assert rows.ctas(torch.empty(0), 3) == 3
    with pytest.raises(ConfigError, match=r"num_sms = .*: must be None or an int of at least 1"):
        rows.ctas(torch.empty(0), number)


@pytest.mark.parametrize("name", ["fc1", "fc2"])
def test_gemm_functions_launch_what_fits_and_refuse_another_device(name, monkeypatch):
    from megamoe import kernels, wire
    from megamoe.kernels import build
    from tests.problems import make_weights

    launched = []
    monkeypatch.setattr(build, "run", lambda kernel, device, *args: launched.append((device, args)))
    place = "activation" if name == "fc1" else "output"
    cfg = MoEConfig(hidden=256, intermediate=128, num_experts=2, top_k=1, max_tokens=8, route_weight=place)
    pack = make_weights(cfg, 1, 0, "cpu")[0]
    x, act = wire.input_format(cfg).pitch, wire.activation_format(cfg).pitch
    page = on_gpu(torch.zeros(1 << 14, dtype=torch.uint8))
    page = page[-page.data_ptr() % 128 :]
    rows = page[: 4 * (x if name == "fc1" else act)].view(4, -1)
    out = on_gpu(torch.zeros(4, act, dtype=torch.uint8) if name == "fc1" else torch.zeros(4, 256).bfloat16())
    given = dict(
        **dict(knobs=Knobs(schedule="atomic"), num_sms=3, out=out, weights=on_gpu(torch.ones(4))),
        tickets=on_gpu(torch.zeros(2, dtype=torch.int32)),
    )
    start = on_gpu(torch.tensor([0, 1, 4], dtype=torch.int32))
    assert getattr(kernels, name)(rows, start, pack, **given) is out
    (device, args), *_ = launched
    assert device == rows.device and {rows.data_ptr(), out.data_ptr(), given["tickets"].data_ptr(), 4, 3} <= set(args)
    for field in ("weights", "tickets", "out"):
        wrong = on_gpu(torch.empty_like(given[field], device="meta"))
        with pytest.raises(InputError, match=rf"{field}.device = 'meta': must be cpu, as the rows"):
            getattr(kernels, name)(rows, start, pack, **given | {field: wrong})
    with pytest.raises(InputError, match=r"expert_start.device = 'meta'"):
        getattr(kernels, name)(rows, on_gpu(start.to("meta")), pack, **given)
    assert len(launched) == 1
