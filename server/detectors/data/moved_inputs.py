"""Inputs that are of another size since a step, on every rank, and what the loss did then. Pure.

No comparison of ranks shows what all of them read alike. Other data may well be of another size:
it is a finding where the loss rose at that very step, or where no two kinds of data lie so far
apart.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.data.received import Received
from rankscope.server.detectors.data.rise import Rise
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.statistics import rank_rows, robust_sigma
from rankscope.server.detectors.mechanisms.wording import if_several, number, sentences
from rankscope.server.window import Window

# Observations that say what is usual, at least and at most.
_LEAST, _BACK = 16, 64
# Consecutive observations beyond it; fewer are odd batches, which are another finding.
_LASTS = 4
# A forgotten or doubled normalisation is a factor of 2 or more; a forgotten division by 255 is one
# that no other data explain, whatever the loss does.
_FACTOR, _BEYOND = 2.0, 20.0
# Standard deviations, of each of the consecutive observations; what sampled elements scatter by.
_SIGMAS, _FLOOR = 8.0, 0.02
# In place of a size of 0, which has no logarithm: far below what any data have.
_ZERO = 1e-30


@dataclass(frozen=True, slots=True)
class Moved:
    """Inputs that are this many times as large as they were.

    Attributes:
        usual: root mean square before.
        before, after: median losses; NaN where too few are known.
    """

    factor: float
    usual: float
    before: float
    after: float


@dataclass(slots=True)
class MovedInputs:
    """Follows the mean size of all ranks' inputs.

    Attributes:
        past: logarithms of the usual sizes.
        last: steps and sizes that are held against them.
        rise: what the loss did since they are others.
        sparse: batches of nothing but zeros come now and then, or came before all others: they are
            the data's, and say nothing.
        zeros: such ones in a row.
    """

    past: deque[float] = field(default_factory=lambda: deque(maxlen=_BACK))
    last: deque[tuple[int, float]] = field(default_factory=deque)
    rise: Rise = field(default_factory=Rise)
    watch: Watch[Moved] = field(default_factory=lambda: Watch(clear_after=8))
    sparse: bool = False
    zeros: int = 0

    def take(self, window: Window, series: str, received: Received) -> list[Finding]:
        """Goes through a window; what was found.

        Args:
            received: ranks that read no data.
        """
        steps, rows = rank_rows(window, series)
        given = received.at(window.ranks, steps)
        self.rise.lay(window)
        whole = (np.isfinite(rows) | given).all(axis=1) & ~given.all(axis=1)
        # Of some ranks alone it is another finding (`input_sizes`, `odd_inputs`).
        whole &= ((rows > 0) | given).all(axis=1) | ((rows == 0) | given).all(axis=1)
        sizes = np.maximum(rows, _ZERO)
        read = [row[~out] for row, out in zip(sizes[whole], given[whole], strict=True)]
        for step, row in zip(steps[whole].tolist(), read, strict=True):
            if not self._counts(step, zero=bool((row == _ZERO).all())):
                continue
            self.rise.pass_to(step)
            self._size(step, float(np.log(row).mean()), float(np.ptp(np.log(row))))
        self.rise.pass_to(window.last_step)
        return [_finding(e, window.world_size) for e in self.watch.take(window.last_step)]

    def _counts(self, step: int, *, zero: bool) -> bool:
        """Whether a size is one to be judged: zeros where none have come and gone before."""
        if not zero:
            self.sparse |= 0 < self.zeros and self.watch.open(step) is None
            self.zeros = 0
            return True
        self.zeros += 1
        self.sparse |= len(self.past) < _LEAST
        return not self.sparse

    def _size(self, step: int, size: float, apart: float) -> None:
        self.last.append((step, size))
        if len(self.last) < _LASTS:
            return
        oldest = self.last[0]
        found = self._judged(apart)
        if found is None:
            self.watch.good(step)
        else:
            self.watch.bad(step, found, first_step=self.rise.since).facts = found
        self.last.popleft()
        # What was found does not become usual while it lasts.
        rise = self.rise
        if found is None and (rise.since < 0 or oldest[0] < rise.since or rise.settled(step)):
            if oldest[1] > math.log(2 * _ZERO):
                self.past.append(oldest[1])

    def _judged(self, apart: float) -> Moved | None:
        if len(self.past) < _LEAST:
            return None
        past = np.array(self.past)
        usual, sigma = float(np.median(past)), max(robust_sigma(past), _FLOOR)
        moves = np.array([size for _, size in self.last]) - usual
        same = bool((moves > 0).all() or (moves < 0).all())
        least = float(np.abs(moves).min())
        if not same or least <= max(math.log(_FACTOR), _SIGMAS * sigma) or apart > 0.5 * least:
            # Of one rank alone, or two that went apart, others speak (`input_sizes`).
            if not same or least <= 0.5 * math.log(_FACTOR):
                self.rise.forget()
            return None
        self.rise.begin(self.last[0][0])
        factor = math.exp(float(np.median(moves)))
        return self._of_harm(factor, math.exp(usual))

    def _of_harm(self, factor: float, usual: float) -> Moved | None:
        known = self.watch.current
        if known is not None and known.first_step == self.rise.since:
            return Moved(factor, usual, known.facts.before, known.facts.after)
        before, after, rose = self.rise.judged()
        if rose or max(factor, 1 / factor) >= _BEYOND:
            return Moved(factor, usual, before, after)
        return None


def _finding(episode: Episode[Moved], world: int) -> Finding:
    facts, step = episode.facts, episode.first_step
    rose = facts.after > facts.before
    nothing = facts.factor * facts.usual < 2 * _ZERO
    times, size = (facts.factor, "larger") if facts.factor > 1 else (1 / facts.factor, "smaller")
    return episode.finding(
        kind="data.outlier",
        key="inputs:all",
        severity="warning",
        title=(
            f"All inputs are zero since step {step}"
            if nothing
            else f"All inputs are {number(times)} times {size} since step {step}"
        ),
        stage="batch",
        cause=sentences(
            f"The inputs{if_several(world, 'of every rank')} had a root mean square of "
            f"{number(facts.usual)} before step {step} and have "
            + ("been nothing but zeros" if nothing else f"had {number(facts.factor)} times that")
            + " since.",
            f"The loss went from {number(facts.before)} to {number(facts.after)} with it."
            if rose
            else "",
            "A source that has broken, a buffer that is no longer filled, a mask that leaves "
            "nothing, or a division by something far too large: the model sees nothing of its data."
            if nothing
            else "They are normalised otherwise, twice or not at all, decoded otherwise, or are "
            "other data than what the model has learned from.",
        ),
        remedy=(
            f"Print mean and standard deviation of the batches of steps {step - 1} and {step}, and "
            "compare which files, sources and transforms they come from: the next shard, epoch, "
            "stage of a curriculum or resume begins there. Where the change is meant, lower the "
            "learning rate for it, or normalise each source by its own statistics."
        ),
        evidence={
            "factor": facts.factor,
            "usual": facts.usual,
            **(
                {"loss_before": facts.before, "loss_after": facts.after}
                if math.isfinite(facts.before)
                else {}
            ),
        },
    )
