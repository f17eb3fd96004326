"""Whether a training learns on although most units of a layer do nothing."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.layer.reconstruction import ReconstructionPolicy
from rankscope.server.detectors.mechanisms.series_by_step import median, noise_of_mean
from rankscope.server.detectors.mechanisms.statistics import mann_kendall
from rankscope.server.detectors.policy import Observations, Share, Sigmas, Times


@dataclass(frozen=True, slots=True)
class LearningPolicy(ReconstructionPolicy):
    """Thresholds of `layer.dead` for what becomes of the loss once units are dead.

    Attributes:
        overwriting: update of one step, relative to the parameters, with which a few steps
            overwrite them.
        learning: observations of the loss after which it shows whether the rest learns on, and of
            which its medians are, before and now: these are known to a third of what single losses
            scatter by.
        progress: share by which the loss has to have fallen since units were idle, for that: losses
            of batches scatter by a fifth to a third, their medians by less than that.
        patience: observations after which a training that had learned has to have learned on: a
            loss that falls by a tenth of what it scatters by in 12 of them falls by 2.5 standard
            errors then.
        falling: Mann-Kendall Z, below 0, from which on losses fall.
        slowed: share of the fall before, below which that since then has to be, to those 2.5
            standard errors, for the learning to have stopped: an exponential falls by a quarter of
            the fall before, or by more, unless 1.4 of its time constants fit into what is compared.
        few_left: share of dead units from which on a training that learns nothing at all does so
            for them: with two fifths of its units left, healthy twins learned as well as ever.
        thrown: times of the losses before, from which on a step has thrown the loss up.
        risen: standard errors by which the loss has to be above what it was before, for a harm:
            losses of 84 medians, of which one is beyond 4 by chance in some hundred trainings.
    """

    overwriting: Share = 0.1
    learning: Observations = 16
    progress: Share = 0.1
    patience: Observations = 100
    falling: Sigmas = 2.5
    slowed: Share = 0.25
    few_left: Share = 0.8
    thrown: Times = 2.0
    risen: Sigmas = 4.0


@dataclass(slots=True)
class Learning:
    """The losses before units were dead and after it.

    A ReLU network that learns well may leave most units of a layer unused: a wide encoder with a
    narrow code, say. That units died did harm where the loss rose with it, where it fell before and
    stands still since, or where nothing is learned at all.

    Attributes:
        early: the first losses, `recent` the newest ones.
        before, after: those up to the step from which units were dead, and those since then.
        slope: of the losses before, a step.
        harmless: what was found out once there were enough of them; None: nothing yet.
        thrown: whether the loss was far above what it was before.
        idly: whether all that shows harm is that nothing is learned, as nothing was before.
    """

    policy: LearningPolicy
    early: list[float] = field(default_factory=list)
    recent: deque[float] = field(init=False)
    before: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)
    slope: float = 0.0
    harmless: bool | None = None
    thrown: bool = False
    idly: bool = False
    _few: bool = False

    def __post_init__(self) -> None:
        self.recent = deque(maxlen=self.policy.patience)

    def push(self, loss: float) -> None:
        """Takes the loss of a step."""
        self.recent.append(loss)
        self.after.append(loss)
        if len(self.early) < self.policy.learning:
            self.early.append(loss)
        if len(self.after) > self.policy.patience:
            self._decide()
            del self.after[0]

    def begin(self) -> None:
        """Units are dead from now on."""
        self.before = list(self.recent)[-self.policy.learning :]
        self.slope, _ = _line(list(self.recent))
        self.after, self.harmless, self.thrown, self.idly = [], None, False, False

    def goes_on(self, largest_update: float, share: float) -> bool:
        """Whether the training learns on, or may do so yet.

        Args:
            largest_update: of a step before units were dead, relative to the parameters.
            share: of the units of a layer that are dead, the largest.
        """
        policy = self.policy
        if not self.before:
            return False
        self._few = share >= policy.few_left
        if len(self.after) < policy.learning:
            return True
        if self.harmless is not None:
            return self.harmless
        if self._did_harm(largest_update):
            # What is reported does not become less serious.
            self.harmless = False
        return self.harmless is None

    @property
    def explains(self) -> bool:
        """Whether it is for these units, if nothing is learned: it began with them, or few work."""
        return self._few or not self.idly

    def _did_harm(self, largest_update: float) -> bool:
        policy = self.policy
        newest = self.after[-policy.learning :]
        now, before, first = median(newest), median(self.before), self.early[0]
        self.thrown = self.thrown or max(self.after) > policy.thrown * max(before, first) > 0
        if largest_update > policy.overwriting and not self._is_below(now, first):
            # The loss falls from where the step has thrown it, to what it was without learning.
            self.idly = not self.thrown
            return True
        if self._is_below(now, before):
            return False
        error = math.hypot(noise_of_mean(newest), noise_of_mean(self.before))
        if float(np.mean(newest) - np.mean(self.before)) > policy.risen * error:
            return True
        self.idly = not (self._is_below(now, first) or self._falls(self.recent))
        return self.idly

    def _decide(self) -> None:
        if self.harmless is not None or not self.before:
            return
        policy, losses = self.policy, self.after[: self.policy.patience]
        now, began = median(losses[-policy.learning :]), min(self.early[0], median(self.early))
        slope, error = _line(losses)
        stopped = slope - policy.falling * error > policy.slowed * self.slope
        learned = self._is_below(now, began)
        self.harmless = self._falls(losses) or (learned and not stopped)
        self.idly = not self.harmless and not learned and not self.thrown

    def _falls(self, losses: Collection[float]) -> bool:
        return mann_kendall(list(losses)) < -self.policy.falling

    def _is_below(self, loss: float, before: float) -> bool:
        return loss < before - self.policy.progress * abs(before)


def _line(losses: Sequence[float]) -> tuple[float, float]:
    """Slope of losses by least squares, an observation, and its standard error."""
    count = len(losses)
    if count < 2:
        return 0.0, 0.0
    at = np.arange(count) - (count - 1) / 2
    squares = float(at @ at)
    return float(at @ np.array(losses)) / squares, noise_of_mean(losses) * (count / squares) ** 0.5
