"""What the loss did as the data changed. Pure."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.mechanisms.statistics import mean_over_ranks, robust_sigma
from rankscope.server.window import Float64, Window

# Losses before it, and since, that are compared: at least, and at most.
_LEAST, _MOST = 4, 32
# A rise of the loss that counts: in standard deviations of those before, and as a share of them.
_SIGMAS, _SHARE = 3.0, 0.1
# Losses that are remembered: of every step, where inputs are sampled at one of 64 and eight of
# these are held against those before.
_MEMORY = 2048


@dataclass(slots=True)
class Rise:
    """Holds the mean loss of all ranks since a step against that before.

    Attributes:
        since: the step; -1 while nothing has changed.
    """

    since: int = -1
    _losses: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_MEMORY))
    _waiting: deque[tuple[int, float]] = field(default_factory=deque)
    _before: tuple[float, ...] = ()

    def lay(self, window: Window) -> None:
        """Lays a window's losses ready; `pass_to` then lets them count step by step."""
        steps, means = mean_over_ranks(window, "loss")
        self._waiting.extend(zip(steps.tolist(), means.tolist(), strict=True))

    def pass_to(self, step: int) -> None:
        """Lets everything up to and including a step count."""
        while self._waiting and self._waiting[0][0] <= step:
            one = self._waiting.popleft()
            if math.isfinite(one[1]):
                self._losses.append(one)

    def begin(self, step: int) -> None:
        """The data are others from this step on, if they have not been before."""
        if self.since < 0:
            self.since = step
            self._before = tuple(loss for at, loss in self._losses if at < step)[-_MOST:]

    def forget(self) -> None:
        """The data are as they were."""
        self.since = -1

    def settled(self, step: int) -> bool:
        """Whether the losses since are enough to say that they have not risen."""
        known = sum(self.since <= at <= step for at, _ in self._losses)
        return known >= _MOST or len(self._losses) < _LEAST

    def judged(self) -> tuple[float, float, bool]:
        """Median losses before and since, NaN where too few are known; whether it rose."""
        before: Float64 = np.array(self._before)
        after = [loss for at, loss in self._losses if at >= self.since][:_MOST]
        if min(len(before), len(after)) < _LEAST:
            return math.nan, math.nan, False
        was, now = float(np.median(before)), float(np.median(after))
        return was, now, now - was > max(_SIGMAS * robust_sigma(before), _SHARE * abs(was))
