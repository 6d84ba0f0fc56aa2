"""The tile order: every live tile exactly once, by the functions that the device runs."""

from __future__ import annotations

import bisect
from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from megamoe.sched import tiles
from megamoe.wire import search_steps

COUNTS = st.lists(st.integers(0, 40), min_size=1, max_size=12)


def find(prefix: list[int], index: int, n_tiles: int) -> tuple[int, int, int]:
    """(expert, row tile, column tile) of a tile number, as the kernels compute it."""
    low, high, wanted = 0, len(prefix) - 1, index // n_tiles
    for _ in range(search_steps(len(prefix))):
        low, high = tiles.search_step(low, high, prefix[(low + high) // 2], wanted)
    before = prefix[low]
    return low, *tiles.split_tile(index - before * n_tiles, prefix[low + 1] - before, n_tiles)


@given(COUNTS, st.integers(1, 9))
def test_every_live_tile_comes_exactly_once(m_tiles: list[int], n_tiles: int) -> None:
    prefix = [0, *accumulate(m_tiles)]
    seen = [find(prefix, index, n_tiles) for index in range(prefix[-1] * n_tiles)]
    assert sorted(seen) == [(e, m, n) for e, count in enumerate(m_tiles) for m in range(count) for n in range(n_tiles)]


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
