"""In which order a rank visits the others: integer arithmetic, the same on Python ints and on device values."""

from __future__ import annotations


def source_at(place: int, rank: int, ranks: int) -> int:
    """The source of segment `place` (0 .. ranks - 1) of every expert in rank's pool: the next rank first, itself last.

    All ranks pull their pools from the front at one speed, and send results back in the same order. So at any time they
    are near the same place, and with this order at different sources: no rank serves two others while another serves
    none. tests/cpu/test_order.py shows what the plain order 0, 1, ... would do.
    """
    source = rank + 1 + place
    return source + ranks * ((ranks - 1 - source) >> 31)
