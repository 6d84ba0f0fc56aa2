"""One layer on one Hopper GPU, checked against the oracle: PYTHONPATH=. python examples/one_gpu.py"""

import torch

import megamoe
from megamoe import reference

cfg = megamoe.MoEConfig(hidden=2048, intermediate=768, num_experts=64, top_k=8, max_tokens=512)
w13 = torch.randn(64, 2 * 768, 2048, device="cuda", dtype=torch.bfloat16) * 2048**-0.5  # gate rows, then up rows
w2 = torch.randn(64, 2048, 768, device="cuda", dtype=torch.bfloat16) * 768**-0.5
x = torch.randn(300, 2048, device="cuda", dtype=torch.bfloat16)
topk_weights, topk_ids = torch.rand(300, 64, device="cuda").topk(8)

with megamoe.world() as world:
    experts = megamoe.ExpertWeights.from_bf16(cfg, w13, w2)
    with megamoe.MegaMoE(cfg, experts, world) as moe:
        moe.warmup()  # compiles every kernel; forwards then never do
        y = moe(x, topk_ids, topk_weights)  # bf16 [300, 2048]
        moe.synchronize()  # raises if the forward aborted; check() does the same without waiting

want = reference.layer(cfg, [experts.canonical()], [x], [topk_ids], [topk_weights])[0]
print(f"relative error against the oracle: {reference.relative_error(y, want):.1e}")
