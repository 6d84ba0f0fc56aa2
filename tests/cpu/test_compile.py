"""Every kernel of the catalog compiles for sm_90a without a GPU, without local memory, to the instructions meant."""

from __future__ import annotations

import os
import re

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")  # read when cutlass is imported

import pytest

from megamoe.config import Knobs, MoEConfig, supported_modes
from megamoe.kernels import build
from megamoe.kernels.catalog import NAMES, V2_LITE, V3, CatalogEntry, catalog, shared_bytes
from megamoe.kernels.fc1 import FC1, FC1Spec
from megamoe.kernels.fc2 import FC2, FC2Spec
from megamoe.kernels.gemm_tiles import SMEM_BYTES
from megamoe.kernels.report import ARCH, report
from megamoe.sched import heuristics
from tests.ptx import check


@pytest.mark.parametrize("entry", catalog(), ids=str)
def test_compiles(entry: CatalogEntry) -> None:
    kernel = entry.make()
    check(report(kernel), kernel.spec)


def launch_bytes(ir: str) -> list[int]:
    """Shared memory that the host code of a compiled kernel launches it with: the constant stored in the third
    field of its launch configuration (gridDim, blockDim, dynamicSmemBytes, stream ...; CUDA runtime API)."""
    field = re.findall(r"(%\d+) = llvm\.getelementptr %\d+\[0, 2\] [^\n]*array<3 x i32>, array<3 x i32>, i64,", ir)
    stored = [value for at in field for value in re.findall(rf"llvm\.store (%\d+), {at} : i64", ir)]
    return [int(re.search(rf"{v} = llvm\.mlir\.constant\((\d+) : i64\)", ir)[1]) for v in stored]


TIGHT = [(V3, 32, Knobs()), (V3, 32, Knobs(tile_rows=64))]
TIGHT += [(V3, 32, Knobs(tile_rows=64, pingpong=True, schedule=schedule)) for schedule in ("static", "atomic")]
TIGHT += [(dict(V3, hidden=h, intermediate=128), e, Knobs(tile_rows=64)) for h, e in ((256, 278), (2048, 343))]
"""Shape, experts a rank and Knobs whose stages leave little of shared memory, in block mode with act_group 64."""


@pytest.mark.parametrize("kind,spec", [(FC1, FC1Spec), (FC2, FC2Spec)])
@pytest.mark.parametrize("shape,experts,knobs", TIGHT)
def test_full_stages_fit_shared_memory(kind, spec, shape, experts, knobs) -> None:
    cfg = MoEConfig(**dict(shape, num_experts=512), act_group=64)
    kernel = kind(spec.from_config(cfg, experts, knobs))
    compiled = build.compile_kernel(kernel, f"{build.OPTIONS} --gpu-arch {ARCH}")
    asked = launch_bytes(str(compiled.ir_module))
    assert asked == [kernel.smem_bytes] and asked[0] <= SMEM_BYTES


@pytest.mark.parametrize("intermediate", [128, 256, 384])
def test_few_k_blocks_are_not_serialised(intermediate: int) -> None:
    """Of a promoted sum over one or two K blocks ptxas would make straight-line code and then wait for each WGMMA."""
    for mode in (dict(), dict(scale="tensor"), dict(scale="tensor", accum="single")):
        cfg = MoEConfig(**dict(V3, intermediate=intermediate), **mode)
        for knobs in heuristics.candidates(cfg):
            kernel = FC2(FC2Spec.from_config(cfg, 8, knobs))
            check(report(kernel), kernel.spec)


@pytest.mark.parametrize("entry", catalog(quick=True), ids=str)
def test_shared_memory_is_what_the_launch_asks_for(entry: CatalogEntry) -> None:
    kernel = entry.make()
    compiled = build.compile_kernel(kernel, f"{build.OPTIONS} --gpu-arch {ARCH}")
    assert launch_bytes(str(compiled.ir_module)) == [shared_bytes(kernel)]


def test_catalog_has_every_kernel_and_mode() -> None:
    entries = catalog()
    specs = {(type(e.make()), e.make().spec) for e in entries}
    assert len(specs) == len(entries) == len({str(e) for e in entries})
    for scale, fp8 in (("block", "e4m3"), ("tensor", "e5m2")):
        quick = catalog(quick=True, scale=scale, fp8=fp8)
        assert [e.name for e in quick] == list(NAMES)
        assert {(type(e.make()), e.make().spec) for e in quick} <= specs
        assert all(f"{fp8} {scale}" in e.mode for e in quick if e.name == "stage")
    gemms = {kind: {spec for _, spec in specs if isinstance(spec, kind)} for kind in (FC1Spec, FC2Spec)}
    for mode in supported_modes():
        cfg = MoEConfig(**(V3 if mode["route_weight"] == "output" else V2_LITE), **mode)
        for knobs in heuristics.candidates(cfg):
            for kind, found in gemms.items():
                matching = [
                    s
                    for s in found
                    if (s.gemm.fp8, s.gemm.tile_rows, s.gemm.halves * 128)
                    == (cfg.fp8, knobs.tile_rows, knobs.tile_cols)
                    and s.gemm.mma_cols == knobs.mma_cols
                    and (s.gemm.cluster_rows, s.gemm.cluster_cols) == (knobs.cluster_rows, knobs.cluster_cols)
                    and s.gemm.mode == ("block" if cfg.scale == "block" else cfg.accum)
                    and s.weighted == (cfg.route_weight == ("activation" if kind is FC1Spec else "output"))
                ]
                assert matching, f"{kind.__name__} lacks {mode} with {knobs}"
