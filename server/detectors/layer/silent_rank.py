"""A rank of which no parameter gets a gradient any more, while those of other ranks do."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.series_by_step import rows_by_step
from rankscope.server.detectors.mechanisms.statistics import rank_rows
from rankscope.server.detectors.mechanisms.wording import count
from rankscope.server.detectors.policy import Number, Observations, Policy
from rankscope.server.window import Window


@dataclass(frozen=True, slots=True)
class SilentRankPolicy(Policy):
    """Thresholds of `layer.dead` for ranks without a gradient.

    Attributes:
        spoke: observations with a gradient, of which none in the last 64 was zero, that show that a
            rank has one at every step.
        silent: consecutive observations without: experts of a rank may have no sample, but not at
            so many steps where they had one at every step before.
        never: consecutive observations without from its first one on: a layer behind it that begins
            at zero gives it none at the first steps.
        others: observations of another rank since then, at which it has a gradient: one alone may
            be of the step at which all end.
        nothing_left: loss of a rank below which it needs no gradient any more: far below 6e-8, the
            rounding of single precision beside 1.
    """

    spoke: Observations = 8
    silent: Observations = 16
    never: Observations = 32
    others: Observations = 4
    nothing_left: Number = 1e-12


@dataclass(slots=True)
class Course:
    """Of a rank: whether its last gradients were zero, since when, and the last that were not.

    Whether it ever had one stands beside its silence.
    """

    spoke: deque[int] = field(default_factory=lambda: deque(maxlen=64))
    zeros: deque[bool] = field(default_factory=lambda: deque(maxlen=64))
    in_a_row: int = 0
    since: int = -1
    watch: Watch[bool] = field(default_factory=lambda: Watch(8))


@dataclass(slots=True)
class SilentRanks:
    """Follows the norm of each rank's gradient, as its optimizer takes it.

    Where copies of a model are trained together all ranks have one gradient. Stages of a pipeline
    and shards have their own, and where one gets none, those of the others do not show it.
    """

    policy: SilentRankPolicy
    ranks: dict[int, Course] = field(default_factory=dict)
    _known: tuple[int, int] = (-1, -1)

    def take(self, window: Window) -> None:
        """Goes through the norms of a window."""
        known = rows_by_step(window, "loss")
        for step, norms in zip(*rank_rows(window, "grad_norm"), strict=True):
            self._step(int(step), window.ranks, norms, known.get(int(step)))

    def _step(
        self, step: int, ranks: np.ndarray, norms: np.ndarray, losses: np.ndarray | None
    ) -> None:
        for row, norm in enumerate(norms.tolist()):
            if math.isnan(norm):
                continue
            course = self.ranks.setdefault(int(ranks[row]), Course())
            solved = losses is not None and abs(losses[row]) < self.policy.nothing_left
            if norm > 0 or solved:
                course.zeros.extend([True] * min(course.in_a_row, 1))
                course.zeros.append(False)
                course.in_a_row = 0
                course.watch.good(step)
                if norm > 0:
                    course.spoke.append(step)
                continue
            course.since = course.since if course.in_a_row else step
            course.in_a_row += 1
            spoke = len(course.zeros) >= self.policy.spoke and not any(course.zeros)
            least = self.policy.silent if spoke else self.policy.never
            silent = (spoke or not course.zeros) and course.in_a_row >= least
            if silent and self._others(step) >= course.since:
                course.watch.bad(step, bool(course.zeros), first_step=course.since)

    def _others(self, step: int) -> int:
        """Since when the training goes on without ranks that are silent: some other spoke as often.

        Ranks may be sampled at other steps. Once a step, since many may be silent.
        """
        if self._known[0] != step:
            often = self.policy.others
            spoke = (c.spoke[-often] for c in self.ranks.values() if len(c.spoke) >= often)
            self._known = step, max(spoke, default=-1)
        return self._known[1]

    def findings(self, last_step: int) -> list[Finding]:
        """Of all ranks, in their order."""
        return [
            _finding(rank, episode)
            for rank, course in sorted(self.ranks.items())
            for episode in course.watch.take(last_step)
        ]


def _finding(rank: int, episode: Episode[bool]) -> Finding:
    step = episode.first_step
    so_far = f"at {count(episode.seen, 'checked step')} so far"
    was = f"was never zero before, and has been exactly zero since step {step}"
    if not episode.facts:
        was = "was never anything but zero"
    return episode.finding(
        kind="layer.dead",
        key=f"rank:{rank}",
        severity="critical",
        title=(
            f"No parameter of rank {rank} has got a gradient since step {step}"
            if episode.facts
            else f"No parameter of rank {rank} has ever got a gradient"
        ),
        ranks=(rank,),
        stage="local_gradient",
        cause=(
            f"The gradient that the optimizer of rank {rank} takes {was}, {so_far}, while other "
            "ranks have theirs. What this rank holds (a stage of a pipeline, a shard, experts) is "
            "cut off from the loss: its output is detached or not sent on, its "
            "gradient is not sent back, not received, or multiplied by 0."
        ),
        remedy=(
            f"On rank {rank}, print the norm of the gradient that it receives for its output and "
            "of that of its first parameter. Where the first is zero, look at what the next stage "
            f"sends back since step {step}; else at what this rank does with it (`detach()`, "
            "`no_grad`, a mask of zeros, `zero_grad` after `backward`)."
        ),
        evidence={"steps": episode.seen},
    )
