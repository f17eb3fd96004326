"""A learning rate that did not go with the batch, when the batch or the world changed its size."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rankscope.server.detectors.base import TO_THE_END, Detector, Finding, Outcome, Reach
from rankscope.server.detectors.mechanisms.batch_sizes import SERIES, whole_batches
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.series_by_step import median
from rankscope.server.detectors.mechanisms.statistics import Progress, exceeds, mean_over_ranks
from rankscope.server.detectors.mechanisms.wording import count, number, sentences
from rankscope.server.detectors.policy import Count, Observations, Policy, Share, Sigmas, Times
from rankscope.server.window import Check, Window

# Observations from one sample to the next.
_STRIDE = 10
# By the name of its class: optimizers that divide by the size of the gradient, and others.
_ADAPTIVE = (
    *("adam", "adan", "adafactor", "adagrad", "adadelta", "rms", "lamb", "lion", "novograd"),
    *("sophia", "shampoo", "soap", "muon", "prodigy"),
)
_PLAIN = ("sgd", "lars", "momentum", "nesterov")


@dataclass(frozen=True, slots=True)
class MismatchPolicy(Policy):
    """Thresholds of `lr.batch_mismatch`.

    Attributes:
        change: factor by which the batch has to change.
        stable: factor by which batches of one size may differ.
        in_a_row: consecutive batches of the new size that are needed; the last batch of an epoch is
            shorter, and alone.
        apart: factor between the learning rate and what the rule gives, from which on it is
            reported.
        settle: number of learning rates after the change that are needed, and of which the largest
            counts.
        rising: growth of the rate over these, above which it is still being warmed up.
        recent: number of learning rates and losses before and after the change that are compared.
        watched: number of losses after the change within which a worse one is its consequence.
        min_z: smallest rise of the mean loss in standard errors, or of the number of losses above
            the usual one.
        min_rise: smallest rise of the mean loss as a share of the progress made until then.
    """

    change: Times = 1.5
    stable: Times = 1.05
    in_a_row: Count = 8
    apart: Times = 2.0
    settle: Observations = 50
    rising: Share = 0.01
    recent: Observations = 50
    watched: Observations = 300
    min_z: Sigmas = 4.0
    min_rise: Share = 0.1


@dataclass(slots=True)
class Mismatch:
    """A batch that changed its size, and what became of the learning rate.

    Attributes:
        before, after: samples of a step, of all ranks.
        world_before, world_after: ranks.
        rate_before: the last one at the old size.
        rate_after: the largest one since.
        least, most: what the rules give for the new size.
        losses: the last ones at the old size.
        loss_after: their mean at the new size, where it has risen; NaN where it has not.
        progress: made until then, on the loss's own scale.
    """

    before: float
    after: float
    world_before: int
    world_after: int
    rate_before: float
    least: float
    most: float
    losses: tuple[float, ...]
    progress: float
    rate_after: float = math.nan
    loss_after: float = math.nan

    @property
    def loss_before(self) -> float:
        """Mean of the last losses at the old size; NaN for none."""
        return float(np.mean(self.losses)) if self.losses else math.nan

    @property
    def worse(self) -> bool:
        """Whether the loss has risen since."""
        return math.isfinite(self.loss_after)

    @property
    def target(self) -> float:
        """The rate that goes with the new size: the nearest one to what it is, of those that do."""
        return min(max(self.rate_after, self.least), self.most)


@dataclass(slots=True)
class MismatchState:
    """What `lr.batch_mismatch` remembers.

    Attributes:
        sizes: the last batches, step, samples and ranks that read them.
        size: of the batches until now; NaN before there were some of one size.
        world: ranks that read them.
        rates: the last learning rates at that size; `losses` likewise.
        origin: size and rate before the last change: to go back to both is no mismatch.
        change: what is being judged, since step `changed`.
        after: the last learning rates since, of `made`; `losses_after` likewise.
        settled_at: how many had been made when the rate ceased to rise; -1 before.
        waited: losses since.
        last_change: what is known of the last change, when nothing is judged any more.
        unjudged: why it was not.
    """

    rates: deque[float]
    losses: deque[float]
    after: deque[float]
    losses_after: deque[float]
    sizes: deque[tuple[int, float, int]]
    seen: int = 0
    size: float = math.nan
    world: int = 0
    signed: bool = False
    origin: tuple[float, float] | None = None
    progress: Progress = field(default_factory=Progress)
    change: Mismatch | None = None
    changed: int = -1
    made: int = 0
    settled_at: int = -1
    waited: int = 0
    last_change: str = ""
    unjudged: str = ""
    watch: Watch[Mismatch] = field(default_factory=lambda: Watch(clear_after=_STRIDE))


class RateMismatch(Detector[MismatchState]):
    """The batch or the number of ranks changed, and the learning rate did not go with it.

    A job that is started again with half of its ranks, and the same batch on each, takes steps that
    are twice as noisy, at a rate that was chosen for the larger batch.

    Statistic:
        The batch is the samples of all ranks that read batches of their own, at one step. Where 8
        consecutive are alike, and 1.5 times as large as those before or as small, the learning rate
        is held against k, the one size over the other: it should be k times what it was with SGD,
        and the root of k times with optimizers that divide by the size of the gradient (Adam and
        its kin); where the optimizer is not known, anything in between will do, and so will what it
        was where the batch goes back to the size before. What it is after the change is the largest
        of the last 50, once these rise no more (by 1 %), so that a warm-up is over. It is off where
        it is twice as large, or half as large, or more. Examined for 300 losses from then on. Not
        judged where the rate was being warmed up when the batch changed.

    Severity:
        Info: rules of thumb have exceptions, and a rate that is left as it is may be meant
        (a batch that is made larger instead). Warning where it is too large for the batch and the
        loss has risen since: the mean of its last 50 values above that of the 50 before the change
        by more than a tenth of the progress made, and by 4 standard errors (Welch's test), or so
        that 40 of 50 are above their median (a sign test, which losses that grow without bounds
        pass, too). That one lasts until the loss is back. Never for losses below 0.

    Evidence:
        `batch_before`, `batch_after`, `ranks_before`, `ranks_after`, `lr_before`, `lr_after`,
        `lr_expected` (least and most), `loss_before` and `loss_after` where it rose.

    Source:
        Goyal et al. (2017), Accurate, Large Minibatch SGD: the linear rule; Malladi et al. (2022),
        On the SDEs and Scaling Rules for Adaptive Gradient Algorithms: the root. Beyond the noise
        scale (`batch.noise`) neither holds, and less is better.
    """

    kinds = ("lr.batch_mismatch",)
    needs = ("lr", "samples")
    wants = ("loss", *SERIES[1:])

    policy: MismatchPolicy

    def reaches(self) -> tuple[Reach, ...]:
        """Consecutive batches of a new size."""
        return (Reach(("samples",), self.policy.in_a_row, TO_THE_END),)

    def start(self) -> MismatchState:
        """Nothing seen yet."""
        recent, settle = self.policy.recent, self.policy.settle
        return MismatchState(
            deque(maxlen=recent),
            deque(maxlen=recent),
            deque(maxlen=settle),
            deque(maxlen=recent),
            deque(maxlen=self.policy.in_a_row),
        )

    def advance(self, window: Window, state: MismatchState) -> Outcome:
        """Follows the size of the batch, and the rate and the loss with it."""
        optimizer = str(window.config.get("optimizer", ""))
        for step, size, world, rate, loss in _steps(window):
            if math.isfinite(size):
                state.seen += 1
                state.sizes.append((step, size, world))
                self._size(step, optimizer, state)
            # What comes with a batch of another size than is known does not belong to that one.
            usual = self._usual(state)
            if math.isfinite(rate) and usual:
                state.rates.append(rate)
            if math.isfinite(loss):
                state.signed |= loss < 0
                state.progress.push(step, loss)
                state.losses_after.append(loss)
                state.waited += state.settled_at >= 0
                if usual:
                    state.losses.append(loss)
            if state.change is not None and math.isfinite(rate):
                self._rate(step, rate, state.change, state)
        findings = tuple(
            _finding(e, self.policy, signed=state.signed)
            for e in state.watch.take(window.last_step)
        )
        return Outcome({"lr.batch_mismatch": _check(state, self.policy)}, findings)

    def _usual(self, state: MismatchState) -> bool:
        """Whether the last batch is of the size that is known."""
        last = state.sizes[-1][1] if state.sizes else math.nan
        return _similar(last, state.size, self.policy.stable)

    def _size(self, step: int, optimizer: str, state: MismatchState) -> None:
        """Takes note of batches that are all of another size now."""
        policy = self.policy
        sizes = [size for _, size, _ in state.sizes]
        if (
            self._usual(state)
            or len(sizes) < policy.in_a_row
            or not _similar(max(sizes), min(sizes), policy.stable)
        ):
            return
        size, (since, _, world) = median(sizes), state.sizes[0]
        if not _similar(size, state.size, policy.change) and math.isfinite(state.size):
            state.watch.good(step)  # what was said of the change before it
            self._changed(since, size, world, optimizer, state)
        state.size, state.world = size, world

    def _changed(
        self, since: int, size: float, world: int, optimizer: str, state: MismatchState
    ) -> None:
        policy, rates, factor = self.policy, list(state.rates), size / state.size
        rate = median(rates[-policy.in_a_row :])
        origin, state.origin = state.origin, (state.size, rate)
        losses = tuple(state.losses)
        state.change, state.changed, state.last_change, state.unjudged = None, since, "", ""
        state.made, state.settled_at, state.waited = 0, -1, 0
        for series in (state.rates, state.losses, state.after, state.losses_after):
            series.clear()
        if not rate > 0:
            state.unjudged = "no learning rate above 0 is known from before"
        elif rates[-1] > (1 + policy.rising) * rates[0]:
            state.unjudged = "the learning rate was being warmed up"
        else:
            expected = [rate * factor**exponent for exponent in _exponents(optimizer)]
            if origin is not None and _similar(size, origin[0], policy.stable) and origin[1] > 0:
                expected.append(origin[1])
            state.change = Mismatch(
                before=state.size,
                after=size,
                world_before=state.world,
                world_after=world,
                rate_before=rate,
                least=min(expected),
                most=max(expected),
                losses=losses,
                progress=state.progress.scale,
            )

    def _rate(self, step: int, rate: float, change: Mismatch, state: MismatchState) -> None:
        """Looks at what the rate has come to, now and then."""
        policy = self.policy
        state.after.append(rate)
        state.made += 1
        if state.made < policy.settle or state.made % _STRIDE:
            return
        if state.settled_at < 0:
            if state.after[-1] > (1 + policy.rising) * state.after[0]:
                return  # a warm-up
            state.settled_at = state.made
        change.rate_after = max(state.after)
        # Other kinds report a rate of 0.
        large = not exceeds(policy.apart * change.most, change.rate_after)
        small = change.rate_after > 0 and not exceeds(
            policy.apart * change.rate_after, change.least
        )
        full = len(state.losses_after) == policy.recent and bool(change.losses)
        rise = float(np.mean(state.losses_after)) - change.loss_before if full else math.nan
        worse = rise > policy.min_rise * change.progress and (
            _risen(change.losses, tuple(state.losses_after)) > policy.min_z
        )
        change.loss_after = change.loss_before + rise if large and worse else math.nan
        waited = state.waited if state.progress.count else state.made - state.settled_at
        within = waited <= policy.watched
        if (large or small) and (within or change.worse):
            # A copy: a mismatch that is over is reported as it was while it lasted.
            seen = replace(change)
            state.watch.bad(step, seen, first_step=state.changed).facts = seen
        else:
            state.watch.good(step)
        if not within and not change.worse:
            state.change = None
            state.last_change = (
                f"The batch went from {number(change.before)} to {number(change.after)} samples at "
                f"step {state.changed}, and the learning rate went "
                + ("with it." if not (large or small) else "another way, with no harm seen.")
            )


def _similar(one: float, other: float, factor: float) -> bool:
    """Whether two numbers are at most a factor apart; no if one is not known."""
    return one <= factor * other and other <= factor * one


def _steps(window: Window) -> Iterator[tuple[int, float, int, float, float]]:
    """Steps with the samples of all ranks, the number of these, the learning rate and the loss.

    NaN for what is not reported; of the samples, where one of the ranks does not report its own.
    """
    columns = np.full((4, len(window.steps)), np.nan)
    columns[:2] = whole_batches(window)
    for row, metric in enumerate(("lr", "loss"), start=2):
        steps, means = mean_over_ranks(window, metric)
        columns[row, np.searchsorted(window.steps, steps)] = means
    for step, (size, world, rate, loss) in zip(
        window.steps.tolist(), columns.T.tolist(), strict=True
    ):
        yield step, size, 0 if math.isnan(world) else int(world), rate, loss


def _risen(before: Sequence[float], after: Sequence[float]) -> float:
    """How far losses lie above earlier ones, in standard errors, by the test that says more."""
    error = math.sqrt(np.var(before) / len(before) + np.var(after) / len(after))
    means = float(np.mean(after) - np.mean(before))
    usual = median(before)
    above = sum(exceeds(loss, usual) for loss in after)
    return max(
        means / error if error > 0 else 0.0, (2 * above - len(after)) / math.sqrt(len(after))
    )


def _exponents(optimizer: str) -> tuple[float, ...]:
    """Powers of the batch's growth by which the learning rate is to grow."""
    name = optimizer.lower()
    if any(part in name for part in _ADAPTIVE):
        return (0.5,)
    return (1.0,) if any(part in name for part in _PLAIN) else (0.5, 1.0)


def _finding(episode: Episode[Mismatch], policy: MismatchPolicy, *, signed: bool) -> Finding:
    facts, step = episode.facts, episode.first_step
    before, after, rate = number(facts.before), number(facts.after), number(facts.rate_after)
    target = number(facts.target)
    left = abs(math.log(facts.rate_after / facts.rate_before)) < math.log(policy.stable)
    became = f"stayed at {rate}" if left else f"went from {number(facts.rate_before)} to {rate}"
    evidence: dict[str, Any] = {
        "batch_before": facts.before,
        "batch_after": facts.after,
        "ranks_before": facts.world_before,
        "ranks_after": facts.world_after,
        "lr_before": facts.rate_before,
        "lr_after": facts.rate_after,
        "lr_expected": [facts.least, facts.most],
    }
    world = (
        f"It is read by {count(facts.world_after, 'rank')} now, and was by {facts.world_before:,}."
        if facts.world_after != facts.world_before
        else ""
    )
    if facts.least == facts.most:
        rule = f"the usual rule gives {target}"
    else:
        rule = f"the rules give {number(facts.least)} (SGD) to {number(facts.most)} (Adam)"
        if facts.after > facts.before:
            rule = f"the rules give {number(facts.least)} (Adam) to {number(facts.most)} (SGD)"
    large, grown = facts.rate_after > facts.most, facts.after > facts.before
    effect = {
        (True, False): "each step goes further than the noise of so few samples allows.",
        (True, True): "the rate was raised by more than the batch.",
        (False, True): "the additional samples are averaged, and go into shorter steps than they "
        "allow.",
        (False, False): "the rate was cut by more than the batch.",
    }[large, grown]
    cause = sentences(
        world, f"For {number(facts.after / facts.before)} times the batch, {rule}: {effect}"
    )
    severity = "warning" if facts.worse and not signed else "info"
    if facts.worse:
        evidence |= {"loss_before": facts.loss_before, "loss_after": facts.loss_after}
        cause = sentences(
            cause,
            f"The mean of {policy.recent} losses was {number(facts.loss_before)} before, and is "
            f"{number(facts.loss_after)}.",
        )
    back = f"go back to {before} samples a step" + ("" if grown else " (accumulate gradients)")
    if severity == "warning":
        remedy = (
            f"Go back to a checkpoint before step {step}, and go on with a learning rate of "
            f"{target}; or {back}."
        )
    else:
        remedy = (
            f"If that is not meant, set the learning rate to {target}, by a warm-up where it "
            f"rises; or {back}."
        )
    return episode.finding(
        kind="lr.batch_mismatch",
        severity=severity,
        title=(
            f"The batch went from {before} to {after} samples at step {step}, and the learning "
            f"rate {became}"
        ),
        stage="hyperparameters",
        cause=cause,
        remedy=remedy,
        evidence=evidence,
    )


def _check(state: MismatchState, policy: MismatchPolicy) -> Check:
    if not math.isfinite(state.size):
        if state.seen < 5 * policy.in_a_row:
            why = f"{count(state.seen, 'batch size')} so far, of {policy.in_a_row} alike needed."
        else:
            seen = count(state.seen, "batch")
            why = f"Of {seen}, no {policy.in_a_row} consecutive ones are of one size."
        return Check.insufficient(why)
    changed = f"The batch went to {number(state.size)} samples at step {state.changed}"
    if state.unjudged:
        return Check.insufficient(f"{changed}; {state.unjudged}.")
    if state.change is None:
        known = state.last_change or f"The batch has {number(state.size)} samples all along."
        return Check.ok(known)
    if state.settled_at < 0:
        return Check.insufficient(
            f"{changed}; {count(state.made, 'learning rate')} since, of {policy.settle} needed "
            "that rise no more."
        )
    return Check.ok(f"{changed}, and the learning rate with it.")
