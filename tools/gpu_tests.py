"""Run every GPU test, side by side where that is safe, and print a Markdown table for tools/results/.

    python tools/gpu_tests.py [--logs DIR]

Most of the time of the GPU tests is compiling on one core, so their files run as processes beside each
other, spread over the GPUs of the machine. Tests with deadlines or times (faults, trace, ranks) have GPUs of their own:
with four they run beside the others, with fewer after them. The rank tests run under torchrun with 2, 4 and 8
processes where there are GPUs for them. Exit status 1 when anything failed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 400
NO_SUMMARY = "no summary: timed out or crashed"


@dataclass(frozen=True)
class Group:
    """One pytest process. name: of its log; args: after `pytest`; ranks: 0 without torchrun."""

    name: str
    args: tuple[str, ...]
    ranks: int = 0

    def command(self) -> list[str]:
        """What is run."""
        pytest = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", "--tb=short", *self.args]
        if not self.ranks:
            return [sys.executable, *pytest]
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}"]
        return [sys.executable, *launch, *pytest]

    def shown(self) -> str:
        """The command as a reader would type it."""
        args = " ".join(f'"{a}"' if " " in a else a for a in self.args)
        return f"torchrun --nproc-per-node={self.ranks} -m pytest {args}" if self.ranks else f"pytest {args}"


FP8 = ("e4m3", "e5m2")
GEMMS = {
    "shapes": "single_expert or (shapes and not schedule and not turns)",
    "any": "any_rows",
    "bits": "same_bits and (tiles or queue)",
    "bits-others": "same_bits and not tiles and not queue",
    "tiles": "static_tiles or atomic_schedule",
    "wide": "wide and not pingpong",
    "wide-turns": "wide and pingpong",
    "turns": "shapes_with_warpgroups_in_turns",
    "turns-modes": "turns_in_every_mode",
    "swapped": "test_swapped_operands and 64x256",
    "swapped-others": "test_swapped_operands and not 64x256 and not narrow and not block_mode",
    "narrow": "narrow",
}
"""Names and -k of groups of tests/gpu/test_gemm.py, none longer than the longest of the others."""


def _gemm(name: str, which: str) -> Group:
    return Group(f"gemm-{name}", ("tests/gpu/test_gemm.py", "-k", which))


BESIDE = (
    *(_gemm(name, which) for name, which in GEMMS.items()),
    *(
        _gemm(f"{fp8}-{scale}", f"test_every_mode and {fp8} and {scale}")
        for fp8 in FP8
        for scale in ("block", "tensor")
    ),
    *(_gemm(f"middle-{fp8}-{sums}", f"middle and {fp8} and {sums}") for fp8 in FP8 for sums in ("promoted", "single")),
    *(_gemm(f"swapped-{fp8}", f"every_block_mode and {fp8}") for fp8 in FP8),
    Group("modes-e4m3", ("tests/gpu/test_layer.py", "-k", "every_mode and e4m3")),
    Group("modes-e5m2", ("tests/gpu/test_layer.py", "-k", "every_mode and e5m2")),
    Group("routing", ("tests/gpu/test_layer.py", "-k", "every_routing")),
    Group("layer-clamp", ("tests/gpu/test_layer.py", "-k", "test_clamp or one_expert_a_rank")),
    Group("layer-shapes", ("tests/gpu/test_layer.py", "-k", "odd_shapes or no_tickets")),
    Group("layer-near", ("tests/gpu/test_layer.py", "-k", "near_the")),
    Group("layer", ("tests/gpu/test_layer.py", "-k", "prequantised or nan or bad_ids or 31_bits")),
    Group("problems", ("tests/gpu/test_layer.py", "-k", "any_problem")),
    Group("process", ("tests/gpu/test_process.py",)),
    Group("data", ("tests/gpu/test_data_kernels.py", "tests/gpu/test_examples.py")),
)
TIMED = ("trace", "virtual", "faults", "graph", "killed_rank", "ops")
ALONE = (Group("timed", tuple(f"tests/gpu/test_{n}.py" for n in TIMED)),)


def outcome(text: str) -> str:
    """pytest's last summary line, or that there is none."""
    found = re.findall(r"^=*\s*((?:\d+ \w+,? ?)+in [\d.]+s)", text, re.MULTILINE)
    return found[-1] if found else NO_SUMMARY


def rounds(gpus: int) -> list[list[tuple[Group, str | None]]]:
    """What runs beside each other, round after round: groups with the GPUs that they see (None: all)."""
    ranks = [(Group(f"ranks{n}", ("tests/ranks",), ranks=n), None) for n in (2, 4, 8) if n <= gpus]
    if gpus < 4:
        beside = [(group, str(number % gpus)) for number, group in enumerate(BESIDE)]
        return [beside, [(group, None) for group in ALONE], *([one] for one in ranks)]
    shared = gpus - 3
    together = [(group, str(number % shared)) for number, group in enumerate(BESIDE)]
    together += [(group, f"{shared},0") for group in ALONE]  # one of them takes a second GPU for a moment
    together += [(ranks[0][0], f"{gpus - 2},{gpus - 1}")]
    return [together, *([one] for one in ranks[1:])]


def family(pid: int) -> list[int]:
    """A process and all that it started, parents first. torchrun gives each rank a session of its own, so that
    no process group holds them all; Linux's /proc knows whose child each is."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # ended meanwhile
            parent = stat.read_text().rpartition(")")[2].split()[1]
            children.setdefault(int(parent), []).append(int(stat.parent.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def run(groups: list[tuple[Group, str | None]], logs: Path, limit_s: float = LIMIT_S) -> dict[Group, tuple[int, str]]:
    """Run groups beside each other, at most limit_s seconds; (exit status, outcome) of each."""
    running = {}
    for group, visible in groups:
        env = {**os.environ, "PYTHONUNBUFFERED": "1"}
        if visible is not None:
            env["CUDA_VISIBLE_DEVICES"] = visible
        log = (logs / f"{group.name}.log").open("w")
        running[group] = subprocess.Popen(group.command(), cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT)
    results, end = {}, time.monotonic() + limit_s
    for group, process in running.items():
        try:
            status = process.wait(max(end - time.monotonic(), 1))
        except subprocess.TimeoutExpired:
            for pid in family(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            status = process.wait()
        results[group] = (status, outcome((logs / f"{group.name}.log").read_text(errors="replace")))
        print(f"{group.name}: {results[group][1]}", file=sys.stderr, flush=True)
    return results


def main() -> int:
    """Run everything, print the table."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logs", type=Path, help="where the logs go; a temporary folder by default")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="seconds for a round (default: %(default)s)")
    parser.add_argument("--round", type=int, help="run one round only, from 1 (default: all, one after the other)")
    args = parser.parse_args()
    gpus = torch.cuda.device_count()
    if not gpus:
        print("gpu_tests: torch sees no CUDA device", file=sys.stderr)
        return 2
    logs = args.logs or Path(tempfile.mkdtemp(prefix="megamoe-tests-"))
    logs.mkdir(parents=True, exist_ok=True)
    results: dict[Group, tuple[int, str]] = {}
    chosen = rounds(gpus)
    if args.round is not None:
        if not 1 <= args.round <= len(chosen):
            parser.error(f"--round {args.round}: must be from 1 to {len(chosen)} with {gpus} GPUs")
        chosen = chosen[args.round - 1 : args.round]
    for groups in chosen:
        results.update(run(groups, logs, args.limit_s))
        if any(text == NO_SUMMARY for _, text in results.values()):
            print("gpu_tests: a group did not end by itself; what would follow is left out", file=sys.stderr)
            break
    print(f"{gpus} x {torch.cuda.get_device_name(0)}, torch {torch.__version__}\n\n| command | outcome |\n|---|---|")
    for group, (status, text) in results.items():
        print(f"| `{group.shown()}` | {text}{'' if status == 0 else f', EXIT {status}'} |")
    print(f"\nlogs: {len(results)} files")
    return int(any(status for status, _ in results.values()))


if __name__ == "__main__":
    sys.exit(main())
