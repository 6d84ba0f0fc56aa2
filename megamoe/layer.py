"""MegaMoE, the object a user holds: one expert-parallel MoE layer on a world."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import torch

from . import ops
from .arguments import check_layer, choose_backend
from .comm.host import check_timeout
from .comm.world import World
from .config import Knobs, MoEConfig
from .errors import ConfigError, InputError, MegaMoEError
from .forward import Call, RankForward
from .inputs import Activations, Inputs, check_inputs, check_out, quick_inputs
from .kernels import build
from .kernels.faults import NO_FAULTS, Faults
from .reference_backend import ReferenceForward
from .sched import heuristics
from .version import __version__
from .weights import ExpertWeights

_log = logging.getLogger(__name__)


def _written(out: torch.Tensor) -> torch.Tensor:
    """out, which kernels are about to write: autograd must know that what it may have saved is gone."""
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)
    return out


class MegaMoE:
    """One MoE layer: y[t] = sum over k of topk_weights[t, k] * expert topk_ids[t, k] (x[t]).

    cfg: the problem; equal on every rank.
    experts: this rank's ExpertWeights; on a VirtualWorld a list of W, one a rank.
    world: from megamoe.world() or VirtualWorld. Layers of equal cfg on it share one workspace.
    knobs: None (chosen from T) or one Knobs for every T.
    timeout_s: how long a forward may wait for peers before it aborts on every rank; None takes the world's.
    num_sms: SMs that waiting and GEMM kernels use on each rank; None takes the world's share.
    check_routes: let stage refuse ids outside -1 .. E-1, an expert twice in a token, and non-finite
        weights of live routes; a refusal aborts the forward on every rank. Unchecked, bad ids are masked.
    backend: "kernels", or "reference" for the oracle in torch operations (megamoe.reference), which runs anywhere,
        slowly, and holds a second copy of the weights. None: "reference" on a CPU device, else "kernels".

    Attributes: cfg, world, experts (one pack a local rank), layer (its number on the workspace), backend, and
    handle: what torch.ops.megamoe takes for this layer, a CPU int64 tensor.

    Any thread may call it, on any CUDA stream: forwards of a workspace, replays of graphs that hold some included, run
    one after the other, in the order of their launches. That order must be the same on every rank.

    Construction is collective and compares what must match; warmup() compiles and loads everything;
    calls then never compile, wait on the host or (with out=) allocate, and may be captured in a CUDA
    graph. Raises ConfigError, WorldError, MismatchError.
    """

    def __init__(
        self,
        cfg: MoEConfig,
        experts: ExpertWeights | Sequence[ExpertWeights],
        world: World,
        knobs: Knobs | None = None,
        timeout_s: float | None = None,
        num_sms: int | None = None,
        check_routes: bool = False,
        *,
        backend: Literal["kernels", "reference"] | None = None,
        _faults: Faults = NO_FAULTS,
        _traces: Sequence[Mapping[str, torch.Tensor]] | None = None,  # buffers of kernels.trace, one dict a local rank
    ) -> None:
        if not isinstance(world, World):
            raise ConfigError("world", type(world).__name__, "a World, from megamoe.world() or VirtualWorld()")
        packs = list(experts) if isinstance(experts, (list, tuple)) else [experts]
        error: MegaMoEError | None = None
        try:
            check_layer(cfg, packs, world, knobs, num_sms)
            if _traces is not None and len(_traces) != len(packs):
                raise ConfigError("_traces", f"{len(_traces)} dicts", f"{len(packs)}, one a rank of this process")
            self._timeout_s = check_timeout(world.timeout_s if timeout_s is None else timeout_s)
            self.backend = choose_backend(backend, world)
        except MegaMoEError as refusal:
            error = refusal
        failure = world.failure("MegaMoE", error)  # a refusal on one rank must not leave the others waiting
        if failure is not None:
            raise failure
        self.cfg, self.world, self.experts = cfg, world, packs
        self._virtual = world.kind == "virtual"
        self._check_routes, self._faults = bool(check_routes), _faults
        self._traces = _traces or [{} for _ in world.local_ranks]
        self._num_sms = [min(num_sms or world.num_sms(r), world.num_sms(r)) for r in world.local_ranks]
        x_scale, act_scale = packs[0].x_scale, packs[0].act_scale
        self._workspace = world.workspace(cfg, f"x_scale {x_scale}, act_scale {act_scale}, megamoe {__version__}")
        self.layer = self._workspace.next_layer()
        self._knobs = knobs
        self._forwards: dict[Knobs, list[RankForward]] = {}
        self._reference: ReferenceForward | None = None
        self._logged: Knobs | None = None
        self._warm = False
        self._closed = False
        self.handle = ops.register(self)

    def __repr__(self) -> str:
        if not hasattr(self, "handle"):
            return "<MegaMoE that was not made>"
        cfg, state = self.cfg, "closed" if self._closed else "warm" if self._warm else "not warmed up"
        shape = f"H {cfg.hidden}, I {cfg.intermediate}, E {cfg.num_experts}, top {cfg.top_k}, T <= {cfg.max_tokens}"
        how = "knobs by T" if self._knobs is None else repr(self._knobs)
        how = how if self.backend == "kernels" else "reference backend"
        mode = f"{cfg.fp8}, {cfg.scale} scales, {how}"
        return f"<MegaMoE layer {self.layer}: {shape}, {mode}, {state}, on {self.world!r}>"

    def __copy__(self) -> MegaMoE:
        return self  # weights and workspace are not copied; a copy of a model around it shares the layer

    def __deepcopy__(self, memo: dict) -> MegaMoE:
        return self

    def __reduce__(self) -> Any:
        raise MegaMoEError("a MegaMoE holds device memory of its world and cannot be pickled: make it anew")

    # ---- life ------------------------------------------------------------------------------------

    def warmup(self) -> None:
        """Compile and load every kernel that a forward of any T can use. Collective.

        Where all ranks are in this process a first forward calls it itself; with one process a GPU it is refused.
        Waits for this process's devices, because loading touches buffers that a forward may be using.
        """
        self._open()
        if build.capturing():
            raise MegaMoEError("warmup() cannot run inside a graph capture: call it before")
        began = time.perf_counter()
        with self._workspace.order.lock:
            self._open()  # another thread may have closed it
            self.world.synchronize()
            if self.backend == "reference":
                self._reference = ReferenceForward(
                    self.cfg, self._workspace, self.experts, self.layer, self._check_routes
                )
            else:
                self._load_kernels()
            self.world.synchronize()
            self.world.barrier("warmup")
            self._warm = True
        _log.info("warmup of %r took %.2f s", self, time.perf_counter() - began)

    def _load_kernels(self) -> None:
        """Compile, and launch once without work, the kernels of every Knobs that a forward can choose."""
        for knobs in (self._knobs,) if self._knobs else heuristics.candidates(self.cfg):
            if knobs not in self._forwards:
                self._forwards[knobs] = [
                    RankForward(
                        *(self.cfg, knobs, self._workspace, rank, pack),
                        layer=self.layer,
                        timeout_s=self._timeout_s,
                        num_sms=sms,
                        check_routes=self._check_routes,
                        faults=self._faults,
                        traces=traces,
                    )
                    for rank, pack, sms, traces in zip(
                        self.world.local_ranks, self.experts, self._num_sms, self._traces
                    )
                ]
            for rank, forward in zip(self.world.local_ranks, self._forwards[knobs]):
                device = self.world.device(rank)
                with build.on_device(device):
                    forward.load(build.stream_handle(device))
        device = self.world.device(self.world.local_ranks[0])
        with build.on_device(device):
            self._workspace.order.prepare(device)

    def close(self) -> None:
        """Forget the layer. Its workspace stays with the world, which frees it."""
        with self._workspace.order.lock:
            self._closed = True
            self._forwards.clear()
            self._reference = None
            self.experts = []
        ops.forget(self.handle)

    def __enter__(self) -> MegaMoE:
        self._open()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _open(self) -> None:
        if self._closed:
            raise MegaMoEError("this MegaMoE is closed")
        self.world.require_open("MegaMoE")

    # ---- forward ---------------------------------------------------------------------------------

    def __call__(self, x: Any, topk_ids: Any, topk_weights: Any, *, out: Any = None) -> Any:
        """Run the layer; T may differ on each rank and each call, from 0 to max_tokens.

        x: bf16 [T, H], or pre-quantised FP8 (codes [T, H] with scale="tensor", (codes, scales fp32
        [T, H/128]) with scale="block"). topk_ids: int32 or int64 [T, K], -1 = masked. topk_weights: fp32
        or bf16 [T, K]. out: bf16 [T, H] to write, else allocated. Returns y, bf16 [T, H]. On a
        VirtualWorld each is a list of W. Everything is contiguous, on the rank's device.

        Raises InputError before anything is launched (call again with good input to complete the
        round), MegaMoEAborted when an earlier forward aborted.
        """
        if torch.compiler.is_compiling() or ops.is_traced():
            return self._traced(x, topk_ids, topk_weights, out)
        return self._eager(x, topk_ids, topk_weights, out)

    def _eager(self, x: Any, topk_ids: Any, topk_weights: Any, out: Any) -> Any:
        y = self.run(x, topk_ids, topk_weights, out)
        if ops.differentiates():
            return self._without_backward(x, topk_weights, y)
        return y

    def run(self, x: Any, topk_ids: Any, topk_weights: Any, out: Any = None) -> Any:
        """__call__ without what concerns autograd and tracers; torch.ops.megamoe calls it."""
        self._open()
        if self._virtual or self.backend == "reference":
            return self._run_ranks(x, topk_ids, topk_weights, out)
        inputs = self._check(self.world.local_ranks[0], x, topk_ids, topk_weights, out)
        workspace, device = self._workspace, inputs.x.device
        with workspace.order.lock:
            self._get_ready()
            y = self._new_output(inputs) if out is None else _written(out)
            forward, call = self._forward(0, inputs.tokens), Call.of(inputs, y)
            with build.on_device(device):
                handle = workspace.order.enter(device)
                workspace.enqueueing = True  # stays set when an exception (Ctrl-C) leaves a forward half enqueued
                forward.launch(call, handle)
                workspace.order.leave()
                workspace.enqueueing = False
        return y

    def _run_ranks(self, x: Any, topk_ids: Any, topk_weights: Any, out: Any) -> Any:
        """Check the inputs of all local ranks, then run one forward after the other, each on its rank's stream."""
        ranks = self.world.local_ranks
        lists = dict(x=x, topk_ids=topk_ids, topk_weights=topk_weights, out=out)
        if not self._virtual:
            lists = {name: [value] for name, value in lists.items()}
        elif out is None:
            lists["out"] = [None] * len(ranks)
        for name, value in lists.items():
            if not isinstance(value, (list, tuple)) or len(value) != len(ranks):
                raise InputError(name, type(value).__name__, f"a list of {len(ranks)}, one a rank")
        inputs = [self._check(rank, *args) for rank, args in zip(ranks, zip(*lists.values()))]
        given = [(str(o.device), o.data_ptr(), o.nbytes) for o in lists["out"] if o is not None and o.numel()]
        given.sort()
        if any(a[0] == b[0] and b[1] < a[1] + a[2] for a, b in pairwise(given)):
            raise InputError("out", "one tensor for several ranks", "memory of its own for each rank")
        with self._workspace.order.lock:
            self._get_ready()
            ys = [self._new_output(i) if o is None else _written(o) for i, o in zip(inputs, lists["out"])]
            if self.backend == "reference":
                self.world.synchronize()  # a forward of a layer with kernels may be running on this workspace
                self._reference(inputs, ys)
                self.world.synchronize()
            else:
                self._launch_ranks(inputs, ys)
        return ys if self._virtual else ys[0]

    def _launch_ranks(self, inputs: list[Inputs], ys: list[torch.Tensor]) -> None:
        """Enqueue the forwards of all virtual ranks."""
        workspace, first = self._workspace, self.world.device(0)
        ready = [(self._forward(r, i.tokens), Call.of(i, y), y.device) for r, (i, y) in enumerate(zip(inputs, ys))]
        with build.on_device(first):
            workspace.order.enter(first)
            workspace.enqueueing = True
            self._fork()
            for rank, (forward, call, device) in enumerate(ready):
                with build.on_device(device):
                    forward.launch(call, self.world.stream(rank).cuda_stream)
            self._join()
            workspace.order.leave()
            workspace.enqueueing = False

    def _traced(self, x: Any, topk_ids: Any, topk_weights: Any, out: Any) -> Any:
        """The call that a tracer sees: an operator, or for the lists of a virtual world a break of its graph."""
        if self._virtual:
            if not torch.compiler.is_compiling() and ops.records_graph():
                raise MegaMoEError("the lists of a VirtualWorld cannot be traced in a graph: trace a layer of one rank")
            return self._untraced(x, topk_ids, topk_weights, out)
        codes, scales = x if isinstance(x, (tuple, list)) else (x, None)
        if out is None:
            return ops.forward(codes, topk_ids, topk_weights, scales, self.handle)
        ops.forward_out(codes, topk_ids, topk_weights, scales, self.handle, out=out)
        return out

    @torch._disable_dynamo
    def _untraced(self, x: Any, topk_ids: Any, topk_weights: Any, out: Any) -> Any:
        return self._eager(x, topk_ids, topk_weights, out)

    def _without_backward(self, x: Any, topk_weights: Any, y: Any) -> Any:
        """y; where an input requires grad, tied to it so that a backward pass raises."""
        if self._virtual:
            ys = [self._tied(*rank) for rank in zip(x, topk_weights, y)]
            return y if all(new is old for new, old in zip(ys, y)) else ys
        return self._tied(x, topk_weights, y)

    @staticmethod
    def _tied(x: Any, topk_weights: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        inputs = (*(x if isinstance(x, (tuple, list)) else (x,)), topk_weights)
        return ops.inference_only(y, inputs) if ops.wants_gradient(inputs) else y

    def _get_ready(self) -> None:
        """What stands between checked inputs and the first launch. Another thread may have closed the layer."""
        self._open()
        self._workspace.raise_if_unusable()
        if not self._warm:
            if self.world.kind == "nvshmem":  # it is collective, and a peer that did warm up would not join
                raise MegaMoEError("call warmup() on every rank before the first forward")
            self.warmup()

    def _new_output(self, inputs: Inputs) -> torch.Tensor:
        return torch.empty(inputs.tokens, self.cfg.hidden, dtype=torch.bfloat16, device=inputs.x.device)

    def _check(self, rank: int, x: Activations, ids: torch.Tensor, weights: torch.Tensor, out: Any) -> Inputs:
        device = self.world.device(rank)
        inputs = quick_inputs(self.cfg, device, x, ids, weights, out)
        try:
            if inputs is None:
                inputs = check_inputs(self.cfg, device, x, ids, weights)
                if out is not None:
                    check_out(self.cfg, device, out, inputs.tokens)
            if out is not None and ops.differentiates():
                self._check_tie(inputs, out)
        except InputError as error:
            if not self._virtual:
                raise
            raise InputError(f"rank {rank}: {error.name}", error.value, error.allowed) from None
        return inputs

    @staticmethod
    def _check_tie(inputs: Inputs, out: torch.Tensor) -> None:
        """Refuse an output that autograd could not be told about once it is written."""
        if ops.has_tangent(out):
            raise InputError("out", "a dual tensor", "one without a tangent")
        if ops.wants_gradient((inputs.x, inputs.scales, inputs.weights)) and (out.is_inference() or out._is_view()):
            kind = "a tensor of inference mode" if out.is_inference() else "a view"
            raise InputError("out", kind, "a tensor of its own where an input requires grad, or under torch.no_grad()")

    def _forward(self, index: int, tokens: int) -> RankForward:
        """What local rank `index` launches for T = tokens."""
        knobs = self._knobs or heuristics.choose_knobs(self.cfg, self.world.size, tokens)
        if knobs is not self._logged:
            self._logged = knobs
            _log.debug("layer %d, T = %d: %r", self.layer, tokens, knobs)
        return self._forwards[knobs][index]

    def steps(
        self, rank: int, x: Activations, topk_ids: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor
    ) -> list[Callable[[], None]]:
        """The launches of one local rank's forward into `out`, in the order of forward.STAGES, after warmup().

        For callers that time or delay kernels one by one: every rank must make all of them, in order. They
        go to the rank's own stream on a VirtualWorld, else to the current one. Inputs are those of a call
        (of one rank); raises InputError. What they launch is not ordered with forwards on other streams.
        """
        self._open()
        inputs = self._check(rank, x, topk_ids, topk_weights, out)
        own = self.world.stream(rank)
        stream = build.stream_handle(out.device) if own is None else own.cuda_stream
        return self._forward(self.world.local_ranks.index(rank), inputs.tokens).steps(Call.of(inputs, out), stream)

    def _outer_streams(self, rank: int) -> list[torch.cuda.Stream]:
        """The caller's streams around a virtual rank: of its device, and of the first one, which keeps the order."""
        devices = dict.fromkeys((self.world.device(rank), self.world.device(0)))
        return [torch.cuda.current_stream(device) for device in devices]

    def _fork(self) -> None:
        """Let every rank's stream follow the caller's (also inside a capture)."""
        for rank in self.world.local_ranks:
            for outer in self._outer_streams(rank):
                self.world.stream(rank).wait_stream(outer)

    def _join(self) -> None:
        """Let the caller's streams follow every rank's."""
        for rank in self.world.local_ranks:
            for outer in self._outer_streams(rank):
                outer.wait_stream(self.world.stream(rank))

    # ---- faults ----------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise MegaMoEAborted if a forward on this workspace is known to have aborted. Does not block.

        Known is what a forward of this rank has seen at its end; synchronize() also asks the device.
        """
        self._open()
        self._workspace.raise_if_unusable()

    def synchronize(self) -> None:
        """Wait for this process's devices, then check(); finds an abort that arrived after the last forward too."""
        self._open()
        self.world.synchronize()
        self.check()
        self._workspace.raise_if_aborted_on_device()

    def reset(self) -> None:
        """Make a workspace usable again after an abort, or after its memory lost what it held; all its layers.

        Collective. An engine that unmaps memory between requests (a "sleep mode") calls it after mapping the memory
        again and restoring the weights: arena, pools and offsets then hold nothing that a forward could use.
        """
        self._open()
        self._workspace.reset()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and getattr(self, "_forwards", None):
            warnings.warn("a MegaMoE was not closed; use it as a context manager", ResourceWarning, stacklevel=2)
