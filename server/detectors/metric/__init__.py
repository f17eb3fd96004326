"""Questions that are asked of every recorded series, whatever its name."""

from rankscope.server.detectors.metric.anomaly import MetricAnomaly

__all__ = ["MetricAnomaly"]
