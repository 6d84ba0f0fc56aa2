"""python -m megamoe doctor: what it says about packages, driver and settings."""

from __future__ import annotations

import ctypes
import sys

import pytest

from megamoe import __main__ as command_line
from megamoe import doctor, packages

GOOD = dict.fromkeys(packages.DSL, "4.8.1") | {"apache-tvm-ffi": "0.1.15.post2"}


def lines(findings: list[doctor.Finding]) -> dict[str, doctor.Finding]:
    """Findings by item."""
    return {finding.item: finding for finding in findings}


def install(monkeypatch: pytest.MonkeyPatch, **changes: str) -> dict[str, doctor.Finding]:
    """What is said about the DSL and the other packages with these versions; "_" in a name stands for "-"."""
    have = GOOD | {name.replace("_", "-"): text for name, text in changes.items()}
    monkeypatch.setattr(packages, "version", have.get)
    monkeypatch.setattr(doctor, "version", have.get)
    return lines([*doctor.check_dsl("cu13"), *doctor.check_packages("cu13")])


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
    assert packages.version("nvidia-cutlass-dsl") in out
    assert "its libraries" in out


def test_tested_versions_are_good(monkeypatch: pytest.MonkeyPatch) -> None:
    for ffi in ("0.1.11", "0.1.15.post2"):
        found = install(monkeypatch, apache_tvm_ffi=ffi)
        assert not found["nvidia-cutlass-dsl"].prevents and not found["apache-tvm-ffi"].prevents


def test_untested_and_old_versions_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    found = install(monkeypatch, apache_tvm_ffi="0.1.9")["apache-tvm-ffi"]
    assert found.found == "0.1.9" and found.prevents.startswith(doctor.KERNELS)
    assert "apache-tvm-ffi>=0.1.11,<0.2" in found.prevents and '".[cu13]"' in found.fix
    found = install(monkeypatch, apache_tvm_ffi="0.2.0")["apache-tvm-ffi"]
    assert "trusting results" in found.prevents and "apache-tvm-ffi>=0.1.11,<0.2" in found.prevents
    old, new = ({name.replace("-", "_"): text for name in packages.DSL} for text in ("4.7.1", "4.9.0"))
    assert install(monkeypatch, **old)["nvidia-cutlass-dsl"].prevents.startswith(doctor.KERNELS)
    assert "trusting results" in install(monkeypatch, **new)["nvidia-cutlass-dsl"].prevents


@pytest.mark.parametrize("part", ["base", "core", "cu12", "cu13"])
def test_parts_of_other_releases_are_marked(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    monkeypatch.setattr(doctor, "load", lambda name: pytest.fail(f"imports {name}, which may end anywhere"))
    found = install(monkeypatch, **{f"nvidia_cutlass_dsl_libs_{part}": "4.6.2"})["nvidia-cutlass-dsl"]
    assert f"libs-{part} 4.6.2" in found.found and "nvidia-cutlass-dsl 4.8.1" in found.found
    assert found.prevents.startswith(doctor.KERNELS) and '".[cu13]"' in found.fix


class Driver:
    """A stand-in for libcuda.so.1 whose cuInit gives an error."""

    def __init__(self, code: int, name: str = "", text: str = "") -> None:
        self.code, self.texts = code, (name, text)

    def cuDriverGetVersion(self, number: object) -> int:
        number._obj.value = 13000
        return 0

    def cuInit(self, flags: int) -> int:
        return self.code

    def _text(self, code: int, text: object, index: int) -> int:
        text._obj.value = self.texts[index].encode()
        return 0 if code == self.code and self.texts[index] else 1

    def cuGetErrorName(self, code: int, text: object) -> int:
        return self._text(code, text, 0)

    def cuGetErrorString(self, code: int, text: object) -> int:
        return self._text(code, text, 1)


def test_a_driver_that_cannot_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    name, text = "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "system has unsupported display driver"
    monkeypatch.setattr(ctypes, "CDLL", lambda path: Driver(803, name, text))
    monkeypatch.setattr(doctor, "driver_release", lambda: "580.159.03")
    (found,) = doctor.check_gpus(None)
    assert found.found == f"580.159.03 (CUDA 13.0), cuInit fails with 803, {name}: {text}"
    assert found.prevents == doctor.RUNNING and "kernel module" in found.fix
    monkeypatch.setattr(ctypes, "CDLL", lambda path: Driver(999))
    (found,) = doctor.check_gpus(None)
    assert "cuInit fails with 999, an error without a name" in found.found and found.prevents and found.fix
    monkeypatch.setattr(ctypes, "CDLL", lambda path: Driver(0))
    driver, gpu = doctor.check_gpus(None)
    assert not driver.prevents and gpu.item == "GPU"


def test_settings_that_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    for arch, blocking in (("", ""), ("sm_90a", "0")):
        monkeypatch.setenv("CUTE_DSL_ARCH", arch)
        monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", blocking)
        assert not list(doctor.check_settings())
    monkeypatch.delenv("CUTE_DSL_ARCH")
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING")
    assert not list(doctor.check_settings())
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_100a")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    found = lines(list(doctor.check_settings()))
    assert found["CUTE_DSL_ARCH"].found.startswith("sm_100a") and not found["CUTE_DSL_ARCH"].prevents
    assert "virtual worlds" in found["CUDA_LAUNCH_BLOCKING"].prevents and found["CUDA_LAUNCH_BLOCKING"].fix


def test_single_accumulation_is_a_note_and_no_fault() -> None:
    note = lines(doctor.collect())["note"]
    assert 'accum="single"' in note.found and not note.prevents


def test_commands_fit_a_copied_package(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(packages, "__file__", "/env/site-packages/megamoe/packages.py")
    monkeypatch.setattr(doctor, "load", lambda name: (None, f"No module named {name!r}"))
    doctor.main()
    out = capsys.readouterr().out
    assert 'pip install "megamoe[cu13]"' in out and "-e" not in out.split()
