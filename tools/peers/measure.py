"""Preparing peers on every rank together, and timing them in turns with ours.

Rows: megamoe and every peer get one each, told apart by the key "impl". `interleave` times them in turns, so that
clocks and heat are shared, and `ratios` makes the columns "over_<peer>" (our time / its time).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megamoe import reference

from . import Launch, Peer

LEAST_COSINE = 0.99
"""A peer whose result is further from ours than this is not measured: it computes something else."""


def first_reason(world: Any, reason: str | None, what: str) -> str | None:
    """The same answer on every rank: the first rank's reason that is not None, named where others can run. Collective.

    world: a megamoe World of one rank a process.
    """
    everyone = world.gather([reason], what)
    for rank, other in enumerate(everyone):
        if other is not None:
            return other if len(set(everyone)) == 1 else f"rank {rank}: {other}"
    return None


def ready(world: Any, peer: Peer, point: Any, experts: Any, inputs: tuple) -> str | None:
    """Prepare a peer on every rank, or say why not; then it is closed. Collective.

    A rank that fails between the peer's own collectives can leave the others waiting in them.
    """
    reason = first_reason(world, peer.why_not(point), peer.name)
    if reason is None:
        try:
            peer.prepare(point, experts, inputs)
        except Exception as error:  # whatever a library raises, out of memory included, is a reason
            reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
        reason = first_reason(world, reason, f"{peer.name} prepared")
        if reason is not None:
            peer.close()
    return reason


def differs(result: torch.Tensor, ours: torch.Tensor, rows: int = 512) -> str | None:
    """Why a peer's y [T, H] is not the layer that we computed, from the first rows of both, or None."""
    if ours.shape[0] == 0:
        return None
    cosine = reference.cosine(result[:rows], ours[:rows])
    return None if cosine >= LEAST_COSINE else f"its result differs from ours (cosine {cosine:.4f})"


def capture(peer: Peer) -> torch.cuda.CUDAGraph:
    """A CUDA graph of one run of a prepared peer whose `graphable` is true."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        peer.run()
    return graph


def interleave(clock: Any, launches: Mapping[str, Launch], runs: int, warmup: int = 3) -> dict[str, list[float]]:
    """Microseconds of each launch in `runs` rounds, each launch behind the clock's own flush, sleep and meeting.

    clock: a timing.Clock. A round starts one launch further than the last, so that none always follows the same.
    """
    names = list(launches)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for number in range(warmup + runs):
        turn = number % max(len(names), 1)
        for name in names[turn:] + names[:turn]:
            sample = clock.op(launches[name], 1, 0)
            if number >= warmup:
                samples[name] += sample
    return samples


def ratios(ours: float, peers: Mapping[str, float]) -> dict[str, float]:
    """Columns "over_<peer>": our microseconds over each peer's; below 1 we are faster."""
    return {f"over_{name}": ours / us for name, us in peers.items() if us > 0}
