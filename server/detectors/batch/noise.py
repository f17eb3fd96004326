"""How much of a gradient is noise, and what that says of the batch size."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import TO_THE_END, Detector, Finding, Outcome, Reach
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.noise_scale import (
    ABOVE,
    KEEP,
    SAME,
    estimates,
    of_a_mean,
)
from rankscope.server.detectors.mechanisms.statistics import Progress, mean_over_ranks, rank_rows
from rankscope.server.detectors.mechanisms.wording import count, number, percent, sentences
from rankscope.server.detectors.policy import Count, Observations, Policy, Share, Times
from rankscope.server.window import Check, Window

# Steps from one sample to the next.
_STRIDE = 10


@dataclass(frozen=True, slots=True)
class NoisePolicy(Policy):
    """Thresholds of `batch.noise`.

    Attributes:
        factor: ratio of noise scale and batch, either way, from which on it is reported.
        held: the same ratio, down to which a reported one goes on.
        in_a_row: consecutive samples, 10 steps apart, at which the ratio has to be reached.
        extreme: noise scale over the batch from which on it is a warning.
        evidence: steps with the gradient norms of all ranks that are needed before anything is
            judged.
        unlearned: loss as a share of the loss at the start, above which much is left to be learned.
        min_gain: share of the loss that has to be gained for the model to be learning.
        learned: accuracy above which something was learned.
        keep: weight that moving means keep from one step to the next.
        recent: number of most recent losses and accuracies averaged.
    """

    factor: Times = 10.0
    held: Times = 5.0
    in_a_row: Count = 3
    extreme: Times = 100.0
    evidence: Observations = 100
    unlearned: Share = 0.5
    min_gain: Share = 0.05
    learned: Share = 0.6
    keep: Share = KEEP
    recent: Observations = 50


@dataclass(slots=True)
class Noise:
    """What was seen: the noise scale and the batch in samples (or in parts of a rank), progress."""

    scale: float
    batch: float
    ranks: int
    counted: bool
    gained: float
    accuracy: float


@dataclass(slots=True)
class NoiseState:
    """What `batch.noise` remembers: moving means of what the gradient and its noise are.

    Attributes:
        seen, unequal: steps with the norms of all ranks; others at which the ranks had no one norm
            of the reduced gradient: there is no mean of theirs.
        signal, noise: means of the estimates of |G|^2 and of tr(Sigma), weighted.
        big, small: means of the squared norms themselves.
        weight: that has gone into them.
    """

    recent: deque[float]
    accuracies: deque[float]
    seen: int = 0
    unequal: int = 0
    signal: float = 0.0
    noise: float = 0.0
    big: float = 0.0
    small: float = 0.0
    weight: float = 0.0
    batch: float = math.nan
    counted: bool = False
    ranks: int = 0
    progress: Progress = field(default_factory=Progress)
    since: list[int] = field(default_factory=list)
    watch: Watch[Noise] = field(default_factory=lambda: Watch(clear_after=5 * _STRIDE))

    @property
    def scale(self) -> float:
        """The noise scale in samples; infinite where every gradient drowns in noise."""
        if not self.weight:
            return math.nan
        return self.noise / self.signal if self.signal > 0 else math.inf


class BatchNoise(Detector[NoiseState]):
    """How many samples a batch would need for its gradient to be as much signal as noise.

    Far below that number more samples a step are nearly free progress; far above it they are
    wasted. The answer for a run says the number, whether or not it is far from the batch.

    Statistic:
        With b samples on each of R ranks and B = R b: |G|^2 = (B |g|^2 - b |g_r|^2) / (B - b) and
        tr(Sigma) = (|g_r|^2 - |g|^2) / (1/b - 1/B), of the gradient g after the reduction and the
        ranks' own g_r before it. Moving means of both (0.98), of 100 steps or more at which all
        ranks posted their own norm; the noise scale is tr(Sigma) / |G|^2. Norms that cannot be of a
        mean and its parts (clipped, summed or compressed gradients) are not judged.

    Severity:
        Info where the noise scale is more than 10 times the batch while the loss is above half of
        its start, or less than a tenth of it, at 3 consecutive samples, 10 steps from one to the
        next, and up to half as far from it. Warning where it is more than 100 times the batch, the
        loss has gained less than 5 % and the accuracy is posted and 0.6 or less: single steps then
        go nowhere.

    Evidence:
        `noise_scale`, `batch` (samples; of a rank's batch where samples are not reported), `ranks`,
        `steps_factor` and `samples_factor`: what this batch costs, against the least.

    Source:
        McCandlish, Kaplan, Amodei et al. (2018), An Empirical Model of Large-Batch Training,
        appendix A.1: steps grow by 1 + noise/B, samples by 1 + B/noise.
    """

    kinds = ("batch.noise",)
    needs = ("grad_norm", "grad_norm_local")
    wants = (
        "grad_norm_preclip",
        "clip_coefficient",
        "amp_scale",
        "samples",
        "loss",
        "accuracy",
    )
    min_ranks = 2

    policy: NoisePolicy

    def reaches(self) -> tuple[Reach, ...]:
        """Sizes of gradients that are not zero."""
        return (Reach(("grad_norm_local",), self.policy.evidence, TO_THE_END, moves="from zero"),)

    def start(self) -> NoiseState:
        """Nothing seen yet."""
        recent = self.policy.recent
        return NoiseState(deque(maxlen=recent), deque(maxlen=recent))

    def advance(self, window: Window, state: NoiseState) -> Outcome:
        """Takes the norms of every step at which all ranks have reported theirs."""
        losses = dict(_means(window, "loss"))
        accuracies = dict(_means(window, "accuracy"))
        one = _of_one_gradient(window)
        norms = {}
        for step, local, row in _norms(window):
            if step in one:
                norms[step] = local, row
            else:
                state.unequal += 1
        for step in sorted({*losses, *accuracies, *norms}):
            loss = losses.get(step, math.nan)
            if math.isfinite(loss):
                state.progress.push(step, loss)
                state.recent.append(loss)
            if math.isfinite(accuracies.get(step, math.nan)):
                state.accuracies.append(accuracies[step])
            if step in norms:
                self._take(step, *norms[step], state)
        findings = tuple(_finding(e, self.policy) for e in state.watch.take(window.last_step))
        return Outcome({"batch.noise": _check(state, self.policy)}, findings)

    def _take(
        self, step: int, small: float, row: tuple[float, float, int], state: NoiseState
    ) -> None:
        big, samples, ranks = row
        state.counted = math.isfinite(samples)
        part = samples if state.counted else 1.0
        state.batch, state.ranks = part * ranks, ranks
        state.seen += 1
        keep = self.policy.keep
        signal, noise = estimates(small, big, ranks=ranks, part=part)
        for name, value in (("signal", signal), ("noise", noise), ("big", big), ("small", small)):
            setattr(state, name, keep * getattr(state, name) + (1 - keep) * value)
        state.weight = keep * state.weight + (1 - keep)
        if state.seen >= self.policy.evidence and state.seen % _STRIDE == 0:
            self._judge(step, state)

    def _judge(self, step: int, state: NoiseState) -> None:
        policy = self.policy
        accuracy = float(np.mean(state.accuracies)) if state.accuracies else math.nan
        facts = Noise(
            state.scale, state.batch, state.ranks, state.counted, _gained(state), accuracy
        )
        known = state.watch.current
        limit = policy.held if known is not None and known.holding else policy.factor
        factor = facts.scale / facts.batch
        # What has been learned leaves noise alone.
        low = factor > limit and _level(state) > policy.unlearned
        if not _sound(state) or not (low or factor < 1 / limit):
            state.since.clear()
            state.watch.good(step)
            return
        state.since.append(step)
        if len(state.since) >= policy.in_a_row:
            first = state.since[0]
            del state.since[1 : -policy.in_a_row]
            state.watch.bad(step, facts, first_step=first).facts = facts


def _means(window: Window, metric: str) -> Iterator[tuple[int, float]]:
    steps, means = mean_over_ranks(window, metric)
    yield from zip(steps.tolist(), means.tolist(), strict=True)


def _norms(window: Window) -> Iterator[tuple[int, float, tuple[float, float, int]]]:
    """Steps, mean squared norm of the ranks' own gradients, that of the mean, samples, ranks."""
    whole, clip, scale, samples, before = (
        dict(_means(window, name))
        for name in ("grad_norm", "clip_coefficient", "amp_scale", "samples", "grad_norm_preclip")
    )
    if len(window.ranks) < max(window.world_size, 2):
        return
    steps, rows = rank_rows(window, "grad_norm_local")
    # In order, so that renumbered ranks give the same bits; NaN where one does not report.
    squares = np.add.reduce(np.sort(rows, axis=1) ** 2, axis=1) / max(rows.shape[1], 1)
    for step, square in zip(steps.tolist(), squares.tolist(), strict=True):
        norm = before.get(step)
        if norm is None:
            norm = (
                whole.get(step, math.nan) / clip.get(step, 1.0) if clip.get(step, 1.0) else math.nan
            )
        of = scale.get(step, 1.0)
        if of > 0 and math.isfinite(square / of / of) and math.isfinite(norm * norm):
            reported = samples.get(step, math.nan)
            yield step, square / of / of, (norm * norm, reported, rows.shape[1])


def _of_one_gradient(window: Window) -> frozenset[int]:
    """Steps at which all ranks have one norm after the reduction, as one gradient has.

    Ranks that hold parts of a model (tensor parallelism) work on one batch, and ranks that reduce
    nothing have gradients of their own: neither is a mean over parts of a batch.
    """
    same: dict[int, bool] = {}
    for name in ("grad_norm", "grad_norm_preclip"):  # what is posted before clipping counts
        steps, rows = rank_rows(window, name)
        if not len(steps):
            continue
        high, low = np.fmax.reduce(rows, axis=1), np.fmin.reduce(rows, axis=1)
        with np.errstate(invalid="ignore"):  # infinite ones are of no use for a noise scale
            alike = high - low <= SAME * high
        same |= dict(zip(steps.tolist(), alike.tolist(), strict=True))
    return frozenset(step for step, is_same in same.items() if is_same)


def _sound(state: NoiseState) -> bool:
    """Whether the norms can be those of a mean and of what went into it."""
    return state.small > 0 and bool(of_a_mean(state.big / state.small, state.ranks))


def _unsound(state: NoiseState) -> str:
    if not state.small > 0:
        return "All gradients are 0."
    share = state.big / state.small
    if ABOVE <= share < 1.1:
        return "The ranks' gradients are all the same: nothing in them is noise."
    return (
        f"The reduced gradient's squared norm is {number(share)} times that of the ranks' own, "
        "which no mean of them has: it is clipped by hand, summed or compressed."
    )


def _gained(state: NoiseState) -> float:
    start = state.progress.start
    return (
        (start - float(np.mean(state.recent))) / abs(start) if state.recent and start else math.nan
    )


def _level(state: NoiseState) -> float:
    """The loss now over that of the start; 0 for losses that change their sign."""
    gained = _gained(state)
    lowest = min(state.recent, default=0.0)
    return 1.0 - gained if math.isfinite(gained) and lowest > 0 else 0.0


def _severity(facts: Noise, policy: NoisePolicy) -> str:
    extreme = facts.scale > policy.extreme * facts.batch and facts.gained < policy.min_gain
    # A model that was trained before learns little more, and that little is noise.
    extreme &= facts.accuracy <= policy.learned
    return "warning" if extreme else "info"


def _finding(episode: Episode[Noise], policy: NoisePolicy) -> Finding:
    facts = episode.facts
    unit = "samples" if facts.counted else "times what one rank has"
    scale, batch = number(facts.scale), number(facts.batch)
    steps = 1 + facts.scale / facts.batch
    samples = 1 + (facts.batch / facts.scale if facts.scale > 0 else math.inf)
    if facts.scale > facts.batch:
        title = f"Gradients are mostly noise: they need {scale} {unit}, and the batch has {batch}"
        cause = (
            f"At the noise scale, {scale} {unit}, a step is as much signal as noise. With {batch} "
            f"it takes {number(steps)} times as many steps as with batches without noise, and "
            f"twice the batch nearly halves that."
        )
        if not math.isfinite(facts.scale):
            title = (
                f"No gradient can be distinguished from its noise with batches of {batch} {unit}"
            )
            cause = "The ranks' gradients have less in common than noise alone would give them."
        remedy = (
            "Accumulate over more micro-batches, or use more ranks or larger batches, and raise "
            "the learning rate with them (in proportion for SGD, with the root for Adam), until "
            "the batch is near the noise scale. If the loss does not fall even so, look at the "
            "data and labels: what cannot be learned is all noise."
        )
    else:
        title = f"The batch is more than gradients need: {batch} {unit}, and {scale} are enough"
        cause = (
            f"Beyond the noise scale, {scale} {unit}, more samples hardly make a step better: "
            f"this batch uses {number(samples)} times as many samples as are needed at least."
        )
        remedy = (
            f"Smaller batches, of about {scale}, learn as much from a fraction of the samples, at "
            "the cost of twice the steps; or keep the batch, if it is time and not samples that "
            "counts. The noise scale grows while the loss falls."
        )
    return episode.finding(
        kind="batch.noise",
        severity=_severity(facts, policy),
        title=title,
        cause=sentences(
            cause,
            f"The loss has gained {percent(max(facts.gained, 0.0))}."
            if math.isfinite(facts.gained)
            else "",
        ),
        remedy=remedy,
        evidence={
            "noise_scale": facts.scale,
            "batch": facts.batch,
            "ranks": facts.ranks,
            "steps_factor": steps,
            "samples_factor": samples,
        },
    )


def _check(state: NoiseState, policy: NoisePolicy) -> Check:
    if not state.seen and state.unequal:
        return Check.not_applicable(
            f"The ranks' gradients after the reduction differ in size at all of "
            f"{count(state.unequal, 'step')}: they hold different parts of the model, or reduce "
            "nothing."
        )
    so_far = f"{count(state.seen, 'step')} with the norms of all ranks of {policy.evidence} needed."
    if not state.seen:
        why = (
            "No step has the norms of all ranks' own gradients and of the reduced one: they are "
            "read at sampled steps only, and not under FSDP."
        )
        return Check.missing(why, early=so_far)
    if state.seen < policy.evidence:
        return Check.insufficient(so_far)
    if not _sound(state):
        return Check.not_applicable(_unsound(state))
    unit = "samples" if state.counted else "times a rank's batch"
    return Check.ok(
        f"The gradient noise scale is {number(state.scale)} {unit}; a step has "
        f"{number(state.batch)}."
    )
