"""Inputs that are far larger or smaller than what networks are initialised for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from rankscope.server.detectors.base import TO_THE_END, Detector, Finding, Outcome, Reach
from rankscope.server.detectors.episode import Episode, Watch
from rankscope.server.detectors.policy import Count, Number, Policy
from rankscope.server.detectors.statistics import rank_rows
from rankscope.server.detectors.waiting import too_few
from rankscope.server.detectors.walking import median
from rankscope.server.detectors.wording import number
from rankscope.server.window import Check, Window

_SIZE = "first_layer_input_rms"


@dataclass(frozen=True, slots=True)
class UnscaledPolicy(Policy):
    """Thresholds of `data.unscaled`.

    Attributes:
        samples: of the inputs' size that are needed; the median counts.
        largest: root mean square from which on inputs are not scaled: pixels up to 255 have 100,
            features in their own units often 1,000; in 95 healthy runs it was 5 at most.
        smallest: the same below which they were divided once too often: pixels divided by 255
            twice have 2e-3; in 95 healthy runs it was 0.24 at least, and quiet sounds have 0.01.
    """

    samples: Count = 4
    largest: Number = 30.0
    smallest: Number = 3e-3


@dataclass(slots=True)
class UnscaledState:
    """What `data.unscaled` remembers: the least and the largest of the ranks at each sample.

    Attributes:
        watch: never told that it is over: how inputs are scaled is written in the code.
    """

    least: list[float] = field(default_factory=list)
    most: list[float] = field(default_factory=list)
    first_step: int = -1
    watch: Watch[float] = field(default_factory=Watch)


class InputsUnscaled(Detector[UnscaledState]):
    """The first layer is given numbers a hundred times too large, or too small.

    Weights are initialised for inputs of mean 0 and size 1. Pixels up to 255, or features in their
    own units, make the first outputs, the loss and the gradient as much larger: units saturate or
    die in the first steps, and the training is spent on shrinking what comes of them. Inputs that
    were divided twice are lost beside the biases.

    Statistic:
        Root mean square of the first layer's inputs that are not 0 (`first_layer_input_rms`), its
        median over four sampled steps: above 30, or below 0.003, on all ranks. Where a
        normalisation comes before or right after that layer, or the inputs were computed by what is
        trained, the agent posts none. What holds for one rank alone is `data.outlier`.

    Severity:
        Warning.

    Evidence:
        `rms`, and the medians of the least and of the largest of the ranks, `least` and `most`.

    Source:
        LeCun et al., Efficient BackProp (1998), section 4.3; Glorot and Bengio (2010).
    """

    kinds: ClassVar[tuple[str, ...]] = ("data.unscaled",)
    wants: ClassVar[tuple[str, ...]] = (_SIZE,)

    policy: UnscaledPolicy

    def reaches(self) -> tuple[Reach, ...]:
        """Samples of the inputs' size."""
        return (Reach((_SIZE,), self.policy.samples, TO_THE_END),)

    def advance(self, window: Window, state: UnscaledState) -> Outcome:
        """Takes the sizes; all ranks' have to be so."""
        for step, row in zip(*rank_rows(window, _SIZE), strict=True):
            sizes = row[np.isfinite(row)]
            if not len(sizes) or len(state.least) == self.policy.samples:
                continue
            state.first_step = int(step) if state.first_step < 0 else state.first_step
            state.least.append(float(sizes.min()))
            state.most.append(float(sizes.max()))
            size = self._wrong(state)
            if size is not None:
                state.watch.bad(int(step), size, first_step=state.first_step)
        findings = tuple(_finding(e, state) for e in state.watch.take(window.last_step))
        return Outcome({"data.unscaled": self._check(state)}, findings)

    def _wrong(self, state: UnscaledState) -> float | None:
        """The size of inputs that are not scaled; None for others."""
        policy = self.policy
        if len(state.least) < policy.samples:
            return None
        least, most = median(state.least), median(state.most)
        if least > policy.largest:
            return least
        # Inputs of nothing but zeros are another fault.
        return most if 0 < most < policy.smallest else None

    def _check(self, state: UnscaledState) -> Check:
        if not state.least:
            return Check.not_applicable(
                "No first layer was seen that is given data as they are.",
                early="The first layer's inputs have not been seen yet.",
            )
        if len(state.least) < self.policy.samples:
            return too_few(len(state.least), "sample", self.policy.samples)
        least, most = number(median(state.least)), number(median(state.most))
        return Check.ok(f"The first layer's inputs have sizes of {least} to {most}.")


def _finding(episode: Episode[float], state: UnscaledState) -> Finding:
    size, least, most = episode.facts, median(state.least), median(state.most)
    large = size > 1
    what = "large" if large else "small"
    effect = (
        "the first outputs, the loss and the gradient are as much larger, units saturate or "
        "die in the first steps, and the training is spent on shrinking what comes of them"
        if large
        else "beside its biases the first layer hardly sees them, and hardly learns from them"
    )
    return episode.finding(
        kind="data.unscaled",
        severity="warning",
        title=f"The inputs are far too {what}: their size is {number(size)}",
        cause=(
            "What the first layer is given has a root mean square of "
            f"{number(size)} (zeros aside), where weights are initialised for 1: {effect}. "
            + (
                "Pixels that were not divided by 255, or features in their own units."
                if large
                else "Possibly they are scaled twice, in the data set and in a transform."
            )
        ),
        remedy=(
            "Bring the inputs to mean 0 and standard deviation 1, with numbers from the "
            "training data (`transforms.Normalize`, `StandardScaler`), once, or put a "
            "normalisation first."
        ),
        evidence={"rms": size, "least": least, "most": most},
    )
