"""What the ranks train on: batches that come twice."""

from rankscope.server.detectors.data.duplicated import Duplicated
from rankscope.server.detectors.data.overlap import Overlap
from rankscope.server.detectors.data.randomness import RandomShared
from rankscope.server.detectors.data.replayed import Replayed
from rankscope.server.detectors.data.shared import BatchShared

__all__ = ["BatchShared", "Duplicated", "Overlap", "RandomShared", "Replayed"]
