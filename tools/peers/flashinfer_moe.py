"""FlashInfer's two Hopper MegaMoE backends (flashinfer.moe_ep, written for 0.7.4): pull and push."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import Experts, Launch, Point
from .flashinfer_base import FlashInfer, join


class Pull(FlashInfer):
    """sm90_fp8_fp8_bf16_pull_cutedsl, in the config's scale mode, with the settings of its published figures."""

    name = "flashinfer_pull"
    note = "routing weight on the activation, scales of 64 of its columns (block); single accumulation (tensor)"
    _config_name = "Sm90_Fp8_Fp8_Bf16_PullCutedsl_MegaMoeConfig"

    def _unsupported(self, point: Point) -> str | None:
        return "a token's routes must fit a warp (top_k <= 32)" if point.cfg.top_k > 32 else None

    def _environment(self, point: Point) -> None:
        super()._environment(point)
        if point.world_size == 1:
            os.environ.setdefault("MEGA_NO_DIST", "1")

    def _needs(self, boot: Any) -> frozenset[str]:
        from flashinfer.moe_ep.core.runtime import sm90_pull_fp8_runtime_requirements

        return sm90_pull_fp8_runtime_requirements(boot)

    def _mode(self, point: Point) -> dict[str, Any]:
        cfg = point.cfg
        return dict(kind=f"fp8_{cfg.fp8}", fp8_scale_mode="blockwise" if cfg.scale == "block" else "per_tensor")

    def _config(self, point: Point, scales: tuple[float, float]) -> Any:
        from flashinfer import moe_ep

        return getattr(moe_ep, self._config_name)(
            intermediate_size=point.cfg.intermediate,
            top_k=point.cfg.top_k,
            **self._mode(point),
            load_balance_mode="atomic_counter",
            gate_up_clamp=point.cfg.clamp,
            fc1_activation_dequant_scale=scales[0],
            fc2_activation_dequant_scale=scales[1],
        )

    def _convert(self, point: Point, experts: Experts, scales: tuple[float, float]) -> Any:
        from flashinfer import moe_ep

        cfg, shared = point.cfg, {}

        def parts() -> Iterable[dict[str, Tensor]]:
            for w13, w2 in experts.chunks():
                legs = moe_ep.preprocess_sm90_pull_fp8_mega_weights(
                    moe_ep.MoEWeightPack(w13=w13, w2=w2),
                    **dict(intermediate_size=cfg.intermediate, hidden_size=cfg.hidden, **self._mode(point)),
                    fc1_activation_dequant_scale=scales[0],
                    fc2_activation_dequant_scale=scales[1],
                )
                part = {}
                for number, (w, plane, act, scale) in enumerate(legs):
                    # (n, K, N) with K next to each other: a view of rows
                    part |= {f"w{number}": w.transpose(1, 2), f"plane{number}": plane}
                    part |= {} if scale is None else {f"scale{number}": scale}
                    shared[number] = act
                yield part

        whole = join(parts(), experts.count)
        legs = ((whole[f"w{n}"].transpose(1, 2), whole[f"plane{n}"], shared[n], whole.get(f"scale{n}")) for n in (0, 1))
        return tuple(legs)

    def parts(self) -> dict[str, Launch]:
        self._layer.stage_inputs(self._tensors)
        return {"compute": lambda: self._layer.compute_staged(output=None)}


class Push(FlashInfer):
    """sm90_fp8_fp8_bf16_push_cuda with its fused FC1 epilogue; CUDA C++ that it compiles with nvcc when first used."""

    name = "flashinfer_push"
    note = "rows return as FP8, one a token and rank"
    _config_name = "Sm90_Fp8_Fp8_Bf16_PushCuda_MegaMoeConfig"
    _ids = torch.int32

    def _unsupported(self, point: Point) -> str | None:
        cfg = point.cfg
        if cfg.scale != "block" or cfg.fp8 != "e4m3":
            return "has block scales and E4M3 only"
        if cfg.clamp is not None:
            return "has no clamp"
        return None if cfg.top_k in (1, 2, 4, 6, 8) else f"top_k must be 1, 2, 4, 6 or 8, not {cfg.top_k}"

    def why_not(self, point: Point) -> str | None:
        reason = super().why_not(point)
        if reason is not None:
            return reason
        import flashinfer

        if not (Path(flashinfer.__file__).parent / "data").is_dir():
            return "this flashinfer has no CUDA sources (flashinfer/data)"
        nvcc = shutil.which("nvcc") or Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", "nvcc").exists()
        if not nvcc or not shutil.which("ninja"):
            return f"needs {'ninja' if nvcc else 'nvcc'} to compile its kernels"
        return None

    def _needs(self, boot: Any) -> frozenset[str]:
        from flashinfer.moe_ep.core.runtime import TORCH_DIST

        return frozenset({TORCH_DIST})

    def _config(self, point: Point, scales: tuple[float, float]) -> Any:
        from flashinfer import moe_ep

        return getattr(moe_ep, self._config_name)(
            **dict(intermediate_size=point.cfg.intermediate, top_k=point.cfg.top_k, fuse_fc1_epilogue=True),
            **dict(dedup_dispatch=True, grouped_combine=True, payload_dtype="fp8", combine_dtype="fp8"),
        )

    def _convert(self, point: Point, experts: Experts, scales: tuple[float, float]) -> Any:
        from flashinfer import moe_ep

        cfg, kinds = point.cfg, []
        names = ("w13_fp8", "w13_sf", "w2_fp8", "w2_sf")

        def parts() -> Iterable[dict[str, Tensor]]:
            for w13, w2 in experts.chunks():
                made = moe_ep.preprocess_sm90_push_fp8_mega_weights(
                    moe_ep.MoEWeightPack(w13=w13, w2=w2),
                    **dict(intermediate_size=cfg.intermediate, hidden_size=cfg.hidden),
                    **dict(num_local_experts=w13.shape[0], fuse_fc1_epilogue=True),
                )
                kinds.append(type(made))
                yield {name: getattr(made, name) for name in names}

        whole = join(parts(), experts.count)
        return kinds[0](**whole, w13_interleaved=True)
