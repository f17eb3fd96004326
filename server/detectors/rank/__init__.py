"""The family of single ranks that fall out of line: one kind a module."""

from rankscope.server.detectors.rank.loss_outlier import RankLossOutlier
from rankscope.server.detectors.rank.silent import RankSilent
from rankscope.server.detectors.rank.stalled import RankStalled

__all__ = ["RankLossOutlier", "RankSilent", "RankStalled"]
