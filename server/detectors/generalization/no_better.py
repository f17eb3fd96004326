"""An evaluation that is no better than an answer without a look at the inputs. Pure.

What is learned on the batches of training and of no use in an evaluation, from the first one on,
has no best evaluation that it falls behind. But what a constant answer would lose is known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.series_by_step import median
from rankscope.server.detectors.mechanisms.statistics import robust_sigma
from rankscope.server.detectors.mechanisms.wording import count, number

# Loss of training, as a share of that of the best constant answer, below which three quarters are
# explained; and of the evaluation, from which on a tenth at most is.
_LEARNED, _NOTHING = 0.25, 0.9
# Times that a sample has come, from which on a network may have memorised it.
_MEMORISED = 8.0
# Times a constant answer's loss above which one that is logged may be a sum of many.
_FAR = 3.0
# Consecutive evaluations. Those of a network that has just begun may be worse than a constant.
_EVALUATIONS = 3
# The same where training has learned little, but beyond doubt: by this share, which is more than a
# prior of the classes that is known better brings, and by as many standard errors (one of 30,000).
# Every one of as many evaluations is worse than a constant: a slow start is over by then; and the
# last ones are worse than the first by more than twice the noise of evaluations.
_LITTLE, _SURE, _MANY, _WORSE = 0.98, 4.0, 8, 2.0


@dataclass(slots=True)
class Losses:
    """Attributes: of the evaluation, of training, and of the best constant answer.

    Of the logarithm of that of training `error` is the standard error. `visits` is how often each
    sample of training had come; NaN where that is not known.
    """

    evaluated: float
    trained: float
    constant: float
    error: float = math.inf
    visits: float = math.nan


@dataclass(slots=True)
class NoBetter:
    """Follows the evaluations of one data set.

    Attributes:
        since, times: of those in a row that are no better than a constant where training is solved.
        never: that are worse than a constant, since the first one of all.
        first, least: the first one of all, and the lowest.
    """

    since: int = -1
    times: int = 0
    never: list[tuple[int, float]] = field(default_factory=list)
    better: bool = False
    first: float = math.nan
    least: float = math.inf
    watch: Watch[Losses] = field(default_factory=Watch)

    def take(
        self,
        step: int,
        found: Losses,
        spacing: int,
        *,
        alone: bool = True,
        logged: bool = False,
    ) -> None:
        """Takes an evaluation; NaN for what is not known.

        Args:
            spacing: steps that as many evaluations take as have to be better for it to be over.
            alone: no other evaluation of the run was ever better than a constant answer.
            logged: a user logs them: they may be in another unit than the loss of training, as sums
                over batches are, and say nothing where they have come down, or lie far above.
        """
        self.watch.clear_after = spacing
        constant = found.constant
        self.better |= found.evaluated < constant
        if found.evaluated >= constant > 0 and not self.better:
            self.never.append((step, found.evaluated))
        self.first = found.evaluated if math.isnan(self.first) else self.first
        self.least = min(self.least, found.evaluated)
        if logged and not self._of_one_unit(found):
            self.times = 0
        elif found.evaluated >= _NOTHING * constant > 0 and found.trained < _LEARNED * constant:
            self.since = step if not self.times else self.since
            self.times += 1
        else:
            self.times = 0
        if self.times >= _EVALUATIONS:
            self.watch.bad(step, found, first_step=self.since).facts = found
        elif alone and not logged and self._memorises(found):
            self.watch.bad(step, found, first_step=self.never[0][0]).facts = found
        else:
            self.watch.good(step)

    def _of_one_unit(self, found: Losses) -> bool:
        stands = self.least >= _NOTHING * self.first
        return stands and found.evaluated <= _FAR * found.constant

    def _memorises(self, found: Losses) -> bool:
        """Whether what training gains, however little, was of no use in any evaluation."""
        if self.better or len(self.never) < _MANY:
            return False
        sure = found.trained < found.constant * min(_LITTLE, math.exp(-_SURE * found.error))
        losses = [loss for _, loss in self.never]
        noise = robust_sigma(np.diff(losses)) / math.sqrt(2)
        return sure and median(losses[-_EVALUATIONS:]) - losses[0] > _WORSE * noise


def finding_of(episode: Episode[Losses], name: str) -> Finding:
    """The finding as it stands.

    Args:
        name: of the evaluation; empty where there is one only.
    """
    facts, step = episode.facts, episode.first_step
    of = f" of `{name}`" if name else ""
    seen = episode.seen + _EVALUATIONS - 1
    solved = facts.trained < _LEARNED * facts.constant
    memorised, first = "", ""
    if facts.visits >= _MEMORISED:
        memorised = (
            f"each sample of training has come {number(facts.visits)} times, so that these may "
            "simply be memorised, being too few; or "
        )
        first = "Train on more samples, augment them, or stop sooner. To be sure that it is that: "
    return episode.finding(
        kind="generalization.gap",
        key=f"constant:{name}",
        severity="warning",
        title=f"The evaluation{of} is no better than a constant answer since step {step}"
        + (", and the training is solved" if solved else ", and training memorises"),
        cause=(
            f"The loss of training is {number(facts.trained)}, that of the evaluation"
            f"{of} {number(facts.evaluated)}, at {count(seen, 'evaluation')}. "
            f"The best answer that is the same for every input loses {number(facts.constant)}. "
            f"So what is learned is of no use there: {memorised}the answer is in the inputs of "
            "training (a target that is not shifted, a column that gives it away), the evaluation "
            "prepares its inputs or its labels in another way, running statistics of batch norm "
            "are not what they should be, or the data of training are memorised"
            + ("." if solved else ", as where targets do not belong to them (shuffled separately).")
        ),
        remedy=(
            f"{first}Evaluate a batch of training in evaluation mode: where that is as bad, look "
            "at the mode, at the buffers and at the preparation of the data; where it is good, "
            "look at what training can see of the targets."
        ),
        evidence={
            "evaluation": name,
            "evaluated": facts.evaluated,
            "training": facts.trained,
            "constant": facts.constant,
        },
    )
