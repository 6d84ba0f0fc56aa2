"""The ring of gemm_ring.py over a cluster, step by step in any order: a model of its barriers, not of its code.

Loads and remote arrivals land late and out of order. What the kernels rely on: no stage is overwritten before every
warp that reads it has released it, nobody reads a stage before all of its bytes are there, and nobody waits for ever.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

WARPS = 2  # of math, a CTA
HALF, WHOLE = 1, 2  # bytes of an operand's half and of an operand


@dataclass
class Barrier:
    """An mbarrier: a phase ends when `count` arrivals and all expected bytes are there (PTX ISA, "mbarrier")."""

    count: int
    phase: int = 0
    arrived: int = 0
    bytes: int = 0

    def land(self, arrivals: int = 0, expect: int = 0, came: int = 0) -> None:
        """Count arrivals, bytes to expect and bytes that came."""
        self.arrived += arrivals
        self.bytes += expect - came
        assert self.arrived <= self.count
        if self.arrived == self.count and self.bytes == 0:
            self.phase, self.arrived = self.phase + 1, 0

    def done(self, parity: int) -> bool:
        """mbarrier.try_wait.parity."""
        return self.phase % 2 != parity


@dataclass
class Cluster:
    """CTAs of `rows` x `cols` with `stages` stages each; kinds[i] says whether round i shares weights down."""

    rows: int
    cols: int
    stages: int
    kinds: list[bool]
    flying: list = field(default_factory=list)

    def __post_init__(self) -> None:
        ctas = range(self.rows * self.cols)
        self.full = [[Barrier(1) for _ in range(self.stages)] for _ in ctas]
        self.empty = [[Barrier(WARPS * len(ctas)) for _ in range(self.stages)] for _ in ctas]
        self.released = [[0] * WARPS for _ in ctas]  # rounds that each math warp has released
        self.held = [[(-1, 0)] * self.stages for _ in ctas]  # (round, bytes) in each stage

    def load(self, source: int, number: int) -> Iterator[tuple[int, int]]:
        """(target, bytes) of what the producer of a CTA loads in a round."""
        row, col = divmod(source, self.cols)
        yield from ((row * self.cols + c, WHOLE // self.cols) for c in range(self.cols))
        if self.rows == 2 and self.kinds[number]:
            yield from ((r * self.cols + col, HALF) for r in range(2))
        else:
            yield source, WHOLE

    def write(self, target: int, number: int, size: int) -> None:
        """TMA's bytes land: by then every reader of the stage's round before has released it."""
        stage = number % self.stages
        assert min(self.released[target]) > number - self.stages, "overwrites a stage that is still read"
        held = self.held[target][stage]
        self.held[target][stage] = (number, size + (held[1] if held[0] == number else 0))
        self.full[target][stage].land(came=size)

    def producer(self, cta: int) -> Iterator[bool]:
        """The TMA warp; yields False while it waits."""
        for number in range(len(self.kinds)):
            stage, parity = number % self.stages, number // self.stages % 2
            while not self.empty[cta][stage].done(parity ^ 1):
                yield False
            assert self.empty[cta][stage].phase == number // self.stages, "a whole phase was missed"
            self.full[cta][stage].land(arrivals=1, expect=2 * WHOLE)
            yield True
            for target, size in self.load(cta, number):
                self.flying.append(lambda t=target, n=number, s=size: self.write(t, n, s))
                yield True

    def math(self, cta: int, warp: int) -> Iterator[bool]:
        """A math warp; yields False while it waits."""
        for number in range(len(self.kinds)):
            stage, parity = number % self.stages, number // self.stages % 2
            while not self.full[cta][stage].done(parity):
                yield False
            assert self.held[cta][stage] == (number, 2 * WHOLE), "reads what isn't there"
            yield True
            self.released[cta][warp] += 1
            for empty in self.empty:
                self.flying.append(lambda b=empty[stage]: b.land(arrivals=1))

    def run(self, chance: random.Random) -> None:
        """All warps to their ends, one step or landing at a time."""
        ctas = range(self.rows * self.cols)
        waiting = [self.producer(cta) for cta in ctas] + [self.math(cta, w) for cta in ctas for w in range(WARPS)]
        ready = list(waiting)
        while waiting:
            assert ready or self.flying, "everybody waits"
            at = chance.randrange(len(ready) + len(self.flying))
            if at >= len(ready):
                self.flying.pop(at - len(ready))()
                ready = list(waiting)
                continue
            moved = next(ready[at], None)
            if moved is None:
                waiting.remove(ready[at])
            ready = [w for w in waiting if moved is not False or (w in ready and w is not ready[at])]


@given(
    st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2)]),
    st.integers(1, 3),
    st.lists(st.booleans(), max_size=12),
    st.integers(0, 1 << 30),
)
def test_no_stage_is_overwritten_read_early_or_awaited_for_ever(
    shape: tuple[int, int], stages: int, kinds: list[bool], seed: int
) -> None:
    Cluster(*shape, stages, kinds).run(random.Random(seed))
