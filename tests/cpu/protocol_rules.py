"""The wire protocol of the staged execution as a state machine that protocol_model exhausts.

What is modelled: per rank, forward after forward in stream order, the steps of stage, exchange, pull,
token-back and reduce (FC1 and FC2 touch nothing shared); abort; reset(). A step touches shared memory
at most once, so a list and its flag, rows and their flag, a check of the abort word and the store after
it, a record and its abort word are separate steps, and other ranks may run between them. Waits are
permissive: a wait whose flag has come and whose abort word is set may return either; one whose flag has
not come may time out in the forwards that the scenario names, or never.

What data is: a tag. A list carries (tag, layer) of its forward, a token row and a returned row the tag of
the forward that staged it. A rank that reads another tag than its own forward's read something stale,
early or torn. Tags are not epochs: they come from the scenario's programs, so they also judge reset().

What is not modelled: weak memory beyond the order of data and flag (release and acquire are taken as
given; a missing one looks like `data_before_flag=False`), a rank's own routes, bad input and pool overflow
(aborts like a layer mismatch: one cause more, found in the same place), the mega execution.

lanes=1 gives a rank one sequence of steps that visits its peers in order. lanes=W-1 gives it one CTA a
peer: CTAs of a kernel run freely, kernels one after another.

A state is one `bytes`: every epoch, flag, tag and program counter is a byte. Steps that touch nothing
shared (join, end of a forward, and the abort checks of a scenario in which nobody can abort) run at once
after the step before them; they commute with every step of other ranks, so no behaviour is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

TIMEOUT, LAYER = 1, 4  # causes, as in megamoe.errors.Cause
CAUSES = {0: "?", TIMEOUT: "timeout", LAYER: "layer"}
BAD = 255  # tag of a row that was made from a wrong list or wrong token rows

# Kinds of violation.
STALE_LIST = "ended ok on a wrong list"
STALE_X = "ended ok after pulling wrong token rows"
STALE_ROWS = "ended ok on wrong returned rows"
STORED = "stored at a peer after it knew of the abort"
NO_RECORD = "abort word without its record"
WRONG_CAUSE = "abort with a cause that did not happen"
SPURIOUS = "NaN where nothing went wrong"
MISSED = "ended ok although a rank did not take part"
DEADLOCK = "deadlock"


@dataclass(frozen=True)
class Rules:
    """What the protocol does. The defaults are the design; tests plant faults by changing one."""

    slots: int = 2
    data_before_flag: bool = True
    rows_before_flag: bool = True
    wait_for_lists: bool = True
    wait_for_returns: bool = True
    flag_equals: bool = False  # wait for == n in place of >= n
    check_layer: bool = True
    epoch_per_layer: bool = False
    running_stops: bool = True  # the forward that aborts ends without a further store
    queued_stops: bool = True  # a later forward reads the abort word first and publishes nothing
    check_stores: bool = True  # a look at the abort word before every store at a peer, besides those of waits
    abort_before_stage: bool = True  # ... and does not overwrite the staged tokens
    record_before_word: bool = True
    bump_on_abort: bool = True  # does a forward that gave NaN count? Either must be right
    reset_agrees: bool = True  # E from the maximum over ranks; else each rank's own
    reset_step: int = 2
    reset_flags: bool = True  # all flags := E
    reset_clears_drained: bool = True  # clears the abort word after the first barrier, when all have drained
    reset_last_barrier: bool = True


RESET = "reset"
Forward = tuple[int, int]  # (tag, layer)


@dataclass(frozen=True)
class Scenario:
    """What the ranks call, and what must come of it.

    programs: per rank, its calls in order: (tag, layer) or RESET. routes: tag -> pairs (home, owner) with
    routes between them. timeouts: tags of the forwards whose waits may time out. hang: ranks that may stop
    for good at any step. ok, nan: tags of the forwards that must end ok, must end as NaN. causes: those
    that an abort record may name; none where nobody can abort.
    """

    programs: tuple[tuple[Forward | str, ...], ...]
    routes: dict[int, frozenset[tuple[int, int]]]
    timeouts: frozenset[int] = frozenset()
    hang: frozenset[int] = frozenset()
    ok: frozenset[int] = frozenset()
    nan: frozenset[int] = frozenset()
    causes: frozenset[int] = frozenset()
    lanes: int = 1

    @property
    def world(self) -> int:
        return len(self.programs)

    @property
    def can_abort(self) -> bool:
        """Whether the ranks must look at their abort words: something may go wrong, or layers could differ."""
        layers = {call[1] for program in self.programs for call in program if call != RESET}
        return bool(self.causes) or len(layers) > 1


Outcome = tuple[bytearray, str, "str | None"]  # next state, remark for the trace, kind of violation


@dataclass(eq=False)
class Step:
    """One instruction of a lane: `run` for a shared step (all outcomes, none = blocked), `local` for one that
    runs at once (changes the state in place; returns whether it could, and a violation)."""

    rank: int
    lane: int
    text: str
    run: Callable[[bytes], list[Outcome]] | None = None
    local: Callable[[bytearray], tuple[bool, str | None]] | None = None
    where: str = ""


@dataclass
class Targets:
    """Where a forward's jumps go: its first abort step, and its end."""

    abort: int = 0
    end: int = 0
