"""Which tests run where: tests/cpu anywhere, tests/gpu on a Hopper GPU, tests/ranks under torchrun on several."""

from __future__ import annotations

import os
from pathlib import Path

os.environ["CUTE_DSL_ARCH"] = "sm_90a"  # as megamoe.kernels does, for tests that import cutlass before it

import hypothesis
import pytest
import torch

HERE = Path(__file__).resolve().parent

slow_ok = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large]
hypothesis.settings.register_profile(
    "ci", max_examples=50, deadline=None, print_blob=True, suppress_health_check=slow_ok
)
hypothesis.settings.register_profile("long", hypothesis.settings.get_profile("ci"), max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def why_no_gpu() -> str | None:
    """Why tests/gpu cannot run here, or None."""
    if not torch.cuda.is_available():
        return "needs a Hopper GPU (no CUDA device that torch can use)"
    major, minor = torch.cuda.get_device_capability()
    return None if (major, minor) == (9, 0) else f"needs a Hopper GPU (this one is sm_{major}{minor})"


def why_no_ranks() -> str | None:
    """Why tests/ranks cannot run here, or None."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return None
    return "needs several GPUs: torchrun --nproc-per-node=N -m pytest tests/ranks"


def left_out(config: pytest.Config) -> dict[Path, str]:
    """Folders inside what the command line names that this machine cannot run, and why."""
    paths = [(config.invocation_params.dir / arg.split("::")[0]).resolve() for arg in config.args]
    no_gpu = why_no_gpu()
    reasons = {HERE / "gpu": no_gpu, HERE / "ranks": no_gpu or why_no_ranks()}
    return {
        folder: reason
        for folder, reason in reasons.items()
        if reason
        and any(folder.is_relative_to(path) for path in paths)
        and not any(path.is_relative_to(folder) for path in paths)
    }


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out folders that cannot run here; named on the command line, they are collected and skipped."""
    return True if collection_path.parent == HERE and collection_path in left_out(config) else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """One line a folder that was left out."""
    for folder, reason in left_out(config).items():
        terminalreporter.write_line(f"{folder.relative_to(HERE.parent)}: not collected, {reason}")


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark by folder, and skip with the reason what this machine cannot run."""
    no_gpu = why_no_gpu()
    no_ranks = no_gpu or why_no_ranks()
    for item in items:
        room = item.path.relative_to(HERE).parts[0] if item.path.is_relative_to(HERE) else ""
        if room not in ("gpu", "ranks"):
            continue
        item.add_marker(getattr(pytest.mark, room))
        reason = no_gpu if room == "gpu" else no_ranks
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
