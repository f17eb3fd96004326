"""A loss that swings to and fro."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import Detector, Finding, Outcome, Reach
from rankscope.server.detectors.loss.same_period import (
    COSINE,
    REACH,
    Beside,
    alternates,
    beside,
    recurs,
)
from rankscope.server.detectors.loss.swing_shape import FALLING, LONGEST, Repeats, Swing
from rankscope.server.detectors.mechanisms.disjoint_steps import Turns
from rankscope.server.detectors.mechanisms.history import Companions, rate_sentence
from rankscope.server.detectors.mechanisms.incident import Incident
from rankscope.server.detectors.mechanisms.leaps import Leaps
from rankscope.server.detectors.mechanisms.series_by_step import mean_by_step
from rankscope.server.detectors.mechanisms.statistics import (
    Progress,
    Unmeasured,
    lag_one,
    logarithm,
    mann_kendall,
    residual_maker,
    spectral_peak,
)
from rankscope.server.detectors.mechanisms.waiting import too_few
from rankscope.server.detectors.mechanisms.wording import number, sentences
from rankscope.server.detectors.policy import (
    Count,
    Observations,
    RisePolicy,
    Share,
    Signed,
    Times,
)
from rankscope.server.window import Check, Float64, Window

# Series that may have the loss's period: why it swings.
_BESIDE = ("lr", "input_rms", "explained_deviance", COSINE)
# Steps of a period that is one of two steps.
_TWO = 2.5
# Observations whose median makes one value; slow oscillations show on coarse scales, and those of
# 2 and 3 show periods of 20 to 60 steps in runs that are too short for two windows of 4. Of these a
# period has to be beyond doubt (`clear_peak`): they would nearly double the chance of losses that
# wander, in which neighbours are alike, and so add nothing to it.
_SCALES = (1, 2, 3, 4, 16)
_SHORT = (2, 3)


@dataclass(frozen=True, slots=True)
class OscillatingPolicy(RisePolicy):
    """Thresholds of `loss.oscillating`.

    Attributes:
        size: number of values in a window.
        stride: number of values from one window to the next.
        max_lag_one: autocorrelation at lag 1 below which values alternate.
        min_peak: share of the power around one frequency above which they are periodic.
        min_amplitude: smallest distance of the 10 % and 90 % quantiles, as a share of the progress.
        min_trend: Mann-Kendall Z below which the loss still falls.
        clear_peak: share of the power from which on a period is beyond doubt.
        clear_amplitude: amplitude, as a share of the progress, that is large.
        clear_trend: Mann-Kendall Z below which a loss with both of these falls all the same.
        windows: consecutive windows that open an incident.
        growing: ratio of the amplitudes of the last and the first third from which on it is
            critical.
        calm: windows without it after which it is over.
    """

    size: Observations = 64
    stride: Observations = 16
    max_lag_one: Signed = -0.65
    min_peak: Share = 0.65
    min_amplitude: Times = 0.1
    min_trend: Signed = -1.0
    clear_peak: Share = 0.8
    clear_amplitude: Times = 0.15
    clear_trend: Signed = -3.0
    windows: Count = 2
    growing: Times = 1.6
    calm: Count = 6


@dataclass(slots=True)
class _Scale:
    """One scale's values: medians of this many observations."""

    observations: int
    size: int
    block: list[float] = field(default_factory=list)
    block_start: int = -1
    steps: deque[int] = field(init=False)
    values: deque[float] = field(init=False)
    since: int = 0
    firing: int = 0
    windows: int = 0

    def __post_init__(self) -> None:
        self.steps = deque(maxlen=self.size)
        self.values = deque(maxlen=self.size)

    def push(self, step: int, value: float, stride: int) -> bool:
        """Takes an observation; whether a window is complete and due."""
        if not self.block:
            self.block_start = step
        self.block.append(value)
        if len(self.block) < self.observations:
            return False
        self.values.append(float(np.median(self.block)) if len(self.block) > 1 else self.block[0])
        self.steps.append(self.block_start)
        self.block.clear()
        self.since += 1
        if len(self.values) < self.size or self.since < stride:
            return False
        self.since = 0
        self.windows += 1
        return True


@dataclass(slots=True, kw_only=True)
class _Oscillating(Incident):
    scale: int
    swing: Swing
    period_steps: float
    progress: float
    rise: Mapping[str, float] | None
    signed: bool
    falling: bool
    shape: bool
    beside: Beside
    amplitude: float = 0.0
    growing: bool = False
    windows: int = 0


@dataclass(slots=True)
class OscillatingState:
    """What `loss.oscillating` remembers."""

    scales: list[_Scale]
    progress: Progress = field(default_factory=Progress)
    companions: Companions = field(default_factory=Companions)
    steps: deque[int] = field(default_factory=lambda: deque(maxlen=LONGEST))
    beside: dict[str, dict[int, float]] = field(
        default_factory=lambda: {metric: {} for metric in (*_BESIDE, REACH)}
    )
    leaps: Leaps = field(default_factory=Leaps)
    signed: bool = False
    repeats: Repeats = field(default_factory=Repeats.begin)
    unmeasured: Unmeasured = field(default_factory=Unmeasured)
    incident: _Oscillating | None = None
    turns: Turns = field(default_factory=Turns)


class LossOscillating(Detector[OscillatingState]):
    """The mean loss over the ranks swings to and fro instead of falling.

    Too high a learning rate makes it alternate from step to step, too much momentum swing over some
    ten steps, data that come in a fixed order swing with the epoch. A noisy loss is none of these:
    white noise turns at two of three steps, but has no period.

    Statistic:
        Windows of 64 values, on the loss as it is and on medians of 2, 3, 4 and 16 observations.
        The residual of the logarithm around a parabola either alternates (autocorrelation at lag 1
        below -0.65; one of 100,000 windows of white noise reaches -0.53, batches that share out a
        small data set -0.5) or has more than 65 % of its power (80 % of medians of 2 and 3) around
        one frequency (Fisher's g, Hann taper, the lowest 4 frequencies left out; one of 100,000
        windows of white noise). The residual's 10 % and 90 % quantiles lie more than 10 % of the
        progress made apart, and the loss does not fall meanwhile (Mann-Kendall Z above -1; above -3
        where one frequency has more than 80 % of the power and the quantiles are more than 15 % of
        the progress apart: a smooth healthy fall that looks periodic has -5). Two windows in a row,
        16 values apart; over after 6 windows without. Or a shape repeats, whatever it is: in 64,
        128, 256 or 384 values, put side by side at a period of which 6 fit in, the place within the
        period explains more than half of the scatter, beyond chance (6 standard deviations: one
        false alarm in 1,000 runs of 100,000 steps), and its range is more than a quarter of the
        progress made.

    Severity:
        Warning; critical where the amplitude grows by 1.6 and more from the first to the last third
        of a window in which it swings all the time, beyond that of every window before. Never more
        than info for losses that change their sign, and for a shape that has been there from the
        start (the first 20 steps, or its first period) while the loss falls, or while the answers
        to the batches of every place explain a quarter of the deviance or more: sources that take
        turns look so. Info, too, for a period of 2 with gradients of consecutive steps whose median
        cosine is above -0.3. Unless with the same period the learning rate changes by half, the
        inputs are 3 times as large, or the answers to the batches of one place are no better than a
        constant while others explain a quarter of the deviance.

    Evidence:
        `period` (steps), `amplitude` (largest), `amplitude_now`, `lag_one`, `peak_share`,
        `growth`, `trend`, `progress`, `scale` (observations in one value), `windows`, and where
        they apply `lr_before`, `lr_after`, `lr_step`; `reach`, by how much a step can have changed
        the loss (its length times the gradient's, median), where that is less; of series that are
        posted the range of their medians by place within the period, `lr_range` and so on; `recurs`
        where a fault of the data or the schedule does.

    Source:
        Fisher (1929) and Mann-Kendall; epoch folding (Leahy et al. 1983); stability limits 2 / lr
        of gradient descent (period 2) and of heavy-ball momentum (period about 2 pi / sqrt(lr *
        curvature)). No pair of windows of 1, 4 and 16 fired on 64 healthy
        runs.
    """

    kinds = ("loss.oscillating",)
    of_one_task = True
    needs = ("loss",)
    wants = (*_BESIDE, *Leaps.SERIES)

    policy: OscillatingPolicy

    def __init__(self, policy: OscillatingPolicy | None = None) -> None:
        super().__init__(policy)
        self._detrend = residual_maker(self.policy.size, 2)

    def reaches(self) -> tuple[Reach, ...]:
        """Windows in a row; a swing of fewer than two observations a period shows in none."""
        policy = self.policy
        return (
            Reach(self.needs, policy.size + (policy.windows - 1) * policy.stride, moves="at all"),
        )

    def start(self) -> OscillatingState:
        """Nothing seen yet."""
        size = self.policy.size
        return OscillatingState(scales=[_Scale(n, size) for n in _SCALES])

    def advance(self, window: Window, state: OscillatingState) -> Outcome:
        """Takes the window's losses into every scale."""
        findings: list[Finding] = []
        state.companions.take(window)
        state.leaps.take(window)
        for metric in _BESIDE:
            state.beside[metric].update(mean_by_step(window, metric))
        steps, means = state.turns.means(window, "loss")
        for step, value in zip(steps.tolist(), means.tolist(), strict=True):
            state.unmeasured.push(step, finite=math.isfinite(value))
            if not math.isfinite(value):
                continue
            state.companions.pass_to(step)
            state.leaps.pass_to(step)
            state.beside[REACH][step] = state.leaps.reach(step)
            state.progress.push(step, value)
            state.steps.append(step)
            state.signed |= value < 0
            if state.incident is not None and state.incident.over(step):
                findings.append(self._finding(state.incident))
                state.incident = None
            for scale in state.scales:
                if scale.push(step, value, self.policy.stride):
                    self._judge(state, scale, step)
            self._repeat(state, step, value)
        # What comes without a loss, or with none that is finite, waits for none.
        state.leaps.pass_to(window.last_step)
        for known in state.beside.values():
            for old in [at for at in known if state.steps and at < state.steps[0]]:
                del known[old]
            if len(known) > 2 * LONGEST:
                for old in sorted(known)[: -2 * LONGEST]:
                    del known[old]
        if state.incident is not None:
            findings.append(self._finding(state.incident))
        return Outcome({"loss.oscillating": self._check(state)}, tuple(findings))

    def _judge(self, state: OscillatingState, scale: _Scale, step: int) -> None:
        policy = self.policy
        short = scale.observations in _SHORT
        swing = self._swing(np.array(scale.values), state.progress.scale, short=short)
        scale.firing = scale.firing + 1 if swing is not None else 0
        if swing is None:
            return
        self._follow(
            state,
            swing,
            step,
            first=scale.steps[max(swing.onset, 0)],
            since=scale.steps[0],
            scale=scale.observations,
            begins=scale.firing >= policy.windows,
        )

    def _repeat(self, state: OscillatingState, step: int, value: float) -> None:
        """The same of a shape that repeats; what a frequency has shown already stays with it."""
        shown = state.repeats.push(step, value, state.progress.scale)
        known = state.incident
        if shown is not None and (known is None or known.shape):
            first, swing, begins = shown
            self._follow(state, swing, step, first=first, begins=begins, shape=True)

    def _follow(
        self,
        state: OscillatingState,
        swing: Swing,
        step: int,
        *,
        first: int,
        begins: bool,
        since: int = -1,
        scale: int = 1,
        shape: bool = False,
    ) -> None:
        """Opens an incident, or keeps the open one going.

        Args:
            first: step of the first value that swings.
            begins: whether there is enough of it to open one.
            since: step of the window's first value; -1 where its growth is not asked for.
            scale: observations in one value.
            shape: whether it was found by its shape and not by a frequency.
        """
        policy, incident, spacing = self.policy, state.incident, state.progress.spacing
        # A long period is to be seen CYCLES times before the next window can show it.
        calm = spacing.steps(max(policy.calm * policy.stride, int(12 * swing.period)) * scale)
        if incident is None:
            if not begins:
                return
            incident = state.incident = _Oscillating(
                first_step=first,
                seen_step=step,
                last_step=step,
                clear_after=calm,
                scale=scale,
                swing=swing,
                period_steps=math.nan,
                progress=state.progress.scale,
                rise=state.companions.raised_rate(
                    first, before=spacing.steps(policy.rise_before), factor=policy.rise
                ),
                signed=state.signed,
                # What has a period cannot be seen before its first one is over.
                falling=swing.trend < FALLING
                and first <= spacing.first + spacing.steps(max(20, round(swing.period * scale))),
                shape=shape,
                beside=Beside(),
            )
        incident.last_step = step
        incident.windows += 1
        incident.falling &= swing.trend < FALLING
        if scale == incident.scale:
            incident.clear_after = calm
            incident.swing = swing
            if scale == 1:
                incident.beside = beside(list(state.steps), state.beside, round(swing.period))
            incident.amplitude = max(incident.amplitude, swing.amplitude)
            incident.progress = state.progress.scale
            incident.period_steps = swing.period * scale * spacing.steps(1000) / 1000
            # A window that reaches back before the onset always seems to grow, and so does one in
            # which two frequencies come into step: only what outgrows all before it does.
            incident.growing |= (
                since >= incident.first_step
                and swing.growth > policy.growing
                and swing.amplitude >= incident.amplitude
            )

    def _swing(self, values: Float64, progress: float, *, short: bool = False) -> Swing | None:
        """What a window shows, None where it does not oscillate."""
        policy = self.policy
        flat = self._detrend @ values
        low, high = np.quantile(flat, [0.1, 0.9])
        amplitude = float(high - low)
        if not amplitude > policy.min_amplitude * progress or not amplitude > 0:
            return None
        signed = values.min() < 0 or not values.max() > 0
        residual = flat if signed else self._detrend @ logarithm(values)
        zigzag = lag_one(residual)
        peak, period = spectral_peak(residual)
        least = policy.clear_peak if short else policy.min_peak
        if not (zigzag < policy.max_lag_one or peak > least):
            return None
        trend = mann_kendall(values.reshape(-1, 4).mean(axis=1))
        clear = peak > policy.clear_peak and amplitude > policy.clear_amplitude * progress
        if not trend > (policy.clear_trend if clear else policy.min_trend):
            return None
        third = len(values) // 3
        growth = float(np.std(residual[-third:]) / max(float(np.std(residual[:third])), 1e-12))
        size = np.abs(residual)
        large = np.flatnonzero(size > 0.5 * np.quantile(size, 0.9))
        return Swing(
            period=2.0 if zigzag < policy.max_lag_one else period,
            lag_one=zigzag,
            peak=peak,
            amplitude=amplitude,
            growth=growth,
            trend=trend,
            onset=int(large[0]) if len(large) else 0,
        )

    def _check(self, state: OscillatingState) -> Check:
        if state.unmeasured.lasting:
            since = state.unmeasured.since
            why = f"The loss is not finite since step {since}: from then on it shows nothing."
            return Check.insufficient(why)
        judged = [f"{s.windows} at scale {s.observations}" for s in state.scales if s.windows]
        if not judged:
            return too_few(state.progress.count, "finite loss value", self.policy.size)
        return Check.ok(f"Windows of {self.policy.size} values judged: {', '.join(judged)}.")

    def _finding(self, incident: _Oscillating) -> Finding:
        swing, period = incident.swing, incident.period_steps
        grows = ", and more and more" if incident.growing else ""
        title = (
            f"The loss swings by {number(incident.amplitude)} with a period of {number(period)} "
            f"steps since step {incident.first_step}{grows}"
        )
        rate = rate_sentence(incident.rise)
        other = incident.beside
        beyond = other.beyond(swing.amplitude, period) and not other.odd
        if other.odd:
            cause, remedy = recurs(other, period)
        elif period < _TWO and other.turns:
            cause = (
                "It goes up at one step and down at the next, and the gradients of consecutive "
                f"steps have a cosine of {number(other.cosine)}: no step takes back what the last "
                "one did, as where a learning rate is too high. Two tasks or two sources take "
                "turns, each with a loss of its own size."
            )
            remedy = (
                "Nothing, if two of them are meant to take turns; log their losses under names of "
                "their own. Else look at what is different at every other step."
            )
        elif beyond:
            cause, remedy = alternates(other, swing.amplitude, period)
        elif period < _TWO:
            cause = sentences(
                rate,
                "It goes up at one step and down at the next: every step overshoots the valley and "
                "lands on its other side, so the learning rate is above 2 over the curvature.",
            )
            remedy = "Lower the learning rate by a factor of 3."
        else:
            cause = sentences(
                rate,
                f"A period of {number(period)} steps is that of momentum that is damped too "
                "little, of data that come in a fixed order (if an epoch has as many steps), or of "
                "whatever else recurs after as many steps (schedule, accumulation, alternating "
                "sources, a second player).",
            )
            remedy = (
                "Lower the learning rate or the momentum. If the period is that of an epoch, "
                "shuffle: `shuffle=True`, `DistributedSampler.set_epoch(epoch)`."
            )
        if incident.rise is not None and not beyond:
            remedy += (
                f" At a learning rate of {number(incident.rise['lr_before'])} the loss did not "
                "swing."
            )
        severity = "critical" if incident.growing else "warning"
        settled = incident.shape and other.harmless and not incident.growing
        return incident.finding(
            kind="loss.oscillating",
            severity=(
                "info"
                if incident.signed
                or (incident.falling and not other.odd)
                or settled
                or (period < _TWO and other.turns)
                else severity
            ),
            title=title,
            cause=cause,
            remedy=remedy,
            evidence={
                "period": period,
                "amplitude": incident.amplitude,
                "amplitude_now": swing.amplitude,
                "lag_one": swing.lag_one,
                "peak_share": swing.peak,
                "growth": swing.growth,
                "trend": swing.trend,
                "progress": incident.progress,
                "scale": incident.scale,
                "windows": incident.windows,
                **(incident.rise or {}),
                **({"recurs": True} if other.odd else {}),
                **({"turns": True} if other.turns and period < _TWO else {}),
                **({"reach": other.reach} if beyond else {}),
                **{f"{name}_range": list(both) for name, both in other.ranges.items()},
            },
        )
