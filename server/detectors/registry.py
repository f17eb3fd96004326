"""Which kinds of alerts there are, and which class finds each: one line for each kind.

The order is the one in which verdicts list their checks. Nothing is imported before it is asked
for: the gate and the command line know the names of kinds without loading what finds them.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rankscope.server.detectors.base import Detector

# Kind -> module within this package, and class.
REGISTRY: Mapping[str, str] = {
    "desync.parameters": "desync.detector:Desync",
    "desync.gradients": "desync.detector:Desync",
    "desync.optimizer": "desync.detector:Desync",
    "desync.hyperparameters": "desync.detector:Desync",
    "desync.buffers": "desync.buffers:Buffers",
    "desync.progress": "desync.progress:Progress",
    "desync.config": "desync.config:Config",
    "desync.batch": "desync.batch:BatchShared",
    "desync.rng": "desync.rng:RandomDiverged",
    "reduction.wrong": "reduction.wrong:ReductionWrong",
    "update.missing": "update.missing:UpdateMissing",
    "schedule.mismatch": "schedule.mismatch:ScheduleMismatch",
    "data.duplicated": "data.duplicated:Duplicated",
    "data.overlap": "data.overlap:Overlap",
    "data.replayed": "data.replayed:Replayed",
    "data.unshuffled": "data.replayed:Replayed",
    "data.unmixed": "data.unmixed:Unmixed",
    "data.imbalanced": "data.imbalanced:Imbalanced",
    "data.outlier": "data.outlier:DataOutlier",
    "data.unscaled": "data.unscaled:Unscaled",
    "weights.unscaled": "data.unscaled:Unscaled",
    "data.leaked": "data.leaked:TargetsLeaked",
    "loss.nonfinite": "loss.nonfinite:LossNonFinite",
    "eval.nonfinite": "eval.nonfinite:EvaluationNonFinite",
    "buffers.nonfinite": "buffers.nonfinite:BuffersNonFinite",
    "loss.spike": "loss.spike:LossSpike",
    "loss.rescaled": "loss.rescaled:LossRescaled",
    "loss.dropped": "loss.dropped:LossDropped",
    "loss.diverging": "loss.diverging:LossDiverging",
    "loss.oscillating": "loss.oscillating:LossOscillating",
    "loss.plateau": "loss.plateau:LossPlateau",
    "loss.mismatch": "loss.mismatch:LossInputs",
    "accuracy.stalled": "accuracy.stalled:AccuracyStalled",
    "accuracy.mismatch": "accuracy.mismatch:AccuracyMismatch",
    "generalization.gap": "generalization.gap:GeneralizationGap",
    "gradient.nonfinite": "gradient.nonfinite:GradientNonFinite",
    "gradient.exploding": "gradient.exploding:GradientExploding",
    "gradient.vanishing": "gradient.vanishing:GradientVanishing",
    "gradient.oscillating": "gradient.oscillating:GradientOscillating",
    "gradient.accumulating": "gradient.accumulating:GradientAccumulating",
    "gradient.discarded": "gradient.discarded:GradientDiscarded",
    "layer.dead": "layer.dead:LayerDead",
    "update.ratio": "update.ratio:UpdateRatio",
    "update.drift": "update.drift:UpdateDrift",
    "update.frozen": "update.frozen:UpdateFrozen",
    "update.reset": "update.reset:UpdateReset",
    "update.reverted": "update.reverted:UpdateReverted",
    "clipping.saturated": "clipping.saturated:ClippingSaturated",
    "amp.scale_collapse": "amp.scale_collapse:ScaleCollapse",
    "checkpoint.mismatch": "checkpoint.mismatch:CheckpointMismatch",
    "compression.error": "compression.error:CompressionError",
    "lr.too_high": "lr.too_high:RateTooHigh",
    "lr.too_low": "lr.too_low:RateTooLow",
    "lr.batch_mismatch": "lr.batch_mismatch:RateMismatch",
    "batch.noise": "batch.noise:BatchNoise",
    "mode.evaluation": "mode.evaluation:EvaluationMode",
    "mode.settings": "mode.settings:ModeSettings",
    "push.stale": "push.stale:PushStale",
    "push.lost": "push.lost:PushLost",
    "rng.shared": "rng.shared:RandomShared",
    "rng.repeated": "rng.repeated:RandomRepeated",
    "rank.loss_outlier": "rank.loss_outlier:RankLossOutlier",
    "rank.gradient_outlier": "rank.gradient_outlier:RankGradientOutlier",
    "rank.straggler": "rank.straggler:RankStraggler",
    "rank.failed": "rank.failed:RankFailed",
    "rank.silent": "rank.silent:RankSilent",
    "rank.stalled": "rank.stalled:RankStalled",
    "rank.starved": "rank.starved:RankStarved",
    "collective.slow": "rank.straggler:RankStraggler",
    "throughput.dropped": "throughput.dropped:ThroughputDropped",
    "memory.growing": "memory.growing:MemoryGrowing",
    "baseline.loss": "baseline.loss:BaselineLoss",
    "baseline.metric": "baseline.metric:BaselineMetric",
    "metric.anomaly": "metric.anomaly:MetricAnomaly",
}

KINDS: tuple[str, ...] = tuple(REGISTRY)


@cache
def classes() -> tuple[type[Detector[Any]], ...]:
    """Our own detectors, each once, in the order of their first kinds."""
    found: dict[str, type[Detector[Any]]] = {}
    for path in REGISTRY.values():
        if path not in found:
            module, _, name = path.partition(":")
            imported = importlib.import_module(f"{__package__}.{module}")
            found[path] = getattr(imported, name)
    return tuple(found.values())
