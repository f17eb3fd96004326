"""Layers that no gradient reaches, units that do nothing, and outputs that are all the same."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import LASTS_SAMPLED, Detector, Finding, Outcome, Reach
from rankscope.server.detectors.layer import collapsed, reconstruction
from rankscope.server.detectors.layer.collapsed import CollapsedState
from rankscope.server.detectors.layer.cut import Cut, cut_finding, never_finding
from rankscope.server.detectors.layer.idle import MAX_NAMES, Idle, idle_finding
from rankscope.server.detectors.layer.learning import Learning, LearningPolicy
from rankscope.server.detectors.layer.silent_rank import SilentRanks
from rankscope.server.detectors.mechanisms.episode import Episode, Watch
from rankscope.server.detectors.mechanisms.samples import LayerSample, layer_samples
from rankscope.server.detectors.mechanisms.series_by_step import together
from rankscope.server.detectors.mechanisms.statistics import rank_rows
from rankscope.server.detectors.mechanisms.waiting import too_few
from rankscope.server.detectors.mechanisms.wording import count, percent
from rankscope.server.detectors.policy import Count, Observations, Share, Steps
from rankscope.server.window import Check, Window

# Consecutive samples at which modules are called without gradients: what a program does it does
# every time.
_BARRED = 8
_METRICS = {"dead_units_lasting": "dead", "saturated_units_lasting": "saturated"}


@dataclass(frozen=True, slots=True)
class DeadPolicy(LearningPolicy):
    """Thresholds of `layer.dead`.

    Attributes:
        evidence: observations that are needed before the number of tensors without a gradient is
            judged.
        varying: the same where that number varies by itself. That the last 4 of 24 are above all
            others happens by chance in one of 10,626 cases.
        in_a_row: consecutive observations with more such tensors than usual, before it is reported.
        never: observations without a gradient after which a tensor never had any.
        large_part: share of the trained elements without any gradient from which on it is a part of
            the model, and no head or branch that is not used.
        idle: share of a module's units that do nothing, above which it is reported.
        still_idle: the same of one that has been: a unit now and then that comes back is no end of
            it.
        nearly_all: the same share, from which on it is critical.
        looks: consecutive samples at which the units did nothing.
        back: number of observations that show how many tensors usually have no gradient.
        alike: scatter of the samples of a batch, relative to their size, below which all are alike.
        calm: steps without it after which it is over.
    """

    evidence: Observations = 8
    varying: Observations = 20
    in_a_row: Observations = 4
    never: Observations = 32
    large_part: Share = 1 / 3
    idle: Share = 0.5
    still_idle: Share = 0.4
    nearly_all: Share = 0.9
    looks: Count = 3
    back: Observations = 256
    alike: Share = 1e-4
    calm: Steps = 8


@dataclass(slots=True)
class DeadState:
    """What `layer.dead` remembers.

    Attributes:
        nothing_left: observations without any gradient at a loss of 0.
        usual: how many tensors had no gradient, at the observations that count as usual.
        above: consecutive observations with more than that, and the first of them.
        alive: names of tensors that have had a gradient; `zeros` of those whose last one was 0;
            `names` and `elements` of all, `silent` of those that had none at any sample.
        least: fewest tensors without a gradient at any observation.
        update: the largest, relative to the parameters, while no unit was idle, and its step.
        spread: largest scatter of the samples of a batch; -1 where it is not known.
        counting: ranks that have counted them.
        barred: of the last samples, how many tensors had modules called without gradients.
        idle: consecutive samples at which most units of a module were idle, by what and module.
    """

    usual: deque[int]
    cut: Watch[Cut]
    never: Watch[Cut]
    units: dict[str, Watch[Idle]]
    outputs: CollapsedState
    rebuilt: reconstruction.ReconstructionState
    learning: Learning
    ranks: SilentRanks
    counted: int = 0
    nothing_left: int = 0
    sampled: int = 0
    above: list[tuple[int, int]] = field(default_factory=list)
    names: tuple[str, ...] = ()
    elements: dict[str, int] = field(default_factory=dict)
    alive: set[str] = field(default_factory=set)
    zeros: set[str] = field(default_factory=set)
    silent: tuple[str, ...] = ()
    least: int = -1
    counting: set[int] = field(default_factory=set)
    first_step: int = -1
    barred: deque[int] = field(default_factory=lambda: deque(maxlen=_BARRED))
    modules: int = 0
    update: tuple[float, int] = (0.0, -1)
    spread: float = -1.0
    idle: dict[tuple[str, str], int] = field(default_factory=dict)
    worst: float = 0.0


class LayerDead(Detector[DeadState]):
    """Layers get no gradient any more, their units do nothing, or all outputs are alike.

    What is detached, computed without gradients or behind units that are all dead stands still,
    and the rest learns around it.

    Statistic:
        The number of tensors without a gradient (none, or zeros), the least of all ranks, is above
        all of the last 256 observations, of which there are 8 or more (20 where it varies by
        itself), at 4 consecutive observations: experts and heads that have no sample now and then
        are among those 256. Which tensors it is comes from the norms of single tensors, at sampled
        steps. Where there is no gradient at all, and no loss either, everything is learned. Ranks:
        one whose `grad_norm` was above 0 at 8 observations or more, at all of the last 64, and is
        exactly 0 at 16 in a row, or at its first 32, while that of another rank is not (at 4 since
        then), and its own loss, if it has one, is not 0 either. Units: more than half (of a module
        that is reported, two fifths) of those of a ReLU module were 0, or of a tanh or sigmoid
        module at the end of their range, for 512 samples or more of every rank that reports them,
        at 3 consecutive samples. Outputs: where a model's vectors are compared with each other and
        not with targets (two or more of a shape in a step, or one whose halves are views of the
        same samples: a median `output_halves` of the first 8 of 0.6 or less; and no
        `explained_deviance`, or targets whose deviance comes to less than a tenth of that at first,
        as outputs that stand for targets have), the median spread of their directions at 16
        consecutive of 100 observations or more is below 0.1, below a quarter of that at first and
        of that of the inputs, and no more than 1.5 times its lowest, while the loss is at its best.
        Of any other output, one a step, it has come to 3 % of what it then was, too, and the loss
        has fallen by a power of that between 0.4 and 2.5: half of it is compared with the other
        half. Or, where an output has the shape of the input, the median spread of 32 of 160 or more
        is below 2 % of the square of `input_spread` and not twice what it was 64 observations
        before, while the last 100 losses do not fall (Mann-Kendall Z above -2.5). Over after 8
        steps (32) without it.

    Severity:
        Warning for tensors without a gradient, critical for more than half of them, or all of a
        rank's; info for those that had none in the first 32 observations (a warning for a third of
        all elements that the optimizer holds, and where modules of them are called under `no_grad`
        at 8 consecutive samples: `tensors_called_without_gradient`). For more than half of a
        module's units dead a warning, once 16 losses after it show harm: the loss is above what it
        was before by 4 standard errors, or has not come 10 % below the first one and does not fall
        (Mann-Kendall Z above -2.5). Where it has, and its median is not 10 % below that before,
        once the 100 losses after it do not fall and their slope is less than a quarter of that of
        the 100 before it (by 2.5 standard errors), or nothing was learned. Until then, and where
        the training learns on, info. Critical from 90 % on; info for saturated ones. Critical for
        outputs that are alike, a warning for those in the shape of the input.

    Evidence:
        `missing` (tensors without a gradient) `of` this many, `usual`, `zeros` (they have one),
        `lost` (where the backward pass did compute gradients), `called_without_gradient`; of units
        `shares` by module, `largest_update` before it, relative to the parameters, and
        `input_spread` where it is posted: of samples that are all alike units have no choice;
        `enough_left` where nothing was learned before either, and a fifth of the units are not
        dead. Of outputs `output_spread` and `output_spread_at_first`, and the `loss` and
        `loss_at_first`; of those in the shape of the input `reconstruction_spread`.

    Source:
        pytorch/pytorch#84911 and the like: a layer that is frozen by a `detach`. Dead units: Lu et
        al. (2020), Dying ReLU and Initialization. One batch of 16 leaves up to half of the units of
        a healthy layer idle, 512 samples do not. Collapsed representations: Chen and He (2021),
        Exploring Simple Siamese Representation Learning.
    """

    kinds = ("layer.dead",)
    wants = (
        *("tensors_without_gradient", "tensors_called_without_gradient", "loss", "grad_norm"),
        *("grad_norm_local", "update_ratio", "input_spread"),
        *collapsed.SERIES,
        *reconstruction.SERIES,
    )

    policy: DeadPolicy

    def reaches(self) -> tuple[Reach, ...]:
        """Consecutive observations with fewer gradients than is usual."""
        counted = "tensors_without_gradient", "layers/grad_norm"
        return (Reach(counted, self.policy.in_a_row, LASTS_SAMPLED),)

    def start(self) -> DeadState:
        """Nothing seen yet."""
        calm = self.policy.calm
        return DeadState(
            usual=deque(maxlen=self.policy.back),
            cut=Watch(calm),
            never=Watch(calm),
            units={what: Watch(calm) for what in _METRICS.values()},
            outputs=CollapsedState(Watch(calm)),
            rebuilt=reconstruction.ReconstructionState(self.policy),
            learning=Learning(self.policy),
            ranks=SilentRanks(self.policy),
        )

    def advance(self, window: Window, state: DeadState) -> Outcome:
        """Goes through counts and samples, step by step."""
        counts = _least(window, "tensors_without_gradient")
        alone = self._alone(window, state)
        losses = _least(window, "loss")
        updates, spreads = _least(window, "update_ratio"), _least(window, "input_spread")
        local = _least(window, "grad_norm_local")
        barred = _least(window, "tensors_called_without_gradient")
        state.barred.extend(int(barred[step]) for step in sorted(barred))
        seen = dict(layer_samples(window, "grad_norm", *_METRICS))
        for step in sorted({*counts, *seen, *updates, *spreads, *losses}):
            if step in losses:
                state.learning.push(losses[step])
            state.spread = max(state.spread, spreads.get(step, -1.0))
            if updates.get(step, 0.0) > state.update[0] and state.units["dead"].current is None:
                state.update = updates[step], step
            found = seen.get(step, {})
            gradients = found.get("grad_norm")
            missing = counts.get(step)
            silent: tuple[str, ...] | None = None
            if gradients is not None:
                silent = self._gradients(gradients, missing, state)
                missing = len(silent) if missing is None else missing
            if missing is not None:
                self._count(
                    window, step, int(missing), silent, losses.get(step), state, alone=step in alone
                )
                if (cut := state.cut.current) is not None and cut.holding:
                    whole = 0 < cut.facts.of <= cut.facts.missing
                    known = cut.facts.computed or local.get(step, 0.0) > 0
                    cut.facts.computed = whole and known
            for metric, what in _METRICS.items():
                if metric in found:
                    self._units(found[metric], what, state)
        outputs = *collapsed.SERIES, *reconstruction.SERIES
        answers = _answers(window)
        for step, row in together(window, "loss", "input_spread", *outputs):
            state.outputs.push(step, row, self.policy)
            if answers:
                state.rebuilt.push(step, row)
        state.ranks.take(window)
        findings = [cut_finding(e, window) for e in state.cut.take(window.last_step)]
        findings += [
            never_finding(e, window, large_part=self.policy.large_part)
            for e in state.never.take(window.last_step)
        ]
        findings += [
            _idle(e, self.policy)
            for what in sorted(state.units)
            for e in state.units[what].take(window.last_step)
        ]
        findings += state.ranks.findings(window.last_step)
        findings += [collapsed.finding(e) for e in state.outputs.watch.take(window.last_step)]
        findings += [reconstruction.finding(e) for e in state.rebuilt.watch.take(window.last_step)]
        return Outcome({"layer.dead": _check(state, self.policy)}, tuple(findings))

    def _alone(self, window: Window, state: DeadState) -> set[int]:
        """Steps at which some ranks count tensors without a gradient, and others do not.

        They may be stages of a pipeline, of which each has parameters of its own.
        """
        steps, rows = rank_rows(window, "tensors_without_gradient")
        posted = np.isfinite(rows)
        state.counting.update(window.ranks[posted.any(axis=0)].tolist())
        counting = np.isin(window.ranks, sorted(state.counting))
        return {int(step) for step in steps[(~posted & counting).any(axis=1)]}

    def _gradients(
        self, sample: LayerSample, missing: float | None, state: DeadState
    ) -> tuple[str, ...]:
        """Names of the tensors that have no gradient on any rank."""
        state.sampled += 1
        if sample.names != state.names:
            # Another set of parameters is trained: what was usual is not any more.
            if state.names:
                state.usual.clear()
                state.above.clear()
                state.least = -1
            state.names = sample.names
            state.elements = dict(zip(sample.names, map(math.prod, sample.shapes), strict=True))
            state.alive &= set(sample.names)
        some = np.any(sample.values > 0, axis=0)
        zero = ~some & ~np.any(np.isnan(sample.values), axis=0)
        # What is not finite is NaN, too, and is no missing gradient.
        silent = zero if missing is not None and zero.sum() >= missing else ~some
        state.alive |= {sample.names[place] for place in np.flatnonzero(some)}
        state.zeros = {sample.names[place] for place in np.flatnonzero(zero)}
        return tuple(sample.names[place] for place in np.flatnonzero(silent))

    def _count(
        self,
        window: Window,
        step: int,
        missing: int,
        silent: tuple[str, ...] | None,
        loss: float | None,
        state: DeadState,
        *,
        alone: bool,
    ) -> None:
        of = len(state.names) or int(window.config.get("parameter_tensors") or 0)
        if of and missing >= of and alone:
            return  # other ranks, which were not sampled, may hold something else
        if of and missing >= of and loss is not None and abs(loss) < self.policy.nothing_left:
            state.nothing_left += 1  # to learn
            return
        state.counted += 1
        if state.least < 0:
            state.first_step = step
        state.least = missing if state.least < 0 else min(state.least, missing)
        if silent is not None:
            state.silent = tuple(name for name in silent if name not in state.alive)
        self._from_the_start(window, step, of, state)
        usual = max(state.usual, default=0)
        open_ = state.cut.current if state.cut.current and state.cut.current.holding else None
        if open_ is not None and missing > open_.facts.usual:
            facts = state.cut.bad(step, open_.facts).facts
            facts.missing, facts.of = missing, of
            _name(facts, silent, state)
            return
        if open_ is not None:
            state.cut.good(step)
            # It was meant: it comes again, as where parts are trained in turn.
            state.usual.append(open_.facts.missing)
            state.usual.append(missing)
            return
        varies = usual > min(state.usual, default=0)
        needed = self.policy.varying if varies else self.policy.evidence
        if len(state.usual) < needed or missing <= usual:
            state.usual.extend(earlier for _, earlier in state.above)
            state.above.clear()
            state.usual.append(missing)
            state.cut.good(step)
            return
        state.above.append((step, missing))
        if len(state.above) < self.policy.in_a_row:
            return
        first = state.above[0][0]
        state.above.clear()
        _name(state.cut.bad(step, Cut(missing, of, usual), first_step=first).facts, silent, state)

    def _from_the_start(self, window: Window, step: int, of: int, state: DeadState) -> None:
        dead = any(watch.open(step) is not None for watch in state.units.values())
        # Each step leaves some out, and each of them has its turn.
        turns = state.sampled >= self.policy.never and not state.silent
        judged = state.counted >= self.policy.never and not (dead or turns)
        if not judged or not state.least or state.least >= of > 0:
            state.never.good(step)
            return
        facts = Cut(state.least, of, 0)
        facts = state.never.bad(step, facts, first_step=state.first_step).facts
        facts.missing, facts.of, facts.names = state.least, of, state.silent[:MAX_NAMES]
        if state.sampled >= self.policy.evidence:
            facts.share = _untrained(window, state)
        facts.zeros = bool(facts.names) and state.zeros.issuperset(facts.names)
        facts.barred = min(state.barred) if len(state.barred) == _BARRED else 0

    def _units(self, sample: LayerSample, what: str, state: DeadState) -> None:
        known = ~np.isnan(sample.values)
        shares = np.where(known, sample.values, np.inf).min(axis=0)
        state.modules = max(state.modules, len(sample.names))
        bad: dict[str, float] = {}
        watch = state.units[what]
        reported = watch.current.facts.shares if watch.current is not None else {}
        for place, name in enumerate(sample.names):
            share = float(shares[place])
            least = self.policy.still_idle if name in reported else self.policy.idle
            if not math.isfinite(share):
                continue
            if what == "dead":
                state.worst = max(state.worst, share)
            times = state.idle.get((what, name), 0) + 1 if share > least else 0
            state.idle[what, name] = times
            if times >= self.policy.looks:
                bad[name] = share
        if not bad:
            watch.good(sample.step)
            return
        episode = watch.bad(sample.step, Idle(what))
        facts = episode.facts
        if what == "dead":
            if episode.seen == 1:
                state.learning.begin()
            facts.learns = state.learning.goes_on(state.update[0], max(bad.values()))
            facts.explains = state.learning.explains
        facts.shares = bad
        facts.update, facts.update_step = state.update
        facts.spread = state.spread if state.spread >= 0 else math.inf
        facts.classes = dict(zip(sample.names, sample.dtypes, strict=True))


def _least(window: Window, metric: str) -> dict[int, float]:
    steps, rows = rank_rows(window, metric)
    known = np.isfinite(rows).any(axis=1)
    least = np.where(np.isfinite(rows), rows, np.inf).min(axis=1, initial=np.inf)
    return {int(s): float(v) for s, v in zip(steps[known], least[known], strict=True)}


def _name(facts: Cut, silent: tuple[str, ...] | None, state: DeadState) -> None:
    """Which tensors it is, once a sample of all of them shows."""
    if silent is None:
        return
    names = [name for name in silent if name in state.alive]
    facts.names = tuple(names[:MAX_NAMES])
    order = list(state.names)
    if names and order[: len(names)] == names and len(names) < len(order):
        facts.before = order[len(names)]


def _untrained(window: Window, state: DeadState) -> float:
    """Share of the elements that the optimizer holds in tensors that never had a gradient."""
    held = window.config.get("optimizer_tensors")
    missing = held.get("missing") if isinstance(held, Mapping) else ()
    others = {str(name) for name in missing} if isinstance(missing, list | tuple) else set()
    sizes = {name: size for name, size in state.elements.items() if name not in others}
    silent = sum(sizes.get(name, 0) for name in state.silent)
    return silent / max(sum(sizes.values()), 1)


def _idle(episode: Episode[Idle], policy: DeadPolicy) -> Finding:
    return idle_finding(
        episode,
        nearly_all=policy.nearly_all,
        alike=policy.alike,
        overwriting=policy.overwriting,
    )


def _answers(window: Window) -> bool:
    """Whether what ranks return in the shape of their inputs is what the loss is taken of.

    A stage of a pipeline returns such things to the next one, and has no loss.
    """
    made, losses = (window.series.get(name) for name in (*reconstruction.SERIES, "loss"))
    if made is None or losses is None:
        return False
    return bool((made.present.any(axis=1) & losses.present.any(axis=1)).any())


def _check(state: DeadState, policy: DeadPolicy) -> Check:
    if not state.counted:
        if state.nothing_left:
            return Check.insufficient(
                "No tensor had a gradient and the loss was 0 at all "
                f"{count(state.nothing_left, 'checked step')}."
            )
        why = "No rank posts `tensors_without_gradient`, or the gradient norms of its tensors."
        return Check.missing(why, early="No gradient has been examined yet.")
    need = policy.evidence + policy.in_a_row
    if state.counted < need:
        return too_few(state.counted, "observation", need)
    idle = (
        f"of {count(state.modules, 'module')} of units at most {percent(state.worst)} were dead"
        if state.modules
        else "activations are not posted, so of units nothing is known"
    )
    return Check.ok(
        f"Every tensor that had a gradient went on having one, at "
        f"{count(state.counted, 'checked step')}; {idle}."
    )
