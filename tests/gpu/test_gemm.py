"""FC1 and FC2 alone against the oracle, fed the kernel's own inputs, on poisoned buffers."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given, settings

from megamoe import Knobs, MoEConfig, kernels, numerics, reference, wire
from megamoe.config import supported_modes
from megamoe.errors import ConfigError
from megamoe.forward import check_knobs
from megamoe.kernels.catalog import ATOMIC, PINGPONG, SWAPPED, SWAPPED_NARROW, TILES, WIDE_MMA, WIDE_MMA_PINGPONG
from megamoe.sched import heuristics
from tests.gpu.poison import poisoned_empty
from tests.problems import generator, make_weights

DEVICE = "cuda"


def name(mode):
    return "-".join(str(v) for v in mode.values())


def rows_of_experts(counts):
    """(expert_start, expert of each row) on the GPU."""
    counts = torch.tensor(counts)
    start = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int().to(DEVICE)
    return start, torch.repeat_interleave(torch.arange(len(counts)), counts).to(DEVICE)


def partial_sums(cfg, codes, w, group):
    """fp32 [groups, R, N]: what the tensor cores themselves sum over each `group` of K (library GEMM)."""
    rows = -(-max(len(codes), 1) // 16) * 16
    a = torch.zeros(rows, codes.shape[1], dtype=torch.uint8, device=DEVICE)
    a[: len(codes)] = codes.view(torch.uint8)
    a, one = a.view(codes.dtype), torch.ones((), device=DEVICE)
    parts = []
    for k in range(0, codes.shape[1], group):
        left, right = a[:, k : k + group].contiguous(), w[:, k : k + group].contiguous()
        parts.append(torch._scaled_mm(left, right.t(), one, one, out_dtype=torch.float32, use_fast_accum=True))
    return torch.stack(parts)[:, : len(codes)]


def scaled_sums(cfg, codes, scales, w, w_scale, group):
    """[R, N] of one expert from partial_sums, scaled and added in fp64: no rounding but the tensor cores'."""
    parts = partial_sums(cfg, codes, w, group).double()
    by_column = w_scale.double().repeat_interleave(128, 0)[:, torch.arange(len(parts), device=DEVICE) * group // 128]
    return (parts * scales.double().t()[:, :, None] * by_column.t()[:, None, :]).sum(0)


def check_against_tensor_cores(cfg, pack, codes, scales, experts, act, weights):
    """Block mode: FC1's activations equal those from the library's partial sums to fp32 rounding.

    FP8 tensor cores drop low bits of every product, so on a few rows the distance to exact arithmetic can
    be above DESIGN's bound whatever a kernel does; this distance cannot.
    """
    canonical = pack.canonical()
    want = torch.zeros(act.shape, dtype=torch.float64, device=DEVICE)
    for e in experts.unique().tolist():
        rows = experts == e
        both = scaled_sums(cfg, codes[rows], scales[rows], canonical.w13[e], canonical.w13_scale[e], 128)
        gate, up = both.split(cfg.intermediate, 1)
        want[rows] = numerics.swiglu(gate, up, cfg.clamp)
    if cfg.route_weight == "activation":
        want *= weights.double()[:, None]
    assert reference.relative_error(act, want) <= 2e-5


def check_preactivation(cfg, pack, codes, scales, experts, both, act, weights):
    """bf16 gate and up near the oracle's, and after clamp and SwiGLU near the kernel's own activations."""
    want = reference.fc1_preactivation(cfg, codes, scales, experts, pack.canonical())
    # as FC2's bounds: bf16 rounding alone is 1.7e-3 of the rms
    assert reference.relative_error(both, want) <= (2e-3 if cfg.accum == "promoted" else 6e-3)
    again = numerics.swiglu(*both.float().split(cfg.intermediate, 1), cfg.clamp)
    again *= weights[:, None] if cfg.route_weight == "activation" else 1
    assert reference.relative_error(again, act) <= 5e-3  # two roundings, and silu's slope is at most 1.1


def check_fc1(cfg, pack, counts, seed, knobs, extra_rows=0):
    start, experts = rows_of_experts(counts)
    total = len(experts)
    g = generator(seed + 1_000_003, DEVICE)  # not the weights' own numbers: sums of squares lose more bits
    x = torch.randn(total, cfg.hidden, generator=g, device=DEVICE) * 2
    codes, scales = reference.stage(cfg, x.bfloat16(), pack.x_scale)
    weights = torch.rand(total + extra_rows, generator=g, device=DEVICE) + 0.1
    fmt = wire.input_format(cfg)
    records = torch.full((total + extra_rows, fmt.pitch), 0xFF, dtype=torch.uint8, device=DEVICE)
    records[:total] = kernels.pack_rows(codes, scales, fmt)
    with poisoned_empty():
        out, act = kernels.fc1(records, start, pack, weights, knobs, debug=True)
        plain = kernels.fc1(records, start, pack, weights, knobs)
        kept, both = kernels.fc1(records, start, pack, weights, knobs, keep_preactivation=True)
    torch.cuda.synchronize()
    ref = reference.fc1(cfg, codes, scales, experts, pack.canonical(), weights[:total])
    if cfg.scale == "block" and cfg.fp8 == "e4m3":  # the library multiplies no two E5M2 matrices
        check_against_tensor_cores(cfg, pack, codes, scales, experts, act[:total], weights[:total])
    if total == 0 or total >= 128:
        assert reference.relative_error(act[:total], ref["act"]) <= (3e-4 if cfg.accum == "promoted" else 5e-3)
    got_codes, got_scales = kernels.unpack_rows(out[:total], wire.activation_format(cfg), cfg.fp8)
    want_codes, want_scales = reference.quantize_activation(cfg, act[:total], pack.act_scale)
    assert torch.equal(got_codes.view(torch.uint8), want_codes.view(torch.uint8))  # quantises its own values to the bit
    if want_scales is not None:
        assert torch.equal(got_scales, want_scales)
    if cfg.accum == "promoted":
        # Where gate is near 0 and up is large, the tensor cores' lost bits reach a small code: 1 in 2e5 seen.
        faults = reference.code_faults(got_codes, got_scales, ref["codes"], ref["scales"], cfg.act_group)
        assert faults <= 2e-5 * got_codes.numel()
    assert torch.equal(plain, out) and torch.equal(kept, out)
    assert (out[total:] == 0xFF).all()  # nothing beyond the last expert's rows
    check_preactivation(cfg, pack, codes, scales, experts, both[:total], act[:total], weights[:total])
    assert both[total:].isnan().all()


def check_fc2(cfg, pack, counts, seed, knobs, extra_rows=0):
    start, experts = rows_of_experts(counts)
    total = len(experts)
    g = generator(seed, DEVICE)
    act = torch.randn(total, cfg.intermediate, generator=g, device=DEVICE)
    codes, scales = reference.quantize_activation(cfg, act, pack.act_scale)
    weights = torch.rand(total + extra_rows, generator=g, device=DEVICE) + 0.1
    fmt = wire.activation_format(cfg)
    records = torch.full((total + extra_rows, fmt.pitch), 0xFF, dtype=torch.uint8, device=DEVICE)
    records[:total] = kernels.pack_rows(codes, scales, fmt)
    with poisoned_empty():
        y = kernels.fc2(records, start, pack, weights, knobs)
    torch.cuda.synchronize()
    ref = reference.fc2(cfg, codes, scales, experts, pack.canonical(), weights[:total], rounded=False)
    # bf16 rounding alone is 1.7e-3 of the rms (uniform in +-2^-9 of the value)
    assert reference.relative_error(y[:total], ref) <= (2e-3 if cfg.accum == "promoted" else 6e-3)
    assert y[total:].isnan().all()


def tile_name(knobs):
    how = "-swapped" * knobs.swap_ab + "-pingpong" * knobs.pingpong + "-atomic" * (knobs.schedule == "atomic")
    return f"{knobs.tile_rows}x{knobs.tile_cols}-{knobs.cluster_rows}x{knobs.cluster_cols}{how}"


def sizes(knobs):
    """(H, I) as odd as the knobs allow."""
    cluster = knobs.cluster_rows * knobs.cluster_cols
    if cluster == 4:
        return (1536, 512) if knobs.tile_cols == 128 else (1024, 1536)
    if cluster == 2:
        return (768, 256) if knobs.tile_cols == 128 else (1024, 512)
    return (640, 384) if knobs.tile_cols == 128 else (768, 384)


def check_mode(mode, knobs):
    hidden, intermediate = sizes(knobs)
    cfg = MoEConfig(hidden=hidden, intermediate=intermediate, num_experts=6, top_k=2, max_tokens=8, **mode)
    pack = make_weights(cfg, 1, 7, DEVICE)[0]
    for counts in ([300, 0, 1, 64, 129, 0], [0] * 6, [0, 0, 0, 0, 0, 5], [8, 9, 0, 136, 137, 1]):
        check_fc1(cfg, pack, counts, 1, knobs, extra_rows=70)
        check_fc2(cfg, pack, counts, 2, knobs, extra_rows=70)


CHOSEN = [heuristics.SMALL, heuristics.SMALL_PAIRS, heuristics.NARROW, heuristics.WIDE, heuristics.PAIRS]
"""What heuristics.choose_knobs picks, by shape and rows; with a single accumulator some of WIDE_MMA instead."""


@pytest.mark.parametrize("knobs", CHOSEN, ids=tile_name)
@pytest.mark.parametrize("mode", supported_modes(), ids=name)
def test_every_mode(mode, knobs):
    check_mode(mode, knobs)


@pytest.mark.parametrize("knobs", [heuristics.MIDDLE, heuristics.MIDDLE_PAIRS], ids=tile_name)
@pytest.mark.parametrize("mode", [m for m in supported_modes() if m["scale"] == "tensor"], ids=name)
def test_every_tensor_mode_in_the_middle(mode, knobs):
    check_mode(mode, knobs)


@pytest.mark.parametrize("knobs", TILES, ids=tile_name)
def test_static_tiles(knobs):
    check_mode(supported_modes()[0], knobs)


@pytest.mark.parametrize("knobs", [*WIDE_MMA, *WIDE_MMA_PINGPONG], ids=tile_name)
def test_wide_wgmmas(knobs):
    for mode in supported_modes():
        if mode.get("accum") == "single":
            check_mode(mode, knobs)


@pytest.mark.parametrize("knobs", ATOMIC, ids=tile_name)
def test_shapes_in_an_atomic_schedule(knobs):
    check_mode(supported_modes()[0], knobs)


@pytest.mark.parametrize("knobs", PINGPONG, ids=tile_name)
def test_shapes_with_warpgroups_in_turns(knobs):
    check_mode(supported_modes()[0], knobs)


@pytest.mark.parametrize("mode", supported_modes()[1:], ids=name)
def test_warpgroups_in_turns_in_every_mode(mode):
    check_mode(mode, PINGPONG[-1])


@pytest.mark.parametrize("knobs", SWAPPED, ids=tile_name)
def test_swapped_operands(knobs):
    check_mode(supported_modes()[0], knobs)


@pytest.mark.parametrize("knobs", SWAPPED_NARROW, ids=tile_name)
def test_swapped_operands_in_narrow_tiles(knobs):
    check_mode(dict(scale="tensor", route_weight="output"), knobs)
    check_mode(dict(scale="tensor", route_weight="activation", accum="single"), knobs)


@pytest.mark.parametrize("mode", [m for m in supported_modes()[1:] if m["scale"] == "block"], ids=name)
def test_swapped_operands_in_every_block_mode(mode):
    check_mode(mode, SWAPPED[0])


@pytest.mark.parametrize("hidden,intermediate", [(128, 128), (7168, 2048), (1408, 1408), (2048, 2688)])
def test_shapes(hidden, intermediate):
    cfg = MoEConfig(hidden=hidden, intermediate=intermediate, num_experts=3, top_k=1, max_tokens=8, clamp=3.0)
    pack = make_weights(cfg, 1, 8, DEVICE)[0]
    check_fc1(cfg, pack, [300, 7, 128], 3, Knobs())
    check_fc2(cfg, pack, [300, 7, 128], 4, Knobs())


CASES = [
    dict(hidden=256, intermediate=128),
    dict(hidden=512, intermediate=512),
    dict(hidden=128, intermediate=384, scale="tensor", accum="single", fp8="e5m2"),
    dict(hidden=384, intermediate=256, act_group=64, route_weight="activation"),
    dict(hidden=1024, intermediate=512, scale="tensor"),
]


@settings(max_examples=40)
@given(
    st.sampled_from(CASES),
    st.lists(st.integers(0, 400), min_size=1, max_size=3).map(lambda c: (c * 3)[:3]),
    st.sampled_from([*TILES, *ATOMIC, *PINGPONG, *SWAPPED[:4], *SWAPPED_NARROW]),
    st.integers(0, 300),
    st.integers(0, 1 << 16),
)
def test_any_rows(case, counts, knobs, extra, seed):
    cfg = MoEConfig(num_experts=3, top_k=1, max_tokens=8, **case)
    try:
        check_knobs(cfg, 1, knobs)
    except ConfigError:
        assume(False)
    pack = make_weights(cfg, 1, seed, DEVICE)[0]
    check_fc1(cfg, pack, counts, seed, knobs, extra)
    check_fc2(cfg, pack, counts, seed, knobs, extra)


GROUPS = dict(tiles=TILES, queue=ATOMIC, turns=PINGPONG, swapped=SWAPPED)


@pytest.mark.parametrize("group", GROUPS)
def test_few_sms_and_few_stages_give_the_same_bits(group):
    cfg = MoEConfig(hidden=1024, intermediate=512, num_experts=4, top_k=1, max_tokens=8)
    pack = make_weights(cfg, 1, 9, DEVICE)[0]
    start, experts = rows_of_experts([100, 30, 0, 257])
    codes, scales = reference.stage(cfg, torch.randn(len(experts), 1024, device=DEVICE).bfloat16())
    records = kernels.pack_rows(codes, scales, wire.input_format(cfg))
    weights = torch.ones(len(experts), device=DEVICE)
    outs = []
    runs = [(Knobs(), None), (Knobs(), 3), (Knobs(stages=2), None), (Knobs(tile_rows=64), 1)]
    runs += [(knobs, sms) for knobs in GROUPS[group] for sms in (1, 5, None)]
    for knobs, sms in runs:
        act = kernels.fc1(records, start, pack, weights, knobs, num_sms=sms)
        outs.append((act, kernels.fc2(act, start, pack, weights, knobs, num_sms=sms)))
    for act, y in outs[1:]:
        fmt = wire.activation_format(cfg)
        got, want = kernels.unpack_rows(act, fmt), kernels.unpack_rows(outs[0][0], fmt)
        assert torch.equal(got[0].view(torch.uint8), want[0].view(torch.uint8)) and torch.equal(got[1], want[1])
        assert torch.equal(y.view(torch.int16), outs[0][1].view(torch.int16))  # -0 is not 0 here


def test_a_single_expert_in_the_largest_tile():
    hidden, intermediate = sizes(TILES[-1])
    cfg = MoEConfig(hidden=hidden, intermediate=intermediate, num_experts=1, top_k=1, max_tokens=8)
    pack = make_weights(cfg, 1, 10, DEVICE)[0]
    for rows in (300, 1, 0):
        check_fc1(cfg, pack, [rows], 5, TILES[-1], extra_rows=70)
        check_fc2(cfg, pack, [rows], 6, TILES[-1], extra_rows=70)
