"""Trace buffers made up on the CPU: what the kernels of a forward would have written."""

from __future__ import annotations

import torch

from megamoe.kernels import trace
from megamoe.kernels.trace import NO_TILE, Phase, Role

CYCLES_PER_NS = 2
STARTS = {"stage": 0, "pull": 20_000, "fc1": 60_000, "reduce": 400_000}


def put(buffer: torch.Tensor, cta: int, slot: int, sm: int, role: Role, phases: list[tuple], start: int) -> int:
    """Append records (phase, ns, waited ns, tile) one after another from `start`, as trace.end does; the last end."""
    for phase, ns, waited, tile in phases:
        count = int(buffer[cta, slot, 0, 0])
        if count < buffer.shape[2] - 1:
            word = role | phase << 8 | sm << 16 | (tile & 0xFFFFFFFF) << 32
            cycles = (start + ns) * CYCLES_PER_NS & 0xFFFFFFFF
            words = [start, start + ns, *(w - (w >> 63 << 64) for w in (word, waited | cycles << 32))]
            buffer[cta, slot, 1 + count] = torch.tensor(words)
        buffer[cta, slot, 0, 0] += 1
        start += ns
    return start


def forward(sms: int = 8, tiles: int = 20, clock: int = 10**18) -> dict[str, torch.Tensor]:
    """Buffers of four kernels of one rank on `sms` SMs; all times after `clock`."""
    made = trace.buffers(tuple(STARTS), sms, "cpu")
    at = {name: clock + start for name, start in STARTS.items()}
    for cta in range(8 * sms):
        route = [(Phase.COUNT, 4000, 0, cta), (Phase.QUANTIZE, 9000 + 100 * (cta % 7), 0, cta)]
        put(made["stage"], cta, 0, cta % sms, Role.CTA, route, at["stage"])
    for cta in range(sms):
        for slot in range(4):
            copy = [(Phase.COPY, 9000, 6000 + 50 * cta, 32 * batch) for batch in range(3)]
            first = [(Phase.WAIT_LISTS, 3000, 0, NO_TILE), (Phase.LAY_OUT, 2000, 0, NO_TILE)]
            put(made["pull"], cta, slot, cta, Role.COPIER, [*first, *copy, (Phase.DRAIN, 700, 0, NO_TILE)], at["pull"])
        for slot in range(2):
            work = [(Phase.MAIN_LOOP, 12_000, 3000 * slot, 0), (Phase.ACTIVATE, 1000, 0, 0), (Phase.STORE, 500, 0, 0)]
            put(made["fc1"], cta, slot, cta, Role.MATH, work * tiles, at["fc1"] + 1500)
        put(made["fc1"], cta, 2, cta, Role.TMA, [(Phase.LOAD, 13_500, 11_000, 0)] * tiles, at["fc1"] + 1000)
        end = [(Phase.WAIT_ROWS, 8000, 0, cta), (Phase.SUM, 20_000, 0, cta), (Phase.FINISH, 900, 0, cta)]
        put(made["reduce"], cta, 0, cta, Role.CTA, end, at["reduce"])
    return made
