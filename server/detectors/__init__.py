"""The detectors: an explicit list, checked when it is built."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

from rankscope.agent import wire
from rankscope.server.detectors.accuracy import AccuracyMismatch, AccuracyStalled
from rankscope.server.detectors.base import Detector
from rankscope.server.detectors.batch import BatchNoise
from rankscope.server.detectors.compression import CompressionError
from rankscope.server.detectors.data import (
    BatchShared,
    DataOutlier,
    Duplicated,
    Imbalanced,
    Overlap,
    RandomDiverged,
    RandomShared,
    Replayed,
)
from rankscope.server.detectors.desync import Buffers, Config, Desync, Progress
from rankscope.server.detectors.generalization import GeneralizationGap
from rankscope.server.detectors.gradient import (
    ClippingSaturated,
    GradientAccumulating,
    GradientExploding,
    GradientNonFinite,
    GradientOscillating,
    GradientVanishing,
    ScaleCollapse,
)
from rankscope.server.detectors.installed import Installed, load
from rankscope.server.detectors.layer import LayerDead
from rankscope.server.detectors.loss import (
    LossDiverging,
    LossNonFinite,
    LossOscillating,
    LossPlateau,
    LossSpike,
)
from rankscope.server.detectors.mode import EvaluationMode
from rankscope.server.detectors.nonfinite import BuffersNonFinite, EvaluationNonFinite
from rankscope.server.detectors.policy import thresholds
from rankscope.server.detectors.push import PushLost, PushStale
from rankscope.server.detectors.rank import (
    RankFailed,
    RankGradientOutlier,
    RankLossOutlier,
    RankSilent,
    RankStalled,
    RankStarved,
    RankStraggler,
)
from rankscope.server.detectors.rate import RateMismatch, RateTooHigh, RateTooLow
from rankscope.server.detectors.reduction import ReductionWrong
from rankscope.server.detectors.settings import Effective
from rankscope.server.detectors.update import (
    ScheduleMismatch,
    UpdateDrift,
    UpdateMissing,
    UpdateRatio,
)

# What a user reads about a detector is its docstring; its first paragraph needs no heading.
SECTIONS = ("Statistic:", "Severity:", "Evidence:", "Source:")

DETECTORS: tuple[type[Detector[Any]], ...] = (
    Desync,
    Buffers,
    LossNonFinite,
    LossSpike,
    LossDiverging,
    LossOscillating,
    RankLossOutlier,
    RankGradientOutlier,
    RankFailed,
    RankSilent,
    RankStalled,
    RankStraggler,
    RankStarved,
    ReductionWrong,
    Duplicated,
    Replayed,
    Overlap,
    RandomShared,
    RandomDiverged,
    BatchShared,
    Imbalanced,
    UpdateMissing,
    ScheduleMismatch,
    EvaluationMode,
    Config,
    Progress,
    GradientNonFinite,
    EvaluationNonFinite,
    BuffersNonFinite,
    ScaleCollapse,
    ClippingSaturated,
    GradientAccumulating,
    GradientExploding,
    GradientOscillating,
    LossPlateau,
    AccuracyStalled,
    AccuracyMismatch,
    GeneralizationGap,
    RateTooHigh,
    RateTooLow,
    RateMismatch,
    LayerDead,
    GradientVanishing,
    UpdateRatio,
    UpdateDrift,
    BatchNoise,
    CompressionError,
    DataOutlier,
    PushStale,
    PushLost,
)


@cache
def installed() -> Installed:
    """All detectors that this process has, ours and those of other packages."""
    validate(DETECTORS)
    return load(DETECTORS)


def build(settings: Effective | None = None) -> list[Detector[Any]]:
    """One of each for one run: all with their own thresholds, or as settings have it."""
    found = installed().detectors
    if settings is None:
        return [detector() for detector in found]
    return [
        detector.of(settings.policy)
        for detector in found
        if not settings.off.issuperset(detector.kinds)
    ]


def validate(detectors: Iterable[type[Detector[Any]]]) -> None:
    """Refuses a list that would answer twice, or for something nobody knows.

    Raises:
        ValueError: a kind is unknown or declared twice, or a docstring lacks a section.
        TypeError: a threshold has no default or no meaning.
    """
    owners: dict[str, str] = {}
    for detector in detectors:
        name = detector.__name__
        if not detector.kinds:
            raise ValueError(f"{name} declares no kind")
        for kind in detector.kinds:
            if kind not in wire.KINDS:
                raise ValueError(f"{name} declares {kind}, which is none of wire.KINDS")
            if kind in owners:
                raise ValueError(f"{name} and {owners[kind]} both declare {kind}")
            owners[kind] = name
        described = [line.strip() for line in (detector.__doc__ or "").splitlines()]
        missing = [section for section in SECTIONS if section not in described]
        if missing:
            raise ValueError(f"the docstring of {name} lacks {', '.join(missing)}")
        thresholds(detector.policies)
