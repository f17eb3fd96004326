"""The family of the learning rate."""

from rankscope.server.detectors.rate.high import RateTooHigh
from rankscope.server.detectors.rate.low import RateTooLow

__all__ = ["RateTooHigh", "RateTooLow"]
