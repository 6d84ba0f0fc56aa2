"""Turns of several runs of tools/bench.py on the same GPUs (--turns FILE): one measures while the others compile.

A run holds a lock on FILE whenever it uses the GPUs, and lends it to the others while it compiles, which takes most of
the time beside libraries that compile for each T. Only the first forward after such a compilation, a few milliseconds,
falls into another run's turn: medians of many samples do not notice.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch


class Turns:
    """This run's turns. path: the file that all runs share, or None: then it is always this run's turn.

    world: a megamoe World, whose first rank holds the lock for all. Every method is collective.
    """

    def __init__(self, path: Path | None, world: Any) -> None:
        self._world, self._on = world, path is not None
        self._file = path.open("a") if self._on and 0 in world.local_ranks else None
        self.take()

    def take(self) -> None:
        """Wait for this run's turn."""
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_EX)
        if self._on:
            self._world.barrier("turn")

    def give(self) -> None:
        """End this run's turn, when its GPUs have nothing left to do."""
        if self._on:
            self._world.synchronize()
            self._world.barrier("end of turn")
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Within it the others may have their turns."""
        self.give()
        try:
            yield
        finally:
            if self._on and torch.cuda.is_available():
                torch.cuda.synchronize()
            self.take()
