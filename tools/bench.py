"""Speed of the staged layer beside other implementations and the ceilings of the machine, measured in the same run.

    python tools/bench.py --out tools/results/h200.jsonl
    torchrun --standalone --nproc-per-node=2 tools/bench.py --out tools/results/h200x2.jsonl
    python tools/bench.py --virtual 4 --routing hot_expert
    python tools/bench.py --what fc1,fc2 --knobs "auto;tile_rows=64;tile_cols=256,cluster_cols=2" --gemm-rows 64,512
    python tools/compare.py A.jsonl B.jsonl     # whether two runs agree

Sections (--what, a comma list; default: those that fit the number of ranks):
ceilings  HBM read and copy, dense FP8 GEMM, reads and writes of a peer GPU (always measured: floors need them)
stages    each of the seven kernels inside whole forwards, events between the launches
link      the same with every route remote and 64 MB and more a rank: pull and token_back over NVLink, alone and
          four times in a row
gemm      fc1 and fc2 alone, 1 to 4096 rows on each of up to 32 experts (--what fc1,fc2: one of them; --gemm-rows,
          --gemm-experts). --gemm-skew zipf, or balanced,zipf: as many rows in all, of the n-th most wanted expert
          in proportion to n ** -1.2
e2e       whole forwards, eager and as a CUDA graph
host      host time of one eager forward, and of its launches alone, arguments ready: 5 batches of 50 calls, garbage
          collector off within a batch, no pinning

Peers (--peers; peers/) run e2e and gemm on the same tokens, routes and weights, in turns with ours. One that cannot
run, or whose result is not ours, has a row that says why. Up to T = 64, ours take turns with the weights of two layers
where memory allows, so that no cache holds them (peers keep to the first's; L2 is flushed for all). With several ranks
each sample starts together on all of them, pull, token_back and reduce too in `stages` and `link` (their waits for
peers are in `e2e`), and the slowest rank counts.
--knobs takes several settings, in quotes with ; between them, where gemm is the only section: each has rows of its
own, in turns with the others and with the peers on the same tensors. One that the shape refuses, or whose result is
not the first one's to the bit, says so and has no time.
--gap-us N: before each sample of gemm the GPU sleeps N us (default 2000; other sections: 1000, short forwards of e2e
3000), between the flush of L2 and the meeting of ranks. Under a power limit shorter gaps favour whoever runs first.
--virtual N puts N ranks on one GPU: a time is that of all ranks together, floors add up their work, no bars hold.
--turns FILE: several runs on the same GPUs, one measuring while the others compile (turns.py); not for section host.
How time is taken: timing.py. What is counted as bytes, and floors: floors.py.

Expected time on H200s: about 100 s by default on one GPU with torch's peers, 50 s with --quick; on two GPUs about
110 s. FlashInfer's pull adds 5 to 15 s for each scale mode and T (it compiles for each); push compiles by nvcc first.

--out appends one JSON object a row; tables come last on stdout. Keys of a row:
what, name   section; kernel, ceiling, for e2e "eager", "graph" or "compute" (of a peer whose inputs are
             staged beforehand), for host "eager" or "launches"; what "gpu": when a reading was taken, "start" or
             after a section of a scale mode
impl, note, skipped   "megamoe" or the peer; how its numbers or work differ, or how ours was taken; why it has no time
scale, routing, T, tile_rows, rows_per_expert, experts   settings of the point (rows_per_expert: on average over
             `experts`; tile_rows: of the knobs that ran)
skew, most_rows, experts_hit   of uneven rows: "zipf", the most rows of an expert, experts with a row (floors count
             the weights of these)
gap_us       GPU sleep before each sample of a gemm row
us, us_min, p10, p90   median microseconds, least and percentiles of `runs` samples, of the slowest rank
runs, packs, batches   samples; layers whose weights took turns; of host, batches (us and us_min: of their medians)
us_each, gbps_each, link_gbps_each   of link: a launch among four in a row, (time of four - us) / 3, and its rates;
             the bars hold for these, which have no event pair in them
pair_gbps, out_gbps, in_gbps, out_even   of link: rates [from][to] of each pair of ranks by the time of the one that
             moves the rows, their sums a rank, and the least over the most of out_gbps
event_pair_us      the clock's own share of every time: an event pair around nothing; nothing is subtracted
bytes, gbps        bytes that the kernel moves (GEMM: reads and writes), and 10^9 of them a second
link_bytes, link_gbps        bytes over NVLink one way, scales counted, and their rate
tflops, dense_tflops, weights_tbps   of a GEMM, or of a forward's two products on an average rank;
             torch._scaled_mm at the GEMM's M, N, K; 10^12 bytes of weights a second
copy_share         of stage and reduce: bytes a second over those of the measured copy
floor_us, floor_by, over_floor       the floor (for peers too: the problem's, by our bytes), what sets it, us / floor_us
over_<peer>, ours_us   our time over the peer's in the turns that both took; of a peer's row: our median in them, of
             the first setting of --knobs that ran
bar, ok            the bar that the row is held to and whether it passes
rank, traffic      rank whose time it is; largest of each count of routes over ranks (floors.Traffic)
seconds, sm_mhz, mem_mhz, watts, celsius, clock_reasons   of a gpu row: since the start; lowest clocks, highest power
             and temperature over ranks, bits of reasons for a lower clock, as nvidia-smi reads them (none is set)
preset (null: a shape of its own), world ("processes" or "virtual"), execution, commit, date, command, gpu, driver,
torch, cuda, dsl, megamoe, W, hidden, intermediate, num_experts, top_k, max_tokens, fp8, accum, seed   the run
knobs        a setting as --knobs has it: our own where there are several; else, and of all other rows, the first
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
for folder in (ROOT, ROOT / "tools"):  # megamoe of this checkout, and the files beside this one
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import floors  # noqa: E402
import machine  # noqa: E402
import options  # noqa: E402
import tables  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import megamoe  # noqa: E402
from megamoe import Knobs, MoEConfig  # noqa: E402

if TYPE_CHECKING:
    import argparse

    import inputs


class Bench:
    """What sections share: world, clock, ceilings, problems, rows."""

    def __init__(self, args: argparse.Namespace, world: Any) -> None:
        import timing
        import turns
        from tqdm import tqdm

        self.args, self.world = args, world
        self.virtual = world.kind == "virtual"
        self.rank = world.local_ranks[0]
        self.device = world.device(self.rank)
        free = torch.cuda.mem_get_info(self.device)[0] // len(world.local_ranks)
        self.configs = options.plan(args, world.size, min(self.gather(free, "free")))
        self.meta = machine.describe_run(args, world, self.configs)
        self.rows: list[dict[str, Any]] = []
        self._started = time.perf_counter()
        self.turns = turns.Turns(args.turns, world)
        self._progress = tqdm(unit="point", file=sys.stderr, disable=self.rank != 0)
        self.clock = timing.Clock(world)
        self.dense = timing.Dense(self.clock, args.runs // 2)
        self.say("ceilings")
        at_start = self._reading()
        speeds = timing.measure_memory(self.clock, args.runs // 2) + timing.measure_dense(self.dense)
        self.speeds = speeds + timing.measure_link(self.clock, args.runs // 2)
        self.ceilings = timing.ceilings_of(self.speeds)
        self.meta["event_pair_us"] = self.speeds[0].us
        self.add(**at_start, name="start")
        torch.cuda.empty_cache()

    def gather(self, value: Any, what: str) -> list[Any]:
        """Every process's value, in rank order. Collective."""
        return [value] if self.virtual else self.world.gather([value], what)

    def say(self, text: str) -> None:
        """Progress: the point that comes next."""
        self._progress.set_description(text)
        self._progress.update()

    def close(self) -> None:
        """End the progress bar and this run's turns."""
        self._progress.close()
        self.turns.close()

    def add(self, **row: Any) -> None:
        """Record a row; rank 0 writes it at once, so that a run cut short keeps what it had."""
        row = row if self.virtual else floors.with_bar(row)
        self.rows.append(row)
        if self.args.out and self.rank == 0:
            with self.args.out.open("a") as file:
                file.write(json.dumps(row | self.meta | row) + "\n")

    def read_gpus(self, moment: str) -> None:
        """A row of clocks, power and temperature. Collective."""
        self.add(**self._reading(), name=moment)

    def _reading(self) -> dict[str, Any]:
        seconds = round(time.perf_counter() - self._started, 1)
        readings = self.gather(machine.health(self.device), "gpu readings")
        return dict(what="gpu", seconds=seconds, **machine.over_ranks(readings))

    def problem(self, cfg: MoEConfig, kind: str, tokens: int) -> inputs.Problem:
        """Fresh inputs of this process's ranks, the same for the same arguments. Collective."""
        import inputs

        return inputs.make_problem(cfg, kind, tokens, self.world, self.args.seed)

    def rates(self, cfg: MoEConfig, rows: int) -> dict[str, float]:
        """Dense FLOP/s at the sizes of fc1 and fc2 with `rows` rows in all (equal on every rank)."""
        sizes = {"fc1": (2 * cfg.intermediate, cfg.hidden), "fc2": (cfg.hidden, cfg.intermediate)}
        return {name: self.dense.rate(rows, n, k) for name, (n, k) in sizes.items()}

    def knobs(self, cfg: MoEConfig, world_size: int, tokens: int) -> Knobs:
        """What --knobs says first, else what the layer chooses."""
        from megamoe.sched import heuristics

        return self.args.knobs or heuristics.choose_knobs(cfg, world_size, tokens)


def run(args: argparse.Namespace, world: Any) -> None:
    """Every chosen section of each scale mode, then the tables on rank 0."""
    import layers
    import sections

    b = Bench(args, world)
    try:
        sections.run_ceilings(b)
        for scale in args.scales if args.what != ["ceilings"] else ():
            with layers.Setup(b, scale) as setup:
                for what in args.what:
                    if what in sections.RUN:
                        sections.RUN[what](b, setup)
                        b.read_gpus(f"after {what} {scale}")
    finally:
        b.close()
        if b.rank == 0:
            print("\n".join(f"- {key}: {value}" for key, value in b.meta.items()), end="\n\n")
            print(tables.report(b.rows), flush=True)


def main(argv: list[str] | None = None) -> int:
    """Run a command line; the exit status is 0 whether bars pass or not, 2 without a GPU."""
    ranks, local = (int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")))
    args = options.parse(argv, ranks, __doc__)
    if not torch.cuda.is_available():
        print("bench.py needs a Hopper GPU: torch sees no CUDA device", file=sys.stderr)
        return 2
    torch.cuda.set_device(local)
    if ranks > 1:
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast buys a one-word all-reduce nothing
        dist.init_process_group("cpu:gloo,cuda:nccl")
    virtual = args.virtual and megamoe.VirtualWorld(args.virtual, timeout_s=args.timeout_s)
    with virtual or megamoe.world(timeout_s=args.timeout_s) as world:
        run(args, world)
    if ranks > 1:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
