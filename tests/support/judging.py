"""Shows a run to detectors and folds what they find, as the worker does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rankscope.server.alerts.lifecycle import fold
from rankscope.server.detectors.base import Detector
from rankscope.server.detectors.runner import Evaluation
from rankscope.server.detectors.settings import Effective
from rankscope.server.window import Alert, Check
from tests.support.runs.scenarios import Scenario


@dataclass(frozen=True)
class Judgement:
    """Attributes: alerts in the order of their opening; the last answer for each kind."""

    alerts: tuple[Alert, ...]
    checks: dict[str, Check]

    def of(self, kind: str) -> list[Alert]:
        return [alert for alert in self.alerts if alert.kind == kind]


def verdict(
    alert: Alert, numbering: Mapping[int, int] | Sequence[int] | None = None
) -> tuple[object, ...]:
    """What a person would notice of an alert; ranks by another numbering if asked for."""
    ranks = alert.ranks if numbering is None else (numbering[rank] for rank in alert.ranks)
    return (
        alert.kind,
        alert.severity,
        alert.state,
        alert.first_step,
        alert.seen_step,
        alert.last_step,
        tuple(sorted(ranks)),
        alert.tensors,
    )


def judge(
    scenario: Scenario,
    detectors: Iterable[Detector[Any]],
    cuts: Iterable[int] = (),
    *,
    settings: Effective | None = None,
) -> Judgement:
    """Alerts and answers once the whole run has been seen."""
    evaluation = Evaluation(list(detectors), settings=settings, strict=True)
    alerts: dict[str, Alert] = {}
    checks: dict[str, Check] = {}
    for window in scenario.windows(cuts):
        findings, checks = evaluation.advance(window)
        # Times depend on how the steps are cut; nothing else may.
        folded = fold(
            tuple(alerts.values()), findings, run="run", through_step=window.last_step, now=0.0
        )
        alerts |= {alert.id: alert for alert in folded.alerts}
    return Judgement(tuple(sorted(alerts.values(), key=lambda a: (a.seen_step, a.id))), checks)
