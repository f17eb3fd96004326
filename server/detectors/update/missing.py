"""Steps that leave parameters as they were although there are gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from rankscope.server.detectors.base import LASTS_SAMPLED, Detector, Finding, Outcome, Reach
from rankscope.server.detectors.episode import Episode, Watch
from rankscope.server.detectors.policy import Observations, Policy, Share
from rankscope.server.detectors.statistics import rank_rows
from rankscope.server.detectors.walking import median
from rankscope.server.detectors.wording import agree, count, listing, ranks, sentences
from rankscope.server.window import Check, Status, Window

_GRACE = 20
# Gradient norms that say how large they were at first.
_FIRST = 32
_FROZEN = "parameters.frozen"
_MAX_NAMES = 500


@dataclass(frozen=True, slots=True)
class MissingPolicy(Policy):
    """Thresholds of `update.missing`.

    Attributes:
        some: consecutive ones at which a tensor was left as it was.
        everything: consecutive ones at which the whole model was.
        small_rate: share of the highest rate below which tensors may well stand still.
        converged: share of the first gradients' norm below which they may, too.
        never: consecutive samples, over as many steps at least, at which what the optimizer does
            not hold
            was as at first: another optimizer that moves it now and then has done so by then.
        forgotten: share of the trained tensors up to which what is left out was forgotten, as it
            seems; who trains a part of a model on purpose leaves out most of it.
    """

    some: Observations = 4
    everything: Observations = 2
    small_rate: Share = 1e-3
    converged: Share = 1e-5
    never: Observations = 8
    forgotten: Share = 0.5


@dataclass(slots=True)
class Still:
    """Parameters that do not move.

    Attributes:
        ranks: on which.
        tensors: how many, most of all; of `of`; 0 where only the whole model is known.
        whole: whether nothing moves at all.
        names: of the tensors, where they are known.
        held_elsewhere: whether the optimizer was known to hold other tensors from the start.
        never: samples at which they had a gradient and were as at first, from `never_since` on; 0
            where one of them was seen to move, or too few were examined.
        forgotten: they are few beside those that the optimizer holds.
        adds_up: their gradients were never set to zero, at every sample.
    """

    ranks: tuple[int, ...]
    tensors: int
    of: int
    whole: bool
    names: tuple[str, ...] = ()
    held_elsewhere: bool = False
    never: int = 0
    never_since: int = 0
    forgotten: bool = False
    adds_up: bool = False


@dataclass(slots=True)
class Frozen:
    """Parameters that were trained and require no gradient any more.

    Attributes:
        names: of them, at most 500; of `count`.
        by_rank: rank -> how many.
    """

    names: tuple[str, ...]
    by_rank: dict[int, int]

    @property
    def count(self) -> int:
        """Most of a rank."""
        return max(self.by_rank.values())


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
    """

    steps: int = 0
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


class UpdateMissing(Detector[MissingState]):
    """The optimizer steps, gradients are there, and parameters stay as they were.

    Statistic:
        At attach: which of the model's trained parameters the optimizer holds. After it: digests
        of the parameters before and after a step, bit by bit; a whole model that did not move at
        two consecutive observations, or tensors with a gradient (1e-4 of the whole or more) that
        did not at four. Steps without a gradient, with one that is not finite, skipped by a loss
        scaler, with a learning rate below a thousandth of the largest so far, or a gradient below
        1e-5 of the first 32 ones (both move less than the last bit) do not count. Over after 16
        steps. And parameters in the optimizer that required a gradient at attach and do not any
        more, after steps have moved them.

    Severity:
        Critical where nothing moves (info where something did before and the optimizer has a
        stopping rule: LBFGS's tolerances), warning for some of the tensors (frozen on the way,
        too), info where the optimizer leaves out a part of the model from the start, or where it
        is frozen before the first step (which may be meant). Warning where it leaves out less than
        half of the trained tensors, and these were seen to get gradients and to stay as they were
        at 8 samples: no optimizer holds them.

    Evidence:
        `tensors` (that did not move) `of` this many, `whole`, `missing` (names that the optimizer
        does not hold), `observed`; of what it leaves out also `never_updated` (samples at which it
        had gradients and was as at first) and `adds_up` (its gradients are never set to zero).

    Source:
        huggingface/accelerate#2665: an optimizer built before the model was wrapped or moved.
    """

    kinds: ClassVar[tuple[str, ...]] = ("update.missing",)
    policies: ClassVar[type[Policy]] = MissingPolicy
    wants: ClassVar[tuple[str, ...]] = (
        "tensors_unchanged",
        "grad_norm",
        "lr",
        "steps_skipped",
        "tensors_never_updated",
        "gradient_carried_outside",
    )

    policy: MissingPolicy

    def reaches(self) -> tuple[Reach, ...]:
        """Consecutive steps that leave some tensors as they were."""
        seen = "words/parameters", "tensors_unchanged"
        return (Reach(seen, self.policy.some, LASTS_SAMPLED),)

    def start(self) -> MissingState:
        """Nothing seen yet."""
        return MissingState()

    def advance(self, window: Window, state: MissingState) -> Outcome:
        """Looks at what the optimizer holds, and at each step's parameters."""
        state.steps += len(window.steps)
        self._coverage(window, state)
        digest_series = window.digests.get("parameters")
        rows = {name: dict(_by_step(window, name)) for name in self.wants}
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
        findings = [_finding(e, window) for e in state.watch.take(window.last_step)]
        findings += [_stopped(e, window) for e in state.frozen.take(window.last_step)]
        known = state.elsewhere or self._seen_of(state)
        if state.elsewhere is not None:
            findings = []  # that nothing moves follows from it
        if known is not None:
            findings.append(_held(known, state.begun, max(window.last_step, state.begun)))
        return Outcome({"update.missing": _check(window, state)}, tuple(findings))

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
            forgotten=still.of > 0 and still.tensors < self.policy.forgotten * still.of,
            adds_up=state.carried >= self.policy.some,
        )

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
                if known is not None:
                    known.facts.by_rank.pop(event.rank, None)
                    if not known.facts.by_rank:
                        known.facts.by_rank[event.rank] = len(known.facts.names)
                        state.frozen.good(event.step)
                continue
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
        for rank, config in sorted(configs.items()):
            held = config.get("optimizer_tensors")
            if not isinstance(held, Mapping) or not held.get("count"):
                continue
            missing = int(held.get("missing_count") or 0)
            of = max(of, int(config.get("parameter_tensors") or 0))
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
                tuple(partly), most, of, whole=False, names=tuple(names), held_elsewhere=True
            )


def _by_step(window: Window, name: str) -> list[tuple[int, np.ndarray[Any, np.dtype[np.float64]]]]:
    steps, rows = rank_rows(window, name)
    return list(zip(steps.tolist(), rows, strict=True))


def _finding(episode: Episode[Still], window: Window) -> Finding:
    still, step = episode.facts, episode.first_step
    where = "" if len(still.ranks) == window.world_size else f" on {ranks(still.ranks)}"
    if still.whole:
        what = "No parameter moves"
    else:
        of = f" of {still.of}" if still.of else ""
        verb = agree(still.tensors, "does")
        what = f"{count(still.tensors, 'tensor')}{of} {verb} not move"
    why = (
        "Possibly the optimizer holds other tensors than the model (it was built before the "
        "model was wrapped, moved or given new parts), its learning rate for them is 0, or the "
        "update is smaller than the last bit of a 16-bit parameter."
    )
    remedy = (
        "Build the optimizer after the model has been moved, wrapped and changed; check the "
        "learning rates of its groups; keep 32-bit master weights where parameters have 16."
    )
    # What has moved at first is held by the optimizer.
    stops = _tolerances(window) if still.whole and step > _begin(window) else ""
    if stops:
        why = (
            f"It has a stopping rule ({stops}): such an optimizer leaves the parameters alone once "
            "its steps, or the gradient, are below it, or where its line search finds no step."
        )
        remedy = (
            "Nothing, if the loss is as low as it should be: the training has converged, and "
            "further steps are for nothing. Else lower the tolerances, or build the optimizer anew."
        )
    return Finding(
        kind="update.missing",
        severity="info" if stops else "critical" if still.whole else "warning",
        title=f"{what} since step {step} although there are gradients{where}",
        seen_step=episode.seen_step,
        last_step=episode.last_step,
        first_step=step,
        ranks=still.ranks,
        stage="parameters",
        cause=sentences(
            f"Since step {step}, `optimizer.step()` has left "
            + ("all parameters" if still.whole else "these parameters")
            + f" as they were, bit for bit, at {count(episode.seen, 'checked step')}{where}, "
            "although their gradients are not zero.",
            why,
        ),
        remedy=remedy,
        clear_after=episode.clear_after,
        evidence={
            "tensors": still.tensors,
            "of": still.of,
            "whole": still.whole,
            "missing": list(still.names),
            "observed": episode.seen,
        },
    )


def _begin(window: Window) -> int:
    """The step before which nothing was seen to move: a process's first one, or the next."""
    return 1 + min((begins[0] for begins in window.begins.values() if begins), default=0)


def _tolerances(window: Window) -> str:
    """The settings by which the optimizer stops of its own accord, as those of LBFGS do."""
    groups = window.config.get("parameter_groups")
    for group in groups if isinstance(groups, list) else ():
        if isinstance(group, Mapping):
            names = [k for k in group if isinstance(k, str) and k.startswith("tolerance")]
            if names:
                return listing([f"`{name}` {group[name]}" for name in names], most=4)
    return ""


def _stopped(episode: Episode[Frozen], window: Window) -> Finding:
    frozen, step = episode.facts, episode.first_step
    who = tuple(sorted(frozen.by_rank))
    where = "" if len(who) == window.world_size else f" on {ranks(who)}"
    of = int(window.config.get("parameter_tensors") or 0)
    # Frozen before anything has moved: that is how the training was set up.
    begins = [b[-1] for b in window.begins.values() if b]
    at_first = step <= min(begins, default=0)
    names = listing([f"`{name}`" for name in frozen.names], most=4)
    return Finding(
        kind="update.missing",
        key="frozen",
        severity="info" if at_first else "warning",
        title=f"{count(frozen.count, 'tensor')}{f' of {of}' if of else ''} "
        f"{agree(frozen.count, 'is')} frozen since step {step}{where}",
        seen_step=episode.seen_step,
        last_step=episode.last_step,
        first_step=step,
        ranks=who,
        tensors=frozen.names,
        stage="parameters",
        cause=sentences(
            f"Since step {step} at the latest {names} "
            f"{agree(frozen.count, 'requires')} no gradient{where}, and did when "
            "the monitor was attached: the optimizer holds them, and no step changes them.",
            "Something has set `requires_grad` to False on the way: possibly a schedule of "
            "freezing, a switch for another phase (evaluation, a second network) that was not "
            "taken back, or a condition that holds too long.",
        ),
        remedy=(
            "If it is meant, silence this alert. Else set `requires_grad` to True again, and look "
            "for what has frozen them."
        ),
        clear_after=0,
        evidence={
            "tensors": frozen.count,
            "of": of,
            "whole": False,
            "missing": [],
            "observed": episode.seen,
        },
    )


def _held(still: Still, step: int, last_step: int) -> Finding:
    names = listing(list(still.names), most=4)
    if still.whole:
        title = f"The optimizer holds none of the model's {still.of} parameters"
        cause = (
            "When the monitor was attached, the optimizer held tensors of which none is a "
            f"parameter of the model: its steps change nothing of {names or 'the model'}. It was "
            "built before the model was wrapped, moved to a device or replaced."
        )
    else:
        left = agree(still.tensors, "is")
        title = (
            f"{still.tensors} of {count(still.of, 'trained tensor')} {left} not in the optimizer"
        )
        one = still.tensors == 1
        cause = (
            f"When the monitor was attached, the optimizer did not hold {names}, which "
            f"{'requires' if one else 'require'} a gradient: no step of it changes "
            f"{'it' if one else 'them'}."
        )
        if still.never:
            cause = sentences(
                cause,
                f"{'It has' if one else 'They have'} got gradients at "
                f"{count(still.never, 'checked step')} since step {still.never_since}, and "
                f"{'is' if one else 'are'} bit for bit what {'it was' if one else 'they were'}: no "
                "other optimizer has changed anything either.",
                f"{'Its gradient is' if one else 'Their gradients are'} never set to zero, since "
                "`optimizer.zero_grad()` reaches what the optimizer holds only: so "
                f"{'it adds' if one else 'they add'} up from step to step, and "
                f"{'is' if one else 'are'} part of the norm that clipping all parameters divides "
                "by."
                if still.adds_up
                else "",
                "It may be meant, since most of the model is left out."
                if not still.forgotten
                else "",
            )
        else:
            cause += (
                " Another optimizer may do so; if none does, "
                f"{'it was' if one else 'they were'} possibly added or replaced after this one was "
                "built."
            )
    return Finding(
        kind="update.missing",
        key="held",
        severity="critical" if still.whole else "warning" if still.forgotten else "info",
        title=title,
        seen_step=step,
        last_step=last_step,
        first_step=step,
        ranks=still.ranks,
        tensors=still.names,
        stage="start",
        cause=cause,
        remedy=(
            "Build the optimizer from `model.parameters()` after the model has been moved, wrapped "
            "and changed, or add what is missing with `add_param_group`. Set `requires_grad` to "
            "False for what is not to be trained."
        ),
        clear_after=0,
        evidence={
            "tensors": still.tensors,
            "of": still.of,
            "whole": still.whole,
            "missing": list(still.names),
            "never_updated": still.never,
            "adds_up": still.adds_up,
        },
    )


def _check(window: Window, state: MissingState) -> Check:
    episode = state.watch.open(window.last_step)
    for still in (state.elsewhere, state.uncovered):
        if still is not None:
            return Check(Status.OPEN, f"{_held(still, state.begun, 0).title}.")
    if episode is not None:
        return Check(Status.OPEN, f"{_finding(episode, window).title}.")
    stopped = state.frozen.open(window.last_step)
    if stopped is not None:
        return Check(Status.OPEN, f"{_stopped(stopped, window).title}.")
    if not state.judged:
        if state.steps < _GRACE:
            return Check(Status.INSUFFICIENT_DATA, "No update has been examined yet.")
        if state.without:
            why = (
                f"The gradient was exactly zero at all {count(state.without, 'checked step')}: "
                "nothing was to be moved."
            )
            return Check(Status.INSUFFICIENT_DATA, why)
        return Check(
            Status.MISSING_INPUT,
            "No rank posts its parameters of two consecutive steps together with its gradient's "
            "norm and learning rate.",
        )
    return Check(
        Status.OK, f"Every update moved the parameters, at {count(state.judged, 'checked step')}."
    )
