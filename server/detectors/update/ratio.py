"""Steps that change the parameters by too much."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import LASTS_SAMPLED, Detector, Finding, Outcome, Reach
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.samples import LayerSample, layer_samples
from rankscope.server.detectors.mechanisms.series_by_step import median, together
from rankscope.server.detectors.mechanisms.waiting import too_few
from rankscope.server.detectors.mechanisms.wording import (
    agree,
    count,
    if_several,
    listing,
    number,
    percent,
    sentences,
)
from rankscope.server.detectors.policy import Count, Number, Share, Times
from rankscope.server.detectors.update import groups
from rankscope.server.detectors.update.overwritten import OverwrittenPolicy, OverwrittenState
from rankscope.server.window import Check, Window

# Samples that a median is of.
_SAMPLES = 32
# What a rate is advised for.
_AIM = 3e-3
_MAX_NAMES = 64


@dataclass(frozen=True, slots=True)
class RatioPolicy(OverwrittenPolicy):
    """Thresholds of `update.ratio`.

    Attributes:
        high: update over parameters of the whole model, above which it is reported.
        growth: this over the number of steps so far is the limit, where that is higher: parameters
            that grow steadily from negligible values have a ratio of 1 over the steps.
        critical: update over parameters of the whole model, from which on it is critical.
        matrix_high: update over parameters of a single matrix, above which it is reported.
        matrix_low: the same of a single matrix, below which it is reported.
        evidence: sampled steps, of the last 32, that are needed before anything is judged.
        warm: learning rate as a share of the highest, below which a step does not count.
        converged: gradient norm as a share of the first ones, below which a step does not count
            either.
        explained: share of the deviance explained, from which on most was learned.
        rising: smallest gain of that share between the halves of the last 32 samples that is
            learning.
    """

    high: Number = 3e-2
    growth: Times = 4.0
    critical: Number = 0.3
    matrix_high: Number = 0.1
    matrix_low: Number = 3e-6
    evidence: Count = 16
    warm: Share = 0.1
    converged: Share = 1e-3
    explained: Share = 0.5
    rising: Share = 0.05


@dataclass(slots=True)
class Large:
    """What was seen: the median update, the rate it was made with, tensors and their medians.

    Attributes:
        learns: the answers are good, or become better, all the same.
        explained: share of the deviance that they explain; NaN where it is not known.
    """

    update: float
    rate: float
    tensors: dict[str, float] = field(default_factory=dict)
    learns: bool = False
    explained: float = math.nan


@dataclass(slots=True)
class RatioState:
    """What `update.ratio` remembers.

    Attributes:
        norms: of the first gradients.
        large_since: first large update since which their median has been above `high`; -1 where it
            is not.
        updates: update over parameters, of steps whose rate was not almost nothing.
        of_tensors: the same of each matrix.
    """

    seen: int = 0
    begun: int = -1
    large_since: int = -1
    rate: float = math.nan
    peak: float = 0.0
    norms: list[float] = field(default_factory=list)
    updates: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_SAMPLES))
    of_tensors: dict[str, deque[float]] = field(default_factory=dict)
    explained: deque[float] = field(default_factory=lambda: deque(maxlen=_SAMPLES))
    whole: Watch[Large] = field(default_factory=lambda: Watch(clear_after=50))
    single: Watch[Large] = field(default_factory=lambda: Watch(clear_after=50))
    groups: groups.Groups = field(default_factory=groups.Groups)
    overwritten: OverwrittenState = field(default_factory=OverwrittenState)


class UpdateRatio(Detector[RatioState]):
    """A step changes the parameters by far more of their size than one that learns does.

    Statistic:
        |change| / |parameters| of the whole model: the median of the last 32 sampled steps, of
        which there are 16 or more, is above 3e-2, and above 4 over the number of steps up to the
        middle one: what grows from nothing at a steady pace has one over it. It begins with the
        first such step since which the median has been above 3e-2. Steps at less than a
        tenth of the highest learning rate do not count: warm-up and the end of a schedule are
        neither; nor do those with a gradient below a thousandth of the first ones, where the loss
        has come to its minimum. Of single matrices the same median is above 0.1 or below 3e-6
        while the whole is as it should be. And a single matrix outgrows what it began with: the
        median change of 16 consecutive samples is above 0.05 of its initial size (its norm before
        the first sample, or that of torch's usual initialisation, whichever is larger), it has
        grown to more than 4 times that, and its pace is more than 20 times the median of those that
        change less, a quarter of all at least, both as a share of the initial sizes and element by
        element. Updates that are too small altogether are `lr.too_low`, none at all
        `update.missing`. Over after 50 steps without it. Groups, where that is not found: the
        highest of their rates is 30 times the lowest or more, and the median above 3e-2 and above
        1.3 over that number of steps (0.6 where less than -0.1 of the deviance is explained); it
        lasts as long as the rates lie apart.

    Severity:
        Warning; critical above 0.3 of the whole model, where a few steps replace the parameters.
        Warning for matrices that outgrow what they began with. Info for other single matrices, and
        where more than half of the deviance is explained or ever more of it is, as at the peak of a
        schedule: such steps are no fault as long as they teach.

    Evidence:
        `update_ratio`, `lr`, `suggested_lr`, and `explained_deviance` and `matrices` with their own
        where these are posted. Of matrices that outgrow what they began with `pace` (the largest
        change of a step over the initial size), `others`, `grown`, `matrices`, and `lr_of_groups`
        where the parameter groups have several.

    Source:
        1e-3 is a usual size; medians of the corpus's healthy runs lie between 4e-5 and 2e-2.
        Rates that make a training diverge have medians of 0.1 and more.
    """

    kinds = ("update.ratio",)
    needs = ("update_ratio",)
    wants = ("lr", "grad_norm", "explained_deviance", groups.SERIES)

    policy: RatioPolicy

    def reaches(self) -> tuple[Reach, ...]:
        """Large updates that outweigh the others among those that the median is of."""
        return (Reach(self.needs, _SAMPLES // 2, LASTS_SAMPLED, moves="from zero"),)

    def advance(self, window: Window, state: RatioState) -> Outcome:
        """Takes the updates with the rates they were made with."""
        rows = dict(together(window, "update_ratio", "lr", "grad_norm", "explained_deviance"))
        seen = dict(layer_samples(window, "update_ratio", "weight_norm"))
        state.overwritten.take_rates(window)
        state.groups.begin(window)
        for step in sorted({*rows, *seen}):
            row = rows.get(step, {})
            state.groups.pass_to(step)
            if math.isfinite(row.get("lr", math.nan)):
                state.rate = row["lr"]
                state.peak = max(state.peak, state.rate)
            if state.peak > 0 and state.rate < self.policy.warm * state.peak:
                continue
            if self._converged(row.get("grad_norm", math.nan), state):
                # Parameters that go to zero change by the same share of what is left to the end.
                if "update_ratio" in row:
                    state.whole.good(step)
                    state.single.good(step)
                continue
            if "update_ratio" in seen.get(step, {}):
                self._tensors(seen[step]["update_ratio"], state)
                state.overwritten.push(seen[step], step, self.policy)
            if math.isfinite(row.get("explained_deviance", math.nan)):
                state.explained.append(row["explained_deviance"])
            update = row.get("update_ratio", math.nan)
            if math.isfinite(update):
                state.seen += 1
                state.begun = step if state.begun < 0 else state.begun
                state.updates.append((step, update))
                self._judge(step, state)
        findings = [_finding(e, self.policy, window) for e in state.whole.take(window.last_step)]
        findings += [_single(e) for e in state.single.take(window.last_step)]
        findings += [groups.finding(e) for e in state.groups.watch.take(window.last_step)]
        findings += state.overwritten.findings(window)
        return Outcome({"update.ratio": _check(state, self.policy)}, tuple(findings))

    def _converged(self, norm: float, state: RatioState) -> bool:
        """Whether the gradient is negligible beside the first ones."""
        if not (math.isfinite(norm) and norm > 0):
            return False
        if len(state.norms) < _SAMPLES:
            state.norms.append(norm)
        return norm < self.policy.converged * median(state.norms)

    def _tensors(self, sample: LayerSample, state: RatioState) -> None:
        known = np.where(np.isnan(sample.values), -1.0, sample.values).max(axis=0)
        ratios = {
            name: float(value)
            for name, shape, value in zip(sample.names, sample.shapes, known, strict=True)
            # Biases and scales begin at 0 or 1, and their size shows nothing.
            if len(shape) > 1 and math.isfinite(value) and value > 0
        }
        for gone in set(state.of_tensors) - set(sample.names):
            del state.of_tensors[gone]
        for name, value in ratios.items():
            state.of_tensors.setdefault(name, deque(maxlen=_SAMPLES)).append(value)

    def _judge(self, step: int, state: RatioState) -> None:
        policy = self.policy
        if len(state.updates) < policy.evidence:
            return
        typical = _typical(state)
        medians = {
            name: median(values)
            for name, values in state.of_tensors.items()
            if len(values) >= policy.evidence
        }
        if not typical > policy.high:
            state.large_since = -1
        elif state.large_since < 0:
            state.large_since = next(s for s, update in state.updates if update > policy.high)
        middle = state.updates[len(state.updates) // 2][0] - state.begun + 1
        learns, explained = _learns(state, policy)
        # A matrix by name says more than its group.
        named = state.overwritten.watch.open(step) is not None
        state.groups.judge(
            step,
            update=typical,
            middle=middle,
            high=policy.high,
            tensors=medians,
            learns=learns,
            explained=explained,
            named=named,
        )
        if typical > max(policy.high, policy.growth / middle):
            large = {n: m for n, m in medians.items() if m > policy.high}
            facts = Large(typical, state.rate, large, *_learns(state, policy))
            state.whole.bad(step, facts, first_step=state.large_since).facts = facts
            state.single.good(step)
            return
        state.whole.good(step)
        high = max(policy.matrix_high, policy.growth / middle)
        odd = {n: m for n, m in medians.items() if m > high or m < policy.matrix_low}
        if state.overwritten.watch.open(step) is not None:
            odd.clear()  # that says more of them
        # Where all are as small, it is the rate.
        if odd and len(odd) < len(medians):
            facts = Large(typical, state.rate, odd)
            state.single.bad(step, facts).facts = facts
        else:
            state.single.good(step)


def _typical(state: RatioState) -> float:
    return median([update for _, update in state.updates])


def _learns(state: RatioState, policy: RatioPolicy) -> tuple[bool, float]:
    """Whether the answers are good or become better, and the share that they explain now."""
    shares = list(state.explained)
    half = len(shares) // 2
    if 2 * half < policy.evidence:
        return False, math.nan
    before, now = median(shares[:half]), median(shares[half:])
    return now > policy.explained or now - before > policy.rising, now


def _finding(episode: Episode[Large], policy: RatioPolicy, window: Window) -> Finding:
    facts = episode.facts
    names = sorted(facts.tensors, key=lambda name: (-facts.tensors[name], name))
    evidence: dict[str, object] = {"update_ratio": facts.update}
    advice = "Lower the learning rate"
    if math.isfinite(facts.rate) and facts.rate > 0:
        suggested = facts.rate * _AIM / facts.update
        evidence |= {"lr": facts.rate, "suggested_lr": suggested}
        advice += (
            f" from {number(facts.rate)} to {number(suggested)}: updates are proportional to it, "
            f"and would be {number(_AIM)} of the parameters"
        )
    if math.isfinite(facts.explained):
        evidence["explained_deviance"] = facts.explained
    if names:
        evidence["matrices"] = {name: facts.tensors[name] for name in names[:_MAX_NAMES]}
    most = listing([f"`{n}` ({number(facts.tensors[n])})" for n in names], most=4)
    return episode.finding(
        kind="update.ratio",
        severity=(
            "info" if facts.learns else "critical" if facts.update > policy.critical else "warning"
        ),
        title=(
            f"A step changes the parameters by {number(facts.update)} of their size, "
            f"{number(facts.update / 1e-3)} times the usual 0.001"
        ),
        tensors=tuple(names[:_MAX_NAMES]),
        stage="parameters",
        cause=sentences(
            f"After {number(1 / facts.update)} such steps in one direction the change is as "
            "large as the parameters themselves: what was learned is written over.",
            f"Most of it in {most}." if most else "",
            "The learning rate is too high for these parameters, or gradients are not averaged "
            f"(a sum over samples{if_several(window.world_size, 'ranks', before=', ')} or "
            "micro-batches).",
            f"The answers still become better: they explain {percent(facts.explained)} of the "
            "deviance."
            if facts.learns
            else "",
        ),
        remedy=f"{advice}. Begin with a warm-up, and clip gradients where they jump.",
        evidence=evidence,
    )


def _single(episode: Episode[Large]) -> Finding:
    facts = episode.facts
    names = sorted(facts.tensors, key=lambda name: (-facts.tensors[name], name))
    most = listing([f"`{n}` by {number(facts.tensors[n])}" for n in names], most=4)
    return episode.finding(
        kind="update.ratio",
        key="matrices",
        severity="info",
        title=f"{count(len(names), 'matrix')} of the model "
        f"{agree(len(names), 'changes')} at a pace of "
        f"{'its' if len(names) == 1 else 'their'} own",
        tensors=tuple(names[:_MAX_NAMES]),
        stage="parameters",
        cause=(
            f"The model as a whole changes by {number(facts.update)} of its size in a step, "
            f"{most}; 1e-4 to 1e-2 is usual. Small initial weights make the ratio large, large "
            "ones make it small; a learning rate of their own can do either."
        ),
        remedy=(
            "Look at the initial size of these weights, and at the learning rate and weight decay "
            "of their parameter group."
        ),
        evidence={
            "update_ratio": facts.update,
            "lr": facts.rate,
            "matrices": {name: facts.tensors[name] for name in names[:_MAX_NAMES]},
        },
    )


def _check(state: RatioState, policy: RatioPolicy) -> Check:
    if len(state.updates) < policy.evidence:
        return too_few(len(state.updates), "sampled update", policy.evidence)
    return Check.ok(
        f"A step changes the parameters by {number(_typical(state))} of their size, the "
        f"median of {count(len(state.updates), 'sampled step')}."
    )
