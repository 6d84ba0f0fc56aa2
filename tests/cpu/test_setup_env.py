"""tools/setup_env.py: what it finds missing, and what it does about it. No test installs anything of size."""

from __future__ import annotations

import importlib
import io
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from megamoe import packages

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tools"))
setup_env = importlib.import_module("setup_env")


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
    have["apache-tvm-ffi"] = "0.1.15.post2"
    monkeypatch.setattr(setup_env, "installed", have.get)
    assert setup_env.unmet("torch>=2.6") == "torch>=2.6 (found 2.5.1+cu124)"
    assert setup_env.unmet("nvidia-cutlass-dsl==4.8.1") == "nvidia-cutlass-dsl==4.8.1 (found 4.8.10)"
    assert setup_env.unmet("nvidia-cutlass-dsl[cu13]>=4.8.0,<4.9") is None
    assert setup_env.unmet("nvidia-cutlass-dsl>=4.9,<5") == "nvidia-cutlass-dsl>=4.9,<5 (found 4.8.10)"
    assert setup_env.unmet("nvidia-cutlass-dsl>=4,<4.8.2") == "nvidia-cutlass-dsl>=4,<4.8.2 (found 4.8.10)"
    assert setup_env.unmet("apache-tvm-ffi>=0.1.11,<0.2") is None
    assert setup_env.unmet("tqdm>=4.66") == "tqdm>=4.66"
    assert setup_env.unmet("numpy>=1.26") is None
    assert setup_env.unmet("cuda-python>=12.9") is None
    for other in ("torch", "torch~=2.6", "torch>=2.6; python_version<'3.12'"):
        with pytest.raises(ValueError, match="must be"):
            setup_env.unmet(other)


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
    have = {"torch": "2.9", "numpy": "2.0", "apache-tvm-ffi": "0.1.12", "cuda-python": "13.0", "tqdm": "5"}
    monkeypatch.setattr(setup_env, "installed", have.get)
    monkeypatch.setattr(setup_env, "driver_cuda", lambda: None)
    monkeypatch.setattr(setup_env, "dsl_libraries", lambda: set())
    monkeypatch.setattr(setup_env.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(setup_env.packages, "version", have.get)
    assert setup_env.missing("demo") == [f"nvidia-cutlass-dsl{packages.TESTED['nvidia-cutlass-dsl']}"]
    have["nvidia-cutlass-dsl"] = "4.8.1"
    assert setup_env.missing("demo") == ["nvidia-cutlass-dsl-libs-cu13"]
    monkeypatch.setattr(setup_env, "dsl_libraries", lambda: {"cu13"})
    assert setup_env.missing("demo") == ["an importable cutlass (from nvidia-cutlass-dsl)"]
    monkeypatch.setattr(setup_env.importlib.util, "find_spec", lambda name: object())
    have["nvidia-cutlass-dsl-libs-core"] = "4.6.2"
    mixed = "nvidia-cutlass-dsl 4.8.1, nvidia-cutlass-dsl-libs-core 4.6.2"
    monkeypatch.setattr(setup_env, "torch_cuda", lambda: None)
    assert setup_env.missing("demo") == [f"parts of CuTeDSL of one release (found {mixed})"]


@pytest.mark.parametrize("state", ["absent", "lacking", "complete"])
def test_setup_says_what_it_did(
    state: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    venv, ready = tmp_path / "bin" / "python", [state == "complete"]
    if state != "absent":
        venv.parent.mkdir()
        venv.touch()
    monkeypatch.setattr(setup_env, "VENV", tmp_path)
    monkeypatch.setattr(setup_env, "lacks_of", lambda python, _: [] if python == str(venv) and ready[0] else ["torch"])
    monkeypatch.setattr(setup_env, "install", lambda purpose, unfit: ready.__setitem__(0, True))
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


# ---- an environment that is there already --------------------------------------------------------


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Path, list[tuple[str, ...]]]:
    """A .venv that a user made, with a file of theirs, unfit for the demo; and the commands that were run."""
    venv, commands = tmp_path / ".venv", []
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").touch()
    (venv / "notes.txt").touch()

    def run(*command: str) -> None:
        commands.append(command)
        if "--clear" in command:
            shutil.rmtree(venv)
            (venv / "bin").mkdir(parents=True)
            (venv / "bin" / "python").touch()

    monkeypatch.setattr(setup_env, "VENV", venv)
    monkeypatch.setattr(setup_env, "run", run)
    monkeypatch.setattr(setup_env, "installer", lambda python: ("install",))
    monkeypatch.setattr(setup_env, "driver_cuda", lambda: None)
    monkeypatch.setattr(setup_env, "driver_failure", lambda: 803)
    monkeypatch.setattr(setup_env.subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 0, stdout=""))
    monkeypatch.delenv(setup_env.CLEAR, raising=False)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))  # no terminal, so nobody is asked
    monkeypatch.setattr(sys, "argv", ["setup_env.py", "demo"])

    def lacks_of(python: str, purpose: str) -> list[str]:
        return ["unfit: torch with CUDA"] if python != str(venv / "bin" / "python") or not commands else []

    monkeypatch.setattr(setup_env, "lacks_of", lacks_of)
    return venv, commands


def test_what_a_user_made_is_not_emptied_unasked(
    theirs: tuple[Path, list[tuple[str, ...]]], capsys: pytest.CaptureFixture[str]
) -> None:
    venv, commands = theirs
    with pytest.raises(SystemExit, match=r"remove \.venv, or run again with MEGAMOE_VENV_CLEAR=1"):
        setup_env.main()
    assert (venv / "notes.txt").exists() and not commands
    assert "setup: .venv is unfit: torch with CUDA. Something else made it" in capsys.readouterr().err


@pytest.mark.parametrize("answer", ["y", "N", ""])
def test_on_a_terminal_it_asks(
    theirs: tuple[Path, list[tuple[str, ...]]], monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    venv, commands = theirs
    monkeypatch.setattr(sys, "stdin", Terminal(answer + "\n"))
    monkeypatch.setattr(sys, "stderr", Terminal())
    if answer == "y":
        assert setup_env.main() == 0
    else:
        with pytest.raises(SystemExit, match=r"remove \.venv"):
            setup_env.main()
    assert "empty .venv and fill it anew? [y/N]" in sys.stderr.getvalue()
    assert (venv / "notes.txt").exists() == (not commands) == (answer != "y")


@pytest.mark.parametrize("allowed", ["variable", "marker"])
def test_what_may_be_emptied_is_filled_anew(
    theirs: tuple[Path, list[tuple[str, ...]]],
    monkeypatch: pytest.MonkeyPatch,
    allowed: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    venv, commands = theirs
    if allowed == "variable":
        monkeypatch.setenv(setup_env.CLEAR, "1")
    else:
        (venv / setup_env.MADE_HERE).touch()
    assert setup_env.main() == 0
    assert not (venv / "notes.txt").exists() and (venv / setup_env.MADE_HERE).exists()
    pins = ("-c", str(setup_env.CONSTRAINTS))
    assert commands == [
        (sys.executable, "-m", "venv", "--clear", str(venv)),
        ("install", *pins, "torch"),
        ("install", *pins, "-e", f"{setup_env.ROOT}[cu13,test]"),
    ]
    assert "cuInit gives error 803" in capsys.readouterr().err


def test_a_lacking_environment_is_filled_as_it_is(
    theirs: tuple[Path, list[tuple[str, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    venv, commands = theirs
    monkeypatch.setattr(setup_env, "lacks_of", lambda python, purpose: [] if commands else ["torch>=2.6"])
    assert setup_env.main() == 0
    assert (venv / "notes.txt").exists() and not (venv / setup_env.MADE_HERE).exists()
    assert [command[0] for command in commands] == ["install", "install"]


def test_a_folder_without_interpreter_is_not_emptied_either(theirs: tuple[Path, list[tuple[str, ...]]]) -> None:
    venv, commands = theirs
    (venv / "bin" / "python").unlink()
    with pytest.raises(SystemExit, match=r"remove \.venv"):
        setup_env.main()
    assert (venv / "notes.txt").exists() and not commands


# ---- an environment without pip ------------------------------------------------------------------


@pytest.fixture
def bare(tmp_path: Path) -> str:
    """The interpreter of a new environment without pip, as uv makes them."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    assert not setup_env.has_module(python, "pip")
    return python


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    """A wheel of one empty module."""
    path, info = tmp_path / "tiny_wheel-1.0-py3-none-any.whl", "tiny_wheel-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("tiny_wheel.py", "")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-wheel\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in [*wheel.namelist(), f"{info}/RECORD"]))
    return str(path)


@pytest.mark.parametrize("way", ["uv", "ensurepip"])
def test_an_environment_without_pip_is_filled(
    bare: str, tiny: str, way: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if way == "uv" and not shutil.which("uv"):
        pytest.skip("needs uv")
    if way == "ensurepip":
        if not setup_env.has_module(sys.executable, "ensurepip"):
            pytest.skip("this Python has no ensurepip")
        monkeypatch.setattr(setup_env.shutil, "which", lambda name: None)
    setup_env.run(*setup_env.installer(bare), tiny)
    assert setup_env.has_module(bare, "tiny_wheel")
    assert setup_env.has_module(bare, "pip") == (way == "ensurepip")


def test_uv_is_handed_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_env, "has_module", lambda python, name: False)
    monkeypatch.setattr(setup_env.shutil, "which", lambda name: "/bin/" + name)
    command = setup_env.installer("/env/bin/python")
    assert command[:5] == ("/bin/uv", "pip", "install", "--python", "/env/bin/python")
    monkeypatch.setattr(setup_env, "has_module", lambda python, name: name == "pip")
    assert setup_env.installer("/env/bin/python")[:4] == ("/env/bin/python", "-m", "pip", "install")


def test_without_any_installer_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_env, "has_module", lambda python, name: False)
    monkeypatch.setattr(setup_env.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match=r"(?s)has no pip.*install uv, or remove .venv"):
        setup_env.installer("/env/bin/python")
