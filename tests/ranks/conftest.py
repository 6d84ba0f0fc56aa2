"""One process a GPU: torchrun --standalone --nproc-per-node=2 -m pytest -q tests/ranks."""

import os

import pytest
import torch
import torch.distributed as dist


@pytest.fixture(scope="session")
def group():
    """The default process group, this process's GPU selected."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl")
    yield dist.group.WORLD
    dist.barrier()
    dist.destroy_process_group()
