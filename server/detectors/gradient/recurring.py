"""Gradients that are many times their usual size again and again: every k-th, or some of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.mechanisms.recurrence import Folds, detrended, folded, outliers
from rankscope.server.detectors.mechanisms.statistics import robust_sigma
from rankscope.server.detectors.mechanisms.wording import count, number
from rankscope.server.window import Float64

# Large is what a gradient is that explodes (`gradient.exploding`): ten times the usual one. An
# epoch's last batch, of a single sample, differs from those of 32 by the root of that, six times.
_TIMES = math.log(10)
# Robust standard deviations of the logarithm: what `loss.spike` asks of a single one.
_SIGMAS = 8.0
# Of 256 norms, without a period: single ones come in healthy trainings (0.1 a thousand steps of
# large language models), and five in 256 by such a rate in one of 1e10 windows.
_SPIKES = 5


@dataclass(frozen=True, slots=True)
class Recurrence:
    """What was seen.

    Attributes:
        period: in observations; 0 where there is none.
        factor: of the large norms to the usual ones.
        share: of the observations that are large.
        first_step: the first large one in the window.
        seen: how many observations show it.
    """

    period: int
    factor: float
    share: float
    first_step: int
    seen: int

    @property
    def title(self) -> str:
        """What happens, without since when."""
        when = "every other step" if self.period == 2 else f"every {self.period} steps"
        if not self.period:
            when = f"at {count(round(self.share * self.seen), 'step')} of the last {self.seen}"
        return f"The gradient norm jumps to {number(self.factor)} times its usual size {when}"

    @property
    def cause(self) -> str:
        """What makes such gradients."""
        if self.period:
            return (
                f"Every {count(self.period, 'step')} the gradient is {number(self.factor)} times "
                "as large as in between: something that recurs with this period causes it. "
                "Possibly one of several data sources or loader workers gives inputs that are "
                "not normalised, a loss term or penalty that is added at these steps has too "
                "large a weight, or an accumulation is not divided by its number of "
                "micro-batches. Clipping hides it from the loss: the step then goes where these "
                "batches point."
            )
        return (
            f"At {self.share:.0%} of the steps the gradient is {number(self.factor)} times as "
            "large as usual, at no fixed distance: possibly a part of the samples is broken or not "
            "normalised, or a rare path of the model divides by almost nothing."
        )

    @property
    def remedy(self) -> str:
        """What to look at."""
        where = (
            f"steps {self.first_step}, {self.first_step + self.period}, ..."
            if self.period
            else f"step {self.first_step} and of the later large ones"
        )
        return (
            f"Look at the batches and the loss terms of {where}, and compare the inputs' range "
            "with that of the steps between."
        )


@dataclass(slots=True)
class Recurring:
    """Follows the logarithm of the gradient norm.

    Attributes:
        found: what the newest window that was examined shows.
    """

    found: Recurrence | None = None
    _folds: Folds = field(default_factory=Folds)
    _by_size: dict[int, Recurrence | None] = field(default_factory=dict)

    def push(self, step: int, norm: float) -> bool:
        """Takes a log norm; whether a window was due."""
        due = self._folds.push(step, norm)
        for size in due:
            steps, values = self._folds.window(size)
            self._by_size[size] = _periodic(steps, values) or (
                _scattered(steps, values) if size == max(self._folds.sizes) else None
            )
        if due:
            found = [one for one in self._by_size.values() if one is not None]
            # A period says more than that there are many.
            self.found = max(found, key=lambda one: one.period > 0, default=None)
        return bool(due)


def _periodic(steps: list[int], values: Float64) -> Recurrence | None:
    residual = detrended(len(values)) @ values
    if not np.ptp(residual) > _TIMES:
        return None
    found = folded(residual)
    if found is None:
        return None
    height = float(np.ptp(found.profile))
    if not height > _TIMES:
        return None
    large = residual > found.profile.min() + 0.5 * height
    return Recurrence(
        period=found.length,
        factor=math.exp(height),
        share=float(large.mean()),
        first_step=steps[int(np.argmax(large))],
        seen=len(values),
    )


def _scattered(steps: list[int], values: Float64) -> Recurrence | None:
    # Around the course of the norm: one that has come down from a high level has no spikes.
    residual = detrended(len(values)) @ values
    bulk = residual[np.abs(residual - np.median(residual)) <= 4 * robust_sigma(residual)]
    places = outliers(residual, sigmas=_SIGMAS, margin=_TIMES)
    # Of one burst, or of a new level, neighbours are large; spikes stand alone.
    alone = [p for p in places.tolist() if p - 1 not in places and p + 1 not in places]
    if len(alone) < _SPIKES or not len(bulk):
        return None
    return Recurrence(
        period=0,
        factor=math.exp(float(np.median(residual[alone]) - np.median(bulk))),
        share=len(alone) / len(values),
        first_step=steps[alone[0]],
        seen=len(values),
    )
