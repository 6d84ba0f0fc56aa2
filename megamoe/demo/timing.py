"""What the demo measures on a GPU: each kernel, the whole forward, and the floor that it cannot beat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from .. import reference
from ..forward import STAGES
from ..layer import MegaMoE
from ..weights import ExpertWeights
from .problem import DemoProblem, sample_rows

REPEATS = 10
SLEEP_CYCLES = 2_000_000  # about 1 ms: the host gets ahead of the GPU meanwhile

Times = dict[str, float]
"""Milliseconds by name."""


@dataclass(frozen=True)
class Bench:
    """A warmed-up layer and its inputs and outputs: lists with an entry a rank of this process."""

    moe: MegaMoE
    problem: DemoProblem
    xs: list[torch.Tensor]
    ids: list[torch.Tensor]
    weights: list[torch.Tensor]
    ys: list[torch.Tensor]

    def forward(self) -> None:
        """One forward of all local ranks into ys."""
        if self.moe.world.kind == "virtual":
            self.moe(self.xs, self.ids, self.weights, out=self.ys)
        else:
            self.moe(self.xs[0], self.ids[0], self.weights[0], out=self.ys[0])

    def errors(self) -> list[float]:
        """Relative error of every rank of the world against the oracle. Collective; a rank checks its own tokens."""
        mine = []
        for x, ids, weights, y in zip(self.xs, self.ids, self.weights, self.ys):
            rows = sample_rows(x.shape[0], x.device)
            mine.append(reference.relative_error(y[rows], self.problem.oracle(x[rows], ids[rows], weights[rows])))
        return self.moe.world.gather(mine, "the demo's errors")


def device_time(call: Callable[[], object], device: torch.device, inner: int = 10) -> float:
    """Milliseconds of one call, of `inner` in a row on the current stream; host time counts where it is longer."""
    samples = []
    call()
    for _ in range(REPEATS):
        torch.cuda.synchronize(device)
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(inner):
            call()
        stop.record()
        stop.synchronize()
        samples.append(start.elapsed_time(stop) / inner)
    return median(samples)


@dataclass(frozen=True)
class _Lane:
    """One local rank's launches and the events between them."""

    stream: torch.cuda.Stream
    steps: list[Callable[[], None]]
    marks: list[torch.cuda.Event]


def _lanes(bench: Bench) -> list[_Lane]:
    moe, lanes = bench.moe, []
    for index, rank in enumerate(moe.world.local_ranks):
        device = moe.world.device(rank)
        stream = moe.world.stream(rank) or torch.cuda.current_stream(device)
        steps = moe.steps(rank, bench.xs[index], bench.ids[index], bench.weights[index], bench.ys[index])
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(steps) + 1)]
        lanes.append(_Lane(stream, steps, marks))
    return lanes


def stage_times(bench: Bench) -> Times:
    """Each kernel of a forward on the first local rank, from events between the launches.

    A sleep in front lets the host get ahead, so that launching doesn't count; an unmeasured forward before the
    measured one lines the ranks up. Kernel by kernel, the ranks of a virtual world are launched side by side.
    pull and reduce include their wait for other ranks.
    """
    world = bench.moe.world
    samples: dict[str, list[float]] = {name: [] for name in STAGES}
    for _ in range(REPEATS):
        world.synchronize()
        world.barrier("the demo's stage times")
        lanes = _lanes(bench)
        for lane in lanes:
            with torch.cuda.stream(lane.stream):
                torch.cuda._sleep(SLEEP_CYCLES * (1 + len(lanes)))
        for measured in (False, True):
            for number in range(len(STAGES)):
                for lane in lanes:
                    if measured and number == 0:
                        lane.marks[0].record(lane.stream)
                    lane.steps[number]()
                    if measured:
                        lane.marks[number + 1].record(lane.stream)
        bench.moe.synchronize()
        marks = lanes[0].marks
        for name, before, after in zip(STAGES, marks, marks[1:]):
            samples[name].append(before.elapsed_time(after))
    return {name: median(values) for name, values in samples.items()}


def forward_times(bench: Bench, device: torch.device) -> Times:
    """A whole forward, called from Python and as a CUDA graph."""
    times = {"eager": device_time(bench.forward, device)}
    bench.moe.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        bench.forward()
    times["graph"] = device_time(graph.replay, device)
    bench.moe.synchronize()
    return times


@dataclass(frozen=True)
class Floor:
    """What one GPU cannot beat, and what it was made from: copy_speed in B/s (read plus written), rate in FLOP/s."""

    weights_ms: float
    products_ms: float
    experts_hit: int
    rows: int
    copy_speed: float
    rate: float

    @property
    def ms(self) -> float:
        """The larger of the two parts, milliseconds."""
        return max(self.weights_ms, self.products_ms)


def dense_time(rows: int, n: int, k: int, device: torch.device) -> float:
    """Milliseconds of one FP8 product [rows, k] x [k, n] by torch._scaled_mm, fast accumulation, randn data."""
    m = min(max(-(-rows // 16) * 16, 16), 1 << 15)
    a, b = (torch.randn(s, k, device=device, dtype=torch.bfloat16).to(torch.float8_e4m3fn) for s in (m, n))
    one = torch.ones((), device=device)

    def call() -> None:
        torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)

    return device_time(call, device) * max(rows / m, 1.0)


def measure_floor(
    problem: DemoProblem, ids: Sequence[torch.Tensor], ranks: Sequence[int], pack: ExpertWeights
) -> Floor:
    """The floor of the GPU that runs `ranks`: the larger of two times.

    Weights of the experts hit at the speed of a device copy; the rows received as one dense product for FC1
    and one for FC2. ids: [T, K] of every rank of the world. pack: of one rank, for its sizes.
    """
    cfg, device, local = problem.cfg, problem.device, pack.experts_local
    owned = torch.bincount(torch.cat([i.flatten() for i in ids]).long(), minlength=cfg.num_experts).tolist()
    here = [count for rank in ranks for count in owned[rank * local : (rank + 1) * local]]
    hit, rows = sum(count > 0 for count in here), sum(here)
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_speed = 2 * source.numel() / (device_time(lambda: target.copy_(source), device) * 1e-3)
    weights_ms = hit * pack.nbytes / local / copy_speed * 1e3
    products_ms = dense_time(rows, 2 * cfg.intermediate, cfg.hidden, device)
    products_ms += dense_time(rows, cfg.hidden, cfg.intermediate, device)
    rate = 6 * rows * cfg.hidden * cfg.intermediate / (products_ms * 1e-3)
    return Floor(weights_ms, products_ms, hit, rows, copy_speed, rate)
