"""A loss that the first steps threw up, and that has hardly come below where it began."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.beginning import FIRST, LATEST, RISE, Beginning
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.series_by_step import noise_of_mean
from rankscope.server.detectors.mechanisms.wording import number, sentences

# How far it has to lie above what single losses differ by, in standard deviations, and how many of
# the first losses have to show it: one batch may be odd.
_CLEAR, _SEVERAL = 6.0, 3
# Share of the latest losses that may lie below the first one: of two tasks in turns half do.
_LOW = 0.2
# What was thrown up to so many times the first one has come back to no more than it, where the mean
# of the latest is within a tenth: a constant answer costs what the first ones did.
_FAR_UP, _GAINED = 10.0, 0.1
# The same of a hundred times and more, where nothing is left of how the weights were initialised:
# initial outputs of some size cost up to twice what a constant answer does.
_OUT_OF_SIGHT, _HALVED = 100.0, 0.5
# What a loss that still comes down loses within fifteen steps, at least.
_FALLS = 0.02


@dataclass(frozen=True, slots=True)
class Thrown:
    """What was seen: the first loss, the highest of the first ones, and the mean of the latest."""

    first: float
    highest: float
    now: float


@dataclass(slots=True)
class ThrownUp:
    """Follows the losses from the first one on.

    Attributes:
        over: whether the loss has come back, or was never thrown up.
    """

    losses: Beginning = field(default_factory=Beginning)
    over: bool = False
    watch: Watch[Thrown] = field(default_factory=lambda: Watch(clear_after=LATEST))

    def push(self, step: int, loss: float, *, known: bool) -> None:
        """Takes a finite loss; `known`: it is said to diverge already."""
        if self.over:
            return
        losses = self.losses
        losses.push(step, loss)
        if not losses.settled:
            return
        if losses.begun_before:
            self.over = True
            return
        first, now = losses.first, losses.now
        low = float(np.quantile(losses.latest, _LOW))
        far = sum(value > _FAR_UP * first for value in losses.early) >= _SEVERAL
        lost = sum(value > _OUT_OF_SIGHT * first for value in losses.early) >= _SEVERAL
        # Of two tasks in turns the one that began has come down, whatever the other is at.
        limit = (1 - (_HALVED if lost else _GAINED)) * first if far else first
        back = low <= limit or (far and now < limit)
        half = len(losses.latest) // 2
        newest = float(np.mean(list(losses.latest)[half:]))
        if lost and newest < (1 - _FALLS) * float(np.mean(list(losses.latest)[:half])):
            return  # it is still on its way
        if not first > 0 or back or (known and self.watch.current is None):
            self.over = True
            self.watch.good(step)
            return
        if self.watch.current is None:
            scatter = noise_of_mean(losses.latest) * math.sqrt(LATEST)
            limit = max((1 + RISE) * first, now + _CLEAR * scatter)
            self.over = sum(value > limit for value in losses.early) < _SEVERAL
        if not self.over:
            facts = Thrown(first, losses.highest, now)
            self.watch.bad(step, facts, first_step=losses.first_step).facts = facts


def finding(episode: Episode[Thrown], *, game: bool) -> Finding:
    """What is reported of it; `game`: another optimizer steps in turns with this one."""
    facts = episode.facts
    gained = facts.now < (1 - _GAINED) * facts.first
    ends = f"and stays at {number(facts.now)}" if gained else "and it is no better since"
    stays = (
        f"it has come to {number(facts.now)}, and stays there: what the weights were initialised "
        "to is gone, and little has taken its place."
        if gained
        else f"it has come to {number(facts.now)}, and is no better than where it began: what the "
        "weights were initialised to is gone, and nothing has taken its place."
    )
    return episode.finding(
        kind="loss.diverging",
        key="start",
        severity="info" if game else "warning",
        title=(
            f"The first steps threw the loss up from {number(facts.first)} to "
            f"{number(facts.highest)}, {ends}"
        ),
        cause=sentences(
            f"Within {FIRST} losses of the start the loss rose from {number(facts.first)} to "
            f"{number(facts.highest)}; {stays} The learning rate is too high for the first steps, "
            "without a warm-up; or the first steps were taken with other data, targets or a loss "
            "of another scale.",
            "Two players of a game may do that." if game else "",
        ),
        remedy=(
            "Train anew with a tenth of the learning rate and a warm-up of some hundred steps, and "
            "clip the gradient to limit single steps. If the loss rises as before, compare the "
            "first batches with later ones."
        ),
        evidence={"first": facts.first, "highest": facts.highest, "last": facts.now},
    )
