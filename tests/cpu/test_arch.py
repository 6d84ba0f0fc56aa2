"""Kernels compile for sm_90a whatever CUTE_DSL_ARCH says, also when somebody else imported cutlass before."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from megamoe.errors import MegaMoEError
from megamoe.kernels import environment

ROOT = Path(__file__).resolve().parents[2]

COMPILE = """
import re, tempfile
from megamoe.kernels import build
from megamoe.kernels.catalog import catalog
reduce = next(entry for entry in catalog(quick=True) if entry.name == "reduce")
with tempfile.TemporaryDirectory() as folder:
    compiled = build.compile_kernel(reduce.make(), f"{build.OPTIONS} --keep-ptx --dump-dir {folder}")
print(re.findall(r"^.target (.*)$", compiled.artifacts.PTX, re.MULTILINE))
"""


def python(code: str, arch: str | None) -> tuple[str, str]:
    """stdout and stderr of a fresh interpreter with CUTE_DSL_ARCH at a value, or without it."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "CUTE_DSL_ARCH": arch or ""}
    if arch is None:
        del env["CUTE_DSL_ARCH"]
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip(), done.stderr


@pytest.mark.parametrize("first", ["", "import cutlass.cute\n"], ids=["megamoe first", "cutlass first"])
@pytest.mark.parametrize("arch", ["", "sm_90", "sm_100a", "sm_90a"])
def test_a_value_left_over_from_elsewhere(arch: str, first: str) -> None:
    out, err = python(first + COMPILE, arch)
    assert out == "['sm_90a']"
    assert err.count("CUTE_DSL_ARCH was") == (arch in ("sm_90", "sm_100a"))
    assert arch not in ("sm_90", "sm_100a") or f"CUTE_DSL_ARCH was {arch!r}" in err


def test_without_the_variable_and_with_one_set_too_late() -> None:
    assert python(COMPILE, None) == ("['sm_90a']", "")
    late = "import os, cutlass.cute\nos.environ['CUTE_DSL_ARCH'] = 'sm_90a'\n"
    out, err = python(late + COMPILE, "sm_80")
    assert out == "['sm_90a']" and "CUTE_DSL_ARCH was 'sm_80'" in err


def test_a_cutlass_that_keeps_its_value_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_100a")
    monkeypatch.setitem(sys.modules, "cutlass.cutlass_dsl", types.SimpleNamespace(CuTeDSL=object()))
    with pytest.raises(MegaMoEError, match=r"CUTE_DSL_ARCH = 'sm_100a'.*before cutlass is imported"):
        environment.set_arch()
