"""GPU time of launches, with the ranks in step, and the ceilings of the machine that bench.py compares with.

Every sample is enqueued behind a read of more bytes than L2 holds (which leaves clean lines), a GPU sleep that
covers the host's launch time, and, with several ranks, an all-reduce that lets them start together. Then come
the event, the launches, the event; the host waits only after the last event. An event pair around nothing
measures 1 to 2 us (row `event pair`); it is part of every figure.

The sleep also keeps the GPU below its power limit. Seen on H200s: samples 35 us apart slow a dense FP8 GEMM from 1500
to 1200 TFLOPS within a second; 2 ms apart, in turns with others, it stays at 1500 (`Clock.gap`).
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from floors import Ceilings

CYCLES_PER_US = 2000  # of torch.cuda._sleep; H200s run at up to 1980 MHz
SLEEP_CYCLES = 1000 * CYCLES_PER_US
FLUSH_BYTES = 256 << 20  # an H200 has 50 MB of L2
HBM_BYTES = 4 << 30
PEER_BYTES = 256 << 20
DENSE_ROWS = 1 << 16

Launch = Callable[[], Any]


class Clock:
    """Times launches on the current stream of this process's GPU, in step with the other ranks' clocks.

    world: a megamoe World. sleep_cycles: of the GPU before each sample. Every method that measures is collective.
    """

    def __init__(self, world: Any) -> None:
        self.world, self.device = world, world.device(world.local_ranks[0])
        self.sleep_cycles = SLEEP_CYCLES
        self._apart = len(world.local_ranks) < world.size  # ranks of a virtual world share this process
        self._flush = torch.ones(FLUSH_BYTES // 4, device=self.device)
        self._sink = torch.empty((), device=self.device)
        self._token = torch.zeros(1, device=self.device)

    def align(self) -> None:
        """Let this stream go on only when every rank's stream is here."""
        if self._apart:
            dist.all_reduce(self._token)

    @contextlib.contextmanager
    def gap(self, us: float) -> Iterator[None]:
        """Within it the GPU sleeps for about `us` microseconds before each sample, longer where its clock is lower."""
        before, self.sleep_cycles = self.sleep_cycles, round(us * CYCLES_PER_US)
        try:
            yield
        finally:
            self.sleep_cycles = before

    def lead_in(self, flush: bool = True) -> None:
        """What is enqueued before a sample."""
        if flush:
            torch.sum(self._flush, dim=0, out=self._sink)
        torch.cuda._sleep(self.sleep_cycles)
        self.align()

    def steps(
        self, launches: Sequence[Launch], runs: int, warmup: int = 3, *, aligned: Collection[int] = ()
    ) -> list[list[float]]:
        """Microseconds of each launch in `runs` rounds of all of them in order, [launch][round].

        aligned: indices of launches before which ranks wait for each other, outside of the timed stretch.
        """
        samples: list[list[float]] = [[] for _ in launches]
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in launches]
        for number in range(warmup + runs):
            self.lead_in()
            for index, (launch, (start, end)) in enumerate(zip(launches, pairs)):
                if index in aligned:
                    self.align()
                start.record()
                launch()
                end.record()
            torch.cuda.synchronize(self.device)
            for sample, (start, end) in zip(samples, pairs):
                if number >= warmup:
                    sample.append(1e3 * start.elapsed_time(end))
        return samples

    def op(self, launch: Launch, runs: int, warmup: int = 3) -> list[float]:
        """Microseconds of one launch (or several, in one callable) in `runs` rounds."""
        return self.steps([launch], runs, warmup)[0]

    def slowest(self, samples: list[float], what: str) -> list[float]:
        """Round by round the largest time over ranks."""
        return [max(round_) for round_ in zip(*self.world.gather([samples], what))]

    def host(self, call: Launch, batches: int = 5, batch: int = 50) -> list[list[float]]:
        """Host microseconds of each call, [batch][call], with Python's garbage collector off during a batch and
        no thread pinned. The GPU works on meanwhile; it is waited for between batches only, so that the launch
        queue (1024 entries) never fills and blocks a call."""
        samples: list[list[float]] = []
        for _ in range(batches):
            gc.collect()
            self.world.barrier("host time")
            gc.disable()
            try:
                samples.append([_host_us(call) for _ in range(batch)])
            finally:
                gc.enable()
            torch.cuda.synchronize(self.device)
        return samples


def _host_us(call: Launch) -> float:
    start = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - start)


def summary(samples: Sequence[float]) -> dict[str, float]:
    """A row's us (median), us_min, p10 and p90."""
    ordered = sorted(samples)
    at = lambda share: ordered[round(share * (len(ordered) - 1))]  # noqa: E731
    return {"us": median(ordered), "us_min": ordered[0], "p10": at(0.1), "p90": at(0.9)}


class Dense:
    """FLOP/s of torch._scaled_mm (per-tensor scales, fast accumulation, bf16 result), measured once a size."""

    def __init__(self, clock: Clock, runs: int) -> None:
        self._clock, self._runs = clock, runs
        self._rates: dict[tuple[int, int, int], float] = {}

    def rate(self, m: int, n: int, k: int) -> float:
        """FLOP/s of [m, k] x [k, n] on randn data. Collective: m must be equal on every rank.

        m is rounded up to 16 and cut at 65536 rows, to save memory; rates no longer change there.
        """
        m = min(max(-(-m // 16) * 16, 16), DENSE_ROWS)
        if (m, n, k) not in self._rates:
            a, b = (_randn_fp8(rows, k, self._clock.device) for rows in (m, n))
            one = torch.ones((), device=self._clock.device)

            def multiply() -> torch.Tensor:
                return torch._scaled_mm(
                    a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
                )

            us = median(self._clock.slowest(self._clock.op(multiply, self._runs), "dense GEMM"))
            self._rates[m, n, k] = 2e6 * m * n * k / us
        return self._rates[m, n, k]


def _randn_fp8(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    return torch.randn(rows, columns, device=device, dtype=torch.bfloat16).to(torch.float8_e4m3fn)


@dataclass(frozen=True)
class Speed:
    """One ceiling: its name, median microseconds of the slowest rank, and bytes moved or FLOPs done."""

    name: str
    us: float
    nbytes: int = 0
    flops: int = 0


def _speed(clock: Clock, name: str, launch: Launch, runs: int, nbytes: int = 0, flops: int = 0) -> Speed:
    return Speed(name, median(clock.slowest(clock.op(launch, runs), name)), nbytes, flops)


def measure_memory(clock: Clock, runs: int) -> list[Speed]:
    """HBM read (sum of 4 GiB) and copy (2 GiB, read and written), and an empty event pair."""
    big = torch.ones(HBM_BYTES // 4, device=clock.device)
    sink = torch.empty((), device=clock.device)
    source, target = big.chunk(2)
    return [
        _speed(clock, "event pair", lambda: None, runs),
        _speed(clock, "hbm read", lambda: torch.sum(big, dim=0, out=sink), runs, HBM_BYTES),
        _speed(clock, "hbm copy", lambda: target.copy_(source), runs, HBM_BYTES),
    ]


def measure_dense(dense: Dense, side: int = 8192) -> list[Speed]:
    """The dense FP8 rate at side^3, for the record; rows use the rate at their own size."""
    flops = 2 * side**3
    return [Speed(f"fp8 gemm {side}^3", 1e6 * flops / dense.rate(side, side, side), flops=flops)]


def measure_link(clock: Clock, runs: int) -> list[Speed]:
    """Reads and writes of the next rank's memory, all ranks at once: by device copies, and by kernels of torch
    (element-wise, 16 bytes a thread and access). Nothing without peers. Collective; the world frees the memory
    when it closes."""
    world = clock.world
    if len(world.local_ranks) == world.size:
        return []
    import nvshmem.core

    rank = world.local_ranks[0]
    block = world.allocate(PEER_BYTES)
    peer = nvshmem.core.get_peer_tensor(block.tensors[rank], (rank + 1) % world.size)
    return _peer_speeds(clock, peer.view(torch.int32), runs)


def _peer_speeds(clock: Clock, there: torch.Tensor, runs: int) -> list[Speed]:
    here = torch.zeros_like(there)
    ways = {
        "peer read, copy": lambda: here.copy_(there),
        "peer write, copy": lambda: there.copy_(here),
        "peer read, kernel": lambda: torch.add(there, 1, out=here),
        "peer write, kernel": lambda: torch.add(here, 1, out=there),
    }
    return [_speed(clock, name, launch, runs, there.nbytes) for name, launch in ways.items()]


def ceilings_of(speeds: Sequence[Speed]) -> Ceilings:
    """The speeds that floors use."""
    rate = {s.name: 1e6 * s.nbytes / s.us for s in speeds if s.nbytes}
    link = (rate.get("peer read, kernel", 0.0), rate.get("peer write, kernel", 0.0))
    return Ceilings(rate["hbm read"], rate["hbm copy"], *link)
