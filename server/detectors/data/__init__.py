"""What the ranks train on: batches that come twice."""

from rankscope.server.detectors.data.duplicated import Duplicated
from rankscope.server.detectors.data.overlap import Overlap
from rankscope.server.detectors.data.randomness import RandomShared
from rankscope.server.detectors.data.replayed import Replayed

__all__ = ["Duplicated", "Overlap", "RandomShared", "Replayed"]
