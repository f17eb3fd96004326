"""A gradient that fades on its way to the first layers."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import TO_THE_END, Detector, Finding, Outcome, Reach
from rankscope.server.detectors.gradient import zero, zero_steps
from rankscope.server.detectors.gradient.zero import ZeroGradients
from rankscope.server.detectors.gradient.zero_steps import ZeroSteps
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.samples import LayerSample, layer_samples
from rankscope.server.detectors.mechanisms.series_by_step import median, together
from rankscope.server.detectors.mechanisms.statistics import Progress, change_point
from rankscope.server.detectors.mechanisms.wording import count, listing, number, percent, sentences
from rankscope.server.detectors.policy import Count, Number, Observations, Policy, Share, Steps
from rankscope.server.window import Check, Window

_MAX_NAMES = 64
# Of so many matrices one at the least is faint: a factor of 0.25 a layer, the slope of a sigmoid,
# leaves the first of five below a hundredth.
_DEEP = 5
# Times the ratio of now, and samples in a row, from which on the layers had passed gradients on.
_HAD, _IN_A_ROW = 10.0, 4
# And the ratio itself: below it the first layers hardly had any share.
_FAINT = 0.1
# Samples at either end, and times by which the later ratios are larger, where they rise.
_ENDS, _RISES = 8, 3.0
# Samples among which it is looked for since when they do not.
_MEMORY = 256
# First updates, of which the median shows whether they wrote over what the layers began with.
_FIRST_UPDATES, _LARGE_UPDATE = 20, 0.01


@dataclass(frozen=True, slots=True)
class VanishingPolicy(Policy):
    """Thresholds of `gradient.vanishing`.

    Attributes:
        small: gradient of the first matrix over that of the last, below which it is reported.
        tiny: the same, below which it is critical.
        looks: samples that are needed before anything is judged.
        evidence: losses that are needed before anything is judged.
        soon: the same where both ratios are below `tiny`: no such gradient is one of features that
            are learned late.
        matrices: smallest number of matrices of a model that is judged.
        min_gain: share of the loss that has to be gained for the model to be learning.
        learned: accuracy above which something was learned.
        back: number of most recent samples that are judged.
        first: number of losses at the start that are averaged.
        last: number of most recent losses averaged.
        calm: steps without it after which it is over.
        zero: consecutive gradient norms of exactly 0, from the first step on, after which nothing
            can be learned; as many in a row later are no single steps.
        recurs: number of single steps with a gradient of exactly 0, from which on they are no
            accident.
    """

    small: Number = 1e-2
    tiny: Number = 1e-4
    looks: Count = 16
    evidence: Observations = 200
    soon: Observations = 80
    matrices: Count = 3
    min_gain: Share = 0.05
    learned: Share = 0.6
    back: Count = 32
    first: Observations = 50
    last: Observations = 100
    calm: Steps = 8
    zero: Observations = 8
    recurs: Observations = 3


@dataclass(slots=True)
class Fading:
    """What was seen: norms of the first and of the last matrix, their ratio, what was learned.

    `before` is the largest that the ratio was, in several samples, and `since` the step from which
    on it has been lower; `update` how far the first steps went, relative to the parameters, NaN
    where it is not known.
    """

    ratio: float
    relative: float
    first: tuple[str, float]
    last: tuple[str, float]
    weak: tuple[str, ...]
    matrices: int
    gained: float
    before: float = 0.0
    update: float = math.nan
    since: int = -1

    @property
    def had(self) -> bool:
        """Whether the first layers had their share of the gradient once."""
        return self.before > max(_HAD * self.ratio, _FAINT)


@dataclass(slots=True)
class VanishingState:
    """What `gradient.vanishing` remembers.

    Attributes:
        ratios: gradient norm of the first matrix over that of the last, and the same of the
            gradients over the weights.
        passed: steps and ratios of as many samples as are remembered.
        before: the largest median ratio of four samples in a row.
        updates: the first ones, relative to the parameters.
    """

    ratios: deque[tuple[float, float]]
    late: deque[float]
    accuracies: deque[float]
    watch: Watch[Fading]
    sampled: int = 0
    shallow: bool = False
    signed: bool = False
    names: tuple[str, ...] = ()
    weights: dict[str, float] = field(default_factory=dict)
    begun: int = -1
    passed: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_MEMORY))
    before: float = 0.0
    updates: list[float] = field(default_factory=list)
    progress: Progress = field(default_factory=Progress)
    early: list[float] = field(default_factory=list)
    zero: ZeroGradients = field(default_factory=ZeroGradients)
    zero_steps: ZeroSteps = field(default_factory=ZeroSteps)


class GradientVanishing(Detector[VanishingState]):
    """The first layers get a negligible part of the gradient of the last, and nothing is learned.

    Or no layer gets any: all gradients are exactly zero from the first step on.

    Statistic:
        The gradient norm of the model's first matrix (weights of two dimensions or more that have a
        gradient, in the model's order; 3 or more of them) over that of its last one, and the same
        of gradients over weights: the median of the last 32 samples, of which there are 16 or more,
        is below 1e-2 for both, and a fifth of all are below 1e-2 of the last; and after 200 losses
        the mean of the last 100 is less than 5 % below that of the first 50 (below 1e-4: after 80,
        the last 40 and the first 20, where the ratio does not rise), the accuracy, where there is
        one, 0.6 or less. Where the training makes progress such a ratio is no fault: embeddings
        have one. A loss that is below 0 is no measure of that. And the norm of the whole gradient:
        exactly 0 on all ranks at the first 8 observations and at all since, with a learning rate
        above 0. Zeros after a gradient that is not zero are those of a training that has nothing
        left to learn, or `layer.dead`; a resumed run whose loss is 0 has nothing left to learn
        either. But fewer than 8 of them in a row, with gradients before and after, and a loss above
        0.05 of the median of the 20 before, are batches that were not used; over after 64 steps
        without.

    Severity:
        Warning; critical below 1e-4, and where all gradients are zero. Info for up to two single
        steps without a gradient.

    Evidence:
        `ratio`, `relative_ratio`, `first`, `last` (norms), `matrices`, `gained`, `ratio_before`
        where that was ten times as large; of zeros
        `observed`, `constant_loss`, `loss`, `update_ratio`, `lr`; of single steps `steps`, `count`.

    Source:
        Hochreiter (1991); Glorot and Bengio (2010) for the ratio between layers. AutoTrainer calls
        1e-3 vanishing; healthy networks of up to 8 layers lie between 0.2 and 30, eight layers of
        sigmoids at 4e-5.
    """

    kinds = ("gradient.vanishing",)
    needs = ("loss",)
    wants = ("accuracy", "grad_norm", "lr", "update_ratio")

    policy: VanishingPolicy

    def reaches(self) -> tuple[Reach, ...]:
        """Looks at the layers, and losses that can change."""
        return (
            Reach(("layers/grad_norm",), self.policy.looks, TO_THE_END),
            Reach(("loss",), moves="at all"),
        )

    def start(self) -> VanishingState:
        """Nothing seen yet."""
        policy = self.policy
        return VanishingState(
            ratios=deque(maxlen=policy.back),
            late=deque(maxlen=policy.last),
            accuracies=deque(maxlen=policy.last),
            watch=Watch(policy.calm),
        )

    def advance(self, window: Window, state: VanishingState) -> Outcome:
        """Takes losses and samples in the order of their steps."""
        rows = dict(together(window, "loss", "accuracy", "update_ratio"))
        seen = dict(layer_samples(window, "grad_norm", "weight_norm"))
        for step in sorted({*rows, *seen}):
            self._learn(step, rows.get(step, {}), state)
            found = seen.get(step, {})
            if "weight_norm" in found:
                weights = found["weight_norm"]
                state.weights = dict(zip(weights.names, _whole(weights).tolist(), strict=True))
            if "grad_norm" in found:
                state.zero.observe(found["grad_norm"])
                self._judge(found["grad_norm"], state)
        state.zero.take(window, self.policy.zero)
        findings = [_finding(e, self.policy) for e in state.watch.take(window.last_step)]
        findings += [
            zero.finding(e, state.zero, window.world_size)
            for e in state.zero.watch.take(window.last_step)
        ]
        state.zero_steps.take(window, self.policy.zero)
        findings += [
            zero_steps.finding(e, window.world_size, self.policy.recurs)
            for e in state.zero_steps.watch.take(window.last_step)
        ]
        return Outcome({"gradient.vanishing": _check(state, self.policy)}, tuple(findings))

    def _learn(self, step: int, row: dict[str, float], state: VanishingState) -> None:
        if math.isfinite(row.get("accuracy", math.nan)):
            state.accuracies.append(row["accuracy"])
        update, loss = row.get("update_ratio", math.nan), row.get("loss", math.nan)
        if len(state.updates) < _FIRST_UPDATES and math.isfinite(update):
            state.updates.append(update)
        if not math.isfinite(loss):
            return
        state.signed |= loss < 0
        state.progress.push(step, loss)
        if len(state.early) < self.policy.first:
            state.early.append(loss)
        state.late.append(loss)

    def _judge(self, sample: LayerSample, state: VanishingState) -> None:
        if sample.names != state.names:
            state.names = sample.names
            state.ratios.clear()
            state.passed.clear()
            state.before, state.begun = 0.0, -1
        norms = _whole(sample)
        matrices = [
            place
            for place, shape in enumerate(sample.shapes)
            if len(shape) > 1 and math.isfinite(norms[place]) and norms[place] > 0
        ]
        state.sampled += 1
        state.shallow = len(matrices) < self.policy.matrices
        if state.shallow:
            state.watch.good(sample.step)
            return
        state.begun = sample.step if state.begun < 0 else state.begun
        first, last = (sample.names[matrices[at]] for at in (0, -1))
        ratio = float(norms[matrices[0]] / norms[matrices[-1]])
        sizes = state.weights.get(first, math.nan), state.weights.get(last, math.nan)
        relative = ratio * sizes[1] / sizes[0] if min(sizes) > 0 else ratio
        state.ratios.append((ratio, relative))
        state.passed.append((sample.step, ratio))
        if len(state.passed) >= _IN_A_ROW:
            newest = [r for _, r in list(state.ratios)[-_IN_A_ROW:]]
            state.before = max(state.before, median(newest))
        policy = self.policy
        if not _judged(state, policy):
            return
        typical = median([r for r, _ in state.ratios])
        by_weight = median([r for _, r in state.ratios])
        gained = _gained(state, policy)
        learned = state.accuracies and float(np.mean(state.accuracies)) > policy.learned
        faint = max(typical, by_weight) < policy.small
        weak = [sample.names[m] for m in matrices if norms[m] < policy.small * norms[matrices[-1]]]
        # What fades from layer to layer is faint in several of many: an embedding alone is not.
        deep = _DEEP * len(weak) >= len(matrices)
        if not (faint and deep and gained < policy.min_gain) or learned or state.signed:
            state.watch.good(sample.step)
            return
        known = state.watch.open(sample.step)
        facts = Fading(
            ratio=typical,
            relative=by_weight,
            first=(first, float(norms[matrices[0]])),
            last=(last, float(norms[matrices[-1]])),
            weak=tuple(weak[:_MAX_NAMES]),
            matrices=len(matrices),
            gained=gained,
            before=state.before,
            update=median(state.updates),
            since=_since(state) if known is None else known.facts.since,
        )
        # Nothing was learned before it, either: it began with what led to it.
        state.watch.bad(sample.step, facts, first_step=state.begun).facts = facts


def _since(state: VanishingState) -> int:
    """The step from which on the first layers have had so little."""
    steps, ratios = zip(*state.passed, strict=True)
    at, *_ = change_point(np.log(np.array(ratios)))
    return int(steps[at])


def _judged(state: VanishingState, policy: VanishingPolicy) -> bool:
    losses = state.progress.count
    if len(state.ratios) < policy.looks or losses < policy.soon:
        return False
    if losses >= policy.evidence:
        return True
    tiny = all(median(list(one)) < policy.tiny for one in zip(*state.ratios, strict=True))
    # What begins at zero on purpose (adapters, residual branches) lets more through at each step.
    ratios = [ratio for _, ratio in state.passed]
    rises = median(ratios[-_ENDS:]) > _RISES * median(ratios[:_ENDS])
    return tiny and not rises


def _gained(state: VanishingState, policy: VanishingPolicy) -> float:
    early, late = state.early, list(state.late)
    if state.progress.count < policy.evidence:
        # The same shares of what there is so far.
        early, late = early[: policy.soon // 4], late[-policy.soon // 2 :]
    first, last = float(np.mean(early)), float(np.mean(late))
    return (first - last) / abs(first) if first else 0.0


def _whole(sample: LayerSample) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Each tensor's norm: the largest of the ranks', which are all the same for replicas."""
    known = np.where(np.isnan(sample.values), -1.0, sample.values).max(axis=0)
    return np.where(known < 0, np.nan, known)


def _finding(episode: Episode[Fading], policy: VanishingPolicy) -> Finding:
    facts = episode.facts
    (first, least), (last, most) = facts.first, facts.last
    weak = listing([f"`{name}`" for name in facts.weak], most=4)
    return episode.finding(
        kind="gradient.vanishing",
        severity="critical" if facts.ratio < policy.tiny else "warning",
        title=(
            f"The gradient of `{first}` is {number(facts.ratio)} of that of `{last}`, and nothing "
            "is learned"
        ),
        tensors=facts.weak,
        stage="local_gradient",
        cause=sentences(
            f"Of {count(facts.matrices, 'matrix')} the last has a gradient of norm "
            f"{number(most)}, the first of {number(least)}; less than a hundredth of the last "
            f"one's have {weak}.",
            f"The loss has gained {percent(max(facts.gained, 0.0))} so far: the layers at the end "
            "learn from features that do not change.",
            *_why(facts),
        ),
        remedy=(
            "Begin with a warm-up of some hundred steps or a smaller learning rate, and clip the "
            "gradient. If it comes back with these: normalisation layers and residual connections "
            "between the layers."
            if facts.had
            else "Use ReLU, GELU or SiLU with He's initial weights (tanh with Xavier's), put "
            "normalisation layers or residual connections between the layers, or make the network "
            "less deep. A higher learning rate does not help: the last layers bear it no better."
        ),
        evidence={
            "ratio": facts.ratio,
            "relative_ratio": facts.relative,
            "first": least,
            "last": most,
            "matrices": facts.matrices,
            "gained": facts.gained,
            **({"ratio_before": facts.before} if facts.had else {}),
        },
    )


def _why(facts: Fading) -> tuple[str, ...]:
    if not facts.had:
        return (
            "Each layer multiplies the gradient by its weights and the slope of its activation: "
            "sigmoid and tanh have slopes far below 1 where they are saturated, small initial "
            "weights do the same.",
        )
    large = facts.update > _LARGE_UPDATE
    return (
        f"Before step {facts.since} it was up to {number(facts.before)}: the layers passed the "
        "gradient on as they were made, and what the steps have made of them does not (units that "
        "are saturated or dead, attention that looks at one place, weights that have outgrown a "
        "normalisation).",
        f"The first steps changed the parameters by {number(facts.update)} of their size each, "
        "which few models stand without a warm-up."
        if large
        else "",
    )


def _check(state: VanishingState, policy: VanishingPolicy) -> Check:
    if state.zero.observed and not state.zero.learns:
        why = f"All gradients were exactly zero at {count(state.zero.observed, 'checked step')}."
        return Check.insufficient(why)
    if not state.sampled:
        return Check.missing(
            "No rank posts the gradient norms of its tensors.",
            early="No gradient of a layer has been seen yet.",
        )
    if state.shallow:
        why = f"The model has fewer than {policy.matrices} matrices with a gradient."
        return Check.not_applicable(why)
    if state.signed:
        why = "The loss changes its sign: its value says nothing about what is learned."
        return Check.not_applicable(why)
    if not _judged(state, policy):
        return Check.insufficient(
            f"{count(len(state.ratios), 'sample')} of {policy.looks} at the layers' gradients and "
            f"{count(state.progress.count, 'finite loss value')} of {policy.evidence} needed."
        )
    ratio = number(median([r for r, _ in state.ratios]))
    return Check.ok(
        f"The first matrix has {ratio} times the gradient of the last, and the loss gained "
        f"{percent(max(_gained(state, policy), 0.0))}."
    )
