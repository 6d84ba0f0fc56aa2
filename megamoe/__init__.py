"""megamoe: one expert-parallel FP8 Mixture-of-Experts layer for Hopper GPUs, written in CuTeDSL Python.

Importing it needs no GPU, no CuTeDSL and no NVSHMEM: names load on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

from .config import Knobs, MoEConfig
from .errors import (
    AbortedBadInput,
    AbortedLayerMismatch,
    AbortedPoolOverflow,
    AbortedTimeout,
    AbortRecord,
    ArgumentError,
    ConfigError,
    InputError,
    MegaMoEAborted,
    MegaMoEError,
    MismatchError,
    MissingDependency,
    WorldError,
)
from .version import __version__

_LAZY = {
    "ExpertWeights": "weights",
    "MegaMoE": "layer",
    "VirtualWorld": "comm",
    "calibrate": "weights",
    "memory_estimate": "comm",
    "world": "comm",
}

__all__ = [
    "AbortRecord",
    "AbortedBadInput",
    "AbortedLayerMismatch",
    "AbortedPoolOverflow",
    "AbortedTimeout",
    "ArgumentError",
    "ConfigError",
    "ExpertWeights",
    "InputError",
    "Knobs",
    "MegaMoE",
    "MegaMoEAborted",
    "MegaMoEError",
    "MismatchError",
    "MissingDependency",
    "MoEConfig",
    "VirtualWorld",
    "WorldError",
    "__version__",
    "calibrate",
    "kernels",
    "memory_estimate",
    "world",
]


def __getattr__(name: str) -> Any:
    if name == "kernels":
        return importlib.import_module(".kernels", __name__)
    if name in _LAZY:
        return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
