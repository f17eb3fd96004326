"""Steps with a gradient that an earlier step has applied already: no backward pass lies between."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.episode import Condition, Episode, Watch
from rankscope.server.detectors.mechanisms.wording import count, number
from rankscope.server.window import Window

NAMES = ("grad_cosine", "grad_norm", "loss", "lr")
# What float32 and the sums over a model may be off by, relative to the norm.
_ALIKE = 1e-5
# Of so many steps with a gradient, how many have to be such: a step that is taken once more after
# something failed is none.
_RECENT, _LEAST = 16, 4


@dataclass(slots=True)
class Again:
    """Attributes: steps that applied the gradient of the one before, of so many judged."""

    steps: int
    judged: int


@dataclass(slots=True)
class AppliedAgain(Condition[Again]):
    """Follows whether a step's gradient is that of the step before, and no loss was computed.

    Two batches never have one gradient to the last digits. Where the whole data set is one batch
    all gradients are nearly the same: there the one that goes with a loss agrees with the one
    before, too.

    Attributes:
        recent: of the latest steps with a gradient, whether they were such.
    """

    recent: deque[tuple[int, bool]] = field(default_factory=lambda: deque(maxlen=_RECENT))
    watch: Watch[Again] = field(default_factory=lambda: Watch(clear_after=_RECENT))
    _before: tuple[int, float, bool] = (-1, math.nan, False)  # the last: it is of a new batch

    def push(self, step: int, row: Mapping[str, float]) -> None:
        """Takes what is known of a step."""
        norm, cosine = row.get("grad_norm", math.nan), row.get("grad_cosine", math.nan)
        if not norm > 0:
            return
        last, before, new = self._before
        computed = "loss" in row
        alike = cosine > 1 - _ALIKE
        self._before = (step, norm, computed and not alike)
        if last != step - 1:
            return
        again = new and alike and not computed and row.get("lr", 1.0) > 0
        again = again and abs(norm - before) <= _ALIKE * norm
        self.recent.append((step, again))
        found = [at for at, is_so in self.recent if is_so]
        if len(found) < _LEAST:
            self.watch.good(step)
            return
        facts = Again(len(found), len(self.recent))
        self.watch.bad(step, facts, first_step=found[0]).facts = facts

    def finding(self, episode: Episode[Again]) -> Finding:
        """What is reported of an episode."""
        facts = episode.facts
        return episode.finding(
            kind="gradient.accumulating",
            key="again",
            severity="warning",
            title=f"Gradients are applied twice since step {episode.first_step}",
            stage="reduced_gradient",
            cause=(
                f"At {count(facts.steps, 'step')} of the last {number(facts.judged)} with a "
                "gradient the optimizer applied the one of the step before once more, to the last "
                "digits, and no loss was computed in between: `optimizer.step()` is called twice "
                "for one `backward()`. The steps are twice as large, momentum and the averages of "
                "Adam count each gradient twice, and a scheduler or an average that goes by steps "
                "is ahead."
            ),
            remedy=(
                "Call `step()` once for each `backward()`: look for a second call in a wrapper, a "
                "callback or a trainer that steps by itself."
            ),
            evidence={"steps": facts.steps, "judged": facts.judged},
        )

    def take(self, window: Window, rows: Mapping[int, Mapping[str, float]]) -> list[Finding]:
        """Goes through a window's steps, in their order; what is to be reported after it."""
        for step in sorted(rows):
            self.push(step, rows[step])
        return self.findings(window)
