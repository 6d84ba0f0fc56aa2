"""Which tile next: the order in which persistent CTAs walk a grouped GEMM.

Branch-free integer arithmetic, the same on Python ints (tests) and on device values. Nothing here
loops: callers run `search_step` wire.search_steps(E_local + 1) times.

Order of one GEMM's tiles: experts one after another; within an expert strips of STRIP row tiles; within
a strip the row tile changes fastest, then the column tile. CTAs that run side by side thus share weight
tiles, and an expert with very many rows doesn't sweep all of them for every column tile, so both operands
of a wave stay in L2.

A cluster takes work items of one tile a CTA. Along the columns it always covers neighbouring column tiles. With two
rows of CTAs it covers two row tiles as well (split_pairs); a strip's odd last row tile it runs as twice as many
column tiles, so that no CTA ever idles for it.

Scales of rows travel by WINDOW K blocks, those of weights by work item (kernels/gemm_scales.py).
"""

from __future__ import annotations

from collections.abc import Sequence

STRIP = 16
"""Row tiles of a strip, an even number: 132 CTAs then cover 16 row tiles times 8 column tiles."""

WINDOW = 4
"""K blocks of a window: their scales of one row are 16 bytes or more, the least that TMA copies."""


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up, for a >= 0 and b > 0."""
    return (a + b - 1) // b


def minimum(a: int, b: int) -> int:
    """The smaller of two int32 values whose difference fits in int32."""
    return b + ((a - b) & ((a - b) >> 31))


def search_step(low: int, high: int, middle_value: int, wanted: int) -> tuple[int, int]:
    """One halving of [low, high): (low, high) where prefix[low] <= wanted < prefix[high] still holds.

    middle_value is prefix[(low + high) // 2]. Once high == low + 1 the range no longer changes.
    """
    middle = (low + high) // 2
    above = 1 + ((wanted - middle_value) >> 31)  # 1 when middle_value <= wanted, else 0
    return low + (middle - low) * above, middle + (high - middle) * above


def even_rows(rows: int, m_tiles: int) -> int:
    """Rows of each row tile but the last where an expert's rows are shared out evenly, a multiple of 8.

    With m_tiles = ceil(rows / tile_rows) and tile_rows a multiple of 8 it is at most tile_rows, and no tile is empty:
    (m_tiles - 1) * tile_rows < rows.
    """
    return ceil_div(ceil_div(rows, m_tiles), 8) * 8


def split_tile(local: int, m_tiles: int, n_tiles: int) -> tuple[int, int]:
    """(row tile, column tile) of an expert's tile number `local`, 0 <= local < m_tiles * n_tiles."""
    first = local // (STRIP * n_tiles) * STRIP
    rows = minimum(m_tiles - first, STRIP)
    inner = local - first * n_tiles
    return first + inner % rows, inner // rows


def split_pairs(local: int, m_tiles: int, n_tiles: int, cols: int, rank: int) -> tuple[int, int, int]:
    """(row tile, column tile, stacked) of one CTA of a cluster of two rows and `cols` columns of CTAs.

    n_tiles: column tiles over 2 * cols, so that the cluster's work item `local` again is below m_tiles * n_tiles.
    rank: the CTA's, of row rank // cols and column rank % cols. stacked is 1 where the two rows of CTAs run two row
    tiles and the same column tiles; it is 0 where all run one row tile, the odd last one, and 2 * cols column tiles.
    """
    first = local // (STRIP * n_tiles) * STRIP
    rows = minimum(m_tiles - first, STRIP)
    inner = local - first * n_tiles
    pairs = rows // 2
    after = inner - 2 * pairs * n_tiles  # from 0 on: a work item of the odd row tile
    stacked = (after >> 31) & 1
    single = 1 - stacked
    across = stacked * pairs + single  # not 0, even where pairs is
    m = stacked * (2 * (inner % across) + rank // cols) + single * (rows - 1)
    n = stacked * (inner // across * cols + rank % cols) + single * (after * (2 * cols) + rank)
    return first + m, n, stacked


def slots_for(lengths: Sequence[int], stages: int) -> int:
    """Slots for what comes with one K block and serves several, so that no wait but the ring's own is needed.

    lengths: of the stretches of K blocks that are served, which repeat for ever. Before the producer loads K block n
    of all that a CTA ever loads, everybody who reads block n - stages or one before it has released that: it awaited
    them in order, whichever warpgroup's they are. So a slot is free again if that block is
    past its stretch, thus if the stretch `slots` further on begins at least `stages` blocks after this one's last.
    Returns a power of two.
    """
    slots = 1
    while any(1 + sum(lengths[(w + i) % len(lengths)] for i in range(1, slots)) < stages for w in range(len(lengths))):
        slots *= 2
    return slots


def windows_of(k_blocks: int) -> list[int]:
    """K blocks of each window of one pass."""
    return [min(WINDOW, k_blocks - first) for first in range(0, k_blocks, WINDOW)]


def row_misfit(row: int, floats: int) -> int:
    """Bytes by which row `row` of an fp32 matrix [.., floats], which begins at a multiple of 16 bytes, misses one."""
    return 0 if floats % 4 == 0 else row * floats % 4 * 4


def row_granules(row: int, floats: int) -> int:
    """Bytes of the 16-byte granules that hold the row, from row_misfit before it on."""
    return (row_misfit(row, floats) + (4 * floats + 15)) // 16 * 16


def most_granules(floats: int) -> int:
    """The largest row_granules of any row."""
    return max(row_granules(row, floats) for row in range(4))
