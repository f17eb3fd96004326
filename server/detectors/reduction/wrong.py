"""A reduced gradient on which all ranks agree, and that is not the mean of what went in."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from rankscope.server.detectors.base import LASTS_SAMPLED, Detector, Outcome, Reach
from rankscope.server.detectors.episode import Watch
from rankscope.server.detectors.policy import Observations, Policy, Share
from rankscope.server.detectors.reduction.explain import Fault, finding_of
from rankscope.server.detectors.wording import count, listing, ranks
from rankscope.server.window import Check, Reduction, Status, Window

_GRACE = 20
_SPECIFIC = frozenset(("nothing", "stale", "swapped", "ranks"))


@dataclass(frozen=True, slots=True)
class ReductionPolicy(Policy):
    """Thresholds of `reduction.wrong`.

    Attributes:
        exact: relative difference up to which a factor is one of the numbers of ranks.
        held: in order after which something unexplained counts as a change.
    """

    exact: Share = 1e-3
    held: Observations = 3


@dataclass(slots=True)
class ReductionState:
    """What is remembered.

    Attributes:
        compared: reductions examined; `unequal` of them gave the ranks different results.
        kept: those that gave the mean, up to one factor for all.
        scaled: those of them whose factor is neither 1 nor one of the number of ranks.
        streak: how many in a row had the same factor of the number of ranks, since `since`.
        unexplained: those that were something else, from the start on.
        tensors: most tensors examined in one; `unknown` are those that could not be, and
            `compressed` the number of those that need not be the mean.
    """

    steps: int = 0
    compared: int = 0
    unequal: int = 0
    kept: int = 0
    scaled: int = 0
    streak: int = 0
    since: int = 0
    last_factor: float = 1.0
    unexplained: int = 0
    tensors: int = 0
    tensor_count: int = 0
    compressed: int = 0
    ranks: int = 0
    unknown: tuple[str, ...] = ()
    watch: Watch[Fault] = field(default_factory=lambda: Watch(clear_after=8))


class ReductionWrong(Detector[ReductionState]):
    """The reduced gradient is not the mean of the ranks' own gradients, although all agree on it.

    A missing or a second division, tensors that were exchanged for each other, parts of some ranks
    that were lost, a result of the step before: every rank then takes the same wrong step, and no
    comparison of weights can see it.

    Statistic:
        Sketches are linear: the sketch of what came out must be the mean of the sketches of what
        went in, to 1e-4 of its size (3e-2 for tensors of 16 bits). One factor for all tensors is
        that of clipping and loss scale where these are posted; where it is the number of ranks, or
        one over it (twice in a row, if gradients were scaled by hand before), the division is
        wrong. Tensors without the common factor are compared with zeros, the step before, the other
        tensors of their shape, and sums over some of the ranks. Something else altogether is
        reported only where the reduction was right before: a gradient may be changed on purpose
        (clipping by value, noise, hooks). Where torch's own hooks round to 16 bits, these bits are
        allowed for (and what float16 lacks below 6e-8); of matrices that PowerSGD approximates,
        only what is not an approximation counts (zeros, a factor, a rank left out); the tensors
        that it leaves alone are held to the mean. Not judged where the ranks do not agree on the
        result, which is `desync.gradients`. Over after 8 steps in order.

    Severity:
        Critical; a warning where a tensor's gradient is dropped, or what it is is not known.

    Evidence:
        `factor`, `ratio`, `expected_ratio`, `pattern`, `tensor_details` (name, shape, relative
        distance, what it is instead), `wrong_count`, `tensor_count`, `ranks_in_it`, `observed`,
        `weights` of the ranks, `agreed_until` (last sample before at which it was in order).

    Source:
        Conservation of the sum; microsoft/DeepSpeed#2343 and tensorflow/benchmarks#466 are two of
        the errors that it finds.
    """

    kinds: ClassVar[tuple[str, ...]] = ("reduction.wrong",)
    policies: ClassVar[type[Policy]] = ReductionPolicy
    wants: ClassVar[tuple[str, ...]] = ("clip_coefficient", "amp_scale", "micro_steps")
    min_ranks: ClassVar[int] = 2

    policy: ReductionPolicy

    def reaches(self) -> tuple[Reach, ...]:
        """Consecutive reductions that are off by a factor."""
        return (Reach(("reductions",), self.policy.held, LASTS_SAMPLED),)

    def start(self) -> ReductionState:
        """Nothing examined yet."""
        return ReductionState()

    def advance(self, window: Window, state: ReductionState) -> Outcome:
        """Goes through the reductions whose both sides are known."""
        state.steps += len(window.steps)
        for made in window.reductions:
            state.compared += 1
            state.unequal += not made.agreed
            state.ranks = max(state.ranks, len(made.ranks))
            state.tensor_count = max(state.tensor_count, made.tensor_count)
            if not made.agreed or not made.known:
                continue
            state.tensors = max(state.tensors, made.known - made.compressed)
            state.compressed = made.compressed
            state.unknown = made.unknown
            self._judge(window, state, made)
        findings = [finding_of(episode) for episode in state.watch.take(window.last_step)]
        return Outcome({"reduction.wrong": self._check(window, state)}, tuple(findings))

    # ---------------------------------------------------------------------------- one reduction

    def _judge(self, window: Window, state: ReductionState, made: Reduction) -> None:
        if made.known == made.compressed:
            return  # of an approximation alone nothing is known but how near it comes
        clip, scale = (_value(window, made, n) for n in ("clip_coefficient", "amp_scale"))
        expected = (1.0 if clip is None else clip) / (1.0 if scale is None else scale)
        if not (math.isfinite(expected) and expected > 0) or made.pattern == "accumulated":
            return  # another detector's matter
        fault = Fault(reduction=made, expected=expected)
        if made.pattern:
            self._whole(state, fault)
            return
        factor = made.ratio / expected
        fault.factor = factor
        size = len(made.ranks)
        micro = _value(window, made, "micro_steps") or 1.0
        by_ranks = next((f for f in (float(size), 1.0 / size) if _is(factor, f, self.policy)), None)
        if by_ranks is not None and not _is(factor, 1 / micro, self.policy):
            same = state.streak > 0 and _is(state.last_factor, by_ranks, self.policy)
            state.streak = state.streak + 1 if same else 1
            state.since = state.since if same else made.step
            state.last_factor = by_ranks
            # Where nothing was ever scaled by hand, a factor is no coincidence.
            if state.streak > 1 or not state.scaled:
                fault.pattern = "factor"
                self._found(state, fault, first_step=state.since)
            return
        state.streak = 0
        wrong = [
            t for t in made.wrong if t.how in _SPECIFIC or _by_ranks(t.factor, size, self.policy)
        ]
        if wrong:
            fault.pattern, fault.tensors = wrong[0].how, tuple(wrong)
            self._found(state, fault)
        elif any(t.how == "other" for t in made.wrong):
            fault.pattern, fault.tensors = "other", made.wrong
            self._unexplained(state, fault)
        else:
            self._kept(state, made.step, usual=_is(factor, 1.0, self.policy))

    def _whole(self, state: ReductionState, fault: Fault) -> None:
        made = fault.reduction
        state.streak = 0
        if made.pattern == "weights":
            largest = max(abs(w) for w in made.weights)
            pairs = zip(made.ranks.tolist(), made.weights, strict=True)
            lost = [rank for rank, w in pairs if abs(w) < 0.01 * largest]
            if not lost:
                self._kept(state, made.step, usual=False)  # a weighted mean
                return
            fault.pattern, fault.lost = "ranks", tuple(lost)
            self._found(state, fault)
        elif made.pattern == "stale":
            fault.pattern = "stale"
            self._found(state, fault)
        else:
            fault.pattern = "other"
            self._unexplained(state, fault)

    def _unexplained(self, state: ReductionState, fault: Fault) -> None:
        if state.kept >= self.policy.held and not state.unexplained:
            self._found(state, fault)
        else:
            state.unexplained += 1

    def _kept(self, state: ReductionState, step: int, *, usual: bool) -> None:
        state.kept += 1
        state.scaled += not usual
        state.watch.good(step)

    def _found(self, state: ReductionState, fault: Fault, *, first_step: int | None = None) -> None:
        step = fault.reduction.step
        episode = state.watch.bad(step, fault, first_step=first_step)
        episode.facts.observed = episode.seen

    # -------------------------------------------------------------------------------- the answer

    def _check(self, window: Window, state: ReductionState) -> Check:
        episode = state.watch.open(window.last_step)
        if episode is not None:
            return Check(Status.OPEN, f"{finding_of(episode).title}.")
        hooks = _hooks(window)
        if not state.compared:
            if state.steps < _GRACE:
                return Check(Status.INSUFFICIENT_DATA, "No reduction has been examined yet.")
            return Check(
                Status.MISSING_INPUT,
                "No step has the gradients of all ranks before the reduction and after it: they "
                "are seen at sampled steps, and not under FSDP.",
            )
        if state.compared == state.unequal:
            why = "The ranks never agreed on what came out: that is desync.gradients."
            return Check(Status.SUSPENDED, why)
        if state.compressed and not state.tensors:
            why = (
                f"{listing(hooks)} sends approximations of all tensors examined: how near they "
                "come is `compression.error`."
            )
            return Check(Status.NOT_APPLICABLE, why)
        if state.unexplained and state.unexplained >= state.kept:
            why = (
                "What is applied is not the mean of the ranks' gradients from the start on: "
                + (f"{listing(hooks)} compresses it" if hooks else "something changes it")
                + " between the reduction and the step, so the reduction cannot be checked."
            )
            return Check(Status.NOT_APPLICABLE, why)
        if not state.kept:
            why = "All gradients that were reduced were zero: any reduction of them is right."
            return Check(Status.INSUFFICIENT_DATA, why)
        where = count(state.compared - state.unequal, "checked step")
        left = ""
        if state.unknown:
            left = f" {listing(state.unknown, most=3)} could not be examined."
        if state.compressed:
            left += (
                f" Of {count(state.compressed, 'other')}, {listing(hooks)} sends an approximation: "
                "how near it comes is `compression.error`."
            )
        scaled = ""
        if state.scaled:
            scaled = f" At {count(state.scaled, 'step')} it was scaled or weighted as a whole."
        who = (
            ranks(range(state.ranks))
            if state.ranks == window.world_size
            else f"{state.ranks} ranks"
        )
        return Check(
            Status.OK,
            f"The reduced gradient was the mean of what {who} put in at {state.kept:,} of {where}, "
            f"in {state.tensors} of {count(state.tensor_count, 'tensor')}.{scaled}{left}",
        )


def _value(window: Window, made: Reduction, name: str) -> float | None:
    """A number of the ranks of a reduction, at its step."""
    series = window.series.get(name)
    if series is None:
        return None
    column = int(np.searchsorted(window.steps, made.step))
    rows = np.isin(window.ranks, made.ranks) & series.present[:, column]
    return float(np.median(series.values[rows, column])) if rows.any() else None


def _hooks(window: Window) -> list[str]:
    parallel = window.config.get("data_parallel")
    found = parallel.get("communication_hooks") if isinstance(parallel, dict) else None
    return [str(name) for name in found] if isinstance(found, list) else []


def _is(value: float, other: float, policy: ReductionPolicy) -> bool:
    return abs(value / other - 1.0) < policy.exact


def _by_ranks(factor: float, size: int, policy: ReductionPolicy) -> bool:
    return _is(factor, size, policy) or _is(factor, 1.0 / size, policy)
