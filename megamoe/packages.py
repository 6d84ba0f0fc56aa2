"""Which versions of the packages that compile kernels are tested, and what is installed here.

Standard library only, and nothing of this package: tools/setup_env.py runs this file by itself.
"""

from __future__ import annotations

import re
from pathlib import Path

TESTED = {"nvidia-cutlass-dsl": ">=4.8.0,<4.9", "apache-tvm-ffi": ">=0.1.11,<0.2"}
"""Distribution -> its requirement in pyproject.toml. Below, kernels fail; above, nobody has tried."""

DSL = ("nvidia-cutlass-dsl", *(f"nvidia-cutlass-dsl-libs-{part}" for part in ("base", "core", "cu12", "cu13")))
"""The distributions of one release of CuTeDSL: what a user asks for, then what it brings. With cu12 and cu13
libraries installed, cu13 ones are loaded."""

_VERSION = re.compile(
    r"v?(?:(?P<epoch>\d+)!)?(?P<release>\d+(?:\.\d+)*)"
    r"(?:[-_.]?(?P<phase>a|b|c|rc|alpha|beta|pre|preview)[-_.]?(?P<pre>\d*))?"
    r"(?:-(?P<plain_post>\d+)|(?P<posted>[-_.]?(?:post|rev|r)[-_.]?(?P<post>\d*)))?"
    r"(?P<dev>[-_.]?dev[-_.]?(?P<dev_n>\d*))?"
    r"(?:\+[a-z0-9]+(?:[-_.][a-z0-9]+)*)?"
)
"""A version as PEP 440 writes it, in lower case; the local part, behind "+", is not kept."""

_CLAUSE = re.compile(r"\s*(==|>=|<)\s*([\w.!-]+)\s*")
_PHASES = {"alpha": "a", "beta": "b", "c": "rc", "pre": "rc", "preview": "rc"}


def order(version: str) -> tuple:
    """A key that sorts versions as PEP 440 does, without their local part. Raises ValueError on other texts."""
    found = _VERSION.fullmatch(version.strip().lower())
    if found is None:
        raise ValueError(f"version = {version!r}: must be one of PEP 440, as in 4.8.1 or 0.1.15.post2")
    numbers = [int(n) for n in found["release"].split(".")]
    while len(numbers) > 1 and numbers[-1] == 0:
        numbers.pop()
    post = int(found["plain_post"] or found["post"] or 0) if found["plain_post"] or found["posted"] else -1
    dev = (0, int(found["dev_n"] or 0)) if found["dev"] else (1, 0)
    if found["phase"]:
        pre = (1, _PHASES.get(found["phase"], found["phase"]), int(found["pre"] or 0))
    else:  # 1.0.dev1 comes before 1.0a1, 1.0 after it
        pre = (0,) if found["dev"] and post < 0 else (2,)
    return int(found["epoch"] or 0), tuple(numbers), pre, post, dev


def _clauses(wanted: str) -> list[tuple[str, tuple]]:
    clauses = []
    for clause in wanted.split(","):
        found = _CLAUSE.fullmatch(clause)
        if found is None:
            raise ValueError(f"requirement = {wanted!r}: must be clauses of ==, >= and <, with commas between")
        clauses.append((found[1], order(found[2])))
    return clauses


def _is_early(key: tuple) -> bool:
    """A pre-release or a development release."""
    return key[2] != (2,) or key[4] != (1, 0)


def meets(version: str, wanted: str) -> bool:
    """Whether a version meets a requirement such as ">=4.8.0,<4.9"; one that is not of PEP 440 never does.

    As for pip on what is installed: local parts do not count, pre-releases do, but 4.9rc1 is not below 4.9.
    Raises ValueError when the requirement has another form.
    """
    clauses = _clauses(wanted)
    try:
        have = order(version)
    except ValueError:
        return False
    for op, bound in clauses:
        early = _is_early(have) and not _is_early(bound) and have[:2] == bound[:2] and bound[3] in (-1, have[3])
        good = have == bound if op == "==" else have >= bound if op == ">=" else have < bound and not early
        if not good:
            return False
    return True


def is_below(version: str, wanted: str) -> bool:
    """Whether a version is under the lower bound of a requirement; False for one that is not of PEP 440."""
    try:
        have = order(version)
    except ValueError:
        return False
    return any(op == ">=" and have < bound for op, bound in _clauses(wanted))


def lowest(distribution: str) -> str:
    """The oldest version of TESTED."""
    return re.search(r">=([^,]+)", TESTED[distribution])[1]  # type: ignore[index]


def version(distribution: str) -> str | None:
    """Version of an installed distribution, or None."""
    from importlib import metadata  # here, because `import megamoe` needs none of it

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def dsl_parts() -> dict[str, str]:
    """Distribution -> version of what is installed of CuTeDSL."""
    found = {name: version(name) for name in DSL}
    return {name: text for name, text in found.items() if text}


def mixed_parts(loaded: bool = False) -> str:
    """The parts of CuTeDSL and their versions, as text, when they are not all of one release; else "".

    loaded: leave out cu12 libraries where cu13 ones are loaded instead.
    """
    parts = dsl_parts()
    if loaded and DSL[4] in parts:
        parts.pop(DSL[3], None)
    return ", ".join(f"{name} {text}" for name, text in parts.items()) if len(set(parts.values())) > 1 else ""


def in_checkout() -> bool:
    """Whether this package lies in a checkout of its repository, and was not copied into an environment."""
    root = Path(__file__).resolve().parent.parent
    return (root / "pyproject.toml").is_file() and (root / "tools" / "setup_env.py").is_file()


def install(extra: str) -> str:
    """The command that installs megamoe with an extra: from the checkout, else by name."""
    return f'pip install -e ".[{extra}]"' if in_checkout() else f'pip install "megamoe[{extra}]"'
