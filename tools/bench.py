"""Speed of the staged layer beside the ceilings of the machine, measured in the same run.

    python tools/bench.py --out tools/results/h200.jsonl
    torchrun --standalone --nproc-per-node=2 tools/bench.py --out tools/results/h200x2.jsonl

Sections (--what, a comma list; default: those that fit the number of ranks):
ceilings  HBM read and copy, dense FP8 GEMM, reads and writes of a peer (always measured: floors need them)
stages    each of the eight kernels inside whole forwards, events between the launches
link      the same with every route remote and 64 MB and more a rank: pull and token_back over NVLink
gemm      fc1 and fc2 alone, 1 to 1024 rows on each of up to 32 experts, beside torch._scaled_mm
e2e       whole forwards, eager and as a CUDA graph
host      host time of one eager forward

With several ranks each sample starts together on all of them, pull, token_back and reduce too in `stages` and
`link` (their waits for peers are in `e2e`), and the slowest rank counts. How time is taken: timing.py. What is
counted as bytes, and floors: floors.py.

--out appends one JSON object a row; tables come last on stdout. Keys of a row:
what, name   section; kernel, ceiling, or for e2e and host "eager" or "graph"
scale, routing, T, tile_rows, rows_per_expert, experts   settings of the point (experts: those with rows)
us, us_min, runs   median microseconds (and least) of `runs` samples, of the slowest rank
bytes, gbps        bytes that the kernel moves (GEMM: reads and writes), and 10^9 of them a second
link_bytes, link_gbps        bytes over NVLink one way, scales counted, and their rate
tflops, dense_tflops, weights_tbps   of a GEMM; torch._scaled_mm at its M, N, K; 10^12 bytes of weights a second
copy_share         of stage and reduce: bytes a second over those of the measured copy
floor_us, floor_by, over_floor       the floor, what sets it, and us / floor_us
bar, ok            the bar that the row is held to and whether it passes
rank, traffic      rank whose time it is; largest of each count of routes over ranks (floors.Traffic)
commit, date, command, gpu, driver, torch, cuda, dsl, megamoe, W, hidden, intermediate, num_experts, top_k,
max_tokens, fp8, accum, knobs, seed   the run
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
for folder in (ROOT, ROOT / "tools"):  # megamoe of this checkout, and the files beside this one
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import floors  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import megamoe  # noqa: E402
from megamoe import Knobs, MoEConfig, doctor  # noqa: E402

PRESETS = {
    "v3": dict(hidden=7168, intermediate=2048, num_experts=256, top_k=8),
    "qwen3": dict(hidden=4096, intermediate=1536, num_experts=128, top_k=8),
    "small": dict(hidden=2048, intermediate=768, num_experts=64, top_k=8),
}
TOKENS, QUICK_TOKENS = (8, 64, 512, 2048, 8192, 32768), (8, 512, 8192)
SPARE_BYTES = 14 << 30  # tokens, results, dense operands and the ceilings' buffers


def parser() -> argparse.ArgumentParser:
    """The command line; None where --quick or the number of ranks decides."""
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    top.add_argument("--what", type=lambda text: text.split(","), help="sections, a comma list")
    top.add_argument("--preset", choices=tuple(PRESETS), default="v3", help="layer shape (default: v3)")
    top.add_argument(
        "--experts", type=int, help="experts over all ranks (default: the preset's, halved until they fit)"
    )
    top.add_argument(
        "--tokens", type=numbers, help="T of each rank, a comma list (default: those of 8..32768 that fit)"
    )
    top.add_argument("--scale", choices=("block", "tensor", "both"), help="scale modes (default: both; block if quick)")
    top.add_argument("--accum", choices=("promoted", "single"), default="promoted", help="in tensor mode")
    top.add_argument("--routing", choices=("balanced", "random"), default="balanced", help="of stages, e2e and host")
    top.add_argument("--knobs", default="auto", help="tile_rows=64, tile_rows=128 or auto (default)")
    top.add_argument("--quick", action="store_true", help="fewer points and samples")
    top.add_argument("--seed", type=int, default=0)
    top.add_argument("--timeout-s", type=float, default=60.0, help="limit of every wait for a peer (default: 60)")
    top.add_argument("--out", type=Path, help="file to which rows are appended, as JSON lines")
    return top


def parse(argv: list[str] | None, world_size: int) -> argparse.Namespace:
    """Checked arguments with every default filled in."""
    top = parser()
    args = top.parse_args(argv)
    fitting = [what for what in floors.COLUMNS if what != ("gemm" if world_size > 1 else "link")]
    args.what = args.what or fitting
    for what in args.what:
        if what not in floors.COLUMNS:
            top.error(f"--what {what}: one of {', '.join(floors.COLUMNS)}")
        if what == "link" and world_size == 1:
            top.error("--what link: needs several ranks, see torchrun above")
    scale = args.scale or ("block" if args.quick else "both")
    args.scales = ("block", "tensor") if scale == "both" else (scale,)
    rows = args.knobs.removeprefix("tile_rows=")
    if rows not in ("auto", "64", "128"):
        top.error(f"--knobs {args.knobs}: auto, tile_rows=64 or tile_rows=128")
    args.knobs = None if rows == "auto" else Knobs(tile_rows=int(rows))
    args.given_tokens = args.tokens is not None
    args.tokens = sorted(args.tokens or (QUICK_TOKENS if args.quick else TOKENS))
    args.runs = 10 if args.quick else 20
    return args


def make_config(args: argparse.Namespace, scale: str, experts: int, max_tokens: int) -> MoEConfig:
    """The layer of a scale mode."""
    shape = PRESETS[args.preset] | dict(num_experts=experts)
    accum = args.accum if scale == "tensor" else "promoted"
    return MoEConfig(**shape, max_tokens=max_tokens, scale=scale, accum=accum)


def plan(args: argparse.Namespace, world_size: int, free: int) -> dict[str, MoEConfig]:
    """A config a scale mode, as large as `free` bytes of each GPU allow; drops default T that do not fit."""
    probe = make_config(args, "block", PRESETS[args.preset]["num_experts"], 1)
    each = floors.weight_bytes(probe, 2 * probe.intermediate, probe.hidden) * 3 // 2
    fits = floors.pick_experts(probe.num_experts, each, world_size, int(0.4 * free) // len(args.scales))
    experts = args.experts or fits
    extra: list[int] = []
    for scale in args.scales if "link" in args.what else ():
        extra += floors.link_tokens(make_config(args, scale, experts, 1), args.quick)
    while True:
        largest = max([*args.tokens, *extra])
        configs = {scale: make_config(args, scale, experts, largest) for scale in args.scales}
        need = sum(megamoe.memory_estimate(cfg, world_size)["total"] for cfg in configs.values())
        if need + SPARE_BYTES <= free or args.given_tokens or len(args.tokens) == 1:
            return configs
        args.tokens.pop()


def describe_run(args: argparse.Namespace, world: Any, configs: dict[str, MoEConfig]) -> dict[str, Any]:
    """The keys that all rows share."""
    cfg, properties = next(iter(configs.values())), torch.cuda.get_device_properties(world.device(world.local_ranks[0]))
    shape = {name: getattr(cfg, name) for name in ("hidden", "intermediate", "num_experts", "top_k", "max_tokens")}
    return dict(
        **dict(commit=commit(), date=datetime.datetime.now().astimezone().isoformat(timespec="seconds")),
        **dict(command=command_line(world.size), gpu=properties.name),
        **dict(driver=doctor.driver_release(), torch=torch.__version__, cuda=torch.version.cuda),
        **dict(dsl=doctor.version("nvidia-cutlass-dsl"), megamoe=megamoe.__version__, W=world.size, **shape),
        **dict(fp8=cfg.fp8, accum=args.accum, knobs=args.knobs.describe() if args.knobs else "auto", seed=args.seed),
    )


def command_line(world_size: int) -> str:
    """How this run was started, without --out (a path of the machine)."""
    words = [word for word in sys.argv[1:] if not word.startswith("--out=")]
    if "--out" in words:
        at = words.index("--out")
        words[at : at + 2] = []
    start = ["python"] if world_size == 1 else ["torchrun", "--standalone", f"--nproc-per-node={world_size}"]
    return shlex.join([*start, "tools/bench.py", *words])


def commit() -> str:
    """MEGAMOE_COMMIT, else git's short hash of this checkout ("-dirty" with changes), else "unknown"."""
    if os.environ.get("MEGAMOE_COMMIT"):
        return os.environ["MEGAMOE_COMMIT"]
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip() or "unknown"
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"


class Bench:
    """What sections share: world, layers (made when first needed), clock, ceilings, rows."""

    def __init__(self, args: argparse.Namespace, world: Any, stack: contextlib.ExitStack) -> None:
        import timing
        from tqdm import tqdm

        self.args, self.world, self._stack = args, world, stack
        self.rank = world.local_ranks[0]
        self.device = world.device(self.rank)
        self.configs = plan(args, world.size, min(world.gather([torch.cuda.mem_get_info(self.device)[0]], "free")))
        self.meta = describe_run(args, world, self.configs)
        self.rows: list[dict[str, Any]] = []
        self._packs: dict[str, Any] = {}
        self._layers: dict[str, Any] = {}
        self._progress = tqdm(unit="point", file=sys.stderr, disable=self.rank != 0)
        self.clock = timing.Clock(world)
        self.dense = timing.Dense(self.clock, args.runs // 2)
        self.say("ceilings")
        speeds = timing.measure_memory(self.clock, args.runs // 2) + timing.measure_dense(self.dense)
        self.speeds = speeds + timing.measure_link(self.clock, args.runs // 2)
        self.ceilings = timing.ceilings_of(self.speeds)
        torch.cuda.empty_cache()

    def say(self, text: str) -> None:
        """Progress: the point that comes next."""
        self._progress.set_description(text)
        self._progress.update()

    def add(self, **row: Any) -> None:
        """Record a row; rank 0 writes it at once, so that a run cut short keeps what it had."""
        row = floors.with_bar(row)
        self.rows.append(row)
        if self.args.out and self.rank == 0:
            with self.args.out.open("a") as file:
                file.write(json.dumps(row | self.meta) + "\n")

    def pack(self, scale: str) -> Any:
        """This rank's random experts."""
        if scale not in self._packs:
            import inputs

            self.say(f"{scale}: weights")
            seed = self.args.seed + self.rank
            self._packs[scale] = inputs.random_experts(self.configs[scale], self.world.size, seed, self.device)
        return self._packs[scale]

    def layer(self, scale: str) -> megamoe.MegaMoE:
        """The warmed-up layer. Collective at first."""
        if scale not in self._layers:
            pack = self.pack(scale)
            moe = megamoe.MegaMoE(self.configs[scale], pack, self.world, knobs=self.args.knobs)
            self._layers[scale] = self._stack.enter_context(moe)
            self.say(f"{scale}: compile")
            moe.warmup()
        return self._layers[scale]

    def problem(self, scale: str, kind: str, tokens: int) -> tuple[tuple[torch.Tensor, ...], list[floors.Traffic]]:
        """Fresh (x, ids, weights) of this rank, and every rank's traffic. Collective."""
        import inputs

        cfg = self.configs[scale]
        made = inputs.make_inputs(kind, cfg, self.rank, self.world.size, tokens, self.args.seed, self.device)
        counts = torch.bincount(made[1].flatten().long(), minlength=cfg.num_experts).tolist()
        return made, floors.traffic([tokens] * self.world.size, self.world.gather([counts], "counts"))

    def rates(self, cfg: MoEConfig, rows: int) -> dict[str, float]:
        """Dense FLOP/s at the sizes of fc1 and fc2 with `rows` rows in all (equal on every rank)."""
        sizes = {"fc1": (2 * cfg.intermediate, cfg.hidden), "fc2": (cfg.hidden, cfg.intermediate)}
        return {name: self.dense.rate(rows, n, k) for name, (n, k) in sizes.items()}

    def knobs(self, cfg: MoEConfig, world_size: int, tokens: int) -> Knobs:
        """What --knobs says, else what the layer chooses."""
        from megamoe.sched import heuristics

        return self.args.knobs or heuristics.choose_knobs(cfg, world_size, tokens)


def run(args: argparse.Namespace, world: Any) -> None:
    """Every chosen section, then the tables on rank 0."""
    import sections

    with contextlib.ExitStack() as stack:
        b = Bench(args, world, stack)
        try:
            for what in floors.COLUMNS:
                if what in args.what:
                    sections.RUN[what](b)
        finally:
            b._progress.close()
            if b.rank == 0:
                print("\n".join(f"{key}: {value}" for key, value in b.meta.items()), end="\n\n")
                print(floors.report(b.rows), flush=True)


def main(argv: list[str] | None = None) -> int:
    """Run a command line; the exit status is 0 whether bars pass or not, 2 without a GPU."""
    ranks, local = (int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")))
    args = parse(argv, ranks)
    if not torch.cuda.is_available():
        print("bench.py needs a Hopper GPU: torch sees no CUDA device", file=sys.stderr)
        return 2
    torch.cuda.set_device(local)
    if ranks > 1:
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast buys a one-word all-reduce nothing
        dist.init_process_group("cpu:gloo,cuda:nccl")
    with megamoe.world(timeout_s=args.timeout_s) as world:
        run(args, world)
    if ranks > 1:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
