"""What the two FlashInfer peers share: runtime, weights, and one layer at a time, through its public API.

Both backends get bf16 experts and make their own FP8 from them, and are timed from bf16 tokens to bf16 results
(`layer.forward`). A layer is made for each T with that T as its capacity, because both backends work in the whole
capacity; its launch settings come from FlashInfer's own table. The pull backend needs NVSHMEM: with several ranks
it shares the one that our world started, with one rank it runs on plain CUDA memory (MEGA_NO_DIST=1).
"""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from . import Experts, Peer, Point, why_no_hopper

DEFAULT_SCALE = 8.0 / (0.95 * 448.0)
"""Static activation scale of FlashInfer's own benchmark, for a pack without one."""


def as_bytes(t: Tensor) -> Tensor:
    """One-byte formats as uint8, because torch cannot copy all of them; others as they are."""
    return t.view(torch.uint8) if t.element_size() == 1 else t


def join(parts: Iterable[dict[str, Tensor]], count: int) -> dict[str, Tensor]:
    """Tensors [n, ...] of a few experts at a time, copied into one [count, ...] a name as they come."""
    whole: dict[str, Tensor] = {}
    first = 0
    for part in parts:
        for name, t in part.items():
            if name not in whole:
                whole[name] = torch.empty(count, *t.shape[1:], dtype=t.dtype, device=t.device)
            as_bytes(whole[name])[first : first + t.shape[0]].copy_(as_bytes(t))
        first += next(iter(part.values())).shape[0]
    return whole


class _Group:
    """The torch.distributed group of a run with one rank: FlashInfer wants one all the same, and not gloo's."""

    users: ClassVar[set[Any]] = set()
    made = False

    @classmethod
    def join(cls, user: Any, device: torch.device) -> None:
        """Make the group unless there is one."""
        if not dist.is_initialized():
            own = dict(backend="nccl", device_id=device) if device.type == "cuda" else dict(backend="gloo")
            dist.init_process_group(**own, store=dist.HashStore(), rank=0, world_size=1)
            cls.made = True
        cls.users.add(user)

    @classmethod
    def leave(cls, user: Any) -> None:
        """Destroy the group that was made here with its last user."""
        cls.users.discard(user)
        if cls.made and not cls.users:
            cls.made = False
            dist.destroy_process_group()


class FlashInfer(Peer):
    """What pull and push share: runtime, weights, one layer at a time."""

    graphable = True
    _config_name = ""
    _ids = torch.int64

    def __init__(self) -> None:
        self._runtime: Any = None
        self._source: Experts | None = None
        self._weights: Any = None
        self._layer: Any = None
        self._tensors: Any = None
        self._device = torch.device("cpu")

    def why_not(self, point: Point) -> str | None:
        reason = why_no_hopper(point.device) or self._unsupported(point)
        if reason is not None:
            return reason
        if importlib.util.find_spec("flashinfer") is None:
            return "flashinfer is not installed"
        self._environment(point)
        try:
            from flashinfer import moe_ep
        except Exception as error:  # its own requirements fail in many ways
            return f"flashinfer.moe_ep cannot be imported: {type(error).__name__}: {error}"
        return None if hasattr(moe_ep, self._config_name) else f"this flashinfer has no {self._config_name}"

    def _unsupported(self, point: Point) -> str | None:
        """Why this backend cannot compute the point's layer, or None."""
        raise NotImplementedError

    def _environment(self, point: Point) -> None:
        """Settings that FlashInfer reads when it is imported or started, unless the caller has set them."""
        os.environ.setdefault("FLASHINFER_MOE_EP_KNOB_CACHE", "off")  # its own table only

    def _start(self, point: Point) -> Any:
        """FlashInfer's bootstrap of this rank; starts its runtime once."""
        from flashinfer import moe_ep

        self._environment(point)
        _Group.join(self, point.device)
        place = dict(world_size=point.world_size, rank=point.rank, device=point.device.index)
        boot = moe_ep.BootstrapConfig(**place, auto_bootstrap=False)
        if self._runtime is None:
            self._runtime = moe_ep.bootstrap_moe_ep_runtime(boot, self._needs(boot))
        return boot

    def _needs(self, boot: Any) -> frozenset[str]:
        """What of FlashInfer's runtime this backend needs."""
        raise NotImplementedError

    def _config(self, point: Point, scales: tuple[float, float]) -> Any:
        """The backend's config of a point."""
        raise NotImplementedError

    def _convert(self, point: Point, experts: Experts, scales: tuple[float, float]) -> Any:
        """The backend's weights."""
        raise NotImplementedError

    def prepare(self, point: Point, weights: Experts, inputs: tuple) -> None:
        from flashinfer import moe_ep

        self._drop_layer()
        self._device = point.device
        boot = self._start(point)
        scales = weights.pack.x_scale or DEFAULT_SCALE, weights.pack.act_scale or DEFAULT_SCALE
        if self._source is not weights:
            self._source = self._weights = None
            self._weights = self._convert(point, weights, scales)
            self._source = weights
        cfg = point.cfg
        sizes = dict(num_experts=cfg.num_experts, max_tokens_per_rank=point.tokens, token_hidden_size=cfg.hidden)
        backend = moe_ep.MegaConfig(
            megakernel=self._config(point, scales),
            quantize_input=True,
            preprocess_weights=False,
            transformed_weights=self._weights,
        )
        fleet = moe_ep.FleetParams(**sizes)
        self._layer = moe_ep.MoEEpLayer(bootstrap=boot, fleet_params=fleet, weights=None, backend=backend)
        x, ids, route = inputs
        self._tensors = moe_ep.MoEEpTensors(
            hidden_states=x.contiguous(), topk_ids=ids.to(self._ids).contiguous(), topk_weights=route.float()
        )
        with self.compiling():
            self.run()
            self._wait()

    def run(self) -> Tensor:
        return self._layer.forward(self._tensors)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _drop_layer(self) -> None:
        """Destroy the layer and its workspace. Collective."""
        if self._layer is None:
            return
        self._wait()
        layer, self._layer, self._tensors = self._layer, None, None
        layer.destroy()
        del layer
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        self._drop_layer()
        self._source = self._weights = None
        if self._runtime is not None:
            from flashinfer import moe_ep

            runtime, self._runtime = self._runtime, None
            moe_ep.finalize_moe_ep_runtime(runtime)
        _Group.leave(self)
