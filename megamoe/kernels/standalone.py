"""The data-movement kernels as plain functions on torch tensors: one call, one launch, nothing else needed.

Each stands for one rank. Arrays have the layouts of wire.py. `control` and `deltas` default to those of a
lone rank on which every wait is already satisfied, and then the call waits for the kernel and raises
MegaMoEAborted if it aborted; pass your own (fresh_control, peer_deltas) to play several ranks on one GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import numerics, wire
from ..config import BLOCK, Knobs, MoEConfig
from ..errors import InputError
from . import build
from .exchange import Exchange, ExchangeSpec, exchange_grid
from .pull import Pull, PullSpec
from .reduce import Reduce, ReduceSpec, reduce_grid
from .rows import check, ctas
from .stage import Stage, StageSpec, stage_grid
from .token_back import TokenBack, TokenBackSpec

TIMEOUT_NS = 10_000_000_000


class Staged(NamedTuple):
    """rows uint8 [T, pitch] records; ids int32 and weights fp32 [T, K], checked; counts int32 [2, E] (the set
    of the control block's parity is filled)."""

    rows: Tensor
    ids: Tensor
    weights: Tensor
    counts: Tensor


class Pool(NamedTuple):
    """rows uint8 [R, pitch]; meta int64 [R]; weights fp32 [R]; expert_start int32 [E_local + 1]."""

    rows: Tensor
    meta: Tensor
    weights: Tensor
    expert_start: Tensor


def fresh_control(device: torch.device | str, *, epoch: int = 0, ready: bool = True) -> Tensor:
    """An int64 control block in which forward epoch + 1 runs; ready: every flag it may wait for is set."""
    control = torch.zeros(wire.CONTROL_WORDS, dtype=torch.int64, device=device)
    control[wire.EPOCH] = epoch
    control[wire.DEADLINE] = (1 << 63) - 1
    if ready:
        control[wire.LIST_FLAG : wire.LIST_FLAG + 24] = epoch + 1
    return control


def peer_deltas(arenas: list[Tensor], rank: int) -> Tensor:
    """int64 [W]: what to add to an address in arenas[rank] to reach the same place in each other arena."""
    base = arenas[rank].data_ptr()
    return torch.tensor([a.data_ptr() - base for a in arenas], dtype=torch.int64, device=arenas[rank].device)


def _launch(
    kernel: build.DeviceKernel,
    like: Tensor,
    control: Tensor | None,
    deltas: Tensor | None,
    world_size: int,
    *args: float,
) -> None:
    """Launch on torch's current stream with (control, deltas, *args), made where None.

    A control block made here is also read afterwards, which waits for the kernel: an abort raises.
    """
    block = fresh_control(like.device) if control is None else control
    if deltas is None:
        deltas = torch.zeros(world_size, dtype=torch.int64, device=like.device)
    build.run(kernel, like.device, block.data_ptr(), deltas.data_ptr(), *args)
    if control is None:
        error = wire.abort_in(block.tolist())
        if error is not None:
            raise error


def stage(
    cfg: MoEConfig,
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    x_scales: Tensor | None = None,
    x_scale: float = 1.0,
    check_routes: bool = False,
    world_size: int = 1,
    rank: int = 0,
    control: Tensor | None = None,
    deltas: Tensor | None = None,
    num_sms: int | None = None,
) -> Staged:
    """Quantise tokens into row records; check, clean and count routes.

    x bf16 [T, H], or FP8 codes [T, H] with x_scales fp32 [T, H/128] (block); topk_ids int32/int64 and
    topk_weights fp32/bf16 [T, K]. x_scale: tensor mode's static scale.
    """
    tokens, fmt = x.shape[0], wire.input_format(cfg)
    check("x", x, (torch.bfloat16, numerics.fp8_dtype(cfg.fp8)), tokens, cfg.hidden)
    check("topk_ids", topk_ids, (torch.int32, torch.int64), tokens, cfg.top_k)
    check("topk_weights", topk_weights, (torch.float32, torch.bfloat16), tokens, cfg.top_k)
    prequantized = x.dtype is not torch.bfloat16
    if prequantized and cfg.scale == "block":
        if x_scales is None:
            raise InputError("x_scales", None, "the scales of pre-quantised x with scale='block'")
        check("x_scales", x_scales, torch.float32, tokens, cfg.hidden // BLOCK)
    rows = torch.empty(tokens, fmt.pitch, dtype=torch.uint8, device=x.device)
    ids = torch.empty(tokens, cfg.top_k, dtype=torch.int32, device=x.device)
    weights = torch.empty(tokens, cfg.top_k, dtype=torch.float32, device=x.device)
    counts = torch.zeros(2, cfg.num_experts, dtype=torch.int32, device=x.device)
    cursors = torch.zeros_like(counts)
    spec = StageSpec.from_config(cfg, world_size, prequantized=prequantized, check_routes=check_routes)
    _launch(
        *(Stage(spec), x, control, deltas, world_size),
        rank,
        *(x.data_ptr(), 0 if x_scales is None else x_scales.data_ptr()),
        *(topk_ids.data_ptr(), int(topk_ids.dtype is torch.int64)),
        *(topk_weights.data_ptr(), int(topk_weights.dtype is torch.bfloat16)),
        *(tokens, x_scale, rows.data_ptr(), ids.data_ptr(), weights.data_ptr()),
        *(counts.data_ptr(), cursors.data_ptr(), TIMEOUT_NS),
        stage_grid(cfg.hidden, tokens, cfg.top_k, ctas(x, num_sms)),
    )
    return Staged(rows, ids, weights, counts)


def exchange(
    cfg: MoEConfig,
    staged: Staged,
    counts: Tensor,
    lists: Tensor,
    *,
    rank: int = 0,
    layer: int = 0,
    world_size: int = 1,
    control: Tensor | None = None,
    deltas: Tensor | None = None,
    num_sms: int | None = None,
) -> Tensor:
    """Order a rank's live routes by expert, at their owners. Returns start int32 [W + 1]: routes to owners before o.

    counts int32 [2, W, counts_pitch] and lists int64 [2, W, capacity] are this rank's arena regions; those of owner o
    lie deltas[o] bytes away. Words: token * K + k low, fp32 weight bits high.
    """
    ids = staged.ids
    check("counts", counts, torch.int32, 2, world_size, wire.counts_pitch(cfg.experts_local(world_size)))
    check("lists", lists, torch.int64, 2, world_size, None)
    start = torch.zeros(world_size + 1, dtype=torch.int32, device=ids.device)
    cursors = torch.zeros_like(staged.counts)
    _launch(
        *(Exchange(ExchangeSpec.from_config(cfg, world_size)), counts, control, deltas, world_size),
        *(rank, layer, ids.shape[0], ids.data_ptr(), staged.weights.data_ptr()),
        *(staged.counts.data_ptr(), cursors.data_ptr(), start.data_ptr()),
        *(counts.data_ptr(), lists.data_ptr(), lists.shape[-1]),
        exchange_grid(ids.shape[0], cfg.top_k, ctas(counts, num_sms)),
    )
    return start


def pull(
    cfg: MoEConfig,
    counts: Tensor,
    lists: Tensor,
    x_rows: Tensor,
    pool_rows: int,
    *,
    rank: int = 0,
    layer: int = 0,
    world_size: int = 1,
    knobs: Knobs | None = None,
    control: Tensor | None = None,
    deltas: Tensor | None = None,
    num_sms: int | None = None,
) -> Pool:
    """Lay out and fetch the pool. x_rows uint8 [max_tokens, pitch]: this rank's records; those of home h lie
    deltas[h] bytes away. Only the first expert_start[E_local] of pool_rows rows are written."""
    device, fmt = counts.device, wire.input_format(cfg)
    check("counts", counts, torch.int32, 2, world_size, wire.counts_pitch(cfg.experts_local(world_size)))
    check("lists", lists, torch.int64, 2, world_size, None)
    check("x_rows", x_rows, torch.uint8, None, fmt.pitch)
    pool = Pool(
        torch.empty(pool_rows, fmt.pitch, dtype=torch.uint8, device=device),
        torch.empty(pool_rows, dtype=torch.int64, device=device),
        torch.empty(pool_rows, dtype=torch.float32, device=device),
        torch.empty(cfg.experts_local(world_size) + 1, dtype=torch.int32, device=device),
    )
    _launch(
        *(Pull(PullSpec.from_config(cfg, world_size, knobs or Knobs())), counts, control, deltas, world_size),
        *(rank, layer),
        *(counts.data_ptr(), lists.data_ptr(), lists.shape[-1], x_rows.data_ptr()),
        *(pool.rows.data_ptr(), pool.meta.data_ptr(), pool.weights.data_ptr(), pool.expert_start.data_ptr()),
        *(pool_rows, ctas(counts, num_sms)),
    )
    return pool


def token_back(
    cfg: MoEConfig,
    pool: Pool,
    y_rows: Tensor,
    slots: Tensor,
    *,
    rank: int = 0,
    world_size: int = 1,
    knobs: Knobs | None = None,
    control: Tensor | None = None,
    deltas: Tensor | None = None,
    num_sms: int | None = None,
) -> None:
    """Store y_rows bf16 [R, H] into slots bf16 [max_tokens, K, H] of their homes (deltas[home] bytes away)."""
    check("y_rows", y_rows, torch.bfloat16, None, cfg.hidden)
    check("slots", slots, torch.bfloat16, None, cfg.top_k, cfg.hidden)
    _launch(
        *(TokenBack(TokenBackSpec.from_config(cfg, world_size, knobs or Knobs())), slots, control, deltas, world_size),
        rank,
        *(pool.expert_start.data_ptr(), pool.meta.data_ptr(), y_rows.data_ptr(), slots.data_ptr()),
        ctas(slots, num_sms),
    )


def reduce(
    cfg: MoEConfig,
    slots: Tensor,
    ids: Tensor,
    *,
    start: Tensor | None = None,
    rank: int = 0,
    world_size: int = 1,
    control: Tensor | None = None,
    deltas: Tensor | None = None,
    num_sms: int | None = None,
) -> Tensor:
    """Sum slots bf16 [>= T, K, H] over the live ids int32 [T, K] (-1 = masked) -> bf16 [T, H].

    start: what exchange returned, which owners to wait for; none by default.
    """
    tokens = ids.shape[0]
    check("ids", ids, torch.int32, tokens, cfg.top_k)
    check("slots", slots, torch.bfloat16, None, cfg.top_k, cfg.hidden)
    if start is None:
        start = torch.zeros(world_size + 1, dtype=torch.int32, device=slots.device)
    y = torch.empty(tokens, cfg.hidden, dtype=torch.bfloat16, device=slots.device)
    host = torch.zeros(wire.HOST_WORDS, dtype=torch.int64, device=slots.device)
    _launch(
        *(Reduce(ReduceSpec.from_config(cfg, world_size)), slots, control, deltas, world_size),
        *(rank, tokens),
        *(ids.data_ptr(), start.data_ptr(), slots.data_ptr(), y.data_ptr(), host.data_ptr()),
        reduce_grid(cfg.hidden, tokens, ctas(slots, num_sms)),
    )
    return y
