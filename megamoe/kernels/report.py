"""What ptxas says about a kernel: registers, stack, spills. Needs no GPU."""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
from dataclasses import dataclass

from ..errors import MegaMoEError
from . import build
from .environment import ARCH

_ENTRY = re.compile(r"Compiling entry function '(\S+)'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
# C75xx: WGMMAs serialised, or a wait injected between them; "setmaxnreg ignored ..."
_COMPLAINT = re.compile(r"\(C75\d\d\)|serializ|setmaxnreg ignored", re.IGNORECASE)
_REGISTERS = re.compile(r"Used (\d+) registers")


@dataclass(frozen=True)
class CompileReport:
    """A compiled kernel. registers: a thread's, at launch; with setmaxnreg, warpgroups then trade them.

    stack, spill_stores, spill_loads: bytes of local memory, a sign of trouble above 0. smem: dynamic
    shared memory of a CTA in bytes, None when the kernel class doesn't say. ptx: PTX text. remarks: what
    ptxas printed, white space collapsed.
    """

    name: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    smem: int | None
    ptx: str
    remarks: str

    @property
    def clean(self) -> bool:
        """No local memory, WGMMAs left as they were written, setmaxnreg obeyed."""
        local = self.stack + self.spill_stores + self.spill_loads
        return local == 0 and _COMPLAINT.search(self.remarks) is None


def report(kernel: build.DeviceKernel) -> CompileReport:
    """Compile `kernel` for sm_90a (never cached) and read ptxas' figures.

    Of a class that launches several kernels, the largest figures and the first name. Raises MegaMoEError
    when there aren't as many figures as kernels, so silence doesn't pass for success.
    """
    printed = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(printed):
        options = f"{build.OPTIONS} --gpu-arch {ARCH} --keep-ptx --dump-dir {folder} remarks{{ptx}}"
        compiled = build.compile_kernel(kernel, options)
        ptx, kernels = compiled.artifacts.PTX, len(compiled.kernel_info)
    text = re.sub(r"\s+", " ", re.sub(r"\x1b\[[0-9;]*m", "", printed.getvalue()))
    names, frames, registers = (p.findall(text) for p in (_ENTRY, _FRAME, _REGISTERS))
    if not len(names) == len(frames) == len(registers) == kernels >= 1:
        raise MegaMoEError(f"{type(kernel).__name__}: {kernels} kernels, but ptxas reported: {text}")
    stack, stores, loads = (max(int(frame[i]) for frame in frames) for i in range(3))
    smem = getattr(kernel, "smem_bytes", None)
    return CompileReport(names[0], max(map(int, registers)), stack, stores, loads, smem, ptx, text)
