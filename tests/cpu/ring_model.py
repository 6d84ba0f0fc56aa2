"""A model of the ring between a GEMM's producer and math warpgroups, for one CTA or a cluster that shares loads.

Agents take steps in any order; a step is possible when its barrier's phase is. Modelled after the kernels
(gemm_*.py: ring, load, queue, scales, columns, main, items): barriers `full` (one arrival of the TMA warp and the parts
of the stage that any CTA of the cluster loads into it, with some stages scales too) and `empty` (one arrival a math
warpgroup of every CTA of the cluster), both with a parity that waiters poll. Loads, copies and arrivals land at any
time after they were issued, in any order. A math warpgroup stands for its four warps: it arrives once,
unless `warps` takes it apart.

Work items are stretches of `item` K blocks. With ping-pong a CTA's two warpgroups take them in turns, each alone: a
barrier `turns` each, with one arrival of the other warpgroup once that has seen the last stage of its item full. The
end may be told where no item begins any more, as with an atomic schedule.

Rules that the test holds: a part is never written over a stage that a warpgroup may still read, a warpgroup
never reads a part of another K block, and everybody gets to the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Barrier:
    """An mbarrier: `need` arrivals and no outstanding part end a phase."""

    need: int
    arrived: int = 0
    parts: int = 0
    phase: int = 0

    def arrive(self, parts: int = 0) -> None:
        """Arrive once and expect `parts` more."""
        self.arrived += 1
        self.parts += parts
        self._end()

    def land(self) -> None:
        """A part is there; it may be before the arrival that expects it."""
        self.parts -= 1
        self._end()

    def _end(self) -> None:
        if self.arrived == self.need and self.parts == 0:
            self.arrived, self.phase = 0, self.phase + 1

    def passed(self, parity: int) -> bool:
        """What a wait for `parity` sees: the phase of that parity is over."""
        return self.phase % 2 != parity


@dataclass(frozen=True)
class Shape:
    """stages: of the ring. k_blocks: that every warpgroup consumes. rows, cols: CTAs of the cluster.

    warpgroups: of a CTA. alone: bit k is set where every row of CTAs loads all weights of K block k itself (tiles of an
    odd last row tile). slots, lengths: of scales that come with the first K block of a stretch and are read to its
    end, for each kind (windows of row scales, work items of weight scales); stretches of `lengths` blocks repeat.
    item: K blocks of a work item, None for all. queue: slots for numbers of items to come, which CTA 0 sends to all
    (gemm_queue.py). pingpong: math warpgroups take items in turns; warps: of each, 1 where they need not be apart.
    told: they hear of the end from the producer; k_blocks are whole items then. ordered: a warp puts scales in order.
    What there is unless a fault is planted: counted and full, arrivals that `empty` and `full` count; turns, a wait for
    the own turn; patient, one for scales in order; last_words, an arrival at the end of warps that only
    hear of it.
    """

    stages: int
    k_blocks: int
    rows: int = 1
    cols: int = 1
    warpgroups: int = 2
    alone: int = 0
    slots: tuple[int, ...] = ()
    lengths: tuple[tuple[int, ...], ...] = ()
    queue: int = 0
    item: int | None = None
    pingpong: bool = False
    warps: int = 1
    told: bool = False
    ordered: bool = False
    patient: bool = True
    turns: bool = True
    last_words: bool = True
    counted: int | None = None
    full: int = 1

    @property
    def ctas(self) -> int:
        """CTAs of the cluster."""
        return self.rows * self.cols

    @property
    def parts(self) -> int:
        """Parts of a stage that TMA brings: those of A, each in `rows` pieces, and of B."""
        return self.cols * self.rows + self.rows

    @property
    def length(self) -> int:
        """K blocks of a work item."""
        return self.item or self.k_blocks

    @property
    def sharing(self) -> int:
        """Math warps of a CTA that read a stage."""
        return self.warps * (1 if self.pingpong else self.warpgroups)

    def stretch(self, kind: int, kb: int) -> tuple[int, bool]:
        """Number of the stretch that K block kb of all is in, and whether the block is its first."""
        lengths = self.lengths[kind]
        number, inner = divmod(kb, sum(lengths))
        number *= len(lengths)
        for length in lengths:
            if inner < length:
                return number, inner == 0
            number, inner = number + 1, inner - length
        raise AssertionError


@dataclass
class Stage:
    """A stage of one CTA. holds: the K block of each part that landed (of A "a", of B "b"). item: that begins there, as
    the producer told it last; -1: none any more. ready: as full, once scales are in order; table: of which K block."""

    full: Barrier
    empty: Barrier
    holds: dict[tuple[str, int], int] = field(default_factory=dict)
    readers: int = 0
    item: int | None = None
    ready: Barrier = field(default_factory=lambda: Barrier(1))
    table: int | None = None


class Broken(AssertionError):
    """A rule was broken."""


class Ring:
    """All stages of a cluster, and loads that are on their way."""

    def __init__(self, shape: Shape) -> None:
        counted = shape.ctas * shape.sharing if shape.counted is None else shape.counted
        self.shape = shape
        self.stages = [
            [Stage(Barrier(shape.full), Barrier(counted)) for _ in range(shape.stages)] for _ in range(shape.ctas)
        ]
        self.scales = [[[-1] * slots for slots in shape.slots] for _ in range(shape.ctas)]
        self.queues: list[list[int | None]] = [[None] * shape.queue for _ in range(shape.ctas)]
        self.turns = [[Barrier(shape.warps), Barrier(shape.warps)] for _ in range(shape.ctas)]
        self.ended = [[False, False] for _ in range(shape.ctas)]
        self.flying: list[tuple[int, int, tuple[str, int], int]] = []
        self.done = 0

    def land(self, index: int) -> None:
        """Load `index` of those on their way arrives."""
        cta, at, part, kb = self.flying.pop(index)
        stage = self.stages[cta][at]
        if part[0] == "e":
            stage.empty.arrive()
            return
        if part[0] == "t":
            self.turns[cta][at].arrive()
            return
        if part[0] == "q":
            slot = part[1] % self.shape.queue
            if self.queues[cta][slot] is not None:
                raise Broken(f"CTA {cta}: item {part[1]} lands on item {self.queues[cta][slot]}, which nobody has read")
            self.queues[cta][slot] = part[1]
            return
        if part[0] == "s":
            number, _ = self.shape.stretch(part[1], kb)
            self.scales[cta][part[1]][number % self.shape.slots[part[1]]] = number
            stage.full.land()
            return
        if stage.readers:
            raise Broken(f"CTA {cta} stage {at}: K block {kb} lands while {stage.readers} warpgroups read")
        stage.holds[part] = kb
        stage.full.land()

    def agents(self) -> list[Iterator[bool]]:
        """The producers and math warpgroups of each CTA. An agent yields whether it can go on."""
        ctas = range(self.shape.ctas)
        math = [
            self._math(cta, group, warp)
            for cta in ctas
            for group in range(self.shape.warpgroups)
            for warp in range(self.shape.warps)
        ]
        orders = [self._order(cta) for cta in ctas if self.shape.ordered]
        return [*(self._produce(cta) for cta in ctas), *orders, *math]

    def _order(self, cta: int) -> Iterator[bool]:
        """The warp that orders scales (gemm_columns.py)."""
        shape, at, phase, kb = self.shape, 0, 0, 0
        while shape.told or kb < shape.k_blocks:
            stage = self.stages[cta][at]
            while not stage.full.passed(phase):
                yield False
            if kb % shape.length == 0 and stage.item == -1:
                break
            self._check_scales(kb, cta)
            if stage.readers:
                raise Broken(f"CTA {cta} stage {at}: scales of K block {kb} written while {stage.readers} warps read")
            stage.table = kb
            yield True
            self._check_scales(kb, cta)
            stage.ready.arrive()
            yield True
            at, phase = self._advance(at, phase)
            kb += 1
        self.done += 1

    def _produce(self, cta: int) -> Iterator[bool]:
        shape = self.shape
        row, col = divmod(cta, shape.cols)
        at, phase = 0, 0
        for kb in range(shape.k_blocks):
            number, inner = divmod(kb, shape.length)
            if shape.queue and cta == 0 and inner == 0:
                self.flying += [(peer, at, ("q", number), kb) for peer in range(shape.ctas)]
                yield True
            stage = self.stages[cta][at]
            while not stage.empty.passed(phase ^ 1):
                yield False
            if inner == 0:
                stage.item = number
            due = [kind for kind in range(len(shape.slots)) if shape.stretch(kind, kb)[1]]
            stage.full.arrive(shape.parts + len(due))
            yield True
            self.flying += [(cta, at, ("s", kind), kb) for kind in due]
            alone = shape.alone >> kb & 1
            if alone and shape.cols == 1:  # its piece of A, to its column
                self.flying += [(peer, at, ("a", row), kb) for peer in range(shape.rows)]
            else:  # its part of A, to its row
                pieces = [("a", col + shape.cols * piece) for piece in range(shape.rows)]
                self.flying += [
                    (row * shape.cols + peer, at, part, kb) for peer in range(shape.cols) for part in pieces
                ]
            yield True
            for peer in range(shape.rows):  # this CTA's part of B, to its column; or all of it to itself
                shared = (peer * shape.cols + col, at, ("b", row), kb)
                self.flying.append((cta, at, ("b", peer), kb) if alone else shared)
            yield True
            at, phase = self._advance(at, phase)
            if shape.queue and inner == shape.length - 1:
                while self.queues[cta][number % shape.queue] is None:
                    yield False
                if self.queues[cta][number % shape.queue] != number:
                    raise Broken(f"CTA {cta}: item {number} wanted, the queue holds {self.queues[cta]}")
                self.queues[cta][number % shape.queue] = None
                yield True
        if shape.told:
            stage = self.stages[cta][at]
            while not stage.empty.passed(phase ^ 1):
                yield False
            stage.item = -1
            stage.full.arrive()
            yield True
        self.done += 1

    def _math(self, cta: int, group: int, warp: int) -> Iterator[bool]:
        shape = self.shape
        step = 2 if shape.pingpong else 1
        first = group * shape.length if shape.pingpong else 0
        at, phase = self._advance(0, 0, first)
        items = range(first // shape.length, 1 << 30 if shape.told else -(-shape.k_blocks // shape.length), step)
        for item in items:
            if shape.pingpong and shape.turns:
                while not self.turns[cta][group].passed((item // 2 & 1) ^ (1 - group)):
                    yield False
                if self.ended[cta][group]:
                    break
            while not self.stages[cta][at].full.passed(phase):
                yield False
            told = self.stages[cta][at].item
            if shape.told and told == -1:
                if warp == 0:
                    self.ended[cta][1 - group] = True
                if shape.pingpong and (warp == 0 or shape.last_words):
                    self.flying.append((cta, 1 - group, ("t", 0), 0))
                break
            if told != item:
                raise Broken(f"CTA {cta}: item {item} wanted, the stage tells {told}")
            end = min((item + 1) * shape.length, shape.k_blocks)
            for kb in range(item * shape.length, end):
                stage = self.stages[cta][at]
                while shape.ordered and shape.patient and not stage.ready.passed(phase):
                    yield False
                stage.readers += 1
                self._check(stage, kb, cta, at)
                yield True
                following = self._advance(at, phase)
                if kb + 1 < end:
                    while not self.stages[cta][following[0]].full.passed(following[1]):
                        yield False
                elif shape.pingpong:
                    self.flying.append((cta, 1 - group, ("t", 0), kb))
                    yield True
                self._check(stage, kb, cta, at)
                stage.readers -= 1
                self.flying += [(other, at, ("e", 0), kb) for other in range(shape.ctas)]
                yield True
                at, phase = following
            at, phase = self._advance(at, phase, (step - 1) * shape.length)
        self.done += 1

    def _check(self, stage: Stage, kb: int, cta: int, at: int) -> None:
        if len(stage.holds) != self.shape.parts or set(stage.holds.values()) != {kb}:
            raise Broken(f"CTA {cta} stage {at}: K block {kb} wanted, the stage holds {stage.holds}")
        if self.shape.ordered and stage.table != kb:
            raise Broken(f"CTA {cta} stage {at}: scales of K block {kb} wanted, the table has {stage.table}")
        self._check_scales(kb, cta)

    def _check_scales(self, kb: int, cta: int) -> None:
        for kind, slots in enumerate(self.shape.slots):
            number, _ = self.shape.stretch(kind, kb)
            if self.scales[cta][kind][number % slots] != number:
                raise Broken(f"CTA {cta}: scales {number} of kind {kind} wanted, slots hold {self.scales[cta][kind]}")

    def _advance(self, at: int, phase: int, blocks: int = 1) -> tuple[int, int]:
        rounds, at = divmod(at + blocks, self.shape.stages)
        return at, phase ^ (rounds & 1)


def run(shape: Shape, choose) -> None:
    """Run to the end; choose(n) picks one of n possible steps. Raises Broken."""
    ring = Ring(shape)
    agents = ring.agents()
    while agents or ring.flying:
        order = list(range(len(agents) + len(ring.flying)))
        moved = False
        while order and not moved:
            index = order.pop(choose(len(order)))
            if index >= len(agents):
                ring.land(index - len(agents))
                moved = True
                break
            try:
                moved = next(agents[index])
            except StopIteration:
                agents.pop(index)
                moved = True
        if not moved:
            raise Broken(f"nobody can go on: {len(agents)} agents left of a ring of {shape}")
    if ring.done != shape.ctas * (1 + shape.ordered + shape.warpgroups * shape.warps):
        raise Broken("an agent did not finish")
