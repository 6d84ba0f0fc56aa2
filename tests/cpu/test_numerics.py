"""Rounding, scales and their inverses, against a table of every FP8 value."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe import numerics
from megamoe.config import FP8_MAX
from megamoe.errors import InputError

FORMATS = ["e4m3", "e5m2"]
fp8s = st.sampled_from(FORMATS)
seeds = st.integers(0, 2**31 - 1)
quick = settings(max_examples=25, deadline=None)


def table(fp8):
    """Every finite value of a format, ascending, and its mantissa parity; from the bit layout, not from torch."""
    exponent_bits, mantissa_bits, bias = (4, 3, 7) if fp8 == "e4m3" else (5, 2, 15)
    values = {}
    for bits in range(128):
        exponent, mantissa = bits >> mantissa_bits, bits & ((1 << mantissa_bits) - 1)
        special = bits == 127 if fp8 == "e4m3" else exponent == (1 << exponent_bits) - 1
        if not special:
            fraction = mantissa / (1 << mantissa_bits)
            low = 2.0 ** (1 - bias) * fraction
            values[low if exponent == 0 else 2.0 ** (exponent - bias) * (1 + fraction)] = mantissa % 2
    values |= {-value: parity for value, parity in values.items() if value}
    ordered = sorted(values)
    return torch.tensor(ordered, dtype=torch.float64), torch.tensor([values[v] for v in ordered])


TABLES = {fp8: table(fp8) for fp8 in FORMATS}


def nearest(x, fp8):
    """Round to nearest, ties to even, by looking at every value."""
    values, odd = TABLES[fp8]
    distance = (x.double()[..., None] - values).abs()
    tie = distance == distance.amin(-1, keepdim=True)
    return values[(tie.double() * 2 - odd).argmax(-1)]


def values_of(seed, *shape, spread=6.0):
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(*shape, generator=generator)
    return noise * torch.exp2(spread * torch.randn(*shape, generator=generator))


@pytest.mark.parametrize("fp8", FORMATS)
def test_table_holds_what_torch_holds(fp8):
    codes = torch.arange(256, dtype=torch.uint8).view(numerics.fp8_dtype(fp8)).double()
    assert torch.equal(codes[codes.isfinite()].unique(), TABLES[fp8][0])
    assert TABLES[fp8][0].max() == FP8_MAX[fp8]


@quick
@given(fp8s, seeds)
def test_cast_rounds_to_nearest_even_and_saturates(fp8, seed):
    x = values_of(seed, 200, spread=8.0)
    values = TABLES[fp8][0]
    ties = ((values[1:] + values[:-1]) / 2).float()
    x = torch.cat([x, ties, torch.tensor([math.inf, -math.inf, 1e30, -1e30, 0.0])])
    assert torch.equal(numerics.cast(x, fp8).double(), nearest(x.clamp(-FP8_MAX[fp8], FP8_MAX[fp8]), fp8))
    assert numerics.cast(torch.tensor([math.nan]), fp8).float().isnan().all()


@quick
@given(fp8s, seeds, st.sampled_from([64, 128]), st.integers(0, 5), st.integers(1, 4), st.booleans())
def test_groups_follow_the_formula(fp8, seed, group, rows, groups, bf16):
    x = values_of(seed, rows, groups * group).to(torch.bfloat16 if bf16 else torch.float32)
    codes, scales = numerics.quantize_groups(x, group, fp8)
    assert codes.dtype == numerics.fp8_dtype(fp8) and codes.shape == x.shape
    assert scales.dtype == torch.float32 and scales.shape == (rows, groups)
    split = x.float().reshape(rows, groups, group)
    want = torch.maximum(split.abs().amax(-1), torch.tensor(1e-4)) / torch.tensor(FP8_MAX[fp8])
    assert torch.equal(scales, want)
    ratio = (split / want[..., None]).clamp(-FP8_MAX[fp8], FP8_MAX[fp8])
    assert torch.equal(codes.double().reshape(ratio.shape), nearest(ratio, fp8))


@quick
@given(fp8s, seeds, st.sampled_from([64, 128]))
def test_round_trip_within_half_a_step_and_stable(fp8, seed, group):
    x = values_of(seed, 4, 256)
    codes, scales = numerics.quantize_groups(x, group, fp8)
    back = numerics.dequantize_groups(codes, scales, torch.float64)
    scale = scales.double().repeat_interleave(group, -1)
    ulp = {"e4m3": 2.0**-4, "e5m2": 2.0**-3}[fp8]  # half a step relative to the power of two below
    smallest = {"e4m3": 2.0**-10, "e5m2": 2.0**-17}[fp8]
    assert ((back - x.double()).abs() <= (x.double().abs() * ulp).clamp(min=scale * smallest) * (1 + 1e-6)).all()
    again, _ = numerics.quantize_groups(back.float(), group, fp8)
    assert torch.equal(numerics.code_distance(codes, again), torch.zeros(codes.shape, dtype=torch.int32))


@pytest.mark.parametrize("fp8", FORMATS)
@pytest.mark.parametrize("group", [64, 128])
def test_special_values(fp8, group):
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0))
    clean, clean_scales = numerics.quantize_groups(x, group, fp8)
    x[0] = 0
    x[1, 3] = math.nan
    x[2, :group] = math.nan
    x[3, 5] = math.inf
    codes, scales = numerics.quantize_groups(x, group, fp8)
    assert (codes[0].float() == 0).all() and torch.equal(
        scales[0], (torch.tensor(1e-4) / FP8_MAX[fp8]).expand(256 // group)
    )
    expected = clean[1].float()
    expected[3] = math.nan
    largest_was_nan = clean_scales[1, 0] != scales[1, 0]
    assert not largest_was_nan and torch.equal(codes[1].float().nan_to_num(7), expected.nan_to_num(7))
    assert codes[2, :group].float().isnan().all() and torch.equal(codes[2, group:].float(), clean[2, group:].float())
    assert scales[2, 0] == torch.tensor(1e-4) / FP8_MAX[fp8]
    assert scales[3, 0].isinf() and numerics.dequantize_groups(codes, scales)[3, :group].isnan().all()
    assert torch.equal(codes[4].float(), clean[4].float())


@quick
@given(fp8s, seeds, st.floats(1e-3, 10.0))
def test_static_scale(fp8, seed, scale):
    x = values_of(seed, 3, 100)
    codes = numerics.quantize_static(x, scale, fp8)
    ratio = (x / torch.tensor(scale, dtype=torch.float32)).clamp(-FP8_MAX[fp8], FP8_MAX[fp8])
    assert torch.equal(codes.double(), nearest(ratio, fp8))
    assert torch.equal(numerics.dequantize_static(codes, scale, torch.float64), codes.double() * scale)


@pytest.mark.parametrize("fp8", FORMATS)
@pytest.mark.parametrize("shape", [(256, 384), (3, 128, 256), (2, 2, 128, 128), (0, 128, 128)])
def test_weight_blocks(fp8, shape, monkeypatch):
    w = values_of(1, *shape).bfloat16()
    codes, scales = numerics.quantize_weight_blocks(w, fp8)
    assert codes.shape == shape and scales.shape == (*shape[:-2], shape[-2] // 128, shape[-1] // 128)
    for index in range(math.prod(shape[:-2])):
        matrix, got = w.reshape(-1, *shape[-2:])[index].float(), codes.view(-1, *shape[-2:])[index]
        for n in range(shape[-2] // 128):
            for k in range(shape[-1] // 128):
                part = (slice(128 * n, 128 * n + 128), slice(128 * k, 128 * k + 128))
                scale = scales.view(-1, *scales.shape[-2:])[index, n, k]
                assert scale == matrix[part].abs().max() / torch.tensor(FP8_MAX[fp8])
                assert torch.equal(got[part].float(), numerics.cast(matrix[part] / scale, fp8).float())
    back = numerics.dequantize_weight_blocks(codes, scales)
    wide = scales.repeat_interleave(128, -1).repeat_interleave(128, -2)
    assert torch.equal(back, codes.float() * wide)
    monkeypatch.setattr(numerics, "_CHUNK", 1)  # many chunks must not change a thing
    again, again_scales = numerics.quantize_weight_blocks(w, fp8)
    assert torch.equal(again.view(torch.uint8), codes.view(torch.uint8)) and torch.equal(again_scales, scales)


@pytest.mark.parametrize("fp8", FORMATS)
def test_weight_tensor(fp8, monkeypatch):
    w = values_of(2, 3, 256, 128)
    w[1] = 0
    w[2, 5, 5] = math.nan
    codes, scales = numerics.quantize_weight_tensor(w, fp8)
    amax = torch.stack([w[0].abs().max(), torch.tensor(1e-4), w[2].nan_to_num(0).abs().max()])
    assert torch.equal(scales, amax / torch.tensor(FP8_MAX[fp8]))
    want = numerics.cast(w / scales[:, None, None], fp8)
    assert torch.equal(codes.float().nan_to_num(7), want.float().nan_to_num(7)) and codes[2, 5, 5].float().isnan()
    back = numerics.dequantize_weight_tensor(codes, scales)
    assert torch.equal(back[:2], codes.float()[:2] * scales[:2, None, None])
    monkeypatch.setattr(numerics, "_CHUNK", 1)
    assert torch.equal(numerics.quantize_weight_tensor(w, fp8)[0].view(torch.uint8), codes.view(torch.uint8))


@quick
@given(seeds, st.sampled_from([None, 0.5, 7.0]), st.sampled_from([torch.float32, torch.float64]))
def test_swiglu(seed, clamp, dtype):
    gate, up = values_of(seed, 2, 50, spread=2.0).to(dtype)
    got = numerics.swiglu(gate, up, clamp)
    assert got.dtype == dtype
    for g, u, out in zip(gate.tolist(), up.tolist(), got.tolist()):
        if clamp is not None:
            g, u = min(g, clamp), max(min(u, clamp), -clamp)
        want = (g / (1 + math.exp(-g)) if g > -700 else 0.0) * u
        assert out == pytest.approx(want, rel=1e-5 if dtype == torch.float32 else 1e-12, abs=1e-30)


def test_swiglu_keeps_nan():
    nan, one = torch.tensor([math.nan]), torch.ones(1)
    assert numerics.swiglu(nan, one, 1.0).isnan() and numerics.swiglu(one, nan, 1.0).isnan()


@pytest.mark.parametrize("fp8", FORMATS)
def test_code_distance_counts_representable_values(fp8):
    codes = torch.arange(256, dtype=torch.uint8).view(numerics.fp8_dtype(fp8))
    bits = codes.view(torch.uint8)[codes.double().isfinite()]
    rank = torch.searchsorted(TABLES[fp8][0], bits.view(codes.dtype).double())
    a, b = bits.repeat_interleave(len(bits)).view(codes.dtype), bits.repeat(len(bits)).view(codes.dtype)
    want = (rank.repeat_interleave(len(bits)) - rank.repeat(len(bits))).abs()
    assert torch.equal(numerics.code_distance(a, b).long(), want)
    nan = numerics.cast(torch.tensor([math.nan, 1.0]), fp8)
    assert numerics.code_distance(nan, nan.view(torch.uint8).flip(0).view(codes.dtype)).tolist() == [1000, 1000]
    assert numerics.code_distance(nan, nan).tolist() == [0, 0]


def test_take_rows():
    x = torch.randn(6, 4)
    rows = torch.tensor([5, 0, 0])
    assert torch.equal(numerics.take_rows(x, rows), x[rows])
    codes = numerics.cast(x, "e4m3")
    assert torch.equal(numerics.take_rows(codes, rows).float(), codes.float()[rows])


def test_errors_name_the_argument():
    for call, name in [
        (lambda: numerics.fp8_dtype("e3m4"), "fp8"),
        (lambda: numerics.quantize_groups(torch.zeros(2, 100), 64, "e4m3"), "x.shape"),
        (lambda: numerics.quantize_weight_blocks(torch.zeros(128, 100), "e4m3"), "w.shape"),
        (lambda: numerics.quantize_weight_blocks(torch.zeros(128), "e4m3"), "w.shape"),
        (lambda: numerics.quantize_weight_tensor(torch.zeros(128, 128), "e4m3"), "w.shape"),
    ]:
        with pytest.raises(InputError) as caught:
            call()
        assert caught.value.name == name
