"""pyproject, constraints, Makefile, CI and README agree with each other and with tools/setup_env.py."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import megamoe
from megamoe import __main__ as command_line
from megamoe import doctor

ROOT = Path(__file__).resolve().parents[2]


def load_setup_env() -> ModuleType:
    """tools/setup_env.py as a module (tools is no package)."""
    spec = importlib.util.spec_from_file_location("setup_env", ROOT / "tools" / "setup_env.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


setup_env = load_setup_env()


def names(group: str) -> dict[str, str]:
    """Requirements of a list in pyproject.toml: name with extras -> the rest."""
    return dict(re.fullmatch(r"([\w.\[\]-]+)(.*)", line).groups() for line in setup_env.requirements(group))


def test_pins() -> None:
    runtime = names("dependencies")
    assert runtime["nvidia-cutlass-dsl"] == f"=={doctor.DSL_VERSION}"
    assert "==" not in runtime["torch"], "the torch pin of CI belongs in constraints-ci.txt"
    assert {"apache-tvm-ffi", "cuda-python"} <= runtime.keys()
    assert names("cu12").keys() == {"nvshmem4py-cu12"}
    assert names("cu13")["nvidia-cutlass-dsl[cu13]"] == f"=={doctor.DSL_VERSION}"
    assert "nvshmem4py-cu13" in names("cu13")
    assert {"hypothesis", "pytest"} == names("test").keys()
    text = (ROOT / "pyproject.toml").read_text()
    assert re.search(r'^version = "(.+)"$', text, re.MULTILINE)[1] == megamoe.__version__
    assert re.search(r"^torch==\d+\.\d+\.\d+$", (ROOT / "constraints-ci.txt").read_text(), re.MULTILINE)


@pytest.mark.parametrize("group", ["dependencies", "cu12", "cu13", "test"])
def test_setup_reads_every_requirement(group: str) -> None:
    for line in setup_env.requirements(group):
        setup_env.unmet(line)  # raises on a form that it does not know


def test_this_interpreter_is_complete() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "setup_env.py"), "test"], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout.strip()) == (0, sys.executable), done.stderr


def test_old_and_missing_versions_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    have = {"torch": "2.5.1+cu124", "nvidia-cutlass-dsl": "4.8.10", "numpy": "1.26", "cuda-bindings": "12.9.4"}
    monkeypatch.setattr(setup_env, "installed", have.get)
    assert setup_env.unmet("torch>=2.6") == "torch>=2.6 (found 2.5.1+cu124)"
    assert setup_env.unmet("nvidia-cutlass-dsl==4.8.1") == "nvidia-cutlass-dsl==4.8.1 (found 4.8.10)"
    assert setup_env.unmet("tqdm>=4.66") == "tqdm>=4.66"
    assert setup_env.unmet("numpy>=1.26") is None
    assert setup_env.unmet("cuda-python>=12.9") is None


@pytest.mark.parametrize(
    ("torch_cuda", "driver", "kind"),
    [
        ("12.8", 13000, "cu12"),
        ("13.0", 13020, "cu13"),
        (None, 12080, "cu12"),
        (None, 13000, "cu13"),
        (None, None, "cu13"),
    ],
)
def test_flavour(torch_cuda: str | None, driver: int | None, kind: str) -> None:
    assert setup_env.flavour(torch_cuda, driver) == kind


@pytest.mark.parametrize(
    ("driver", "torch_cuda", "libraries", "unfit"),
    [
        (None, None, {"cu12"}, ""),
        (13000, "13.0", {"cu12", "cu13"}, ""),
        (13000, "12.8", {"cu12"}, ""),
        (13000, None, {"cu13"}, "CPU build"),
        (12080, "13.0", {"cu13"}, "torch for CUDA 12"),
        (12080, "12.8", {"cu12", "cu13"}, "without cu13 libraries"),
        (13000, "13.0", {"cu12"}, "nvidia-cutlass-dsl-libs-cu13"),
    ],
)
def test_gpu_machines_get_a_matching_stack(
    monkeypatch: pytest.MonkeyPatch, driver: int | None, torch_cuda: str | None, libraries: set[str], unfit: str
) -> None:
    monkeypatch.setattr(setup_env, "driver_cuda", lambda: driver)
    monkeypatch.setattr(setup_env, "torch_cuda", lambda: torch_cuda)
    monkeypatch.setattr(setup_env, "dsl_libraries", lambda: libraries)
    lacks = setup_env.missing("demo")
    assert (unfit in " ".join(lacks) and len(lacks) == 1) if unfit else not lacks


def test_one_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    have = {"torch": "2.9", "numpy": "2.0", "apache-tvm-ffi": "9", "cuda-python": "13.0", "tqdm": "5"}
    monkeypatch.setattr(setup_env, "installed", have.get)
    monkeypatch.setattr(setup_env, "driver_cuda", lambda: None)
    monkeypatch.setattr(setup_env, "dsl_libraries", lambda: set())
    monkeypatch.setattr(setup_env.importlib.util, "find_spec", lambda name: None)
    assert setup_env.missing("demo") == [f"nvidia-cutlass-dsl=={doctor.DSL_VERSION}"]
    have["nvidia-cutlass-dsl"] = doctor.DSL_VERSION
    assert setup_env.missing("demo") == ["nvidia-cutlass-dsl-libs-cu13"]
    monkeypatch.setattr(setup_env, "dsl_libraries", lambda: {"cu13"})
    assert setup_env.missing("demo") == ["an importable cutlass (from nvidia-cutlass-dsl)"]


@pytest.mark.parametrize("state", ["absent", "lacking", "complete"])
def test_setup_says_what_it_did(
    state: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    venv, ready = tmp_path / "python", [state == "complete"]
    if state != "absent":
        venv.touch()
    monkeypatch.setattr(setup_env, "VENV_PYTHON", venv)
    monkeypatch.setattr(setup_env, "lacks_of", lambda python, _: [] if python == str(venv) and ready[0] else ["torch"])
    monkeypatch.setattr(setup_env, "install", lambda purpose, clear: ready.__setitem__(0, True))
    monkeypatch.setattr(sys, "argv", ["setup_env.py", "demo"])
    assert setup_env.main() == 0
    out, err = capsys.readouterr()
    assert out.strip() == str(venv)
    if state == "complete":
        assert err == "setup: using .venv\n"
    else:
        who = sys.executable if state == "absent" else ".venv"
        assert err.splitlines()[0] == f"setup: {who} lacks torch; installing into .venv"
        assert err.splitlines()[-1] == "setup: ready; for other commands: source .venv/bin/activate"


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


def test_doctor_names_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "version", lambda name: None)
    monkeypatch.setattr(doctor, "load", lambda name: (None, f"No module named {name!r}"))
    monkeypatch.setattr(doctor, "driver_cuda", lambda: None)
    assert command_line.main(["doctor"]) == 0
    out = capsys.readouterr().out
    for word in ("torch", "nvidia-cutlass-dsl", "nvshmem4py", "libnvshmem", '".[cu13]"', '".[test]"', "driver"):
        assert word in out


def test_doctor_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main() == 0
    out = capsys.readouterr().out
    assert sys.executable in out.splitlines()[0]
    assert doctor.DSL_VERSION in out
    assert "its libraries" in out


@pytest.mark.parametrize("flag", ["--virtual=0", "--virtual=9", "--tokens=0", "--timeout-s=inf", "--fp8=e3m4"])
def test_demo_refuses_bad_flags(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_line.main(["demo", flag])
    assert flag.split("=")[0] in capsys.readouterr().err


def test_readme_shows_the_example_as_it_is() -> None:
    code = (ROOT / "examples" / "one_gpu.py").read_text().split('"""', 2)[2].strip()
    assert code in (ROOT / "README.md").read_text()
