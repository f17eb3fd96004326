"""Statistics of batch norm that one rank's leave at a step, where each rank keeps its own."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.incident import Incident
from rankscope.server.detectors.mechanisms.wording import number, ranks
from rankscope.server.window import Comparison, TensorDifference

# Comparisons that say how much statistics usually differ, at least: running means forget with a
# momentum of 0.1, and have settled after some ten batches.
_LEAST = 16
# Times the largest distance before. It distinguishes a jump from what has come slowly, no more:
# that they differ by much is a condition of its own.
_TIMES = 4.0


@dataclass(slots=True)
class Jump:
    """Follows how far each rank's statistics lie from those of the first.

    Attributes:
        comparisons: comparisons before it.
        most: rank -> largest distance, relative to the norm, in the later half of them.
        step: of the jump; -1 for none.
        ranks: whose statistics jumped; all of them where nothing distinguishes them.
    """

    comparisons: int = 0
    most: dict[int, float] = field(default_factory=dict)
    step: int = -1
    ranks: tuple[int, ...] = ()
    decided: bool = False
    times: float = 0.0
    tensors: tuple[TensorDifference, ...] = ()

    def take(self, comparison: Comparison, *, far: bool) -> None:
        """A comparison, tensor by tensor, that found the statistics to differ.

        Args:
            far: whether some of them differ by more than batches of one kind of data make them.
        """
        if self.step >= 0:
            return
        pairs = zip(comparison.ranks.tolist(), comparison.relative.tolist(), strict=True)
        first, *others = [(rank, distance) for rank, distance in pairs]
        held = {rank: distance for rank, distance in others if np.isfinite(distance)}
        if len(held) < len(others) or first[1] != 0:
            return  # some agree bit for bit: that is another matter
        if self.comparisons >= _LEAST and held.keys() == self.most.keys():
            usual = max(self.most.values())
            moved = [rank for rank, distance in held.items() if distance > _TIMES * usual]
            if far and moved:
                self.step, self.times = comparison.step, max(held.values()) / usual
                everyone = (first[0], *held)
                # All are measured from the first one: where all have moved, it was that.
                alone = len(moved) == len(held) > 1
                self.ranks = (first[0],) if alone else tuple(sorted(moved))
                self.decided = len(everyone) > 2
                if not self.decided:
                    self.ranks = everyone
                self.tensors = comparison.tensors
                return
        # While they settle, they differ by more than they ever do later.
        if self.comparisons < _LEAST // 2 or held.keys() != self.most.keys():
            self.most = dict(held)
        else:
            self.most = {rank: max(known, held[rank]) for rank, known in self.most.items()}
        self.comparisons += 1


def jump_finding(jump: Jump, *, last_step: int, clear_after: int) -> Finding:
    """The finding as it stands."""
    who = ranks(jump.ranks)
    names = tuple(t.name for t in sorted(jump.tensors, key=lambda t: -t.relative))
    reported = "" if jump.decided else " With two ranks, nothing shows which one is wrong."
    return Incident.since(jump.step, last_step, clear_after=clear_after).finding(
        kind="desync.buffers",
        key="jump",
        severity="warning",
        title=(
            f"Running statistics of {who} moved away from the other ranks' at step {jump.step}"
            if jump.decided
            else f"Running statistics of {who} diverged at step {jump.step}"
        ),
        ranks=jump.ranks,
        tensors=names,
        stage="buffers",
        cause=(
            f"Each rank's batch norm follows its own batches, and at step {jump.step} the "
            f"statistics of {who} lay {number(jump.times)} times as far from the others' as ever "
            "before: they were written, restored or reset on that rank, its inputs have become "
            "very different, or other data went through the model in training mode there (an "
            "evaluation on one rank, without `model.eval()`). An evaluation gives another result "
            f"there.{reported}"
        ),
        remedy=(
            "Look for code that loads, resets or writes buffers under a condition that differs "
            "between ranks, and for an evaluation there that leaves the model in training mode; "
            "compare the inputs of the ranks from that step on. Then broadcast "
            "the buffers from a rank that you trust, or use SyncBatchNorm."
        ),
        evidence={"times": jump.times, "decided": jump.decided},
    )
