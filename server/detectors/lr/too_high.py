"""A learning rate that a training does not stand."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np

from rankscope.server.detectors.base import Detector, Finding, Outcome, Reach
from rankscope.server.detectors.gradient.exploding import GradientExploding
from rankscope.server.detectors.layer.dead import LayerDead
from rankscope.server.detectors.loss.diverging import LossDiverging
from rankscope.server.detectors.loss.oscillating import LossOscillating
from rankscope.server.detectors.lr import momentum
from rankscope.server.detectors.lr.fastest import Fastest
from rankscope.server.detectors.lr.momentum import Momentum
from rankscope.server.detectors.lr.start import BadStart
from rankscope.server.detectors.mechanisms.history import Companions, rate_sentence
from rankscope.server.detectors.mechanisms.series_by_step import median, together
from rankscope.server.detectors.mechanisms.waiting import too_few
from rankscope.server.detectors.mechanisms.wording import count, number, sentences
from rankscope.server.detectors.policy import Count, Observations, Policy, RisePolicy, Share, Steps
from rankscope.server.detectors.profiles import TURNS
from rankscope.server.window import Check, Status, Window

_PARTS: tuple[type[Detector[Any]], ...] = (
    LossDiverging,
    LossOscillating,
    GradientExploding,
    LayerDead,
)

# Units that died, of all that this kind can find.
_DEAD, _UNITS = "layer.dead", "units:dead"
# Evidence of those of which enough are left.
_LEFT = "enough_left"


@dataclass(frozen=True, slots=True)
class HighPolicy(RisePolicy):
    """Thresholds of `lr.too_high`.

    Attributes:
        large_update: median update, relative to the parameters, above which it is too large;
            healthy medians reach 7e-3, single updates 9.9e-3.
        overwriting: update, relative to the parameters, above which `updates` steps are enough,
            whatever the median.
        usual_update: update that the remedy aims at.
        updates: sampled updates that are needed before their size counts.
        evidence: losses that are needed before anything is judged.
        near: largest distance in steps between a sign in the loss and what confirms it.
        least_cut, most_cut: smallest and largest factor of the remedy for a rate that did not rise.
        large_inputs: root mean square of the inputs from which on they explain large steps, too:
            networks are initialised for 1, pixels up to 255 have 100.
    """

    large_update: Share = 3e-2
    overwriting: Share = 0.1
    usual_update: Share = 3e-3
    updates: Count = 4
    evidence: Observations = 40
    near: Steps = 200
    least_cut: Share = 0.01
    most_cut: Share = 0.3
    large_inputs: float = 30.0


@dataclass(frozen=True, slots=True)
class High:
    """The second sign, as it was when the first one was seen.

    Attributes:
        rise: of the rate.
        inputs: their root mean square; NaN where it is not known.
        since: first step that wrote over the parameters, where one after the other did; None where
            that is not what shows the rate.
    """

    rate: float
    update: float
    rise: Mapping[str, float] | None
    inputs: float = math.nan
    since: int | None = None


@dataclass(slots=True)
class HighState:
    """What `lr.too_high` remembers: the states of the detectors it asks, and what they found.

    Attributes:
        total: finite losses; `normed`: whether gradients have norms.
        judged: kind and `seen_step` of their findings -> the second sign, None without it.
        current: that which is reported, and until when it held.
    """

    parts: list[tuple[Detector[Any], Any]]
    total: int = 0
    normed: bool = False
    updates: list[tuple[int, float]] = field(default_factory=list)
    rates: list[tuple[int, float]] = field(default_factory=list)
    inputs: deque[float] = field(default_factory=lambda: deque(maxlen=16))
    start: BadStart = field(default_factory=BadStart)
    fastest: Fastest = field(default_factory=Fastest)
    momentum: Momentum = field(default_factory=Momentum)
    judged: dict[tuple[str, int], High | None] = field(default_factory=dict)
    current: tuple[str, int] | None = None
    last_step: int = -1


class RateTooHigh(Detector[HighState]):
    """The loss or the gradient leaves what it had reached, and the learning rate explains it.

    Statistic:
        Two signs together. First: the loss diverges or oscillates, the gradient explodes, or most
        units of a ReLU die (as those kinds say). Second: the learning rate rose by half or more in
        the 100 steps before, or the updates of the 200 steps before are too large (median of 4
        sampled ones or more above 0.03 of the parameters; of units that die, also 4 of them above
        0.1). It begins with the first one; where the rate did not rise, and 4 or more sampled
        updates in a row were above 0.1, with these. Or the first ten updates were above 0.1 in the
        median, the loss rose to half above its first value within 20 steps, and after 100 the
        answers explain 5 % of the deviance or less (the last 30; where that is not known, the loss
        is still above its first value); or the first 50 were above 0.03, and they explain a tenth
        or less; not of weights that began at zero. Or SGD has a momentum of
        0.98 or more, and the norm of the parameters has come to 3 times what it was (medians of 5)
        within 4 / (1 - momentum) steps. Without the second sign the data are as likely, and nothing
        is said here. Over after 200 steps without the first.

    Severity:
        As the first sign has it; a sign that is but info is none. Warning for the first steps (key
        `start`, until the answers are worth more) and for a momentum (key `momentum`, over after 50
        steps without).

    Where ranks have rates of their own (stages of a pipeline), those far above the others' are
    named; so is a group of parameters whose rate is more than 30 times that of each other one.

    Evidence:
        `sign` (its kind, `start` or `momentum`), `lr`, `update_ratio` where it is posted,
        `input_rms` of large inputs, and where the rate rose `lr_before`, `lr_after`, `lr_step`. Of
        the first steps `loss_first`, `loss_highest`, `explained_deviance`; of a momentum that, and
        the norm at `first` and `now`.

    Source:
        Stability needs a rate below 2 over the largest curvature (Cohen et al. 2021); the size of
        updates stands for it, as it needs no curvature.
    """

    kinds = ("lr.too_high",)
    needs = ("loss", "lr")
    wants = (
        *("grad_norm", "grad_norm_preclip", "update_ratio", "input_rms"),
        *("initial_gain", "explained_deviance", "weight_norm", "lr/*"),
    )

    policy: HighPolicy

    def __init__(
        self, policy: HighPolicy | None = None, parts: Sequence[Detector[Any]] | None = None
    ) -> None:
        super().__init__(policy)
        self._parts = [part() for part in _PARTS] if parts is None else [*parts]

    @classmethod
    def of(cls, policies: Callable[[type[Detector[Any]]], Policy]) -> Self:
        """Its first sign is judged by the same thresholds as the kinds that have it."""
        policy = policies(cls)
        assert isinstance(policy, HighPolicy)
        return cls(policy, [part(policies(part)) for part in _PARTS])

    def reaches(self) -> tuple[Reach, ...]:
        """What its first sign has: any of them may be the only one."""
        signs = (part for part in self._parts if _DEAD not in part.kinds)
        return tuple(reach for part in signs for reach in part.reaches())

    def start(self) -> HighState:
        """Nothing seen yet."""
        return HighState([(part, part.start()) for part in self._parts])

    def advance(self, window: Window, state: HighState) -> Outcome:
        """Asks the others, and looks at the rate and the updates before what they found."""
        names, policy = (*self.needs, *self.wants[:-1]), self.policy
        state.momentum.configured(window.config)
        state.start.games |= any(event.kind == TURNS for event in window.events)
        for step, row in together(window, *names):
            state.start.take(step, row, overwriting=policy.overwriting, large=policy.large_update)
            state.momentum.take(step, row)
            state.total += math.isfinite(row.get("loss", math.nan))
            state.normed |= "grad_norm" in row
            if math.isfinite(row.get("lr", math.nan)):
                state.rates.append((step, row["lr"]))
            if math.isfinite(row.get("update_ratio", math.nan)):
                state.updates.append((step, row["update_ratio"]))
            if math.isfinite(row.get("input_rms", math.nan)):
                state.inputs.append(row["input_rms"])
        state.fastest.take(window)
        findings: list[Finding] = []
        answers = [detector.advance(window, memory) for detector, memory in state.parts]
        reported = [
            finding
            for answer in answers
            for finding in answer.findings
            if finding.kind != _DEAD or finding.key == _UNITS and not finding.evidence.get(_LEFT)
        ]
        asked = {kind: check for answer in answers for kind, check in answer.checks.items()}
        # Units report a rate that was too high, and nothing where there are none.
        del asked[_DEAD]
        if not state.normed:
            # A run without norms is judged by its loss.
            del asked["gradient.exploding"]
        for sign in sorted(reported, key=lambda f: (f.seen_step, f.kind)):
            identity = sign.kind, sign.seen_step
            if identity not in state.judged:
                state.judged[identity] = _second_sign(sign, state, self.policy)
            high = state.judged[identity]
            # What is information may become a warning later: the second sign is that of now.
            if sign.severity == "info":
                continue
            if high is None or 0 <= state.start.seen < sign.seen_step and _start_counts(state):
                continue
            # One at a time: what comes while one lasts belongs to it.
            if state.current is None or sign.seen_step > state.last_step + self.policy.near:
                state.current = identity
            if state.current == identity:
                state.last_step = max(state.last_step, sign.last_step)
                findings.append(_finding(sign, high, state.fastest, self.policy))
        if _start_counts(state):
            findings.append(_start_finding(state.start, state.fastest, self.policy))
        findings += [momentum.finding(e) for e in state.momentum.watch.take(window.last_step)]
        # Not by number: how much of a long block is looked back at must not depend on its length.
        for series in (state.updates, state.rates):
            old = bisect_left(series, (window.last_step - 4 * self.policy.near, -math.inf))
            del series[:old]
        return Outcome({"lr.too_high": _check(window, state, asked, self.policy)}, tuple(findings))


def _second_sign(sign: Finding, state: HighState, policy: HighPolicy) -> High | None:
    if "reach" in sign.evidence:
        return None  # no step can have done it
    known = [(s, v) for s, v in state.rates if s <= sign.seen_step]
    recent = [v for s, v in state.updates if sign.seen_step - policy.near < s <= sign.seen_step]
    update = median(recent)
    rise = Companions(rates=deque(known)).raised_rate(
        sign.first_step, before=policy.rise_before, factor=policy.rise
    )
    large = len(recent) >= policy.updates and update > policy.large_update
    # Once units are dead, steps are small again.
    if sign.kind == _DEAD and not large:
        written = [value for value in recent if value > policy.overwriting]
        large, update = len(written) >= policy.updates, median(written)
    if rise is None and (not large or state.start.began_at_zero):
        return None
    since = None if rise is not None else _overwriting_since(sign, state, policy)
    return High(known[-1][1] if known else math.nan, update, rise, median(state.inputs), since)


def _overwriting_since(sign: Finding, state: HighState, policy: HighPolicy) -> int | None:
    """Since when steps wrote over the parameters, one after the other, on the way to a sign.

    A rate at which they do is too high from there on, however long the units take to die of it.
    """
    first, seen = sign.seen_step - policy.near, sign.seen_step
    recent = [(step, v > policy.overwriting) for step, v in state.updates if first < step <= seen]
    while recent and not recent[-1][1]:
        recent.pop()  # once units are dead, steps are small again
    written = 0
    for _, over in reversed(recent):
        if not over:
            break
        written += 1
    return recent[-written][0] if written >= policy.updates else None


def _check(
    window: Window, state: HighState, asked: Mapping[str, Check], policy: HighPolicy
) -> Check:
    if state.current is not None and window.last_step <= state.last_step + policy.near:
        kind, step = state.current
        return Check.open(f"The learning rate is too high: {kind} since step {step}.")
    if state.total < policy.evidence:
        return too_few(state.total, "loss value", policy.evidence)
    for kind, check in asked.items():
        if check.status is Status.INSUFFICIENT_DATA:
            return Check(check.status, f"{kind}, which it follows from, is not judged: {check.why}")
    others = sum(high is None for high in state.judged.values())
    if others:
        return Check.ok(
            f"{count(others, 'disturbance')} of loss or gradient, none of which a risen rate or "
            "large updates explain."
        )
    return Check.ok("The loss does not diverge or swing, and the gradient does not explode.")


def _start_counts(state: HighState) -> bool:
    """Whether the first steps show the rate, and no other sign had before."""
    seen = state.start.seen
    before = (high is not None for (_, at), high in state.judged.items() if at <= seen)
    return seen >= 0 and not any(before)


def _of(rate: float) -> str:
    """Of a parameter server nobody may know it."""
    return f" of {number(rate)}" if math.isfinite(rate) else ""


def _rate(usable: float) -> str:
    known = math.isfinite(usable)
    return f"a learning rate of {number(usable)}" if known else "a tenth of the learning rate"


def _start_finding(start: BadStart, fastest: Fastest, policy: HighPolicy) -> Finding:
    rate, known, losses = start.rate, start.known, start.losses
    if fastest.group is not None:
        rate = fastest.group[1]
    explained = float(np.mean(start.explained)) if known else math.nan
    usable = rate * min(max(policy.usual_update / start.written, policy.least_cut), policy.most_cut)
    more = "hardly more" if explained > 0.05 else "no more"  # as `start._NOTHING`
    worth = f"The answers are still worth {more} than one that is always the same."
    if explained < -1:
        worth = (
            f"The answers still cost {number(1 - explained)} times what one that is always the "
            "same would."
        )
    return Finding(
        kind="lr.too_high",
        key="start",
        severity="warning",
        title=f"The learning rate{_of(rate)} is too high for the first steps",
        seen_step=start.seen,
        last_step=start.last,
        first_step=losses.first_step,
        cause=sentences(
            f"The first steps changed the parameters by {number(start.written)} of their size "
            "each, which wrote over the initialisation"
            + (f", and the first 50 by {number(start.lasting)}" if not start.thrown else "")
            + f"; the loss began at {number(losses.first)}, was at {number(losses.highest)} and "
            f"has come to {number(losses.latest[-1])} since.",
            worth if known else "It is still above where it began.",
            fastest.sentence(),
        ),
        remedy=(
            f"Begin with a warm-up of some hundred steps, or with {_rate(usable)}; clip the "
            "gradient to limit single steps."
        ),
        clear_after=policy.near,
        evidence={
            "sign": "start",
            "lr": rate,
            "update_ratio": start.written,
            "loss_first": losses.first,
            "loss_highest": losses.highest,
            **({"explained_deviance": explained} if known else {}),
        },
    )


def _finding(sign: Finding, high: High, fastest: Fastest, policy: HighPolicy) -> Finding:
    # Of a rate that rose the mean over the ranks is known alone.
    named, where_it_is = (fastest.ranks, fastest.where()) if high.rise is None else ((), "")
    if named:
        # Stages of a pipeline may have rates of their own: the mean of them is nobody's.
        high = replace(high, rate=fastest.rate)
    elif high.rise is None and fastest.group is not None:
        high = replace(high, rate=fastest.group[1])
    elif high.rise is not None:
        high = replace(high, rate=float(high.rise["lr_after"]))
    evidence: dict[str, Any] = {"sign": sign.kind, "lr": high.rate}
    first = sign.first_step if high.since is None else min(high.since, sign.first_step)
    if math.isfinite(high.update):
        evidence["update_ratio"] = high.update
    if high.rise is not None:
        evidence |= dict(high.rise)
        usable = float(high.rise["lr_before"])
        cause = f"{sign.title}. {rate_sentence(high.rise)}"
    else:
        # The update goes with the rate.
        usable = high.rate * min(
            max(policy.usual_update / high.update, policy.least_cut), policy.most_cut
        )
        cause = sentences(
            f"{sign.title}. A step changes the parameters by {number(high.update)} of their size; "
            "healthy trainings stay below 0.01.",
            "" if named else fastest.sentence(),
        )
    where = f" before step {first}" if first > 0 else ""
    remedy = (
        f"Restart{where} with {_rate(usable)}, and reach it by a warm-up of some hundred steps; "
        "clip the gradient to limit single steps."
    )
    if high.rise is None and high.inputs >= policy.large_inputs:
        evidence["input_rms"] = high.inputs
        cause += (
            f" The inputs have a root mean square of {number(high.inputs)}, where networks are "
            "initialised for 1: they are not normalised, and gradients are as much larger."
        )
        remedy = (
            "Bring each input to a mean of 0 and a standard deviation of 1 first, with numbers "
            f"from the training data. If it stays: {remedy[0].lower()}{remedy[1:]}"
        )
    return Finding(
        kind="lr.too_high",
        severity=sign.severity,
        title=f"The learning rate{_of(high.rate)}{where_it_is} is too high",
        ranks=named,
        seen_step=sign.seen_step,
        last_step=sign.last_step,
        first_step=first,
        cause=cause,
        remedy=remedy,
        clear_after=sign.clear_after,
        evidence=evidence,
    )
