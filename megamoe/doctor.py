"""What this machine has, and what each missing thing prevents: python -m megamoe doctor.

Needs no GPU, and none of the packages that it looks for. Each probe yields Findings; one without `prevents` is good.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

DSL_VERSION = "4.8.1"
"""The pin of pyproject.toml; kernels are compiled and tested with this version only."""

KERNELS = "compiling and running kernels; the torch reference works"
SEVERAL = "several processes, one a GPU; one GPU and virtual ranks work"


@dataclass(frozen=True)
class Finding:
    """One line of the report. item: what was looked for. found: what is there.

    prevents: what its state makes impossible, "" when good. fix: what to do about it.
    """

    item: str
    found: str
    prevents: str = ""
    fix: str = ""


def extra(name: str) -> str:
    """The command that installs an extra of this package from a checkout."""
    return f'pip install -e ".[{name}]"'


def version(distribution: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def load(module: str) -> tuple[ModuleType | None, str]:
    """The module and "", or None and why it does not import (broken binaries raise more than ImportError)."""
    try:
        return importlib.import_module(module), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}".splitlines()[0][:90]


def driver_cuda() -> tuple[int, int] | None:
    """(major, minor) of the newest CUDA that the driver runs, or None without a driver."""
    try:
        number = ctypes.c_int()
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number)) or number.value == 0:
            return None
    except (OSError, AttributeError):
        return None
    return number.value // 1000, number.value % 1000 // 10


def driver_release() -> str:
    """The driver's own version, as in 580.159.03, or "unknown version"."""
    path = Path("/proc/driver/nvidia/version")
    text = path.read_text() if path.exists() else ""
    if not text:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            text = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout
        except (OSError, subprocess.TimeoutExpired):
            text = ""
    found = re.search(r"\d{3,}\.[\d.]+", text)
    return found.group(0) if found else "unknown version"


def wanted_extra(torch: ModuleType | None) -> str:
    """cu12 or cu13: from torch's CUDA version, else the driver's, else cu13."""
    cuda = getattr(getattr(torch, "version", None), "cuda", None)
    driver = driver_cuda()
    major = int(cuda.split(".")[0]) if cuda else driver[0] if driver else 13
    return "cu12" if major < 13 else "cu13"


def check_torch(torch: ModuleType | None, why: str) -> Finding:
    """The torch line: version, CUDA build, fit with the driver."""
    if torch is None:
        return Finding("torch", why, "everything", "pip install torch")
    cuda, driver = torch.version.cuda, driver_cuda()
    found = f"{torch.__version__} ({f'CUDA {cuda}' if cuda else 'CPU build'})"
    if driver and not cuda:
        return Finding("torch", found, "running kernels on this machine's GPU", "install a CUDA build of torch")
    if driver and cuda and int(cuda.split(".")[0]) > driver[0]:
        fix = f"update the driver, or install torch for CUDA {driver[0]}"
        return Finding("torch", found, f"running kernels (the driver is for CUDA {driver[0]}.{driver[1]})", fix)
    return Finding("torch", found)


def check_dsl(kind: str) -> Iterator[Finding]:
    """Lines of the DSL: its version against the pin, and the CUDA flavour of the libraries it loaded."""
    have = version("nvidia-cutlass-dsl")
    cutlass, why = load("cutlass")
    if cutlass is None:
        yield Finding("nvidia-cutlass-dsl", why if have else "not found", KERNELS, extra(kind))
        return
    have = have or str(getattr(cutlass, "__version__", "unknown version"))
    if have == DSL_VERSION:
        yield Finding("nvidia-cutlass-dsl", have)
    else:
        fix = f"pip install nvidia-cutlass-dsl=={DSL_VERSION}"
        yield Finding("nvidia-cutlass-dsl", have, f"trusting results ({DSL_VERSION} is what is tested)", fix)
    cuda = cutlass.CUDA_VERSION
    found, driver = f"CUDA {cuda.major}.{cuda.minor}", driver_cuda()
    if driver and cuda.major > driver[0]:
        fix = f"a new environment with {extra('cu12')}, or a driver for CUDA {cuda.major}"
        yield Finding("  its libraries", found, f"loading kernels (the driver is for CUDA {driver[0]})", fix)
    else:
        yield Finding("  its libraries", found)


def check_packages(kind: str) -> Iterator[Finding]:
    """Lines of the other Python packages."""
    for name, prevents, group in (
        ("apache-tvm-ffi", KERNELS, kind),
        ("cuda-bindings", KERNELS, kind),
        ("numpy", "everything", kind),
        ("tqdm", "progress bars of demo and warmup", kind),
        ("pytest", "running the tests", "test"),
        ("hypothesis", "running the tests", "test"),
    ):
        have = version(name)
        yield Finding(name, have) if have else Finding(name, "not found", prevents, extra(group))


def check_nvshmem(kind: str) -> Iterator[Finding]:
    """Lines of NVSHMEM: the Python binding (one flavour only) and the host library."""
    have = {name: version(f"nvshmem4py-{name}") for name in ("cu12", "cu13")}
    found = ", ".join(f"{name} {text}" for name, text in have.items() if text) or "not found"
    if all(have.values()):
        yield Finding("nvshmem4py", found, SEVERAL + " (the bindings conflict)", "a new environment with one of them")
    elif not have[kind]:
        yield Finding("nvshmem4py", found, SEVERAL, extra(kind))
    else:
        yield Finding("nvshmem4py", found)
    library = version(f"nvidia-nvshmem-{kind}")
    if library:
        yield Finding("libnvshmem", library)
    else:
        pathfinder, _ = load("cuda.pathfinder")
        try:
            path = pathfinder.load_nvidia_dynamic_lib("nvshmem_host").abs_path  # type: ignore[union-attr]
            yield Finding("libnvshmem", str(path))
        except Exception:
            yield Finding("libnvshmem", "not found", SEVERAL, extra(kind))


def check_gpus(torch: ModuleType | None) -> Iterator[Finding]:
    """Lines of the driver, each GPU, and which GPUs reach which as peers."""
    driver = driver_cuda()
    if driver is None:
        yield Finding(
            "driver", "not found", "running kernels; they compile for sm_90a here", "a machine with a Hopper GPU"
        )
        return
    yield Finding("driver", f"{driver_release()} (CUDA {driver[0]}.{driver[1]})")
    if torch is None or not torch.cuda.is_available():
        found = "none that torch can use"
        yield Finding("GPU", found, "running kernels; they compile for sm_90a here", "see torch and driver above")
        return
    count = torch.cuda.device_count()
    for index in range(count):
        gpu = torch.cuda.get_device_properties(index)
        size = f"{gpu.total_memory / 2**30:.0f} GiB, {gpu.multi_processor_count} SMs"
        found = f"{gpu.name}, sm_{gpu.major}{gpu.minor}, {size}"
        hopper = (gpu.major, gpu.minor) == (9, 0)
        bad = () if hopper else ("running kernels on it (they are for sm_90a)", "a Hopper GPU: H100, H200, H20, GH200")
        yield Finding(f"GPU {index}", found, *bad)
    for index in range(count if count > 1 else 0):
        reach = [j == index or torch.cuda.can_device_access_peer(index, j) for j in range(count)]
        found = " ".join("-" if j == index else "yes" if ok else "no" for j, ok in enumerate(reach))
        bad = () if all(reach) else ("a world over these GPUs", "GPUs joined by NVLink")
        yield Finding(f"  peers of {index}", found, *bad)


def collect() -> list[Finding]:
    """Every finding about this machine, in the order of the report."""
    torch, why = load("torch")
    kind = wanted_extra(torch)
    python = f"{platform.python_version()} {sys.executable} ({platform.system()} {platform.machine()})"
    found = [Finding("python", python)]
    found += [check_torch(torch, why), *check_dsl(kind), *check_packages(kind)]
    return [*found, *check_gpus(torch), *check_nvshmem(kind)]


def render(findings: list[Finding]) -> str:
    """The report: a table, then what is missing or wrong."""
    width = max(len(f.item) for f in findings)
    lines = [f"{'!' if f.prevents else ' '} {f.item:{width}}  {f.found}" for f in findings]
    wrong = [f for f in findings if f.prevents]
    if wrong:
        lines += ["", "What the lines marked ! prevent, and what helps:"]
        lines += [f"  {f.item.strip():{width}}  {f.prevents}\n  {'':{width}}  -> {f.fix}" for f in wrong]
    else:
        lines += ["", "Nothing is missing."]
    return "\n".join(lines)


def main() -> int:
    """Print the report. The exit status is 0 whatever is missing."""
    print(render(collect()))
    return 0
