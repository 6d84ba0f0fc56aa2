"""The protocol is sound under every interleaving, and the search finds each planted fault.

Covered, with the number of distinct states of the largest search:
- W = 2, three forwards, every choice of who sends to whom in each (64 patterns), one layer or two in turn:
  510; two forwards whose waits may all time out, every pattern, and four with one: 3,400.
- W = 2, reset() after 0 to 3 forwards of either rank, waits timing out at will, aborted forwards counted
  or not, then two forwards: 10,600.
- W = 2 and 3, a rank that leaves out a layer: 23,300.
- W = 3, three forwards, seven routings: 10,200; with one CTA a peer in every kernel: 64,000; two layers and
  routes that change: 30,700.
- W = 3, one forward whose waits may all time out: 71,000; then reset() and a forward that must be right:
  299,000; a rank that hangs at any step or never comes: 191,000.
All sound scenarios together visit 1.9 million states. Not covered: W = 3 with aborts and several CTAs a rank
(over 2 million), W = 3 with aborts in more than two forwards. Late ranks need no scenario: they are interleavings.

Epochs here are small. They are 64-bit on the device and compared as such, and at one forward a
microsecond they wrap after 290,000 years, so there is no comparison across the wrap to test.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

import pytest

from tests.cpu.protocol_model import explore
from tests.cpu.protocol_rules import (
    DEADLOCK,
    LAYER,
    MISSED,
    NO_RECORD,
    RESET,
    SPURIOUS,
    STALE_LIST,
    STALE_ROWS,
    STALE_X,
    STORED,
    TIMEOUT,
    WRONG_CAUSE,
    Rules,
    Scenario,
)

Routes = frozenset[tuple[int, int]]


def everyone(world: int) -> Routes:
    return frozenset((home, owner) for home in range(world) for owner in range(world) if home != owner)


NOBODY: Routes = frozenset()
PAIRS = (NOBODY, frozenset({(0, 1)}), frozenset({(1, 0)}), everyone(2))
THREE = {
    "everyone": everyone(3),
    "nobody": NOBODY,
    "ring": frozenset({(0, 1), (1, 2), (2, 0)}),
    "one owner": frozenset({(1, 0), (2, 0)}),
    "one home": frozenset({(0, 1), (0, 2)}),
    "one silent": frozenset({(0, 1), (1, 0)}),
    "chain": frozenset({(0, 1), (1, 2)}),
}


def calls(layers: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Forwards with tags 1, 2, ... of these layers."""
    return tuple(enumerate(layers, 1))


def plain(routes: Iterable[Routes], layers: tuple[int, ...], world: int = 2, lanes: int = 1) -> Scenario:
    """Every rank runs the same forwards and nothing goes wrong."""
    tags = range(1, len(layers) + 1)
    return Scenario((calls(layers),) * world, dict(zip(tags, routes)), ok=frozenset(tags), lanes=lanes)


def failing(routes: Iterable[Routes], forwards: int, world: int = 2, **more: object) -> Scenario:
    """Every rank runs the same forwards; any wait may time out."""
    tags = range(1, forwards + 1)
    programs = more.pop("programs", (calls([0] * forwards),) * world)
    timeouts, causes = frozenset(tags), frozenset({TIMEOUT})
    return Scenario(programs, dict(zip(tags, routes)), timeouts=timeouts, causes=causes, **more)


def with_reset(before: tuple[int, ...], routes: Routes, after: tuple[Routes, ...]) -> Scenario:
    """Rank r runs before[r] forwards whose waits may time out, reset(), then len(after) forwards that must be right."""
    later = tuple(10 + i for i in range(len(after)))
    programs = tuple((*calls([0] * count), RESET, *((tag, 0) for tag in later)) for count in before)
    tags = range(1, max(before) + 1)
    return Scenario(
        programs,
        dict.fromkeys(tags, routes) | dict(zip(later, after)),
        timeouts=frozenset(tags),
        causes=frozenset({TIMEOUT}),
        ok=frozenset(later),
        nan=frozenset(range(min(before) + 1, max(before) + 1)),
    )


def two_rank_plain(layers: tuple[int, ...] = (0, 0, 0)) -> list[Scenario]:
    return [plain(routes, layers) for routes in product(PAIRS, repeat=len(layers))]


def two_rank_aborts() -> list[Scenario]:
    return [failing(routes, 2) for routes in product(PAIRS, repeat=2)]


def two_rank_resets(most: int = 2) -> list[Scenario]:
    counts = product(range(most + 1), repeat=2)
    return [with_reset(before, routes, (routes, everyone(2))) for before in counts for routes in PAIRS]


def absent(world: int, routes: Routes, came: int, hang: bool = False, lanes: int = 1) -> Scenario:
    """The last rank runs `came` forwards (or hangs within them) and never comes to the next, that others run."""
    programs = (*(calls([0] * (came + 1)),) * (world - 1), calls([0] * came))
    more = dict(nan=frozenset({came + 1}), hang=frozenset({world - 1} if hang else ()), lanes=lanes)
    return failing([routes] * (came + 1), came + 1, programs=programs, **more)


def skipping(world: int, routes: Routes) -> Scenario:
    """The last rank leaves out the second of four forwards of layers 0, 1, 0, 1."""
    programs = (*(calls([0, 1, 0, 1]),) * (world - 1), calls([0, 0, 1]))
    ok = frozenset({1} if world == 2 else ())  # of three, one may still be in forward 1 when the other two abort
    nan, causes = frozenset({2, 3, 4}), frozenset({LAYER})
    return Scenario(programs, dict.fromkeys(range(1, 5), routes), ok=ok, nan=nan, causes=causes)


def check(scenarios: Iterable[Scenario], rules: Rules | None = None) -> int:
    """Asserts that no search finds anything; the number of states of the largest."""
    largest = 0
    for scenario in scenarios:
        result = explore(scenario, rules)
        assert not result.kinds, f"{scenario}\n{result}"
        largest = max(largest, result.states)
    return largest


def kinds(scenarios: Iterable[Scenario], rules: Rules) -> set[str]:
    """All kinds of violation that the searches find."""
    return set().union(*(explore(scenario, rules).kinds for scenario in scenarios))


# The design is sound.


@pytest.mark.parametrize("layers", [(0, 0, 0), (0, 1, 0)])
def test_two_ranks_every_routing(layers: tuple[int, ...]) -> None:
    assert check(two_rank_plain(layers)) > 150


@pytest.mark.parametrize("name", THREE)
@pytest.mark.parametrize("lanes", [1, 2])
def test_three_ranks(name: str, lanes: int) -> None:
    assert check([plain([THREE[name]] * 3, (0, 0, 0), 3, lanes)]) > 4_000


def test_three_ranks_changing_routes_and_layers() -> None:
    orders = (["everyone", "nobody", "ring"], ["one silent", "one owner", "nobody"], ["nobody", "chain", "one home"])
    check(plain([THREE[name] for name in order], (0, 1, 0), 3) for order in orders)


@pytest.mark.parametrize("bump", [True, False])
def test_two_ranks_aborting(bump: bool) -> None:
    assert check(two_rank_aborts(), Rules(bump_on_abort=bump)) > 1_000
    assert check([failing([PAIRS[1], PAIRS[2], NOBODY, everyone(2)], 4)], Rules(bump_on_abort=bump)) > 1_000


@pytest.mark.parametrize("name", ["everyone", "ring", "one silent"])
def test_three_ranks_aborting(name: str) -> None:
    assert check([failing([THREE[name]], 1, 3)]) > 40_000


@pytest.mark.parametrize("bump", [True, False])
def test_reset_after_any_number_of_forwards_on_two_ranks(bump: bool) -> None:
    assert check(two_rank_resets(3), Rules(bump_on_abort=bump)) > 5_000


def test_two_resets() -> None:
    program = ((1, 0), RESET, (2, 0), RESET, (3, 0), (4, 0))
    for routes in PAIRS:
        tags, late, ok = dict.fromkeys(range(1, 5), routes), frozenset({1, 2}), frozenset({3, 4})
        check([Scenario((program, program), tags, timeouts=late, causes=frozenset({TIMEOUT}), ok=ok)])


@pytest.mark.parametrize("before", [(1, 1, 1), (1, 1, 0), (2, 1, 0)])
def test_reset_on_three_ranks(before: tuple[int, ...]) -> None:
    assert check([with_reset(before, THREE["ring"], (everyone(3),))], Rules(bump_on_abort=False)) > 10_000


@pytest.mark.parametrize("routes", PAIRS)
def test_absent_rank_aborts_the_other(routes: Routes) -> None:
    check(absent(2, routes, came, hang) for came in range(3) for hang in (False, True))


@pytest.mark.parametrize("name", ["everyone", "one silent"])
def test_absent_rank_aborts_both_others(name: str) -> None:
    check([absent(3, THREE[name], 0), absent(3, THREE[name], 0, lanes=2), absent(3, THREE[name], 1, hang=True)])


def test_skipped_layer_is_found_as_such() -> None:
    check(skipping(2, routes) for routes in PAIRS)
    check(skipping(3, routes) for routes in THREE.values())


# Each planted fault is found, as what it is: those of `must` at least, and nothing outside `must` and `may`.

WRONG = {STALE_LIST, STALE_ROWS}
FAULTS = {
    "one slot only": (Rules(slots=1), two_rank_plain, {STALE_LIST}, set()),
    "flag before data": (Rules(data_before_flag=False), two_rank_plain, WRONG, set()),
    "return flag before rows": (Rules(rows_before_flag=False), two_rank_plain, {STALE_ROWS}, set()),
    "no wait for lists": (Rules(wait_for_lists=False), two_rank_plain, WRONG, {STALE_X}),
    "no wait for returns": (Rules(wait_for_returns=False), two_rank_plain, {STALE_ROWS, STALE_X}, set()),
    "epoch per layer": (
        Rules(epoch_per_layer=True),
        lambda: two_rank_plain((0, 1, 0)),
        {STALE_ROWS, SPURIOUS},
        {STALE_X, WRONG_CAUSE},
    ),
    "layer not checked": (
        Rules(check_layer=False),
        lambda: [skipping(2, r) for r in PAIRS],
        WRONG | {DEADLOCK},
        set(),
    ),
    "running forward publishes after abort": (
        Rules(running_stops=False),
        two_rank_aborts,
        {STORED, STALE_ROWS},
        {STALE_X},
    ),
    "queued forward publishes after abort": (Rules(queued_stops=False), two_rank_aborts, {STORED}, set()),
    "queued forward stages, stores unchecked": (
        Rules(abort_before_stage=False, check_stores=False),
        two_rank_aborts,
        {STALE_X},
        set(),
    ),
    "abort word before record": (Rules(record_before_word=False), two_rank_aborts, {NO_RECORD}, set()),
    "waits without end": (
        Rules(),
        lambda: [Scenario(((), calls([0])), {1: NOBODY}, causes=frozenset({TIMEOUT}))],
        {DEADLOCK},
        set(),
    ),
    "reset without epoch agreement": (Rules(reset_agrees=False), two_rank_resets, {DEADLOCK}, set()),
    "reset reuses the epoch, keeps flags": (
        Rules(reset_step=0, reset_flags=False, bump_on_abort=False),
        two_rank_resets,
        WRONG,
        {STALE_X},
    ),
    "reset clears before all have drained": (
        Rules(reset_clears_drained=False),
        two_rank_resets,
        {SPURIOUS},
        {NO_RECORD, DEADLOCK},
    ),
    "reset without last barrier": (Rules(reset_last_barrier=False), two_rank_resets, {DEADLOCK}, set()),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_found(name: str) -> None:
    rules, scenarios, must, may = FAULTS[name]
    found = kinds(scenarios(), rules)
    assert must <= found <= must | may


def test_one_slot_needs_a_peer_without_routes() -> None:
    """A home that waits for a peer's rows cannot overtake it, so only zero-count peers show why there are two slots."""
    full = [everyone(2)] * 3
    assert not explore(plain(full, (0, 0, 0)), Rules(slots=1)).kinds
    assert explore(plain([NOBODY] * 3, (0, 0, 0)), Rules(slots=1)).kinds == {STALE_LIST}
    assert explore(plain([THREE["ring"]] * 3, (0, 0, 0), 3), Rules(slots=1)).kinds == {STALE_LIST}


# What looks like a fault and is none, so that nobody relies on the opposite.


@pytest.mark.parametrize(
    "rules",
    [
        Rules(flag_equals=True),  # nobody can be two epochs ahead in a slot, nor one ahead in a return
        Rules(abort_before_stage=False),  # the look at the abort word before token-back catches it
        Rules(check_stores=False),  # waits and begin notice an abort; the looks between only end it sooner
    ],
    ids=["flag equals", "stage first", "stores unchecked"],
)
def test_harmless_differences(rules: Rules) -> None:
    check(two_rank_plain(), rules)
    check(two_rank_aborts(), rules)
    check(two_rank_resets(1), rules)


@pytest.mark.parametrize("bump", [True, False])
def test_reset_step_has_slack(bump: bool) -> None:
    """Drained ranks have published at most (largest epoch) + 1, so a step of 1 leaves every old flag behind, and
    with all flags rewritten between two barriers any common epoch would do. 2 is one to spare."""
    for step, flags in ((0, True), (1, False), (1, True), (2, False)):
        check(two_rank_resets(1), Rules(reset_step=step, reset_flags=flags, bump_on_abort=bump))


# The search itself.


def test_scenarios_are_not_vacuous() -> None:
    """With timeouts a forward can end either way, and a lie about how it must end is found."""
    for wrong, kind in (({"ok": frozenset({2})}, SPURIOUS), ({"nan": frozenset({2})}, MISSED)):
        assert explore(failing([everyone(2)] * 2, 2, **wrong)).kinds == {kind}
    program = ((1, 0), RESET, (2, 0))
    scenario = Scenario((program, program), dict.fromkeys((1, 2), everyone(2)), nan=frozenset({2}))
    assert explore(scenario).kinds == {MISSED}


def test_counterexample_reads_as_a_trace() -> None:
    trace = str(explore(plain([NOBODY] * 2, (0, 0)), Rules(slots=1)).found[STALE_LIST])
    lines = trace.splitlines()
    assert lines[0] == f"violation: {STALE_LIST}"
    assert "rank 0 | forward 2 of layer 0 n=2: stores its list at rank 1" in trace
    assert "rank 1 | forward 1 of layer 0 n=1: reads the list of rank 0, tag 2, layer 0" in trace
    assert len(lines) < 40
