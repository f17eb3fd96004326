"""What a trainer multiplies its losses by, from what the loss functions have given. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rankscope.server.detectors.mechanisms.statistics import rank_rows
from rankscope.server.window import Float64, Int64, Window

# Beside `loss` and `samples`: of a cross entropy they give its mean over the targets, L =
# (1 - explained) L0, where L0 is the best constant answer's by which `explained_deviance` goes.
INPUTS = ("explained_deviance", "target_deviance", "target_share")
# Relative difference up to which weights are the same: of losses in 16 bits three digits are known.
_SAME = 0.01
# Losses below this share of the best constant answer's are rounding.
_LEAST = 1e-4


@dataclass(slots=True)
class LossWeights:
    """What the newest sample says of the weights that the ranks' losses have.

    A loss that is trained on is a multiple of what the loss function gives as the mean over its
    targets: 1 / N where a trainer divides by the number of ranks and adds gradients up, a rank's
    share of all samples where a mean over samples is meant.

    Attributes:
        common: of all ranks; NaN where they have several, or where none is known.
        by_samples: whether they are proportional to the ranks' numbers of samples, which differ.
    """

    common: float = np.nan
    by_samples: bool = False

    def take(self, window: Window) -> None:
        """Goes through a window, of which the newest step with all of it counts."""
        for column in range(len(window.steps))[::-1]:
            weights = _weights(window, column)
            if weights is None:
                continue
            mean = float(weights.mean())
            same = bool((np.abs(weights / mean - 1.0) < _SAME).all())
            self.common = mean if same else np.nan
            samples = _row(window, "samples", column)
            self.by_samples = (
                not same
                and samples is not None
                and bool((np.abs(weights / mean / (samples / samples.mean()) - 1.0) < _SAME).all())
            )
            return


def shares_of_samples(window: Window, steps: Int64) -> Float64:
    """Each rank's number of samples over the ranks' mean, float64 [N, R]; 1 where not all post it.

    Args:
        steps: int64 [N], ascending.
    """
    counted, samples = rank_rows(window, "samples")
    shares = np.ones((len(steps), len(window.ranks)))
    places = np.searchsorted(counted, steps)
    for row, (place, step) in enumerate(zip(places.tolist(), steps.tolist(), strict=True)):
        if place < len(counted) and counted[place] == step and (samples[place] > 0).all():
            shares[row] = samples[place] / samples[place].mean()
    return shares


def _weights(window: Window, column: int) -> Float64 | None:
    """Float64 [R] at a step; None where a rank's is not known."""
    loss, *inputs = (_row(window, name, column) for name in ("loss", *INPUTS))
    if loss is None or any(row is None for row in inputs):
        return None
    explained, constant, share = inputs
    assert explained is not None
    assert constant is not None
    assert share is not None
    with np.errstate(divide="ignore", invalid="ignore"):
        given = (1.0 - explained) * constant / share
        weights = loss / given
        usable = (given > _LEAST * constant) & np.isfinite(weights) & (weights > 0)
    return weights if usable.all() else None


def _row(window: Window, name: str, column: int) -> Float64 | None:
    series = window.series.get(name)
    if series is None or not series.present[:, column].all():
        return None
    values: Float64 = series.values[:, column]
    return values
