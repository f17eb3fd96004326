"""Gradients that no reduction had taken when the optimizer stepped (FSDP2)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.episode import Condition, Episode, Watch
from rankscope.server.detectors.mechanisms.statistics import rank_rows
from rankscope.server.detectors.mechanisms.wording import agree, count, ranks
from rankscope.server.window import Window

SERIES = "gradients_unreduced"
# Consecutive samples: one may be the last step of an epoch whose passes do not fill it.
_SAMPLES = 2


@dataclass(slots=True)
class Left:
    """Ranks, and the most tensors of one of them."""

    ranks: tuple[int, ...]
    tensors: int


@dataclass(slots=True)
class UnreducedGradients(Condition[Left]):
    """Follows what is left when the optimizer steps."""

    count: int = 0
    since: int = 0
    watch: Watch[Left] = field(default_factory=lambda: Watch(clear_after=8))

    def take(self, window: Window) -> None:
        """Goes through a window."""
        steps, rows = rank_rows(window, SERIES)
        for step, row in zip(steps.tolist(), rows, strict=True):
            left = row > 0
            if not left.any():
                self.count = 0
                self.watch.good(step)
                continue
            self.since = self.since if self.count else step
            self.count += 1
            if self.count >= _SAMPLES:
                facts = Left(tuple(window.ranks[left].tolist()), int(np.nanmax(row)))
                self.watch.bad(step, facts, first_step=self.since)

    def finding(self, episode: Episode[Left]) -> Finding:
        """What is reported of an episode."""
        return _finding(episode)


def _finding(episode: Episode[Left]) -> Finding:
    left, step = episode.facts, episode.first_step
    these = count(left.tensors, "tensor")
    return episode.finding(
        kind="reduction.wrong",
        key="unreduced",
        severity="warning",
        title=f"Steps are taken while gradients of {these} {agree(left.tensors, 'waits')} for "
        f"their reduction since step {step}",
        ranks=left.ranks,
        stage="reduced_gradient",
        cause=(
            f"When the optimizer stepped, {ranks(left.ranks)} still had gradients of {these} that "
            "were computed without synchronisation (`set_requires_gradient_sync(False)`) and not "
            f"reduced, at {count(episode.seen + 1, 'checked step')}: the last micro-batches of a "
            "step are missing from it, and are added to a later one."
        ),
        remedy=(
            "Synchronise on the last micro-batch of each step, and not on another one: "
            "`model.set_requires_gradient_sync(micro == last)` before its forward pass."
        ),
        evidence={"pattern": "unreduced", "tensors": left.tensors},
    )
