"""Jumps of the loss: what is known of one while it lasts, and what is reported of it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.loss import answers_kept, few_answers
from rankscope.server.detectors.mechanisms import leaps
from rankscope.server.detectors.mechanisms.history import rate_sentence
from rankscope.server.detectors.mechanisms.incident import Incident
from rankscope.server.detectors.mechanisms.leaps import Leap
from rankscope.server.detectors.mechanisms.wording import number, ranks, sentences


@dataclass(slots=True, kw_only=True)
class Spike(Incident):
    """A jump of the loss while it lasts, and those that follow it within the calm."""

    value: float
    z: float
    usual: float
    highest: float
    quartile: float
    progress: float
    positive: bool
    ranks: tuple[int, ...]
    rank_value: float
    rise: Mapping[str, float] | None
    gradient: Mapping[str, float] | None
    leap: Leap | None  # no step can have made it
    restarted: bool  # the rise was to a rate that had been before
    optimizer: str  # name of its class; empty where it is not known
    peak: float
    peak_step: int
    recent: deque[float]
    observations: int = 0
    high: int = 1
    in_a_row: int = 1
    longest: int = 1
    calm: int = 0
    returned: bool = False
    stayed: bool = False
    spikes: int = 1
    # What says that it is a new phase of the training, and whether the loss falls in it.
    phase: str = ""
    learns: bool = True
    # As many answers are right as before.
    kept: bool = False
    # A loss that was positive is negative.
    negated: bool = False
    # The targets of the high values are odd themselves, and such targets are the data's.
    odd_targets: bool = False
    # Values that one or two wrong answers explain, and that they do not.
    few: int = 0
    many: int = 0
    # Samples of a rank at this step, and usually.
    batch: tuple[float, float] = (math.nan, math.nan)

    def count_answers(self, few: bool | None) -> None:
        """Takes whether one or two answers explain a value; None where it is not known."""
        if few is not None:
            self.few, self.many = self.few + few, self.many + (not few)

    @property
    def of_few_answers(self) -> bool:
        """Whether all that is known of the values is that one or two answers were wrong."""
        known = 2 * self.few >= self.high
        return known and not self.many and not self.stayed and not self.negated

    @property
    def new_phase(self) -> bool:
        """Whether the data became others, the learning rate did not, and it is no rank's alone."""
        return bool(self.phase) and self.rise is None and not self.ranks and not self.negated

    @property
    def redefined(self) -> bool:
        """Whether nothing but the loss's own value has changed, on all ranks."""
        return self.kept and self.stayed and not self.ranks and not self.negated


def spike_finding(
    incident: Spike, *, recurrent: int, lasting: int, carried_progress: float
) -> Finding:
    """What is reported of a jump; the numbers are those of `SpikePolicy`."""
    of_targets = _of_targets(incident, lasting)
    # Outliers of the data come to any rank.
    who = () if of_targets else incident.ranks
    recurs = incident.spikes >= recurrent
    rise = incident.value - incident.usual
    odd = not who or rise <= carried_progress * incident.progress
    passing = incident.high < lasting and odd and (incident.rise is None or incident.restarted)
    severity = "info" if passing else "warning"
    if of_targets:
        severity = "info"
    elif incident.stayed or recurs:
        severity = "critical"
    if incident.new_phase:
        severity = "info" if incident.learns else "warning"
    if incident.redefined or incident.of_few_answers:
        severity = "info"
    on = f" on {ranks(who)}" if who else ""
    title = (
        f"The loss{on} jumped from {number(incident.usual)} to {number(incident.value)} "
        f"at step {incident.first_step}"
    )
    if incident.negated:
        title = (
            f"The loss turned negative at step {incident.first_step} "
            f"({number(incident.usual)} to {number(incident.value)})"
        )
    if recurs:
        title += f", the last of {incident.spikes} recent spikes"
    elif incident.stayed:
        title += " and has not come back"
    cause, remedy = _explain(incident, recurs=recurs, of_targets=of_targets)
    evidence = {
        "z": incident.z,
        "value": incident.value,
        "usual": incident.usual,
        "highest_before": incident.highest,
        "progress": incident.progress,
        "peak": incident.peak,
        "peak_step": incident.peak_step,
        "spikes": incident.spikes,
        **(incident.rise or {}),
        **(incident.gradient or {}),
        **({} if incident.leap is None else {"reach": incident.leap.reach}),
    }
    if incident.batch[0] < incident.batch[1]:
        evidence["batch"], evidence["batch_usual"] = incident.batch
    if who:
        evidence["rank_value"] = incident.rank_value
    return incident.finding(
        kind="loss.spike",
        severity=severity if incident.positive else "info",
        title=title,
        ranks=who,
        cause=cause,
        remedy=remedy,
        evidence=evidence,
    )


def _of_targets(incident: Spike, lasting: int) -> bool:
    """Whether the jumps are the data's, and the loss came back from each within a step or two.

    With a rate that was raised it is the rate's.
    """
    return (
        incident.odd_targets
        and incident.longest < lasting
        and not incident.stayed
        and incident.rise is None
    )


def _explain(incident: Spike, *, recurs: bool, of_targets: bool) -> tuple[str, str]:
    step, who = incident.first_step, incident.ranks
    if of_targets:
        return (
            "At such steps the targets themselves lie as far from the others, and the loss "
            "comes back with the next batch: the data have outliers (heavy tails), of which "
            "some batches hold one. A squared error gives such a sample nearly all of the "
            "gradient.",
            f"Look at the targets of step {step}: if they are wrong or stand for missing "
            "values, leave them out. Else a robust loss (Huber, absolute error), the logarithm "
            "of the targets, or clipped gradients.",
        )
    if incident.negated:
        return (
            "A loss that had been positive at all steps before is negative from one step to "
            "the next, and not by its ordinary course: it was negated, or a term of it has the "
            "wrong sign. While that is so, the optimizer unlearns what the loss asks for.",
            f"Look at how the loss is put together from step {step} on: a sign, a difference "
            "the wrong way round, a reward in place of a cost.",
        )
    if incident.new_phase:
        return (
            f"{incident.phase} The data have been different since then, as in the next phase "
            "of a curriculum or with a second data set, and the loss is that of another task"
            + (", which the model learns." if incident.learns else "; it does not fall."),
            "Nothing, if the change is meant and the loss falls. Else look at the data from "
            f"step {step} on.",
        )
    if incident.redefined:
        return answers_kept.CAUSE, answers_kept.REMEDY
    if incident.of_few_answers:
        return few_answers.CAUSE, few_answers.REMEDY
    if incident.rise is not None:
        return (
            sentences(
                rate_sentence(incident.rise), "A step of that size leaves the valley it was in."
            ),
            f"Go back to a learning rate near {number(incident.rise['lr_before'])}, or raise "
            "it more slowly; restart from a checkpoint before the rise if the loss does not "
            "come back.",
        )
    if who:
        return (
            f"{ranks(who).capitalize()} alone carries the jump: its own loss is "
            f"{number(incident.rank_value)}, the others' is as before. Possibly its batch at "
            "this step, or its shard from here on, is not like the others' (labels, "
            "normalisation, tokenizer).",
            f"Look at the samples of {ranks(who)} at step {step}.",
        )
    if incident.leap is not None:
        return leaps.sentence(incident.leap), leaps.REMEDY
    if incident.gradient is not None:
        # A training that had nothing left to learn has had gradients of 0.
        usual = incident.gradient["grad_norm_usual"]
        lags = "adam" in incident.optimizer.lower()
        grew = incident.gradient["grad_norm"] / usual if usual > 0 else math.inf
        return (
            f"The gradient norm had risen to {number(grew)} times its usual at step "
            f"{incident.gradient['grad_norm_step']:.0f}, before the loss: so it is probably "
            "the optimisation, and not this step's data."
            + (" Under Adam, the second moment lags behind such gradients." if lags else ""),
            "Clip gradients at about twice their usual norm, lower the learning rate"
            + (" or beta2 (0.95)" if lags else "")
            + "; restart about 100 steps earlier and skip these batches if the loss does not "
            "come back.",
        )
    if recurs:
        return (
            "The loss keeps jumping and coming back: possibly the learning rate is at the "
            "edge of what the model bears, or a part of the data is broken and comes back.",
            "Lower the learning rate by a factor of 3 or clip gradients; if the spikes come at "
            "the same place of every epoch, look at that data.",
        )
    return (
        "No single rank carries the jump, and no gradient norm was seen to rise before it: "
        "possibly this step's data differ from what came before (a bad batch, a new source), "
        "or the parameters were changed.",
        f"Look at the batches of step {step}. If the loss does not come back, restart from a "
        "checkpoint before it and skip them.",
    )
