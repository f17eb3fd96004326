"""The family of the loss: one kind a module."""

from rankscope.server.detectors.loss.diverging import LossDiverging
from rankscope.server.detectors.loss.nonfinite import LossNonFinite
from rankscope.server.detectors.loss.oscillating import LossOscillating
from rankscope.server.detectors.loss.plateau import LossPlateau
from rankscope.server.detectors.loss.spike import LossSpike

__all__ = ["LossDiverging", "LossNonFinite", "LossOscillating", "LossPlateau", "LossSpike"]
