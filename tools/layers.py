"""The weights and layers that a scale mode's sections run, and launches of forwards over them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import inputs
import options
import peers
import torch

import megamoe
from megamoe import MegaMoE

if TYPE_CHECKING:
    from bench import Bench

Launch = Callable[[], Any]

ROTATED_TOKENS = 64
"""Up to this T, launches take turns with the weights of several layers."""

PACKS = 2
SPARE_PACKS = 4
"""Free memory, in packs, that a further pack needs: itself, a peer's weights, and as much again of both."""


class Setup:
    """Packs of random experts and warmed-up layers of one scale mode: made when first needed, gone on exit."""

    def __init__(self, b: Bench, scale: str) -> None:
        self._b, self.scale, self.cfg = b, scale, b.configs[scale]
        self._packs: list[list[Any]] = []
        self._layers: list[MegaMoE] = []
        self._stack = contextlib.ExitStack()
        self._experts: peers.Experts | None = None
        self._rotates: bool | None = None

    def __enter__(self) -> Setup:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(*error)
        self._packs, self._layers, self._experts = [], [], None
        torch.cuda.empty_cache()

    def packs(self, index: int = 0) -> list[Any]:
        """Random experts of layer `index`, a pack a local rank."""
        world = self._b.world
        while len(self._packs) <= index:
            self._b.say(f"{self.scale}: weights")
            seed = self._b.args.seed + 1000 * len(self._packs)
            self._packs.append(
                [inputs.random_experts(self.cfg, world.size, seed + r, world.device(r)) for r in world.local_ranks]
            )
        return self._packs[index]

    def layer(self, index: int = 0) -> MegaMoE:
        """Layer `index`, warmed up. Collective at first."""
        while len(self._layers) <= index:
            packs = self.packs(len(self._layers))
            experts = packs if self._b.virtual else packs[0]
            moe = megamoe.MegaMoE(self.cfg, experts, self._b.world, knobs=self._b.args.knobs)
            self._layers.append(self._stack.enter_context(moe))
            self._b.say(f"{self.scale}: compile")
            with self._b.turns.lent():
                moe.warmup()
        return self._layers[index]

    def layers(self, tokens: int) -> list[MegaMoE]:
        """Layers that take turns at T = `tokens`: PACKS at most ROTATED_TOKENS where memory allows, else one.
        Collective at first."""
        if tokens > ROTATED_TOKENS:
            return [self.layer()]
        if self._rotates is None:
            self.layer()
            torch.cuda.empty_cache()
            need = SPARE_PACKS * sum(pack.nbytes for pack in self.packs()) + options.SPARE_BYTES
            self._rotates = min(self._b.gather(torch.cuda.mem_get_info(self._b.device)[0], "free")) >= need
        return [self.layer(index) for index in range(PACKS if self._rotates else 1)]

    def experts(self) -> peers.Experts:
        """What peers make their weights of: the same object every time, so that they do so once."""
        if self._experts is None:
            self._experts = peers.Experts(self.packs()[0])
        return self._experts


def forward(moe: MegaMoE, made: inputs.Problem) -> Launch:
    """A whole forward into made.ys."""
    if moe.world.kind == "virtual":
        return lambda: moe(made.xs, made.ids, made.weights, out=made.ys)
    return lambda: moe(*made.first, out=made.ys[0])


def captured(launch: Launch) -> Launch:
    """The replay of a CUDA graph of a launch."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        launch()
    return graph.replay


def in_turns(launches: Sequence[Launch]) -> Launch:
    """A launch that is each of `launches` in turn."""
    turns = itertools.cycle(launches)
    return launches[0] if len(launches) == 1 else lambda: next(turns)()


def steps_in_turns(sets: Sequence[Sequence[Launch]]) -> list[Launch]:
    """Steps of which each round takes those of the next set; a round begins with the first step."""
    if len(sets) == 1:
        return list(sets[0])
    turns, current = itertools.cycle(sets), [sets[0]]

    def first() -> None:
        current[0] = next(turns)
        current[0][0]()

    return [first, *((lambda at=at: current[0][at]()) for at in range(1, len(sets[0])))]


def steps(b: Bench, moe: MegaMoE, made: inputs.Problem) -> list[Launch]:
    """The seven launches of a forward into made.ys, one by one. On a virtual world each launches the kernel of
    every rank on its stream, between a fork from the current stream and a join."""
    of_rank = [
        moe.steps(rank, made.xs[index], made.ids[index], made.weights[index], made.ys[index])
        for index, rank in enumerate(b.world.local_ranks)
    ]
    return of_rank[0] if not b.virtual else [together(moe, launches) for launches in zip(*of_rank)]


def together(moe: MegaMoE, launches: Sequence[Launch]) -> Launch:
    """One launch of all ranks of a virtual world."""

    def launch() -> None:
        moe._fork()
        for one in launches:
            one()
        moe._join()

    return launch


def repeated(launch: Launch, times: int) -> Launch:
    """The launch `times` times in a row."""

    def launches() -> None:
        for _ in range(times):
            launch()

    return launches


def finish(moe: MegaMoE, made: inputs.Problem) -> None:
    """Raise if a forward aborted or a result is not finite: then the times mean nothing."""
    moe.synchronize()
    if not all(bool(y.isfinite().all()) for y in made.ys):
        raise RuntimeError("a forward's result is not finite")
