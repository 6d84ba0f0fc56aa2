"""A rank that is killed: the survivors end with an error in time (needs two GPUs, starts torchrun itself)."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[1] / "ranks" / "kill_one.py"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_survivors_of_a_killed_rank_end_with_an_error():
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(SCRIPT)]
    done = subprocess.run(launch, capture_output=True, text=True, timeout=120)
    lines = re.findall(r"^rank (\d+): (\w+) after ([\d.]+) s: (.*)$", done.stdout, re.MULTILINE)
    assert [line[0] for line in lines] == ["0"], done.stdout + done.stderr
    _, error, seconds, text = lines[0]
    assert float(seconds) < 2.0  # its timeout_s is 1
    if error == "AbortedTimeout":
        assert "rank 1" in text
    else:
        assert "CUDA" in text or "Cuda" in error, lines
