"""The family of ranks that no longer hold the same: one detector, since one link breaks first.

Buffers have one of their own: where they are not kept equal at all, which is usual, that must not
hide what happens to the parameters.
"""

from rankscope.server.detectors.desync.buffers import Buffers
from rankscope.server.detectors.desync.config import Config
from rankscope.server.detectors.desync.detector import Desync
from rankscope.server.detectors.desync.progress import Progress

__all__ = ["Buffers", "Config", "Desync", "Progress"]
