"""What a row says of the run and its machine: commit, versions, settings; clocks, power and temperature."""

from __future__ import annotations

import argparse
import datetime
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import megamoe
from megamoe import MoEConfig, doctor

ROOT = Path(__file__).resolve().parent.parent
FIELDS = {
    "clocks.sm": "sm_mhz",
    "clocks.mem": "mem_mhz",
    "power.draw": "watts",
    "temperature.gpu": "celsius",
    "clocks_event_reasons.active": "clock_reasons",
}
"""nvidia-smi's names of what is recorded, and ours. The last is new, and left out where it is not known."""


def describe_run(args: argparse.Namespace, world: Any, configs: dict[str, MoEConfig]) -> dict[str, Any]:
    """The keys that all rows share."""
    cfg, properties = next(iter(configs.values())), torch.cuda.get_device_properties(world.device(world.local_ranks[0]))
    shape = {name: getattr(cfg, name) for name in ("hidden", "intermediate", "num_experts", "top_k", "max_tokens")}
    return dict(
        **dict(commit=commit(), date=datetime.datetime.now().astimezone().isoformat(timespec="seconds")),
        **dict(command=command_line(1 if args.virtual else world.size), gpu=properties.name),
        **dict(driver=doctor.driver_release(), torch=torch.__version__, cuda=torch.version.cuda),
        **dict(dsl=doctor.version("nvidia-cutlass-dsl"), megamoe=megamoe.__version__, W=world.size),
        **dict(world="virtual" if args.virtual else "processes", preset=args.preset, execution="staged", **shape),
        **dict(fp8=cfg.fp8, accum=args.accum, knobs=next(iter(args.settings)), seed=args.seed),
    )


def command_line(processes: int) -> str:
    """How this run was started, without --out (a path of the machine)."""
    words = [word for word in sys.argv[1:] if not word.startswith("--out=")]
    if "--out" in words:
        at = words.index("--out")
        words[at : at + 2] = []
    start = ["python"] if processes == 1 else ["torchrun", "--standalone", f"--nproc-per-node={processes}"]
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


def health(device: torch.device) -> dict[str, Any]:
    """Clocks (MHz), power (W), temperature and reasons of a lower clock (a bit mask) of a GPU, as nvidia-smi
    reads them now; nothing is set. Empty without nvidia-smi."""
    identity = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    which = str(device.index or 0) if identity is None else f"GPU-{identity}"
    for names in (list(FIELDS), list(FIELDS)[:-1]):
        command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits", "-i", which]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return {}
        values = [word.strip() for word in done.stdout.strip().split(",")]
        if done.returncode == 0 and len(values) == len(names):
            return {FIELDS[name]: number(word) for name, word in zip(names, values)}
    return {}


def number(word: str) -> float | str:
    """A word as a number where it is one."""
    try:
        return float(word)
    except ValueError:
        return word


def over_ranks(readings: list[dict[str, Any]]) -> dict[str, Any]:
    """One reading for all GPUs: the lowest clocks, the highest power and temperature, all reasons."""
    merged: dict[str, Any] = {}
    for key in FIELDS.values():
        values = [reading[key] for reading in readings if key in reading]
        numbers = [value for value in values if isinstance(value, float)]
        if numbers:
            merged[key] = (min if key.endswith("_mhz") else max)(numbers)
        elif values:
            merged[key] = ",".join(dict.fromkeys(values))
    return merged
