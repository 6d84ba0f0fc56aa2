"""Turns of several runs of tools/bench.py on the same GPUs (--turns FILE): one measures while the others compile.

A run holds a lock on FILE whenever it uses the GPUs, and lends it to the others while it compiles, which takes most of
the time beside libraries that compile for each T. The first forward after such a compilation falls into another run's
turn: milliseconds with one rank; with several also the wait of a rank whose compiler was quicker. Medians of many
samples hide it, p90 does not; a point that matters deserves a run alone. Memory of the other runs is not free, so that
small T may run with one pack of weights where a run alone has two (`packs` of a row).
"""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

POLL_S = 0.1


class Turns:
    """This run's turns. path: the file that all runs share, or None: then it is always this run's turn.

    world: a megamoe World, whose first rank holds the lock for all. Every method is collective.
    """

    def __init__(self, path: Path | None, world: Any) -> None:
        self._world, self._on = world, path is not None
        self._file = path.open("a") if self._on and 0 in world.local_ranks else None
        self.take()

    def take(self) -> None:
        """Wait for this run's turn. No rank waits for another longer than POLL_S."""
        while self._on and not all(self._world.gather([self._locked()] * len(self._world.local_ranks), "turn")):
            time.sleep(POLL_S)

    def _locked(self) -> bool:
        """Whether the lock is this run's now; true on ranks without the file."""
        try:
            if self._file is not None:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def give(self) -> None:
        """End this run's turn, when its GPUs have nothing left to do."""
        if self._on:
            self._world.synchronize()
            self._world.barrier("end of turn")
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        """End this run's turns, whatever its GPUs still do; not collective."""
        if self._file is not None:
            self._file.close()

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Within it the others may have their turns."""
        self.give()
        try:
            yield
        except Exception:
            self.take()
            raise
        self.take()
