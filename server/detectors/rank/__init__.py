"""The family of single ranks that fall out of line: one kind a module."""

from rankscope.server.detectors.rank.loss_outlier import RankLossOutlier
from rankscope.server.detectors.rank.silent import RankSilent

__all__ = ["RankLossOutlier", "RankSilent"]
