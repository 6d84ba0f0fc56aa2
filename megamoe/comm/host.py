"""Bounded exchanges between the host processes of a group: DESIGN promise 5, host side.

They go through the key-value store that torch.distributed set up, not through a gloo subgroup: a wait
on the store names the missing ranks on every rank, and a time-out leaves the group usable, where gloo
closes its connections. It also needs no `new_group`, which all ranks of WORLD would have to call, or,
with local synchronisation, hangs when ranks belong to different numbers of groups (pytorch#173608), as
the ranks of an inference engine do. Fit for control messages of a few KB, not for data.
"""

from __future__ import annotations

import contextlib
import pickle
import time
from typing import Any

import torch.distributed as dist

from ..errors import ArgumentError, MismatchError, WorldError

_worlds_made: dict[tuple[int, ...], int] = {}
"""Groups of the same ranks that got past their first exchange in this process; equal on every rank."""


def check_timeout(timeout_s: float) -> float:
    """timeout_s in seconds as a float. Raises ArgumentError unless it is finite and above 0."""
    ok = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool) and 0 < timeout_s < float("inf")
    if not ok:
        raise ArgumentError("timeout_s", timeout_s, "a finite number of seconds above 0")
    return float(timeout_s)


def by_value(values: list[Any]) -> str:
    """Which ranks hold which value: 'rank 0: a; ranks 1, 2: b'. Index = rank."""
    holders: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        holders.setdefault(str(value), []).append(rank)
    return "; ".join(f"{name_ranks(ranks)}: {value}" for value, ranks in holders.items())


def name_ranks(ranks: list[int]) -> str:
    """'rank 3' or 'ranks 1, 2'."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


class HostGroup:
    """The host side of a group of processes: gather and barrier, each bounded by timeout_s.

    Every rank makes the same calls in the same order. A rank that calls something else is found
    (MismatchError); one that does not come is named (WorldError). A call that timed out may be tried
    again, by every rank: it then meets the late ones where they wait.
    """

    def __init__(self, store: dist.Store, ranks: list[int], rank: int, timeout_s: float) -> None:
        """store: shared by the group. ranks: the group's global ranks. rank: own index among them."""
        self.ranks, self.rank, self.size = list(ranks), rank, len(ranks)
        self.timeout_s = check_timeout(timeout_s)
        key = tuple(self.ranks)
        generation = _worlds_made.setdefault(key, 0)
        self._store = dist.PrefixStore(f"megamoe/{'-'.join(map(str, key))}/{generation}", store)
        self._sequence = 0

    @classmethod
    def over(cls, group: dist.ProcessGroup, timeout_s: float) -> HostGroup:
        """The HostGroup of a torch.distributed group; any backend. Raises WorldError for an outsider."""
        from torch.distributed.distributed_c10d import _get_default_store

        rank = dist.get_rank(group)
        if rank < 0:
            raise WorldError("this process is not a member of the group given to world()")
        store = _get_default_store()
        if store is None:
            raise WorldError("torch.distributed has no store (MPI backend); initialise it with gloo or nccl")
        return cls(store, dist.get_process_group_ranks(group), rank, timeout_s)

    def gather(self, what: str, value: Any) -> list[Any]:
        """Every rank's picklable `value`, in rank order. `what` names the call in errors.

        Raises WorldError when a rank does not arrive within timeout_s, MismatchError when one arrives
        with another `what`.
        """
        try:
            messages = self._exchange(what, value)
        except RuntimeError as error:
            if isinstance(error, WorldError):
                raise
            raise WorldError(f"{what}: the store of torch.distributed failed: {error}") from error
        calls = [call for call, _ in messages]
        self._advance()
        if any(call != what for call in calls):
            raise MismatchError(f"ranks make different collective calls: {by_value(calls)}")
        return [value for _, value in messages]

    def barrier(self, what: str) -> None:
        """Return once every rank is here. Raises as gather does."""
        self.gather(what, None)

    def _exchange(self, what: str, value: Any) -> list[tuple[str, Any]]:
        keys = [f"{self._sequence}/{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], pickle.dumps((what, value, True)))
        try:
            return self._wait(what, keys)
        except BaseException:
            # No longer here: a late rank waits for the next try instead of going on alone. The key itself
            # stays, so that others who give up at the same moment do not name this rank as missing.
            with contextlib.suppress(RuntimeError):
                self._store.set(keys[self.rank], pickle.dumps((what, None, False)))
            raise

    def _wait(self, what: str, keys: list[str]) -> list[tuple[str, Any]]:
        deadline = time.monotonic() + self.timeout_s
        pause = 0.0002
        gone: list[int] = []
        while True:
            expired = time.monotonic() > deadline  # before the look, so that there is one after the deadline
            # Polls instead of store.wait: a wait would hold the store's connection, which NCCL's threads use too.
            if self._store.check(keys):
                posts = [pickle.loads(self._store.get(key)) for key in keys]
                gone = [rank for rank, post in enumerate(posts) if not post[2]]
                if not gone:
                    return [(call, value) for call, value, _ in posts]
            if expired:
                break
            time.sleep(pause)
            pause = min(2 * pause, 0.01)
        missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        if missing:
            late = f"{name_ranks(missing)} did not arrive within {self.timeout_s:g} s"
            raise WorldError(f"{what}: {late} (global {', '.join(str(self.ranks[rank]) for rank in missing)})")
        who = f"{name_ranks(gone)} gave up waiting before" if gone else "a rank arrived just too late"
        raise WorldError(f"{what}: {who}; call it again on every rank")

    def _advance(self) -> None:
        if self._sequence == 0:
            _worlds_made[tuple(self.ranks)] += 1
        else:
            # Everybody has posted this exchange, so everybody has read the one before it.
            with contextlib.suppress(RuntimeError):
                self._store.delete_key(f"{self._sequence - 1}/{self.rank}")
        self._sequence += 1
