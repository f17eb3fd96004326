"""Steps that do not do what a step should."""

from rankscope.server.detectors.update.drift import UpdateDrift
from rankscope.server.detectors.update.frozen import UpdateFrozen
from rankscope.server.detectors.update.missing import UpdateMissing
from rankscope.server.detectors.update.ratio import UpdateRatio
from rankscope.server.detectors.update.reset import UpdateReset
from rankscope.server.detectors.update.schedule import ScheduleMismatch

__all__ = [
    "ScheduleMismatch",
    "UpdateDrift",
    "UpdateFrozen",
    "UpdateMissing",
    "UpdateRatio",
    "UpdateReset",
]
