"""Habits of the sources that a linter does not check: sizes, annotations, docstrings, words."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megamoe"
MAX_FILE, MAX_FUNCTION = 600, 150
BUILT = {"__pycache__", "build", "dist", "dump"}
Function = ast.FunctionDef | ast.AsyncFunctionDef

# Split, so that this file does not hold them: machine paths, hosts of registries and model hubs.
WORDS = [
    "/wo" + "rk/",
    "/ro" + "ot/",
    "pypi" + ".org",
    "python" + "hosted",
    "download." + "pytorch",
    "hugging" + "face.co",
]
TEXT = {".py", ".md", ".toml", ".txt", ".json", ".jsonl", ".csv", ".ipynb", ".sh", ".cfg", ".yml", ".yaml", ""}


def repository_files() -> list[Path]:
    """Files of the checkout, without hidden folders (.ci apart), caches and build outputs."""
    files = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [
            f for f in folders if (f == ".ci" or f[0] != ".") and f not in BUILT and not f.endswith(".egg-info")
        ]
        files += [Path(folder) / name for name in names if name != ".git"]
    return sorted(files)


def python_files() -> list[Path]:
    """The project's Python files, tests and tools included."""
    return [path for path in repository_files() if path.suffix == ".py"]


def name_of(path: Path) -> str:
    """A file's path in the checkout, for test ids and messages."""
    return str(path.relative_to(ROOT))


def public_functions(tree: ast.Module) -> list[tuple[str, Function, ast.ClassDef | None]]:
    """(name, node, its class) of public functions of the module and methods of its public classes."""
    found: list[tuple[str, Function, ast.ClassDef | None]] = []
    for node in tree.body:
        if isinstance(node, Function) and not node.name.startswith("_"):
            found.append((node.name, node, None))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for item in node.body:
                public = isinstance(item, Function) and (item.name == "__init__" or not item.name.startswith("_"))
                if public:
                    found.append((f"{node.name}.{item.name}", item, node))
    return found


def bare_arguments(node: Function, is_method: bool) -> list[str]:
    """Arguments without annotation, "return" included; a device function may return registers without one."""
    static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list)
    spec = node.args
    args = [*spec.posonlyargs, *spec.args][1 if is_method and not static else 0 :] + spec.kwonlyargs
    args += [arg for arg in (spec.vararg, spec.kwarg) if arg]
    bare = [arg.arg for arg in args if arg.annotation is None and arg.arg not in ("loc", "ip")]  # the DSL's own
    device = any("cute." in ast.unparse(decorator) for decorator in node.decorator_list)
    return bare + (["return"] if node.returns is None and not device else [])


def described_elsewhere(node: Function, owner: ast.ClassDef | None) -> bool:
    """True where another docstring does: properties and kernels (their class's), overrides (the base's)."""
    marks = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
    if node.name == "__init__" or "property" in marks or (owner and "cute.kernel" in marks):
        return True
    return bool(owner and owner.bases)


@pytest.mark.parametrize("path", python_files(), ids=name_of)
def test_sizes(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_FILE, f"{name_of(path)} has over {MAX_FILE} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, Function):
            lines = node.end_lineno - node.lineno + 1
            assert lines <= MAX_FUNCTION, f"{name_of(path)}: {node.name} has {lines} lines, over {MAX_FUNCTION}"


@pytest.mark.parametrize("path", [p for p in python_files() if p.is_relative_to(PACKAGE)], ids=name_of)
def test_public_names_are_annotated_and_described(path: Path) -> None:
    tree = ast.parse(path.read_text())
    wrong = [] if ast.get_docstring(tree) or not tree.body else ["the module has no docstring"]
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and not ast.get_docstring(node):
            wrong.append(f"{node.name} has no docstring")
    for name, node, owner in public_functions(tree):
        bare = bare_arguments(node, owner is not None)
        if bare:
            wrong.append(f"{name}: no annotation of {', '.join(bare)}")
        if not ast.get_docstring(node) and not described_elsewhere(node, owner):
            wrong.append(f"{name} has no docstring")
    assert not wrong, f"{name_of(path)}: " + "; ".join(wrong)


def test_package_is_python_only() -> None:
    other = [name_of(p) for p in repository_files() if p.is_relative_to(PACKAGE) and p.suffix != ".py"]
    assert other == ["megamoe/py.typed"]


def test_no_machine_paths_or_hosts() -> None:
    found = []
    for path in repository_files():
        if path.suffix in TEXT:
            text = path.read_text(errors="replace")
            found += [f"{name_of(path)}: {word}" for word in WORDS if word in text]
    assert not found
