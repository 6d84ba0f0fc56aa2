"""What a grouped GEMM compiles in, and how its CTAs find their tiles on the device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Boolean, Int32, Int64

from .. import wire
from ..config import BLOCK, Knobs
from ..errors import ConfigError
from ..sched import tiles
from ..sched.tiles import WINDOW
from . import prims

WARPGROUP = 128  # threads
MOST_STAGES = 12
TILE_BYTES = 16  # of a Tile as the producer tells it: expert and column in a word, row, end, index
WIDTHS = {  # tile_rows of swapped operands: rows that main loops are compiled for
    8: (8,),
    16: (16,),
    32: (16, 32),
    64: (16, 32, 48, 64),
    96: (48, 80, 96),
    128: (48, 80, 96, 128),
    256: (64, 128, 192, 256),
}
SMEM_BYTES = 227 * 1024  # what one CTA of sm_90 may use (CUDA C programming guide, compute capabilities)


@dataclass(frozen=True)
class GemmSpec:
    """What is compiled in about one grouped GEMM: rows [R, k] times weights [experts * n, k].

    pitch: bytes between row records. mode: "single" (one accumulator), "promoted" (a second fp32 sum every
    128 of k, two at least) or "block" (promoted, times scales). group: columns that share a row scale ("block").
    paired: weight tiles of 128 rows hold 64 gate and 64 up columns in chunks of 8, in turns (FC1).
    halves: weight tiles that a work item multiplies with the rows at once, 1 or 2. passes: how often it does, one after
    another. mma_cols: columns of one WGMMA, those of a weight tile or of both halves ("single").
    swapped: weights are WGMMA's first operand and rows its second, so a tile may have as few as 8 rows, and one with
    fewer live rows than tile_rows costs less (widths). The two math warpgroups then share out the weights.

    A work item is tile_rows rows times 128 * halves * passes columns, its column tile. Of a GEMM for Knobs:

    | tile_cols | GEMM | halves | passes |
    |---|---|---|---|
    | 128 | FC1, block scales with act_group 128 | 1 | 2 |
    | 128 | all others | 1 | 1 |
    | 256 | both | 2 | 1 |

    pingpong: two math warpgroups take a CTA's work items in turns, each alone.
    atomic: work items go to whoever is free (gemm_queue.py), not in turns.
    cluster_rows, cluster_cols: CTAs of a cluster down and across, 1 or 2 each; CTA r of it has
    row r // cluster_cols and column r % cluster_cols.
    """

    experts: int
    k: int
    n: int
    pitch: int
    fp8: str
    mode: str
    group: int
    paired: bool
    passes: int
    halves: int
    mma_cols: int
    cluster_rows: int
    cluster_cols: int
    pingpong: bool
    atomic: bool
    swapped: bool
    tile_rows: int
    stages: int

    @property
    def k_blocks(self) -> int:
        """K blocks of 128 columns."""
        return self.k // BLOCK

    @property
    def scaled(self) -> bool:
        """Whether products are scaled by block."""
        return self.mode == "block"

    @property
    def early(self) -> int:
        """Halves of a pass whose results FC2 stores while the last WGMMAs of the other are in flight. FC1 has none:
        SwiGLU would need registers that those hold, and ptxas moves it behind them."""
        return 0 if self.mode == "single" or self.paired or self.swapped else self.halves - 1

    @property
    def late(self) -> bool:
        """Whether FC2 stores the last half of a work item under the next one's first WGMMAs. With block scales that
        loses up to 1.1 % (gemm-notes.md), and tiles of 64 rows would spill."""
        return self.early > 0 and not self.scaled and self.sharing == 2

    @property
    def columns(self) -> int:
        """Columns of a work item."""
        return BLOCK * self.passes * self.halves

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return self.cluster_rows * self.cluster_cols

    @property
    def n_tiles(self) -> int:
        """Work items of one row tile for a whole cluster; with two rows of CTAs, which run two row tiles at once, half
        of what two row tiles have (sched.tiles.split_pairs)."""
        return self.n // (self.columns * self.cluster)

    @property
    def w_scales(self) -> int:
        """Weight scales of a work item and K block: of gate and up, else of each half."""
        return 2 if self.paired else self.halves

    def factor_chunks(self, half: int) -> list[tuple[int, range]]:
        """Scales (of w_scales) that a half's sums are multiplied by, and the chunks of 8 columns that each is for."""
        if self.paired:
            return [(part, range(part, BLOCK // 8, 2)) for part in range(2)]
        return [(half, range(BLOCK // 8))]

    @property
    def scale_step(self) -> int:
        """Scale blocks of 128 output columns from one of w_scales to the next."""
        return self.n // (2 * BLOCK) if self.paired else 1

    @property
    def scale_tiles(self) -> int:
        """Weight tiles that share a scale block."""
        return 2 if self.paired else 1

    @property
    def groups(self) -> int:
        """Row scales of a K block."""
        return BLOCK // self.group

    @property
    def windows(self) -> int:
        """Windows of one pass over k: WINDOW K blocks each, whose row scales one TMA brings; the last may be short."""
        return len(tiles.windows_of(self.k_blocks))

    @property
    def window_bytes(self) -> int:
        """Shared memory of a window's row scales, fp32 [tile_rows, WINDOW * groups]."""
        return 4 * self.tile_rows * WINDOW * self.groups if self.scaled else 0

    @property
    def window_slots(self) -> int:
        """Windows that shared memory holds, a power of two."""
        return tiles.slots_for(tiles.windows_of(self.k_blocks), self.stages) if self.scaled else 0

    @property
    def item_windows(self) -> int:
        """Windows of a work item."""
        return self.passes * self.windows

    @property
    def item_slots(self) -> int:
        """Work items whose weight scales shared memory holds, a power of two."""
        return tiles.slots_for([self.passes * self.k_blocks], self.stages) if self.scaled else 0

    @property
    def queue_slots(self) -> int:
        """Numbers of items to come that shared memory holds, a power of two.

        The first CTA sends the number of item i + slots when it begins the item before. By then its cluster's other
        producers have begun all K blocks but the last `stages`, and must have read the number of item i after its last.
        """
        return tiles.slots_for([self.passes * self.k_blocks], self.stages + 2) if self.atomic else 0

    @property
    def w_row_bytes(self) -> int:
        """Shared memory of one row of weight scales, with what its copy brings besides."""
        return tiles.most_granules(self.k_blocks)

    @property
    def w_slots_bytes(self) -> int:
        """Shared memory of weight scales."""
        return self.item_slots * self.w_scales * self.w_row_bytes

    @property
    def sharing(self) -> int:
        """Math warpgroups that share a work item: 64 of its rows each, or with swapped operands half of its weights."""
        return 2 if self.swapped else self.tile_rows // 64

    @property
    def widths(self) -> tuple[int, ...]:
        """Rows that main loops are compiled for, ascending: a tile runs the first that holds its live rows."""
        if not self.swapped:
            return (self.tile_rows,)
        return WIDTHS[self.tile_rows]

    @property
    def loads(self) -> tuple[int, ...]:
        """Rows that the producer can load of a tile with no more live ones, besides all; CTAs that share rows load
        all. With one row an expert all SMs would read the same 64 rows at once, most for nothing."""
        if self.cluster_cols > 1:
            return ()
        return self.widths[:-1] if self.swapped else (8, 64)[: self.sharing]

    @property
    def shares_rows(self) -> bool:
        """Whether CTAs in a column share the loads of rows where all run one row tile; no load has less than 8."""
        return self.cluster_rows > 1 and self.cluster_cols == 1 and self.tile_rows >= 8 * self.cluster_rows

    @property
    def table_rows(self) -> int:
        """Rows in a table of row scales, whole pairs of 8 (gemm_columns.py)."""
        return max(self.tile_rows, 16)

    @property
    def table_bytes(self) -> int:
        """Shared memory of a stage's row scales for swapped operands, fp32 [groups, table_rows]."""
        return 4 * self.groups * self.table_rows if self.scaled and self.swapped else 0

    @property
    def batch_rows(self) -> int:
        """Rows whose results swapped operands transpose in shared memory at a time (gemm_transpose.py)."""
        return min(self.tile_rows, 64 // self.halves if self.paired else 32)

    @property
    def transpose_pitch(self) -> int:
        """fp32 words from one row to the next there: FC1's have 64 columns of each weight tile, FC2's 64. Neighbouring
        rows lie in other banks."""
        return 64 * (self.halves if self.paired else 1) + 4

    @property
    def transpose_bytes(self) -> int:
        """Shared memory for that: FC1 has one buffer, FC2 one of each warpgroup."""
        return 4 * self.batch_rows * self.transpose_pitch * (1 if self.paired else 2) if self.swapped else 0

    @property
    def cleared(self) -> bool:
        """Whether promoted sums begin at zero rather than with the first K block's products, which saves the time of a
        batch of WGMMAs: where there is no second block, and where ptxas finds too few registers otherwise."""
        return self.k_blocks == 1 or (self.swapped and self.scaled and self.groups > 1)

    def part_steps(self, part: int, columns: int) -> tuple[int, int]:
        """From the operands of a math warpgroup to those of its accumulator `part`, `columns` wide, in descriptors'
        units of 16 bytes: 64 weight rows and then `columns` rows further (swapped), else `mma_cols` weight rows."""
        if self.swapped:
            return part % self.halves * (64 * BLOCK // 16), part // self.halves * (columns * BLOCK // 16)
        return 0, part * (self.mma_cols * BLOCK // 16)

    @property
    def turns(self) -> int:
        """How many take a CTA's work items in turns."""
        return 2 if self.pingpong else 1

    @property
    def turn_words(self) -> int:
        """8-byte words of shared memory for turns: a barrier each, and with an atomic schedule for each whether the
        other has heard of the end (gemm_ring.end_turns)."""
        return self.turns + self.atomic if self.pingpong else 0

    @property
    def warpgroups(self) -> int:
        """Math warpgroups of a CTA."""
        return self.sharing * self.turns

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return (self.warpgroups + 1) * WARPGROUP

    @property
    def stage_bytes(self) -> int:
        """Bytes that TMA brings to one stage of a tile with more rows than any of `loads`, scales left out."""
        return (self.tile_rows + BLOCK * self.halves) * BLOCK

    @property
    def smem_bytes(self) -> int:
        """Shared memory of the staged kernel: a ring (stages with their barriers, a tile and scales; turns), slots of
        scales, where results are transposed, a queue and a Schedule."""
        scales = self.window_slots * self.window_bytes + self.w_slots_bytes
        stage = self.stage_bytes + self.table_bytes + (24 if self.table_bytes else 16) + TILE_BYTES
        rest = 8 * self.turn_words + 12 * self.queue_slots + 8 * (self.experts + 1)
        return self.stages * stage + scales + self.transpose_bytes + rest

    @property
    def searches(self) -> int:
        """Steps of find_tile's binary search."""
        return wire.search_steps(self.experts + 1)


def split_width(width: int) -> tuple[int, int]:
    """(WGMMAs side by side, rows of each) of a tile of `width` rows with swapped operands: at most 128 each."""
    across = -(-width // BLOCK)
    return across, width // across


def make_spec(knobs: Knobs, name: str, **fixed: Any) -> GemmSpec:
    """The spec of GEMM `name` ("fc1", "fc2") with tile, cluster and stages from knobs, and everything else given.

    passes: of tiles of 128 columns that a work item needs; wider tiles need fewer.
    Stages fill shared memory unless knobs.stages says how many. Raises ConfigError for knobs that don't fit.
    """
    halves = knobs.tile_cols // BLOCK
    passes = fixed.pop("passes") // halves or 1
    shape = dict(halves=halves, passes=passes, mma_cols=knobs.mma_cols, tile_rows=knobs.tile_rows)
    shape |= dict(cluster_rows=knobs.cluster_rows, cluster_cols=knobs.cluster_cols, atomic=knobs.schedule == "atomic")
    shape |= dict(pingpong=knobs.pingpong, swapped=knobs.swap_ab)
    spec = GemmSpec(**fixed, **shape, stages=MOST_STAGES)
    if spec.n % spec.columns:
        raise ConfigError("tile_cols", knobs.tile_cols, f"128 for {name}, whose N is {spec.n}")
    if spec.swapped and spec.passes > 1:
        allowed = f"256 with swap_ab (and tile_rows at most 96): {name}'s scales need two weight tiles at once"
        raise ConfigError("tile_cols", knobs.tile_cols, allowed)
    most = 96 if knobs.tile_cols > BLOCK else 128
    if spec.swapped and spec.scaled and knobs.tile_rows > most:
        given = f"swap_ab, block scales and tile_cols={knobs.tile_cols}"
        raise ConfigError("tile_rows", knobs.tile_rows, f"{most} or less with {given}: registers hold no more")
    if knobs.mma_cols > BLOCK and (knobs.mma_cols > knobs.tile_cols or spec.mode != "single"):
        raise ConfigError("mma_cols", knobs.mma_cols, "128, or 256 with accum='single' and tile_cols=256")
    if spec.mode == "promoted" and spec.k_blocks == 1:
        spec = replace(spec, mode="single")  # its products are the sum; ptxas serialises the other loop then (C7511)
    across = spec.n // spec.columns
    if across % spec.cluster_cols:
        raise ConfigError("cluster_cols", knobs.cluster_cols, f"1 for {name}, which has {across} column tiles")
    if across % spec.cluster:
        allowed = f"1 for {name}: all {spec.cluster} CTAs share out the {across} column tiles of an odd last row tile"
        raise ConfigError("cluster_rows", knobs.cluster_rows, allowed)
    while spec.smem_bytes > SMEM_BYTES:
        spec = replace(spec, stages=spec.stages - 1)
    if knobs.stages is not None and knobs.stages > spec.stages:
        given = f"these tiles, this schedule and {spec.experts} experts a rank"
        raise ConfigError("stages", knobs.stages, f"at most {spec.stages} with {given}")
    return replace(spec, stages=knobs.stages or spec.stages)


def whole_clusters(gemm: GemmSpec, ctas: Int32) -> Int32:
    """Grid of at most `ctas` CTAs, but at least one cluster.

    The grid should fit the GPU at once. A cluster runs within one GPC, so with clusters of four a few SMs may be left
    over: then a grid of all SMs is a little too large, and its last cluster starts when another one ends.
    """
    return cutlass.max(ctas // gemm.cluster, 1) * gemm.cluster


class Schedule(NamedTuple):
    """Shared memory int32 [experts + 1] each: first row, and row tiles of the experts before."""

    start: cute.Tensor
    prefix: cute.Tensor


class Tile(NamedTuple):
    """One work item. row: its first pool row; end: where its rows end; column: its column tile (of GemmSpec.columns);
    index: of total_tiles, the same in all CTAs of a cluster. stacked: for the producer, with two rows of CTAs, whether
    they run two row tiles and the same column tiles, thus the same weights; else None."""

    expert: Int32
    row: Int32
    end: Int32
    column: Int32
    index: Int32
    stacked: Boolean | None


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
    """Live work items, of whole clusters."""
    return schedule.prefix[gemm.experts] * gemm.n_tiles


@cute.jit
def cluster_rank(gemm: cutlass.Constexpr) -> Int32:
    """This CTA's place in its cluster."""
    rank = Int32(0)
    if cutlass.const_expr(gemm.cluster > 1):
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    return rank


@cute.jit
def cluster_place(gemm: cutlass.Constexpr) -> tuple[Int32 | int, Int32]:
    """(row, column) of this CTA in its cluster."""
    row, column = 0, cluster_rank(gemm)
    if cutlass.const_expr(gemm.cluster_rows > 1):
        row, column = column // gemm.cluster_cols, column % gemm.cluster_cols
    return row, column


@cute.jit
def first_item(gemm: cutlass.Constexpr) -> tuple[Int32, Int32]:
    """This CTA's first work item, and the step to its next."""
    block, _, _ = cute.arch.block_idx()
    grid, _, _ = cute.arch.grid_dim()
    return block // gemm.cluster, grid // gemm.cluster


@cute.jit
def items_to_hear(gemm: cutlass.Constexpr, schedule: Schedule) -> tuple[Int32, Int32, Int32]:
    """(first, step, end) of the loop over work items in warps that hear of them; no end where they hear of that too."""
    index, step = first_item(gemm)
    end = total_tiles(gemm, schedule)
    if cutlass.const_expr(gemm.atomic):
        index, step, end = Int32(0), Int32(1), Int32(0x7FFFFFFF)
    return index, step, end


@cute.jit
def find_tile(gemm: cutlass.Constexpr, schedule: Schedule, index: Int32) -> Tile:
    """The work item `index` < total_tiles: binary search for its expert, then arithmetic."""
    low, high = Int32(0), Int32(gemm.experts)
    wanted = index // gemm.n_tiles
    for _ in cutlass.range_constexpr(gemm.searches):
        low, high = tiles.search_step(low, high, schedule.prefix[(low + high) // 2], wanted)
    before = schedule.prefix[low]
    m_tiles = schedule.prefix[low + 1] - before
    local = index - before * gemm.n_tiles
    if cutlass.const_expr(gemm.cluster_rows == 1):
        m, n = tiles.split_tile(local, m_tiles, gemm.n_tiles)
        column, stacked = n * gemm.cluster + cluster_rank(gemm), None
    else:
        cols, rank = gemm.cluster_cols, cluster_rank(gemm)
        m, column, both = tiles.split_pairs(local, m_tiles, gemm.n_tiles, cols, rank)
        stacked = cute.arch.make_warp_uniform(both) == 1
    start, end, step = schedule.start[low], schedule.start[low + 1], gemm.tile_rows
    if cutlass.const_expr(gemm.swapped):
        step = tiles.even_rows(end - start, m_tiles)
        end = cutlass.min(end, start + (m + 1) * step)
    return Tile(low, start + m * step, end, column, index, stacked)
