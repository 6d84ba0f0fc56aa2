"""A forward computed by the oracle instead of the kernels: MegaMoE(..., backend="reference").

For machines without a Hopper GPU, and for tests of what surrounds a layer. It runs all ranks of a single or virtual
world at once, in fp32 torch operations that wait on the host, so it cannot be captured in a CUDA graph. Refused
routes and full pools abort as they do on the device: outputs are NaN and the workspace holds the record until reset().
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import reference
from .comm.workspace import Workspace
from .config import MoEConfig
from .errors import AbortRecord, BadInput, Cause, Phase
from .inputs import Inputs
from .numerics import CanonicalExperts
from .weights import ExpertWeights


class ReferenceForward:
    """One layer's forwards. Holds a second copy of the weights, in checkpoint order."""

    def __init__(
        self, cfg: MoEConfig, workspace: Workspace, packs: Sequence[ExpertWeights], layer: int, check_routes: bool
    ) -> None:
        self._cfg, self._workspace, self._layer, self._check_routes = cfg, workspace, layer, check_routes
        self._packs: list[CanonicalExperts] = [pack.canonical() for pack in packs]
        self._capacity = cfg.pool_capacity(workspace.world.size)

    @torch.no_grad()
    def __call__(self, inputs: Sequence[Inputs], ys: Sequence[torch.Tensor]) -> None:
        """Write the result of every rank into ys [T_r, H]; NaN, and a record in the workspace, when it aborts."""
        record = self._fault(inputs)
        if record is not None:
            self._workspace.post(record)
            _write(ys, [torch.full_like(y, float("nan")) for y in ys])
            return
        # The layer computes on one device; ranks of a virtual world may have several.
        device = self._packs[0].w13.device
        xs = [(i.x if i.scales is None else (i.x, i.scales)) for i in inputs]
        xs = [self._staged(x, device) for x in xs]
        ids, weights = ([t.to(device) for t in rows] for rows in zip(*((i.ids, i.weights) for i in inputs)))
        packs = [CanonicalExperts(*(t.to(device) for t in pack[:4]), *pack[4:]) for pack in self._packs]
        _write(ys, reference.layer(self._cfg, packs, xs, ids, weights))
        self._workspace.advance()

    def _staged(self, x: torch.Tensor | tuple, device: torch.device) -> torch.Tensor | tuple:
        """What reference.layer takes: a tensor to quantise, or (codes, scales or None)."""
        if isinstance(x, tuple):
            return tuple(t.to(device) for t in x)
        return x.to(device) if x.dtype is torch.bfloat16 else (x.to(device), None)

    def _fault(self, inputs: Sequence[Inputs]) -> AbortRecord | None:
        """The record of a forward that must abort, or None."""
        epoch = self._workspace.epoch() + 1
        size, local = len(inputs), self._cfg.experts_local(len(inputs))
        if self._check_routes:
            for rank, given in enumerate(inputs):
                bad = _bad_route(self._cfg, given.ids, given.weights)
                if bad is not None:
                    code, token, expert = bad
                    return AbortRecord(Cause.BAD_INPUT, rank, rank, Phase.STAGE, expert, code, token, epoch)
        owners = [(i.ids[(i.ids >= 0) & (i.ids < self._cfg.num_experts)] // local).cpu() for i in inputs]
        for owner, rows in enumerate(torch.bincount(torch.cat(owners).long(), minlength=size).tolist()):
            if rows > self._capacity:
                return AbortRecord(Cause.POOL_OVERFLOW, owner, owner, Phase.PULL, -1, self._capacity, rows, epoch)
        return None


def _write(ys: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
    """Copy results to outputs of any kind: tensors made in inference mode can be written there only."""
    with torch.inference_mode():
        for y, result in zip(ys, results):
            y.copy_(result)


def _bad_route(cfg: MoEConfig, ids: torch.Tensor, weights: torch.Tensor) -> tuple[BadInput, int, int] | None:
    """(fault, token, expert id) of the first bad route of a rank, or None."""
    ordered = ids.sort(1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    faults = {
        BadInput.ID_OUT_OF_RANGE: (ids < -1) | (ids >= cfg.num_experts),
        BadInput.DUPLICATE_EXPERT: twice,
        BadInput.WEIGHT_NOT_FINITE: ~weights.isfinite() & (ids >= 0),
    }
    for code, found in faults.items():
        at = found.nonzero()
        if len(at):
            token, place = at[0].tolist()
            values = ordered[:, 1:] if code == BadInput.DUPLICATE_EXPERT else ids
            return code, token, int(values[token, place])
    return None
