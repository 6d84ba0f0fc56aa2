"""The tile order: every live tile exactly once, by the functions that the device runs."""

from __future__ import annotations

import bisect
from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from megamoe.sched import tiles
from megamoe.wire import search_steps

COUNTS = st.lists(st.integers(0, 40), min_size=1, max_size=12)


def expert_of(prefix: list[int], wanted: int) -> int:
    """The expert of a row tile, as the kernels search it."""
    low, high = 0, len(prefix) - 1
    for _ in range(search_steps(len(prefix))):
        low, high = tiles.search_step(low, high, prefix[(low + high) // 2], wanted)
    return low


def find(prefix: list[int], index: int, n_tiles: int) -> tuple[int, int, int]:
    """(expert, row tile, column tile) of a tile number, as the kernels compute it."""
    low = expert_of(prefix, index // n_tiles)
    before = prefix[low]
    return low, *tiles.split_tile(index - before * n_tiles, prefix[low + 1] - before, n_tiles)


def find_pairs(prefix: list[int], index: int, n_tiles: int, cols: int) -> tuple[int, list[tuple[int, int, int]]]:
    """(expert, split_pairs of every CTA) of a cluster's tile number, as the kernels compute it."""
    low = expert_of(prefix, index // n_tiles)
    local, m_tiles = index - prefix[low] * n_tiles, prefix[low + 1] - prefix[low]
    return low, [tiles.split_pairs(local, m_tiles, n_tiles, cols, rank) for rank in range(2 * cols)]


@given(COUNTS, st.integers(1, 9))
def test_every_live_tile_comes_exactly_once(m_tiles: list[int], n_tiles: int) -> None:
    prefix = [0, *accumulate(m_tiles)]
    seen = [find(prefix, index, n_tiles) for index in range(prefix[-1] * n_tiles)]
    assert sorted(seen) == [(e, m, n) for e, count in enumerate(m_tiles) for m in range(count) for n in range(n_tiles)]


@given(COUNTS, st.integers(1, 9), st.sampled_from([1, 2]))
def test_clusters_of_two_rows_run_every_live_tile_exactly_once(m_tiles: list[int], n_tiles: int, cols: int) -> None:
    prefix = [0, *accumulate(m_tiles)]
    items = [find_pairs(prefix, index, n_tiles, cols) for index in range(prefix[-1] * n_tiles)]
    seen = [(expert, m, n) for expert, ctas in items for m, n, _ in ctas]
    columns = range(2 * cols * n_tiles)
    assert sorted(seen) == [(e, m, n) for e, count in enumerate(m_tiles) for m in range(count) for n in columns]


@given(COUNTS, st.integers(1, 9), st.sampled_from([1, 2]))
def test_a_cluster_shares_rows_along_and_columns_down(m_tiles: list[int], n_tiles: int, cols: int) -> None:
    prefix = [0, *accumulate(m_tiles)]
    order = []
    for index in range(prefix[-1] * n_tiles):
        expert, ctas = find_pairs(prefix, index, n_tiles, cols)
        upper, lower = ctas[:cols], ctas[cols:]
        for row in (upper, lower):  # loads of rows are shared along it, whatever the kind
            assert len({m for m, _, _ in row}) == 1
            assert [n for _, n, _ in row] == list(range(row[0][1], row[0][1] + cols))
        (stacked,) = {stacked for _, _, stacked in ctas}
        if stacked:
            assert [(m + 1, n) for m, n, _ in upper] == [(m, n) for m, n, _ in lower]
            assert upper[0][0] % 2 == 0
        else:
            assert {m for m, _, _ in ctas} == {m_tiles[expert] - 1} and m_tiles[expert] % 2 == 1
            assert [n for _, n, _ in ctas] == list(range(upper[0][1], upper[0][1] + 2 * cols))
        order.append((expert, upper[0][0] // tiles.STRIP, 1 - stacked, upper[0][1], upper[0][0]))
    assert order == sorted(order)


@given(COUNTS, st.integers(1, 9))
def test_experts_come_one_after_another_and_strips_within(m_tiles: list[int], n_tiles: int) -> None:
    prefix = [0, *accumulate(m_tiles)]
    order = [find(prefix, index, n_tiles) for index in range(prefix[-1] * n_tiles)]
    assert order == sorted(order, key=lambda t: (t[0], t[1] // tiles.STRIP, t[2], t[1]))


@given(st.lists(st.integers(0, 1 << 20), min_size=1, max_size=600), st.data())
def test_search_finds_the_last_entry_that_is_not_above(sizes: list[int], data: st.DataObject) -> None:
    prefix = [0, *accumulate(sizes)]
    if prefix[-1] == 0:
        return
    wanted = data.draw(st.integers(0, prefix[-1] - 1))
    low, high = 0, len(sizes)
    for _ in range(search_steps(len(prefix))):
        low, high = tiles.search_step(low, high, prefix[(low + high) // 2], wanted)
    assert low == bisect.bisect_right(prefix, wanted) - 1
    assert high == low + 1


@given(st.integers(0, 1 << 30), st.integers(1, 1 << 20))
def test_ceil_div(a: int, b: int) -> None:
    assert tiles.ceil_div(a, b) == -(-a // b)


@given(st.integers(0, (1 << 31) - 1), st.integers(0, (1 << 31) - 1))
def test_minimum(a: int, b: int) -> None:
    assert tiles.minimum(a, b) == min(a, b)


@given(st.integers(1, 1 << 20), st.integers(1, 1024), st.data())
def test_large_experts_stay_in_range(m_tiles: int, n_tiles: int, data: st.DataObject) -> None:
    local = data.draw(st.integers(0, m_tiles * n_tiles - 1))
    m, n = tiles.split_tile(local, m_tiles, n_tiles)
    assert 0 <= m < m_tiles
    assert 0 <= n < n_tiles
    for rank in range(4):
        m, n, _ = tiles.split_pairs(local, m_tiles, n_tiles, 2, rank)
        assert 0 <= m < m_tiles
        assert 0 <= n < 4 * n_tiles


@given(st.integers(0, 1 << 20), st.integers(1, 512))
def test_granules_hold_a_row_and_no_more(row, floats):
    start = 4 * row * floats
    first = start - tiles.row_misfit(row, floats)
    end = first + tiles.row_granules(row, floats)
    assert first % 16 == end % 16 == 0
    assert first <= start < first + 16 and end - 16 < start + 4 * floats <= end
    assert end - first <= tiles.most_granules(floats)


@given(st.integers(1, 5000), st.sampled_from([8, 16, 32, 64, 96, 128, 256]))
def test_even_rows_fit_and_leave_no_tile_empty(rows: int, tile_rows: int) -> None:
    m_tiles = tiles.ceil_div(rows, tile_rows)
    step = tiles.even_rows(rows, m_tiles)
    assert step % 8 == 0 and 0 < step <= tile_rows
    assert (m_tiles - 1) * step < rows <= m_tiles * step
