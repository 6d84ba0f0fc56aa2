"""Who may import whom, and what `import megamoe` may load."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megamoe"

BASE = {"config", "errors", "version", "packages"}
FORMATS = BASE | {"numerics", "wire", "tensors"}
LAYER = FORMATS | {"weights", "kernels", "comm", "sched"}

# A room is a sub-package, or a module of the package itself. Each may import itself and these.
# "__init__" stands for the public names (import megamoe).
ALLOWED: dict[str, set[str]] = {
    "__init__": LAYER | {"layer", "nn", "reference"},
    "__main__": BASE | {"layer", "reference", "demo", "doctor", "__init__"},
    "demo": LAYER | {"layer", "forward", "inputs", "reference", "doctor", "__init__"},
    "doctor": BASE,
    "nn": BASE | {"layer", "ops"},
    "layer": LAYER | {"arguments", "inputs", "forward", "ops", "reference_backend"},
    "arguments": BASE | {"weights", "comm", "forward"},
    "reference_backend": BASE | {"numerics", "wire", "weights", "comm", "inputs", "reference"},
    "ops": BASE,
    "forward": LAYER | {"inputs"},
    "inputs": BASE | {"numerics", "tensors"},
    "weights": FORMATS,
    "reference": BASE | {"numerics"},
    "kernels": FORMATS | {"sched"},
    "comm": BASE | {"wire"},
    "sched": BASE,
    "wire": BASE,
    "numerics": BASE,
    "tensors": {"errors"},
    "config": {"errors"},
    "errors": set(),
    "version": set(),
    "packages": set(),
}


def room_of(path: Path) -> str:
    """The room of a source file, by its first component under megamoe/."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def target_room(names: list[str]) -> str:
    """The room that megamoe.<names> is in; a public name of the package counts as __init__."""
    if names and ((PACKAGE / names[0]).is_dir() or (PACKAGE / f"{names[0]}.py").exists() or names[0] in ALLOWED):
        return names[0]
    return "__init__"


def rooms_imported(source: str, package: list[str]) -> set[str]:
    """Rooms that a source imports anywhere, functions included. package: its package, ["megamoe", ...]."""
    rooms = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            targets = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            targets = [[*base, alias.name] for alias in node.names]
        else:
            continue
        rooms |= {target_room(names[1:]) for names in targets if names[0] == "megamoe"}
    return rooms


def sources() -> list[Path]:
    """Every Python file of the package."""
    return sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_arrows(path: Path) -> None:
    room = room_of(path)
    assert room in ALLOWED, f"{room} is a new room: add it to ALLOWED with what it may import"
    package = ["megamoe", *path.relative_to(PACKAGE).parent.parts]
    wrong = rooms_imported(path.read_text(), package) - ALLOWED[room] - {room}
    assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}; {room} may import {sorted(ALLOWED[room])}"


@pytest.mark.parametrize(
    ("line", "package", "rooms"),
    [
        ("from ..wire import pitch", ["megamoe", "comm"], {"wire"}),
        ("from .. import kernels, errors", ["megamoe", "comm"], {"kernels", "errors"}),
        ("from . import arena", ["megamoe", "comm"], {"comm"}),
        ("def f():\n    from ..kernels.fc1 import fc1", ["megamoe", "comm"], {"kernels"}),
        ("import megamoe.kernels.fc1 as k", ["megamoe"], {"kernels"}),
        ("import megamoe", ["megamoe"], {"__init__"}),
        ("from megamoe import MoEConfig", ["megamoe", "sched"], {"__init__"}),
        ("if True:\n    from .config import Knobs", ["megamoe"], {"config"}),
        ("import torch, os.path", ["megamoe"], set()),
    ],
)
def test_resolver_sees_every_form(line: str, package: list[str], rooms: set[str]) -> None:
    assert rooms_imported(line, package) == rooms


def test_allowed_has_no_cycle_of_rooms() -> None:
    order: list[str] = []
    left = {room: set(targets) - {room} for room, targets in ALLOWED.items()}
    left["demo"] = left["demo"] - {"__init__"}
    while left:
        ready = [room for room, targets in left.items() if not targets & left.keys()]
        assert ready, f"rooms in a cycle: {sorted(left)}"
        order += ready
        left = {room: targets for room, targets in left.items() if room not in ready}


def run_python(code: str) -> str:
    """stdout of a fresh interpreter that sees this checkout and no GPU."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_is_light() -> None:
    heavy = ("cutlass", "nvshmem", "tvm_ffi", "triton")
    code = f"import megamoe, sys; print(sorted({heavy!r} & sys.modules.keys()))"
    assert run_python(code.replace(f"{heavy!r}", f"set({heavy!r})")).strip() == "[]"


def test_import_leaves_cuda_alone() -> None:
    code = "import megamoe, sys; t = sys.modules.get('torch'); print(bool(t and t.cuda.is_initialized()))"
    assert run_python(code).strip() == "False"


def test_import_without_nvshmem_and_dsl() -> None:
    code = (
        "import sys\n"
        "for name in ('cutlass', 'nvshmem', 'tvm_ffi', 'cuda'):\n"
        "    sys.modules[name] = None\n"
        "import megamoe, megamoe.config, megamoe.doctor, megamoe.__main__\n"
        "print('ok')"
    )
    assert run_python(code).strip() == "ok"


def test_without_torch_the_errors_say_what_to_do() -> None:
    code = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "import megamoe, megamoe.doctor\n"
        "from megamoe.__main__ import main\n"
        "for name in ('MegaMoE', 'ExpertWeights', 'reference', 'world'):\n"
        "    try:\n"
        "        getattr(megamoe, name)\n"
        "    except megamoe.MissingDependency as error:\n"
        "        assert 'needs torch: run \"make demo\"' in str(error)\n"
        "        print(name)\n"
        "sys.stderr = sys.stdout\n"
        "assert main(['demo']) == 1"
    )
    *found, last = run_python(code).splitlines()
    assert found == ["MegaMoE", "ExpertWeights", "reference", "world"]
    assert last.startswith("megamoe demo: megamoe needs torch")


def test_public_names_are_listed_and_load() -> None:
    import megamoe
    from megamoe import kernels

    assert dir(megamoe) == sorted(megamoe.__all__)
    assert dir(kernels) == sorted(kernels.__all__)
    assert {"kernels", "numerics", "reference"} <= set(dir(megamoe))


def test_a_near_miss_names_the_name() -> None:
    import megamoe

    with pytest.raises(AttributeError, match="no attribute 'MegaMoe'; did you mean 'MegaMoE'"):
        _ = megamoe.MegaMoe
    with pytest.raises(AttributeError, match=r"no attribute 'xyzzy'$"):
        _ = megamoe.xyzzy
