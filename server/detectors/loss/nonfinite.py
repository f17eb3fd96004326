"""A loss that is no number any more."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from rankscope.agent.wire import number_to_json
from rankscope.server.detectors.base import Detector, Finding, Outcome
from rankscope.server.detectors.mechanisms.history import Companions, rate_sentence
from rankscope.server.detectors.mechanisms.incident import Incident
from rankscope.server.detectors.mechanisms.origin import FOLLOWS, Origin, go_back, reports
from rankscope.server.detectors.mechanisms.statistics import (
    Progress,
    Spacing,
    mean_over_ranks,
    rank_rows,
)
from rankscope.server.detectors.mechanisms.wording import (
    count,
    if_several,
    number,
    ranks,
    sentences,
)
from rankscope.server.detectors.policy import Observations, RisePolicy, Times
from rankscope.server.window import Check, Occurrence, Window

# Steps with finite losses after one that was not, which show that parameters are not lost: where
# they are, no loss of any rank is finite, unless it is of a few that most batches do not use.
_SURVIVED = 8
# Times as far that a loss has to have run away where its start is one value.
_FIRST_ALONE = 10.0


@dataclass(frozen=True, slots=True)
class NonFinitePolicy(RisePolicy):
    """Thresholds of `loss.nonfinite`.

    Attributes:
        clear_observations: consecutive finite losses after which it is over.
        run_away: multiple of the loss's start above which it had run away before; which rank
            overflowed first is then chance.
    """

    clear_observations: Observations = 50
    run_away: Times = 3.0


@dataclass(slots=True, kw_only=True)
class _NonFinite(Incident):
    ranks: tuple[int, ...]
    posting: int
    value: float
    before: float
    rise: Mapping[str, float] | None
    gradient_step: int | None
    ran_away: bool
    start: float
    begins: bool
    world: int
    origin: Origin = field(default_factory=Origin)
    points: int = 0
    finite: int = 0  # steps since then at which all losses were
    later_ranks: set[int] = field(default_factory=set)


@dataclass(slots=True)
class NonFiniteState:
    """What `loss.nonfinite` remembers."""

    spacing: Spacing = field(default_factory=Spacing)
    progress: Progress = field(default_factory=Progress)
    companions: Companions = field(default_factory=Companions)
    points: int = 0
    bad_points: int = 0
    ranks: int = 0
    last_mean: float = math.nan
    incident: _NonFinite | None = None
    events: list[Occurrence] = field(default_factory=list)


class LossNonFinite(Detector[NonFiniteState]):
    """The loss of a rank is NaN or infinite.

    From such a step on, gradients and parameters of all ranks are lost, since the all-reduce mixes
    the one bad gradient into every other. So the rank that was first is the one to examine. The
    agent reads the loss tensor itself: what frameworks log has often been filtered.

    Statistic:
        None: one value is enough. It is over after 50 observations in a row in which every rank's
        loss was finite.

    Severity:
        Critical.

    Evidence:
        `value` (the first one), `points` (how many there were), `loss_before` (the last mean that
        was finite), `ranks_later` (those that followed), and where they apply `grad_norm_step`
        (the gradient norm was not finite before the loss was), `lr_before`, `lr_after`, `lr_step`,
        `inputs` (rank: elements of the model's inputs that were not finite), `parameters` (those
        that were not finite before the update), `module` (the first to make such a value of finite
        ones), `loss_function`.

    Source:
        SageMaker Debugger `ExplodingTensor`, Megatron-LM's rerun state machine; transformers#13619
        and trl#6702 on losses that were replaced before they were logged.
    """

    kinds = ("loss.nonfinite",)
    lasting = "what is not finite gets into the parameters and stays there"
    needs = ("loss",)
    wants = ("lr", "grad_norm")

    policy: NonFinitePolicy

    def advance(self, window: Window, state: NonFiniteState) -> Outcome:
        """Looks at every rank's loss at every step of the window."""
        findings: list[Finding] = []
        state.companions.take(window)
        state.events += reports(window.events)
        state.ranks = max(state.ranks, len(window.ranks))
        steps, means = mean_over_ranks(window, "loss")
        for index, (step, mean) in enumerate(zip(steps.tolist(), means.tolist(), strict=True)):
            state.spacing.push(step)
            if state.incident is not None and state.incident.over(step):
                state.incident.origin.learn(state.events, state.incident.first_step)
                findings.append(self._finding(state.incident))
                state.incident = None
            if math.isfinite(mean):
                state.last_mean = mean
                state.progress.push(step, mean)
                if state.incident is not None:
                    state.incident.finite += 1
            elif not self._take(state, window, index):
                # Finite losses whose sum is not.
                state.last_mean = mean
        # Nobody else asks for them: without a fault they would pile up.
        state.companions.pass_to(window.last_step)
        if len(steps):
            state.points += int(window.series["loss"].present.sum())
        if state.incident is not None:
            state.incident.origin.learn(state.events, state.incident.first_step)
            findings.append(self._finding(state.incident))
        # What was not finite at attach explains whatever comes later.
        state.events = [
            e
            for e in state.events
            if "at_start" in e.data or e.step > window.last_step - 8 * FOLLOWS
        ]
        return Outcome({"loss.nonfinite": self._check(state)}, tuple(findings))

    def _take(self, state: NonFiniteState, window: Window, index: int) -> bool:
        """Takes a step at which the mean is not finite; whether that is a rank's own loss."""
        steps, rows = rank_rows(window, "loss")
        step, values = int(steps[index]), rows[index]
        present = window.series["loss"].present[:, np.searchsorted(window.steps, step)]
        bad = present & ~np.isfinite(values)
        if not bad.any():
            return False
        who, posting = {int(r) for r in window.ranks[bad]}, int(present.sum())
        state.bad_points += len(who)
        incident = state.incident
        if incident is None:
            state.companions.pass_to(step)
            earlier = [s for s, v in state.companions.norms if s < step and not math.isfinite(v)]
            # All ranks at once, or a loss that was beyond all bounds already: no rank is suspect,
            # it came through what they share.
            usual = float(np.median(np.abs(values[present & ~bad]))) if len(who) < posting else 0.0
            began = state.progress.began
            # One first loss says less of where it began than five do.
            certain = self.policy.run_away * (
                1.0 if math.isfinite(state.progress.start) else _FIRST_ALONE
            )
            ran_away = max(usual, abs(state.last_mean)) > certain * abs(began)
            alone = who if len(who) < posting and not ran_away else set()
            incident = state.incident = _NonFinite(
                first_step=step,
                seen_step=step,
                last_step=step,
                clear_after=0,
                ranks=tuple(sorted(alone)),
                posting=posting,
                value=float(values[bad][0]),
                before=state.last_mean,
                rise=state.companions.raised_rate(
                    step,
                    before=state.spacing.steps(self.policy.rise_before),
                    factor=self.policy.rise,
                ),
                gradient_step=earlier[0] if earlier else None,
                ran_away=ran_away,
                start=began,
                begins=any(step in begins for begins in window.begins.values()),
                world=len(window.ranks),
            )
        incident.last_step = step
        incident.clear_after = state.spacing.steps(self.policy.clear_observations)
        incident.points += len(who)
        incident.later_ranks |= who - set(incident.ranks)
        return True

    def _check(self, state: NonFiniteState) -> Check:
        if state.incident is not None:
            return Check.open(
                f"{count(state.bad_points, 'loss value')} of {count(state.points, 'value')} were "
                f"not finite, the last at step {state.incident.last_step}."
            )
        if not state.points:
            return Check.insufficient("No loss has been posted yet.")
        some = f"; {state.bad_points:,} before were not" if state.bad_points else ""
        judged = f"{count(state.points, 'loss value')} of {count(state.ranks, 'rank')}"
        return Check.ok(f"{judged}: finite{some}.")

    def _finding(self, incident: _NonFinite) -> Finding:
        what = "NaN" if math.isnan(incident.value) else "infinite"
        step, who = incident.first_step, incident.ranks
        if who:
            whose = f" of {ranks(who)}"
        else:
            whose = "" if incident.ran_away else if_several(incident.world, "of every rank")
        cause, remedy = _explained(incident, rate_sentence(incident.rise))
        origin = incident.origin
        evidence: dict[str, object] = {
            "value": number_to_json(incident.value),
            "points": incident.points,
            "loss_before": incident.before,
            "ranks_later": sorted(incident.later_ranks),
            "inputs": {str(rank): amount for rank, amount in sorted(origin.batch.items())},
            "parameters": sorted(
                {n for held in (origin.at_start or origin.before).values() for n in held}
            ),
            "module": origin.module,
            "loss_function": origin.function,
            **(incident.rise or {}),
        }
        if incident.gradient_step is not None:
            evidence["grad_norm_step"] = incident.gradient_step
        return incident.finding(
            kind="loss.nonfinite",
            severity="critical",
            title=f"The loss{whose} is {what} since step {step}",
            ranks=who,
            cause=cause,
            remedy=remedy,
            evidence=evidence,
        )


def _explained(incident: _NonFinite, rate: str) -> tuple[str, str]:
    """Cause and remedy: what was seen, and else what it can be."""
    step, who, origin = incident.first_step, incident.ranks, incident.origin
    survived = incident.finite >= _SURVIVED
    back = go_back(step, begins=incident.begins, survived=survived)
    if incident.gradient_step is not None:
        return (
            sentences(
                f"The gradient norm was not finite already at step {incident.gradient_step}, while "
                "the loss still was: the values arose in the backward pass, and the optimizer "
                "wrote them into the parameters.",
                rate,
            ),
            f"Restart from a checkpoint before step {incident.gradient_step}. Skip steps whose "
            "gradient norm is not finite, clip gradients, train in bfloat16 instead of "
            "float16, or lower the learning rate.",
        )
    seen = origin.explained(step, begins=incident.begins, survived=survived)
    if incident.ran_away and not (origin.at_start or origin.batch):
        shared = ", and which rank overflowed first may be chance" if incident.world > 1 else ""
        return (
            sentences(
                f"The loss had run away before, from {number(incident.start)} at the start to "
                f"{number(incident.before)} at the step before: the steps were too large{shared}.",
                seen[0] if seen is not None else "",
                rate,
            ),
            "Lower the learning rate, warm up for longer or clip gradients; restart from a "
            "checkpoint from before the loss began to rise.",
        )
    if seen is not None:
        return sentences(seen[0], rate), seen[1]
    first = (
        "It was the first step: no update came before it, so the data, the initial parameters or "
        "an operation in the model or the loss must have made it; which of them was not seen."
        if incident.begins
        else ""
    )
    if who:
        rest = incident.posting - len(who)
        whose = "this rank alone has" if len(who) == 1 else "they alone have"
        batch = (
            "its batch (a label out of range, an empty or fully masked sequence)"
            if origin.clean.issuperset(who)
            else "its batch (a NaN in the inputs, a label out of range, an empty or fully masked "
            "sequence)"
        )
        return (
            sentences(
                f"Only {ranks(who)} had it; the loss of the other {count(rest, 'rank')} was still "
                f"finite at that step. So it came from what {whose}: possibly {batch}, or a "
                "device.",
                origin.ruled_out,
                rate,
            ),
            f"Look at the batch of {ranks(who)} at step {step}. {back} If the batch is "
            "sound, repeat the step on another device.",
        )
    if incident.world == 1:
        place = "What made it was not seen: the step was not sampled in full, or not on a host."
    elif incident.posting == 1:
        place = (
            "One rank alone has a loss at that step: whether the others had it, too, is not known."
        )
    else:
        place = (
            f"All {count(incident.posting, 'rank')} had it at the same step, so it probably came "
            "through the parameters that they share."
        )
    what = (
        ""
        if incident.begins
        else "Possibly the step before it was too large, or an operation overflowed (exp, log of "
        "0, division by 0)."
    )
    return (
        sentences(first or place, what, origin.ruled_out, rate),
        f"`torch.autograd.set_detect_anomaly(True)` names the operation. {back}"
        + (
            ""
            if incident.begins
            else " If the loss had grown before: a lower learning rate, a longer warm-up or "
            "gradient clipping."
        ),
    )
