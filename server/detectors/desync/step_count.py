"""Ranks that have counted differently, and what to say of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.episode import Episode
from rankscope.server.detectors.mechanisms.incident import Incident
from rankscope.server.detectors.mechanisms.wording import agree, listing, number, ranks, sentences

# What is counted, and how a person calls it.
COUNTED = {
    "optimizer_steps": "steps of the optimizer",
    "steps_skipped": "skipped steps",
    # Whoever logs it.
    "epoch": "epochs",
}


@dataclass(slots=True)
class StepMismatch:
    """Ranks that counted differently.

    Attributes:
        what: one of `COUNTED`, `begin` or `end` for the step at which they began or ended, or the
            series that showed a step too few or too many.
        values: by rank, at the first step.
        suspects: those outside the majority; all where there is none.
        sharded: each holds a part of the model, which is no other's copy.
    """

    what: str
    values: dict[int, float]
    suspects: tuple[int, ...]
    decided: bool
    before: dict[int, float] = field(default_factory=dict)
    sharded: bool = False


def counted_finding(episode: Episode[StepMismatch]) -> Finding:
    """Ranks that have counted other steps, skipped steps or epochs."""
    mismatch, step = episode.facts, episode.first_step
    what, suspects = COUNTED[mismatch.what], mismatch.suspects
    who = ranks(suspects).capitalize()
    verb = agree(len(suspects), "has")
    reported = _listed(mismatch, what)
    if mismatch.what == "epoch":
        title = f"{who} {agree(len(suspects), 'is')} in a different epoch since step {step}"
        if not mismatch.decided:
            title = f"{who} are in different epochs since step {step}"
        cause = (
            f"At step {step}, {reported}. Their epochs are not equally long: the data are dealt "
            "out unequally (sampler lengths, filtered samples, `drop_last` on some ranks only), or "
            "a loader was started again earlier. Seeds, schedules and the order of the samples "
            "that follow the epoch are no longer those of the other ranks."
        )
        remedy = (
            "Give every rank the same number of batches an epoch (DistributedSampler with "
            "`drop_last`, or one length agreed on by all), and count epochs by common steps."
        )
    elif mismatch.what == "steps_skipped" or _one_missing(mismatch):
        title = f"{who} {verb} not skipped the same steps as the other ranks, at step {step}"
        if not mismatch.decided:
            title = f"{who} have skipped different steps, at step {step}"
        cause = (
            f"At step {step}, {reported}: an overflow was seen on some ranks only, and each "
            "decided alone whether to step. What they hold differs by this step."
        )
        remedy = (
            "Reduce `found_inf` over all ranks (MAX) before the decision to skip, or unscale "
            "after the reduction; then broadcast parameters and optimizer state."
        )
    else:
        title = f"{who} {verb} taken a different number of steps, at step {step}"
        if not mismatch.decided:
            title = f"{who} have taken different numbers of steps, at step {step}"
        cause = (
            f"At step {step}, {reported}: a rank was resumed from another checkpoint, took further "
            "steps, or left some out."
        )
        remedy = (
            "Restore the same checkpoint, its step and its optimizer on every rank, and call "
            "`optimizer.step()` under the same conditions everywhere."
        )
    return episode.finding(
        kind="desync.progress",
        key="epoch" if mismatch.what == "epoch" else "",
        severity="warning" if mismatch.what == "epoch" else "critical",
        title=title,
        ranks=suspects,
        stage="parameters" if step else "start",
        cause=sentences(cause, _guess(mismatch)),
        remedy=remedy,
        evidence={
            "what": mismatch.what,
            "values": {str(r): v for r, v in mismatch.values.items()},
            "decided": mismatch.decided,
        },
    )


_SKIPPED = (
    "has skipped a step that they took, for an overflow that it saw alone or under another "
    "condition of its own, and its parameters, schedule and counters are one step behind."
)


def late_finding(episode: Episode[StepMismatch]) -> Finding:
    """Ranks that have left out a step, found by what they applied or discarded."""
    mismatch, step = episode.facts, episode.first_step
    who = ranks(mismatch.suspects)
    title = f"{who.capitalize()} did not take step {step}, which the others took"
    cause = _left_out(mismatch, who, step)
    remedy = (
        "Decide on all ranks together whether a step is skipped (reduce `found_inf` with MAX "
        "before the decision)"
    )
    if mismatch.what == "micro_steps":
        title = f"{who.capitalize()} took one step more than the others, at step {step}"
        cause = (
            f"Without a backward pass of its own for step {step}, {who} stepped, and since then it "
            "applies at each of its steps the gradient that the others applied one step before: "
            "`optimizer.step()` was called twice for one gradient, and its parameters, schedule "
            "and counters are one step ahead."
        )
        remedy = "Call `optimizer.step()` once for each gradient, under one condition on all ranks"
    return episode.finding(
        kind="desync.progress",
        key="late",
        severity="critical",
        title=title,
        ranks=mismatch.suspects,
        stage="parameters",
        cause=cause,
        remedy=(
            f"{remedy}, then broadcast parameters and optimizer state, or restart from a "
            f"checkpoint before step {step}."
        ),
        evidence={
            "what": mismatch.what,
            "values": {str(r): v for r, v in mismatch.values.items()},
            "decided": mismatch.decided,
            "observed": episode.seen,
        },
    )


def _left_out(mismatch: StepMismatch, who: str, step: int) -> str:
    if mismatch.what == "grad_norm":
        return (
            f"Since step {step}, {who} applies at each step the gradient that the others apply one "
            f"step later: it {_SKIPPED}"
        )
    least = min(mismatch.values.values())
    others = "the others did not" if not least else f"the others {number(least)}"
    thrown = (
        "computed a gradient and threw it away"
        if not least
        else f"threw away {number(max(mismatch.values.values()))} gradients that it had computed"
    )
    if mismatch.sharded:
        return (
            f"Before its step {step}, {who} {thrown}, {others}: all ranks took part in these "
            "passes, and only some stepped with their gradients. Each holds a part of the "
            "parameters, so that from then on the parts of the model are of different steps; no "
            "two are alike, and nothing else shows it."
        )
    return (
        f"Before its step {step}, {who} {thrown}, {others}, "
        f"and the ranks are no longer equal since: it {_SKIPPED}"
    )


def begun_finding(mismatch: StepMismatch, step: int, last_step: int) -> Finding:
    """Ranks that began at different steps."""
    who = ranks(mismatch.suspects).capitalize()
    return Incident.since(step, last_step).finding(
        kind="desync.progress",
        key="begin",
        severity="critical",
        title=(
            f"{who} began at a different step than the other ranks"
            if mismatch.decided
            else f"{who} began at different steps"
        ),
        ranks=mismatch.suspects,
        stage="start",
        cause=sentences(
            f"The ranks did not begin at the same step: {_listed(mismatch, 'step')}. The "
            "checkpoint was found on some ranks only, they resumed from different ones, or a rank "
            "restored its weights and not its step: schedules, seeds and save points disagree.",
            _guess(mismatch),
        ),
        remedy=(
            "Decide on one rank which checkpoint is loaded and broadcast that decision, or put "
            "checkpoints where all nodes can read them; restore the step with the weights on "
            "every rank."
        ),
        evidence={
            "what": "begin",
            "values": {str(r): v for r, v in mismatch.values.items()},
            "decided": mismatch.decided,
        },
    )


def ended_finding(mismatch: StepMismatch, last_step: int) -> Finding:
    """Ranks that took their last step long before the others."""
    who, short = ranks(mismatch.suspects), mismatch.suspects
    last = int(max(mismatch.values[rank] for rank in short))
    most = int(max(mismatch.values.values()))
    verb = agree(len(short), "has")
    return Incident.since(last + 1, last_step).finding(
        kind="desync.progress",
        key="end",
        severity="warning",
        title=(
            f"{who.capitalize()} took no step after step {last}, and the other ranks went on to "
            f"step {most}"
        ),
        ranks=short,
        stage="parameters",
        cause=(
            f"Up to step {last} the ranks trained together. {who.capitalize()} "
            f"{verb} ended without an error, {most - last:,} steps before the others: the "
            "optimizer that is watched no longer stepped there (a condition on that rank alone, "
            "another optimizer in its place), its loop ended early, or its monitor was closed. "
            f"What became of {'its' if len(short) == 1 else 'their'} parameters since is not known."
        ),
        remedy=(
            f"Look at what decides on {who} whether `optimizer.step()` is called, and at the "
            "length of its data; let all ranks decide by a number that they have reduced."
        ),
        evidence={
            "what": "end",
            "values": {str(r): v for r, v in mismatch.values.items()},
            "decided": True,
        },
    )


def _listed(mismatch: StepMismatch, what: str) -> str:
    by_value: dict[float, list[int]] = {}
    for rank, value in mismatch.values.items():
        by_value.setdefault(value, []).append(rank)
    said = []
    for value, held in sorted(by_value.items(), key=lambda item: len(item[1])):
        verb = agree(len(held), "has")
        if what == "step":
            said.append(f"{ranks(held)} at step {value:,.0f}")
        elif what == "epochs":
            said.append(f"{ranks(held)} {agree(len(held), 'is')} in epoch {value:,.0f}")
        else:
            said.append(f"{ranks(held)} {verb} {value:,.0f} {what}")
    return listing(said, most=4)


def _one_missing(mismatch: StepMismatch) -> bool:
    """Whether they were level at the step before, and differ by one now."""
    return (
        len(set(mismatch.before.values())) == 1
        and max(mismatch.values.values()) - min(mismatch.values.values()) == 1
    )


def _guess(mismatch: StepMismatch) -> str:
    if mismatch.decided:
        return ""
    if len(mismatch.values) == 2:
        return "With two ranks, nothing shows which one is wrong."
    return "No value is that of most ranks, so nothing shows which ones are wrong."
