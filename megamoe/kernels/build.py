"""Compile once per (kernel, spec), launch through TVM-FFI.

A device kernel is a class with a frozen `spec` (what is compiled in) and `ARGS` (DSL types of its
run-time arguments). `build` turns an instance into a function of plain ints and floats plus a stream, and
the address of a trace buffer after it when the spec asks for records (trace.py).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Protocol

import cutlass.cute as cute
import torch
from cutlass import Int64
from cutlass.cute.runtime import make_fake_stream

from ..errors import MegaMoEError

OPTIONS = "--enable-tvm-ffi"
_log = logging.getLogger(__name__)


class DeviceKernel(Protocol):
    """What `build` needs: ARGS, spec, and a cute.jit __call__(*ARGS, stream) that launches."""

    ARGS: ClassVar[tuple[type, ...]]
    spec: Hashable

    def __call__(self, *args: Any) -> None: ...


_built: dict[tuple[type, Hashable], Callable[..., None]] = {}
_lock = threading.Lock()


def capturing() -> bool:
    """Whether the current CUDA stream is being captured in a graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def compile_kernel(kernel: DeviceKernel, options: str = OPTIONS) -> Any:
    """Trace and compile for the target architecture; no cache. Needs no GPU when CUTE_DSL_ARCH is set."""
    fakes = [arg(0) for arg in kernel.ARGS]
    extra = [Int64(0)] if getattr(kernel.spec, "trace", 0) else []
    return cute.compile(kernel, *fakes, make_fake_stream(), *extra, options=options)


def build(kernel: DeviceKernel) -> Callable[..., None]:
    """The launcher of `kernel`: f(*ints and floats in ARGS order, stream handle[, trace buffer]).

    Compiles on the first call for a (class, spec) and never again in the process. Raises MegaMoEError
    inside a graph capture, where compiling is not possible: call warmup() first.
    """
    key = (type(kernel), kernel.spec)
    with _lock:
        launch = _built.get(key)
        if launch is None:
            if capturing():
                raise MegaMoEError(f"{type(kernel).__name__} is not compiled yet: call warmup() before graph capture")
            began = time.perf_counter()
            launch = _built[key] = compile_kernel(kernel)
            _log.info("compiled %s in %.2f s: %s", type(kernel).__name__, time.perf_counter() - began, kernel.spec)
    return launch


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make `device` current for a launch: the default stream's handle, 0, means that of the current device."""
    if torch.cuda.current_device() == device.index:
        return nullcontext()
    return torch.cuda.device(device)


def run(kernel: DeviceKernel, device: torch.device, *args: float) -> None:
    """Build `kernel` and launch it on `device`, on torch's current stream there."""
    launch = build(kernel)
    with on_device(device):
        launch(*args, stream_handle(device))


def stream_handle(device: torch.device) -> int:
    """CUstream of torch's current stream on `device`."""
    return torch.cuda.current_stream(device).cuda_stream
