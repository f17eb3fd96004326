"""Steps that are of one task: those of others are not judged, as far as levels go.

Where batch i trains task i % 2, losses and gradients alternate between levels that have nothing to
do with each other. What ranks post as `task` distinguishes them. And a choice among more classes
than ever before is another task than before: chance alone has a cross entropy of log K, so the loss
rises while a queue of negative samples fills. `loss_classes` reports it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rankscope.server.window import Bool, Series, Window

TASK, CLASSES = "task", "loss_classes"
SERIES = frozenset((TASK, CLASSES))
# Steps of a cycle of tasks, at most; cycles that have to follow each other, and steps that have to
# be what the ones a cycle before were: of two tasks in random order (experts that get no token now
# and then) 16 are in one of 65,536 cases, and a later step that does not fit ends it.
_LONGEST, _CYCLES, _REPEATED = 16, 3, 16
# Share of other tasks' steps from which on what was remembered is no level of the first one. A run
# that takes up a second task late has fewer, at first.
_MIXED = 0.1
# Lists of a window whose items have a step.
_BY_STEP = (
    "comparisons",
    "reductions",
    "events",
    "layers",
    "element_sums",
    "gradient_products",
    "averages",
)


@dataclass(slots=True)
class Tasks:
    """Which steps are of the task that was trained first, as soon as that is known.

    Attributes:
        cycle: by step modulo its length the task; empty where they have no fixed order.
        ended: they had one, and a step did not fit.
        known_at: step at which the cycle was recognised; -1 for none.
        pushed, of_others: steps that posted a task so far, and those of another than the first.
        classes: the most that a loss has chosen among.
        growing: there were more of them at the last step that reported it than ever before.
    """

    recent: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_LONGEST * _CYCLES))
    cycle: tuple[int, ...] = ()
    ended: bool = False
    known_at: int = -1
    pushed: int = 0
    of_others: int = 0
    classes: float = 0.0
    growing: bool = False

    def of_first(self, window: Window) -> tuple[Window, ...]:
        """The window without the numbers of other tasks' steps: the same where there are none.

        Two of them where the cycle is recognised in it and what came before was of all tasks: up to
        that step, and after it. Who judges levels has to begin anew with the second.
        """
        series, choices = window.series.get(TASK), window.series.get(CLASSES)
        if series is None and choices is None and not (self.cycle or self.growing):
            return (window,)
        before = self.known_at
        keep = np.ones(len(window.steps), dtype=bool)
        for column, step in enumerate(window.steps.tolist()):
            if series is not None and not self.ended:
                there = series.present[:, column] & np.isfinite(series.values[:, column])
                if there.any():
                    self._push(step, int(series.values[there, column][0]))
            if choices is not None and choices.present[:, column].any():
                most = float(choices.values[choices.present[:, column], column].max())
                self.growing = 0 < self.classes < most
                self.classes = max(self.classes, most)
            keep[column] = not self.growing
            if self.cycle:
                keep[column] &= self.cycle[step % len(self.cycle)] == min(self.cycle)
        shown = _masked(window, keep)
        # It may have ended in the same window.
        if self.known_at != before and self.of_others > _MIXED * self.pushed:
            return _divided(shown, self.known_at)
        return (shown,)

    def _push(self, step: int, task: int) -> None:
        if self.cycle:
            if self.cycle[step % len(self.cycle)] != task:
                self.cycle, self.ended = (), True
            return
        self.pushed += 1
        self.of_others += task > 0
        if self.recent and self.recent[-1][0] != step - 1:
            self.recent.clear()
        self.recent.append((step, task))
        tasks = [one for _, one in self.recent]
        for length in range(2, min(_LONGEST, len(tasks) // _CYCLES) + 1):
            last = tasks[-max(length * _CYCLES, length + _REPEATED) :]
            if len(last) < length + _REPEATED:
                continue
            if len(set(last)) > 1 and all(
                a == b for a, b in zip(last, last[length:], strict=False)
            ):
                cycle = [0] * length
                for at, one in list(self.recent)[-length:]:
                    cycle[at % length] = one
                self.cycle, self.known_at = tuple(cycle), step
                return


def _masked(window: Window, keep: Bool) -> Window:
    """The window with the numbers of some of its steps alone; the same where these are all."""
    if keep.all():
        return window
    series = {n: replace(s, present=s.present & keep) for n, s in window.series.items()}
    return replace(window, series=series)


def _divided(window: Window, step: int) -> tuple[Window, Window]:
    """The window up to a step, and what comes after it."""
    until = window.steps <= step

    def part(of: Bool, last_step: int, *, first: bool) -> Window:
        changes: dict[str, Any] = {
            name: tuple(one for one in getattr(window, name) if (one.step <= step) == first)
            for name in _BY_STEP
        }
        for name in ("series", "digests"):
            changes[name] = {
                key: Series(one.values[:, of], one.present[:, of])
                for key, one in getattr(window, name).items()
            }
        return replace(window, steps=window.steps[of], last_step=last_step, **changes)

    return part(until, step, first=True), part(~until, window.last_step, first=False)
