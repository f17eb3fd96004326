"""A loss that is thrown back at one step, to what it had left behind. Pure."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.desync.averaging_rounds import MARK
from rankscope.server.detectors.mechanisms.episode import Condition, Episode, Watch
from rankscope.server.detectors.mechanisms.history import Phases
from rankscope.server.detectors.mechanisms.statistics import Progress, known_median
from rankscope.server.detectors.mechanisms.wording import number, sentences
from rankscope.server.window import Float64, Window

# Values before the step and from it on: of 735,471 orders of values that are drawn alike one has
# all of the later ones above all of the earlier.
_BEFORE, _AFTER = 16, 8
# By which the loss rises between medians; the share of that rise, on the logarithm, which the step
# itself has; and its size over the largest move before: a loss that diverges gets there in steps.
_FACTOR, _SHARE, _JUMP = 1.5, 0.6, 2.0
# The same of each rank's loss: what one rank's does alone is another matter.
_OWN = 1.25
# Of the progress made, that is lost.
_LOST = 0.1
# Steps from one loss to the next up to which a step is seen by itself.
_NEXT = 1.5


@dataclass(slots=True)
class Jump:
    """What was seen: medians before and since, how often, and the last step before.

    Attributes:
        written: parameters were written outside the optimizer before it.
        phase: what says that a new phase has begun; empty for nothing.
    """

    before: float
    now: float
    written: bool
    phase: str
    times: int = 1


@dataclass(slots=True)
class Relapse(Condition[Jump]):
    """Follows the mean loss over the ranks.

    A spike stands out from all that was lately. One that is thrown back to where the training was
    before does not: the weights of an earlier step that come back, averaged weights that are
    swapped in, a learning rate that is far too high for a step, once or again and again.

    Attributes:
        steps, losses, rows: the newest steps, mean losses and every rank's, [R] each.
        written: steps before which parameters were written outside the optimizer, the newest.
    """

    steps: deque[int] = field(default_factory=lambda: deque(maxlen=_BEFORE + _AFTER))
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=_BEFORE + _AFTER))
    rows: deque[Float64] = field(default_factory=lambda: deque(maxlen=_BEFORE + _AFTER))
    written: deque[int] = field(default_factory=lambda: deque(maxlen=4 * _BEFORE))
    watch: Watch[Jump] = field(default_factory=lambda: Watch(clear_after=4 * _AFTER))

    def take(self, window: Window) -> None:
        """Takes what was said of parameters that were written."""
        marks = window.series.get(MARK)
        if marks is not None:
            columns = np.flatnonzero(marks.present.any(axis=0))
            self.written.extend(window.steps[columns].tolist())

    def forget(self) -> None:
        """Begins anew: what comes now is judged by something else."""
        self.steps.clear()
        self.losses.clear()
        self.rows.clear()

    def push(
        self, step: int, loss: float, row: Float64, progress: Progress, phases: Phases
    ) -> None:
        """Takes the next mean loss, and every rank's, float64 [R]."""
        if not loss > 0 or (self.rows and len(self.rows[-1]) != len(row)):
            self.forget()
            return
        self.steps.append(step)
        self.losses.append(loss)
        self.rows.append(row)
        known = self.watch.current
        if len(self.losses) < _BEFORE + _AFTER or progress.spacing.interval > _NEXT:
            return
        # Nearly every step stops here.
        if self.losses[_BEFORE] < _FACTOR**_SHARE * self.losses[_BEFORE - 1]:
            if known is not None and known.holding:
                # Nearer to what it was than to what it had become.
                if loss**2 < known.facts.before * known.facts.now:
                    self.watch.good(step)
                else:
                    self.watch.bad(step, known.facts)
            return
        found = self._found(progress)
        if found is None:
            return
        at = self.steps[_BEFORE]
        found.written = any(at - 1 <= written <= at for written in self.written)
        found.phase = phases.began(at, step)
        if known is not None and not known.over(step):
            found.times = known.facts.times + 1
        self.watch.bad(step, found, first_step=at).facts = found

    def _found(self, progress: Progress) -> Jump | None:
        logs = np.log(np.array(self.losses))
        early, late = logs[:_BEFORE], logs[_BEFORE:]
        whole = float(np.median(late) - np.median(early[-_AFTER:]))
        step = float(late[0] - early[-1])
        if late.min() <= early.max() or whole < math.log(_FACTOR):
            return None
        if step < _SHARE * whole or step < _JUMP * np.abs(np.diff(early)).max():
            return None
        before, now = (float(np.exp(np.median(part))) for part in (early[-_AFTER:], late))
        if now - before < _LOST * progress.scale:
            return None
        rows = np.stack(self.rows)
        was, own = known_median(rows[_BEFORE - _AFTER : _BEFORE]), known_median(rows[_BEFORE:])
        if (own < _OWN * was).any():
            return None
        return Jump(before, now, written=False, phase="")

    def finding(self, episode: Episode[Jump]) -> Finding:
        """What is reported of an episode."""
        facts, first = episode.facts, episode.first_step
        again = f", {facts.times} times so far" if facts.times > 1 else ""
        return episode.finding(
            kind="loss.spike",
            key="relapse",
            severity="info" if facts.phase else "warning",
            title=f"The loss was thrown back from {number(facts.before)} to {number(facts.now)} "
            f"at one step, first at step {first}{again}",
            cause=sentences(
                "From one step to the next the loss rose to a level that the training had left "
                "behind, and stayed there for a while: one update of usual size does not do that.",
                "Right before it the parameters were written outside the optimizer: weights of an "
                "earlier step or averaged ones were put in their place."
                if facts.written
                else "Weights of an earlier step may have come back, a step may have been far too "
                "large, or the data may have become others.",
                facts.phase,
            ),
            remedy=(
                f"Look at what the loop does at step {first} and not at others: an evaluation that "
                "swaps weights in and does not swap them out, a checkpoint that is loaded, a "
                "learning rate or a batch that is like no other."
            ),
            evidence={
                "before": facts.before,
                "now": facts.now,
                "spikes": facts.times,
                "written": facts.written,
            },
        )
