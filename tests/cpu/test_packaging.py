"""pyproject, constraints, Makefile, CI and README agree with each other and with tools/setup_env.py."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import megamoe
from megamoe import __main__ as command_line
from megamoe import packages

ROOT = Path(__file__).resolve().parents[2]


sys.path.append(str(ROOT / "tools"))
setup_env = importlib.import_module("setup_env")


def names(group: str) -> dict[str, str]:
    """Requirements of a list in pyproject.toml: name with extras -> the rest."""
    return dict(re.fullmatch(r"([\w.\[\]-]+)(.*)", line).groups() for line in setup_env.requirements(group))


def test_pins() -> None:
    runtime = names("dependencies")
    assert {name: runtime[name] for name in packages.TESTED} == packages.TESTED
    assert "==" not in runtime["torch"], "the torch pin of CI belongs in constraints-ci.txt"
    assert "cuda-python" in runtime
    assert names("cu12").keys() == {"nvshmem4py-cu12"}
    assert names("cu13")["nvidia-cutlass-dsl[cu13]"] == packages.TESTED["nvidia-cutlass-dsl"]
    assert "nvshmem4py-cu13" in names("cu13")
    assert {"hypothesis", "pytest", "setuptools"} == names("test").keys()
    text = (ROOT / "pyproject.toml").read_text()
    assert re.search(r'^version = "(.+)"$', text, re.MULTILINE)[1] == megamoe.__version__
    readme = (ROOT / "README.md").read_text()
    assert all(f"{name}{wanted}" in readme for name, wanted in packages.TESTED.items())
    assert re.search(r"^torch==\d+\.\d+\.\d+$", (ROOT / "constraints-ci.txt").read_text(), re.MULTILINE)


def test_make_doctor_installs_nothing() -> None:
    command = ["make", "--no-print-directory", "-n", "doctor", "PYTHON=some-python"]
    outside = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}  # tests run under make as well
    done = subprocess.run(command, cwd=ROOT, env=outside, capture_output=True, text=True)
    assert done.stdout.strip() == "some-python -m megamoe doctor"


def test_readme_commands_exist() -> None:
    make = (ROOT / "Makefile").read_text()
    readme = (ROOT / "README.md").read_text()
    wanted = set(re.findall(r"\bmake ([a-z]+)", readme))
    assert {"demo", "test"} <= wanted
    for target in wanted:
        assert re.search(rf"^{target}:", make, re.MULTILINE), f"README names make {target}"
    known = set(re.findall(r"\{([a-z,]+)\}", command_line.parser().format_usage())[0].split(","))
    assert set(re.findall(r"-m megamoe ([a-z]+)", readme)) <= known
    ci = ROOT / ".ci" / "run"
    assert "make test" in ci.read_text()
    assert os.access(ci, os.X_OK)


@pytest.mark.parametrize("flag", ["--virtual=0", "--virtual=9", "--tokens=0", "--timeout-s=inf", "--fp8=e3m4"])
def test_demo_refuses_bad_flags(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_line.main(["demo", flag])
    assert flag.split("=")[0] in capsys.readouterr().err


def test_readme_shows_the_example_as_it_is() -> None:
    code = (ROOT / "examples" / "one_gpu.py").read_text().split('"""', 2)[2].strip()
    assert code in (ROOT / "README.md").read_text()


def test_readme_pictures_can_be_seen_from_elsewhere() -> None:
    urls = re.findall(r'^Homepage = "https://github.com/(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    root = f"https://raw.githubusercontent.com/{urls[0]}/main/"
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", (ROOT / "README.md").read_text())
    assert pictures
    for url in pictures:
        assert url.startswith(root) and (ROOT / url.removeprefix(root)).is_file(), url


def test_changelog_has_this_version() -> None:
    heads = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heads[0] == "Unreleased" and megamoe.__version__ in heads


def test_ci_fails_where_the_second_pair_is_missing() -> None:
    assert re.search(r'^"\$py" tools/second_pair.py(?!.*\|\|)', (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
