"""The wheel and the sdist hold the whole package: each works in an environment that cannot see this checkout."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from megamoe import packages

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tools"))
setup_env = importlib.import_module("setup_env")

BUILD = """
import sys
from setuptools import build_meta
print(getattr(build_meta, sys.argv[1])(sys.argv[2]))
"""
"""Calls the build backend of pyproject.toml (PEP 517), as every build tool does."""


def build(kind: str, tree: Path, out: Path) -> Path:
    """A "wheel" or "sdist" of a source tree."""
    command = [sys.executable, "-c", BUILD, f"build_{kind}", str(out)]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return out / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A wheel of the checkout, its sdist, and under "sdist" the wheel that the sdist makes."""
    have = packages.version("setuptools")
    if not have or not packages.meets(have, ">=77"):
        pytest.skip(f"needs setuptools>=77 (found {have})")
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("built")
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, text=True
    )
    if tracked.returncode:
        pytest.skip("needs a git checkout")
    for name in filter(None, tracked.stdout.split("\0")):
        if (ROOT / name).exists():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
    sdist = build("sdist", tree, out)
    shutil.unpack_archive(sdist, out / "unpacked")
    (unpacked,) = (out / "unpacked").iterdir()
    return {"wheel": build("wheel", tree, out), "archive": sdist, "sdist": build("wheel", unpacked, unpacked / "dist")}


def contents(wheel: Path) -> dict[str, bytes]:
    """Files of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_files(built: dict[str, Path]) -> None:
    found = contents(built["wheel"])
    sources = {f"megamoe/{path.relative_to(ROOT / 'megamoe')}" for path in (ROOT / "megamoe").rglob("*.py")}
    info = {name for name in found if ".dist-info/" in name}
    assert found.keys() - info == sources | {"megamoe/py.typed"}
    assert any(name.endswith("licenses/LICENSE") for name in info)
    metadata = next(found[name].decode() for name in info if name.endswith("/METADATA"))
    assert "License-Expression: Apache-2.0" in metadata
    for name, wanted in packages.TESTED.items():
        lower, upper = wanted.split(",")
        assert f"Requires-Dist: {name}{upper},{lower}\n" in metadata
    assert contents(built["sdist"]) == found  # but for RECORD's order nothing may differ
    with tarfile.open(built["archive"]) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {"Makefile", "CHANGELOG.md", "tools/setup_env.py", "tests/cpu/test_wheels.py", ".ci/run"} <= names


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_an_installed_package_works_alone(built: dict[str, Path], kind: str, tmp_path: Path) -> None:
    """An empty environment gets it, then sight of this one's other packages: neither PYTHONPATH nor .pth files of
    theirs lead to the checkout."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    if setup_env.has_module(sys.executable, "pip"):
        install = (sys.executable, "-m", "pip", "--python", python, "install", "-qq")
    else:
        install = setup_env.installer(python)
    env = {name: text for name, text in os.environ.items() if not name.startswith(("PYTHON", "CUTE_DSL"))}
    env |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONNOUSERSITE": "1"}
    subprocess.run([*install, "--no-deps", "--no-index", str(built[kind])], cwd=tmp_path, env=env, check=True)
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    theirs = [path for path in sys.path if "site-packages" in path and Path(path).is_dir()]
    (site / "theirs.pth").write_text("\n".join(theirs) + "\n")

    def run(*args: str) -> str:
        done = subprocess.run(
            [python, "-W", "error::RuntimeWarning", *args], cwd=tmp_path, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    shown = "megamoe.__file__, packages.install('cu13'), *sys.path, sep='\\n'"
    where = f"import megamoe, sys; from megamoe import packages; print({shown})"
    file, command, *path = run("-c", where).splitlines()
    assert Path(file).is_relative_to(site) and str(ROOT) not in path
    assert command == 'pip install "megamoe[cu13]"'
    assert python in run("-m", "megamoe", "doctor")
    demo = run("-m", "megamoe", "demo")
    assert "7 kernels in" in demo and "no spills, no stack" in demo
