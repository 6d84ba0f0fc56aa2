"""Peers of fc1 and fc2 alone: torch's dense and grouped FP8 products, and DeepGEMM.

They read the codes that our kernels read, so that the tensor cores draw the same power, and write bf16; ours also
do SwiGLU and quantisation (fc1) or the routing weight (fc2) in that time. torch's two take unit scales: theirs are
a scalar, or one a row, and cost the same whatever they are. DeepGEMM takes our block scales.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megamoe import numerics
from megamoe.weights import ExpertWeights, deinterleave_w13, unpermute_w2

from . import GemmPoint, Peer, torch_ep, why_no_hopper

ROWS = 16
"""torch._scaled_mm wants its sizes in multiples of this."""

CHECKED = 32
"""Rows of a result that are compared."""


def weight_of(point: GemmPoint, pack: ExpertWeights) -> Tensor:
    """The weights of the point's experts, FP8 [experts, N, K] in kernel order, a view."""
    return (pack.w13 if point.name == "fc1" else pack.w2)[: point.experts]


def canonical_of(point: GemmPoint, pack: ExpertWeights) -> tuple[Tensor, Tensor]:
    """(a copy of the weights in checkpoint order, their block scales fp32 [experts, N/128, K/128])."""
    w = weight_of(point, pack)
    if point.name == "fc1":
        return deinterleave_w13(w), pack.w13_scale[: point.experts].flatten(1, 2).contiguous()
    return unpermute_w2(w), pack.w2_scale[: point.experts].contiguous()


def row_ends(point: GemmPoint) -> Tensor:
    """int32 [experts]: where each expert's rows end."""
    return torch.tensor(point.counts, device=point.device).cumsum(0).to(torch.int32)


class _Gemm(Peer):
    """A prepared launch."""

    graphable = True

    def __init__(self) -> None:
        self._launch: Callable[[], Tensor] | None = None

    def why_not(self, point: GemmPoint) -> str | None:
        if point.cfg.fp8 != "e4m3":
            return f"multiplies E4M3 only, not {point.cfg.fp8}"
        return why_no_hopper(point.device)

    def prepare(self, point: GemmPoint, weights: ExpertWeights, inputs: tuple) -> None:
        self._launch = self._bind(point, weights, *inputs)
        self.run()
        if point.device.type == "cuda":
            torch.cuda.synchronize(point.device)

    def _bind(self, point: GemmPoint, pack: ExpertWeights, codes: Tensor, scales: Tensor | None) -> Any:
        """The launch of one product."""
        raise NotImplementedError

    def run(self) -> Tensor:
        if self._launch is None:
            raise RuntimeError(f"{self.name} is not prepared")
        return self._launch()

    def close(self) -> None:
        self._launch = None

    def check(
        self, point: GemmPoint, pack: ExpertWeights, codes: Tensor, scales: Tensor | None, rows: int = CHECKED
    ) -> tuple[Tensor, Tensor]:
        """(the first rows of a run's result, what plain fp32 torch makes of the numbers that it reads), both
        [at most `rows`, N]."""
        count, first = min(rows, point.rows), 0
        expected = []
        for expert, live in enumerate(point.counts):
            part = slice(first, min(count, first + live))
            if part.start < part.stop:
                a = self._rows(codes[part], None if scales is None else scales[part])
                expected.append(a @ self._weight(point, pack, expert).T)
            first += live
        result = self.run()
        result = result if result.ndim == 2 else result[: len(expected)].flatten(0, 1)
        return result[:count], torch.cat(expected)

    def _rows(self, codes: Tensor, scales: Tensor | None) -> Tensor:
        """Values fp32 [R, K] of rows as this peer reads them."""
        return codes.float()

    def _weight(self, point: GemmPoint, pack: ExpertWeights, expert: int) -> Tensor:
        """Values fp32 [N, K] of an expert's weight as this peer reads it."""
        return weight_of(point, pack)[expert].float()


class ScaledMM(_Gemm):
    """One dense product of the same total M, N and K: no expert ever changes, so it is a ceiling, not a peer."""

    name = "scaled_mm"
    note = "dense, one weight for all rows, a scale a tensor, fast accumulation, bf16 out"

    def _bind(self, point: GemmPoint, pack: ExpertWeights, codes: Tensor, scales: Tensor | None) -> Any:
        rows = -(-point.rows // ROWS) * ROWS
        index = torch.arange(rows, device=point.device) % point.rows
        a = codes.view(torch.uint8).index_select(0, index).view(codes.dtype)
        b = weight_of(point, pack)[0].t()
        one = torch.ones((), device=point.device)
        count = point.rows

        def multiply() -> Tensor:
            out = torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)
            return out[:count]

        return multiply

    def _weight(self, point: GemmPoint, pack: ExpertWeights, expert: int) -> Tensor:
        return super()._weight(point, pack, 0)


class ScaledGroupedMM(_Gemm):
    """torch's grouped product, the one that torch_ep uses."""

    name = "scaled_grouped_mm"
    note = "a scale a row, fast accumulation, bf16 out"

    def why_not(self, point: GemmPoint) -> str | None:
        if not hasattr(torch, "_scaled_grouped_mm"):
            return f"torch {torch.__version__} has no _scaled_grouped_mm"
        return super().why_not(point)

    def _bind(self, point: GemmPoint, pack: ExpertWeights, codes: Tensor, scales: Tensor | None) -> Any:
        w, ends = weight_of(point, pack), row_ends(point)
        one, ones = (torch.ones(shape, device=point.device) for shape in (point.rows, w.shape[:2]))
        codes = codes.contiguous()
        return lambda: torch_ep.grouped_mm(codes, one, w, ones, ends)


class DeepGEMM(_Gemm):
    """DeepGEMM's contiguous layout where each expert's rows fill its row blocks, else its masked layout.

    With the masked layout the result is [experts, rows_per_expert, N], not flat.
    """

    name = "deep_gemm"
    note = "block scales, bf16 out; activation scales transposed beforehand"

    def why_not(self, point: GemmPoint) -> str | None:
        if point.cfg.scale != "block":
            return "takes block scales only"
        if point.uneven is not None:
            return "takes equal rows only: its row blocks are of one expert each, or padded to the most rows of any"
        reason = super().why_not(point)
        if reason is not None:
            return reason
        if importlib.util.find_spec("deep_gemm") is None:
            return "deep_gemm is not installed"
        try:
            self._function("m_grouped_fp8_gemm_nt_contiguous")
        except (ImportError, OSError, AttributeError) as error:
            return f"deep_gemm cannot be used: {error}"
        return None

    def _rows(self, codes: Tensor, scales: Tensor | None) -> Tensor:
        return numerics.dequantize_groups(codes, scales)

    def _weight(self, point: GemmPoint, pack: ExpertWeights, expert: int) -> Tensor:
        one, restore = slice(expert, expert + 1), deinterleave_w13 if point.name == "fc1" else unpermute_w2
        scales = pack.w13_scale.flatten(1, 2) if point.name == "fc1" else pack.w2_scale
        return numerics.dequantize_weight_blocks(restore(weight_of(point, pack)[one]), scales[one])[0]

    @staticmethod
    def _function(*names: str) -> Callable[..., Any]:
        """The first function of these names; versions differ in names and in where they are."""
        for place in ("deep_gemm", "deep_gemm.utils"):
            module = importlib.import_module(place)
            for name in names:
                if hasattr(module, name):
                    return getattr(module, name)
        raise AttributeError(f"it has no {' or '.join(names)}")

    def _bind(self, point: GemmPoint, pack: ExpertWeights, codes: Tensor, scales: Tensor | None) -> Any:
        alignment = self._function("get_mk_alignment_for_contiguous_layout", "get_m_alignment_for_contiguous_layout")()
        transpose = self._function("get_mn_major_tma_aligned_tensor", "get_col_major_tma_aligned_tensor")
        b, each, experts = canonical_of(point, pack), point.rows_per_expert, point.experts
        columns = point.size[0]
        if each % alignment == 0:
            multiply = self._function("m_grouped_fp8_gemm_nt_contiguous")
            a = (codes.contiguous(), transpose(scales.contiguous()))
            owner = torch.arange(experts, dtype=torch.int32, device=point.device).repeat_interleave(each)
            out = torch.empty(point.rows, columns, dtype=torch.bfloat16, device=point.device)
            return lambda: (multiply(a, b, out, owner), out)[1]
        multiply = self._function("m_grouped_fp8_gemm_nt_masked", "fp8_m_grouped_gemm_nt_masked")
        most = -(-each // alignment) * alignment
        padded = codes.new_empty(experts, most, codes.shape[1])
        padded.view(torch.uint8).zero_()
        padded[:, :each] = codes.view(experts, each, -1)
        wide = torch.ones(experts, most, scales.shape[1], device=point.device)
        wide[:, :each] = scales.view(experts, each, -1)
        a = (padded, transpose(wide))
        live = torch.full((experts,), each, dtype=torch.int32, device=point.device)
        out = torch.empty(experts, most, columns, dtype=torch.bfloat16, device=point.device)
        return lambda: (multiply(a, b, out, live, each), out[:, :each])[1]
