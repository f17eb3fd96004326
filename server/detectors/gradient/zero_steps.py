"""Gradients that are exactly zero at single steps of a training that goes on otherwise."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.series_by_step import mean_by_step, median, rows_by_step
from rankscope.server.detectors.mechanisms.wording import (
    count,
    if_several,
    listing,
    plural,
    sentences,
)
from rankscope.server.window import Window

# Losses that say what is usual.
_USUAL = 20
# Share of the usual loss from which on a loss has something to teach: a margin that is kept, or an
# advantage of nothing, leaves a loss of 0 together with a gradient of 0.
_SOMETHING = 0.05
# Steps listed by their numbers.
_MOST_STEPS = 8


@dataclass(slots=True)
class ZeroSteps:
    """What was seen of a run.

    Attributes:
        losses: the last ones.
        learning: gradient norms above 0 so far.
        row: the latest consecutive steps with a gradient of exactly 0 on all ranks; whether their
            losses had something to teach.
        watch: over as soon as the training goes on for so long without.
    """

    losses: deque[float] = field(default_factory=lambda: deque(maxlen=_USUAL))
    learning: int = 0
    row: list[tuple[int, bool]] = field(default_factory=list)
    watch: Watch[list[int]] = field(default_factory=lambda: Watch(clear_after=64))

    def take(self, window: Window, few: int) -> None:
        """Goes through the gradient norms of a window.

        Args:
            few: zeros in a row that are single steps; more of them are a training that has ended.
        """
        losses = mean_by_step(window, "loss")
        gradients = rows_by_step(window, "grad_norm")
        for step in sorted({*losses, *gradients}):
            loss, norm = losses.get(step, math.nan), gradients.get(step)
            usual = median(list(self.losses))
            if norm is not None and not np.isnan(norm).any():
                self._judge(step, bool(np.all(norm == 0)), loss, usual, few)
            if math.isfinite(loss):
                self.losses.append(loss)

    def _judge(self, step: int, zero: bool, loss: float, usual: float, few: int) -> None:
        if zero:
            known = self.learning >= _USUAL and math.isfinite(usual) and math.isfinite(loss)
            self.row.append((step, known and abs(loss) > _SOMETHING * abs(usual)))
            return
        self.learning += 1
        # That the training goes on is known now.
        for at, taught in self.row if len(self.row) < few else ():
            if taught:
                self.watch.bad(at, [], first_step=at).facts.append(at)
        self.row.clear()
        self.watch.good(step)


def finding(episode: Episode[list[int]], world_size: int, recurs: int) -> Finding:
    """What to say of it.

    Args:
        episode: of the steps with a gradient of 0.
        world_size: number of ranks.
        recurs: how many of them are no accident.
    """
    steps = episode.facts
    shown = listing([str(step) for step in steps], most=_MOST_STEPS)
    one = len(steps) == 1
    return episode.finding(
        kind="gradient.vanishing",
        key="single steps",
        severity="warning" if len(steps) >= recurs else "info",
        title=f"The gradient is exactly zero at {count(len(steps), 'step')}, and not at the others",
        stage="local_gradient",
        cause=sentences(
            f"At {'step' if one else plural('step')} {shown} every gradient"
            f"{if_several(world_size, 'of every rank')} was exactly zero, although the loss was "
            "not, and the gradients of the steps between are of usual size: "
            f"{'that batch was' if one else 'those batches were'} not used.",
            "Usual causes: `zero_grad()` between `backward()` and `step()`, a mask or weight that "
            "leaves nothing of a batch, a scale or clipping bound of 0, a branch of the loop that "
            "skips `backward()`.",
        ),
        remedy=(
            "Print the gradient's norm right after `backward()` and right before `step()` at "
            "such a step: it shows whether it was never there or was lost on the way."
        ),
        evidence={"steps": steps[:64], "count": len(steps)},
    )
