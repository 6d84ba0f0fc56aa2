"""The layer of plain eager torch: sort, all-to-all, torch._scaled_grouped_mm, SwiGLU, all-to-all, weighted sum.

What a careful user writes without a kernel of their own. Tokens are quantised at home, once, with one scale a row
(the only granularity that torch's grouped FP8 product has on Hopper), and travel as records of H codes and 16
bytes that hold the scale. Rows are sorted by expert at both ends, so that messages are contiguous and each
expert's rows follow each other. With one rank nothing waits for the host, and a forward can be captured in a CUDA
graph. With several, NCCL must be told the split sizes on the host: one read of the counts a forward.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.config import FP8_MAX
from megamoe.numerics import AMAX_FLOOR

from . import Experts, Peer, Point, why_no_hopper

FP8 = torch.float8_e4m3fn
TAIL = 16
"""Bytes of a record behind the codes: the fp32 scale, and padding so that TMA can read rows in place."""

TILE = 256
"""Most rows of a tile of torch's grouped product."""


def grouped_mm(codes: Tensor, scale: Tensor, w: Tensor, w_scale: Tensor, ends: Tensor) -> Tensor:
    """bf16 [R, N]: codes FP8 [R, K] times the expert's w FP8 [E, N, K] of each row, both scaled by row.

    scale fp32 [R], w_scale fp32 [E, N]; ends int32 [E]: expert e has the rows from ends[e - 1] to ends[e]. Rows
    behind the last end are left as they were allocated.
    """
    return torch._scaled_grouped_mm(
        codes, w.transpose(-2, -1), scale, w_scale, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def new_scales(rows: int, device: torch.device) -> Tensor:
    """Unset fp32 [rows, 1] with a tile's worth of memory behind it, for products that load a whole tile's scales."""
    return torch.empty(rows + TILE, 1, device=device)[:rows]


def quantize_rows(x: Tensor, codes: Tensor) -> Tensor:
    """Fill codes FP8 [R, C] from x bf16 [R, C] and return the scale of each row, fp32 [R, 1].

    One kernel divides in fp32 and casts. The formula is numerics', one group a row.
    """
    scale = new_scales(x.shape[0], x.device)
    torch.linalg.vector_norm(x, float("inf"), dim=1, keepdim=True, dtype=torch.float32, out=scale)
    scale.clamp_(min=AMAX_FLOOR).div_(FP8_MAX["e4m3"])
    torch.div(x, scale, out=codes)
    return scale


def pack_records(x: Tensor) -> Tensor:
    """uint8 [T, H + TAIL]: the codes of each token, then its scale."""
    tokens, hidden = x.shape
    records = torch.empty(tokens, hidden + TAIL, dtype=torch.uint8, device=x.device)
    scale = quantize_rows(x, records[:, :hidden].view(FP8))
    records[:, hidden : hidden + 4].view(torch.float32).copy_(scale)
    return records


def unpack_records(records: Tensor, hidden: int) -> tuple[Tensor, Tensor]:
    """(codes FP8 [R, H], a view of the records; scales fp32 [R])."""
    scale = new_scales(records.shape[0], records.device)
    scale.copy_(records[:, hidden : hidden + 4].view(torch.float32))
    return records[:, :hidden].view(FP8), scale.flatten()


def take(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows] of a contiguous 2-D tensor whose rows are a multiple of 8 bytes, moved in words of 8."""
    return x.view(torch.int64).index_select(0, rows).view(x.dtype)


def inverse(order: Tensor) -> Tensor:
    """The permutation that undoes `order`, int64 [R]."""
    places = torch.arange(order.shape[0], device=order.device)
    return torch.empty_like(order).scatter_(0, order, places)


def sort_routes(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Routes by expert: (order int64 [T * K], ends int32 [E]); ids outside 0..E-1 come last, behind the last end."""
    keys = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts).flatten()
    keys, order = torch.sort(keys, stable=True)
    experts = torch.arange(num_experts, dtype=keys.dtype, device=keys.device)
    return order, torch.searchsorted(keys, experts, right=True, out_int32=True)


def sort_received(counts: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """(order int64 [rows], ends int32 [E_local]) of rows that came rank by rank, each rank's by local expert.

    counts int [W, E_local]; rows: their sum, known on the host.
    """
    ranks, local = counts.shape
    experts = torch.arange(local, device=counts.device).repeat(ranks)
    experts = torch.repeat_interleave(experts, counts.flatten(), output_size=rows)
    return torch.argsort(experts, stable=True), counts.sum(0).cumsum(0).to(torch.int32)


class TorchEP(Peer):
    """Expert parallelism over torch.distributed's default group, whose backend for the device is used."""

    name = "torch"

    def __init__(self) -> None:
        self._source: Experts | None = None
        self._w: dict[str, Tensor] = {}
        self._inputs: tuple[Tensor, ...] = ()

    def why_not(self, point: Point) -> str | None:
        cfg = point.cfg
        if cfg.fp8 != "e4m3":
            return f"torch._scaled_grouped_mm multiplies E4M3 only, not {cfg.fp8}"
        if cfg.route_weight != "output":
            return "it applies routing weights to FC2's rows only"
        if not hasattr(torch, "_scaled_grouped_mm"):
            return f"torch {torch.__version__} has no _scaled_grouped_mm"
        if point.world_size > 1 and not dist.is_initialized():
            return "needs an initialised torch.distributed group"
        return why_no_hopper(point.device)

    def prepare(self, point: Point, weights: Experts, inputs: tuple) -> None:
        self._point, self._inputs = point, inputs
        self.graphable = point.world_size == 1
        ids = inputs[1]
        self._masked = bool(((ids < 0) | (ids >= point.cfg.num_experts)).any())
        if self._source is not weights:
            self._load(point, weights)
        self.note = "one scale a row of activations and weights, fast accumulation, rows and routing weights bf16"
        if point.world_size > 1:
            self.note += "; waits for the host once a forward, for NCCL's split sizes"
        self.run()
        if point.device.type == "cuda":
            torch.cuda.synchronize(point.device)

    def _load(self, point: Point, experts: Experts) -> None:
        """Quantise the weights, one scale an output row."""
        cfg, count = point.cfg, experts.count
        self._source, self._w = None, {}
        for name, rows, columns in (("13", 2 * cfg.intermediate, cfg.hidden), ("2", cfg.hidden, cfg.intermediate)):
            self._w["w" + name] = torch.empty(count, rows, columns, dtype=FP8, device=point.device)
            self._w["s" + name] = torch.empty(count, rows, dtype=torch.float32, device=point.device)
        first = 0
        for chunk in experts.chunks():
            for name, w in zip(("13", "2"), chunk):
                part = slice(first, first + w.shape[0])
                codes = self._w["w" + name][part].flatten(0, 1)  # a view
                self._w["s" + name][part] = quantize_rows(w.flatten(0, 1), codes).view(w.shape[:2])
            first += chunk[0].shape[0]
        self._source = experts

    def run(self) -> Tensor:
        x, ids, weights = self._inputs
        order, ends = sort_routes(ids, self._point.cfg.num_experts)
        sent = take(pack_records(x), order // ids.shape[1])
        rows = self._experts(sent, ends) if self._point.world_size == 1 else self._exchange(sent, ends)
        slots = take(rows, inverse(order)).view(*ids.shape, x.shape[1])
        if self._masked:  # their slots hold whatever memory held
            live = (ids >= 0) & (ids < self._point.cfg.num_experts)
            slots.masked_fill_(~live[..., None], 0.0)
            weights = torch.where(live, weights, 0.0)
        return torch.bmm(weights.to(torch.bfloat16)[:, None], slots).squeeze(1)

    def _experts(self, records: Tensor, ends: Tensor) -> Tensor:
        """FC1, SwiGLU, quantisation and FC2 of rows in expert order, bf16 [R, H]."""
        cfg, w = self._point.cfg, self._w
        codes, scale = unpack_records(records, cfg.hidden)
        gate, up = grouped_mm(codes, scale, w["w13"], w["s13"], ends).split(cfg.intermediate, dim=1)
        if cfg.clamp is not None:
            gate, up = gate.clamp(max=cfg.clamp), up.clamp(-cfg.clamp, cfg.clamp)
        act = torch.nn.functional.silu(gate).mul_(up)
        codes = torch.empty(act.shape, dtype=FP8, device=act.device)
        scale = quantize_rows(act, codes).flatten()
        return grouped_mm(codes, scale, w["w2"], w["s2"], ends)

    def _exchange(self, sent: Tensor, ends: Tensor) -> Tensor:
        """Rows of all routes, bf16 [T * K, H] in the order of `sent`, computed by the experts' owners."""
        point, hidden = self._point, self._point.cfg.hidden
        counts = torch.diff(ends, prepend=ends.new_zeros(1)).view(point.world_size, -1)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts)
        out_rows, in_rows = torch.stack((counts.sum(1), received.sum(1))).tolist()  # the host waits here
        arrived = sent.new_empty(sum(in_rows), sent.shape[1])
        dist.all_to_all_single(arrived, sent[: sum(out_rows)], in_rows, out_rows)
        if sum(in_rows):
            order, local_ends = sort_received(received, sum(in_rows))
            back = take(self._experts(take(arrived, order), local_ends), inverse(order))
        else:
            back = torch.empty(0, hidden, dtype=torch.bfloat16, device=sent.device)
        home = torch.empty(sent.shape[0], hidden, dtype=torch.bfloat16, device=sent.device)
        dist.all_to_all_single(home[: sum(out_rows)], back, out_rows, in_rows)
        return home

    def close(self) -> None:
        self._source, self._w, self._inputs = None, {}, ()
