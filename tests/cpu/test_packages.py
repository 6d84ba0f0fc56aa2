"""Versions: their order, the tested ranges, and what importing megamoe.kernels says about what is installed."""

from __future__ import annotations

import itertools
import time
import warnings

import pytest

from megamoe import packages
from megamoe.errors import MissingDependency
from megamoe.kernels import environment

ASCENDING = [
    *("0.1.dev3", "0.1a1.dev2", "0.1a1", "0.1b2", "0.1rc1", "0.1", "0.1.post0", "0.1.9", "0.1.10", "0.1.11"),
    *("0.1.15", "0.1.15.post1.dev1", "0.1.15.post1", "0.1.15.post2", "0.2.0rc1", "0.2", "4.8.0", "4.8.1", "4.8.10"),
    *("4.9.0.dev1", "4.9.0a1", "4.9", "2024.1", "1!0.1"),
]
"""As PEP 440 orders them."""

GOOD = {
    "nvidia-cutlass-dsl": "4.8.1",
    **{f"nvidia-cutlass-dsl-libs-{part}": "4.8.1" for part in ("base", "core", "cu12", "cu13")},
    "apache-tvm-ffi": "0.1.15.post2",
}


def test_order_is_that_of_pep_440() -> None:
    for old, new in itertools.pairwise(ASCENDING):
        assert packages.order(old) < packages.order(new), (old, new)
    same = [
        ("4.8", "4.8.0"),
        ("1.0+cu130", "1.0"),
        ("v1.0-1", "1.0.post1"),
        ("1.0.RC1", "1.0rc1"),
        ("1.0-alpha", "1a0"),
    ]
    for a, b in same:
        assert packages.order(a) == packages.order(b), (a, b)
    for text in ("", "4.8.x", "unknown version", "1.0+", "==1.0"):
        with pytest.raises(ValueError, match="must be one of PEP 440"):
            packages.order(text)


@pytest.mark.parametrize(
    ("wanted", "good", "bad"),
    [
        (
            ">=4.8.0,<4.9",
            ["4.8.0", "4.8", "4.8.1", "4.8.10", "4.8.1.post1", "4.8.1+nv1", "4.8.1rc1"],
            ["4.7.9", "4.9", "4.9.0", "4.9.0rc1", "4.9.0.dev5", "4.10.0", "5.0", "4.8.0rc1", "4.8.0.dev0", "unknown"],
        ),
        (
            ">=0.1.11,<0.2",
            ["0.1.11", "0.1.11.post1", "0.1.12", "0.1.15.post2"],
            ["0.1.9", "0.1.10.post9", "0.1.2", "0.2.0", "0.2.0a1"],
        ),
        (">=2.6", ["2.6.0", "2.13.0+cpu", "2.9.0a0+50eac811a6.nv25.09", "10.0"], ["2.5.1+cu124", "2.6.0.dev20250101"]),
        ("==2.13.0", ["2.13.0", "2.13", "2.13.0+cpu"], ["2.13.0.post1", "2.13.1", "2.13.0rc1"]),
        ("<4.9rc2", ["4.9rc1", "4.8"], ["4.9rc2", "4.9"]),
    ],
)
def test_requirements(wanted: str, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not packages.meets(text, wanted)] == []
    assert [text for text in bad if packages.meets(text, wanted)] == []


@pytest.mark.parametrize("wanted", ["~=4.8", ">4", ">=4.8 <4.9", "4.8", ">=4.8,"])
def test_other_forms_of_requirements_are_refused(wanted: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        packages.meets("4.8", wanted)


def test_versions_agree_with_pips_own_reading() -> None:
    """The library that pip reads versions with, where it is installed: every pair, every clause that is used here."""
    versions = pytest.importorskip("packaging.version", reason="packaging is not installed")
    specifiers = pytest.importorskip("packaging.specifiers")
    for a, b in itertools.product([*ASCENDING, "4.8.1+cu13", "4.9.0.post1", "4.9rc1.post2"], repeat=2):
        if "+" not in a + b:
            assert (packages.order(a) < packages.order(b)) == (versions.Version(a) < versions.Version(b)), (a, b)
            for op in ("==", ">=", "<"):
                want = specifiers.SpecifierSet(op + b).contains(a, prereleases=True)
                assert packages.meets(a, op + b) == want, (a, op, b)


def check(monkeypatch: pytest.MonkeyPatch, **changes: str | None) -> list[str]:
    """Warnings of check_packages with these versions installed; "_" in a name stands for "-"."""
    have = {**GOOD, **{name.replace("_", "-"): text for name, text in changes.items()}}
    monkeypatch.setattr(packages, "version", have.get)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        environment.check_packages()
    return [str(one.message) for one in caught]


def test_tested_packages_pass_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(monkeypatch) == []
    assert check(monkeypatch, apache_tvm_ffi="0.1.11") == []
    old = {name.replace("-", "_"): "4.8.0" for name in GOOD if "cutlass" in name}
    assert check(monkeypatch, **old) == []
    assert check(monkeypatch, nvidia_cutlass_dsl_libs_cu13=None) == []
    # Not loaded beside cu13 libraries, so no kernel meets it; doctor names it.
    assert check(monkeypatch, nvidia_cutlass_dsl_libs_cu12="4.6.2") == []
    assert "libs-cu12 4.6.2" in packages.mixed_parts()
    assert check(monkeypatch, **dict.fromkeys((name.replace("-", "_") for name in GOOD), None)) == []  # no metadata


@pytest.mark.parametrize("part", ["base", "core", "cu13"])
def test_parts_of_other_releases_are_refused_by_name(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    name = f"nvidia-cutlass-dsl-libs-{part}"
    with pytest.raises(MissingDependency, match=rf"nvidia-cutlass-dsl 4\.8\.1.*{name} 4\.6\.2.*cu13\]"):
        check(monkeypatch, **{name.replace("-", "_"): "4.6.2"})


def test_unloaded_parts_count_when_they_are_all_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MissingDependency, match=r"libs-cu12 4\.6\.2.*cu12\]"):
        check(monkeypatch, nvidia_cutlass_dsl_libs_cu12="4.6.2", nvidia_cutlass_dsl_libs_cu13=None)


def test_old_packages_are_refused_and_new_ones_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MissingDependency, match=r"apache-tvm-ffi>=0\.1\.11,<0\.2, found 0\.1\.9"):
        check(monkeypatch, apache_tvm_ffi="0.1.9")
    old = {name.replace("-", "_"): "4.7.1" for name in GOOD if "cutlass" in name}
    with pytest.raises(MissingDependency, match=r"nvidia-cutlass-dsl>=4\.8\.0,<4\.9, found 4\.7\.1"):
        check(monkeypatch, **old)
    (said,) = check(monkeypatch, apache_tvm_ffi="0.2.0")
    assert "tested with apache-tvm-ffi>=0.1.11,<0.2, found 0.2.0" in said
    new = dict.fromkeys(old, "4.9.0")
    (said,) = check(monkeypatch, **new)
    assert "tested with nvidia-cutlass-dsl>=4.8.0,<4.9, found 4.9.0" in said


def test_the_check_is_cheap() -> None:
    environment.check_packages()
    best = min(elapsed() for _ in range(5))
    assert best < 5e-3, f"check_packages takes {1e3 * best:.1f} ms"


def elapsed() -> float:
    """Seconds of one check of what is installed."""
    began = time.perf_counter()
    environment.check_packages()
    return time.perf_counter() - began


def test_a_copied_package_is_installed_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert packages.in_checkout() and packages.install("cu13") == 'pip install -e ".[cu13]"'
    monkeypatch.setattr(packages, "__file__", "/env/lib/python3/site-packages/megamoe/packages.py")
    assert not packages.in_checkout() and packages.install("cu13") == 'pip install "megamoe[cu13]"'
