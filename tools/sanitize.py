"""A small layer for compute-sanitizer: one forward of two virtual ranks in each main mode, checked.

compute-sanitizer --tool memcheck --report-api-errors no python3 tools/sanitize.py
compute-sanitizer --tool racecheck --racecheck-report all python3 tools/sanitize.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from megamoe import Knobs, MoEConfig
from tests.gpu.layers import DEVICE, check, open_layer, oracle
from tests.problems import make_inputs

BLOCK = dict(scale="block")
RUNS = (
    (BLOCK, None),
    (dict(scale="block", act_group=64), None),
    (dict(scale="tensor", accum="single"), None),
    (BLOCK, Knobs(tile_rows=32, tile_cols=256, swap_ab=True)),
    (BLOCK, Knobs(tile_rows=64, pingpong=True, schedule="atomic")),
)
"""Modes, and knobs where not what a layer chooses."""


def main() -> None:
    """Run and check; the sanitizer reports what it finds by itself."""
    if not torch.cuda.is_available():
        sys.exit("sanitize: torch sees no CUDA device")
    for mode, knobs in RUNS:
        cfg = MoEConfig(hidden=256, intermediate=128, num_experts=4, top_k=2, max_tokens=96, **mode)
        # The tools slow kernels down a hundredfold, so the deadline is far away.
        with open_layer(cfg, 2, knobs=knobs, timeout_s=300, check_routes=True) as (_, packs, moe):
            p = make_inputs(cfg, [96, 40], "masked", 1, DEVICE)
            for _ in range(2):
                ys = moe(p.xs, p.ids, p.weights)
            moe.synchronize()
            print(mode, knobs, "error", check(cfg, ys, oracle(cfg, packs, p)), flush=True)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
