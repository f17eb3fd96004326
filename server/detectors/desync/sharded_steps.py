"""Ranks of a sharded model that throw away gradients with which the others step. Pure.

Of shards no two are alike, so that nothing shows later that one of them was not updated with the
rest: it is read off what each rank did with the gradients of a pass that all of them took part in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.desync.step_count import StepMismatch
from rankscope.server.detectors.mechanisms.statistics import rank_rows
from rankscope.server.window import Window

# Backward passes of a rank whose gradients it threw away before it stepped, and those that led to a
# step.
DISCARDED, PASSES = "passes_discarded", "micro_steps"


@dataclass(slots=True)
class ShardedSteps:
    """The groups of ranks, over each of which a model is dealt out, whose parts have diverged."""

    diverged: set[tuple[int, ...]] = field(default_factory=set)

    def take(self, window: Window) -> Iterator[tuple[int, StepMismatch]]:
        """First steps at which ranks of a group had thrown away more than the others."""
        steps, rows = rank_rows(window, DISCARDED)
        sampled = dict(zip(*(a.tolist() for a in rank_rows(window, PASSES)), strict=True))
        copies = [set(members) for members in window.replicas]
        for members in window.data_parallel:
            alike = any(ranks.issuperset(members) for ranks in copies)
            if len(members) < 2 or alike or members in self.diverged:
                continue
            columns = np.flatnonzero(np.isin(window.ranks, members))
            for step, row in zip(steps.tolist(), rows[:, columns], strict=True):
                passes = sampled.get(step)
                # Of a rank that was not sampled it is not known.
                if passes is None or not np.isfinite(np.array(passes)[columns]).all():
                    continue
                thrown = np.nan_to_num(row)
                values = dict(zip(window.ranks[columns].tolist(), thrown.tolist(), strict=True))
                least = min(values.values())
                suspects = tuple(rank for rank, value in values.items() if value > least)
                if suspects:
                    self.diverged.add(members)
                    decided = 2 * len(suspects) <= len(members)
                    who = suspects if decided else members
                    yield step, StepMismatch(DISCARDED, values, who, decided, sharded=True)
                    break
