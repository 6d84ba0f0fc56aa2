"""Worlds, arenas and workspaces: who runs together, and where everything lies. Host side only."""

from .host import HostGroup
from .local import SingleWorld
from .memory import MemoryEstimate, memory_estimate
from .virtual import VirtualWorld
from .workspace import Workspace
from .world import SymmetricBlock, World, world

__all__ = [
    "HostGroup",
    "MemoryEstimate",
    "SingleWorld",
    "SymmetricBlock",
    "VirtualWorld",
    "Workspace",
    "World",
    "memory_estimate",
    "world",
]
