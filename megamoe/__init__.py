"""megamoe: one expert-parallel FP8 Mixture-of-Experts layer for Hopper GPUs, written in CuTeDSL Python.

Importing it needs no GPU, no CuTeDSL and no NVSHMEM: names load on first use.
"""

from __future__ import annotations

import importlib
from types import ModuleType
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

_MODULES = ("kernels", "nn", "numerics", "reference")
"""Sub-modules that are public names."""

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
    "nn",
    "numerics",
    "reference",
    "world",
]


def _load(module: str) -> ModuleType:
    """A module of this package. Raises MissingDependency without torch."""
    try:
        return importlib.import_module(f".{module}", __name__)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "torch":
            raise
        from .packages import in_checkout, install

        make = 'run "make demo", which sets up .venv, or ' if in_checkout() else ""
        raise MissingDependency(
            f'megamoe needs torch: {make}{install("cu13")}; "python -m megamoe doctor" says more'
        ) from None


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return _load(name)
    if name in _LAZY:
        return getattr(_load(_LAZY[name]), name)
    import difflib

    near = difflib.get_close_matches(name, __all__, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    # The name is given so that the interpreter does not add a suggestion of its own.
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}", name=name)


def __dir__() -> list[str]:
    return sorted(__all__)
