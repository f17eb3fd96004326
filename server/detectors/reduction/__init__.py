"""What the reduction of gradients gave, beside what went into it."""

from rankscope.server.detectors.reduction.wrong import ReductionWrong

__all__ = ["ReductionWrong"]
