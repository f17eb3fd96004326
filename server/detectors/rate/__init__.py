"""The family of the learning rate."""

from rankscope.server.detectors.rate.high import RateTooHigh
from rankscope.server.detectors.rate.low import RateTooLow
from rankscope.server.detectors.rate.mismatch import RateMismatch

__all__ = ["RateMismatch", "RateTooHigh", "RateTooLow"]
