"""Parameters that grow without end, or fade away."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import pairwise

from rankscope.server.detectors.base import LASTS_SAMPLED, Detector, Finding, Outcome, Reach
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.series_by_step import median, together
from rankscope.server.detectors.mechanisms.statistics import exceeds, mean_over_ranks
from rankscope.server.detectors.mechanisms.wording import count, number
from rankscope.server.detectors.policy import Number, Observations, Share, Times
from rankscope.server.detectors.update import held_by_decay
from rankscope.server.detectors.update.held_by_decay import HeldPolicy, HeldState
from rankscope.server.window import Check, Window

# Norms that are remembered: when there are more, every second one is dropped.
_REMEMBERED = 512
# Norms of which the one at a step is the median.
_AROUND = 5
# Share of the largest norm above which nothing has faded yet.
_WHOLE = 0.95


@dataclass(frozen=True, slots=True)
class DriftPolicy(HeldPolicy):
    """Thresholds of `update.drift`.

    Attributes:
        evidence: norms that are needed before anything is judged.
        power: power of the number of steps above which the parameters grow too fast.
        grown: norm over that at the start, from which on growth matters.
        far: norm over that at the start, from which on it is critical.
        faded: norm as a share of the largest so far, below which shrinking matters.
        falling: power of the number of steps above which the parameters shrink too fast.
    """

    evidence: Observations = 64
    power: Number = 2.0
    grown: Times = 10.0
    far: Times = 1000.0
    faded: Share = 0.1
    falling: Number = 0.25


@dataclass(slots=True)
class Drift:
    """What was seen: the norm at the start, the largest and now; `per_step` is its growth now."""

    first: float
    most: float
    now: float
    per_step: float


@dataclass(slots=True)
class DriftState:
    """What `update.drift` remembers: norms by step, thinned out evenly.

    Attributes:
        steps, norms: of those remembered, ascending.
        every: one of this many is.
        count: norms so far.
        newest: the last ones.
        worst: largest median of them.
    """

    steps: list[int] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    every: int = 1
    count: int = 0
    first: float = math.nan
    newest: list[float] = field(default_factory=list)
    worst: float = 0.0
    held: HeldState = field(default_factory=lambda: HeldState(HeldPolicy()))
    watch: Watch[Drift] = field(default_factory=lambda: Watch(clear_after=50))

    def push(self, step: int, norm: float) -> None:
        """Takes the next norm."""
        self.newest = [*self.newest[1 - _AROUND :], norm]
        now = median(self.newest)
        if self.count % self.every == 0:
            self.steps.append(step)
            self.norms.append(now)
            if len(self.steps) > _REMEMBERED:
                self.every *= 2
                del self.steps[1::2], self.norms[1::2]
        self.count += 1
        if self.count == _AROUND:
            self.first = now
        self.worst = max(self.worst, now)

    def before(self, share: float, step: int) -> tuple[int, float]:
        """The remembered norm, and its step, when so large a share of the steps had passed."""
        at = self.steps[0] + share * (step - self.steps[0])
        place = max(bisect_right(self.steps, at) - 1, 0)
        return self.steps[place], self.norms[place]


class UpdateDrift(Detector[DriftState]):
    """The parameters grow faster and faster, or fade away, and the loss need not show it.

    Where a normalisation follows, their size changes nothing in what a layer gives: the loss goes
    on falling, while steps mean less and less and half precision nears its end.

    Statistic:
        `weight_norm` (median of the last 5) after n steps, beside what it was after 3/4 n and 1/2
        n, with 64 norms or more. Growth: above 10 times what it was at the start, and from each of
        these to the next faster than n squared. (Steps of one size and one direction make it grow
        with n, of one size and random directions with the root of n.) Fading: below a tenth of the
        largest (of what began 10 times smaller, of 10 times that), and falling by more than the
        fourth root of n from each to the next, until it is no longer below that tenth. Over after
        50 steps. Held down: below half of the largest, while the last 100 losses do not fall
        (Mann-Kendall Z above -1) and the gradients of consecutive samples have a median cosine of
        0.3 or more and a tenth of their size at the start, at three examinations in a row: a
        minimum has gradients that are noise. Or, of SGD, where the loss may fall: weight decay
        times norm is half or more of what gradients agree on, their norm times the root of the
        cosine. Of Adam whose decay is part of the gradient any shrinking will do where weight decay
        times norm is 3 times the size of the gradient. Or the decay forgets: learning rate times
        weight decay (of SGD, or decoupled) has a median of 5e-3 or more over the last 100 losses,
        the parameters are below half of the largest, and updates have a median of 1e-2 or more.

    Severity:
        Warning; critical from 1,000 times what it was at the start on.

    Evidence:
        `first`, `most`, `now`, `per_step` (relative growth a step over the last quarter). Of those
        held down `most`, `now`, `gradient` (its size over that at the start), `cosine`, `loss`, and
        where they are known `decay` (learning rate times weight decay) `takes` (what it takes
        off over what gradients agree on) and `drowns` (of Adam, weight decay times norm over the
        size of the gradient).

    Source:
        Merrill et al. (2021), Effects of Parameter Norm Growth During Transformer Training: growth
        with the root of n is usual. Never on a healthy run of the corpus, one of which grows
        400-fold, from negligible weights.
    """

    kinds = ("update.drift",)
    needs = ("weight_norm",)
    wants = held_by_decay.SERIES

    policy: DriftPolicy

    def reaches(self) -> tuple[Reach, ...]:
        """Norms on the way, by which it is no single jump."""
        return (Reach(self.needs, _AROUND + 3, LASTS_SAMPLED, moves="from zero"),)

    def start(self) -> DriftState:
        """Nothing seen yet."""
        return DriftState(held=HeldState(self.policy))

    def advance(self, window: Window, state: DriftState) -> Outcome:
        """Takes the norms one by one; one that is not finite is another detector's matter."""
        steps, means = mean_over_ranks(window, "weight_norm")
        for step, norm in zip(steps.tolist(), means.tolist(), strict=True):
            if math.isfinite(norm) and norm > 0:
                state.push(step, norm)
                if state.count >= self.policy.evidence:
                    self._judge(step, state)
        for step, row in together(window, *held_by_decay.SERIES):
            state.held.push(step, row)
        findings = [_finding(e, self.policy) for e in state.watch.take(window.last_step)]
        findings += [held_by_decay.finding(e) for e in state.held.watch.take(window.last_step)]
        return Outcome({"update.drift": _check(state, self.policy)}, tuple(findings))

    def _judge(self, step: int, state: DriftState) -> None:
        policy, now, first_step = self.policy, median(state.newest), state.steps[0]
        powers = []
        # Between these points each, so that a single jump is no growth.
        points = [state.before(share, step) for share in (0.5, 0.75)]
        for (early, then), (late, norm) in pairwise([*points, (step, now)]):
            passed = math.log((late - first_step) / max(early - first_step, 1))
            powers.append(math.log(norm / then) / passed if passed > 0 else 0.0)
        grows = exceeds(now, policy.grown * state.first) and min(powers) > policy.power
        # What has faded is not back because nothing is left that could go on fading. Parameters
        # that large steps have blown up shrink on their way back to what they were.
        whole = min(state.worst, policy.grown * min(state.first, state.norms[0]))
        gone = exceeds(policy.faded * whole, now)
        known = state.watch.open(step)
        fading = known is not None and known.facts.now < known.facts.first
        fades = gone and (fading or max(powers) < -policy.falling)
        if not (grows or fades):
            state.watch.good(step)
            return
        at, norm = state.before(0.75, step)
        facts = Drift(state.first, state.worst, now, math.log(now / norm) / max(step - at, 1))
        state.watch.bad(step, facts, first_step=_onset(state, grows, self.policy)).facts = facts


def _onset(state: DriftState, grows: bool, policy: DriftPolicy) -> int:
    """The first step of the growth or the fading.

    Steps of a training make a norm grow, too: growth counts from where it was never back within
    half of the way, by factors. None of them makes it fade by a twentieth: from there on it fades.
    """
    if grows:
        limit = state.first * math.sqrt(policy.grown)
        usual = [n for n, norm in enumerate(state.norms) if norm <= limit]
    else:
        usual = [n for n, norm in enumerate(state.norms) if norm >= _WHOLE * state.worst]
    return state.steps[min(usual[-1] + 1 if usual else 0, len(state.steps) - 1)]


def _check(state: DriftState, policy: DriftPolicy) -> Check:
    if state.count < policy.evidence:
        why = f"{count(state.count, 'norm')} of the parameters of {policy.evidence} needed."
        return Check.insufficient(why)
    now = number(median(state.newest))
    return Check.ok(f"The norm of the parameters began at {number(state.first)} and is {now}.")


def _finding(episode: Episode[Drift], policy: DriftPolicy) -> Finding:
    facts = episode.facts
    grows = facts.now > facts.first
    share = number(100 * abs(facts.per_step))
    now, first = number(facts.now), number(facts.first)
    if grows:
        title = f"The parameters have grown from {first} to {now}, faster and faster"
        cause = (
            f"Their norm grows by {share} % a step. Steps of one size make it grow with the number "
            "of steps at most: something multiplies the parameters. A weight decay with the wrong "
            "sign, an update that is added to itself, or a learning rate that grows with them."
        )
        remedy = (
            "Look at what writes the parameters besides the optimizer, and at the sign of a weight "
            "decay or penalty of your own. Where a normalisation hides it from the loss, a weight "
            "decay of 0.01 to 0.1 (AdamW) keeps their size."
        )
    else:
        title = f"The parameters have shrunk from {number(facts.most)} to {now}, and go on"
        cause = (
            f"Their norm falls by {share} % a step, which no loss asks for: the weight decay is "
            "stronger than the gradient. It takes the learning rate times itself off every "
            "parameter at every step."
        )
        remedy = (
            f"If {share} % is the learning rate times the weight decay, divide the latter by 10 or "
            "more, and leave it out for biases and normalisations; go on from a checkpoint before "
            f"step {episode.first_step}."
        )
    return episode.finding(
        kind="update.drift",
        key="grown" if grows else "faded",
        severity="critical" if facts.now > policy.far * facts.first else "warning",
        title=title,
        stage="parameters",
        cause=cause,
        remedy=remedy,
        evidence={
            "first": facts.first,
            "most": facts.most,
            "now": facts.now,
            "per_step": facts.per_step,
        },
    )
