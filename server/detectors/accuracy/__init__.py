"""The family of the accuracy."""

from rankscope.server.detectors.accuracy.mismatch import AccuracyMismatch
from rankscope.server.detectors.accuracy.stalled import AccuracyStalled

__all__ = ["AccuracyMismatch", "AccuracyStalled"]
