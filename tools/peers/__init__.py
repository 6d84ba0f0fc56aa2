"""Other implementations that tools/bench.py measures beside megamoe: what a peer is, and how both are timed.

A peer computes the same layer (Point) or the same grouped product (GemmPoint) on the same weights, tokens and
routes. Where its numbers differ from ours (granularity of scales, place of the routing weight) its `note` says
so, and the row carries it. A peer that cannot run a point says why instead. Libraries are imported only when a
peer is prepared, so every module here can be imported on any machine.

measure.py prepares peers and times them in turns with ours.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from megamoe import numerics, weights
from megamoe.config import MoEConfig
from megamoe.weights import ExpertWeights

Launch = Callable[[], Any]

LAYER_PEERS = {
    "torch": "torch_ep.TorchEP",
    "flashinfer_pull": "flashinfer_moe.Pull",
    "flashinfer_push": "flashinfer_moe.Push",
}
"""Peers of whole forwards, by name."""

GEMM_PEERS = {
    "scaled_mm": "gemm.ScaledMM",
    "scaled_grouped_mm": "gemm.ScaledGroupedMM",
    "deep_gemm": "gemm.DeepGEMM",
}
"""Peers of fc1 and fc2 alone, by name."""


@dataclass(frozen=True)
class Point:
    """What a layer peer runs. tokens: the largest T of any rank (a rank may hold fewer)."""

    cfg: MoEConfig
    world_size: int
    rank: int
    tokens: int
    device: torch.device

    @property
    def experts_local(self) -> int:
        """E_local."""
        return self.cfg.experts_local(self.world_size)


@dataclass(frozen=True)
class GemmPoint:
    """What a GEMM peer runs: fc1's or fc2's product on the rows of `experts` experts, `rows_per_expert` on average.

    uneven: rows of each expert, 0 included; None: rows_per_expert on each.
    """

    cfg: MoEConfig
    name: str
    experts: int
    rows_per_expert: int
    device: torch.device
    uneven: tuple[int, ...] | None = None

    @property
    def counts(self) -> tuple[int, ...]:
        """Rows of each expert."""
        return self.uneven or (self.rows_per_expert,) * self.experts

    @property
    def rows(self) -> int:
        """Rows in all."""
        return self.experts * self.rows_per_expert

    @property
    def size(self) -> tuple[int, int]:
        """(N, K) of one expert's weight."""
        hidden, inner = self.cfg.hidden, self.cfg.intermediate
        return (2 * inner, hidden) if self.name == "fc1" else (hidden, inner)


class Experts:
    """One rank's experts in bf16 and checkpoint order, made a few at a time from the pack that our layer runs.

    Codes times scales, rounded to bf16: quantising them again with the same groups gives the same codes.
    Peers keep what they made of an object for as long as they are handed the same one.
    """

    def __init__(self, pack: ExpertWeights) -> None:
        self.pack, self.count = pack, pack.experts_local

    def chunks(self, size: int = 8) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(w13 bf16 [n, 2I, H] with gate rows first, w2 bf16 [n, H, I]) of the next n <= size experts."""
        pack = self.pack
        block = pack.cfg.scale == "block"
        dequantize = numerics.dequantize_weight_blocks if block else numerics.dequantize_weight_tensor
        scale13 = pack.w13_scale.flatten(1, 2) if block else pack.w13_scale
        pairs = ((pack.w13, scale13, weights.deinterleave_w13), (pack.w2, pack.w2_scale, weights.unpermute_w2))
        for first in range(0, self.count, size):
            n = min(size, self.count - first)
            out = [torch.empty(n, *codes.shape[1:], dtype=torch.bfloat16, device=codes.device) for codes, _, _ in pairs]
            for index in range(n):
                one = slice(first + index, first + index + 1)
                for target, (codes, scales, restore) in zip(out, pairs):
                    target[index] = dequantize(restore(codes[one]), scales[one])[0]
            yield out[0], out[1]


class Peer(ABC):
    """One other implementation.

    name: the value of a row's "impl". note: how its numbers or its work differ from ours, for the row.
    graphable: whether `run` may be captured in a CUDA graph once prepared.
    """

    name = ""
    note = ""
    graphable = False
    compiling: Callable[[], AbstractContextManager] = nullcontext
    """What `prepare` enters while it compiles (turns.py)."""

    @abstractmethod
    def why_not(self, point: Any) -> str | None:
        """Why it cannot run a point on this rank, or None. Starts and allocates nothing."""

    @abstractmethod
    def prepare(self, point: Any, weights: Any, inputs: tuple) -> None:
        """Get ready to run a point, one first run included. Collective over the ranks.

        Layer peers: weights is an Experts, inputs (x bf16 [T, H], ids int32 [T, K], weights fp32 [T, K]).
        GEMM peers: weights is an ExpertWeights, inputs (codes FP8 [rows, K], scales fp32 [rows, K/128] or None).
        """

    @abstractmethod
    def run(self) -> torch.Tensor:
        """Enqueue one forward on the current stream; its result, y bf16 [T, H] or bf16 [rows, N]."""

    def parts(self) -> dict[str, Launch]:
        """Parts of a prepared forward that can be timed on their own, by name."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Free everything. Collective over the ranks; harmless when nothing is prepared."""


def make(names: Iterable[str], known: Mapping[str, str] = LAYER_PEERS) -> list[Peer]:
    """The peers of these names, of LAYER_PEERS or GEMM_PEERS. Raises ValueError for another name."""
    made = []
    for name in names:
        if name not in known:
            raise ValueError(f"peer {name!r}: one of {', '.join(known)}")
        module, kind = known[name].split(".")
        made.append(getattr(importlib.import_module(f"{__name__}.{module}"), kind)())
    return made


def why_no_hopper(device: torch.device) -> str | None:
    """Why FP8 peers cannot run on a device, or None."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return "needs a Hopper GPU (torch sees no CUDA device)"
    major, minor = torch.cuda.get_device_capability(device)
    return None if (major, minor) == (9, 0) else f"needs a Hopper GPU (this one is sm_{major}{minor})"
