"""Steps that leave parameters as they were although there are gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rankscope.server.detectors.base import LASTS_SAMPLED, Detector, Finding, Outcome, Reach
from rankscope.server.detectors.effects import BLUR, Rule
from rankscope.server.detectors.mechanisms.configured import finite
from rankscope.server.detectors.mechanisms.episode import Watch
from rankscope.server.detectors.mechanisms.series_by_step import median
from rankscope.server.detectors.mechanisms.statistics import Progress, mean_over_ranks, rank_rows
from rankscope.server.detectors.mechanisms.wording import count
from rankscope.server.detectors.update.lost_gradients import WithoutGradients
from rankscope.server.detectors.update.missing_policy import MissingPolicy
from rankscope.server.detectors.update.never_had_gradients import NoGradient
from rankscope.server.detectors.update.still import (
    Frozen,
    Still,
    Unstepped,
    finding_of,
    frozen_finding,
    moved_finding,
    outside_finding,
    unstepped_finding,
)
from rankscope.server.window import Check, RankLiveness, Window

# Gradient norms that say how large they were at first.
_FIRST = 32
_FROZEN = "parameters.frozen"
# Times that what was frozen has been trained again, after which another time says nothing.
_SWITCHES = 2
_UNSTEPPED, _MOVED = "unstepped", "parameters.moved"
_DURATION, _PASSES = "step_seconds", "micro_steps"
_MAX_NAMES = 500


@dataclass(slots=True)
class MissingState:
    """What is remembered.

    Attributes:
        judged: steps at which an update was due and could be examined.
        digests: model digest of each rank, and its step.
        without: steps at which all gradients were exactly zero.
        still: consecutive steps at which a rank's whole model did not move, and the first of them.
        some: the same for single tensors, all ranks together.
        highest: largest learning rate so far.
        norms: of the first gradients.
        skipped: skipped steps so far, by rank.
        uncovered: what the optimizer leaves out of the model; None where it covers it.
        elsewhere: that it holds none of the model.
        never: samples at which the tensors outside the optimizer were as at first, since
            `never_since`; `moved` once one of them was not.
        carried: samples at which their gradients were not set to zero; -1 once they were.
        frozen: what was trained at first and is no longer.
        switched: rank -> how often what was frozen there was trained again.
        unstepped: rank -> backward passes of a process that has not ended a step yet, or none since
            the last one, and those whose gradients were thrown away.
        told: ranks of which that is reported.
        moving: ranks whose parameters change although no step has ended.
        longest: longest step so far, seconds.
        passes: most backward passes of a step.
        progress: of the loss.
    """

    judged: int = 0
    without: int = 0
    digests: dict[int, tuple[int, int]] = field(default_factory=dict)
    still: dict[int, tuple[int, int]] = field(default_factory=dict)
    some: int = 0
    some_since: int = 0
    highest: float = 0.0
    norms: list[float] = field(default_factory=list)
    skipped: dict[int, float] = field(default_factory=dict)
    known: Mapping[int, Mapping[str, Any]] | None = None
    uncovered: Still | None = None
    never: int = 0
    never_since: int = 0
    moved: bool = False
    carried: int = 0
    elsewhere: Still | None = None
    begun: int = 0
    watch: Watch[Still] = field(default_factory=lambda: Watch(clear_after=16))
    frozen: Watch[Frozen] = field(default_factory=lambda: Watch(clear_after=0))
    switched: dict[int, int] = field(default_factory=dict)
    unstepped: dict[int, Unstepped] = field(default_factory=dict)
    told: set[int] = field(default_factory=set)
    moving: set[int] = field(default_factory=set)
    longest: float = 0.0
    passes: float = 1.0
    progress: Progress = field(default_factory=Progress)
    no_gradient: NoGradient = field(default_factory=NoGradient)
    without_gradients: WithoutGradients = field(default_factory=WithoutGradients)


class UpdateMissing(Detector[MissingState]):
    """The optimizer steps, gradients are there, and parameters stay as they were.

    Statistic:
        At attach: which of the model's trained parameters the optimizer holds. After it: digests of
        the parameters before and after a step, bit by bit; a whole model that did not move at two
        consecutive observations, or tensors with a gradient (1e-4 of the whole or more) that did
        not at four. Steps without a gradient, with one that is not finite, skipped by a loss
        scaler, with a learning rate below a thousandth of the largest so far, or a gradient below
        1e-5 of the first 32 ones (both move less than the last bit) do not count. Over after 16
        steps. And parameters in the optimizer that required a gradient at attach and do not any
        more, after steps have moved them. And processes that call `backward` and never step: 8
        passes or more until their end, or 32 so far of which half were thrown away again
        (`zero_grad`), or 512 (accumulation takes less), reported when no step has ended for 10 s;
        after steps that came, the same when none has ended for 30 s and 10 times the longest of
        them, and so are 512 forward passes of training without a backward pass; or, once it has
        finished, more than half as many passes after its last step as came to one, and than come to
        a step; or 32 passes of a rank while others, heard of since it began, are 32 steps ahead.
        And 32 sampled steps of an optimizer none of whose parameters has had a gradient yet, all of
        them as they were at first; and (key `without gradients`) 8 in a row of a rank at which none
        had one and none moved, after 8 with gradients; or (key `some steps without gradients`) a
        quarter of the last 32 and more, where optimizers do not step in turns.

    Severity:
        Critical where nothing moves or has a gradient, or no step is made at all (info where the
        parameters change all the same, as those of a parameter server's workers do; and where
        something did move before and the optimizer has a stopping rule: LBFGS's tolerances),
        warning for some of the tensors (frozen on the way, too), info where the optimizer leaves
        out a part of the model from the start, or where it is frozen before the first step (which
        may be meant). Warning where it leaves out half of the trained tensors at most, or holds as
        many others in their place, or the first 200 losses have gained less than 5 %, and these
        were seen to get gradients and to stay as they were at 8 samples: no optimizer holds them.

    Evidence:
        `tensors` (that did not move) `of` this many, `whole`, `missing` (names that the optimizer
        does not hold), `observed`; of what it leaves out also `never_updated` (samples at which it
        had gradients and was as at first) and `adds_up` (its gradients are never set to zero). Of
        processes that never step `passes` and `discarded` (backward passes, and those whose
        gradients were thrown away; most of a rank) and `ended` (whether they have ended so).

    Source:
        huggingface/accelerate#2665: an optimizer built before the model was wrapped or moved.
    """

    kinds = ("update.missing",)
    wants = (
        "tensors_unchanged",
        "grad_norm",
        "loss",
        "lr",
        "steps_skipped",
        "tensors_never_updated",
        "gradient_carried_outside",
        "update_ratio",
        _DURATION,
        _PASSES,
    )
    effects = (
        Rule(
            root=("amp.scale_collapse", "gradient.nonfinite", "loss.nonfinite"),
            consequence=("update.missing",),
            key="unstepped",
            earliest=-BLUR,
            same_ranks=False,
            why="steps whose gradient is not finite are skipped",
        ),
    )

    policy: MissingPolicy

    def reaches(self) -> tuple[Reach, ...]:
        """Consecutive steps that leave some tensors as they were."""
        seen = "words/parameters", "tensors_unchanged"
        return (Reach(seen, self.policy.some, LASTS_SAMPLED),)

    def advance(self, window: Window, state: MissingState) -> Outcome:
        """Looks at what the optimizer holds, and at each step's parameters."""
        self._coverage(window, state)
        digest_series = window.digests.get("parameters")
        rows = {name: dict(_by_step(window, name)) for name in self.wants}
        if (durations := window.series.get(_DURATION)) is not None:
            took = durations.values[durations.present]
            state.longest = max(state.longest, float(np.nanmax(took, initial=0.0)))
        if (passes := window.series.get(_PASSES)) is not None:
            made = passes.values[passes.present]
            state.passes = max(state.passes, float(np.nanmax(made, initial=0.0)))
        for at, loss in zip(*mean_over_ranks(window, "loss"), strict=True):
            if np.isfinite(loss):
                state.progress.push(int(at), float(loss))
        for column, step in enumerate(window.steps.tolist()):
            rates = rows["lr"].get(step)
            rate = float(np.nanmax(rates)) if rates is not None else None
            if rate is not None:
                state.highest = max(state.highest, rate)
            norms, skipped = rows["grad_norm"].get(step), rows["steps_skipped"].get(step)
            # Without a rate, nothing says that the step was to move anything.
            small = rate is None or rate <= self.policy.small_rate * state.highest
            due = np.ones(len(window.ranks), dtype=bool) & (not small)
            if norms is None:
                due &= False
            else:
                state.without += bool(np.all(norms == 0))
                with np.errstate(invalid="ignore"):
                    there = np.isfinite(norms) & (norms > 0)
                    if len(state.norms) < _FIRST and there.any():
                        state.norms.append(float(norms[there].mean()))
                    # At its minimum a loss has gradients left that move less than the last bit.
                    least = self.policy.converged * median(state.norms) if state.norms else 0.0
                    due &= there & (norms > least)
            if skipped is not None:
                for row, (rank, value) in enumerate(zip(window.ranks, skipped, strict=True)):
                    if not np.isnan(value):
                        due[row] &= value <= state.skipped.get(int(rank), 0.0)
                        state.skipped[int(rank)] = float(value)
            left = rows["tensors_unchanged"].get(step)
            present = digest_series.present[:, column] if digest_series is not None else due & False
            values = (
                digest_series.values[:, column]
                if digest_series is not None
                else np.zeros(len(due), np.uint64)
            )
            self._step(window, state, step, due, left, present, values)
            self._outside(
                state,
                step,
                rows["tensors_never_updated"].get(step),
                rows["gradient_carried_outside"].get(step),
            )
        self._frozen(window, state)
        findings = [finding_of(e, window) for e in state.watch.take(window.last_step)]
        findings += [frozen_finding(e, window) for e in state.frozen.take(window.last_step)]
        known = state.elsewhere or self._seen_of(state)
        if state.elsewhere is not None:
            findings = []  # that nothing moves follows from it
        if (unstepped := self._unstepped(window, state)) is not None:
            findings.append(unstepped)
        state.no_gradient.take(window)
        if (cut := state.no_gradient.finding(window)) is not None:
            findings.append(cut)
        if known is not None:
            findings.append(outside_finding(known, state.begun, max(window.last_step, state.begun)))
        frozen, of = (
            state.frozen.open(window.last_step),
            window.config.get("parameter_tensors") or 0,
        )
        stopped = frozen.facts.by_rank if frozen is not None else {}
        whole = [rank for rank, tensors in stopped.items() if tensors >= int(of) > 0]
        since = frozen.first_step if frozen is not None else 0
        state.without_gradients.take(window, whole, since)
        findings += state.without_gradients.findings(window)
        return Outcome({"update.missing": _check(state)}, tuple(findings))

    def _unstepped(self, window: Window, state: MissingState) -> Finding | None:
        """Of ranks that call `backward` and never step."""
        liveness = {life.rank: life for life in window.liveness}
        for event in window.events:
            if event.kind == _MOVED:
                state.moving.add(event.rank)
            if event.kind == _UNSTEPPED:
                names = ("passes", "discarded", "forwards", "seconds", "steps", "at_end")
                said = [int(event.data.get(name, 0)) for name in names]
                state.unstepped[event.rank] = Unstepped(event.step, *said)
        found: dict[int, Unstepped] = {}
        for rank, one in tuple(state.unstepped.items()):
            life = liveness.get(rank)
            # What is logged in a step that does not end says nothing of its end; while it goes on,
            # the next one does.
            goes_on = life is not None and life.state == "running"
            # Other ranks do not wait for it.
            left = _furthest(life, window) - one.step >= self.policy.left_behind
            told = goes_on or one.at_end or left or rank in state.told
            if life is None or life.last_step >= one.step + told:
                del state.unstepped[rank]
                continue
            one.ended = life.state != "running"
            if one.steps:
                # More than a group that an accumulation had begun.
                usual = max(self.policy.in_vain * one.steps, 1) * state.passes
                if life.state == "finished" and one.passes > usual:
                    found[rank] = one
                    continue
                least = max(self.policy.without, self.policy.longest_steps * state.longest)
                if one.seconds < least and not left:
                    continue
            elif one.ended:
                found[rank] = one
                continue
            many = max(one.passes, one.forwards if one.steps else 0) >= (
                self.policy.left_behind if left else self.policy.accumulated
            )
            if many or (one.passes and 2 * one.discarded >= one.passes):
                found[rank] = one
        state.told = set(found)
        standing = {rank: one for rank, one in found.items() if rank not in state.moving}
        if standing or not found:
            return unstepped_finding(standing, window) if standing else None
        return moved_finding(found, window)

    def _outside(
        self,
        state: MissingState,
        step: int,
        never: np.ndarray[Any, np.dtype[np.float64]] | None,
        carried: np.ndarray[Any, np.dtype[np.float64]] | None,
    ) -> None:
        """What is seen of tensors that the optimizer does not hold."""
        if never is not None and not np.isnan(never).all():
            # All of them: where one moves, there may be another optimizer that moves them all.
            most = state.uncovered.tensors if state.uncovered is not None else 0
            if np.nanmin(never) < most or not most:
                state.moved = True
            state.never_since = state.never_since if state.never else step
            state.never = 0 if state.moved else state.never + 1
        if carried is not None and not np.isnan(carried).all() and state.carried >= 0:
            if np.nanmin(carried) > 0:
                state.carried += 1
            elif state.carried:
                state.carried = -1

    def _seen_of(self, state: MissingState) -> Still | None:
        """What the optimizer leaves out, with what was seen of it."""
        still = state.uncovered
        if still is None or state.moved or state.never < self.policy.never:
            return still
        return replace(
            still,
            never=state.never,
            never_since=state.never_since,
            forgotten=still.replaced or 0 < still.tensors <= self.policy.forgotten * still.of,
            adds_up=state.carried >= self.policy.some,
            gained=self._gained(state.progress),
        )

    def _gained(self, progress: Progress) -> float:
        """Share of the loss, where it is too small to have been worth it; else NaN."""
        # Who goes on from somewhere has gained before.
        begun = progress.spacing.first > 0 or not progress.start > 0
        if progress.count < self.policy.judged or begun:
            return math.nan
        gained = progress.scale / progress.start
        return gained if gained < self.policy.learns else math.nan

    def _step(
        self,
        window: Window,
        state: MissingState,
        step: int,
        due: np.ndarray[Any, np.dtype[np.bool_]],
        left: np.ndarray[Any, np.dtype[np.float64]] | None,
        present: np.ndarray[Any, np.dtype[np.bool_]],
        values: np.ndarray[Any, np.dtype[np.uint64]],
    ) -> None:
        sampled, whole = False, []
        for row in np.flatnonzero(present).tolist():
            rank, digest = int(window.ranks[row]), int(values[row])
            before, state.digests[rank] = state.digests.get(rank), (step, digest)
            if before is None or before[0] != step - 1 or not due[row]:
                continue
            sampled = True
            if before[1] == digest:
                times, since = state.still.get(rank, (0, step))
                state.still[rank] = (times + 1, since)
                if times + 1 >= self.policy.everything:
                    whole.append(rank)
            else:
                state.still.pop(rank, None)
        stuck = 0
        some: list[int] = []
        if left is not None:
            # What the optimizer is known to leave out does not move in its steps, nor does what has
            # next to no gradient.
            known = state.uncovered.tensors if state.uncovered is not None else 0
            left = left - known - window.negligible.get(step, 0)
            reported = ~np.isnan(left) & due
            sampled |= bool(reported.any())
            some = [int(r) for r in window.ranks[reported & (left > 0)]]
            if some:
                stuck = int(np.nanmax(left))
                state.some_since = step if not state.some else state.some_since
                state.some += 1
            elif reported.any():
                state.some = 0
        if not sampled:
            return
        state.judged += 1
        of = int(window.config.get("parameter_tensors") or 0)
        if whole:
            since = min(state.still[rank][1] for rank in whole)
            still = Still(tuple(whole), stuck, of, whole=True)
            state.watch.bad(step, still, first_step=since)
        elif some and (state.some >= self.policy.some or state.watch.open(step) is not None):
            everything = of > 0 and stuck >= of
            still = Still(tuple(some), stuck, of, whole=everything)
            state.watch.bad(step, still, first_step=state.some_since)
        elif left is not None or not some:
            if not state.still and not state.some:
                state.watch.good(step)

    def _frozen(self, window: Window, state: MissingState) -> None:
        """What ranks have reported parameters that are trained no longer."""
        for event in window.events:
            if event.kind != _FROZEN:
                continue
            count_, names = int(event.data.get("count", 0)), event.data.get("names", ())
            known = state.frozen.open(event.step)
            if not count_:
                state.switched[event.rank] = state.switched.get(event.rank, 0) + 1
                if known is not None:
                    known.facts.by_rank.pop(event.rank, None)
                    if not known.facts.by_rank:
                        known.facts.by_rank[event.rank] = len(known.facts.names)
                        state.frozen.good(event.step)
                continue
            if state.switched.get(event.rank, 0) >= _SWITCHES:
                continue  # to and fro, as the players of a game are: it is meant
            reported = tuple(str(n) for n in names)
            facts = state.frozen.bad(event.step, Frozen(reported, {})).facts
            facts.by_rank[event.rank] = count_
            facts.names = tuple(dict.fromkeys((*facts.names, *reported)))[:_MAX_NAMES]

    def _coverage(self, window: Window, state: MissingState) -> None:
        """What the optimizer holds, as the ranks said at attach."""
        configs = window.complete_configs
        if not configs or not len(window.steps) or configs == state.known:
            return
        state.known = configs
        state.elsewhere = state.uncovered = None
        state.never, state.moved, state.carried = 0, False, 0
        newest = [begins[-1] for begins in window.begins.values() if begins]
        state.begun = min(newest, default=int(window.steps[0]))
        elsewhere, partly, names, most, of = [], [], [], 0, 0
        replaced = False
        for rank, config in sorted(configs.items()):
            held = config.get("optimizer_tensors")
            if not isinstance(held, Mapping) or not held.get("count"):
                continue
            missing = int(held.get("missing_count") or 0)
            of = max(of, int(config.get("parameter_tensors") or 0))
            replaced |= _holds_copies(held, missing)
            if missing and not held.get("of_the_model"):
                elsewhere.append(rank)
            elif missing:
                partly.append(rank)
            if missing > most:
                most, names = missing, [str(n) for n in held.get("missing") or ()]
        if elsewhere:
            state.elsewhere = Still(
                tuple(elsewhere), most, of, whole=True, names=tuple(names), held_elsewhere=True
            )
        elif partly:
            state.uncovered = Still(
                tuple(partly),
                most,
                of,
                whole=False,
                names=tuple(names),
                held_elsewhere=True,
                replaced=replaced,
            )


def _holds_copies(held: Mapping[str, Any], missing: int) -> bool:
    """Whether an optimizer holds as many tensors that are not the model's as it leaves out."""
    total, own = finite(held.get("count")), finite(held.get("of_the_model"))
    if total is None or own is None:
        return False
    return missing > 0 and round(total * (1 - own)) == missing


def _by_step(window: Window, name: str) -> list[tuple[int, np.ndarray[Any, np.dtype[np.float64]]]]:
    steps, rows = rank_rows(window, name)
    return list(zip(steps.tolist(), rows, strict=True))


def _furthest(own: RankLiveness | None, window: Window) -> int:
    """The last step of any rank that was heard of since this one began, and has not failed."""
    since = math.inf if own is None else own.first_seen
    others = [one for one in window.liveness if one.last_seen >= since and one.state != "failed"]
    return max((one.last_step for one in others), default=-1)


def _check(state: MissingState) -> Check:
    if not state.judged:
        if state.without:
            return Check.insufficient(
                f"The gradient was exactly zero at all {count(state.without, 'checked step')}: "
                "nothing was to be moved."
            )
        why = (
            "No rank posts its parameters of two consecutive steps together with its gradient's "
            "norm and learning rate."
        )
        return Check.missing(why, early="No update has been examined yet.")
    return Check.ok(f"Every update moved the parameters, at {count(state.judged, 'checked step')}.")
