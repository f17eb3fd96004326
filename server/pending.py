"""Points that wait for their step to be complete, with the attempts they belong to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np

from rankscope.server.storage.evaluation import ColumnPart
from rankscope.server.window import Int64


@dataclass(slots=True)
class Pending:
    """Points of one series of one rank that are not in a window yet."""

    steps: list[Int64] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    attempts: list[int] = field(default_factory=list)

    def add(self, part: ColumnPart) -> None:
        """Takes what one batch brought."""
        self.steps.append(part.steps)
        self.values.append(part.values)
        self.attempts.append(part.attempt)

    def take(self, through: int, begins: Mapping[int, int]) -> tuple[Int64, Any]:
        """Points up to a step, each step once: of several the newest attempt's last stands.

        Args:
            begins: first step of each attempt.
        """
        if len(begins) > 1:
            self._forget_superseded(begins)
        if not self.steps:
            return np.zeros(0, dtype=np.int64), np.zeros(0)
        whole = self._whole(through)
        if whole is not None:
            return whole
        order = np.argsort(self.attempts, kind="stable")
        steps = np.concatenate([self.steps[i] for i in order])
        values = np.concatenate([self.values[i] for i in order])
        attempts = np.concatenate(
            [np.full(len(self.steps[i]), self.attempts[i], dtype=np.int64) for i in order]
        )
        later = steps > through
        self.steps, self.values, self.attempts = [], [], []
        for attempt in np.unique(attempts[later]):
            rest = later & (attempts == attempt)
            self.steps.append(steps[rest])
            self.values.append(values[rest])
            self.attempts.append(int(attempt))
        steps, values = steps[~later], values[~later]
        if len(steps) > 1 and not bool((np.diff(steps) > 0).all()):
            by_step = np.argsort(steps, kind="stable")
            steps, values = steps[by_step], values[by_step]
            stands = np.append(np.diff(steps) > 0, True)
            steps, values = steps[stands], values[stands]
        return steps, values

    def _whole(self, through: int) -> tuple[Int64, Any] | None:
        """All of it, where it is due and in order already; that is nearly always so."""
        if self.steps[-1][-1] > through or self.attempts.count(self.attempts[0]) < len(self.steps):
            return None
        steps, values = self.steps[0], self.values[0]
        if len(self.steps) > 1:
            steps, values = np.concatenate(self.steps), np.concatenate(self.values)
        if len(steps) > 1 and not bool((steps[1:] > steps[:-1]).all()):
            return None
        self.steps, self.values, self.attempts = [], [], []
        return steps, values

    def _forget_superseded(self, begins: Mapping[int, int]) -> None:
        held = list(zip(self.steps, self.values, self.attempts, strict=True))
        self.steps, self.values, self.attempts = [], [], []
        for steps, values, attempt in held:
            stand = steps < superseded_from(attempt, begins)
            if stand.any():
                self.steps.append(steps[stand])
                self.values.append(values[stand])
                self.attempts.append(attempt)


def superseded_from(attempt: int, begins: Mapping[int, int]) -> float:
    """First step from which a later attempt's points count."""
    return min((first for later, first in begins.items() if later > attempt), default=inf)
