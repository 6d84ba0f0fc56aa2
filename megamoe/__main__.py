"""python -m megamoe demo | doctor."""

from __future__ import annotations

import argparse
import sys

from .config import FP8_MAX, MAX_RANKS
from .errors import MissingDependency


def _ranks(text: str) -> int:
    count = int(text)
    if not 1 <= count <= MAX_RANKS:
        raise argparse.ArgumentTypeError(f"{count}: must be from 1 to {MAX_RANKS}")
    return count


def _positive(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{count}: must be at least 1")
    return count


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: must be a finite number above 0")
    return value


def parser() -> argparse.ArgumentParser:
    """The command line. demo leaves None where the machine decides (tokens, experts, virtual)."""
    top = argparse.ArgumentParser(prog="python -m megamoe", description="Expert-parallel FP8 MoE layer for Hopper GPUs")
    commands = top.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="run a DeepSeek-V3-shaped layer and check it against the oracle")
    demo.add_argument("--virtual", type=_ranks, metavar="N", help="N virtual ranks on one GPU (default: no)")
    demo.add_argument("--tokens", type=_positive, metavar="T", help="tokens of each rank")
    demo.add_argument("--experts", type=_positive, metavar="E", help="experts over all ranks (default: what fits)")
    demo.add_argument("--scale", choices=("block", "tensor"), default="block", help="scale mode (default: block)")
    demo.add_argument("--fp8", choices=tuple(FP8_MAX), default="e4m3", help="number format (default: e4m3)")
    demo.add_argument("--timeout-s", type=_seconds, default=30.0, metavar="S", help="limit of every wait (default: 30)")
    commands.add_parser("doctor", help="print versions, GPUs, and what each missing thing prevents")
    return top


def main(argv: list[str] | None = None) -> int:
    """Run a command of argv (default: sys.argv) and return the exit status."""
    args = parser().parse_args(argv)
    if args.command == "doctor":
        from . import doctor

        return doctor.main()
    from . import _load

    try:
        demo = _load("demo")
    except MissingDependency as error:
        print(f"megamoe demo: {error}", file=sys.stderr)
        return 1
    return demo.main(args) or 0


if __name__ == "__main__":
    sys.exit(main())
