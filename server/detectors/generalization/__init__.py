"""The family of what is learned beside what is only remembered."""

from rankscope.server.detectors.generalization.gap import GeneralizationGap

__all__ = ["GeneralizationGap"]
