"""Errors that megamoe raises, and the record that an aborted forward leaves behind."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum


class MegaMoEError(Exception):
    """Base of every error of this package."""


class ArgumentError(MegaMoEError, ValueError):
    """An argument is wrong. Attributes: name, value, allowed."""

    def __init__(self, name: str, value: object, allowed: str) -> None:
        self.name, self.value, self.allowed = name, value, allowed
        super().__init__(f"{name} = {value!r}: must be {allowed}")

    def __reduce__(self) -> tuple:
        return type(self), (self.name, self.value, self.allowed)


class ConfigError(ArgumentError):
    """A field of MoEConfig or Knobs, or their combination with a world, is not supported."""


class InputError(ArgumentError):
    """A tensor given to forward is refused on the host; nothing was launched."""


class WorldError(MegaMoEError, RuntimeError):
    """The ranks cannot form a world, or a collective call on it failed or timed out."""


class MismatchError(WorldError):
    """Something that must be equal on every rank differs. The text lists the ranks' values."""


class MissingDependency(MegaMoEError, ImportError):
    """A package or a device that this call needs is missing; the text says how to get it."""


class Cause(IntEnum):
    """Why a forward aborted."""

    TIMEOUT = 1
    BAD_INPUT = 2
    POOL_OVERFLOW = 3
    LAYER = 4


class Phase(IntEnum):
    """Where a forward aborted."""

    STAGE = 1
    PULL = 2
    REDUCE = 3


class BadInput(IntEnum):
    """What check_routes found; the `expected` field of a BAD_INPUT record."""

    ID_OUT_OF_RANGE = 1
    DUPLICATE_EXPERT = 2
    WEIGHT_NOT_FINITE = 3


BAD_INPUT_TEXT = {
    BadInput.ID_OUT_OF_RANGE: "topk_ids holds an id outside -1 .. num_experts-1",
    BadInput.DUPLICATE_EXPERT: "topk_ids names one expert twice in a token",
    BadInput.WEIGHT_NOT_FINITE: "topk_weights is not finite on a live route",
}


@dataclass(frozen=True)
class AbortRecord:
    """What the rank that aborted first wrote at every peer: these fields as int64, in this order.

    A new field also needs a value in kernels/control.abort_all; everything else follows from this class.

    origin: the rank that found the fault. blamed: the rank it waited for or whose input is bad.
    expert: local expert or -1; for bad input the expert id seen. expected, seen: epochs (timeout),
    layer numbers (layer), rows (pool overflow), BadInput code and token (bad input).
    epoch: the forward that was running.
    """

    cause: Cause
    origin: int
    blamed: int
    phase: Phase
    expert: int
    expected: int
    seen: int
    epoch: int

    def describe(self) -> str:
        """One sentence for people."""
        where = f"forward {self.epoch}, {self.phase.name.lower()} on rank {self.origin}"
        if self.cause == Cause.TIMEOUT:
            what = f"rank {self.blamed} did not arrive (waited for epoch {self.expected}, saw {self.seen})"
        elif self.cause == Cause.BAD_INPUT:
            text = BAD_INPUT_TEXT[BadInput(self.expected)]
            what = f"rank {self.blamed}: {text} (token {self.seen}, expert {self.expert})"
        elif self.cause == Cause.POOL_OVERFLOW:
            what = f"{self.seen} routes arrived at rank {self.origin}, its pool holds {self.expected}: raise pool_rows"
        else:
            what = f"rank {self.blamed} runs layer {self.seen}, this rank layer {self.expected}"
        return f"{self.cause.name.lower()}: {what} [{where}]"


class MegaMoEAborted(MegaMoEError, RuntimeError):
    """A forward aborted on every rank; outputs are NaN until reset(). Attribute: record."""

    def __init__(self, record: AbortRecord) -> None:
        self.record = record
        super().__init__(record.describe())

    def __reduce__(self) -> tuple:
        return type(self), (self.record,)


class AbortedTimeout(MegaMoEAborted):
    """A rank did not arrive within timeout_s."""


class AbortedBadInput(MegaMoEAborted):
    """check_routes refused a rank's routes on the device."""


class AbortedPoolOverflow(MegaMoEAborted):
    """A rank received more routes than its pool holds."""


class AbortedLayerMismatch(MegaMoEAborted):
    """Ranks ran different layers of one workspace in the same forward."""


ABORTED = {
    Cause.TIMEOUT: AbortedTimeout,
    Cause.BAD_INPUT: AbortedBadInput,
    Cause.POOL_OVERFLOW: AbortedPoolOverflow,
    Cause.LAYER: AbortedLayerMismatch,
}


def aborted(words: list[int]) -> MegaMoEAborted:
    """The error for a record's integers, in the order of AbortRecord's fields."""
    record = AbortRecord(*(int(word) for word in words))
    record = replace(record, cause=Cause(record.cause), phase=Phase(record.phase))
    return ABORTED[record.cause](record)
