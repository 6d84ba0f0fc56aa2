"""What this machine has, and what each missing thing prevents: python -m megamoe doctor.

Needs no GPU, and none of the packages that it looks for. Each probe yields Findings; one without `prevents` is good.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from . import packages
from .packages import install, version

KERNELS = "compiling and running kernels, and MegaMoE; megamoe.reference works"
RUNNING = "running kernels; they compile for sm_90a here"
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


def driver_error() -> tuple[int, str] | None:
    """cuInit's error, (number, "its name: its text"), or None: the driver starts, or there is none."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        code = cuda.cuInit(0)
        if code == 0:
            return None
        texts = []
        for ask in (cuda.cuGetErrorName, cuda.cuGetErrorString):
            text = ctypes.c_char_p()
            if ask(code, ctypes.byref(text)) == 0 and text.value:
                texts.append(text.value.decode(errors="replace"))
    except (OSError, AttributeError):
        return None
    return code, ": ".join(texts) or "an error without a name"


DRIVER_FIXES = {
    100: "make a GPU visible: nvidia-smi, CUDA_VISIBLE_DEVICES, the container's --gpus",
    802: "start the fabric manager: systemctl status nvidia-fabricmanager",
    803: "libcuda and the kernel module are of different releases: reboot after an update, or, in a container, "
    "take no libcuda of its own (LD_LIBRARY_PATH, cuda-compat)",
    804: "take the driver's own libcuda, not the cuda-compat package's (LD_LIBRARY_PATH)",
}
"""cuInit's errors that have a usual cause (CUDA driver API, CUresult): no device, system not ready, driver
mismatch, compatibility mode that this GPU lacks."""


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


def wanted_install(torch: ModuleType | None) -> str:
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


def judge(name: str, have: str, kind: str) -> Finding:
    """The line of a package that is here: its version against packages.TESTED."""
    wanted = packages.TESTED[name]
    if packages.meets(have, wanted):
        return Finding(name, have)
    fix = f"{install(kind)} installs {name}{wanted}"
    if packages.is_below(have, wanted):
        return Finding(name, have, f"{KERNELS} ({name}{wanted} is needed)", fix)
    return Finding(name, have, f"trusting results ({name}{wanted} is what is tested)", fix)


def check_dsl(kind: str) -> Iterator[Finding]:
    """Lines of the DSL: its version, parts of other releases, and the CUDA flavour of the libraries it loaded."""
    name = packages.DSL[0]
    have, mixed = version(name), packages.mixed_parts()
    if mixed:
        fix = f"{install(kind)} installs one release"
        yield Finding(name, mixed, f"{KERNELS} (all parts have to be of one release)", fix)
        return  # importing such a mix may end anywhere
    cutlass, why = load("cutlass")
    if cutlass is None:
        yield Finding(name, why if have else "not found", KERNELS, install(kind))
        return
    yield judge(name, have or str(getattr(cutlass, "__version__", "unknown version")), kind)
    cuda = cutlass.CUDA_VERSION
    found, driver = f"CUDA {cuda.major}.{cuda.minor}", driver_cuda()
    if driver and cuda.major > driver[0]:
        fix = f"a new environment with {install('cu12')}, or a driver for CUDA {cuda.major}"
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
        if not have:
            yield Finding(name, "not found", prevents, install(group))
        else:
            yield judge(name, have, kind) if name in packages.TESTED else Finding(name, have)


def check_nvshmem(kind: str) -> Iterator[Finding]:
    """Lines of NVSHMEM: the Python binding (one flavour only) and the host library."""
    have = {name: version(f"nvshmem4py-{name}") for name in ("cu12", "cu13")}
    found = ", ".join(f"{name} {text}" for name, text in have.items() if text) or "not found"
    if all(have.values()):
        yield Finding("nvshmem4py", found, SEVERAL + " (the bindings conflict)", "a new environment with one of them")
    elif not have[kind]:
        yield Finding("nvshmem4py", found, SEVERAL, install(kind))
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
            yield Finding("libnvshmem", "not found", SEVERAL, install(kind))


def check_gpus(torch: ModuleType | None) -> Iterator[Finding]:
    """Lines of the driver, each GPU, and which GPUs reach which as peers."""
    driver = driver_cuda()
    if driver is None:
        yield Finding("driver", "not found", RUNNING, "a machine with a Hopper GPU")
        return
    found, error = f"{driver_release()} (CUDA {driver[0]}.{driver[1]})", driver_error()
    if error:
        fix = DRIVER_FIXES.get(error[0], "see nvidia-smi and the kernel's log (dmesg)")
        yield Finding("driver", f"{found}, cuInit fails with {error[0]}, {error[1]}", RUNNING, fix)
        return
    yield Finding("driver", found)
    if torch is None or not torch.cuda.is_available():
        found = "none that torch can use"
        yield Finding("GPU", found, RUNNING, "see torch and driver above")
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


def check_settings() -> Iterator[Finding]:
    """Lines of environment variables that matter here, where they are set."""
    arch = os.environ.get("CUTE_DSL_ARCH", "")
    if arch not in ("", "sm_90a"):
        yield Finding("CUTE_DSL_ARCH", f"{arch}, which importing megamoe.kernels changes to sm_90a")
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        found = os.environ["CUDA_LAUNCH_BLOCKING"]
        prevents = "virtual worlds of several ranks, whose forwards wait for each other"
        yield Finding("CUDA_LAUNCH_BLOCKING", found, prevents, "unset CUDA_LAUNCH_BLOCKING")


NOTE = (
    'accum="single" is imprecise where what is summed has one sign: FP8 tensor cores truncate as they add '
    '(FC1 is off by 0.13 to 0.15 at K = 7168 on all-positive data); "promoted", the default, is not'
)


def collect() -> list[Finding]:
    """Every finding about this machine, in the order of the report."""
    torch, why = load("torch")
    kind = wanted_install(torch)
    python = f"{platform.python_version()} {sys.executable} ({platform.system()} {platform.machine()})"
    found = [Finding("python", python)]
    found += [check_torch(torch, why), *check_dsl(kind), *check_packages(kind)]
    return [*found, *check_gpus(torch), *check_nvshmem(kind), *check_settings(), Finding("note", NOTE)]


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
