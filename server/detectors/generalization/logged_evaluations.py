"""The losses of evaluations that a user logs, and which of their values are evaluations. Pure."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from functools import cache

from rankscope.server.detectors.metric.series import is_logged
from rankscope.server.window import Window

# Names under which users log the loss of an evaluation, without what divides their words.
_NAMES = re.compile(
    r"(mean|avg|total)?(val|valid|validation|eval|evaluation|test|dev|heldout|holdout)(set)?"
    r"(mean|avg|total|ce|nll|mse)?loss"
    r"|(mean|avg|total)?loss(val|valid|validation|eval|evaluation|test|dev|heldout|holdout)"
)
# Steps from one evaluation to the next, at the least; the mark of a series that has had fewer.
_APART, _NEVER = 5, -(1 << 62)


@cache
def is_logged_evaluation(name: str) -> bool:
    """Whether a user's series is by its name the loss of an evaluation."""
    return _NAMES.fullmatch(re.sub(r"[^a-z]", "", name.lower())) is not None and is_logged(name)


def accuracy_beside(name: str, window: Window) -> str:
    """The series of the accuracy beside a loss that is logged, of those that there are."""
    others = [re.sub("loss", word, name, flags=re.IGNORECASE) for word in ("accuracy", "acc")]
    return next((other for other in others if other in window.series), others[0])


@dataclass(slots=True)
class LoggedEvaluations:
    """Tells evaluations from values that are logged once more.

    Attributes:
        over: the agent has seen an evaluation itself, of which what is logged is the same again.
        newest: name -> step and value of the newest evaluation; `_NEVER` for what is none.
    """

    over: bool = False
    newest: dict[str, tuple[int, float]] = field(default_factory=dict)

    def takes(self, name: str, step: int, loss: float) -> bool:
        """Whether a value is that of another evaluation than the one before.

        The last one may be logged again at every step. What is another number from step to step is
        no evaluation.
        """
        last, before = self.newest.get(name, (-_APART, math.nan))
        if self.over or loss == before or last == _NEVER:
            return False
        self.newest[name] = (step if step - last >= _APART else _NEVER), loss
        return step - last >= _APART
