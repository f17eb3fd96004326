"""Ranks that train on far less, or far more, than the others, and count as much."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import TO_THE_END, Detector, Finding, Outcome, Reach
from rankscope.server.detectors.data.uneven_passes import DIVISOR, PASSES, SUMMED, UnevenPasses
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.loss_weights import INPUTS, LossWeights
from rankscope.server.detectors.mechanisms.series_by_step import rows_by_step
from rankscope.server.detectors.mechanisms.statistics import rank_rows
from rankscope.server.detectors.mechanisms.wording import count, number, ranks
from rankscope.server.detectors.policy import Policy, Times
from rankscope.server.window import Check, Float64, Int64, Window

_COUNTS = ("samples", "tokens")
# At this many consecutive samples, and one more each time their number has doubled beyond `_FIRST`.
# Of batches of random lengths one in twelve is that short (deviation of the logarithm 0.5): eight
# in a row happen by chance once in 5e8 samples, and even where it is one in four, a long run
# with many ranks has as good as none.
_SAMPLES, _FIRST = 8, 64


@dataclass(frozen=True, slots=True)
class ImbalancedPolicy(Policy):
    """Thresholds of `data.imbalanced`.

    Attributes:
        factor: ratio of a rank's samples and the median of the others', either way, from which on
            it is reported.
    """

    factor: Times = 2.0


@dataclass(slots=True)
class Uneven:
    """Ranks whose batches are of another size.

    Attributes:
        what: `tokens` or `samples`.
        suspects: those with less, or, where these are most, those with more.
        sizes: by rank, at the last sample.
        share: of all samples or tokens, that of the suspect ranks together.
        weight: what they count in an average over ranks.
    """

    what: str
    suspects: tuple[int, ...]
    sizes: dict[int, float]
    share: float
    weight: float


@dataclass(slots=True)
class UnevenState:
    """What is remembered.

    Attributes:
        streaks: rank -> consecutive samples (negative: with less), and the first of them.
        sampled: so far.
        counted: what ranks counted by at the last reduction that was examined; empty for equally.
    """

    sampled: int = 0
    counted: str = ""
    what: str = "samples"
    streaks: dict[int, tuple[int, int]] = field(default_factory=dict)
    losses: LossWeights = field(default_factory=LossWeights)
    watch: Watch[Uneven] = field(default_factory=lambda: Watch(clear_after=16))
    passes: UnevenPasses = field(default_factory=UnevenPasses)


class Imbalanced(Detector[UnevenState]):
    """A rank's batches are persistently far smaller, or larger, than those of the others.

    Gradients that are averaged over ranks with equal weight are then no longer those of the mean
    over samples (or tokens): the samples of the smaller batches count for more.

    Statistic:
        `tokens` of a step where they are reported, else `samples`, over its passes: at most half of
        the median of the other ranks, or at least twice that, on the same side at 8 consecutive
        samples (one more each time the number of samples doubles beyond 64). Batches whose sizes
        vary by themselves, or that are short at the end of an epoch, are not on one side for so
        long. Over after 16 steps. Where the reduction was seen to give ranks weights in proportion
        to their samples or tokens (`reduction.wrong`), or their losses to be multiplied by such
        weights (of a cross entropy, of which the mean is known), unequal numbers are in order.

        And the weight of a rank's losses, which is known exactly: the backward passes of a step
        over the number that the trainer divides each loss by. It is not that of the other ranks, or
        that of all before, at 8 of 16 sampled steps, while the others' does not vary (key
        `passes`). Ranks that count by their samples, and 1 on average, do so by right; where losses
        are sums over elements that the trainer divides, nothing is said.

    Severity:
        Warning.

    Evidence:
        `what`, `sizes` by rank, `share` (of all samples or tokens) and `weight` (in the average) of
        the ranks that are named, `observed`. Of weights: `passes` and `divisors` by rank, `times`
        that the ranks named count, `observed`.

    Source:
        huggingface/transformers#34191, pytorch/torchtune#1875: means of unequal numbers of tokens.
    """

    kinds = ("data.imbalanced",)
    wants = (*_COUNTS, "loss", *INPUTS, PASSES, DIVISOR, SUMMED)
    min_ranks = 2

    policy: ImbalancedPolicy

    def reaches(self) -> tuple[Reach, ...]:
        """Consecutive batches of another size."""
        return (Reach(_COUNTS, _SAMPLES, TO_THE_END),)

    def advance(self, window: Window, state: UnevenState) -> Outcome:
        """Goes through the sizes of the batches step by step."""
        state.losses.take(window)
        by_step, passes = rows_by_step(window, "tokens"), rows_by_step(window, PASSES)
        steps, rows = rank_rows(window, "samples")
        reductions = deque(made for made in window.reductions if made.agreed and made.known)
        for step, samples in zip(steps.tolist(), rows, strict=True):
            while reductions and reductions[0].step <= step:
                state.counted = reductions.popleft().weighted_by
            reported = by_step.get(step)
            whole = reported is not None and bool((~np.isnan(reported) >= ~np.isnan(samples)).all())
            sizes = reported if whole and reported is not None else samples
            what = "tokens" if whole else "samples"
            if what != state.what:
                state.what = what
                state.streaks.clear()
            there = np.flatnonzero(~np.isnan(sizes))
            if len(there) > 1:
                # Of a pass: how many there are in a step is judged for itself.
                each = sizes / passes[step] if step in passes else sizes
                each = np.where(np.isnan(each), sizes, each)
                self._step(state, step, window.ranks[there], sizes[there], each[there])
        if not (state.counted or state.losses.by_samples):
            state.passes.take(window)
        by_passes = state.passes.findings(window)
        findings = tuple(_finding(e) for e in state.watch.take(window.last_step))
        return Outcome({"data.imbalanced": _check(state)}, (*findings, *by_passes))

    def _step(
        self, state: UnevenState, step: int, who: Int64, sizes: Float64, each: Float64
    ) -> None:
        state.sampled += 1
        factor = self.policy.factor
        if state.counted or state.losses.by_samples:
            state.streaks.clear()
            _even(state, step, who)
            return
        if not state.streaks and sizes.max() < factor * sizes.min():
            _even(state, step, who)
            return
        needed = _SAMPLES + int(max(0.0, math.log2(state.sampled / _FIRST)))
        sides = _sides(sizes, factor)
        sides *= sides == _sides(each, factor)
        streaks = state.streaks
        if not streaks and not sides.any():
            _even(state, step, who)
            return
        for rank, side in zip(who.tolist(), sides.tolist(), strict=True):
            times, since = streaks.get(rank, (0, step))
            if not side:
                streaks.pop(rank, None)
            elif times * side > 0:
                streaks[rank] = (times + side, since)
            else:
                streaks[rank] = (side, step)
        less = tuple(r for r in who.tolist() if r in streaks and streaks[r][0] <= -needed)
        more = tuple(r for r in who.tolist() if r in streaks and streaks[r][0] >= needed)
        suspects = less if less and (len(less) <= len(more) or not more) else more
        if not suspects:
            _even(state, step, who)
            return
        by_rank = dict(zip(who.tolist(), sizes.tolist(), strict=True))
        share = sum(by_rank[r] for r in suspects) / max(float(sizes.sum()), 1.0)
        facts = Uneven(state.what, suspects, by_rank, share, len(suspects) / len(who))
        since = min(state.streaks[r][1] for r in suspects)
        state.watch.bad(step, facts, first_step=since)


def _even(state: UnevenState, step: int, who: Int64) -> None:
    """Takes a sample at which no rank stands out; it says nothing of ranks without one."""
    known = state.watch.current
    if known is None or set(known.facts.suspects).issubset(who.tolist()):
        state.watch.good(step)


def _sides(sizes: Float64, factor: float) -> Int64:
    """1 for each rank with so many times what the others have, -1 for as much less; int64 [R]."""
    others = _median_of_others(sizes)
    return (sizes >= factor * others).astype(np.int64) - (factor * sizes <= others)


def _median_of_others(sizes: Float64) -> Float64:
    """For each rank the median of all others, float64 [R]."""
    ordered = np.sort(sizes)
    n = len(ordered)
    # Without one of them the middle of n - 1: which two it lies between depends on where it was.
    places = np.searchsorted(ordered, sizes)
    low, high = (n - 2) // 2, (n - 1) // 2
    at_low = ordered[np.where(places <= low, low + 1, low)]
    at_high = ordered[np.where(places <= high, high + 1, high)]
    middle: Float64 = 0.5 * (at_low + at_high)
    return middle


def _finding(episode: Episode[Uneven]) -> Finding:
    uneven, step = episode.facts, episode.first_step
    who, what = ranks(uneven.suspects), uneven.what
    one = len(uneven.suspects) == 1
    sizes = sorted(uneven.sizes.values())
    typical = float(
        np.median([s for r, s in uneven.sizes.items() if r not in uneven.suspects] or sizes)
    )
    own = float(np.median([uneven.sizes[r] for r in uneven.suspects]))
    side = "smaller" if own < typical else "larger"
    return episode.finding(
        kind="data.imbalanced",
        severity="warning",
        title=f"Batches of {who} are {side} than the others' ({number(own)} instead of "
        f"{number(typical)} {what}) since step {step}",
        ranks=uneven.suspects,
        stage="batch",
        cause=(
            f"Since step {step}, {who} {'trains' if one else 'train'} on {number(own)} {what} a "
            f"step, the others on {number(typical)}: {number(100 * uneven.share)} % of all {what}, "
            f"and {number(100 * uneven.weight)} % of the weight in a mean over ranks. The gradient "
            f"is not that of the mean over {what}, unless the losses are weighted by their number."
        ),
        remedy=(
            f"Give every rank as many {what}, or divide each rank's summed loss by the number of "
            f"{what} of all ranks together (all-reduced) and multiply by the number of ranks."
        ),
        evidence={
            "what": what,
            "sizes": {str(rank): size for rank, size in uneven.sizes.items()},
            "share": uneven.share,
            "weight": uneven.weight,
            "observed": episode.seen,
        },
    )


def _check(state: UnevenState) -> Check:
    if state.sampled >= _SAMPLES and (state.counted or state.losses.by_samples):
        by = state.counted or "samples"
        what = "reduced gradient weights" if state.counted else "losses weight"
        return Check.ok(f"The {what} the ranks by their numbers of {by}.")
    if state.sampled >= _SAMPLES:
        return Check.ok(
            f"No rank had batches of another size for long, at {count(state.sampled, 'sample')}."
        )
    if state.sampled:
        return Check.insufficient(f"{count(state.sampled, 'batch')} so far.")
    return Check.missing(
        "No two ranks post the number of their samples.", early="0 batches so far."
    )
