"""The demo's problem is the layer it claims to be, and the demo says what it did when there is no GPU."""

from __future__ import annotations

import argparse

import pytest
import torch

from megamoe import ConfigError, MoEConfig, VirtualWorld, memory_estimate, reference
from megamoe import demo as command
from megamoe.__main__ import parser
from megamoe.comm import SingleWorld
from megamoe.demo import compile_table, problem

CFG = MoEConfig(hidden=256, intermediate=128, num_experts=8, top_k=4, max_tokens=20)
CPU = torch.device("cpu")


def flags(text: str = "") -> argparse.Namespace:
    return parser().parse_args(["demo", *text.split()])


@pytest.mark.parametrize("scale", ["block", "tensor"])
def test_oracle_is_the_reference_layer(scale: str) -> None:
    cfg = MoEConfig(**(CFG.__dict__ | {"scale": scale}))
    made = problem.DemoProblem(cfg, CPU).calibrated()
    packs = [made.pack(rank, 2).canonical() for rank in range(2)]
    inputs = [(made.tokens(rank, 20), *made.routes(rank, 20)) for rank in range(2)]
    for _, ids, _ in inputs:
        ids[0], ids[1, 2] = -1, -1
    want = reference.layer(cfg, packs, *(list(part) for part in zip(*inputs)))
    for given, y in zip(inputs, want):
        assert reference.relative_error(made.oracle(*given), y) < 1e-3  # sums of other batch sizes may differ
    assert (packs[0].x_scale is None) == (scale == "block")


def test_ranks_differ_and_repeat() -> None:
    made = problem.DemoProblem(CFG, CPU)
    assert torch.equal(made.tokens(1, 5), made.tokens(1, 5))
    assert not torch.equal(made.tokens(0, 5), made.tokens(1, 5))
    first, second = made.expert(3), made.pack(0, 2)
    assert torch.equal(first.w13[0].view(torch.uint8), second.w13[3].view(torch.uint8))
    assert torch.equal(first.w2_scale[0], second.w2_scale[3])


@pytest.mark.parametrize(("tokens", "count"), [(0, 0), (1, 1), (2048, 2048), (5000, 2048)])
def test_samples_are_spread(tokens: int, count: int) -> None:
    rows = problem.sample_rows(tokens, CPU)
    assert len(rows.unique()) == len(rows) == count
    assert count == 0 or tokens - 3 <= rows[-1] < tokens


def test_experts_are_halved_until_they_fit() -> None:
    with SingleWorld("cpu") as world, VirtualWorld(3, devices=["cpu"]) as three:
        assert command.choose_config(flags(), world, 1 << 40).num_experts == 256
        assert command.choose_config(flags(), three, 1 << 40).num_experts == 255
        cfg = command.choose_config(flags("--tokens 64"), world, command.RESERVE + (2 << 30))
        assert cfg.num_experts == 32
        assert memory_estimate(cfg)["total"] <= 2 << 30
        with pytest.raises(ConfigError, match="experts"):
            command.choose_config(flags("--experts 256"), world, command.RESERVE + (2 << 30))
        with pytest.raises(ConfigError, match="experts"):
            command.choose_config(flags("--tokens 200000"), world, command.RESERVE + (2 << 30))


@pytest.mark.parametrize("text", ["", "--virtual 3 --fp8 e5m2", "--scale tensor --tokens 5 --experts 4"])
def test_reference_part(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert compile_table.reference_layer(flags(text))
    assert "good" in capsys.readouterr().out


def test_without_a_gpu_it_says_that_no_kernel_ran(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "why_no_gpu", lambda: "the test says so")
    monkeypatch.setattr(compile_table, "compile_all", lambda args: True)
    assert command.main(flags()) == 0
    out = capsys.readouterr().out
    assert "No kernel ran: the test says so." in out
    assert "processes" not in out
    assert command.main(flags("--virtual 3 --experts 7")) == 1
    assert "num_experts = 7" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert command.main(flags()) == 0
    assert "The 2 processes are not played as ranks" in capsys.readouterr().out


def test_compile_table_is_of_the_flags_mode(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from megamoe.kernels import report

    clean = argparse.Namespace(clean=True, registers=1, stack=0, spill_stores=0, spill_loads=0)
    monkeypatch.setattr(report, "report", lambda kernel: clean)
    assert compile_table.compile_all(flags("--scale tensor --fp8 e5m2"))
    out = capsys.readouterr().out
    assert "One build of each kernel" in out
    assert "e5m2 tensor" in out
    assert "e4m3" not in out
    assert "block" not in out
