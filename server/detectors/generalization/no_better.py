"""An evaluation that is no better than an answer without a look at the inputs. Pure.

What is learned on the batches of training and of no use in an evaluation, from the first one on,
has no best evaluation that it falls behind. But what a constant answer would lose is known.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.wording import count, number

# Loss of training, as a share of that of the best constant answer, below which most is explained.
_LEARNED = 0.2
# Consecutive evaluations. Those of a network that has just begun may be worse than a constant.
_EVALUATIONS = 3


@dataclass(slots=True)
class Losses:
    """Attributes: of the evaluation, of training, and of the best constant answer."""

    evaluated: float
    trained: float
    constant: float


@dataclass(slots=True)
class NoBetter:
    """Follows the evaluations of one data set."""

    since: int = -1
    times: int = 0
    watch: Watch[Losses] = field(default_factory=Watch)

    def take(self, step: int, found: Losses, spacing: int) -> None:
        """Takes an evaluation; NaN for what is not known.

        Args:
            spacing: steps that as many evaluations take as have to be better for it to be over.
        """
        bad = found.evaluated >= found.constant > 0 and found.trained < _LEARNED * found.constant
        self.watch.clear_after = spacing
        if not bad:
            self.times = 0
            self.watch.good(step)
            return
        self.since = step if not self.times else self.since
        self.times += 1
        if self.times >= _EVALUATIONS:
            self.watch.bad(step, found, first_step=self.since).facts = found


def finding_of(episode: Episode[Losses], name: str) -> Finding:
    """The finding as it stands.

    Args:
        name: of the evaluation; empty where there is one only.
    """
    facts, step = episode.facts, episode.first_step
    of = f" of `{name}`" if name else ""
    seen = episode.seen + _EVALUATIONS - 1
    return episode.finding(
        kind="generalization.gap",
        key=f"constant:{name}",
        severity="warning",
        title=f"The evaluation{of} is no better than a constant answer since step {step}, and the "
        "training is solved",
        cause=(
            f"The loss of training is {number(facts.trained)}, that of the evaluation"
            f"{of} {number(facts.evaluated)}, at {count(seen, 'evaluation')}. "
            f"The best answer that is the same for every input loses {number(facts.constant)}. "
            "So what is learned is of no use there: the answer is in the inputs of training (a "
            "target that is not shifted, a column that gives it away), the evaluation prepares its "
            "data in another way, running statistics of batch norm are not what they should be, or "
            "the data of training are memorised."
        ),
        remedy=(
            "Evaluate a batch of training in evaluation mode: where that is as bad, look at the "
            "mode, at the buffers and at the preparation of the data; where it is good, look at "
            "what training can see of the targets."
        ),
        evidence={
            "evaluation": name,
            "evaluated": facts.evaluated,
            "training": facts.trained,
            "constant": facts.constant,
        },
    )
