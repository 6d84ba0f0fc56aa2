"""FC1 and FC2 at the edges of their shapes, what their specs hold, and row records.

Every mode of them is compiled by test_compile.py.
"""

from __future__ import annotations

import os

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")  # read when cutlass is imported

from dataclasses import replace

import pytest
import torch

from megamoe import wire
from megamoe.config import Knobs, MoEConfig, supported_modes
from megamoe.errors import ConfigError, InputError
from megamoe.kernels import pack_rows, unpack_rows
from megamoe.kernels.fc1 import FC1, FC1Spec
from megamoe.kernels.fc2 import FC2, FC2Spec
from megamoe.kernels.report import report
from megamoe.sched import heuristics
from tests.ptx import check

LARGE = dict(hidden=7168, intermediate=2048, num_experts=256, top_k=8, max_tokens=8192)


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
    for kernel in (FC1(FC1Spec.from_config(cfg, experts, knobs, debug)), FC2(FC2Spec.from_config(cfg, experts, knobs))):
        check(report(kernel), kernel.spec)


@pytest.mark.parametrize("mode", [m for m in supported_modes() if m["fp8"] == "e4m3"], ids=str)
def test_preactivations_find_registers_in_the_largest_tile(mode: dict) -> None:
    cfg = MoEConfig(**LARGE, **mode, clamp=7.0)
    kernel = FC1(FC1Spec.from_config(cfg, 32, heuristics.large(cfg), keep_preactivation=True))
    check(report(kernel), kernel.spec)


def test_preactivations_of_several_passes_compile() -> None:
    kernel = FC1(FC1Spec.from_config(MoEConfig(**LARGE), 32, Knobs(tile_rows=64), keep_preactivation=True))
    assert kernel.spec.gemm.passes == 2
    check(report(kernel), kernel.spec)


TURNS = Knobs(tile_rows=64, tile_cols=256, pingpong=True)


@pytest.mark.parametrize("intermediate", [128, 256, 384])
@pytest.mark.parametrize("mode", [{}, dict(scale="tensor"), dict(scale="tensor", accum="single")], ids=str)
def test_warpgroups_in_turns_compile_at_the_edges(mode: dict, intermediate: int) -> None:
    cfg = MoEConfig(**(LARGE | dict(hidden=intermediate)) | dict(intermediate=intermediate), **mode)
    knobs = replace(TURNS, tile_cols=256 if intermediate == 256 else 128)
    for kernel in (FC1(FC1Spec.from_config(cfg, 32, knobs)), FC2(FC2Spec.from_config(cfg, 32, knobs))):
        check(report(kernel), kernel.spec)


@pytest.mark.parametrize("extra", [dict(debug=True), dict(keep_preactivation=True), dict(trace=64)], ids=str)
@pytest.mark.parametrize("schedule", ["static", "atomic"])
def test_warpgroups_in_turns_find_registers_for_all_they_store(schedule: str, extra: dict) -> None:
    cfg = MoEConfig(**LARGE, clamp=7.0, route_weight="activation")
    spec = FC1Spec.from_config(cfg, 32, replace(TURNS, cluster_rows=2, cluster_cols=2, schedule=schedule))
    kernel = FC1(replace(spec, **extra))
    found = report(kernel)
    if "trace" in extra:
        assert found.clean, found.remarks
    else:
        check(found, kernel.spec)


def test_warpgroups_in_turns_are_counted_once_a_stage() -> None:
    turns, small, large = (
        FC2Spec.from_config(MoEConfig(**LARGE), 32, knobs).gemm
        for knobs in (TURNS, Knobs(tile_rows=64, tile_cols=256), Knobs(tile_cols=256))
    )
    assert (turns.sharing, turns.turns, turns.warpgroups, turns.threads) == (1, 2, 2, 384)
    assert (small.sharing, small.turns, small.warpgroups, small.threads) == (1, 1, 1, 256)
    assert (large.sharing, large.turns, large.warpgroups, large.threads) == (2, 1, 2, 384)


def test_preactivations_and_debug_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match=r"keep_preactivation = True: .*debug"):
        FC1Spec.from_config(MoEConfig(**LARGE), 32, Knobs(), debug=True, keep_preactivation=True)


def test_stages_fill_shared_memory_or_obey_the_knob() -> None:
    cfg = MoEConfig(**LARGE)
    assert FC1Spec.from_config(cfg, 32, Knobs(tile_rows=128)).gemm.stages == 6
    assert FC1Spec.from_config(cfg, 32, Knobs(tile_cols=256)).gemm.stages == 4
    assert FC1Spec.from_config(cfg, 32, Knobs(tile_rows=64)).gemm.stages == 9
    assert FC2Spec.from_config(cfg, 32, Knobs(stages=3)).gemm.stages == 3
    with pytest.raises(ConfigError, match="stages = 12"):
        FC2Spec.from_config(cfg, 32, Knobs(stages=12))


@pytest.mark.parametrize("tile_cols", [128, 256])
@pytest.mark.parametrize("mode", supported_modes(), ids=str)
def test_wide_wgmmas_need_one_accumulator_and_wide_tiles(mode: dict, tile_cols: int) -> None:
    cfg, knobs = MoEConfig(**LARGE, **mode), Knobs(tile_cols=tile_cols, mma_cols=256)
    for kind in (FC1Spec, FC2Spec):
        if mode.get("accum") == "single" and tile_cols == 256:
            assert kind.from_config(cfg, 32, knobs).gemm.mma_cols == 256
        else:
            with pytest.raises(ConfigError, match=r"mma_cols = 256: .*accum='single' and tile_cols=256"):
                kind.from_config(cfg, 32, knobs)


def test_swapped_operands_refuse_what_registers_cannot_hold() -> None:
    cfg = MoEConfig(**LARGE)
    for rows, cols, most in ((256, 128, 128), (128, 256, 96)):
        with pytest.raises(ConfigError, match=f"tile_rows = {rows}: must be {most} or less with swap_ab, block scales"):
            FC2Spec.from_config(cfg, 32, Knobs(swap_ab=True, tile_rows=rows, tile_cols=cols))
    with pytest.raises(ConfigError, match=r"tile_cols = 128: must be 256 with swap_ab \(and tile_rows at most 96\)"):
        FC1Spec.from_config(cfg, 32, Knobs(swap_ab=True, tile_rows=64))
    tensor = MoEConfig(**LARGE, scale="tensor")
    assert FC1Spec.from_config(tensor, 32, Knobs(swap_ab=True, tile_rows=256)).gemm.widths == (64, 128, 192, 256)


def test_swapped_operands_in_narrow_tiles_compile_with_scales_of_64_columns() -> None:
    cfg, knobs = MoEConfig(**LARGE, act_group=64), Knobs(swap_ab=True, tile_rows=128)
    for kernel in (FC1(FC1Spec.from_config(cfg, 32, knobs)), FC2(FC2Spec.from_config(cfg, 32, knobs))):
        check(report(kernel), kernel.spec)


@pytest.mark.parametrize("debug", [False, True])
def test_swapped_operands_keep_what_fc1_can_keep(debug: bool) -> None:
    cfg, knobs = MoEConfig(**LARGE, clamp=7.0), Knobs(swap_ab=True, tile_rows=96, tile_cols=256)
    kernel = FC1(FC1Spec.from_config(cfg, 32, knobs, debug=debug, keep_preactivation=not debug))
    check(report(kernel), kernel.spec)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("cols", [1, 2])
def test_a_cluster_needs_column_tiles_for_all_its_ctas(rows: int, cols: int) -> None:
    knobs = Knobs(tile_cols=256, cluster_rows=rows, cluster_cols=cols)
    for tiles in range(1, 9):
        cfg = MoEConfig(**(LARGE | dict(hidden=256 * tiles)))
        if tiles % (rows * cols) == 0:
            gemm = FC2Spec.from_config(cfg, 32, knobs).gemm
            assert gemm.cluster * gemm.n_tiles == tiles
        else:
            field = "cluster_cols" if tiles % cols else "cluster_rows"
            with pytest.raises(ConfigError, match=rf"{field} = 2: .*fc2.* {tiles} column tiles"):
                FC2Spec.from_config(cfg, 32, knobs)


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
