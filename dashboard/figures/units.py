"""Axis titles, with units, of the series that the agent posts by itself."""

from __future__ import annotations

_TITLES = {
    "loss": "loss",
    "accuracy": "accuracy (fraction)",
    "grad_norm": "gradient norm (L2)",
    "grad_norm_local": "local gradient norm (L2)",
    "grad_norm_preclip": "norm before clipping (L2)",
    "lr": "learning rate",
    "step_seconds": "step time (s)",
    "samples_per_second": "throughput (samples/s)",
    "eval/loss": "evaluation loss",
    "eval/accuracy": "evaluation accuracy (fraction)",
    "rankscope/overhead": "agent overhead (share of step)",
    "rankscope/interval/word": "words, sampled every (steps)",
    "rankscope/interval/signals": "signals, sampled every (steps)",
    "rankscope/interval/full": "fingerprints, every (steps)",
}


def axis_title(metric: str) -> str:
    """What the y axis of a metric says; the metric's own name where it is the user's."""
    if metric in _TITLES:
        return _TITLES[metric]
    family, _, layer = metric.partition("/")
    if layer and family in ("grad_norm", "grad_norm_local"):
        return f"{_TITLES[family]}, {layer}"
    return metric
