"""What is kept beside the parameters - buffers, averages of the weights - each rank on its own."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.base import Detector, Finding, Outcome
from rankscope.server.detectors.desync.buffers_jump import Jump, jump_finding
from rankscope.server.detectors.desync.buffers_rest import Rest, rest_finding
from rankscope.server.detectors.desync.incident import groups_of
from rankscope.server.detectors.mechanisms.incident import Incident
from rankscope.server.detectors.mechanisms.wording import count, number, ranks
from rankscope.server.detectors.policy import Policy, Steps
from rankscope.server.window import Check, Comparison, TensorDifference, Window

# Beside the chain of a step, and watched because somebody asked for it.
_STAGES = ("buffers", "watched")
_OF_BUFFERS = "/buffers"
# Steps without a comparison after which it counts as missing.
_MAX_DETAILS = 16
# What batch norm estimates. Variances of batches of one kind of data do not differ by half.
_VARIANCE = ".running_var"
_STATISTICS = (".running_mean", _VARIANCE)
_COUNTER = ".num_batches_tracked"
_FAR = 0.5
# Consecutive samples at which another buffer differs by the same number: nothing moves it. Relative
# distance from which on it is more than the rounding of a statistic that each rank reckoned.
_CONSTANT, _MATTERS = 4, 1e-3
# Elements from which on a buffer is no counter and no best result, which a rank may keep alone.
_TENSOR = 16
_PARAMETERS = ("start", "parameters")
# Distance of the parameters over their norm from which on ranks hold other models. Rounding that
# adds up stays below: float32 has 1e-7, and bfloat16 1e-2 of one element, far less of a norm.
_OTHER_MODEL = 1e-3


@dataclass(frozen=True, slots=True)
class BuffersPolicy(Policy):
    """Thresholds of `desync.buffers`.

    Attributes:
        clear_after: steps in which buffers agree again, after which it is over.
    """

    clear_after: Steps = 8


@dataclass(slots=True, kw_only=True)
class OwnBuffers(Incident):
    """Ranks whose buffers differ.

    Attributes:
        widest: of those that found it, the first one of the most ranks.
        tensors: those that differed at the first sample tensor by tensor; of `tensor_count`.
        agreeing: whether the last comparison found them equal.
        most: largest relative distance of a variance so far.
        far: whether one was more than half of its norm, of ranks with the same parameters.
        still: whether statistics differed by the same number at two consecutive samples, and had
            not been seen to move before.
        constant: what is no statistic of batch norm and differed by the same number, at every
            sample since the first of several.
        diverged: what is no statistic of batch norm and was not on some ranks what it was on most,
            at as many samples.
        rest: of statistics that moved before, since when they do not.
        others: distance and relative distance of what is none, with the samples since they moved.
        times_diverged: samples at which such a one was so, without one at which it was not.
        jump: statistics of one rank that left the others' at a step.
    """

    widest: Comparison
    tensors: tuple[TensorDifference, ...] = ()
    tensor_count: int = 0
    agreeing: bool = False
    most: float = 0.0
    far: bool = False
    still: bool = False
    constant: tuple[TensorDifference, ...] = ()
    diverged: tuple[TensorDifference, ...] = ()
    rest: Rest = field(default_factory=Rest)
    others: dict[str, tuple[tuple[float, float], int]] = field(default_factory=dict)
    times_diverged: dict[str, int] = field(default_factory=dict)
    jump: Jump = field(default_factory=Jump)

    def observe(self, comparison: Comparison, *, one_model: bool) -> None:
        """Takes a sample that found them to differ, tensor by tensor.

        Args:
            one_model: whether the ranks hold the same parameters: other layers before it make other
                statistics, whatever the inputs are.
        """
        held = {t.name: t.distance for t in comparison.tensors if t.name.endswith(_STATISTICS)}
        self.rest.take(comparison.step, held)
        # What has moved and comes to rest does so at a step of its own, and is told apart.
        self.still |= self.rest.resting and not self.rest.moved
        self._follow_others(comparison)
        distances = [t.relative for t in comparison.tensors if t.name.endswith(_VARIANCE)]
        self.most = max([self.most, *distances])
        far = one_model and any(relative > _FAR for relative in distances)
        if held and one_model:
            self.jump.take(comparison, far=far)
        # What one rank did at a step is a finding of its own.
        self.far |= far and self.jump.step < 0

    def _follow_others(self, comparison: Comparison) -> None:
        now: dict[str, tuple[tuple[float, float], int]] = {}
        constant = []
        most_agree = comparison.decided and len(groups_of(comparison)[0]) > 1
        times_diverged: dict[str, int] = {}
        for tensor in comparison.tensors:
            if tensor.name.endswith((*_STATISTICS, _COUNTER)) or not tensor.relative > _MATTERS:
                continue
            # Counters may differ by the same number and grow: their norm grows, too.
            size = tensor.distance, tensor.relative
            before, times = self.others.get(tensor.name, (size, 0))
            times = times + 1 if size == before else 1
            now[tensor.name] = size, times
            if times >= _CONSTANT:
                constant.append(tensor)
            if math.prod(tensor.shape) >= _TENSOR:
                # Of two ranks that were sampled nothing shows which one holds what most do.
                known = self.times_diverged.get(tensor.name, 0)
                times_diverged[tensor.name] = known + most_agree
        self.others, self.times_diverged = now, times_diverged
        if constant and not self.constant:
            self.constant = tuple(constant)
        if not self.diverged:
            lasting = {name for name, times in times_diverged.items() if times >= _CONSTANT}
            self.diverged = tuple(t for t in comparison.tensors if t.name in lasting)

    @property
    def harm(self) -> str:
        """Why these are not the statistics of each rank's own batches; empty where they may be."""
        if self.widest.stage != "buffers":
            return ""
        if self.constant:
            return "constant"
        if self.diverged:
            return "diverged"
        if not any(t.name.endswith(_STATISTICS) for t in self.tensors):
            return ""
        groups = groups_of(self.widest)
        if self.widest.decided and len(groups[0]) > 1:
            return "minority"
        if self.still:
            return "still"
        return "far" if self.far else ""


@dataclass(slots=True)
class Kept:
    """What is remembered of one link: comparisons so far, those that differed, the incident."""

    checked: int = 0
    differed: int = 0
    incident: OwnBuffers | None = None


@dataclass(slots=True)
class BuffersState:
    """What is remembered, by stage; and whether the ranks held the same parameters at last."""

    one_model: bool = True
    kept: dict[str, Kept] = field(default_factory=lambda: {stage: Kept() for stage in _STAGES})


class Buffers(Detector[BuffersState]):
    """Ranks whose buffers, or modules given to `monitor.watch`, differ.

    Buffers are statistics of batch norm, counters, caches; what is watched is an average of the
    weights, a teacher, a target network.

    Statistic:
        Equality of digests, bit by bit. Over after 8 steps of agreement. Where each rank has
        statistics of its own: their distances from the first rank's over the norm, of which one is
        more than 4 times the largest in the 8 comparisons before it or more (after the first 8),
        where a running variance differs by more than half of its norm.

    Severity:
        Info for buffers. Most trainings with batch norm keep statistics of their own on each rank,
        by default: nothing is wrong with the training then, but which rank is evaluated and saved
        matters. Warning where running means and variances are not those of each rank's own batches
        (most ranks agree bit for bit and some do not; or they differ and no step moves them any
        more), where a buffer that is no statistic of batch norm and that no step moves (the same
        distance at 4 samples) differs by more than 1e-3 of its norm, where one of 16 elements and
        more that is no statistic differs on some ranks and is the same on most, at 4 samples, or
        where a running variance differs by more than half of its norm although the parameters are
        the same: the model then does something else on another rank. Warning where parameters of a
        watched module differ: it is made from parameters that are the same everywhere, so it has to
        be, too. Warning where the statistics of one rank jump away. Where running statistics moved
        before they came to rest, that is an alert of its own, since the step at which they did (key
        `rest`).

    Evidence:
        `groups` (ranks that agree with each other), `decided`, `tensors_differing`, `tensor_count`,
        `tensor_details`, `harm` (why it is a warning: `constant`, `diverged`, `minority`, `still`
        or `far`) and `variance` (largest relative distance of a running variance).

    Source:
        DistributedDataParallel's `broadcast_buffers`, which makes buffers equal at the beginning of
        a forward pass and leaves them to each rank until the next.
    """

    kinds = ("desync.buffers",)
    lasting = (
        "what differs stays different until something makes it equal: the next comparison finds it"
    )
    min_ranks = 2

    policy: BuffersPolicy

    def advance(self, window: Window, state: BuffersState) -> Outcome:
        """Goes through the comparisons of the buffers."""
        findings: list[Finding] = []
        # What the forward pass of a step went through comes before its statistics.
        for comparison in sorted(window.comparisons, key=lambda c: (c.step, c.stage in _STAGES)):
            if len(comparison.ranks) < 2:
                continue
            if comparison.stage in _STAGES:
                self._step(state, comparison, findings)
            elif comparison.stage in _PARAMETERS:
                state.one_model = _one_model(comparison, was=state.one_model)
        for kept in state.kept.values():
            incident = kept.incident
            if incident is not None:
                if not incident.agreeing:
                    incident.last_step = max(incident.last_step, window.last_step)
                findings += _findings(incident)
        return Outcome({"desync.buffers": _check(state)}, tuple(findings))

    def _step(self, state: BuffersState, comparison: Comparison, findings: list[Finding]) -> None:
        step, kept = comparison.step, state.kept[comparison.stage]
        kept.checked += 1
        kept.differed += not comparison.equal
        incident = kept.incident
        if incident is not None and incident.agreeing and incident.over(step):
            findings += _findings(incident)
            incident = kept.incident = None
        if comparison.equal:
            if incident is not None and not set(comparison.ranks.tolist()).issuperset(
                incident.widest.deviating
            ):
                return  # those that differed were not sampled
            if incident is not None and not incident.agreeing:
                # Nothing showed before this step that they agreed again.
                incident.last_step = max(incident.last_step, step - 1)
                incident.agreeing = True
            return
        if incident is None:
            incident = kept.incident = OwnBuffers(
                first_step=step,
                seen_step=step,
                last_step=step,
                clear_after=self.policy.clear_after,
                widest=comparison,
            )
        incident.agreeing = False
        incident.last_step = max(incident.last_step, step)
        if len(comparison.ranks) > len(incident.widest.ranks):
            # Ranks sample at intervals of their own: some may not have a sample of the first step.
            incident.widest = comparison
        if comparison.tensors and not incident.tensors:
            incident.tensors = comparison.tensors
            incident.tensor_count = comparison.tensor_count
        if comparison.tensors:
            incident.observe(comparison, one_model=state.one_model)


def _one_model(comparison: Comparison, *, was: bool) -> bool:
    """Whether ranks hold the same parameters, rounding aside; digests do not see rounding."""
    if comparison.equal:
        return True
    known = comparison.relative[~np.isnan(comparison.relative)]
    return not bool((known > _OTHER_MODEL).any()) if comparison.tensor_count and len(known) else was


def _findings(incident: OwnBuffers) -> list[Finding]:
    """That the ranks keep buffers of their own, and what became of these at a later step."""
    found = [_finding(incident)]
    rest = incident.rest
    if rest.since >= 0 and incident.widest.stage == "buffers":
        found.append(
            rest_finding(
                rest,
                ranks_=incident.widest.deviating,
                last_step=incident.last_step,
                clear_after=incident.clear_after,
            )
        )
    if incident.jump.step >= 0 and incident.widest.stage == "buffers":
        last, clear = incident.last_step, incident.clear_after
        found.append(jump_finding(incident.jump, last_step=last, clear_after=clear))
    return found


def _finding(incident: OwnBuffers) -> Finding:
    widest, names = incident.widest, [t.name for t in incident.tensors]
    which = ""
    if names:
        which = f" ({names[0]}" + (f" and {len(names) - 1} more)" if len(names) > 1 else ")")
    who = ranks(widest.deviating)
    one = len(widest.deviating) == 1
    if widest.stage == "watched":
        # Without a sample tensor by tensor, nothing says that it is more than its buffers.
        serious = any(not t.table.endswith(_OF_BUFFERS) for t in incident.tensors)
        module = f"`{names[0].partition('.')[0]}`" if names else "a watched module"
        called = f"The module watched as {module}" if names else "A watched module"
        shown = module if names else called
        title = f"{shown} of {who} differs from the other ranks' since step {incident.first_step}"
        if not widest.decided:
            title = f"{shown} differs between {who} since step {incident.first_step}"
        alone = all(len(group) == 1 for group in groups_of(widest))
        some = "" if alone and len(widest.ranks) > 2 else ", on some ranks only"
        cause = (
            f"{called} is not the same on all ranks since step "
            f"{incident.first_step}{which}. It was updated from what is a rank's own (its loss, "
            f"its batches, gradients before the reduction){some}, or was not the same at its "
            "start. The trained parameters are compared for themselves: they agree, unless a "
            "desync alert says otherwise."
            if serious
            else f"Buffers of {module} differ between the ranks{which}. Those "
            "of batch norm do in most trainings: each rank follows its own batches."
        )
        remedy = (
            f"Update {module} on every rank, from the synchronised parameters and by the same "
            "numbers everywhere; after a fix broadcast it once from one rank."
            if serious
            else "Nothing, if this is meant. Else broadcast the buffers."
        )
    else:
        serious = bool(incident.harm)
        title = (
            f"{who.capitalize()} {'keeps' if one else 'keep'} buffers of "
            f"{'its' if one else 'their'} own since step {incident.first_step}{which}"
        )
        cause, remedy = _explain(incident, who)
    return incident.finding(
        kind="desync.buffers",
        key="" if widest.stage == "buffers" else widest.stage,
        severity="warning" if serious else "info",
        title=title,
        ranks=widest.deviating,
        tensors=tuple(names),
        stage=widest.stage,
        cause=cause,
        remedy=remedy,
        evidence={
            "groups": [list(group) for group in groups_of(widest)],
            "decided": widest.decided,
            "tensors_differing": len(names),
            "tensor_count": incident.tensor_count,
            "harm": incident.harm,
            "variance": incident.most,
            "tensor_details": [
                {
                    "name": t.name,
                    "shape": list(t.shape),
                    "ranks": list(t.ranks),
                    "distance": t.distance,
                    "relative": t.relative,
                }
                for t in incident.tensors[:_MAX_DETAILS]
            ],
        },
    )


def _explain(incident: OwnBuffers, who: str) -> tuple[str, str]:
    """Cause and remedy where the model's own buffers differ."""
    step = incident.first_step
    match incident.harm:
        case "constant":
            names = ", ".join(f"`{t.name}`" for t in incident.constant[:3])
            return (
                f"No step of the training moves {names}, and the ranks hold different ones: a mean "
                "and deviation to normalise with, a table, a mask or weights of a loss that each "
                "rank computed from its own data or random numbers. The same input gives another "
                "output on every rank, and a checkpoint of one has its values alone.",
                "Compute it from all data or load it from one file, before the model is wrapped, "
                "and broadcast it once from one rank. DistributedDataParallel makes buffers equal "
                "when it wraps a module: what is set later, it does not with "
                "`broadcast_buffers=False`.",
            )
        case "diverged":
            names = ", ".join(f"`{t.name}`" for t in incident.diverged[:3])
            return (
                f"On the other ranks {names} agree bit for bit: made of what is the same "
                "everywhere, as averages of the parameters are, and not of a rank's own batches. "
                f"Those of {who} are not: updated with another factor or at other steps, restored "
                "from elsewhere, or changed on some ranks only. What is evaluated or saved with "
                "them depends on the rank that does it.",
                f"Look for conditions on the rank around the update of {names}; after a fix "
                "broadcast them once from another rank.",
            )
        case "minority":
            return (
                f"At step {step} the other ranks' statistics of batch norm agree bit for bit, and "
                f"those of {who} do not: they are not made from each rank's own batches. They were "
                "estimated anew from other samples, restored from elsewhere, or changed on some "
                "ranks only; an evaluation gives another result there.",
                "Estimate batch norm anew from the same samples on every rank (PreciseBN: the same "
                "number of batches), or on one rank; then broadcast the buffers.",
            )
        case "still":
            return (
                f"Statistics of batch norm differ between the ranks since step {step}, and no step "
                "of the training moves them any more: they were estimated anew from different "
                "samples, or frozen while each rank had its own. The model does something else on "
                "every rank, in evaluations and, where they are used, in training.",
                "Estimate batch norm anew from the same samples on every rank (PreciseBN: the same "
                "number of batches), or on one rank; then broadcast the buffers.",
            )
        case "far":
            return (
                "Each rank's batch norm follows its own batches, and these are very different: the "
                f"running variances of one rank lie {number(incident.most)} times their norm away "
                "from those of another. The ranks' inputs are of very different sizes, and a "
                "checkpoint of one rank does not give what another rank's evaluation shows.",
                "See first why the inputs differ: print the mean and the spread of the first batch "
                "on each rank (normalisation, units, shards). Where it is meant, use SyncBatchNorm "
                "or let DistributedDataParallel broadcast the buffers.",
            )
        case _:
            return (
                "Buffers differ between the ranks. Those of batch norm do in most trainings: each "
                "rank follows the statistics of its own batches, and what is evaluated or saved "
                "depends on the rank that does it.",
                "Nothing, if this is meant. Else use SyncBatchNorm, or broadcast the buffers "
                "before evaluating and saving.",
            )


def _check(state: BuffersState) -> Check:
    checked = max(kept.checked for kept in state.kept.values())
    if not checked:
        return Check.missing(
            "No two ranks post fingerprints of buffers.", early="No buffers have been compared yet."
        )
    differed = max(kept.differed for kept in state.kept.values())
    what = "buffers" if state.kept["buffers"].checked else "watched modules"
    compared = count(checked, "checked step")
    if not differed:
        return Check.ok(f"The ranks' {what} agreed bit for bit at all {compared}.")
    return Check.ok(
        f"The ranks' {what} agree now; they did at {checked - differed:,} of {compared}."
    )
