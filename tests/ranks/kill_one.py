"""A rank dies in the middle: the others must end with an error, not hang.

tests/gpu/test_killed_rank.py runs it under torchrun and judges the line that each surviving rank prints:
"rank R: <error> after <seconds> s: <text>". No line, or another one, is a failure.
"""

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

import megamoe
from tests.problems import make_inputs, make_weights


def main() -> None:
    """Run until the last rank kills itself, then wait for the abort."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends survivors at once; these have something to say
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    cfg = megamoe.MoEConfig(hidden=1024, intermediate=384, num_experts=16, top_k=4, max_tokens=400)
    world = megamoe.world(timeout_s=5)
    rank = world.local_ranks[0]
    moe = megamoe.MegaMoE(cfg, make_weights(cfg, world.size, 0, "cuda")[rank], world, timeout_s=1)
    moe.warmup()
    p = make_inputs(cfg, [400] * world.size, "random", 1, "cuda")
    for _ in range(3):
        moe(p.xs[rank], p.ids[rank], p.weights[rank])
    moe.synchronize()
    world.barrier("before the kill")
    if rank == world.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    start = time.perf_counter()
    y = moe(p.xs[rank], p.ids[rank], p.weights[rank])
    try:
        moe.synchronize()
        verdict = "NO ERROR"
    except megamoe.MegaMoEAborted as error:
        verdict = f"{type(error).__name__} after {time.perf_counter() - start:.2f} s: {error}"
    except Exception as error:  # whatever CUDA says when a peer's memory has gone
        verdict = f"{type(error).__name__} after {time.perf_counter() - start:.2f} s: {str(error)[:200]}"
    else:
        verdict += f", y NaN: {bool(y.isnan().all())}"
    print(f"rank {rank}: {verdict}", flush=True)
    os._exit(3)


if __name__ == "__main__":
    main()
