"""Gradients that are not what they should be on any rank."""

from rankscope.server.detectors.gradient.accumulating import GradientAccumulating
from rankscope.server.detectors.gradient.clipping import ClippingSaturated
from rankscope.server.detectors.gradient.exploding import GradientExploding
from rankscope.server.detectors.gradient.nonfinite import GradientNonFinite
from rankscope.server.detectors.gradient.oscillating import GradientOscillating
from rankscope.server.detectors.gradient.scale import ScaleCollapse
from rankscope.server.detectors.gradient.vanishing import GradientVanishing

__all__ = [
    "ClippingSaturated",
    "GradientAccumulating",
    "GradientExploding",
    "GradientNonFinite",
    "GradientOscillating",
    "GradientVanishing",
    "ScaleCollapse",
]
