"""Clipping that changes nearly every gradient."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import LASTS_SAMPLED, Detector, Finding, Outcome, Reach
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.statistics import mean_over_ranks, rank_rows
from rankscope.server.detectors.mechanisms.wording import count, number, percent, sentences
from rankscope.server.detectors.policy import Observations, Policy, Share
from rankscope.server.window import Check, Window

_BACK = 100
# Losses that are averaged, at the beginning and now.
_LOSSES = 20


@dataclass(frozen=True, slots=True)
class ClippingPolicy(Policy):
    """Thresholds of `clipping.saturated`.

    Attributes:
        share: share of the last 100 gradients that were clipped, from which on it is reported.
        shortened: clipping factor below which the steps are other ones for it: a few elements that
            are cut off at their limit leave all but a hundredth.
        tiny: clipping factor below which it is no matter of outliers, and a warning.
        soon: consecutive gradients with such a factor that are reported at once.
        short: clipping factor below which steps of plain SGD are short, which has nothing that
            makes up for it.
        slow: share of the first losses that has to have been gained by then.
        losses: after so many.
    """

    share: Share = 0.95
    shortened: Share = 0.99
    tiny: Share = 1e-2
    soon: Observations = 6
    short: Share = 0.1
    slow: Share = 0.15
    losses: Observations = 200


@dataclass(slots=True)
class Saturated:
    """What was seen: the factor's median and the share of clipped steps, of how many.

    Attributes:
        scale: the loss scale at that time, or NaN.
        slow: steps of plain SGD are short for it, and the loss has hardly fallen.
    """

    median: float
    share: float
    of: int
    scale: float
    since: int
    slow: bool = False


@dataclass(slots=True)
class ClippingState:
    """What is remembered: (step, factor) of the last observations; the first and last losses."""

    judged: int = 0
    clipped: int = 0
    recent: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_BACK))
    first: list[float] = field(default_factory=list)
    last: deque[float] = field(default_factory=lambda: deque(maxlen=_LOSSES))
    losses: int = 0
    watch: Watch[Saturated] = field(default_factory=lambda: Watch(clear_after=32))


class ClippingSaturated(Detector[ClippingState]):
    """Clipping that scales down nearly every gradient: it sets the size of the steps, not the rate.

    Statistic:
        The factor by which clipping multiplied the gradient (of the rank with the smallest one):
        below 1 at 95 % of the last 100 observations, and below 0.99 in the median; or below 0.01 at
        six consecutive ones, as when gradients are clipped before the loss scale is taken out. Over
        after 32 steps in order.

    Severity:
        Info; warning for a median below 0.01, and for one below 0.1 under plain SGD, whose steps
        are so much shorter, where the loss has fallen by less than 15 % after 200 losses; critical
        for a median of 0.

    Evidence:
        `median_factor`, `share` of clipped ones, `observations`, `amp_scale`.

    Source:
        microsoft/DeepSpeed#7839: gradients clipped while still scaled by 65,536.
    """

    kinds = ("clipping.saturated",)
    wants = ("clip_coefficient", "amp_scale", "loss")

    policy: ClippingPolicy

    def reaches(self) -> tuple[Reach, ...]:
        """As many factors as the share is of at first."""
        return (Reach(("clip_coefficient",), self.policy.soon, LASTS_SAMPLED),)

    def advance(self, window: Window, state: ClippingState) -> Outcome:
        """Follows the factor."""
        for loss in mean_over_ranks(window, "loss")[1].tolist():
            if math.isfinite(loss):
                state.losses += 1
                state.last.append(loss)
                if len(state.first) < _LOSSES:
                    state.first.append(loss)
        steps, rows = rank_rows(window, "clip_coefficient")
        scales = {
            int(step): float(np.nanmax(row))
            for step, row in zip(*rank_rows(window, "amp_scale"), strict=True)
        }
        for step, row in zip(steps.tolist(), rows, strict=True):
            if not np.isfinite(row).any():
                continue  # a gradient that is not finite
            factor = float(np.nanmin(row))
            state.judged += 1
            state.clipped += factor < 1
            state.recent.append((step, factor))
            factors = np.array([f for _, f in state.recent])
            share = float((factors < 1).mean())
            median = float(np.median(factors))
            newest = factors[-self.policy.soon :]
            tiny = len(newest) == self.policy.soon and float(newest.max()) < self.policy.tiny
            often = len(factors) == _BACK and share >= self.policy.share
            if tiny or (often and median < self.policy.shortened):
                scale = scales.get(step, float("nan"))
                if tiny:
                    share, median = 1.0, float(np.median(newest))
                since = state.recent[-self.policy.soon if tiny else 0][0]
                found = Saturated(median, share, len(newest if tiny else factors), scale, since)
                episode = state.watch.bad(step, found, first_step=found.since)
                facts = episode.facts
                facts.median = min(facts.median, median)
                facts.share, facts.of = share, max(facts.of, found.of)
                facts.slow = median < self.policy.short and self._is_slow(window, state)
            else:
                state.watch.good(step)
        findings = tuple(
            _finding(e, window, self.policy) for e in state.watch.take(window.last_step)
        )
        return Outcome({"clipping.saturated": _check(state)}, findings)

    def _is_slow(self, window: Window, state: ClippingState) -> bool:
        """Whether short steps of plain SGD have hardly lowered the loss."""
        if window.config.get("optimizer") != "SGD" or state.losses < self.policy.losses:
            return False
        first, last = float(np.mean(state.first)), float(np.mean(state.last))
        return first - last < self.policy.slow * abs(first)


def _finding(episode: Episode[Saturated], window: Window, policy: ClippingPolicy) -> Finding:
    found, step = episode.facts, episode.first_step
    tiny = found.median < policy.tiny
    scaled = ""
    if tiny and found.scale > 1:
        scaled = (
            f"The loss is scaled by {number(found.scale)}: gradients that are clipped before they "
            "are unscaled come out that much too small."
        )
    nothing = found.median == 0
    return episode.finding(
        kind="clipping.saturated",
        severity="critical" if nothing else "warning" if tiny or found.slow else "info",
        title=(
            "Clipping multiplies every gradient by 0: nothing is left to learn from"
            if nothing
            else f"Clipping multiplies the gradient by {number(found.median)} at nearly every step"
            if tiny or found.slow
            else f"Clipping scales down {percent(found.share)} of gradients since step {step}"
        ),
        ranks=tuple(int(r) for r in window.ranks),
        stage="clipped_gradient",
        cause=sentences(
            f"Since step {step} clipping has scaled down {percent(found.share)} of the gradients, "
            f"to {number(found.median)} of their length in the median: the limit sets the size of "
            "the steps, and the gradient their direction alone.",
            "Plain SGD makes its steps as much shorter, and the loss has hardly fallen."
            if found.slow
            else "",
            scaled,
            "A limit of 0 does that: to `clip_grad_norm_` it is no way to turn clipping off."
            if nothing
            else "",
        ),
        remedy=(
            "Leave the call out, or give it infinity, where nothing is to be clipped."
            if nothing
            else "Call `scaler.unscale_(optimizer)` before the gradients are clipped, if a "
            "GradScaler is used. "
            "Else raise the limit above the usual norm of the gradient, or lower the learning "
            "rate and leave the limit to outliers."
        ),
        evidence={
            "median_factor": found.median,
            "share": found.share,
            "observations": found.of,
            "amp_scale": found.scale,
        },
    )


def _check(state: ClippingState) -> Check:
    if not state.judged:
        return Check.not_applicable("No clipping is seen.")
    share = percent(state.clipped / state.judged)
    return Check.ok(f"{share} of the gradients were clipped at {count(state.judged, 'step')}.")
