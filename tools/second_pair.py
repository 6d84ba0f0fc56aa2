"""Install the oldest CuTeDSL and TVM-FFI that megamoe allows into a folder of their own, and print that folder.

tests/cpu/test_second_pair.py compiles kernels with them and with the installed ones. Nothing is done when the folder
is there already. Without a package index it fails. The libraries are of the CUDA flavour that is loaded here.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import setup_env

packages = setup_env.packages
VERSIONS = {name: packages.lowest(name) for name in packages.TESTED}


def folder() -> Path:
    """Where the second pair lies for this interpreter, there or not."""
    flavour = "cu13" if "cu13" in setup_env.dsl_libraries() else "cu12"
    python = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    return setup_env.ROOT / ".pairs" / "-".join([*VERSIONS.values(), flavour, python])


def environment(pair: Path) -> dict[str, str]:
    """Environment variables with which a subprocess imports the checkout's megamoe and the packages of a folder."""
    path = [setup_env.ROOT, pair / "nvidia_cutlass_dsl" / "dsl_packages", pair]
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}


def prepare() -> Path:
    """The folder, installed where it is missing. Exits with an explanation where that fails."""
    place = folder()
    if place.exists():
        return place
    flavour = place.name.split("-")[-2]
    dsl = [name for name in packages.DSL if "-libs-cu" not in name or name.endswith(flavour)]
    wanted = [f"{name}=={VERSIONS[packages.DSL[0]]}" for name in dsl]
    wanted += [f"{name}=={version}" for name, version in VERSIONS.items() if name not in dsl]
    place.parent.mkdir(exist_ok=True)
    half = tempfile.mkdtemp(dir=place.parent, prefix="half-")
    try:
        setup_env.run(*setup_env.installer(sys.executable), "--no-deps", "--target", half, *wanted)
        os.replace(half, place)
    finally:
        shutil.rmtree(half, ignore_errors=True)
    return place


if __name__ == "__main__":
    print(prepare())
