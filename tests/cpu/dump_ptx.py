"""Compile kernels with the packages that Python finds first, and print what came of it as JSON: python dump_ptx.py

{"versions": {distribution: version}, "ptx": {kernel: PTX}, "calls": {kernel: error of a call without a GPU}}
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the calls below hand over addresses that are none

import cutlass.cute

from megamoe import packages
from megamoe.kernels import build
from megamoe.kernels.catalog import CatalogEntry, catalog

SIZE = re.compile(r"[HIEW]\d+|tile\S+|cluster\S+")


def chosen() -> list[CatalogEntry]:
    """The quick catalogue in every scale mode and format, then of the whole one what has a new word in its mode."""
    modes = [dict(scale=scale, fp8=fp8) for scale in ("block", "tensor") for fp8 in ("e4m3", "e5m2")]
    quick = [entry for mode in modes for entry in catalog(quick=True, **mode)]
    entries = list({str(entry): entry for entry in quick}.values())
    words = {(entry.name, word) for entry in entries for word in entry.mode.split()}
    for entry in catalog():
        new = {(entry.name, word) for word in entry.mode.split() if not SIZE.fullmatch(word)}
        if new - words:
            entries.append(entry)
            words |= new
    return entries


def ptx(entry: CatalogEntry) -> str:
    """PTX of a kernel as a layer builds it: its architecture is CUTE_DSL_ARCH's."""
    with tempfile.TemporaryDirectory() as folder:
        return build.compile_kernel(entry.make(), f"{build.OPTIONS} --keep-ptx --dump-dir {folder}").artifacts.PTX


def call(entry: CatalogEntry) -> str:
    """The error of a call without a GPU: it comes from CUDA when TVM-FFI took the arguments."""
    kernel = entry.make()
    try:
        build.build(kernel)(*(kind(0).value for kind in kernel.ARGS), 0)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def main() -> None:
    """Print the JSON text."""
    entries = chosen()
    assert cutlass.cute  # imported first, as by another library
    found = {
        "versions": {name: packages.version(name) for name in packages.TESTED} | {"cutlass": cutlass.__version__},
        "ptx": {str(entry): ptx(entry) for entry in entries},
        "calls": {entry.name: call(entry) for entry in entries if entry.name in ("stage", "reduce")},
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
