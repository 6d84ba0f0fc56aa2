"""A timeline of what each warp role of each SM did in one forward.

    python tools/trace.py --tokens 512 --out DIR                   # every kernel
    python tools/trace.py --kernel fc1,fc2 --scale tensor --out DIR
    python tools/trace.py --kernel fc1 --knobs tile_rows=128,tile_cols=256 --out DIR
    python tools/trace.py --virtual 2 --devices 0,1 --out DIR      # two ranks, a GPU each, in one process
    python tools/trace.py --read DIR/trace.npz --out DIR           # the same files from stored records; no GPU

A whole forward runs, of which the kernels named are compiled with tracing on (megamoe/kernels/trace.py); the others
are as always. Writes trace.npz (the records), trace.json (for chrome://tracing or ui.perfetto.dev) and trace.png (one
row an SM, colour a phase; needs matplotlib), and prints a table: of each kernel and role the share of the kernel's
time in which it waits and for what, works and at what, is between two records, and has none yet or none any more.
Records that found no room are named above the table, and the exit status is 1.

Tracing costs time: reading the clock twice for each wait for a stage, and a few stores a tile. Compare shares, not
times; the times of untraced kernels are those of tools/bench.py. GPUs' clocks may be some us apart.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
for folder in (ROOT, ROOT / "tools"):  # megamoe of this checkout, and the files beside this one
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import inputs  # noqa: E402
import layers  # noqa: E402
import numpy as np  # noqa: E402
import options  # noqa: E402
import timeline  # noqa: E402
import torch  # noqa: E402

import megamoe  # noqa: E402
from megamoe.kernels import trace as tracing  # noqa: E402
from megamoe.kernels.catalog import NAMES  # noqa: E402

WARM_UP = 3
"""Forwards before the one that is kept."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words = lambda text: text.split(",")  # noqa: E731
    top.add_argument(
        "--kernel",
        type=words,
        default=["forward"],
        help=f"forward (all; default) or a comma list of {', '.join(NAMES)}",
    )
    options.add_shape(top)
    top.add_argument("--tokens", type=int, default=512, help="T of each rank (default: 512)")
    top.add_argument("--scale", choices=("block", "tensor"), default="block")
    top.add_argument("--accum", choices=("promoted", "single"), default="promoted", help="in tensor mode")
    top.add_argument("--routing", choices=inputs.ROUTINGS, default="balanced")
    top.add_argument("--virtual", type=int, metavar="N", help="N ranks (2 to 8) in this process")
    top.add_argument("--devices", type=words, help="GPUs of the N ranks, a comma list (default: the first)")
    top.add_argument("--knobs", default="auto", help=options.KNOBS_HELP)
    top.add_argument("--seed", type=int, default=0)
    top.add_argument("--sms", type=int, help="trace.json holds the first N SMs only: it is large for many tokens")
    top.add_argument("--read", type=Path, metavar="trace.npz", help="records of an earlier run")
    top.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the files")
    return top


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Checked arguments; adds kernels, and what options.plan reads."""
    top = parser()
    args = top.parse_args(argv)
    args.kernels = NAMES if args.kernel == ["forward"] else tuple(args.kernel)
    for name in args.kernels:
        if name not in NAMES:
            top.error(f"--kernel {name}: forward, or some of {', '.join(NAMES)}")
    options.check_ranks(top, args, args.virtual or 1, [args.routing])
    if args.devices and not args.virtual:
        top.error("--devices: with --virtual")
    args.shape = options.shape_of(args)
    args.knobs = options.parse_knobs(top, args.knobs)
    return args


def plan(args: argparse.Namespace, world_size: int, free: int) -> megamoe.MoEConfig:
    """The layer, with as many experts as `free` bytes a rank allow."""
    asked = dict(scales=(args.scale,), what=(), tokens=[args.tokens], given_tokens=True, quick=False)
    return options.plan(argparse.Namespace(**(vars(args) | asked)), world_size, free)[args.scale]


def measure(args: argparse.Namespace, world: Any) -> tuple[timeline.Records, dict[str, int], str]:
    """(records of one forward, dropped records by kernel, what ran)."""
    ranks = world.local_ranks
    free = torch.cuda.mem_get_info(world.device(ranks[0]))[0] // len(ranks)
    cfg = plan(args, world.size, free)
    experts = [inputs.random_experts(cfg, world.size, args.seed + rank, world.device(rank)) for rank in ranks]
    buffers = [tracing.buffers(args.kernels, world.num_sms(rank), world.device(rank)) for rank in ranks]
    packs = experts if world.kind == "virtual" else experts[0]
    with megamoe.MegaMoE(cfg, packs, world, knobs=args.knobs, _traces=buffers) as moe:
        moe.warmup()
        forward = layers.forward(moe, inputs.make_problem(cfg, args.routing, args.tokens, world, args.seed))
        for _ in range(WARM_UP):
            forward()
        moe.synchronize()
        for buffer in [buffer for of_rank in buffers for buffer in of_rank.values()]:
            buffer.zero_()
        moe.synchronize()
        forward()
        moe.synchronize()
    records, dropped = [], {}
    for rank, of_rank in zip(ranks, buffers):
        found, lost = timeline.decode_all(of_rank, rank, world.device(rank).index or 0)
        records.append(found)
        dropped |= {f"{name} of rank {rank}": n for name, n in lost.items()}
    shape = f"H {cfg.hidden}, I {cfg.intermediate}, E {cfg.num_experts}, top-{cfg.top_k}, W {world.size}"
    title = f"{torch.cuda.get_device_name(0)}: T {args.tokens}, {shape}, {args.routing} routing, {cfg.scale} scales"
    return np.concatenate(records), dropped, title


def write(
    records: timeline.Records,
    title: str,
    out: Path,
    sms: int | None = None,
    dropped: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """Write trace.npz, trace.json and, where matplotlib is installed, trace.png into `out`; print the table.

    dropped: records that found no room, by kernel; named above the table, whose shares are then of a part only.
    """
    out.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(out / "trace.npz", records=records, title=title, dropped=json.dumps(dict(dropped)))
    kept = records if sms is None else records[records["sm"] < sms]
    timeline.write_chrome(kept, out / "trace.json")
    try:
        import timeline_png
    except ImportError:
        print('no trace.png without matplotlib: pip install -e ".[dev]"', file=sys.stderr)
    else:
        timeline_png.write(records, out / "trace.png", title)
    print(f"{title}\n")
    for name, count in dropped.items():
        print(f"INCOMPLETE: no room for the last {count} records of {name}; see ROOM in megamoe/kernels/trace.py\n")
    print(timeline.table(timeline.shares(records)))


def main(argv: list[str] | None = None) -> int:
    """Run a command line; 1 when there are no records or some found no room, 2 without a GPU."""
    args = parse(argv)
    dropped: dict[str, int] = {}
    if args.read:
        with np.load(args.read) as stored:
            records, title = stored["records"], str(stored["title"])
            dropped = json.loads(str(stored["dropped"])) if "dropped" in stored else {}
    elif not torch.cuda.is_available():
        print("trace.py needs a Hopper GPU: torch sees no CUDA device", file=sys.stderr)
        return 2
    else:
        devices = [int(name) for name in args.devices] if args.devices else None
        virtual = args.virtual and megamoe.VirtualWorld(args.virtual, devices=devices)
        with virtual or megamoe.world() as world:
            records, dropped, title = measure(args, world)
    if not len(records):
        print("no records", file=sys.stderr)
        return 1
    write(records, title, args.out, args.sms, dropped)
    return 1 if dropped else 0


if __name__ == "__main__":
    sys.exit(main())
