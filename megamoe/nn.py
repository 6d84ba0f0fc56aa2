"""A layer as a torch.nn.Module."""

from __future__ import annotations

import torch
from torch import Tensor

from . import ops
from .errors import ConfigError
from .layer import MegaMoE


class Experts(torch.nn.Module):
    """The experts of an MoE block: y = experts(x, topk_ids, topk_weights), through torch.ops.megamoe.forward.

    moe: a MegaMoE of one rank (not of a VirtualWorld, whose inputs are lists), which the module keeps and does not
    close. Its weights are not parameters: they do not appear in state_dict(), and to() does not move them.
    Call moe.warmup() before. Raises ConfigError.
    """

    def __init__(self, moe: MegaMoE) -> None:
        super().__init__()
        if not isinstance(moe, MegaMoE):
            raise ConfigError("moe", type(moe).__name__, "a MegaMoE")
        if moe.world.kind == "virtual":
            raise ConfigError("moe.world", moe.world, "a world with one rank a process, whose tokens are no lists")
        self.moe = moe
        self.layer = moe.handle  # a plain attribute: an input of traced graphs, and in no state_dict

    def forward(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        x_scale: Tensor | None = None,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Arguments and result of MegaMoE.__call__; x_scale fp32 [T, H/128] for codes with block scales, else None."""
        if out is None:
            return ops.forward(x, topk_ids, topk_weights, x_scale, self.layer)
        ops.forward_out(x, topk_ids, topk_weights, x_scale, self.layer, out=out)
        return out

    def extra_repr(self) -> str:
        """The layer, in words."""
        return repr(self.moe)
