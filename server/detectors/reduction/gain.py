"""What comes out of a reduction that is an approximation, measured by what went in.

A hook that sends a part of the gradient gives no mean, so no factor of it is wrong in itself. But
how much of the mean comes out, `<reduced, mean> / |mean|^2`, belongs to the hook: where that
becomes N times as much, or one N-th, from one sample to the next, N being the number of ranks, a
division by that number has been lost, or is done twice.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.episode import Condition, Episode, Watch
from rankscope.server.detectors.mechanisms.reduction_series import value_of
from rankscope.server.detectors.mechanisms.series_by_step import median
from rankscope.server.detectors.mechanisms.wording import number
from rankscope.server.window import Reduction, Window

# Samples before the change and after it. That all of 8 are beyond all of 16 has a chance of 1 in
# 735,471 (24 over 8) where nothing has changed.
_BEFORE, _AFTER = 16, 8
# How near the change is to the number of ranks: medians of parts of gradients that scatter by a
# third have a standard error of 1.25 * 0.33 * sqrt(1/16 + 1/8) = 0.18.
_NEAR = 0.25


@dataclass(slots=True)
class Gain:
    """Attributes: before, now: how much of the mean comes out; ranks: number of them."""

    before: float
    now: float
    ranks: int


@dataclass(slots=True)
class ReductionGain(Condition[Gain]):
    """Follows what comes out of approximating reductions.

    Attributes:
        recent: step, gain and norm of what came out, of the last samples.
        usual: gain before a change; NaN where there is none.
    """

    recent: deque[tuple[int, float, float]] = field(
        default_factory=lambda: deque(maxlen=_BEFORE + _AFTER)
    )
    usual: float = math.nan
    watch: Watch[Gain] = field(default_factory=lambda: Watch(clear_after=8))

    def observe(self, window: Window, made: Reduction, expected: float) -> None:
        """Takes the next reduction.

        Args:
            expected: factor that clipping and loss scale leave.
        """
        gain = made.cosine * made.kept / expected
        size = value_of(window, made, "grad_norm")
        if made.pattern != "other" or not (gain > 0 and size) or not math.isfinite(gain * size):
            return
        self.recent.append((made.step, gain, size))
        ranks = len(made.ranks)
        if not math.isnan(self.usual):
            # As long as it is nearer to what it has become.
            if _is_changed(gain / self.usual, math.sqrt(ranks)):
                now = median([gain for _, gain, _ in list(self.recent)[-_AFTER:]])
                self.watch.bad(made.step, Gain(self.usual, now, ranks)).facts.now = now
            else:
                self.watch.good(made.step)
            return
        if len(self.recent) < _BEFORE + _AFTER or not self._has_changed(ranks):
            return
        before, after = self._parts()
        self.usual = median([gain for _, gain, _ in before])
        now = median([gain for _, gain, _ in after])
        self.watch.bad(made.step, Gain(self.usual, now, ranks), first_step=after[0][0])

    def _has_changed(self, ranks: int) -> bool:
        before, after = self._parts()
        old, new = [gain for _, gain, _ in before], [gain for _, gain, _ in after]
        times = median(new) / median(old)
        if abs(abs(math.log(times)) - math.log(ranks)) > _NEAR:
            return False
        if not (min(new) > max(old) if times > 1 else max(new) < min(old)):
            return False
        # Clipping that nobody posts gives one norm whatever goes in: then it is what went in that
        # has changed.
        sizes = median([size for *_, size in after]) / median([size for *_, size in before])
        return (sizes if times > 1 else 1.0 / sizes) > math.sqrt(ranks)

    def _parts(self) -> tuple[list[tuple[int, float, float]], list[tuple[int, float, float]]]:
        samples = list(self.recent)
        return samples[:_BEFORE], samples[_BEFORE:]

    def finding(self, episode: Episode[Gain]) -> Finding:
        """What is reported of an episode."""
        facts, step = episode.facts, episode.first_step
        times = facts.now / facts.before
        n = facts.ranks
        lost = times > 1
        what = "larger" if lost else "smaller"
        by = times if lost else 1.0 / times
        return episode.finding(
            kind="reduction.wrong",
            key="gain",
            severity="critical",
            title=f"What the reduction gives is {number(by)} times {what} since step {step}, of "
            "the same gradients",
            stage="reduced_gradient",
            cause=(
                "Only a part of the ranks' mean gradient comes out of the reduction (something "
                f"compresses it), {number(facts.before)} of it before step {step} and "
                f"{number(facts.now)} since. That is "
                + (
                    f"as if the division by the {n} ranks were missing."
                    if lost
                    else f"as if it were divided by the {n} ranks twice."
                )
            ),
            remedy=(
                f"Look at what the communication hook (or the reduction written by hand) does from "
                f"step {step} on: the sum over ranks has to be divided by {n}, once."
            ),
            evidence={
                "pattern": "gain",
                "factor": times,
                "gain_before": facts.before,
                "gain": facts.now,
                "ranks_in_it": n,
            },
        )


def _is_changed(times: float, least: float) -> bool:
    return times > least or times < 1.0 / least
