"""Ranks whose loss or gradients stand out: what is known while it lasts, and what is reported."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.incident import Incident
from rankscope.server.detectors.mechanisms.peers import Change
from rankscope.server.detectors.mechanisms.wording import (
    agree,
    count,
    number,
    percent,
    ranks,
    sentences,
)


@dataclass(slots=True, kw_only=True)
class LossOutlier(Incident):
    """Ranks whose losses are not like the others', while it lasts.

    Attributes:
        decided: whether they are known to be the ones at fault.
        world: number of ranks.
        difference: mean of the rank's loss minus the median of the others', `z` standard errors.
        level: of the others' losses; `progress` is how far the loss has come.
        from_start: whether it may always have been so.
        accuracies: of these ranks, and of the others; NaN where there are none.
        moved: rank -> by how much its loss moved at the onset.
        recurring: where single losses stand out again and again.
        learned: they are lower, by little, and came to that little by little: samples that are
            learned sooner than the others' do so.
    """

    ranks: tuple[int, ...]
    decided: bool
    world: int
    difference: float
    z: float
    level: float
    progress: float
    critical: bool
    from_start: bool
    accuracies: tuple[float, float]
    moved: Mapping[int, float]
    recurring: Change | None = None
    learned: bool = False


@dataclass(slots=True, kw_only=True)
class GradientOutlier(Incident):
    """A rank that stands out.

    Attributes:
        patience: samples without it after which it is over. Not steps: samples get rarer.
        calm: samples since the last one that found it, which was at step `found_at`.
        period: steps from one burst to the next; NaN where they come at no equal distances.
    """

    patience: int = 0
    calm: int = 0
    found_at: int = -1
    ranks: tuple[int, ...]
    decided: bool
    factor: float
    z: float
    others: float
    samples: int
    bursts: int = 0
    period: float = math.nan
    from_start: bool = False

    def observed(self, step: int) -> None:
        """Counts a sample that has been made, whether or not it found it."""
        if self.found_at == step:
            self.calm = 0
            return
        if not self.calm:
            # Nothing showed before this step that it was over.
            self.last_step = max(self.last_step, step - 1)
        self.calm += 1


def loss_finding(incident: LossOutlier) -> Finding:
    """What is reported of ranks whose losses are not like the others'."""
    who, step = incident.ranks, incident.first_step
    side = "above" if incident.difference > 0 else "below"
    by = number(abs(incident.difference))
    accuracy, accuracy_others = incident.accuracies
    if incident.recurring is not None:
        title, cause, remedy = _of_recurring(incident, incident.recurring)
    elif not incident.decided:
        title = f"The losses of {ranks(who)} differ by {by} since step {step}"
        cause = sentences(
            f"{ranks(who).capitalize()} differ by {by} at a level of {number(incident.level)}, "
            "always to the same side. As many ranks are on one side as on the other, so "
            "nothing in this shows which one is wrong.",
            "It may have been so from the first steps on, when losses are alike whatever differs: "
            "their data may be unlike on purpose."
            if incident.from_start
            else "",
            _who_moved(incident),
        )
        remedy = (
            "Compare what these ranks read (shard, labels, preprocessing), and pass one and "
            "the same batch through both."
        )
    else:
        title = f"The loss of {ranks(who)} lies {by} {side} the other ranks' since step {step}"
        accurate = (
            f"Its accuracy is {percent(accuracy)}, the others' {percent(accuracy_others)}."
            if math.isfinite(accuracy)
            else ""
        )
        if incident.difference > 0:
            why = (
                "Possibly what it reads does not fit the others' data (labels, shard, "
                "tokenizer, normalisation); or, where there is a desync alert as well, its "
                "copy of the model has diverged from theirs."
            )
        else:
            why = (
                "Possibly it reads easier data than the others (repeated samples, mostly "
                "padding, a shard of its own), or averages its loss over a different number "
                "of elements."
            )
        cause = sentences(
            f"The others are at {number(incident.level)}; {ranks(who)} "
            f"{agree(len(who), 'lies')} {side} them in nearly every step.",
            "It came to that little by little, as where few samples, which come again and again, "
            "happen to be learned sooner than the others'."
            if incident.learned
            else "",
            accurate,
            "It may have been so from the first steps on, when losses are alike whatever differs."
            if incident.from_start
            else "",
            why,
        )
        remedy = (
            f"Look at the samples and labels of {ranks(who)} from step {step} on: its shard, "
            "its files, its augmentation. The all-reduce mixes its gradient into all ranks, "
            "so what it learnt wrongly is in every copy."
        )
    evidence: dict[str, object] = {
        "difference": incident.difference,
        "z": incident.z,
        "level": incident.level,
        "progress": incident.progress,
        "decided": incident.decided,
    }
    if math.isfinite(accuracy):
        evidence |= {"accuracy": accuracy, "accuracy_others": accuracy_others}
    if incident.recurring is not None:
        evidence["times"] = incident.recurring.count
    if not incident.decided and incident.moved:
        evidence["moved"] = {str(r): incident.moved[r] for r in who if r in incident.moved}
    return incident.finding(
        kind="rank.loss_outlier",
        severity=_severity(incident),
        title=title,
        ranks=who,
        cause=cause,
        remedy=remedy,
        evidence=evidence,
    )


def _of_recurring(incident: LossOutlier, change: Change) -> tuple[str, str, str]:
    """Title, cause and remedy of single losses that stand out again and again."""
    who, step = ranks(incident.ranks), incident.first_step
    verb = agree(len(incident.ranks), "stands")
    factor = number(math.exp(abs(change.size)))
    times = f"{factor} times {'as large' if change.size > 0 else 'as small'}"
    return (
        f"The loss of {who} {verb} out again and again since step {step}",
        f"At {count(change.count, 'step')} up to step {change.seen_step} it was typically "
        f"{times} as usual, relative to the other ranks', which were as usual; it had never been "
        "so far off before. Some of the batches that it reads, or what is computed of them now "
        "and then, are not like the others': a part of its data is broken, or its device makes "
        "errors.",
        f"Look at the batches of {who} at these steps and at what is done to them; run the same "
        "batches on another device.",
    )


def _who_moved(incident: LossOutlier) -> str:
    moved = {r: abs(incident.moved[r]) for r in incident.ranks if r in incident.moved}
    if len(moved) < 2:
        return ""
    order = sorted(moved, key=lambda rank: moved[rank])
    most, next_most = order[-1], order[-2]
    if moved[most] < 4 * moved[next_most]:
        return ""
    return (
        f"A hint: at the onset the loss of rank {most} moved by {number(moved[most])}, that of "
        f"rank {next_most} by {number(moved[next_most])}."
    )


def _severity(incident: LossOutlier) -> str:
    # Batches that are easier now and then come to any rank whose share of the data is small.
    if incident.recurring is not None and incident.recurring.size < 0:
        return "info"
    if (
        not incident.decided
        and incident.from_start
        and not (incident.critical and incident.world == 2)
    ):
        return "info"
    if incident.learned:
        return "info"
    return "critical" if incident.critical else "warning"


def gradient_finding(incident: GradientOutlier, key: str) -> Finding:
    """What is reported of ranks whose gradients are of another size; with a `key` of bursts."""
    who, step = ranks(incident.ranks), incident.first_step
    factor = number(max(incident.factor, 1 / incident.factor))
    side = "larger" if incident.factor > 1 else "smaller"
    if key:
        regular = math.isfinite(incident.period)
        often = f"every {number(incident.period)} steps" if regular else "now and then"
        title = f"Gradients of {who} are {factor} times the others' {often} since step {step}"
        cause = (
            f"At {count(incident.bursts, 'sample')} of {incident.samples:,} the gradient that "
            f"{who} computed was some {factor} times as large as the others', and as its own at "
            "other samples"
        )
        if regular:
            cause = (
                f"{cause}. These lie multiples of {number(incident.period)} steps apart: a batch "
                "of its shard that comes back (in each epoch, where nothing is shuffled), "
                "something that this rank alone does so often, or a device that fails at this "
                "interval."
            )
        else:
            cause = (
                f"{cause}: single batches of its shard are odd, or its device computes wrongly at "
                "times. Suspicious, not proven."
            )
        remedy = (
            f"Run one of these steps again on another device than that of {who}: the same gradient "
            "means odd samples, another one a faulty device. Clip by norm until then."
        )
        if regular:
            remedy = (
                f"Compare {number(incident.period)} with the steps of an epoch and with what {who} "
                "does at that interval (logging, evaluation, checkpoints, an extra "
                f"micro-batch). {remedy}"
            )
    elif not incident.decided:
        title = f"Gradients of {who} differ in size by a factor of {factor} since step {step}"
        cause = (
            f"The norms of the gradients that {who} compute differ by a factor of {factor} at "
            f"nearly every sample (z = {number(incident.z)}), and nothing in this shows which "
            "one is wrong: a sum in place of a mean, another number of micro-batches, inputs of "
            "another scale."
        )
        remedy = f"Compare the loss, the batch and the preprocessing of {who}."
    else:
        title = f"Gradients of {who} are {factor} times {side} than the others' since step {step}"
        cause = (
            f"The others' are around {number(incident.others)}; those that {who} computes lie on "
            f"the same side at nearly every sample (z = {number(incident.z)}): a sum in place of "
            "a mean, another number of micro-batches, a loss weight, inputs of another scale, "
            "or a faulty device. The reduction mixes it into every copy."
        )
        remedy = (
            f"Compare loss, batch and preprocessing of {who} with the others'; if they are alike, "
            "run a step of it on another device."
        )
    return incident.finding(
        kind="rank.gradient_outlier",
        key=key,
        # Two ranks whose data differ from the first step on are as likely as a fault.
        severity="info" if not incident.decided and incident.from_start else "warning",
        title=title,
        ranks=incident.ranks,
        cause=cause,
        remedy=remedy,
        evidence={
            "factor": incident.factor,
            "z": incident.z,
            "others": incident.others,
            "looks": incident.samples,
            "bursts": incident.bursts,
            **({"period": incident.period} if math.isfinite(incident.period) else {}),
        },
    )
