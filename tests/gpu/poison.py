"""Buffers filled with 0xFF (NaN in every float format here, -1 in every integer) before a kernel writes them."""

from __future__ import annotations

from contextlib import contextmanager

import torch


@contextmanager
def poisoned_empty():
    """torch.empty returns poisoned CUDA memory inside the block."""
    real = torch.empty

    def empty(*args, **kwargs):
        made = real(*args, **kwargs)
        if made.is_cuda and made.numel():
            made.view(-1).view(torch.uint8).fill_(0xFF)
        return made

    torch.empty = empty
    try:
        yield
    finally:
        torch.empty = real
