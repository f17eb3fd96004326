"""Steps that do not do what a step should."""

from rankscope.server.detectors.update.missing import UpdateMissing
from rankscope.server.detectors.update.schedule import ScheduleMismatch

__all__ = ["ScheduleMismatch", "UpdateMissing"]
