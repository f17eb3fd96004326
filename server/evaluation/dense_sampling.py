"""How long a run's ranks are asked to sample every step after something was found."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

from rankscope.server.window import Alert, LivenessPart

# How long dense sampling is asked for after something was found, in steps.
_DENSE_STEPS = 20
_MAX_AHEAD = 5000
# Evaluations over which a job's pace is taken.
_PROGRESS = 16
# What every step shows more of: which tensors, since when, and whether it comes back.
_UNCLEAR = (
    "desync.",
    "reduction.",
    "gradient.accumulating",
    "layer.dead",
    "rank.gradient_outlier",
)


def unclear(alerts: Iterable[Alert], before: set[str]) -> list[Alert]:
    """Open alerts of which dense sampling shows more, and for which none was requested.

    Args:
        alerts: those that have changed.
        before: ids of those for which it was requested already.
    """
    return [
        alert
        for alert in alerts
        if alert.kind.startswith(_UNCLEAR) and alert.state == "open" and alert.id not in before
    ]


class Pace:
    """How fast a job goes on: steps by the time at which they were heard of."""

    def __init__(self) -> None:
        # When which step was the newest that some rank had reported: of the last evaluations.
        self._progress: deque[tuple[float, int]] = deque(maxlen=_PROGRESS)
        self._newest = -1
        self._between_posts = 0

    def take(self, newest: int, liveness: Sequence[LivenessPart], now: float) -> None:
        """The newest step that any rank has reported, and how often the ranks post."""
        self._newest, self._between_posts = newest, 0
        self._progress.append((now, newest))
        before, step = self._progress[0]
        if now > before and newest > step:
            gap = max((entry.liveness.typical_gap for entry in liveness), default=0.0)
            self._between_posts = math.ceil(gap * (newest - step) / (now - before))

    def sampled_until(self, alerts: Iterable[Alert]) -> int:
        """The step up to which ranks are to sample every one, for alerts that have just opened.

        The request reaches a rank with the answer to its next batch. By then a fast trainer is
        hundreds of steps further: as many as it does between two batches and until the next
        evaluation, or about as many as it was ahead when this was found.
        """
        ahead = self._newest - max(alert.seen_step for alert in alerts)
        further = max(3 * ahead, 3 * self._between_posts // 2, 0)
        return self._newest + _DENSE_STEPS + min(further, _MAX_AHEAD)
