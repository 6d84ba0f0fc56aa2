"""Device code, and each kernel as a plain function on torch tensors.

stage, exchange, pull, fc1, fc2, token_back, reduce run one kernel alone; pack_rows and unpack_rows
convert between (codes, scales) and row records; wire.py describes the layouts. Importing this package
imports CuTeDSL; `import megamoe` alone does not.
"""

from .. import packages
from ..errors import MissingDependency
from .environment import check_packages, set_arch

check_packages()
set_arch()

try:
    import cutlass.cute  # noqa: F401
except ImportError as error:
    raise MissingDependency(
        f"megamoe's kernels need CuTeDSL ({error}): {packages.install('cu13')}, or cu12 where torch.version.cuda is 12"
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
