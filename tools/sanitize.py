"""A small layer for compute-sanitizer: one forward of two virtual ranks in each main mode, checked.

compute-sanitizer --tool memcheck python3 tools/sanitize.py
compute-sanitizer --tool racecheck python3 tools/sanitize.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from megamoe import MoEConfig
from tests.gpu.layers import DEVICE, check, open_layer, oracle
from tests.problems import make_inputs

MODES = (dict(scale="block"), dict(scale="block", act_group=64), dict(scale="tensor", accum="single"))


def main() -> None:
    """Run and check; the sanitizer reports what it finds by itself."""
    for mode in MODES:
        cfg = MoEConfig(hidden=256, intermediate=128, num_experts=4, top_k=2, max_tokens=96, **mode)
        # The tools slow kernels down a hundredfold, so the deadline is far away.
        with open_layer(cfg, 2, timeout_s=300, check_routes=True) as (_, packs, moe):
            p = make_inputs(cfg, [96, 40], "masked", 1, DEVICE)
            for _ in range(2):
                ys = moe(p.xs, p.ids, p.weights)
            moe.synchronize()
            print(mode, "error", check(cfg, ys, oracle(cfg, packs, p)), flush=True)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
