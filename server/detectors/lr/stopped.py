"""Steps that come to nothing all at once, where nobody posts a learning rate."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.episode import Condition, Episode, Watch
from rankscope.server.detectors.mechanisms.series_by_step import mean_by_step, median
from rankscope.server.detectors.mechanisms.wording import count, number
from rankscope.server.window import Window

_UPDATE, _RATE = "update_ratio", "lr"
_NORMS = ("grad_norm", "grad_norm_local")
# Of what steps were before, below which they are nothing: a schedule's end, and no decay of it.
_NOTHING = 1e-3
# Update from which on a step is meant to teach something: healthy medians lie above 4e-5.
_TEACHES = 1e-5
# Of the gradient's norm before, above which there is as much to be learned as there was.
_REMAINS = 0.5
# Sampled steps before, and in a row since: a few are skipped, or taken with an empty batch.
_BEFORE, _IN_A_ROW = 16, 32


@dataclass(frozen=True, slots=True)
class Stopped:
    """Medians of updates and of gradient norms, before and since, and samples since."""

    update: float
    update_before: float
    norm: float
    norm_before: float
    samples: int


@dataclass(slots=True)
class StoppedSteps(Condition[Stopped]):
    """Follows how far steps move the parameters, and how large the gradients are meanwhile.

    Attributes:
        before: updates and gradient norms of the latest steps that came to something.
        since: the same of those in a row that came to nothing, from `first` on.
        rated: first step at which a rate was posted: from then on it is judged by that.
    """

    before: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_BEFORE))
    since: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_IN_A_ROW))
    samples: int = 0
    first: int = -1
    rated: float = math.inf
    watch: Watch[Stopped] = field(default_factory=lambda: Watch(clear_after=_IN_A_ROW))

    def take(self, window: Window) -> None:
        """Goes through the sampled steps of a window."""
        self.rated = min([self.rated, *mean_by_step(window, _RATE)])
        norms: dict[int, float] = {}
        for name in reversed(_NORMS):
            norms |= mean_by_step(window, name)
        for step, update in mean_by_step(window, _UPDATE).items():
            norm = norms.get(step, math.nan)
            if step >= self.rated:
                self.watch.good(step)
            elif math.isfinite(update) and math.isfinite(norm):
                self._push(step, update, norm)

    def _push(self, step: int, update: float, norm: float) -> None:
        full = len(self.before) == _BEFORE
        usual = median([one for one, _ in self.before])
        if not full or usual < _TEACHES or update > _NOTHING * usual:
            self.before.append((update, norm))
            self.since.clear()
            self.samples = 0
            self.watch.good(step)
            return
        self.first = step if not self.samples else self.first
        self.samples += 1
        self.since.append((update, norm))
        norm_before, now = median([n for _, n in self.before]), median([n for _, n in self.since])
        if self.samples < _IN_A_ROW:
            return
        if now < _REMAINS * norm_before:
            self.watch.good(step)
            return
        small = median([one for one, _ in self.since])
        facts = Stopped(small, usual, now, norm_before, self.samples)
        self.watch.bad(step, facts, first_step=self.first).facts = facts

    def finding(self, episode: Episode[Stopped]) -> Finding:
        """What is reported of an episode."""
        facts, step = episode.facts, episode.first_step
        return episode.finding(
            kind="lr.too_low",
            key="stopped",
            severity="warning",
            title=f"Steps come to nothing since step {step}: {number(facts.update)} of the "
            f"parameters, and {number(facts.update_before)} before",
            stage="hyperparameters",
            cause=(
                f"At {count(facts.samples, 'sampled step')} since step {step} a step has changed "
                f"the parameters by {number(facts.update)} of their size, where it was "
                f"{number(facts.update_before)} before, and the gradients are as large as they "
                f"were (a norm of {number(facts.norm)}, before {number(facts.norm_before)}): there "
                "is as much to be learned, and nothing is learned any more. No learning rate is "
                "posted; most likely it has fallen to nothing, or the updates are multiplied by "
                "something else that has."
            ),
            remedy=(
                f"Print the learning rate around step {step}: a schedule that was made for fewer "
                "steps, that advances more than once a step, or a mask or scale of the updates. "
                "Post it (`lr=...` beside the loss) to have it watched."
            ),
            evidence={
                "update_ratio": facts.update,
                "update_ratio_before": facts.update_before,
                "grad_norm": facts.norm,
                "grad_norm_before": facts.norm_before,
            },
        )
