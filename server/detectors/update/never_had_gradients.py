"""Steps of an optimizer whose parameters have no gradient at all: the loss is cut off from them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.gradients_made import GradientsMade
from rankscope.server.detectors.mechanisms.incident import Incident
from rankscope.server.detectors.mechanisms.wording import count, number
from rankscope.server.window import Window

# Steps without any gradient, none before them with one: who prepares a state or a capture of a
# graph by empty steps takes a few.
_STEPS = 32


@dataclass(slots=True)
class NoGradient:
    """Follows a run in which no gradient was posted yet.

    Attributes:
        had: whether one was.
        steps: that changed nothing, from `since` to `last`.
        digests: rank -> digest of its parameters, which stays the same.
        made: gradients that there were before the optimizer stepped.
    """

    had: bool = False
    steps: int = 0
    since: int = -1
    last: int = -1
    digests: dict[int, int] = field(default_factory=dict)
    made: GradientsMade = field(default_factory=GradientsMade)

    def take(self, window: Window) -> None:
        """Takes the updates of a window, and whether there are gradients."""
        gradients, updates = window.series.get("grad_norm"), window.series.get("update_ratio")
        self.had |= gradients is not None and bool(gradients.present.any())
        self.made.take(window)
        held = window.digests.get("parameters")
        if self.had or updates is None or held is None:
            return
        for column in np.flatnonzero(updates.present.any(axis=0)).tolist():
            there = updates.present[:, column]
            moved = bool((updates.values[there, column] != 0).any())
            for row in np.flatnonzero(held.present[:, column]).tolist():
                digest = int(held.values[row, column])
                # What is written between the steps trains the model as well.
                moved |= self.digests.setdefault(int(window.ranks[row]), digest) != digest
            if moved:
                self.had = True
                return
            self.last = int(window.steps[column])
            self.since = self.last if self.since < 0 else self.since
            self.steps += 1

    def finding(self, window: Window) -> Finding | None:
        """That nothing is trained; None where there are gradients, or too few steps."""
        if self.had or self.steps < _STEPS:
            return None
        if self.made:
            cause = (
                f"Backward passes make gradients (of norm {number(self.made.norm)}), and they are "
                f"gone when the optimizer steps: at {count(self.steps, 'sampled step')} no "
                "parameter that it holds had one, and all are what they were at first, bit for "
                "bit. `zero_grad()` is called between `backward()` and `step()`, or the "
                "optimizer holds other tensors than those that `backward()` reaches."
            )
            remedy = (
                "Call `zero_grad()` after `step()`, or before `backward()`. Check that some "
                "`p.grad is not None` right before the step."
            )
        else:
            cause = (
                f"`optimizer.step()` was called {self.steps:,} times at sampled steps, no "
                "parameter that it holds has a gradient, and all are what they were at first, bit "
                "for bit: the loss does not depend on them. It was detached (`detach`, `item`, "
                "`no_grad`, a new tensor with `requires_grad`), the model was called without "
                "gradients, or the optimizer holds another model's parameters."
            )
            remedy = (
                "Print `loss.grad_fn` before `backward()`: it is None where the loss is cut off. "
                "Follow the tensors back to the first whose `requires_grad` is False."
            )
        return Incident.since(self.since, max(window.last_step, self.last)).finding(
            kind="update.missing",
            key="no gradient",
            severity="critical",
            title=f"No parameter has a gradient, and {count(self.steps, 'step')} changed nothing",
            ranks=tuple(int(rank) for rank in window.ranks),
            stage="local_gradient",
            cause=cause,
            remedy=remedy,
            evidence={"steps": self.steps},
        )
