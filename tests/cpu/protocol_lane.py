"""What every step of a rank may do: go on, wait for a flag, look at the abort word, store at a peer, abort."""

from __future__ import annotations

from collections.abc import Callable

from tests.cpu.protocol_rules import (
    BAD,
    CAUSES,
    NO_RECORD,
    STORED,
    TIMEOUT,
    WRONG_CAUSE,
    Outcome,
    Rules,
    Scenario,
    Step,
    Targets,
)

Run = Callable[[bytes], list[Outcome]]
Local = Callable[[bytearray], tuple[bool, "str | None"]]


class Lane:
    """Appends instructions of one lane of a rank to `code`.

    All lanes of a rank have programs of equal shape, so "a sibling is as far as I am" compares program
    counters. What is per rank (read the epoch, stage, end, reset) is done by lane 0; the others follow.
    """

    def __init__(self, cells: dict[tuple, int], scenario: Scenario, rules: Rules, rank: int, lane: int) -> None:
        self.at, self.scenario, self.rules = cells, scenario, rules
        self.rank, self.lane, self.code, self.where = rank, lane, [], ""
        self.aborts = scenario.can_abort
        self.pc, self.seen, self.resume = (self.at[name, rank, lane] for name in ("pc", "seen", "resume"))
        self.lanes = range(self.scenario.lanes)
        world = self.scenario.world
        peers = [(rank + i) % world for i in range(1, world)]
        self.peers = peers if self.scenario.lanes == 1 else [peers[lane]]

    # How a step ends.

    def next(self, s: bytes) -> bytearray:
        v = bytearray(s)
        v[self.pc] += 1
        return v

    def add(self, text: str, run: Run) -> None:
        self.code.append(Step(self.rank, self.lane, text, run=run, where=self.where))

    def local(self, text: str, step: Local) -> None:
        self.code.append(Step(self.rank, self.lane, text, local=step, where=self.where))

    def follow(self) -> None:
        """Waits until lane 0 has done the step in this place."""
        lead = self.at["pc", self.rank, 0]

        def step(v: bytearray) -> tuple[bool, None]:
            went = v[lead] > v[self.pc]
            v[self.pc] += went
            return went, None

        self.local("follows lane 0", step)

    def join(self) -> None:
        """The end of a kernel: waits for the rank's other lanes."""
        if len(self.lanes) == 1:
            return
        siblings = [self.at["pc", self.rank, lane] for lane in self.lanes]

        def step(v: bytearray) -> tuple[bool, None]:
            went = all(v[pc] >= v[self.pc] for pc in siblings)
            v[self.pc] += went
            return went, None

        self.local("joins", step)

    def lead(self, text: str, run: Run) -> None:
        if self.lane == 0:
            self.add(text, run)
        else:
            self.follow()

    def lead_local(self, text: str, step: Local) -> None:
        if self.lane == 0:
            self.local(text, step)
        else:
            self.follow()

    # Aborts.

    def observe(self, s: bytes, to: Targets) -> Outcome:
        """The rank's abort word is set: read the record, give up."""
        origin = s[self.at["abort", self.rank]] - 1
        cause = s[self.at["record", self.rank, origin]]
        kind = None
        if not cause:
            kind = NO_RECORD
        elif cause not in self.scenario.causes:
            kind = WRONG_CAUSE
        v = self.next(s)
        v[self.seen] = cause or BAD
        if self.rules.running_stops:
            v[self.pc] = to.end
        return v, f"sees the abort word ({CAUSES[cause]}, from rank {origin})", kind

    def give_up(self, s: bytes, cause: int, to: Targets) -> Outcome:
        """This lane finds the fault; the first one of its rank that does writes the record."""
        claimed = any(s[self.at["seen", self.rank, lane]] for lane in self.lanes)
        v = self.next(s)
        v[self.seen] = cause
        if not claimed:
            v[self.resume], v[self.pc] = s[self.pc] + 1, to.abort
        elif self.rules.running_stops:
            v[self.pc] = to.end
        return v, f"aborts ({CAUSES[cause]})", None if cause in self.scenario.causes else WRONG_CAUSE

    def check(self, to: Targets) -> None:
        """The look at the abort word before a store at a peer."""
        if not (self.aborts and self.rules.running_stops and self.rules.check_stores):
            return
        word, stops = self.at["abort", self.rank], self.rules.queued_stops

        def run(s: bytes) -> list[Outcome]:
            if s[word] and (stops or not s[self.seen]):
                return [self.observe(s, to)]
            return [(self.next(s), "", None)]

        self.add("checks the abort word", run)

    def abort(self, to: Targets) -> None:
        """Record at every rank, then the abort word at every rank (itself too)."""
        to.abort = len(self.code)
        for word in (False, True) if self.rules.record_before_word else (True, False):
            for d in [*(p for p in range(self.scenario.world) if p != self.rank), self.rank]:
                cell = self.at["abort", d] if word else self.at["record", d, self.rank]

                def run(s: bytes, cell: int = cell, word: bool = word) -> list[Outcome]:
                    v = self.next(s)
                    v[cell] = (s[cell] or 1 + self.rank) if word else s[self.seen]
                    return [(v, "", None)]

                self.add(f"writes its {'abort word' if word else 'record'} at rank {d}", run)

        def back(v: bytearray) -> tuple[bool, None]:
            v[self.pc] = to.end if self.rules.running_stops else v[self.resume]
            v[self.resume] = 0
            return True, None

        self.local("has aborted", back)

    # Memory and flags.

    def slot(self, n: int) -> int:
        return n % self.rules.slots

    def store(self, text: str, write: Callable[[bytearray], None], to: Targets) -> None:
        """A store at a peer, with the check before it."""
        self.check(to)

        def run(s: bytes) -> list[Outcome]:
            v = self.next(s)
            write(v)
            return [(v, "", STORED if s[self.seen] else None)]

        self.add(text, run)

    def wait(self, text: str, flag: Callable[[int], int], tag: int, to: Targets) -> None:
        """Waits until the cell flag(n) has reached n, or gives up."""
        n, word, late = self.at["n", self.rank], self.at["abort", self.rank], tag in self.scenario.timeouts

        def run(s: bytes) -> list[Outcome]:
            value = s[flag(s[n])]
            out = []
            if value == s[n] or (value > s[n] and not self.rules.flag_equals):
                out.append((self.next(s), f"flag is {value}", None))
            elif late:
                out.append(self.give_up(s, TIMEOUT, to))
            if s[word]:
                out.append(self.observe(s, to))
            return out

        self.add(text, run)
