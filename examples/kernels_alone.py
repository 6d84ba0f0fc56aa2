"""Single kernels on torch tensors, FC1 and FC2 on some rows: PYTHONPATH=. python examples/kernels_alone.py"""

import torch

import megamoe
from megamoe import kernels, reference, wire

cfg = megamoe.MoEConfig(hidden=1024, intermediate=512, num_experts=4, top_k=1, max_tokens=1024)
w13 = torch.randn(4, 2 * 512, 1024, device="cuda", dtype=torch.bfloat16) * 1024**-0.5
w2 = torch.randn(4, 1024, 512, device="cuda", dtype=torch.bfloat16) * 512**-0.5
experts = megamoe.ExpertWeights.from_bf16(cfg, w13, w2)

rows = torch.randn(600, 1024, device="cuda", dtype=torch.bfloat16)  # grouped by expert: 100, 0, 300, 200 rows
expert_start = torch.tensor([0, 100, 100, 400, 600], dtype=torch.int32, device="cuda")
codes, scales = reference.stage(cfg, rows)
records = kernels.pack_rows(codes, scales, wire.input_format(cfg))  # codes and scales of a row side by side
weights = torch.ones(600, device="cuda")

activations, fp32 = kernels.fc1(records, expert_start, experts, debug=True)  # fp32: before they are quantised
y = kernels.fc2(activations, expert_start, experts, weights)
print("FC1", tuple(fp32.shape), fp32.dtype, "FC2", tuple(y.shape), y.dtype)
