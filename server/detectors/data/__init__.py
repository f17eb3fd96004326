"""What the ranks train on: batches that come twice or are of unlike sizes, random numbers."""

from rankscope.server.detectors.data.duplicated import Duplicated
from rankscope.server.detectors.data.imbalanced import Imbalanced
from rankscope.server.detectors.data.outlier import DataOutlier
from rankscope.server.detectors.data.overlap import Overlap
from rankscope.server.detectors.data.random_diverged import RandomDiverged
from rankscope.server.detectors.data.randomness import RandomShared
from rankscope.server.detectors.data.replayed import Replayed
from rankscope.server.detectors.data.shared import BatchShared

__all__ = [
    "BatchShared",
    "DataOutlier",
    "Duplicated",
    "Imbalanced",
    "Overlap",
    "RandomDiverged",
    "RandomShared",
    "Replayed",
]
