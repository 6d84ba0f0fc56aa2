"""The demo without a Hopper GPU: the layer on the torch reference, small, then each kernel compiled for sm_90a."""

from __future__ import annotations

import argparse
import time

import torch

from .. import reference
from ..config import MoEConfig
from .problem import HIDDEN, INTERMEDIATE, TOP_K, DemoProblem, cosine_bound, progress

SHRINK = 8
"""The hidden and intermediate sizes are divided by this."""


def reference_layer(args: argparse.Namespace) -> bool:
    """Run the small layer and print how far FP8 takes it from the unquantised one; whether it is near enough."""
    ranks, tokens = args.virtual or 1, args.tokens or 64
    experts = args.experts or 32 // ranks * ranks
    cfg = MoEConfig(
        hidden=HIDDEN // SHRINK,
        intermediate=INTERMEDIATE // SHRINK,
        num_experts=experts,
        top_k=min(TOP_K, experts),
        max_tokens=tokens,
        fp8=args.fp8,
        scale=args.scale,
    )
    cfg.experts_local(ranks)
    problem = DemoProblem(cfg, torch.device("cpu")).calibrated()
    print(f"layer    hidden {cfg.hidden}, intermediate {cfg.intermediate}, {experts} experts, top-{cfg.top_k}")
    print(f"         {cfg.fp8}, {cfg.scale} scales; {tokens} tokens on each of {ranks} rank(s); on the torch reference")
    ys, exact = [], []
    for rank in range(ranks):
        inputs = (problem.tokens(rank, tokens), *problem.routes(rank, tokens))
        ys.append(problem.oracle(*inputs).float())
        exact.append(problem.unquantised(*inputs))
    y, want = torch.cat(ys), torch.cat(exact)
    cosine, least = reference.cosine(y, want), cosine_bound(cfg)
    good = cosine >= least
    print(f"error    against the layer without FP8: relative {reference.relative_error(y, want):.2e}, ", end="")
    print(f"cosine {cosine:.5f} (bound {least}): {'good' if good else 'OUT OF BOUNDS'}")
    return good


def compile_all(args: argparse.Namespace) -> bool:
    """Compile each kernel in the flags' mode and print what ptxas says; whether all are clean.

    Raises MissingDependency.
    """
    from ..kernels.catalog import catalog, shared_bytes
    from ..kernels.report import ARCH, report

    lines, good, total = [], True, 0.0
    for entry in progress(catalog(quick=True, scale=args.scale, fp8=args.fp8), "compiling"):
        kernel = entry.make()
        began = time.perf_counter()
        found = report(kernel)
        seconds = time.perf_counter() - began
        total += seconds
        good &= found.clean
        spills = found.spill_stores + found.spill_loads
        lines.append((entry.name, entry.mode, found.registers, shared_bytes(kernel), found.stack, spills, seconds))
    units = "shared, stack and spills in bytes; the tests compile every mode"
    print(f"\nOne build of each kernel, compiled for {ARCH} ({units})\n")
    width = max(len(mode) for _, mode, *_ in lines)
    columns = "{:10}  {:" + str(width) + "}  {:>9}  {:>6}  {:>5}  {:>6}  {:>7}"
    print(columns.format("kernel", "mode", "registers", "shared", "stack", "spills", "seconds"))
    for *line, seconds in lines:
        print(columns.format(*line, f"{seconds:.1f}"))
    print(f"\n{len(lines)} kernels in {total:.1f} s; {'no spills, no stack' if good else 'NOT ALL CLEAN'}")
    return good


def main(args: argparse.Namespace, reason: str, processes: int = 1) -> int:
    """Run both parts and say why no kernel runs; 0 when all is well. Raises ConfigError, MissingDependency.

    processes: how many were started; only one of them should come here.
    """
    print(f"megamoe demo: no kernel runs here, because {reason}.")
    print("The torch reference shows the layer's numbers; the kernels are compiled, which needs no GPU.")
    if processes > 1:
        print(f"The {processes} processes are not played as ranks: one does this alone.")
    print()
    near = reference_layer(args)
    clean = compile_all(args)
    print(f"No kernel ran: {reason}.")
    return 0 if near and clean else 1
