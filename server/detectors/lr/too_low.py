"""A learning rate that leaves nothing to learn with."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import TO_THE_END, Detector, Finding, Outcome, Reach
from rankscope.server.detectors.effects import Rule
from rankscope.server.detectors.lr.slow_ranks import SlowRanks
from rankscope.server.detectors.lr.stopped import StoppedSteps
from rankscope.server.detectors.lr.too_low_policy import LowPolicy
from rankscope.server.detectors.mechanisms.configured import finite, parameter_groups
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.path import Path
from rankscope.server.detectors.mechanisms.series_by_step import median, together
from rankscope.server.detectors.mechanisms.statistics import Progress
from rankscope.server.detectors.mechanisms.waiting import too_few
from rankscope.server.detectors.mechanisms.wording import count, if_several, number, percent
from rankscope.server.window import Check, Window

# Losses from one sample to the next.
_STRIDE = 10
# Of the learning rate to what it was 100 observations ago, from which on it is being warmed up.
_RISING = 1.05
# Update, relative to the parameters, below which rounding to 32 bits (6e-8) takes it off the
# largest of them.
_ROUNDING = 1e-6
# `eps` of an adaptive optimizer from which on it counts beside the roots of second moments: 1e-8 is
# usual, 1e-4 is recommended for half precision.
_LARGE_EPSILON = 1e-3
# Those that add it to the root of the second moment, beside which it is meant to be nothing.
_ADAMS = frozenset(("Adam", "AdamW", "NAdam", "RAdam", "Adamax"))


@dataclass(slots=True)
class Slow:
    """What was seen after `steps`; `collapse_step` is -1 for a rate low from the beginning.

    Attributes:
        cosine: of the gradients of consecutive samples, where they show that steps are small.
        explained: share of the deviance then.
    """

    rate: float
    peak: float
    update: float
    first: float
    last: float
    steps: int
    collapse_step: int = -1
    gained_before: float = math.nan
    gained_after: float = math.nan
    cosine: float = math.nan
    explained: float = math.nan


@dataclass(slots=True)
class LowState:
    """What `lr.too_low` remembers.

    Attributes:
        drop: step at which the rate fell, the losses just before, and how many came since.
        lowest: least mean of the last losses so far.
    """

    last: deque[float]
    before: deque[float]
    accuracies: deque[float]
    progress: Progress = field(default_factory=Progress)
    first: list[float] = field(default_factory=list)
    updates: deque[float] = field(default_factory=lambda: deque(maxlen=20))
    path: Path = field(default_factory=Path)
    shares: deque[float] = field(default_factory=lambda: deque(maxlen=100))
    cosines: deque[float] = field(default_factory=lambda: deque(maxlen=100))
    recent_rates: deque[float] = field(default_factory=lambda: deque(maxlen=100))
    rate: float = math.nan
    peak: float = 0.0
    peak_step: int = -1
    rates: int = 0
    signed: bool = False
    drop: int = -1
    drop_losses: tuple[float, ...] = ()
    since_drop: int = 0
    lowest: float = math.inf
    watch: Watch[Slow] = field(default_factory=lambda: Watch(clear_after=_STRIDE))
    slow_ranks: SlowRanks = field(default_factory=SlowRanks)
    stopped: StoppedSteps = field(default_factory=StoppedSteps)


class RateTooLow(Detector[LowState]):
    """The learning rate is too small for anything to be learned, from the start or all at once.

    Statistic:
        From the start: after 200 losses (after 100 where steps to 200 add up to 0.001 of the
        parameters or less, and the rate does not rise) the mean of the last 100 is less than 5 %
        below that of the first 50, and none before was a tenth below it (a rate by which a loss
        fell that has risen again is not too low), the median update of 10 sampled steps or more is
        above 0 and below 1e-5 of the parameters, and the accuracy, where there is one, is 0.6 or
        less. Or it is below 0.02 over the number of steps, and the share of the deviance that the
        answers explain (its median over the last 100) is 0.01 or less, while the rate does not
        rise. Or it is below 5e-4, the loss still falls, less than 0.15 of the deviance is
        explained, and the gradients of consecutive samples, other batches each, have a median
        cosine of 0.25 or more: what they ask for stays the same, since the steps hardly move. Or
        all steps so far (those to the 200th at least) come to less than a tenth of the parameters
        together (a quarter, with a cosine of 0.7 or more), the cosine is as high, and less than
        half of the first losses is gained (and 0.15 of the deviance explained); also at the end of
        a schedule. All at once: it falls to 1 % of its peak or less within 60 losses while the loss
        was falling (by more than 3 % of the progress made over the 60 before) and above a tenth of
        its start; 100 losses later less than an eighth of that has been gained. Steady decay is
        neither: it leaves the loss time to settle. Ranks (key `ranks`): at 64 sampled updates in a
        row the rate of a rank is below 1/300 of the others' median, and its update below 1/50.
        Where no rate is posted (key `stopped`): at 32 sampled steps in a row updates are below a
        thousandth of the 16 before, and the gradient's norm is half of what it was or more.

    Severity:
        Warning; never more than info for losses that change their sign.

    Evidence:
        `lr`, `peak`, `first` and `last` (loss), `update_ratio` where it is posted; of a collapse
        `collapse_step`, `gained_before` and `gained_after`; where gradients show it `cosine` and
        `explained_deviance`. Of ranks `lr_of_others` and `update_ratio_of_others` (medians).

    Source:
        The usual size of updates, 1e-3 of the parameters; a schedule counted in epochs and called
        at every step, or the other way round. Healthy medians lie between 4.4e-5 and 7e-3.
    """

    kinds = ("lr.too_low",)
    needs = ("loss", "lr")
    wants = (
        *("update_ratio", "accuracy", "explained_deviance", "grad_cosine"),
        *("grad_norm", "grad_norm_local"),
    )
    effects = (
        Rule(
            root=("desync.hyperparameters", "desync.config"),
            consequence=("lr.too_low",),
            key="ranks",
            why="a rank's steps are as long as its rate makes them",
        ),
    )

    policy: LowPolicy

    def reaches(self) -> tuple[Reach, ...]:
        """Updates that are not zero, and losses that can change."""
        return (
            Reach(("update_ratio",), self.policy.updates, TO_THE_END, moves="from zero"),
            Reach(("loss",), moves="at all"),
        )

    def start(self) -> LowState:
        """Nothing seen yet."""
        wait = self.policy.wait
        return LowState(deque(maxlen=wait), deque(maxlen=self.policy.before), deque(maxlen=wait))

    def advance(self, window: Window, state: LowState) -> Outcome:
        """Takes the losses with the rates they were made with."""
        for step, row in together(window, *self.needs, *self.wants):
            if math.isfinite(row.get("update_ratio", math.nan)):
                state.updates.append(row["update_ratio"])
                state.path.push(step, row["update_ratio"])
            if math.isfinite(row.get("accuracy", math.nan)):
                state.accuracies.append(row["accuracy"])
            if math.isfinite(row.get("explained_deviance", math.nan)):
                state.shares.append(row["explained_deviance"])
            if math.isfinite(row.get("grad_cosine", math.nan)):
                state.cosines.append(row["grad_cosine"])
            if math.isfinite(row.get("lr", math.nan)):
                self._rate(step, row["lr"], state)
            loss = row.get("loss", math.nan)
            if not math.isfinite(loss):
                continue
            state.signed |= loss < 0
            state.progress.push(step, loss)
            if len(state.first) < self.policy.first:
                state.first.append(loss)
            state.last.append(loss)
            if state.drop >= 0:
                state.since_drop += 1
            else:
                state.before.append(loss)
            if state.progress.count % _STRIDE == 0:
                if not state.path.fresh(step, self.policy.evidence):
                    state.updates.clear()
                self._judge(step, state)
        state.slow_ranks.take(window)
        findings = tuple(
            _finding(e, state, self.policy, window) for e in state.watch.take(window.last_step)
        )
        state.stopped.take(window)
        findings += tuple(state.slow_ranks.findings(window) + state.stopped.findings(window))
        return Outcome({"lr.too_low": _check(state, self.policy)}, findings)

    def _rate(self, step: int, rate: float, state: LowState) -> None:
        state.rates += 1
        state.rate = rate
        state.recent_rates.append(rate)
        if rate >= state.peak:
            state.peak = rate
        # The last step at which the rate was one to learn with: half its peak.
        if rate >= 0.5 * state.peak:
            state.peak_step = state.progress.count
        low = rate <= self.policy.collapsed * state.peak
        if low and state.drop < 0:
            state.drop = step
            state.drop_losses = tuple(state.before)
            state.since_drop = 0
            if state.progress.count - state.peak_step > self.policy.before:
                state.drop_losses = ()  # a decay, and no fall
        elif not low and state.drop >= 0:
            state.drop = -1
            state.before.clear()

    def _judge(self, step: int, state: LowState) -> None:
        steps = step - state.progress.spacing.first + 1
        if len(state.last) == self.policy.wait:
            state.lowest = min(state.lowest, float(np.mean(state.last)))
        found = (
            self._collapsed(steps, state)
            or self._from_the_start(steps, state)
            or self._timid(steps, state)
            or self._hardly_moved(steps, state)
        )
        if found is None:
            state.watch.good(step)
            return
        first_step = (
            found.collapse_step if found.collapse_step >= 0 else state.progress.spacing.first
        )
        state.watch.bad(step, found, first_step=first_step).facts = found

    def _collapsed(self, steps: int, state: LowState) -> Slow | None:
        policy = self.policy
        if state.drop < 0 or state.since_drop < policy.wait:
            return None
        if len(state.drop_losses) < policy.before:
            return None
        third = max(policy.before // 3, 1)
        early = float(np.mean(state.drop_losses[:third]))
        level = float(np.mean(state.drop_losses[-third:]))
        after = list(state.last)
        last = float(np.mean(after[policy.wait // 2 :]))
        # Both halves lie after the fall: the trend just before it is none of the gain.
        gained, later = early - level, float(np.mean(after[: max(policy.wait // 2, 1)])) - last
        falling = (
            gained > policy.falling * state.progress.scale
            and level > policy.level * abs(state.progress.start)
            and gained > 0
        )
        if not falling or later >= policy.gain_after * gained:
            return None
        update = median(state.updates)
        return Slow(state.rate, state.peak, update, level, last, steps, state.drop, gained, later)

    def _from_the_start(self, steps: int, state: LowState) -> Slow | None:
        policy, seen = self.policy, state.progress.count
        if seen < policy.soon or len(state.updates) < policy.updates:
            return None
        first, last = float(np.mean(state.first)), float(np.mean(state.last))
        update = median(state.updates)
        accuracy = float(np.mean(state.accuracies)) if state.accuracies else 0.0
        still = first - last <= self.policy.min_gain * abs(first)
        # What it had reached was lost again by something else.
        still &= first - state.lowest <= 2 * self.policy.min_gain * abs(first)
        # A rate that was high and has come down is the end of a schedule, not its beginning.
        limit = self.policy.small_update
        # A warm-up is on its way to a rate that teaches.
        warm = bool(state.recent_rates) and state.rate > _RISING * state.recent_rates[0]
        # As many steps as the evidence takes will change no more than that, either.
        path = update * steps * max(policy.evidence / seen, 1.0)
        if seen < policy.evidence and (warm or path > policy.negligible):
            return None
        if median(state.shares) <= self.policy.unexplained and not warm:
            limit = max(limit, self.policy.least_path / steps)
        if not (still and 0 < update < limit and accuracy <= self.policy.learned):
            return None
        if state.rate < self.policy.ending * state.peak:
            return None
        return Slow(state.rate, state.peak, update, first, last, steps)

    def _hardly_moved(self, steps: int, state: LowState) -> Slow | None:
        """Whether all steps together, also at the end of a schedule, leave the gradient as it was.

        Judged from `soon` on where they are nearly one direction, and as many steps more will come
        to no more than that, either.
        """
        policy, seen = self.policy, state.progress.count
        known = min(len(state.cosines), state.path.steps)
        if seen < policy.soon or known < policy.updates:
            return None
        mean = state.path.length / state.path.steps
        path = mean * steps
        cosine = median(state.cosines)
        late = list(state.last)[-len(state.first) :]
        first, last = float(np.mean(state.first)), float(np.mean(late))
        warm = state.rate > _RISING * state.recent_rates[0] if state.recent_rates else True
        longer = path * max(policy.evidence / seen, 1.0)
        straight = cosine >= policy.one_direction
        most = policy.straight_path if straight else policy.whole_path
        least = policy.timid_cosine if seen >= policy.evidence else policy.one_direction
        if not (0 < longer < most and cosine >= least) or warm:
            return None
        gained = (first - min(last, state.lowest)) / abs(first) if first else 0.0
        explained = median(state.shares)
        known_already = gained > policy.whole_gain or explained > policy.timid_explained
        if known_already or median(state.accuracies) > policy.learned:
            return None
        facts = Slow(state.peak, state.peak, mean, first, last, steps)
        facts.cosine, facts.explained = cosine, explained
        return facts

    def _timid(self, steps: int, state: LowState) -> Slow | None:
        """Whether gradients ask for the same again and again, since the steps hardly move."""
        policy, half = self.policy, self.policy.wait // 2
        known = min(len(state.cosines), len(state.shares), len(state.updates))
        if state.progress.count < policy.evidence or known < policy.updates:
            return None
        update, cosine = median(state.updates), median(state.cosines)
        explained = median(state.shares)
        losses = list(state.last)
        falls = float(np.mean(losses[half:])) < float(np.mean(losses[:half]))
        warm = state.rate > _RISING * state.recent_rates[0] if state.recent_rates else True
        # The end of a schedule moves little, and is to.
        ends = state.rate < policy.ending * state.peak
        if not (0 < update < policy.timid_update and cosine >= policy.timid_cosine and falls):
            return None
        if warm or ends or explained >= policy.timid_explained:
            return None
        first = float(np.mean(state.first))
        facts = Slow(state.rate, state.peak, update, first, float(np.mean(losses)), steps)
        facts.cosine, facts.explained = cosine, explained
        return facts


def _check(state: LowState, policy: LowPolicy) -> Check:
    if state.progress.count < policy.evidence:
        return too_few(state.progress.count, "finite loss value", policy.evidence)
    rate, peak = number(state.rate), number(state.peak)
    if len(state.updates) < policy.updates:
        return Check.insufficient(
            f"The learning rate, {rate} after {peak}, has not collapsed; too few `update_ratio` "
            f"({len(state.updates)} of {policy.updates}) say whether it was too low from the start."
        )
    return Check.ok(
        f"The learning rate is {rate} after {peak}; a step changes the parameters by "
        f"{number(median(state.updates))} of their size."
    )


def _epsilon(window: Window) -> float:
    """The largest `eps` of an optimizer of Adam's family; 0 for another one."""
    if window.config.get("optimizer") not in _ADAMS:
        return 0.0
    said = (finite(group.get("eps")) for group in parameter_groups(window.config))
    return max((eps for eps in said if eps is not None), default=0.0)


def _finding(episode: Episode[Slow], state: LowState, policy: LowPolicy, window: Window) -> Finding:
    facts = episode.facts
    evidence: dict[str, float] = {
        "lr": facts.rate,
        "peak": facts.peak,
        "first": facts.first,
        "last": facts.last,
    }
    if math.isfinite(facts.update):
        evidence["update_ratio"] = facts.update
    if facts.collapse_step >= 0:
        evidence |= {
            "collapse_step": facts.collapse_step,
            "gained_before": facts.gained_before,
            "gained_after": facts.gained_after,
        }
        title = (
            f"The learning rate fell from {number(facts.peak)} to {number(facts.rate)} at step "
            f"{facts.collapse_step}, and the loss stopped falling at {number(facts.last)}"
        )
        cause = (
            f"In the {policy.before} steps before, the loss fell by "
            f"{number(facts.gained_before)}, in the {policy.wait} after, by "
            f"{number(facts.gained_after)}. Most likely the schedule was given a number in "
            "another unit than it counts in: steps for epochs, "
            f"micro-batches{if_several(window.world_size, 'or ranks')} for steps, or a total "
            "that is too small."
        )
        remedy = (
            f"The schedule ended after {count(facts.collapse_step, 'call')} or so: compare that "
            "number with the total it was given, and call it once for each optimizer step (or "
            f"epoch, as it counts). Go on from step {facts.collapse_step} with "
            f"{number(facts.peak)}."
        )
    else:
        times = policy.usual_update / facts.update
        title = (
            f"The learning rate of {number(facts.rate)} is too low: a step changes the parameters "
            f"by {number(facts.update)} of their size"
        )
        if facts.update < _ROUNDING:
            evidence["below_rounding"] = True
        share = (facts.first - facts.last) / abs(facts.first) if facts.first else 0.0
        cause = (
            f"The loss gained {percent(max(share, 0.0))} over the run so far. Even if all "
            f"{count(facts.steps, 'step')} had one direction they would have changed the "
            f"parameters by {number(100 * facts.steps * facts.update)} % of their size. Updates "
            f"of usual size are {number(times)} times as large."
        )
        if math.isfinite(facts.cosine):
            evidence["cosine"] = facts.cosine
            cause += (
                f" Gradients of consecutive batches have a cosine of {number(facts.cosine)}: they "
                "ask for the same again and again, since the steps hardly move."
            )
        if math.isfinite(facts.explained):
            evidence["explained_deviance"] = facts.explained
            cause += f" {percent(max(facts.explained, 0.0))} of the deviance is explained so far."
        epsilon = _epsilon(window)
        if epsilon >= _LARGE_EPSILON:
            evidence["eps"] = epsilon
            title = (
                f"An eps of {number(epsilon)} keeps the steps small: {number(facts.update)} of the "
                "parameters' size"
            )
            cause += (
                f" The optimizer divides by the root of its second moment plus {number(epsilon)} "
                "(`eps`), which is there to keep from dividing by 0 and is 1e-8 as a rule: where "
                "gradients are smaller than that, steps shrink with them."
            )
        remedy = (
            f"Set `eps` to 1e-8 first. Then, if it stays: raise the learning rate tenfold at a "
            f"time, up to {number(facts.rate * times)}."
            if epsilon >= _LARGE_EPSILON
            else f"Raise the learning rate tenfold at a time, up to {number(facts.rate * times)}, "
            f"at which a step would change the parameters by {number(policy.usual_update)} of "
            "their size. If the rate is meant to be so, look at the gradient: it may be divided "
            f"once too often (by {if_several(window.world_size, 'ranks, ', before='')}"
            "micro-batches, or a mean over tokens)."
        )
    return episode.finding(
        kind="lr.too_low",
        severity="info" if state.signed else "warning",
        title=title,
        cause=cause,
        remedy=remedy,
        evidence=evidence,
    )
