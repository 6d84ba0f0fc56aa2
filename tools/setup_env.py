"""Print the interpreter that runs megamoe, after installing what it lacks: python3 tools/setup_env.py demo|test|lint.

The active interpreter is used when its packages are complete, so nothing is downloaded on a machine that
is ready. Otherwise .venv in the checkout is used, created and filled where needed. Torch is installed
first: from constraints-ci.txt on a machine without a GPU, the newest that the driver runs elsewhere.
Then the cu12 or cu13 extra follows torch's CUDA version, else the driver's, else cu13 (compile only).

A .venv that something else made is never emptied unasked: MEGAMOE_VENV_CLEAR=1, or "y" on a terminal, allows it.
One without pip, as uv makes it, is filled by uv, else by the pip of the ensurepip module.

Standard library only. Requirements are read from pyproject.toml, so they are written once. Progress goes
to stderr; stdout holds the interpreter's path alone.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
MADE_HERE = "made-by-setup-env"
"""A file in a .venv that this script made, which it may make anew without asking."""
CLEAR = "MEGAMOE_VENV_CLEAR"
CONSTRAINTS = ROOT / "constraints-ci.txt"
OLDEST_PYTHON = (3, 10)
LAST_CU12_TORCH = "torch<2.11"  # from 2.11 on the default Linux wheels need a driver for CUDA 13
PURPOSES = ("demo", "test", "lint")


def _load_packages() -> ModuleType:
    """megamoe/packages.py by itself: importing megamoe needs a newer Python than this script."""
    spec = importlib.util.spec_from_file_location("megamoe_packages", ROOT / "megamoe" / "packages.py")
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


packages = _load_packages()
installed = packages.version


def say(text: str) -> None:
    """One line of progress on stderr."""
    print(f"setup: {text}", file=sys.stderr, flush=True)


def requirements(group: str) -> list[str]:
    """The requirement strings of one list of pyproject.toml (tomllib needs Python 3.11)."""
    text = (ROOT / "pyproject.toml").read_text()
    found = re.search(rf"^{re.escape(group)} = \[(.*?)\]$", text, re.DOTALL | re.MULTILINE)
    if found is None:
        raise SystemExit(f"setup: pyproject.toml has no list named {group}")
    return re.findall(r'"([^"]+)"', found.group(1))


def unmet(requirement: str) -> str | None:
    """What is wrong here with one requirement, as in "name>=1.2,<2" or "name[extra]==1.2", or None."""
    found = re.fullmatch(r"([\w.-]+)(?:\[[\w,]+\])?([=<>].+)", requirement)
    if found is None:
        raise ValueError(f"requirement = {requirement!r}: must be a name, then clauses of ==, >= and <")
    name, wanted = found.groups()
    have = installed(name)
    if have is None and name == "cuda-python":
        have = installed("cuda-bindings")  # cuda-python is a wrapper of it, and all that kernels use
    if have is None:
        return requirement
    return None if packages.meets(have, wanted) else f"{requirement} (found {have})"


def venv_python() -> Path:
    """The interpreter of .venv, there or not."""
    return VENV / "bin" / "python"


def driver_cuda() -> int | None:
    """Newest CUDA that the driver runs, as in 13000 for 13.0; None without a usable GPU."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        count, version = ctypes.c_int(), ctypes.c_int()
        if cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0:
            cuda.cuDriverGetVersion(ctypes.byref(version))
            return version.value
        return None
    except OSError:
        pass
    try:
        out = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"CUDA Version:\s*(\d+)\.(\d+)", out.stdout)
    return int(found[1]) * 1000 + int(found[2]) * 10 if out.returncode == 0 and found else None


def driver_failure() -> int:
    """cuInit's error; 0 when the driver starts and when there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuInit(0)
    except (OSError, AttributeError):
        return 0


def torch_cuda() -> str | None:
    """torch.version.cuda of the installed torch without importing torch; None if absent or a CPU build."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    version = Path(spec.origin).with_name("version.py")
    return runpy.run_path(str(version)).get("cuda") if version.exists() else None


def flavour(torch_version: str | None, driver: int | None) -> str:
    """cu12 or cu13: from torch's CUDA version, else the driver's, else cu13."""
    major = int(torch_version.split(".")[0]) if torch_version else driver // 1000 if driver else 13
    return "cu12" if major < 13 else "cu13"


def dsl_libraries() -> set[str]:
    """The CUDA flavours of the DSL's libraries here. With both, the DSL loads cu13."""
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    folders = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    found = {name for name in ("cu12", "cu13") for folder in folders if (folder / name).is_dir()}
    return found | {name for name in ("cu12", "cu13") if installed(f"nvidia-cutlass-dsl-libs-{name}")}


def missing(purpose: str) -> list[str]:
    """What this interpreter lacks for a purpose; "unfit:" marks what only a new environment cures."""
    if sys.version_info < OLDEST_PYTHON:
        return [f"unfit: Python {OLDEST_PYTHON[0]}.{OLDEST_PYTHON[1]} or later"]
    if purpose == "lint":
        return [] if installed("ruff") else ["ruff"]
    wanted = requirements("dependencies") + (requirements("test") if purpose == "test" else [])
    lacks = [text for text in map(unmet, wanted) if text]
    driver, cuda, libraries = driver_cuda(), torch_cuda(), dsl_libraries()
    if driver and installed("torch"):
        if cuda is None:
            lacks.append("unfit: torch with CUDA (a GPU is here, this torch is a CPU build)")
        elif int(cuda.split(".")[0]) > driver // 1000:
            lacks.append(f"unfit: torch for CUDA {driver // 1000} (the driver's; this one is for {cuda})")
    kind = flavour(cuda, driver)
    if (driver or cuda) and "cu13" in libraries and kind == "cu12":
        lacks.append("unfit: nvidia-cutlass-dsl without cu13 libraries (torch or the driver is of CUDA 12)")
    elif any("nvidia-cutlass-dsl" in text for text in lacks):
        pass  # installing it brings its libraries
    elif not libraries or (driver and kind not in libraries):
        lacks.append(f"nvidia-cutlass-dsl-libs-{kind}")
    elif importlib.util.find_spec("cutlass") is None:
        lacks.append("an importable cutlass (from nvidia-cutlass-dsl)")
    mixed = packages.mixed_parts()
    if mixed:
        lacks.append(f"parts of CuTeDSL of one release (found {mixed})")
    return lacks


def lacks_of(python: str, purpose: str) -> list[str]:
    """missing(), asked of another interpreter; a broken one is unfit."""
    out = subprocess.run([python, __file__, "--missing", purpose], stdout=subprocess.PIPE, text=True)
    return out.stdout.splitlines() if out.returncode == 0 else [f"unfit: {python} does not run"]


def base_python() -> str:
    """An interpreter that can make the venv: the active one when new enough, else one on PATH."""
    if sys.version_info >= OLDEST_PYTHON:
        return sys.executable
    for minor in (12, 13, 11, 10, 14):
        path = shutil.which(f"python3.{minor}")
        if path:
            return path
    raise SystemExit("setup: no Python 3.10 or later found; install one or pass PYTHON=...")


def run(*command: str) -> None:
    """Run a command with its output on stderr; exit with an explanation if it fails."""
    say(" ".join(command))
    if subprocess.run(command, stdout=sys.stderr).returncode:
        hint = (
            "needs the venv module (Debian: python3-venv)" if "venv" in command else "needs a package index or wheels"
        )
        raise SystemExit(f"setup: this failed: {' '.join(command)}\nsetup: it {hint}; see the output above")


def has_module(python: str, name: str) -> bool:
    """Whether an interpreter finds a module."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is None)"
    return subprocess.run([python, "-c", code], stdout=sys.stderr).returncode == 0


def installer(python: str) -> tuple[str, ...]:
    """The command, up to the requirements, that installs into an interpreter's environment: its pip's, or uv's."""
    quiet = not sys.stderr.isatty()
    if not has_module(python, "pip"):
        uv = shutil.which("uv")
        if uv:
            return (uv, "pip", "install", "--python", python, *(["-q", "--no-progress"] if quiet else []))
        if not has_module(python, "ensurepip"):
            raise SystemExit(
                f"setup: {python} has no pip, and neither uv nor the ensurepip module (Debian: python3-venv) is here.\n"
                "setup: install uv, or remove .venv and run this again with a Python that has ensurepip"
            )
        run(python, "-m", "ensurepip")
    return (python, "-m", "pip", "install", *(["-qq", "--progress-bar", "off"] if quiet else []))


def may_clear(why: list[str]) -> bool:
    """Whether .venv may be emptied: made by this script, allowed by the environment, or by "y" on a terminal."""
    if (VENV / MADE_HERE).exists() or os.environ.get(CLEAR) == "1":
        return True
    say(f".venv is unfit: {', '.join(why)}. Something else made it, so it is not emptied unasked.")
    if not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    print("setup: empty .venv and fill it anew? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def make_venv(unfit: list[str]) -> None:
    """Create .venv, or make it anew where that is allowed; exit where it is not. unfit: what is wrong with it."""
    if unfit and not may_clear(unfit):
        raise SystemExit(
            f"setup: remove .venv, or run again with {CLEAR}=1 in the environment, which empties it;\n"
            "setup: or use another environment: make ... PYTHON=path/to/python"
        )
    run(base_python(), "-m", "venv", "--clear", str(VENV))
    (VENV / MADE_HERE).write_text("tools/setup_env.py may empty this folder and fill it anew.\n")


def install(purpose: str, unfit: list[str]) -> None:
    """Create .venv where needed and install what the purpose asks for. unfit: why it has to be made anew."""
    if not venv_python().exists() and VENV.exists() and any(VENV.iterdir()):
        unfit = ["no interpreter at .venv/bin/python"]
    if unfit or not venv_python().exists():
        make_venv(unfit)
    python = str(venv_python())
    add = installer(python)
    if purpose == "lint":
        run(*add, "-c", str(CONSTRAINTS), "ruff")
        return
    driver = driver_cuda()
    failure = 0 if driver else driver_failure()
    if failure:
        say(f"cuInit gives error {failure} (make doctor names it); this machine is set up as one without a GPU")
    pins = () if driver else ("-c", str(CONSTRAINTS))
    run(*add, *pins, LAST_CU12_TORCH if driver and driver < 13000 else "torch")
    ask = f"import runpy; print(runpy.run_path({__file__!r})['torch_cuda']() or '')"
    cuda = subprocess.run([python, "-c", ask], stdout=subprocess.PIPE, text=True).stdout.strip()
    run(*add, *pins, "-e", f"{ROOT}[{flavour(cuda or None, driver)},test]")


def main() -> int:
    """Find or make an interpreter for the purpose in argv and print its path."""
    if len(sys.argv) == 3 and sys.argv[1] == "--missing":
        print("\n".join(missing(sys.argv[2])), end="")
        return 0
    if len(sys.argv) != 2 or sys.argv[1] not in PURPOSES:
        raise SystemExit(f"usage: setup_env.py {'|'.join(PURPOSES)}")
    purpose = sys.argv[1]
    lacks = lacks_of(sys.executable, purpose)
    if not lacks:
        print(sys.executable)
        return 0
    there = venv_python().exists()
    if there:
        lacks = lacks_of(str(venv_python()), purpose)
    if not lacks:
        say("using .venv")
    else:
        say(f"{'.venv' if there else sys.executable} lacks {', '.join(lacks)}; installing into .venv")
        unfit = [text.removeprefix("unfit: ") for text in lacks if text.startswith("unfit:")]
        install(purpose, unfit if there else [])
        lacks = lacks_of(str(venv_python()), purpose)
        if lacks:
            raise SystemExit(f"setup: .venv still lacks {', '.join(lacks)}")
        say("ready; for other commands: source .venv/bin/activate")
    print(venv_python())
    return 0


if __name__ == "__main__":
    os.environ.setdefault("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    sys.exit(main())
