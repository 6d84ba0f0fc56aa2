"""tools/gpu_tests.py: every GPU test is in exactly one of its groups, and outcomes are read right."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tools import gpu_tests

ROOT = Path(__file__).resolve().parents[2]


def selects(group, test_id):
    """Whether a group's pytest arguments select a test: its files, then its -k expression of words."""
    files = [arg for arg in group.args if arg.endswith(".py")]
    if test_id.split("::")[0] not in files:
        return False
    words = group.args[group.args.index("-k") + 1] if "-k" in group.args else ""
    truth = re.sub(r"\b(?!(?:and|or|not)\b)\w+", lambda word: str(word.group() in test_id), words)
    return bool(eval(truth)) if truth else True


def test_every_gpu_test_is_in_one_group():
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/gpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    tests = [line for line in done.stdout.splitlines() if "::" in line]
    assert len(tests) > 200
    for test in tests:
        assert [selects(group, test) for group in (*gpu_tests.BESIDE, *gpu_tests.ALONE)].count(True) == 1, test


@pytest.mark.parametrize(
    "line,want",
    [
        ("38 passed in 102.68s (0:01:42)", "38 passed in 102.68s"),
        ("====== 9 failed, 29 passed in 125.99s (0:02:05) ======", "9 failed, 29 passed in 125.99s"),
        ("32 passed, 51 deselected in 105.60s", "32 passed, 51 deselected in 105.60s"),
        ("1 failed, 2 passed\n", "no summary: timed out or crashed"),
    ],
)
def test_outcome(line, want):
    assert gpu_tests.outcome(f"....\n{line}\n") == want


@pytest.mark.parametrize("gpus", [1, 2, 3, 4, 8])
def test_rounds(gpus):
    plan = gpu_tests.rounds(gpus)
    groups = [group for beside in plan for group, _ in beside]
    assert len(groups) == len(set(groups))
    assert {*gpu_tests.BESIDE, *gpu_tests.ALONE} <= set(groups)
    assert [group.ranks for group in groups if group.ranks] == [n for n in (2, 4, 8) if n <= gpus]
    for beside in plan:  # deadlines: GPUs that no other process uses
        seen = {group: [] if visible is None else visible.split(",") for group, visible in beside}
        assert all(int(gpu) < gpus for visible in seen.values() for gpu in visible)
        for group, visible in seen.items():
            if len(beside) > 1 and (group in gpu_tests.ALONE or group.ranks):
                own = visible if group.ranks else visible[:1]
                others = [gpu for other, gpus_of in seen.items() if other != group for gpu in gpus_of]
                assert own and not {*own} & {*others}


def test_times_are_taken_on_a_gpu_of_its_own():
    alone = {arg for group in gpu_tests.ALONE for arg in group.args}
    assert {f"tests/gpu/test_{name}.py" for name in ("trace", "faults", "killed_rank")} <= alone


def test_one_round_can_be_run_alone(monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    monkeypatch.setattr(gpu_tests, "run", lambda groups, logs, limit_s: ran.append(groups) or {})
    for argv, want in (([], [1, 2]), (["--round", "2"], [2])):
        ran.clear()
        monkeypatch.setattr(sys, "argv", ["gpu_tests.py", *argv])
        assert gpu_tests.main() == 0
        assert ran == [gpu_tests.rounds(1)[number - 1] for number in want]
    monkeypatch.setattr(sys, "argv", ["gpu_tests.py", "--round", "3"])
    with pytest.raises(SystemExit):
        gpu_tests.main()
    assert "--round 3: must be from 1 to 2 with 1 GPUs" in capsys.readouterr().err


STARTER = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print("pid", child.pid, flush=True)
time.sleep(60)
"""


def running(pid):
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_what_a_timed_out_command_started_is_ended_with_it(tmp_path, monkeypatch, capsys):
    """Also in another session, where torchrun has its ranks."""
    group = gpu_tests.Group("slow", ())
    monkeypatch.setattr(gpu_tests.Group, "command", lambda self: [sys.executable, "-c", STARTER])
    assert gpu_tests.run([(group, None)], tmp_path, 3) == {group: (-9, gpu_tests.NO_SUMMARY)}
    (child,) = re.findall(r"pid (\d+)", (tmp_path / "slow.log").read_text())
    end = time.monotonic() + 5
    while running(child) and time.monotonic() < end:
        time.sleep(0.01)
    assert not running(child) and gpu_tests.family(os.getpid())[0] == os.getpid()


def test_shown_commands_quote_what_needs_it():
    assert gpu_tests.Group("a", ("x.py", "-k", "a and b")).shown() == 'pytest x.py -k "a and b"'
    assert gpu_tests.Group("r", ("tests/ranks",), ranks=2).command()[2:5] == [
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
    ]
