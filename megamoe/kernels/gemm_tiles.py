"""What a grouped GEMM compiles in, and how its CTAs find their tiles on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Int32, Int64

from .. import wire
from ..config import BLOCK
from ..errors import ConfigError
from ..sched import tiles
from . import prims

WARPGROUP = 128  # threads
SMEM_BYTES = 227 * 1024  # what one CTA of sm_90 may use (CUDA C programming guide, compute capabilities)


@dataclass(frozen=True)
class GemmSpec:
    """What is compiled in about one grouped GEMM: rows [R, k] times weights [experts * n, k].

    pitch: bytes between row records. mode: "single" (one accumulator), "promoted" (a second fp32 sum every
    128 of k) or "block" (promoted, times scales). group: columns that share a row scale ("block").
    w_scales: weight scales of a tile and K block, 1, or 2 for even (gate) and odd (up) chunks of 8 columns.
    passes: weight tiles of 128 rows that one work item runs one after another.
    """

    experts: int
    k: int
    n: int
    pitch: int
    fp8: str
    mode: str
    group: int
    w_scales: int
    passes: int
    tile_rows: int
    stages: int

    @property
    def k_blocks(self) -> int:
        """K blocks of 128 columns."""
        return self.k // BLOCK

    @property
    def n_tiles(self) -> int:
        """Work items of one row tile."""
        return self.n // (BLOCK * self.passes)

    @property
    def warpgroups(self) -> int:
        """Math warpgroups."""
        return self.tile_rows // 64

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return (self.warpgroups + 1) * WARPGROUP

    @property
    def stage_bytes(self) -> int:
        """Bytes that TMA brings to one stage."""
        return (self.tile_rows + BLOCK) * BLOCK

    @property
    def smem_bytes(self) -> int:
        """Shared memory of the staged kernel."""
        return smem_bytes(self.tile_rows, self.stages, self.experts)

    @property
    def searches(self) -> int:
        """Steps of find_tile's binary search."""
        return wire.search_steps(self.experts + 1)


def smem_bytes(tile_rows: int, stages: int, experts: int) -> int:
    """Shared memory of one ring (stages and two barriers each) and one Schedule."""
    return stages * ((tile_rows + BLOCK) * BLOCK + 16) + 8 * (experts + 1)


def pick_stages(tile_rows: int, experts: int, wanted: int | None) -> int:
    """Stages that fill shared memory, or `wanted` (Knobs.stages). Raises ConfigError if it doesn't fit."""
    most = 12
    while smem_bytes(tile_rows, most, experts) > SMEM_BYTES:
        most -= 1
    if wanted is not None and wanted > most:
        raise ConfigError("stages", wanted, f"at most {most} with tile_rows = {tile_rows} and {experts} experts a rank")
    return most if wanted is None else wanted


class Schedule(NamedTuple):
    """Shared memory int32 [experts + 1] each: first row, and row tiles of the experts before."""

    start: cute.Tensor
    prefix: cute.Tensor


class Tile(NamedTuple):
    """One work item. row: its first pool row; end: its expert's; column: its column tile (n_tiles); index: of
    total_tiles."""

    expert: Int32
    row: Int32
    end: Int32
    column: Int32
    index: Int32


@cute.jit
def make_schedule(gemm: cutlass.Constexpr) -> Schedule:
    """Allocate a schedule; fill_schedule fills it."""
    smem = cutlass.memory.SmemAllocator()
    layout = cute.make_layout(gemm.experts + 1)
    return Schedule(smem.allocate_tensor(Int32, layout), smem.allocate_tensor(Int32, layout))


@cute.jit
def fill_schedule(gemm: cutlass.Constexpr, schedule: Schedule, expert_start: Int64):
    """One warp: read expert_start int32 [experts + 1] from global memory and sum up row tiles."""
    lane = cute.arch.lane_idx()
    total = Int32(0)
    for base in range(0, gemm.experts, 32):
        expert = base + lane
        count = Int32(0)
        if expert < gemm.experts:
            start = prims.ld_i32(expert_start + Int64(expert) * 4)
            end = prims.ld_i32(expert_start + Int64(expert) * 4 + 4)
            count = tiles.ceil_div(end - start, gemm.tile_rows)
            schedule.start[expert] = start
            schedule.start[expert + 1] = end
        for step in cutlass.range_constexpr(5):
            below = cute.arch.shuffle_sync_up(count, offset=1 << step, mask_and_clamp=0)
            if lane >= 1 << step:
                count += below
        if expert < gemm.experts:
            schedule.prefix[expert + 1] = total + count
        total += cute.arch.shuffle_sync(count, offset=31)
    if lane == 0:
        schedule.prefix[0] = Int32(0)


@cute.jit
def total_tiles(gemm: cutlass.Constexpr, schedule: Schedule) -> Int32:
    """Live work items."""
    return schedule.prefix[gemm.experts] * gemm.n_tiles


@cute.jit
def find_tile(gemm: cutlass.Constexpr, schedule: Schedule, index: Int32) -> Tile:
    """The work item `index` < total_tiles: binary search for its expert, then arithmetic."""
    low, high = Int32(0), Int32(gemm.experts)
    wanted = index // gemm.n_tiles
    for _ in cutlass.range_constexpr(gemm.searches):
        low, high = tiles.search_step(low, high, schedule.prefix[(low + high) // 2], wanted)
    before = schedule.prefix[low]
    m_tiles = schedule.prefix[low + 1] - before
    m, n = tiles.split_tile(index - before * gemm.n_tiles, m_tiles, gemm.n_tiles)
    return Tile(low, schedule.start[low] + m * gemm.tile_rows, schedule.start[low + 1], n, index)
