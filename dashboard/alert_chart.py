"""Which chart shows what an alert is about."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

# The first that fits the beginning of its kind, of the series that the run has.
_SHOWN_ON = (
    ("lr.", "lr"),
    ("schedule.", "lr"),
    ("gradient.", "grad_norm"),
    ("rank.gradient", "grad_norm_local"),
    ("rank.gradient", "grad_norm"),
    ("clipping.", "grad_norm_preclip"),
    ("clipping.", "grad_norm"),
    ("accuracy.", "accuracy"),
    ("throughput.", "samples_per_second"),
    ("rank.straggler", "wait_seconds"),
    ("rank.straggler", "step_seconds"),
    ("rank.starved", "data_seconds"),
    ("rank.starved", "step_seconds"),
    ("collective.", "wait_seconds"),
    ("collective.", "step_seconds"),
    ("memory.", "process_resident_memory_bytes"),
    ("generalization.", "eval/loss"),
    ("update.", "update_ratio"),
    ("", "loss"),
)
# The same, of the series that the run has of the first tensor that the alert names.
_OF_TENSOR = (
    ("update.", "update_ratio"),
    ("update.", "weight_norm"),
    ("gradient.", "grad_norm"),
    ("layer.", "grad_norm"),
)
_OF_BITS = ("desync.", "reduction.")
# Links at which ranks differ for one step: what they differ in from then on is the parameters.
_LASTS_IN = {"start": "parameters", "outside_optimizer": "parameters"}
# Keys of the evidence that name a series.
_NAMES = ("metric", "series", "name")


@dataclass(frozen=True, slots=True)
class Choice:
    """What to draw.

    Attributes:
        bits: the divergence of the ranks, where there is some; else the metric.
        metric: None where the run has no series that shows it.
        tensor: whose series it is; empty for one of the whole model.
    """

    bits: bool
    metric: str | None
    tensor: str = ""


def stages(stage: str) -> tuple[str | None, ...]:
    """Links of the chain on which an alert's ranks are drawn, the best first.

    The last one, None, is the link that says most: one that a rank's own report names, as the state
    of its optimizer, need not have been compared.

    Args:
        stage: the first link at which they differed; empty where none is known.
    """
    lasting = _LASTS_IN.get(stage)
    return (lasting, stage, None) if lasting else (stage, None) if stage else (None,)


def choose(
    kind: str,
    evidence: Mapping[str, Any],
    there: frozenset[str],
    *,
    tensor: str = "",
    of_tensor: Collection[str] = (),
) -> Choice:
    """The chart of an alert.

    Args:
        kind: of the alert.
        evidence: of the alert; a series that it names comes first.
        there: the series of the run.
        tensor: the first one that it names.
        of_tensor: the metrics that the run has of that tensor.
    """
    if tensor:
        for prefix, metric in _OF_TENSOR:
            if kind.startswith(prefix) and metric in of_tensor:
                return Choice(False, f"{metric}/{tensor}", tensor)
    named = [evidence.get(key) for key in _NAMES]
    fitting = [metric for prefix, metric in _SHOWN_ON if kind.startswith(prefix)]
    metrics = [name for name in (*named, *fitting) if isinstance(name, str) and name in there]
    return Choice(kind.startswith(_OF_BITS), metrics[0] if metrics else None)
