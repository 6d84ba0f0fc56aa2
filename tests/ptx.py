"""What the PTX of each kernel must and must not hold. It shows intent; ptxas' own figures are in CompileReport."""

from __future__ import annotations

import re

from megamoe.kernels import gemm_tiles, gemm_transpose
from megamoe.kernels.exchange import ExchangeSpec
from megamoe.kernels.fc1 import FC1Spec
from megamoe.kernels.fc2 import FC2Spec
from megamoe.kernels.pull import PullSpec
from megamoe.kernels.reduce import ReduceSpec
from megamoe.kernels.report import CompileReport
from megamoe.kernels.stage import StageSpec
from megamoe.kernels.token_back import TokenBackSpec

REGISTER_FILE = 65536
"""32-bit registers of an SM (CUDA C programming guide, compute capabilities)."""

PUBLISHES = r"fence\.acq_rel\.sys(?s:.)*atom\.acq_rel\.gpu(?s:.)*fence\.acq_rel\.sys(?s:.)*st\.relaxed\.sys"
"""Data, fence, the CTA counter, fence, flag: control.publish."""

WANTED: dict[type, tuple[str, ...]] = {
    StageSpec: (r"red\.\S*add", r"mov\.u64\s+%rd\d+, %globaltimer"),
    ExchangeSpec: (r"atom\.\S*gpu\.\S*add", r"atom\.shared\.add", PUBLISHES),
    PullSpec: (
        r"ld\.acquire\.sys",
        r"cp\.async\.bulk\.shared\S*\.global\.mbarrier",
        r"cp\.async\.bulk\.global\.shared",
        r"fence\.proxy\.async",
        r"cp\.async\.bulk\.wait_group 0",
    ),
    TokenBackSpec: (
        r"cp\.async\.bulk\.shared\S*\.global\.mbarrier",
        r"cp\.async\.bulk\.global\.shared",
        r"cp\.async\.bulk\.wait_group 0",
        r"fence\.proxy\.async",
        PUBLISHES,
    ),
    ReduceSpec: (r"ld\.acquire\.sys", r"add\.rn\.f32|add\.f32", r"cvt\.rn\.bf16x2\.f32"),
}
"""Patterns that must be there, by the type of a kernel's spec. The GEMMs are counted, see check_gemm."""


def count(pattern: str, text: str) -> int:
    """Matches of a pattern."""
    return len(re.findall(pattern, text))


def threads_of(ptx: str) -> int:
    """Threads of a CTA, from the launch bound that every kernel of this package has."""
    return int(re.search(r"\.reqntid (\d+)", ptx)[1])


def one_lane_blocks(ptx: str) -> list[str]:
    """What an elected lane runs alone: from the branch of the others to their label, or to a jump elsewhere."""
    alone = r"elect\.sync\s+%r\d+\|(%p\d+), -1;\s*not\.pred\s+(%p\d+), \1;\s*@\2 bra\s+(\S+);"
    blocks = []
    for found in re.finditer(alone, ptx):
        block = ptx[found.end() : ptx.index(f"\n{found[3]}:", found.end())]
        blocks.append(re.split(r"\n\t(?:bra|ret)", block)[0])
    return blocks


def check_any(found: CompileReport) -> None:
    """No local memory, nothing that traps, no lane alone where all are waited for; a CTA's registers fit an SM."""
    assert not any(re.search(r"shfl\.sync|\bbar(rier)?\.", block) for block in one_lane_blocks(found.ptx))
    assert found.clean, found.remarks
    assert "trap;" not in found.ptx
    assert -(-found.registers // 8) * 8 * threads_of(found.ptx) <= REGISTER_FILE
    assert found.smem is None or found.smem <= gemm_tiles.SMEM_BYTES


def check_data(found: CompileReport, spec: object) -> None:
    """A kernel that moves data: check_any, and the instructions its protocol and rounding need."""
    check_any(found)
    for pattern in WANTED[type(spec)]:
        assert count(pattern, found.ptx) > 0, f"no {pattern} in {found.name}"
    assert count(r"wgmma", found.ptx) == 0
    if isinstance(spec, StageSpec):
        # A lane quantises 16 values at a time, two to an instruction; true division, of scales at least.
        pairs = count(rf"cvt\.rn\.satfinite\.{spec.fp8}x2\.f32", found.ptx)
        assert pairs == count(r"cvt\.rn\.satfinite\.e[45]m[23]x2", found.ptx)
        divisions = count(r"div\.rn\.f32", found.ptx)
        assert (pairs, divisions) == (0, 0) if spec.prequantized else pairs % 8 == 0 < min(pairs, divisions)
        assert count(r"div\.(approx|full)", found.ptx) == 0


def check_gemm(found: CompileReport, gemm: gemm_tiles.GemmSpec) -> None:
    """FC1 or FC2: check_any, FP8 WGMMA and no other, TMA loads, and a register split that fits an SM."""
    fp8 = gemm.fp8
    check_any(found)
    assert found.smem is not None
    wgmma = count(r"wgmma\.mma_async", found.ptx)
    wide = {gemm.mma_cols}
    if gemm.swapped:
        wide = {gemm_tiles.split_width(width)[1] for width in gemm.widths}
    each = [count(rf"wgmma\.mma_async\.sync\.aligned\.m64n{n}k32\.f32\.{fp8}\.{fp8}", found.ptx) for n in wide]
    assert wgmma == sum(each) and all(each)
    loads = count(r"cp\.async\.bulk\.tensor\.2d\S*mbarrier", found.ptx)
    shared = count(r"cp\.async\.bulk\.tensor\.2d\S*multicast", found.ptx)
    across, down = gemm.cluster_cols > 1, gemm.cluster_rows > 1
    # Of rows, one a stage, one for each smaller number of them, one where CTAs share them instead of weights, and with
    # block scales one of those; of weights, one a half, and with two rows of CTAs one more for where they share none.
    rows = 1 + len(gemm.loads) + gemm.shares_rows + gemm.scaled
    assert loads == gemm.passes * (rows + gemm.halves * (2 if down else 1))
    assert shared == gemm.passes * (across + gemm.halves * down + gemm.shares_rows)
    assert (count(r"barrier\.cluster\.wait", found.ptx) > 0) == (gemm.cluster > 1)
    # Weight scales once a work item, a plain bulk copy each.
    assert count(r"cp\.async\.bulk\.shared\S*\.global\.mbarrier", found.ptx) == gemm.scaled * gemm.w_scales
    assert count(r"setmaxnreg\.dec", found.ptx) == count(r"setmaxnreg\.inc", found.ptx) == 1
    math = 128 * gemm.warpgroups
    assert threads_of(found.ptx) == math + 128
    less, more = (int(re.search(rf"setmaxnreg\.{way}\S*\s+(\d+)", found.ptx)[1]) for way in ("dec", "inc"))
    # More than the launch allotted, and the last warpgroup waits for registers for ever.
    assert 128 * less + math * more <= found.registers * threads_of(found.ptx)


def check_fc1(found: CompileReport, spec: FC1Spec) -> None:
    """check_gemm, then the epilogue's rounding and its 16-byte stores of 16 codes."""
    check_gemm(found, spec.gemm)
    assert found.name.startswith("megamoe_fc1")
    items = spec.gemm.passes * spec.gemm.halves
    if spec.gemm.swapped:  # each batch of each width: 16 values a thread, of one row
        items = sum(len(gemm_transpose.batches(spec.gemm, width)) for width in spec.gemm.widths) / 2
    assert count(r"div\.rn\.f32", found.ptx) > 0 == count(r"div\.(approx|full)", found.ptx)
    assert count(rf"cvt\.rn\.satfinite\.{spec.gemm.fp8}x2\.f32", found.ptx) == 16 * items
    assert count(r"cvt\.rn\.bf16x2\.f32", found.ptx) == 32 * items * spec.keep_preactivation
    assert count(r"st\.global\.v4\.b32", found.ptx) == 2 * items * (1 + 4 * spec.debug + 4 * spec.keep_preactivation)
    assert (count(r"min\.NaN\.f32", found.ptx) > 0) == (spec.clamp is not None)


def check_fc2(found: CompileReport, spec: FC2Spec) -> None:
    """check_gemm, then the epilogue's bf16 pairs and 16-byte stores."""
    check_gemm(found, spec.gemm)
    assert found.name.startswith("megamoe_fc2")
    items = spec.gemm.halves + spec.gemm.late  # the last half's stores: before the next item, and after all
    if spec.gemm.swapped:
        items *= sum(len(gemm_transpose.batches(spec.gemm, width)) for width in spec.gemm.widths) / 4
    assert count(r"cvt\.rn\.bf16x2\.f32", found.ptx) == 32 * items
    assert count(r"st\.global\.v4\.b32", found.ptx) == 8 * items


def check(found: CompileReport, spec: object) -> None:
    """The check of the kernel that has this spec."""
    if isinstance(spec, FC1Spec):
        check_fc1(found, spec)
    elif isinstance(spec, FC2Spec):
        check_fc2(found, spec)
    else:
        check_data(found, spec)
