"""Ranks whose gradients point against the others' for good: what one learns another unlearns.

Gradients of one and the same task have an inner product of zero (noise) or more, in the mean. Ranks
whose data are unlike pull against each other for a while, until the model has learned what
distinguishes them; then what they have against each other shrinks, as the loss does. Data that
contradict each other (labels of one rank exchanged, targets negated or of other samples) are never
learned: the loss comes to a stand, and what the ranks have against each other stays or grows.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.data.batches import batch_digests
from rankscope.server.detectors.mechanisms.episode import Condition, Episode, Watch
from rankscope.server.detectors.mechanisms.series_by_step import mean_by_step, median
from rankscope.server.detectors.mechanisms.statistics import Spacing, change_point
from rankscope.server.detectors.mechanisms.wording import agree, number, ranks, sentences
from rankscope.server.window import Float64, GradientProducts, Window

# Samples that are taken together, those that show how the ranks began, and blocks of which the
# course is judged: three parts of 32 samples, of which a mean cosine of -0.2 among cosines that
# scatter by 0.2 lies 6 standard errors below zero.
_BLOCK, _BEGIN = 8, 16
_LEAST = 12
# Blocks that are remembered; of more, neighbours are taken together.
_MOST = 48
# Standard errors that the mean cosine has to lie below zero. A run is judged some 100 times and at
# up to 1,024 ranks: 5.5 would do for one false alarm in 1,000 runs.
_CERTAIN = 6.0
# A cosine that small says that a fifth of the gradient's power is against the others' (two ranks:
# their mean keeps less than 0.9 of what independent noise would leave of it). What ranks that share
# out a small data set have against each other once it is learned, b / 2n for batches of b of n
# samples each, stays above it with four batches an epoch or more.
_OPPOSED = -0.12
# How much the cosine has to have fallen since the beginning, and what it may have been then. Unlike
# classes or inputs oppose each other before anything is learned of them (two halves of ten classes:
# -0.3 to -0.7); contradictions show as the rest is learned.
_FALLEN, _UNLIKE = 0.08, -0.15
# Cosine in the beginning from which on the ranks have one task: data that contradict those of the
# others never come to so much. Where it falls later, shards of a small data set are at what they
# cannot have in common, or something has changed, which the loss shows by going up.
_AGREED = 0.5
# The power that a rank has against the others, over that of its gradient in the beginning: what is
# left when a small data set has been learned is less.
_MATERIAL = 0.05
# What it has become from the middle third of the course to the last, and the share of the loss's
# whole way that was made in between: a model that still learns resolves what it can.
_KEEPS, _STANDS = 0.9, 0.2
# Where the power that a rank has against the others has come to that of its whole gradient in the
# beginning, and the cosine is as far below zero as this, nothing needs to stand still: unlike
# shards are told apart with gradients that shrink.
_AS_LARGE, _FAR = 1.0, 2 * _OPPOSED
# Cosine from which on hardly anything is left of the mean, and the share of the first loss that
# has to be gained meanwhile: unlike shards are told apart, ranks that have one class each, too.
_CANCELS, _GAINED = -0.8, 0.05
# Blocks, one after the other, that have to show it: the course has a point at which what a model
# still resolves is at its highest.
_IN_A_ROW = 4
# Of the cosine that opens it, what it may rise to.
_HELD = 0.7
# Share of the way down that the loss goes up again where data of a rank have changed for the worse.
_BACK = 0.25
# Observations of each batch from which on there are few of them; steps that are remembered.
_ANEW, _REMEMBERED = 2, 65_536
# Cosine of the mean gradients of consecutive samples above which no batch is new: noise of new ones
# would have to be less than a fifth of the gradient.
_STEADY = 0.98
# Blocks without it after which it is over.
_CALM = 4
# Comparisons that found the ranks' parameters equal, after which a difference is none by design.
_SYNCHRONOUS = 8


@dataclass(slots=True)
class Opposed:
    """What was seen.

    Attributes:
        ranks: that point against the others.
        world: number of those compared.
        cosine: of theirs to the mean of the others', in the last third of the course; `before` at
            the beginning.
        loss: in the last third.
    """

    ranks: tuple[int, ...]
    world: int
    cosine: float
    before: float
    loss: float


@dataclass(slots=True)
class _Block:
    """Samples that follow each other.

    Attributes:
        first: step of the first of them.
        cosines, their squares, products: sums over the samples, float64 [R] each.
        loss, losses: sum of the ranks' mean loss over all of its steps, and their number.
    """

    first: int
    samples: int
    cosines: Float64
    squared: Float64
    products: Float64
    squares: Float64
    loss: float = 0.0
    losses: int = 0

    def joined(self, other: _Block) -> _Block:
        """With the next one."""
        return _Block(
            self.first,
            self.samples + other.samples,
            self.cosines + other.cosines,
            self.squared + other.squared,
            self.products + other.products,
            self.squares + other.squares,
            self.loss + other.loss,
            self.losses + other.losses,
        )


@dataclass(slots=True)
class OpposedGradients(Condition[Opposed]):
    """Follows where the gradients of the largest class of replicas point.

    Attributes:
        members: the ranks that are compared.
        blocks: the course so far, of blocks of `size` samples; `filling` is the next one.
        begin: the first samples together.
        losses: step and mean over the ranks, the first ones of a run.
        firing: consecutive judgements that found it.
        batches: digests of one rank's, of `batch_count` of them.
        equal: comparisons that found the ranks' parameters equal.
        apart: first step at which they were not, in a job that keeps them equal: gradients of other
            parameters say nothing of the data.
    """

    members: tuple[int, ...] = ()
    blocks: list[_Block] = field(default_factory=list)
    size: int = _BLOCK
    filling: _Block | None = None
    begin: _Block | None = None
    losses: list[tuple[int, float]] = field(default_factory=list)
    batches: set[int] = field(default_factory=set)
    batch_count: int = 0
    firing: int = 0
    equal: int = 0
    apart: float = math.inf
    steady: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST))
    spacing: Spacing = field(default_factory=Spacing)
    watch: Watch[Opposed] = field(default_factory=Watch)

    def take(self, window: Window) -> None:
        """Takes the samples of a window, and judges them block by block."""
        losses = [pair for pair in mean_by_step(window, "loss").items() if math.isfinite(pair[1])]
        self.losses += losses[: _REMEMBERED - len(self.losses)]
        self._read(window)
        cosines = deque(mean_by_step(window, "grad_cosine").items())
        self._compare(window)
        most = max((made.ranks for made in window.gradient_products), key=len, default=None)
        if most is None:
            self.steady.extend(cosine for _, cosine in cosines)
            self._lose(losses)
            return
        if tuple(most.tolist()) != self.members:
            # Others have joined, or gone: what they make of the others' mean is another course.
            self.members, self.blocks, self.size = tuple(most.tolist()), [], _BLOCK
            self.filling = self.begin = None
        for made in window.gradient_products:
            if tuple(made.ranks.tolist()) != self.members or made.step >= self.apart:
                continue
            while cosines and cosines[0][0] <= made.step:
                self.steady.append(cosines.popleft()[1])
            upto = [pair for pair in losses if pair[0] <= made.step]
            self._lose(upto)
            del losses[: len(upto)]
            self._sample(made)
        self.steady.extend(cosine for _, cosine in cosines)
        self._lose(losses)

    def _lose(self, losses: Sequence[tuple[int, float]]) -> None:
        block = self.filling
        if block is not None and losses:
            block.loss += sum(loss for _, loss in losses)
            block.losses += len(losses)

    def _compare(self, window: Window) -> None:
        for compared in window.comparisons:
            if compared.stage != "parameters":
                continue
            if compared.equal:
                self.equal, self.apart = self.equal + 1, math.inf
            elif self.equal >= _SYNCHRONOUS:
                self.apart = min(self.apart, compared.step)

    def _read(self, window: Window) -> None:
        series = batch_digests(window)
        if series is None or not self.members:
            return
        row = int(np.searchsorted(window.ranks, self.members[0]))
        read = series.values[row, series.present[row]].tolist()[: _REMEMBERED - self.batch_count]
        self.batches |= set(read)
        self.batch_count += len(read)

    def _sample(self, made: GradientProducts) -> None:
        cosines = made.cosines
        if not np.isfinite(cosines).all():
            return
        self.spacing.push(made.step)
        one = _Block(made.step, 1, cosines, cosines**2, made.products, made.squares)
        self.filling = one if self.filling is None else self.filling.joined(one)
        if self.filling.samples < self.size:
            return
        self.blocks.append(self.filling)
        self.filling = None
        if self.begin is None and len(self.blocks) * self.size >= _BEGIN:
            self.begin = _together(self.blocks)
        if len(self.blocks) == _MOST:
            pairs = zip(self.blocks[::2], self.blocks[1::2], strict=True)
            self.blocks = [one.joined(other) for one, other in pairs]
            self.size *= 2
        if len(self.blocks) >= _LEAST:
            self._judge(made.step)

    def _judge(self, step: int) -> None:
        self.watch.clear_after = self.spacing.steps(_CALM * self.size)
        known = self.watch.current
        found = self._found(holds=known is not None and known.holding)
        self.firing = 0 if found is None else self.firing + 1
        if found is None:
            self.watch.good(step)
            return
        if not (known is not None and known.holding) and self.firing < _IN_A_ROW:
            return
        self.watch.bad(step, found, first_step=self._since()).facts = found

    def _found(self, *, holds: bool) -> Opposed | None:
        """What the course so far shows; `holds`: it did before."""
        begin, third = self.begin, len(self.blocks) // 3
        middle, now = _together(self.blocks[-2 * third : -third]), _together(self.blocks[-third:])
        if begin is None or not (begin.losses and middle.losses and now.losses):
            return None
        way = begin.loss / begin.losses - now.loss / now.losses
        lately = middle.loss / middle.losses - now.loss / now.losses
        before, mean = begin.cosines / begin.samples, now.cosines / now.samples
        error = np.sqrt(np.maximum(now.squared / now.samples - mean**2, 0.0) / now.samples)
        against = -now.products / now.samples
        opposed = (
            (mean <= (_HELD if holds else 1.0) * _OPPOSED)
            & (mean <= -_CERTAIN * error)
            & (against >= _MATERIAL * begin.squares / begin.samples)
        )
        if not holds:
            cancels = opposed & (np.maximum(mean, before) <= _CANCELS)
            cancels &= way <= _GAINED * abs(begin.loss / begin.losses)
            opposed &= (mean <= before - _FALLEN) & (before > _UNLIKE)
            opposed &= against >= _KEEPS * -middle.products / middle.samples
            large = against >= _AS_LARGE * begin.squares / begin.samples
            opposed &= (lately <= _STANDS * max(way, 0.0)) | (large & (mean <= _FAR))
            if self._since() == self.spacing.first:
                opposed &= before < _AGREED
            opposed |= cancels
        if not opposed.any() or self._repeats():
            return None
        # Half of the ranks and more: nothing shows which of them are wrong.
        who = opposed if 2 * opposed.sum() < len(opposed) else np.ones(len(opposed), dtype=bool)
        top = int(np.argmin(np.where(opposed, mean, np.inf)))
        return Opposed(
            ranks=tuple(rank for rank, is_one in zip(self.members, who, strict=True) if is_one),
            world=len(self.members),
            cosine=float(mean[top]),
            before=float(before[top]),
            loss=now.loss / now.losses,
        )

    def _since(self) -> int:
        """The step at which the loss went up, if it did, else the first one of all.

        What ranks have against each other shows only as the rest is learned, however old it is;
        where it is new, what was learned before does no longer fit.
        """
        steps, values = np.array(self.losses).T
        if len(values) >= 2 * _BEGIN:
            around = np.lib.stride_tricks.sliding_window_view(values, _BLOCK)
            levels = np.median(around, axis=1)
            lowest = np.minimum.accumulate(levels)
            back = np.flatnonzero(levels - lowest > _BACK * (levels[0] - lowest))
            if len(back) and back[0] >= _BEGIN:
                begin = int(max(back[0] - 4 * _BLOCK, 0))
                at, low, high = change_point(values[begin : back[0] + 4 * _BLOCK])
                if high > low:
                    return int(steps[begin + at])
        return self.spacing.first

    def _repeats(self) -> bool:
        """Whether a rank trains on a few batches alone: what these have against each other stays.

        Of halves of a small data set that are learned together, the gradients cancel in the end.
        Where no batch is seen, the mean gradient says it: it is the one of the step before.
        """
        again = len(self.batches) * _ANEW < self.batch_count
        return again or (len(self.steady) >= _BEGIN and median(self.steady) > _STEADY)

    def finding(self, episode: Episode[Opposed]) -> Finding:
        """What is reported of an episode."""
        facts, step = episode.facts, episode.first_step
        who = ranks(facts.ranks)
        alone = len(facts.ranks) < facts.world
        if alone:
            title = f"Gradients of {who} point against the other ranks' since step {step}"
            unknown = ""
        else:
            title = f"Gradients of {who} point against each other since step {step}"
            unknown = "One of them is wrong, or their data differ on purpose: nothing shows which."
        return episode.finding(
            kind="rank.gradient_outlier",
            key="opposed",
            severity="warning",
            title=title,
            ranks=facts.ranks,
            stage="local_gradient",
            cause=sentences(
                f"What {who} {agree(len(facts.ranks), 'computes')} has a cosine of "
                f"{number(facts.cosine)} to the mean of the others' gradients"
                f" ({number(facts.before)} in the beginning), and it does not get less, while the "
                f"loss stands at {number(facts.loss)}: what one rank learns another unlearns. "
                "Gradients of one task have a cosine of zero (noise) or more; unlike shards are "
                "told apart in the course of the training. So these data contradict each other: "
                "labels or targets exchanged, shifted against the inputs, or negated on some rank, "
                "or inputs that the others get differently.",
                unknown,
            ),
            remedy=(
                f"Compare labels, targets and preprocessing of {who}: pass one and the same raw "
                "sample through the loading of each of these ranks, and look at what comes out. "
                "Where ranks have tasks or domains of their own, give every rank some of each."
            ),
            evidence={
                "pattern": "opposed",
                "cosine": facts.cosine,
                "cosine_before": facts.before,
                "loss": facts.loss,
                "observed": episode.seen,
            },
        )


def _together(blocks: Sequence[_Block]) -> _Block:
    whole = blocks[0]
    for block in blocks[1:]:
        whole = whole.joined(block)
    return whole
