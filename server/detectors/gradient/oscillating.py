"""A gradient whose size begins to jump from step to step."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import LASTS, Detector, Finding, Outcome, Reach
from rankscope.server.detectors.effects import EPISODE, Rule
from rankscope.server.detectors.gradient import one_line
from rankscope.server.detectors.gradient.recurring import Recurrence, Recurring
from rankscope.server.detectors.mechanisms.batch_sizes import (
    SINGLE,
    BatchSizes,
    effective_sizes,
    first_tokens,
)
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.odd_targets import SERIES, OddTargets
from rankscope.server.detectors.mechanisms.series_by_step import median, together
from rankscope.server.detectors.mechanisms.statistics import rank_rows
from rankscope.server.detectors.mechanisms.waiting import too_few
from rankscope.server.detectors.mechanisms.wording import number
from rankscope.server.detectors.policy import Count, Number, Observations, Times
from rankscope.server.window import Check, Window


@dataclass(frozen=True, slots=True)
class OscillatingPolicy(one_line.OneLinePolicy):
    """Thresholds of `gradient.oscillating`.

    Attributes:
        earlier: number of earlier measurements that are needed before anything is judged.
        factor: scatter over the median of the earlier ones, from which on it is reported.
        least: smallest scatter of the logarithm of the norm that is reported.
        in_a_row: consecutive measurements that have to exceed the limits.
        back: number of norms in a measurement, and of steps without it after which it is over.
        stride: number of norms from one measurement to the next.
    """

    earlier: Count = 4
    factor: Times = 3.0
    least: Number = 0.5
    in_a_row: Count = 2
    back: Observations = 64
    stride: Observations = 16


@dataclass(slots=True)
class Jumps:
    """What was seen: the scatter of the logarithm before and now, and the rate's change.

    Attributes:
        recurs: what comes again, where the scatter is that.
        odd_targets: the large ones are those of odd targets, which the data have had from the
            start.
    """

    before: float
    now: float
    lr_before: float
    lr_now: float
    signed: bool
    recurs: Recurrence | None = None
    odd_targets: bool = False


@dataclass(slots=True)
class OscillatingState:
    """What `gradient.oscillating` remembers."""

    norms: deque[tuple[int, float]]
    rates: deque[float]
    watch: Watch[Jumps]
    line: one_line.OneLine
    total: int = 0
    earlier: deque[float] = field(default_factory=lambda: deque(maxlen=32))
    above: int = 0
    signed: bool = False
    recurring: Recurring = field(default_factory=Recurring)
    targets: OddTargets = field(default_factory=OddTargets)
    sizes: BatchSizes = field(default_factory=BatchSizes)  # samples of a step
    tokens: bool = False
    tokens_from: float = math.inf
    longest: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=256))


# Share of the scatter of log norms that that of the targets explains. Of 256 independent ones it is
# 1 / 256.
_EXPLAINED = 0.5


class GradientOscillating(Detector[OscillatingState]):
    """The norm of the gradient jumps from step to step as it did not before, or again and again.

    Or its direction: to and fro on one line, as where one input is far larger than all others.

    Statistic:
        s is the standard deviation of the differences of neighbouring log norms, over the root of
        2, in 64 observations, examined every 16. It is above 3 times the median of the earlier ones
        (at least 4, those that were alarmed about left out) and above 0.5, twice in a row, also
        without the norm that lies furthest out; not of steps of fewer than 8 samples, unless these
        are sequences. Also from the start: at a period of which 6 fit into 64, 128 or 256 log
        norms, put side by side, the place within the period explains more than half of the scatter,
        beyond chance (6 standard deviations), and the largest is above 10 times the smallest; or 5
        single norms of 256 are above 10 times the median and 8 robust standard deviations.
        Direction: of 64 cosines of a gradient to the one before it nine in ten are above 0.98 or
        below -0.98, and of all 15 % to 85 % the latter. Over after 64 steps without it.

    Severity:
        Warning; info for losses that change their sign, whose gradient has no lasting size, and
        where at least three of four large norms (3 times the median of 256) are of steps whose
        targets scatter more than nine tenths of those before (`target_deviance`), or this scatter
        explains more than half of that of the log norms, as it has done since the training began;
        and for directions where the inputs are not large (`input_rms` above 30).

    Evidence:
        `scatter_before`, `scatter`, `lr_before`, `lr`; of what recurs `period` (observations, 0 for
        none), `factor` and `share` (of the observations that are large). Of direction `share`,
        `turns` (share of cosines near -1) and `input_rms`.

    Source:
        The scatter of a mean of B samples goes with 1 over the root of B (McCandlish et al. 2018):
        a loader that gives the same sample many times was found 20 to 36 steps after it began.
        Healthy runs, also of single samples, have none. Epoch folding: Leahy et al. (1983).
    """

    kinds = ("gradient.oscillating",)
    of_one_task = True
    effects = (
        Rule(
            root=("gradient.oscillating",),
            root_key="line",
            consequence=(
                "lr.too_high",
                "loss.",
                "update.ratio",
                "gradient.exploding",
                "batch.noise",
            ),
            earliest=-EPISODE,
            same_ranks=False,
            why="one combination of the parameters decides every step",
        ),
    )
    needs = ("grad_norm",)
    wants = (
        "grad_norm_preclip",
        "lr",
        "loss",
        SERIES,
        *one_line.SERIES,
    )

    policy: OscillatingPolicy

    def reaches(self) -> tuple[Reach, ...]:
        """Measurements in a row, of a gradient that goes on jumping."""
        policy = self.policy
        most = policy.back + (policy.in_a_row - 1) * policy.stride
        return (Reach(("grad_norm", "grad_norm_preclip"), most, LASTS, moves="from zero"),)

    def start(self) -> OscillatingState:
        """Nothing seen yet."""
        back = self.policy.back
        line = one_line.OneLine(self.policy)
        return OscillatingState(deque(maxlen=back), deque(maxlen=3 * back), Watch(back), line)

    def advance(self, window: Window, state: OscillatingState) -> Outcome:
        """Takes the norms one by one; a norm of 0 has no logarithm and is left out."""
        state.targets.take(window)
        state.tokens_from = min(state.tokens_from, first_tokens(window))
        posted = rank_rows(window, "grad_norm")[0].tolist()
        sizes = dict(zip(posted, effective_sizes(window, "grad_norm").tolist(), strict=True))
        for step, row in together(window, *self.needs, *self.wants[:3], *one_line.SERIES):
            state.line.push(step, row)
            state.tokens |= step >= state.tokens_from
            state.sizes.push(sizes.get(step, math.nan) * len(window.ranks))
            state.signed |= row.get("loss", 0.0) < 0
            if "lr" in row:
                state.rates.append(row["lr"])
            norm = row.get("grad_norm_preclip", row.get("grad_norm", math.nan))
            if not (math.isfinite(norm) and norm > 0):
                continue
            state.total += 1
            state.norms.append((step, math.log(norm)))
            state.longest.append((step, math.log(norm)))
            if state.recurring.push(step, math.log(norm)) and state.recurring.found:
                self._recur(step, state, state.recurring.found)
            if len(state.norms) == self.policy.back and state.total % self.policy.stride == 0:
                self._judge(step, state)
        findings = tuple(_finding(e) for e in state.watch.take(window.last_step))
        findings += tuple(one_line.finding(e) for e in state.line.watch.take(window.last_step))
        return Outcome({"gradient.oscillating": _check(state, self.policy)}, findings)

    def _judge(self, step: int, state: OscillatingState) -> None:
        scatter = float(np.std(np.diff([norm for _, norm in state.norms]))) / math.sqrt(2)
        usual = median(state.earlier)
        high = (
            len(state.earlier) >= self.policy.earlier
            and scatter > self.policy.factor * usual
            and scatter > self.policy.least
            and self._lasts(state, usual)
            and (state.tokens or not state.sizes.usual < SINGLE)
        )
        state.above = state.above + 1 if high else 0
        if not high:
            state.earlier.append(scatter)
        if state.above < self.policy.in_a_row:
            if state.recurring.found is None:
                state.watch.good(step)
            return
        rates = list(state.rates) or [math.nan]
        facts = Jumps(usual, scatter, rates[0], rates[-1], state.signed)
        episode = state.watch.bad(step, facts, first_step=_onset(state, usual))
        episode.facts.now = max(episode.facts.now, scatter)
        episode.facts.odd_targets = _of_targets(step, state)

    def _lasts(self, state: OscillatingState, usual: float) -> bool:
        """Whether it is so without the single norm that lies furthest out, too."""
        norms = np.array([norm for _, norm in state.norms])
        others = np.delete(norms, np.argmax(np.abs(norms - np.median(norms))))
        scatter = float(np.std(np.diff(others))) / math.sqrt(2)
        return scatter > max(self.policy.factor * usual, self.policy.least)

    def _recur(self, step: int, state: OscillatingState, found: Recurrence) -> None:
        scatter = float(np.std(np.diff([norm for _, norm in state.norms]))) / math.sqrt(2)
        rates = list(state.rates) or [math.nan]
        facts = Jumps(median(state.earlier), scatter, rates[0], rates[-1], state.signed)
        episode = state.watch.bad(step, facts, first_step=found.first_step)
        episode.facts.recurs = found
        episode.facts.odd_targets = not found.period and _of_targets(step, state)


def _of_targets(now: int, state: OscillatingState) -> bool:
    """Whether the large norms of the last 256 come of odd targets that the data have had always.

    Large is what is 3 times the median or more. Of targets that have nothing to do with it a tenth
    is odd: three of four have a chance of less than 1 in 250. Or, where outliers are in many
    batches, the scatter of the targets explains more than half of that of the norms.
    """
    middle = median([norm for _, norm in state.longest])
    large = [step for step, norm in state.longest if norm > middle + math.log(3)]
    known = {step: state.targets.odd(step) for step in large}
    odd = [step for step, is_odd in known.items() if is_odd]
    others = sum(is_odd is False for is_odd in known.values())
    if state.targets.explained(state.longest) > _EXPLAINED:
        odd = [step for step, is_odd in known.items() if is_odd is not None]
        others = 0
    return len(odd) >= max(3, 3 * others) and state.targets.of_data(odd, now)


def _onset(state: OscillatingState, usual: float) -> int:
    """The first step in the window that jumps by more than twice what two usual norms would."""
    norms = list(state.norms)
    jumps = (
        step
        for (_, old), (step, new) in zip(norms, norms[1:], strict=False)
        if abs(new - old) > 4 * math.sqrt(2) * usual
    )
    return next(jumps, norms[0][0])


def _check(state: OscillatingState, policy: OscillatingPolicy) -> Check:
    need = policy.back + (policy.earlier + 1) * policy.stride
    if state.total < need:
        return too_few(state.total, "gradient norm", need)
    scatter = number(state.earlier[-1] if state.earlier else math.nan)
    return Check.ok(f"The logarithm of the gradient norm scatters by {scatter}, as before.")


def _finding(episode: Episode[Jumps]) -> Finding:
    facts = episode.facts
    fewer = (facts.now / facts.before) ** 2 if facts.before else math.inf
    title = (
        f"The gradient norm jumps by a factor of {number(math.exp(facts.now))} from step to step"
    )
    reported = {
        "scatter_before": facts.before,
        "scatter": facts.now,
        "lr_before": facts.lr_before,
        "lr": facts.lr_now,
    }
    evidence = {name: value for name, value in reported.items() if math.isfinite(value)}
    if facts.recurs is not None and not facts.odd_targets:
        title, cause, remedy = facts.recurs.title, facts.recurs.cause, facts.recurs.remedy
        evidence |= {
            "period": facts.recurs.period,
            "factor": facts.recurs.factor,
            "share": facts.recurs.share,
        }
    elif facts.odd_targets:
        cause = (
            "At the steps of large gradients the targets lie far from the others, as they have "
            "done from the start: the data have outliers, which a squared error gives nearly all "
            "of the gradient."
        )
        remedy = (
            "Look at the largest targets: if they are wrong or stand for missing values, leave "
            "them out. Else a robust loss (Huber, absolute error) or clipped gradients."
        )
    elif facts.lr_now > 1.5 * facts.lr_before:
        cause = (
            f"The learning rate rose from {number(facts.lr_before)} to {number(facts.lr_now)}: the "
            "steps jump across the valley."
        )
        remedy = f"Go back to a learning rate of {number(facts.lr_before)}."
    else:
        cause = (
            "No rise of the learning rate was seen. Possibly the gradient is the mean of fewer "
            f"different samples (as if of {number(fewer)} times fewer: the scatter grows with "
            "the root of that), as when a loader gives the same samples again and again, or "
            "batches come from one source each."
        )
        remedy = (
            f"Count the different samples in the batches from step {episode.first_step} on; "
            "shuffle the sources into each batch. If the data are meant to be so, use a larger "
            "batch or accumulate."
        )
    return episode.finding(
        kind="gradient.oscillating",
        severity="info" if facts.signed or facts.odd_targets else "warning",
        title=f"{title} since step {episode.first_step}",
        cause=cause,
        remedy=remedy,
        evidence=evidence,
    )
