"""Device code, and each kernel as a plain function on torch tensors.

stage, exchange, pull, fc1, fc2, token_back, reduce run one kernel alone; pack_rows and unpack_rows
convert between (codes, scales) and row records; wire.py describes the layouts. Importing this package
imports CuTeDSL; `import megamoe` alone does not.
"""

import os

from ..errors import MissingDependency

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")  # CuTeDSL reads it once, when it is imported

try:
    import cutlass.cute  # noqa: F401
except ImportError as error:
    raise MissingDependency(
        "megamoe's kernels need CuTeDSL: pip install -e '.[cu13]' (or '.[cu12]', as torch.version.cuda says)"
    ) from error

from .fc1 import fc1
from .fc2 import fc2
from .rows import pack_rows, unpack_rows
from .standalone import (
    Pool,
    Staged,
    exchange,
    fresh_control,
    peer_deltas,
    pull,
    reduce,
    stage,
    token_back,
)

__all__ = [
    "Pool",
    "Staged",
    "exchange",
    "fc1",
    "fc2",
    "fresh_control",
    "pack_rows",
    "peer_deltas",
    "pull",
    "reduce",
    "stage",
    "token_back",
    "unpack_rows",
]


def __dir__() -> list[str]:
    return sorted(__all__)
