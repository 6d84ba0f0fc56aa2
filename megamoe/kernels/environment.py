"""What must hold before CuTeDSL is used: packages that fit each other, and sm_90a as the target architecture."""

from __future__ import annotations

import os
import sys
import warnings

from .. import packages
from ..errors import MegaMoEError, MissingDependency

ARCH = "sm_90a"
"""The architecture that every kernel is compiled for."""

VARIABLE = "CUTE_DSL_ARCH"


def check_packages() -> None:
    """Compare what is installed with packages.TESTED; milliseconds, since only metadata is read.

    Raises MissingDependency where kernels would fail: a version is too old, or CuTeDSL's parts are of different
    releases. Warns once where nobody has tried: a version is too new. Packages without metadata pass.
    """
    mixed = packages.mixed_parts(loaded=True)
    if mixed:
        raise MissingDependency(
            f"megamoe's kernels need the parts of CuTeDSL to be of one release, found {mixed}: {_repair()}"
        )
    for name, wanted in packages.TESTED.items():
        have = packages.version(name)
        if have is None or packages.meets(have, wanted):
            continue
        if packages.is_below(have, wanted):
            raise MissingDependency(f"megamoe's kernels need {name}{wanted}, found {have}: {_repair()}")
        warnings.warn(
            f"megamoe's kernels are tested with {name}{wanted}, found {have}: {_repair()}", RuntimeWarning, stacklevel=3
        )


def _repair() -> str:
    extra = "cu13" if packages.DSL[4] in packages.dsl_parts() else "cu12"
    return f"{packages.install(extra)} installs what fits"


def set_arch() -> None:
    """Make sm_90a CuTeDSL's target, whatever CUTE_DSL_ARCH says; warns when it said something else.

    CuTeDSL keeps the variable's value from its import on, so call this before that; where somebody else imported
    it earlier, the value that it keeps is replaced. Raises MegaMoEError when that is not possible.
    """
    old = os.environ.get(VARIABLE, "")
    os.environ[VARIABLE] = ARCH
    if sys.modules.get("cutlass") is not None:
        try:
            from cutlass.cutlass_dsl import CuTeDSL

            settings = CuTeDSL._get_dsl().envar
            kept = vars(settings).get("_arch")  # settings.arch would ask the driver when nothing is set
            settings.arch = ARCH
        except ImportError:
            return  # not CuTeDSL, which the caller will find missing
        except AttributeError as error:
            raise MegaMoEError(
                f"cutlass was imported with {VARIABLE} = {old!r}, which cannot be changed here ({error}): "
                f"set {VARIABLE}={ARCH} before cutlass is imported"
            ) from error
        old = kept or ""
    if old not in ("", ARCH):
        warnings.warn(
            f"{VARIABLE} was {old!r}; megamoe's kernels are for {ARCH}, which is what CuTeDSL compiles for in this "
            "process from now on",
            RuntimeWarning,
            stacklevel=3,
        )
