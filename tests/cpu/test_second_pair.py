"""The oldest CuTeDSL and TVM-FFI that are allowed make the same PTX as the installed ones."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megamoe import packages

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "second_pair.py"
spec = importlib.util.spec_from_file_location("second_pair", TOOL)
second_pair = importlib.util.module_from_spec(spec)
spec.loader.exec_module(second_pair)


@pytest.fixture(scope="module")
def pair() -> Path:
    """The folder of the oldest pair, installed where it can be had."""
    if packages.version(packages.DSL[0]) == packages.lowest(packages.DSL[0]):
        pytest.skip("the oldest pair is the installed one")
    quick = os.environ | {"PIP_RETRIES": "1"}
    done = subprocess.run([sys.executable, str(TOOL)], env=quick, capture_output=True, text=True, timeout=600)
    if done.returncode:
        pytest.skip(f"the oldest pair cannot be installed: {done.stderr.strip().splitlines()[-1]}")
    return Path(done.stdout.strip())


def normalised(ptx: str) -> list[str]:
    """Lines of PTX without comments, which name the compiler's build, and the PTX version, which its CUDA sets."""
    return [line for line in ptx.splitlines() if line and not re.match(r"\s*//|\.version ", line)]


def test_ptx_is_the_same(pair: Path) -> None:
    """Two processes side by side; each imports cutlass before megamoe, with CUTE_DSL_ARCH of another GPU."""
    here = os.environ | {"PYTHONPATH": str(ROOT)}
    runs = []
    for env in (here, second_pair.environment(pair)):
        command = [sys.executable, str(Path(__file__).with_name("dump_ptx.py"))]
        stale = env | {"CUTE_DSL_ARCH": "sm_100a"}
        runs.append(subprocess.Popen(command, env=stale, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    texts = [run.communicate(timeout=900) for run in runs]
    for run, (_, err) in zip(runs, texts):
        assert run.returncode == 0, err[-3000:]
        assert "CUTE_DSL_ARCH was 'sm_100a'" in err
    new, old = (json.loads(out) for out, _ in texts)
    assert old["versions"] == {name: packages.lowest(name) for name in packages.TESTED} | {
        "cutlass": packages.lowest(packages.DSL[0])
    }
    assert new["versions"] == {name: packages.version(name) for name in packages.TESTED} | {
        "cutlass": packages.version(packages.DSL[0])
    }
    assert new["ptx"].keys() == old["ptx"].keys() and len(new["ptx"]) > 30
    for name, text in new["ptx"].items():
        lines = normalised(text)
        assert ".target sm_90a" in lines and len(lines) > 200, name
        assert lines == normalised(old["ptx"][name]), f"the PTX of {name} differs"
    for found in (new, old):
        assert found["calls"].keys() == {"stage", "reduce"}
        assert all(text.startswith("RuntimeError: Got Cuda") for text in found["calls"].values()), found["calls"]
