"""sched/order.py: no rank is asked by two others at a time."""

import pytest

from megamoe.sched.order import source_at

IN_FLIGHT = 132 * 4 * 6
"""Rows that pull copies at once with V3's records: SMs, warps, rows of a warp."""


@pytest.mark.parametrize("ranks", range(1, 9))
def test_every_source_once_and_itself_last(ranks):
    for rank in range(ranks):
        order = [source_at(place, rank, ranks) for place in range(ranks)]
        assert sorted(order) == list(range(ranks))
        assert order == [(rank + 1 + place) % ranks for place in range(ranks)] and order[-1] == rank


@pytest.mark.parametrize("ranks", range(1, 9))
def test_ranks_at_one_place_ask_different_sources(ranks):
    for place in range(ranks):
        assert len({source_at(place, rank, ranks) for rank in range(ranks)}) == ranks


def busiest(ranks, segment, order):
    """Rows that the busiest rank serves to others over the mean, at the worst moment of a pull of 8 experts with
    `segment` rows of every source, all ranks at the same row."""
    total, worst = 8 * ranks * segment, 0.0
    for first in range(0, total - IN_FLIGHT, IN_FLIGHT // 3):
        served = [0] * ranks
        for rank in range(ranks):
            for row in range(first, first + IN_FLIGHT, 16):
                source = order(row // segment % ranks, rank, ranks)
                served[source] += source != rank
        if any(served):  # else all fetch their own
            worst = max(worst, max(served) * ranks / sum(served))
    return worst


@pytest.mark.parametrize("ranks, segment", [(4, 4096), (8, 1024), (8, 4096)])
def test_long_segments_load_all_links_alike(ranks, segment):
    """(8, 1024): DeepSeek-V3 on eight ranks with 32768 tokens each."""
    assert busiest(ranks, segment, source_at) == 1.0
    assert busiest(ranks, segment, lambda place, rank, ranks: place) > 1.5
