"""Inputs or weights that are far larger or smaller than what networks are made for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from rankscope.server.detectors.base import TO_THE_END, Detector, Finding, Outcome, Reach
from rankscope.server.detectors.data import large_outputs, large_targets
from rankscope.server.detectors.data.large_outputs import LargeOutputs
from rankscope.server.detectors.data.large_targets import LargeTargets
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.series_by_step import median, together
from rankscope.server.detectors.mechanisms.statistics import rank_rows
from rankscope.server.detectors.mechanisms.waiting import too_few
from rankscope.server.detectors.mechanisms.wording import number
from rankscope.server.detectors.policy import Count, Number, Policy, Share
from rankscope.server.window import Check, Window

_INPUTS, _WEIGHTS = "first_layer_input_rms", "initial_gain"
_SERIES: Mapping[str, str] = {"data.unscaled": _INPUTS, "weights.unscaled": _WEIGHTS}
_TARGETS = ("output_scale", "target_size", "explained_deviance")
_SPREAD = "input_spread"


@dataclass(frozen=True, slots=True)
class UnscaledPolicy(Policy):
    """Thresholds of `data.unscaled` and `weights.unscaled`.

    Attributes:
        samples: of the inputs' size that are needed: one odd batch does not move the median of
            four.
        largest: root mean square from which on inputs are not scaled: pixels up to 255 have 100,
            features in their own units often 1,000; in 95 healthy runs it was 5 at most.
        smallest: the same below which they were divided once too often: pixels divided by 255
            twice have 2e-3; in 95 healthy runs it was 0.24 at least, and quiet sounds have 0.01.
        least_spread: deviation of the samples of a batch from their mean, as a share of their size,
            below which they are as good as one; in 220 runs of all kinds it was 0.08 at least.
        largest_gain: median gain of the layers from which on each of them makes what it is given
            many times larger: twice the largest of the initialisations in use, which have 0.1 to 2.
            Standard normal weights of 50 inputs have 7.
        smallest_gain: the same below which a ten-thousandth comes through two layers.
    """

    samples: Count = 4
    largest: Number = 30.0
    smallest: Number = 3e-3
    least_spread: Share = 0.01
    largest_gain: Number = 4.0
    smallest_gain: Number = 0.01


@dataclass(slots=True)
class Size:
    """Of one series: the least and the largest of the ranks at each of its first samples.

    Attributes:
        watch: never told that it is over: how inputs and weights are scaled is written in the code.
    """

    least: list[float] = field(default_factory=list)
    most: list[float] = field(default_factory=list)
    first_step: int = -1
    watch: Watch[float] = field(default_factory=Watch)

    def push(self, step: int, sizes: np.ndarray[tuple[int], np.dtype[np.float64]]) -> None:
        """Takes a sample of every rank that has one, float64 [R]."""
        self.first_step = step if self.first_step < 0 else self.first_step
        self.least.append(float(sizes.min()))
        self.most.append(float(sizes.max()))

    def beyond(self, smallest: float, largest: float, *, zero: bool) -> float | None:
        """The size that all ranks are beyond, and `zero` where that counts; None for none."""
        least, most = median(self.least), median(self.most)
        if least > largest:
            return least
        return most if 0 < most < smallest or (zero and most == 0) else None


@dataclass(slots=True)
class UnscaledState:
    """What is remembered, by kind, and of the targets."""

    sizes: dict[str, Size] = field(default_factory=lambda: {kind: Size() for kind in _SERIES})
    targets: LargeTargets = field(default_factory=LargeTargets)
    outputs: LargeOutputs = field(default_factory=LargeOutputs)
    spread: Size = field(default_factory=Size)


class Unscaled(Detector[UnscaledState]):
    """What the model is given or is to put out, or its weights, are far too large or too small.

    Weights are initialised for inputs of mean 0 and size 1. Pixels up to 255, or features in their
    own units, make the first outputs, the loss and the gradient as much larger: units saturate or
    die in the first steps, and the training is spent on shrinking what comes of them. Inputs that
    were divided twice are lost beside the biases. The same comes of weights that begin many times
    too large, layer by layer, and nothing passes through those that begin far too small. And a
    model whose targets are thousands of times what it puts out spends its steps on growing.

    Statistic:
        Inputs: root mean square of the first layer's inputs that are not 0
        (`first_layer_input_rms`), its median over four sampled steps: above 30, or below 0.003, on
        all ranks. Where a normalisation comes before or right after that layer, or the inputs were
        computed by what is trained, the agent posts none. What holds for one rank alone is
        `data.outlier`. Or they are 0, and after 100 steps the answers explain less than 0.05 of the
        deviance. Or the samples of a batch lie closer to their mean than a hundredth of their
        size (`input_spread`, its median over four sampled steps, key `spread`): what differs
        between them is lost in what they have in common. Weights: the median gain of the linear and
        convolutional layers (`initial_gain`) is above 4, or below 0.01, on all ranks; 0 where all
        of them begin at zero. Targets (key `targets`): they have a root mean square above 30
        (`target_size`), and the outputs over them (`output_scale`) were below a hundredth at first
        and are below a tenth after 100 steps, though they grow, or explain less than -0.5 of their
        deviance; of runs that begin at step 0. Outputs (key `outputs`): at the first three samples
        the loss was 5 times that of the best constant answer or more (`explained_deviance`), and
        after 100 steps it is less, but still 1.5 times that.

    Severity:
        Warning.

    Evidence:
        `spread`; `size`, and the medians of the least and of the largest of the ranks, `least` and
        `most`. Of targets `first` and `last`, outputs over targets, `steps`, their
        `size` and `explained_deviance`. Of outputs `first` and `last`, the loss over that of a
        constant answer, and `steps`.

    Source:
        LeCun et al., Efficient BackProp (1998), sections 4.3 and 4.6; Glorot and Bengio (2010); He
        et al. (2015).
    """

    kinds: ClassVar[tuple[str, ...]] = tuple(_SERIES)
    wants: ClassVar[tuple[str, ...]] = (*_SERIES.values(), *_TARGETS, _SPREAD)

    policy: UnscaledPolicy

    def reaches(self) -> tuple[Reach, ...]:
        """Samples of the inputs' size; the weights are read once."""
        return (Reach((_INPUTS,), self.policy.samples, TO_THE_END),)

    def advance(self, window: Window, state: UnscaledState) -> Outcome:
        """Takes the first samples of each."""
        findings: list[Finding] = []
        for kind, series in _SERIES.items():
            size, needed = state.sizes[kind], self._needed(kind)
            for step, row in zip(*rank_rows(window, series), strict=True):
                there = row[np.isfinite(row)]
                if not len(there) or len(size.least) == needed:
                    continue
                size.push(int(step), there)
                if len(size.least) < needed:
                    continue
                # Inputs that are nothing but zeros are a fault where nothing is learned besides.
                zero = kind == "weights.unscaled"
                found = size.beyond(*self._limits(kind), zero=zero)
                if found is not None:
                    size.watch.bad(int(step), found, first_step=size.first_step)
        self._take_spread(window, state.spread)
        findings += [_alike(e) for e in state.spread.watch.take(window.last_step)]
        for step, row in together(window, *_TARGETS):
            scale, target_size, explained = (row.get(name, math.nan) for name in _TARGETS)
            state.targets.push(step, scale, target_size, explained)
            state.outputs.push(step, explained, scale)
            self._take_zeros(step, state)
        last = window.last_step
        for kind, size in state.sizes.items():
            findings += [_finding(kind, e, size) for e in size.watch.take(last)]
        findings += [large_targets.finding(e) for e in state.targets.watch.take(last)]
        findings += [large_outputs.finding(e) for e in state.outputs.watch.take(last)]
        return Outcome({kind: self._check(kind, state) for kind in _SERIES}, tuple(findings))

    def _take_zeros(self, step: int, state: UnscaledState) -> None:
        """Inputs of the first layer that are 0, beside answers worth nothing."""
        inputs = state.sizes["data.unscaled"]
        if len(inputs.most) < self.policy.samples or median(inputs.most) > 0:
            return
        if state.outputs.worthless(step):
            inputs.watch.bad(step, 0.0, first_step=inputs.first_step)

    def _take_spread(self, window: Window, spread: Size) -> None:
        policy = self.policy
        for step, row in zip(*rank_rows(window, _SPREAD), strict=True):
            there = row[np.isfinite(row)]
            if not len(there) or len(spread.least) == policy.samples:
                continue
            spread.push(int(step), there)
            if len(spread.least) == policy.samples:
                most = median(spread.most)
                # Inputs that are all the same, to the last bit, are another fault.
                if 0 < most < policy.least_spread:
                    spread.watch.bad(int(step), most, first_step=spread.first_step)

    def _needed(self, kind: str) -> int:
        return self.policy.samples if kind == "data.unscaled" else 1

    def _limits(self, kind: str) -> tuple[float, float]:
        policy = self.policy
        if kind == "data.unscaled":
            return policy.smallest, policy.largest
        return policy.smallest_gain, policy.largest_gain

    def _check(self, kind: str, state: UnscaledState) -> Check:
        inputs, size = kind == "data.unscaled", state.sizes[kind]
        if not size.least:
            if inputs and state.targets.judged:
                return Check.ok("The outputs have come to the size of the targets.")
            return Check.not_applicable(
                "No first layer was seen that is given data as they are."
                if inputs
                else "No two linear or convolutional layers were seen that are trained.",
                early="The first layer's inputs and the weights have not been seen yet.",
            )
        if len(size.least) < self._needed(kind):
            return too_few(len(size.least), "sample", self._needed(kind))
        least, most = number(median(size.least)), number(median(size.most))
        what = "first layer's inputs have sizes" if inputs else "weights have a median gain"
        return Check.ok(f"The {what} of {least}{f' to {most}' if most != least else ''}.")


def _finding(kind: str, episode: Episode[float], size: Size) -> Finding:
    value = episode.facts
    large = value > 1
    if kind == "data.unscaled":
        title = f"The inputs are far too {'large' if large else 'small'}: their size is "
        cause, remedy = _of_inputs(value, large=large)
    else:
        title = f"The weights begin far too {'large' if large else 'small'}: their median gain is "
        cause, remedy = _of_weights(value, large=large)
    if not value and kind == "data.unscaled":
        title = "The inputs are nothing but zeros: their size is "
        cause, remedy = _of_no_inputs()
    elif not value:
        title = "The weights begin at zero, in every layer: their median gain is "
        cause, remedy = _of_zeros()
    return episode.finding(
        kind=kind,
        severity="warning",
        title=title + number(value),
        cause=cause,
        remedy=remedy,
        evidence={"size": value, "least": median(size.least), "most": median(size.most)},
    )


def _alike(episode: Episode[float]) -> Finding:
    """Samples that hardly differ from each other."""
    value = episode.facts
    return episode.finding(
        kind="data.unscaled",
        key="spread",
        severity="warning",
        title=f"The inputs are nearly the same: they scatter by {number(value)} of their size",
        cause=(
            f"The samples of a batch differ from their mean by {number(value)} of their root mean "
            "square: all have one large part in common, and what distinguishes them is lost beside "
            "it. An offset that was not taken off, a contrast that was taken away (normalised or "
            "divided twice and shifted), or features of which one is far larger than all others "
            "and nearly constant."
        ),
        remedy=(
            "Take off the mean of the training data and divide by their standard deviation, each "
            "once and for each feature (`transforms.Normalize`, `StandardScaler`)."
        ),
        evidence={"spread": value},
    )


def _of_inputs(value: float, *, large: bool) -> tuple[str, str]:
    effect = (
        "the first outputs, the loss and the gradient are as much larger, units saturate or die in "
        "the first steps, and the training is spent on shrinking what comes of them. Pixels that "
        "were not divided by 255, or features in their own units."
        if large
        else "beside its biases the first layer hardly sees them, and hardly learns from them. "
        "Possibly they are scaled twice, in the data set and in a transform."
    )
    return (
        f"What the first layer is given has a root mean square of {number(value)} (zeros aside), "
        f"where weights are initialised for 1: {effect}",
        "Bring the inputs to mean 0 and standard deviation 1, with numbers from the training data "
        "(`transforms.Normalize`, `StandardScaler`), once, or put a normalisation first.",
    )


def _of_no_inputs() -> tuple[str, str]:
    return (
        "What the first layer is given was exactly 0 at each of its first samples, and the answers "
        "explain nothing of the targets: whatever comes after it learns nothing of the data. An "
        "embedding before it whose weights are 0 and not trained, a mask or scale of 0, a buffer "
        "that is never filled, a file that is read as zeros.",
        "Print the inputs as the model gets them, and what each layer makes of them.",
    )


def _of_zeros() -> tuple[str, str]:
    return (
        "All linear and convolutional layers begin at zero: every unit of a layer computes the "
        "same and gets the same gradient, and behind more than one layer none at all. Weights that "
        "were made and not initialised (`torch.zeros`, `to_empty` of a model on the meta device), "
        "or a loop over the parameters that sets biases and weights alike.",
        "Initialise the weights by fan in (`nn.init.kaiming_normal_`, `xavier_uniform_`, "
        "`reset_parameters` of each module), and leave zero to the biases and to the last layer of "
        "a residual branch.",
    )


def _of_weights(value: float, *, large: bool) -> tuple[str, str]:
    effect = (
        "the first outputs and gradients are far too large, units saturate or die, and usual steps "
        "are too small to bring the weights down"
        if large
        else "outputs and gradients fade from layer to layer"
    )
    return (
        "In the median of the linear and convolutional layers the weights' root mean square times "
        f"the root of the inputs of a unit is {number(value)}: so many times what goes in comes "
        "out, layer by layer, where initialisations in use have 0.1 to 2. With weights like that "
        f"{effect}.",
        "Initialise by fan in (`nn.init.kaiming_normal_`, `xavier_uniform_`), or leave torch's own "
        "initialisation; of weights that were loaded, look at what they were saved from.",
    )
