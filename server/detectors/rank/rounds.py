"""Ranks that train for themselves between averages: who comes late to these.

Nobody waits at a step there: the others wait for a rank in the averaging, which lies between two
steps and is a part of the second one's `data_seconds`. So whoever comes last waits least; and a
rank that waits long there has not been kept waiting by its loader.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.desync.averaging_rounds import MARK
from rankscope.server.detectors.mechanisms.series_by_step import median
from rankscope.server.detectors.rank.lateness import QUEUEING, Timed, TimingSample
from rankscope.server.window import Bool, Float64, Int64, Window

# Series that are wanted for it.
NAMES = (MARK, "step_seconds", "data_seconds", *QUEUEING)
_WRITTEN = "outside_optimizer"
# Steps of a rank that show what it takes between two of them where nothing is averaged.
_USUAL, _LEAST = 64, 4


@dataclass(slots=True)
class Rounds:
    """The averaging rounds of a run.

    Attributes:
        differ: whether ranks were seen to hold different parameters. Where they never do, what is
            written to parameters is no average (weights that are clamped, say).
        met: whether an average was seen.
        begin: step before which the last average was; -1 for none.
        seen: steps since then at which all ranks said what they took.
        took, queued: float64 [R], seconds of these steps, and what ranks waited for a processor.
        usual: rank -> its last `data_seconds` at other steps.
    """

    differ: bool = False
    met: bool = False
    begin: int = -1
    seen: int = 0
    took: Float64 = field(default_factory=lambda: np.zeros(0))
    queued: Float64 = field(default_factory=lambda: np.zeros(0))
    usual: dict[int, deque[float]] = field(default_factory=dict)

    def averaged(self, window: Window, block: Timed) -> Bool:
        """The timed steps, bool [N], before which ranks averaged their parameters."""
        self.differ |= any(c.stage == "parameters" and not c.equal for c in window.comparisons)
        found = np.zeros(len(block.steps), dtype=bool)
        if not self.differ or not len(found):
            return found
        columns = np.searchsorted(window.steps, block.steps)
        marks, digests = window.series.get(MARK), window.digests.get(_WRITTEN)
        wrote = np.zeros((len(window.ranks), len(found)), dtype=bool)
        if marks is not None:
            wrote |= marks.present[:, columns]
        if digests is not None:
            wrote |= digests.present[:, columns] & (digests.values[:, columns] != 0)
        together: Bool = wrote.sum(axis=0) > 1
        self.met |= bool(together.any())
        return together

    def take(self, ranks: Int64, block: Timed, averaged: Bool) -> list[TimingSample]:
        """The rounds that were timed whole; who was late is still to be found out.

        What a rank took is the time from one average to the next, without what it waited there.
        """
        found: list[TimingSample] = []
        if not self.differ:
            return found
        if len(self.took) != len(ranks):
            self._begin(-1, np.zeros(len(ranks)))
        steps, data = block.series["step_seconds"], block.series["data_seconds"]
        queued = np.nan_to_num(block.series["queued_seconds"])
        for n, step in enumerate(block.steps.tolist()):
            whole = bool(np.isfinite(steps[n]).all() and np.isfinite(data[n]).all())
            if averaged[n]:
                usual = self._usual(ranks)
                if whole and usual is not None:
                    waited = np.maximum(data[n] - usual, 0.0)
                    if 0 <= self.begin == step - self.seen and self.seen > 1:
                        found.append(self._round(step, ranks, waited))
                    self._begin(step, steps[n] - waited)
                    self.queued += queued[n]
                else:
                    self._begin(-1, np.zeros(len(ranks)))
            elif whole:
                for rank, seconds in zip(ranks.tolist(), data[n].tolist(), strict=True):
                    self.usual.setdefault(rank, deque(maxlen=_USUAL)).append(seconds)
                self.seen += 1
                self.took += steps[n]
                self.queued += queued[n]
        return found

    def _begin(self, step: int, took: Float64) -> None:
        self.begin, self.seen = step, int(step >= 0)
        self.took, self.queued = took.copy(), np.zeros(len(took))

    def _usual(self, ranks: Int64) -> Float64 | None:
        known = [self.usual.get(int(rank), ()) for rank in ranks]
        if min(map(len, known), default=0) < _LEAST:
            return None
        return np.array([median(list(one)) for one in known])

    def _round(self, step: int, ranks: Int64, waited: Float64) -> TimingSample:
        # Who waits for a processor longer than the others is late by chance.
        unfair = np.maximum(self.queued - float(np.median(self.queued)), 0.0)
        length = float(np.median(self.took + waited))
        own = np.minimum(length - waited, self.took) - unfair
        return TimingSample(step, ranks, own, {}, length)
