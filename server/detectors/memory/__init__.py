"""Memory that the processes of a run use."""

from rankscope.server.detectors.memory.growing import MemoryGrowing

__all__ = ["MemoryGrowing"]
