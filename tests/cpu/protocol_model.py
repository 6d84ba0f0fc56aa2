"""Every state that the ranks of protocol_rules can reach by interleaving their steps, breadth first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.cpu.protocol_rules import DEADLOCK, RESET, Rules, Scenario, Step
from tests.cpu.protocol_steps import Program


@dataclass
class Model:
    """A scenario under rules: initial state, successors, descriptions."""

    scenario: Scenario
    rules: Rules = field(default_factory=Rules)

    def __post_init__(self) -> None:
        scenario, self.cells, self.names = self.scenario, {}, []
        world = range(scenario.world)
        for r in world:
            for name in ("x", "abort", "barrier", "posted", "n", "wrong", "sent"):
                self._cell(name, r)
            for layer in range(4 if self.rules.epoch_per_layer else 1):
                self._cell("epoch", r, layer)
            for lane in range(scenario.lanes):
                for name in ("pc", "seen", "resume"):
                    self._cell(name, r, lane)
            for p in world:
                for name in ("record", "ret", "rows", "bad"):
                    self._cell(name, r, p)
                for slot in range(self.rules.slots):
                    self._cell("list", r, slot, p)
                    self._cell("flag", r, slot, p)
        self.code = [[self._program(r, lane) for lane in range(scenario.lanes)] for r in world]
        self.procs = [(r, self.cells["pc", r, lane], code) for r in world for lane, code in enumerate(self.code[r])]
        start = bytearray(len(self.names))
        for r in world:
            self.settle(start, r)
        self.initial = bytes(start)

    def _cell(self, *name: object) -> None:
        self.cells[name] = len(self.names)
        self.names.append(name)

    def done(self, s: bytes) -> bool:
        """Whether every rank's program has ended (or the rank hangs)."""
        return all(s[pc] == len(code) for _, pc, code in self.procs)

    def settle(self, v: bytearray, rank: int) -> str | None:
        """Runs the local steps that are next on `rank`."""
        kind, moved = None, True
        while moved:
            moved = False
            for lane, code in enumerate(self.code[rank]):
                pc = v[self.cells["pc", rank, lane]]
                if pc < len(code) and code[pc].local:
                    went, found = code[pc].local(v)
                    moved, kind = moved or went, kind or found
        return kind

    def successors(self, s: bytes) -> Iterator[tuple[bytes, Step, str, tuple[str, ...]]]:
        """Every next state with the step that leads there, a remark and the violations of that step."""
        for rank, pc, code in self.procs:
            if s[pc] == len(code) or not code[s[pc]].run:
                continue
            step = code[s[pc]]
            for v, remark, kind in step.run(s):
                kinds = tuple(k for k in (kind, self.settle(v, rank)) if k)
                yield bytes(v), step, remark, kinds
        for rank in self.scenario.hang:
            if any(s[pc] < len(code) for r, pc, code in self.procs if r == rank):
                v = bytearray(s)
                for r, pc, code in self.procs:
                    if r == rank:
                        v[pc] = len(code)
                yield bytes(v), Step(rank, 0, "hangs for good"), "", ()

    def describe(self, s: bytes, step: Step, remark: str = "") -> str:
        """A line of a trace."""
        n = s[self.cells["n", step.rank]]
        epoch = f" n={n}" if n else ""
        return f"rank {step.rank} | {step.where}{epoch}: {step.text}{', ' + remark if remark else ''}"

    def _program(self, r: int, lane: int) -> list[Step]:
        builder = Program(self.cells, self.scenario, self.rules, r, lane)
        for call in self.scenario.programs[r]:
            if call == RESET:
                builder.reset()
            else:
                builder.forward(*call)
        if len(builder.code) > 254:
            raise ValueError("program too long for a byte")
        return builder.code


@dataclass(frozen=True)
class Counterexample:
    """The shortest way to a violation; prints as one step a line."""

    kind: str
    steps: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{i:3d}  {step}" for i, step in enumerate(self.steps, 1)]
        return "\n".join([f"violation: {self.kind}", *lines])


@dataclass(frozen=True)
class Result:
    """What a search saw: number of distinct states and, by kind, one counterexample."""

    states: int
    found: dict[str, Counterexample]

    @property
    def kinds(self) -> set[str]:
        return set(self.found)

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.found.values())) or f"sound in {self.states} states"


def explore(scenario: Scenario, rules: Rules | None = None, limit: int = 2_000_000) -> Result:
    """Visits every reachable state; the search goes on past a violation, so all kinds are found.

    Raises RuntimeError beyond `limit` states: a search that is cut short proves nothing.
    """
    model = Model(scenario, rules or Rules())
    came = {model.initial: None}
    frontier, found = [model.initial], {}
    while frontier:
        fresh = []
        for s in frontier:
            stuck = True
            for t, step, remark, kinds in model.successors(s):
                stuck = False
                for kind in kinds:
                    if kind not in found:
                        found[kind] = Counterexample(kind, (*_way(model, came, s), model.describe(s, step, remark)))
                if t not in came:
                    came[t] = (s, step, remark)
                    fresh.append(t)
            if stuck and DEADLOCK not in found and not model.done(s):
                blocked = [
                    model.describe(s, code[s[pc]], "blocked") for _, pc, code in model.procs if s[pc] < len(code)
                ]
                found[DEADLOCK] = Counterexample(DEADLOCK, (*_way(model, came, s), *blocked))
        if len(came) > limit:
            raise RuntimeError(f"more than {limit} states")
        frontier = fresh
    return Result(len(came), found)


def _way(model: Model, came: dict, s: bytes) -> list[str]:
    """The steps from the initial state to `s`."""
    lines = []
    while came[s] is not None:
        before, step, remark = came[s]
        lines.append(model.describe(before, step, remark))
        s = before
    return lines[::-1]
