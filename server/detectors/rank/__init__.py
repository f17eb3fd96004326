"""The family of single ranks that fall out of line: one kind a module."""

from rankscope.server.detectors.rank.failed import RankFailed
from rankscope.server.detectors.rank.gradient_outlier import RankGradientOutlier
from rankscope.server.detectors.rank.loss_outlier import RankLossOutlier
from rankscope.server.detectors.rank.silent import RankSilent
from rankscope.server.detectors.rank.stalled import RankStalled
from rankscope.server.detectors.rank.starved import RankStarved
from rankscope.server.detectors.rank.straggler import RankStraggler

__all__ = [
    "RankFailed",
    "RankGradientOutlier",
    "RankLossOutlier",
    "RankSilent",
    "RankStalled",
    "RankStarved",
    "RankStraggler",
]
