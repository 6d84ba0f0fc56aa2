"""What lies where in a rank's memory: the wire format that kernels and comm share.

DESIGN puts the arena in comm, but kernels must not import comm and both need these offsets, so they
are a room of their own beside config. Nothing here depends on Knobs: ranks may run different kernels.

Row record: a row's FP8 codes, then its fp32 scales, in one stretch of memory, so that one bulk copy
moves both. `pitch` is the distance of two records (a multiple of 128 B, for TMA), `row_bytes` what is
copied (a multiple of 16 B). In tensor mode there are no scales and both equal the columns.

Route word (int64): low 32 bits token * K + k, high 32 bits the fp32 routing weight.
Pool meta (int64): low 32 bits token * K + k, high 32 bits the home rank.
List of one (owner, source): HEADER int32 words, then E_local counts (int32); route words sorted by
local expert. Two slots of each, by the parity of the forward's epoch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from .config import BLOCK, MAX_RANKS, MoEConfig
from .errors import AbortRecord, MegaMoEAborted, aborted

WIRE_VERSION = 1
ALIGN = 256

# Control block: int64 words. Words that peers write and owners poll lie apart from local counters.
EPOCH, DEADLINE, ABORT, CLAIM = 0, 1, 2, 3  # ABORT: 0, or 1 + the rank whose record counts
LIST_FLAG = 16  # [2 slots][MAX_RANKS] epochs, written by sources
RETURN_FLAG = 32  # [MAX_RANKS] epochs, written by owners
DONE_EXCHANGE, DONE_RETURN, DONE_REDUCE = 48, 50, 52  # CTAs that finished; the last one resets them
RECORDS = 64  # [MAX_RANKS origins][RECORD_FIELDS]
RECORD_FIELDS = len(fields(AbortRecord))  # int64 each, in the order of AbortRecord
CONTROL_WORDS = RECORDS + MAX_RANKS * RECORD_FIELDS

HEADER = 4  # int32 words before the counts
HEADER_LAYER = 0  # the others are spare; they keep counts 16-byte aligned

# Pinned host block: int64 words.
HOST_STATE, HOST_RECORD = 0, 8  # STATE: 0, or 1 once RECORD is complete
HOST_WORDS = HOST_RECORD + RECORD_FIELDS


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def scale_columns(columns: int, group: int, block_scaled: bool) -> int:
    """fp32 scales of a record of `columns` codes: one a group, none in tensor mode."""
    return columns // group if block_scaled else 0


def pitch(columns: int, scales: int) -> int:
    """Bytes from one row record to the next."""
    return round_up(columns + 4 * scales, BLOCK)


def row_bytes(columns: int, scales: int) -> int:
    """Bytes of a row record that are worth copying; a multiple of 16."""
    return round_up(columns + 4 * scales, 16)


@dataclass(frozen=True)
class RowFormat:
    """A row record of a config: columns, scales, pitch and row_bytes (bytes)."""

    columns: int
    scales: int

    @property
    def pitch(self) -> int:
        return pitch(self.columns, self.scales)

    @property
    def row_bytes(self) -> int:
        return row_bytes(self.columns, self.scales)


def input_format(cfg: MoEConfig) -> RowFormat:
    """Record of a staged token: H codes, H/128 scales."""
    return RowFormat(cfg.hidden, scale_columns(cfg.hidden, BLOCK, cfg.scale == "block"))


def activation_format(cfg: MoEConfig) -> RowFormat:
    """Record of FC1's output: I codes, I/act_group scales."""
    return RowFormat(cfg.intermediate, scale_columns(cfg.intermediate, cfg.act_group, cfg.scale == "block"))


def counts_pitch(experts_local: int) -> int:
    """int32 words of a list's header and counts, from one source to the next."""
    return round_up(HEADER + experts_local, 4)


def abort_in(control: list[int]) -> MegaMoEAborted | None:
    """The error that a control block's words hold, or None when its abort word is not set."""
    origin = control[ABORT] - 1
    if origin < 0:
        return None
    first = RECORDS + origin * RECORD_FIELDS
    return aborted(control[first : first + RECORD_FIELDS])


def list_flag(slot: int, source: int) -> int:
    """Control word of the flag of `source`'s list in `slot`."""
    return LIST_FLAG + slot * MAX_RANKS + source


@dataclass(frozen=True)
class Region:
    """A named stretch of an allocation: offset and size in bytes."""

    name: str
    offset: int
    nbytes: int


class Layout(dict[str, Region]):
    """Regions by name, in order, each aligned to 256 B. `nbytes` is the whole."""

    def __init__(self, sizes: dict[str, int]) -> None:
        offset = 0
        for name, size in sizes.items():
            self[name] = Region(name, offset, size)
            offset = round_up(offset + size, ALIGN)
        self.nbytes = offset


def arena_layout(cfg: MoEConfig, world_size: int) -> Layout:
    """The symmetric regions of one workspace; equal on every rank.

    control int64 [CONTROL_WORDS]; counts int32 [2, W, counts_pitch]; lists int64 [2, W, max_tokens*K];
    x row records [max_tokens]; slots bf16 [max_tokens, K, H].
    """
    routes = cfg.max_tokens * cfg.top_k
    return Layout(
        {
            "control": 8 * CONTROL_WORDS,
            "counts": 2 * world_size * counts_pitch(cfg.experts_local(world_size)) * 4,
            "lists": 2 * world_size * routes * 8,
            "x": cfg.max_tokens * input_format(cfg).pitch,
            "slots": routes * cfg.hidden * 2,
        }
    )


def local_layout(cfg: MoEConfig, world_size: int) -> Layout:
    """The regions that only this rank touches.

    send_counts, send_cursors int32 [2, E] (a forward uses the set of its parity and clears the other);
    send_start int32 [W + 1] (live routes to the owners before o: exchange writes it, reduce reads whom to wait for);
    ids int32 and weights fp32 [max_tokens, K] (checked; -1 = masked);
    expert_start int32 [E_local + 1]; tickets int32 [2, 2] (fc1's, fc2's: kernels/gemm_queue.py);
    pool_x, pool_act row records; pool_meta int64, pool_weight fp32,
    pool_y bf16 [rows, H], each of MoEConfig.pool_capacity rows: W * max_tokens * K, as unchecked ids may name one
    expert several times in a token, or pool_rows.
    """
    routes, rows = cfg.max_tokens * cfg.top_k, cfg.pool_capacity(world_size)
    return Layout(
        {
            "send_counts": 2 * cfg.num_experts * 4,
            "send_cursors": 2 * cfg.num_experts * 4,
            "send_start": (world_size + 1) * 4,
            "ids": routes * 4,
            "weights": routes * 4,
            "expert_start": (cfg.experts_local(world_size) + 1) * 4,
            "tickets": 2 * 2 * 4,
            "pool_x": rows * input_format(cfg).pitch,
            "pool_meta": rows * 8,
            "pool_weight": rows * 4,
            "pool_act": rows * activation_format(cfg).pitch,
            "pool_y": rows * cfg.hidden * 2,
        }
    )


def interleave_gate_up() -> list[int]:
    """Where the 128 rows of one FC1 weight tile come from: values 0..63 gate, 64..127 up columns.

    A thread of a m64nN fp32 fragment holds columns 8i + 2q + {0, 1} (q = lane % 4; PTX ISA, figure of
    wgmma .m64nNk32 D). Even chunks i are gate, odd chunks up, so SwiGLU needs no exchange, and the 16
    activations of a thread are the contiguous columns 16q .. 16q + 15, one 16-byte store.
    """
    order = []
    for chunk in range(16):
        for position in range(8):
            quad, low = divmod(position, 2)
            order.append(64 * (chunk % 2) + 16 * quad + 2 * (chunk // 2) + low)
    return order


def interleave_down() -> list[int]:
    """Where the 128 rows of one FC2 weight tile come from.

    The 32 columns of a thread become four runs of 8 bf16, and each of its four 16-byte stores fills 64
    contiguous bytes together with the other lanes of its quad.
    """
    order = []
    for chunk in range(16):
        for position in range(8):
            quad, low = divmod(position, 2)
            order.append(32 * (chunk // 4) + 8 * quad + 2 * (chunk % 4) + low)
    return order


def search_steps(entries: int) -> int:
    """Halvings that a binary search over `entries` sorted values needs."""
    return max(1, math.ceil(math.log2(max(entries, 2))))
