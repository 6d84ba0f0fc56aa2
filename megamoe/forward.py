"""One rank's staged forward: the kernels bound to a workspace, a layer's weights and Knobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch

from .comm.workspace import Workspace
from .config import Knobs, MoEConfig
from .errors import ConfigError
from .inputs import Inputs
from .kernels import trace
from .kernels.catalog import NAMES
from .kernels.exchange import Exchange, ExchangeSpec, exchange_grid
from .kernels.faults import NO_FAULTS, Faults
from .kernels.fc1 import FC1, FC1Spec
from .kernels.fc2 import FC2, FC2Spec
from .kernels.pull import Pull, PullSpec
from .kernels.reduce import Reduce, ReduceSpec, reduce_grid
from .kernels.stage import Stage, StageSpec, stage_grid
from .kernels.token_back import TokenBack, TokenBackSpec
from .weights import ExpertWeights

Launch = Callable[..., None]

STAGES = NAMES
"""The kernels of a forward, in the order of their launches."""


class Call(NamedTuple):
    """What one forward of one rank reads and writes: addresses and counts."""

    x: int
    scales: int
    ids: int
    ids_are_64: int
    weights: int
    weights_are_bf16: int
    tokens: int
    y: int
    prequantized: bool

    @classmethod
    def of(cls, inputs: Inputs, y: torch.Tensor) -> Call:
        """The call for checked inputs and an output tensor."""
        x, scales, ids, weights, tokens = inputs
        return cls(
            x.data_ptr(),
            0 if scales is None else scales.data_ptr(),
            ids.data_ptr(),
            1 if ids.dtype is torch.int64 else 0,
            weights.data_ptr(),
            1 if weights.dtype is torch.bfloat16 else 0,
            tokens,
            y.data_ptr(),
            x.dtype is not torch.bfloat16,
        )


MOST_KEPT = 128
"""Pairs of T and stream whose launches a RankForward keeps."""

EMPTY = Call(0, 0, 0, 0, 0, 0, 0, 0, False)


def check_knobs(cfg: MoEConfig, world_size: int, knobs: Knobs) -> None:
    """Raise ConfigError, without compiling, for knobs that do not fit a config."""
    FC1Spec.from_config(cfg, cfg.experts_local(world_size), knobs)
    FC2Spec.from_config(cfg, cfg.experts_local(world_size), knobs)


class RankForward:
    """Launches the seven kernels of a forward on one rank. Compiling happens in the constructor only.

    traces: buffers of kernels.trace.buffers by kernel; those kernels are compiled to write a timeline into them.
    Raises ConfigError when one is too small.
    """

    def __init__(
        self,
        cfg: MoEConfig,
        knobs: Knobs,
        workspace: Workspace,
        rank: int,
        experts: ExpertWeights,
        *,
        layer: int,
        timeout_s: float,
        num_sms: int,
        check_routes: bool = False,
        faults: Faults = NO_FAULTS,
        traces: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> None:
        world_size = workspace.world.size
        local = cfg.experts_local(world_size)
        self._cfg, self._num_sms = cfg, num_sms
        self._kept: dict[tuple[int, int], tuple[tuple[Launch, tuple], ...]] = {}  # by T and stream
        for name, buffer in traces.items():
            if buffer.shape[0] < trace.most_ctas(name, num_sms):
                raise ConfigError(f"traces[{name!r}]", tuple(buffer.shape), f"room for {num_sms} SMs")
        made = lambda name, kernel: trace.launcher(kernel, traces.get(name))  # noqa: E731
        stages = {
            pre: StageSpec.from_config(cfg, world_size, prequantized=pre, check_routes=check_routes)
            for pre in (False, True)
        }
        self._stages = {pre: made("stage", Stage(spec)) for pre, spec in stages.items()}
        self._exchange = made("exchange", Exchange(ExchangeSpec.from_config(cfg, world_size, faults)))
        self._pull = made("pull", Pull(PullSpec.from_config(cfg, world_size, knobs, faults)))
        self._fc1 = made("fc1", FC1(FC1Spec.from_config(cfg, local, knobs)))
        self._fc2 = made("fc2", FC2(FC2Spec.from_config(cfg, local, knobs)))
        self._token_back = made("token_back", TokenBack(TokenBackSpec.from_config(cfg, world_size, knobs, faults)))
        self._reduce = made("reduce", Reduce(ReduceSpec.from_config(cfg, world_size, faults)))
        self._bind(workspace, rank, experts, layer, min(round(timeout_s * 1e9), 1 << 62))

    def _bind(self, ws: Workspace, rank: int, experts: ExpertWeights, layer: int, timeout_ns: int) -> None:
        """Fix every argument that no call changes."""
        cfg = self._cfg
        at = {name: ws.address(rank, name) for name in (*ws.arena_layout, *ws.local_layout)}
        deltas, rows = ws.deltas(rank), cfg.pool_capacity(ws.world.size)
        x_scale, act_scale = experts.x_scale or 1.0, experts.act_scale or 1.0
        capacity = cfg.max_tokens * cfg.top_k
        self._control = at["control"]
        self._scratch = ws.scratch_control(rank)
        self._host, self._scratch_host = ws.host_address(rank), ws.scratch_host(rank)
        self._head = (deltas, rank)
        self._x_scale = x_scale
        self._stage_out = (at["x"], at["ids"], at["weights"], at["send_counts"], at["send_cursors"], timeout_ns)
        self._exchange_head = (deltas, rank, layer)
        self._exchange_args = (
            *(at["ids"], at["weights"], at["send_counts"], at["send_cursors"], at["send_start"]),
            *(at["counts"], at["lists"], capacity),
        )
        self._pull_args = (
            *(deltas, rank, layer, at["counts"], at["lists"], capacity, at["x"]),
            *(at["pool_x"], at["pool_meta"], at["pool_weight"], at["expert_start"], rows, self._num_sms),
        )
        self._fc1_args = (
            *(at["pool_x"], at["expert_start"], experts.w13.data_ptr(), experts.w13_scale.data_ptr()),
            *(at["pool_weight"], at["pool_act"], 0, rows, self._num_sms, x_scale, act_scale, at["tickets"]),
        )
        self._fc2_args = (
            *(at["pool_act"], at["expert_start"], experts.w2.data_ptr(), experts.w2_scale.data_ptr()),
            *(at["pool_weight"], at["pool_y"], rows, self._num_sms, act_scale, at["tickets"] + 8),
        )
        self._back_args = (
            *(deltas, rank, at["expert_start"], at["pool_meta"], at["pool_y"], at["slots"], self._num_sms),
        )
        self._reduce_args = (at["ids"], at["send_start"], at["slots"])

    def _between(self, tokens: int, stream: int) -> tuple[tuple[Launch, tuple], ...]:
        """The launches between stage and reduce, which no address of a call reaches; kept, for they cost host time."""
        found = self._kept.get((tokens, stream))
        if found is None:
            found = self._middle(self._control, tokens, stream)
            if len(self._kept) >= MOST_KEPT:
                self._kept.clear()
            self._kept[tokens, stream] = found
        return found

    def _middle(self, control: int, tokens: int, stream: int) -> tuple[tuple[Launch, tuple], ...]:
        exchange = (control, *self._exchange_head, tokens, *self._exchange_args)
        return (
            (self._exchange, (*exchange, exchange_grid(tokens, self._cfg.top_k, self._num_sms), stream)),
            (self._pull, (control, *self._pull_args, stream)),
            (self._fc1, (*self._fc1_args, stream)),
            (self._fc2, (*self._fc2_args, stream)),
            (self._token_back, (control, *self._back_args, stream)),
        )

    def _calls(self, call: Call, stream: int, dry: bool = False) -> tuple[tuple[Launch, tuple], ...]:
        """The launches of a forward and their arguments, in the order of STAGES."""
        cfg, sms, tokens = self._cfg, self._num_sms, call.tokens
        control, host = (self._scratch, self._scratch_host) if dry else (self._control, self._host)
        stage = (
            *(control, *self._head, call.x, call.scales, call.ids, call.ids_are_64),
            *(call.weights, call.weights_are_bf16, tokens, self._x_scale, *self._stage_out),
            *(stage_grid(cfg.hidden, tokens, cfg.top_k, sms), stream),
        )
        reduce = (control, *self._head, tokens, *self._reduce_args, call.y, host)
        return (
            (self._stages[call.prequantized], stage),
            *(self._middle(control, tokens, stream) if dry else self._between(tokens, stream)),
            (self._reduce, (*reduce, reduce_grid(cfg.hidden, tokens, sms), stream)),
        )

    def steps(self, call: Call, stream: int) -> list[Callable[[], None]]:
        """The launches one by one, in the order of STAGES, for callers that time or delay them."""
        return [partial(launch, *args) for launch, args in self._calls(call, stream)]

    def launch(self, call: Call, stream: int) -> None:
        """Enqueue a forward; never compiles, allocates or waits."""
        for launch, args in self._calls(call, stream):
            launch(*args)

    def load(self, stream: int) -> None:
        """Load every kernel on the device by a dry forward, so that no module load meets a waiting peer.

        A dry forward runs on the scratch control block, whose abort word is set: every kernel runs to its
        end, touches no peer and waits for nobody.
        """
        for prequantized in (False, True):
            for launch, args in self._calls(EMPTY._replace(prequantized=prequantized), stream, dry=True):
                launch(*args)
