"""FC1 and FC2 compile for sm_90a in every mode, without local memory, to the instructions meant."""

from __future__ import annotations

import os
import re

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")  # read when cutlass is imported

import pytest
import torch

from megamoe import wire
from megamoe.config import Knobs, MoEConfig, supported_modes
from megamoe.errors import ConfigError, InputError
from megamoe.kernels import gemm_tiles, pack_rows, unpack_rows
from megamoe.kernels.fc1 import FC1, FC1Spec
from megamoe.kernels.fc2 import FC2, FC2Spec
from megamoe.kernels.report import CompileReport, report

LARGE = dict(hidden=7168, intermediate=2048, num_experts=256, top_k=8, max_tokens=8192)
ODD = dict(hidden=256, intermediate=1408, num_experts=6, top_k=2, max_tokens=100)


def cases() -> list[tuple[dict, dict, int]]:
    """(shape, mode, tile_rows): each mode once; each scale kind meets both shapes with both tile sizes."""
    out = []
    for mode in supported_modes():
        odd = mode["route_weight"] == "activation"
        wide = odd == (mode["fp8"] == "e5m2")
        out.append((ODD if odd else LARGE, mode, 128 if wide else 64))
    return out


def label(case: tuple[dict, dict, int]) -> str:
    shape, mode, tile_rows = case
    kind = f"block{mode['act_group']}" if mode["scale"] == "block" else mode["accum"]
    return f"{mode['fp8']}-{kind}-{mode['route_weight']}-H{shape['hidden']}-tile{tile_rows}"


def count(pattern: str, text: str) -> int:
    return len(re.findall(pattern, text))


def check_gemm(found: CompileReport, fp8: str, tile_rows: int) -> None:
    assert found.clean, found.remarks
    assert found.smem is not None
    assert found.smem <= gemm_tiles.SMEM_BYTES
    wgmma = count(r"wgmma\.mma_async", found.ptx)
    assert wgmma == count(rf"wgmma\.mma_async\.sync\.aligned\.m64n128k32\.f32\.{fp8}\.{fp8}", found.ptx) > 0
    assert count(r"cp\.async\.bulk\.tensor\.2d\S*mbarrier", found.ptx) >= 2
    assert count(r"setmaxnreg\.dec", found.ptx) == count(r"setmaxnreg\.inc", found.ptx) == 1
    threads = (tile_rows // 64 + 1) * 128
    assert f".reqntid {threads}" in found.ptx
    assert found.registers * threads <= 65536


@pytest.mark.parametrize("case", cases(), ids=label)
def test_both_gemms_compile_in_every_mode(case: tuple[dict, dict, int]) -> None:
    shape, mode, tile_rows = case
    cfg, knobs = MoEConfig(**shape, **mode), Knobs(tile_rows=tile_rows)
    first = report(FC1(FC1Spec.from_config(cfg, cfg.num_experts // 2, knobs)))
    check_gemm(first, cfg.fp8, tile_rows)
    assert first.name.startswith("megamoe_fc1")
    passes = 2 if cfg.scale == "block" and cfg.act_group == 128 else 1
    divisions = 32 * passes + (2 if cfg.scale == "block" else 0)
    assert count(r"div\.rn\.f32", first.ptx) == divisions
    assert count(rf"cvt\.rn\.satfinite\.{cfg.fp8}x2\.f32", first.ptx) == 16 * passes
    assert count(r"st\.global\.v4\.b32", first.ptx) == 2 * passes
    second = report(FC2(FC2Spec.from_config(cfg, cfg.num_experts // 2, knobs)))
    check_gemm(second, cfg.fp8, tile_rows)
    assert second.name.startswith("megamoe_fc2")
    assert count(r"cvt\.rn\.bf16x2\.f32", second.ptx) == 32
    assert count(r"st\.global\.v4\.b32", second.ptx) == 8


@pytest.mark.parametrize(
    ("shape", "experts", "extra", "debug"),
    [
        (LARGE | dict(num_experts=512), 512, {}, False),
        (LARGE, 32, dict(clamp=7.0, route_weight="activation"), True),
        (dict(hidden=128, intermediate=128, num_experts=1, top_k=1, max_tokens=1), 1, {}, False),
        (dict(hidden=128, intermediate=128, num_experts=1, top_k=1, max_tokens=1), 1, dict(scale="tensor"), False),
    ],
    ids=["experts512", "clamp-debug", "smallest", "smallest-tensor"],
)
def test_both_gemms_compile_at_the_edges(shape: dict, experts: int, extra: dict, debug: bool) -> None:
    cfg, knobs = MoEConfig(**shape, **extra), Knobs()
    first = report(FC1(FC1Spec.from_config(cfg, experts, knobs, debug)))
    check_gemm(first, cfg.fp8, 128)
    assert (count(r"min\.NaN\.f32", first.ptx) > 0) == (cfg.clamp is not None)
    passes = 2 if cfg.scale == "block" else 1
    assert count(r"st\.global\.v4\.b32", first.ptx) == 2 * passes * (5 if debug else 1)
    check_gemm(report(FC2(FC2Spec.from_config(cfg, experts, knobs))), cfg.fp8, 128)


def test_stages_fill_shared_memory_or_obey_the_knob() -> None:
    cfg = MoEConfig(**LARGE)
    assert FC1Spec.from_config(cfg, 32, Knobs(tile_rows=128)).gemm.stages == 7
    assert FC1Spec.from_config(cfg, 32, Knobs(tile_rows=64)).gemm.stages == 9
    assert FC2Spec.from_config(cfg, 32, Knobs(stages=3)).gemm.stages == 3
    with pytest.raises(ConfigError, match="stages = 12"):
        FC2Spec.from_config(cfg, 32, Knobs(stages=12))


def test_equal_configs_have_equal_specs() -> None:
    cfg = MoEConfig(**LARGE)
    more_tokens = MoEConfig(**(LARGE | dict(max_tokens=17, top_k=2)))
    assert FC1Spec.from_config(cfg, 32, Knobs()) == FC1Spec.from_config(more_tokens, 32, Knobs())
    assert hash(FC2Spec.from_config(cfg, 32, Knobs())) == hash(FC2Spec.from_config(more_tokens, 32, Knobs()))


@pytest.mark.parametrize("fp8", ["e4m3", "e5m2"])
@pytest.mark.parametrize("scales", [0, 3])
def test_rows_survive_packing(fp8: str, scales: int) -> None:
    fmt = wire.RowFormat(384, scales)
    dtype = torch.float8_e4m3fn if fp8 == "e4m3" else torch.float8_e5m2
    codes = torch.randn(5, 384).to(dtype)
    values = torch.rand(5, scales) if scales else None
    packed = pack_rows(codes, values, fmt)
    assert packed.shape == (5, fmt.pitch)
    got, got_values = unpack_rows(packed, fmt, fp8)
    assert got.dtype == dtype
    assert torch.equal(got.view(torch.uint8), codes.view(torch.uint8))
    assert got_values is None if values is None else torch.equal(got_values, values)


def test_packing_refuses_what_does_not_fit() -> None:
    fmt = wire.RowFormat(128, 1)
    codes = torch.zeros(2, 128, dtype=torch.uint8)
    with pytest.raises(InputError, match="scales"):
        pack_rows(codes, None, fmt)
    with pytest.raises(InputError, match="scales"):
        pack_rows(codes, torch.zeros(2, 2), fmt)
    with pytest.raises(InputError, match="codes"):
        pack_rows(torch.zeros(2, 127, dtype=torch.uint8), torch.zeros(2, 1), fmt)
    with pytest.raises(InputError, match="rows"):
        unpack_rows(torch.zeros(2, 100, dtype=torch.uint8), fmt)
