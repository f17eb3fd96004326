"""What breaks each link of the chain, and what to do about it."""

from __future__ import annotations

from rankscope.server.detectors.desync.gradient_links import gradient_link
from rankscope.server.detectors.desync.incident import Divergence
from rankscope.server.detectors.desync.order import SETTINGS
from rankscope.server.detectors.desync.recovery import restore
from rankscope.server.detectors.mechanisms.wording import (
    count,
    every,
    listing,
    ranks,
    sentences,
)

_LINK = {
    "start": "parameters before the first step",
    "outside_optimizer": "the parameters before the step",
    "reduced_gradient": "the gradient after the all-reduce",
    "clipped_gradient": "the gradient after clipping",
    "optimizer_state": "the optimizer's state",
    "hyperparameters": "the learning rate",
    "parameters": "the parameters after the update",
}


_RESTORE_STATE = "Restore the optimizer on every rank, or broadcast its state after loading."


def broken_link(incident: Divergence, drifting: bool, *, alone: bool = False) -> tuple[str, str]:
    """Cause and remedy of what is known of an incident.

    Args:
        incident: what is known.
        drifting: whether the ranks differ by little more than rounding.
        alone: whether it is certain that the ranks exchange nothing.
    """
    if incident.missed:
        return _missed(incident)
    if incident.lag[0]:
        return _stale(incident)
    if alone:
        return _alone(incident)
    if incident.kind == "desync.gradients":
        return gradient_link(incident)
    if incident.kind == "desync.hyperparameters":
        return _hyperparameters(incident)
    if incident.kind == "desync.optimizer":
        return _optimizer(incident)
    if incident.from_start:
        return _start(incident)
    if drifting:
        return _drift(incident)
    if incident.one_element:
        return _one_element(incident)
    if incident.stage == "outside_optimizer":
        return _outside(incident)
    if incident.stage == "frozen":
        return _frozen(incident)
    return _update(incident)


def stage_of(incident: Divergence) -> str:
    """The stage to report, of those of the contract."""
    if incident.from_start or (incident.at_start and incident.kind == "desync.optimizer"):
        return "start"
    written = incident.written or incident.stage == "frozen"
    return "outside_optimizer" if written else incident.stage


def _alone(incident: Divergence) -> tuple[str, str]:
    steps = incident.last_step - incident.first_step + 1
    before = "They differed before the first step already." if incident.stage == "start" else ""
    return (
        sentences(
            f"In {count(steps, 'step')} no two ranks were seen to apply the same gradient, and no "
            "rank was seen to write its parameters outside its optimizer, as averaging does: each "
            "rank trains a model of its own on its part of the data. The model is not wrapped (no "
            "DistributedDataParallel or FullyShardedDataParallel), and its gradients are not "
            "reduced.",
            before,
        ),
        "Wrap the model on every kind of device that the script runs on (scripts that wrap it "
        "under a condition on the GPU train alone on CPUs), and call the wrapper; or all-reduce "
        "the gradients before each step. If the ranks are meant to train alone (an ensemble, a "
        "search), say so: `monitor.replicas(None)`. "
        f"{restore(incident)}",
    )


def _start(incident: Divergence) -> tuple[str, str]:
    began = f"When the monitor was attached, before step {incident.first_step},"
    state = (
        "The optimizer's state differs, too." if incident.broken.get("optimizer_state", 0) else ""
    )
    if incident.decided and incident.tensors and not incident.everywhere:
        return (
            sentences(
                f"{began} {ranks(incident.ranks)} held other values in these tensors alone: "
                "something wrote them in place after the wrapper had made the ranks equal "
                "(initialisation or surgery on one rank, a checkpoint loaded in part).",
                state,
            ),
            f"Look for code between wrapping the model and the first step that writes parameters "
            f"on {ranks(incident.ranks)} only (`if rank == ...`). {restore(incident)}",
        )
    alone = (
        "Where rank 0 is the one that differs, it is usually the one that did load, and the "
        "others are wrong."
        if incident.decided and incident.ranks == (0,)
        else ""
    )
    return (
        sentences(
            f"{began} the ranks did not hold the same parameters: built from different seeds "
            "without a broadcast, or loaded from a checkpoint on some ranks only, after the "
            "wrapper had made them equal.",
            alone,
            state,
        ),
        "Load the checkpoint on every rank before wrapping the model "
        "(`DistributedDataParallel` broadcasts from rank 0 when it is built), or broadcast "
        "parameters and optimizer state after loading. Nothing repairs the offset by itself: mend "
        "it and start again.",
    )


def _hyperparameters(incident: Divergence) -> tuple[str, str]:
    if not incident.values:
        return (
            f"From step {incident.first_step} on the ranks step with different settings of the "
            "optimizer, and their parameters diverge: built with other options on some ranks, "
            "changed under a condition that differs between ranks, or restored on some ranks only.",
            "Compare the series `hyperparameters/...` of the ranks, and set and restore the "
            f"optimizer alike on every rank. {restore(incident)}",
        )
    if incident.setting not in SETTINGS.values():
        return (
            f"From step {incident.first_step} on the ranks step with another "
            f"{incident.setting} of the optimizer, and their parameters diverge: it was built with "
            "other options on some ranks, changed under a condition that differs between ranks, "
            "or restored on some ranks only.",
            f"Set and restore the optimizer's {incident.setting} alike on every rank. "
            f"{restore(incident)}",
        )
    if incident.setting == "loss scale":
        return (
            f"From step {incident.first_step} on the ranks multiply their losses by different "
            "scales: their gradients are weighted unequally in the reduction, each takes another "
            "scale out of the result, and their parameters diverge. A rank saw an overflow alone, "
            "its scaler was restored or updated alone, or began with another value.",
            "Let all ranks agree on overflows (reduce `found_inf` before `scaler.update()`), "
            "restore the scaler's state on every rank, and start it with one value. "
            f"{restore(incident)}",
        )
    if incident.at_start:
        return (
            "The ranks have stepped with different learning rates since their first step, and "
            "their parameters diverge: the rate comes from what each rank computes for itself (its "
            "number of samples, its arguments or environment), or the optimizer was restored on "
            "some ranks only.",
            "Compute the learning rate from what is the same on all ranks, and restore the "
            f"optimizer on every rank. {restore(incident)}",
        )
    return (
        f"From step {incident.first_step} on the ranks step with different learning rates, and "
        "their parameters diverge. A scheduler decided on a rank's own metric "
        "(`ReduceLROnPlateau` on its own validation loss), was advanced at another pace, or was "
        "restored on some ranks only.",
        "Average the metric over the ranks before the scheduler sees it, and restore scheduler and "
        f"optimizer on every rank. {restore(incident)}",
    )


def _optimizer(incident: Divergence) -> tuple[str, str]:
    unwatched = _unwatched(incident)
    if incident.reported:
        return (
            f"{incident.reported} The other ranks went on with theirs: from this step on the "
            "updates differ, and the parameters with them.",
            "Look for code that builds the optimizer anew, loads its state or clears it on "
            f"{ranks(incident.ranks)} only. {restore(incident)}",
        )
    if incident.shown_by is not None:
        return (
            sentences(
                f"At step {incident.tensor_step} the optimizer's state differs although the "
                f"gradients agreed; the parameters have differed since step {incident.shown_by}. "
                "Only gradients go into this state, so the state differed first: "
                f"{_corrupted(incident)}",
                unwatched,
            ),
            _mend_state(incident),
        )
    state = f"{_corrupted(incident)} The parameters diverge with the next update."
    if set(incident.agreed) & {"reduced_gradient", "clipped_gradient"}:
        cause = f"At step {incident.first_step} gradients agreed and the optimizer's state differs"
        return sentences(f"{cause}: {state}", unwatched), _mend_state(incident)
    return (
        f"At step {incident.first_step} the optimizer's state differs: {state} Gradients were not "
        "sampled at this step: a reduction that failed would show like this, too.",
        "Check `no_sync` and code that touches gradients on these ranks only. "
        f"{_mend_state(incident)}",
    )


def _corrupted(incident: Divergence) -> str:
    """What may have become of a state; one that agreed before is seldom restored in mid-run."""
    if incident.last_equal is None:
        return "it was restored on some ranks only, or one rank's was corrupted."
    return (
        f"it agreed at step {incident.last_equal}, and one rank's was corrupted since (a bit that "
        "flipped, a write to the wrong place), or it was restored or changed on some ranks only."
    )


def _mend_state(incident: Divergence) -> str:
    step, since = incident.first_step, incident.last_equal
    if since is None:
        return f"{_RESTORE_STATE} {restore(incident)}"
    return (
        f"Look for code that loads or writes the optimizer's state after step {since}, up to step "
        f"{step}, on some ranks only; if there is none, test the device and memory of "
        f"{ranks(incident.ranks)}. {restore(incident)}"
    )


def _unwatched(incident: Divergence) -> str:
    """What a difference that was seen some steps after it began may come from as well."""
    if not incident.unwatched or incident.at_start:
        return ""
    since = "" if incident.agreed_until is None else f" since step {incident.agreed_until}"
    return (
        f"Gradients were not compared at every step{since}: one that was wrong on a rank at a step "
        "in between would show like this, too."
    )


def _one_element(incident: Divergence) -> tuple[str, str]:
    tensor = incident.tensors[0]
    since = "" if incident.last_equal is None else f" after step {incident.last_equal}"
    how = (
        f"between two optimizer steps{since}"
        if stage_of(incident) == "outside_optimizer"
        else "although everything that was compared before it agreed"
    )
    return (
        f"A single element of {tensor.name} changed {how}: a bit that flipped in memory or in "
        "computation, or code that writes this one element there alone (one bucket of its sketch "
        "differs, all others are equal to the last bit).",
        f"Look for code around step {incident.first_step} that writes to {tensor.name} on "
        f"{ranks(incident.ranks)} only. If there is none, take the device or memory out of service "
        f"and test it (ECC errors, memtest, dcgmi diag). {restore(incident)}",
    )


def _outside(incident: Divergence) -> tuple[str, str]:
    step = incident.first_step
    return (
        sentences(
            f"Between step {step - 1} and the update of step {step} parameters were changed by "
            "something else than the optimizer, and not alike on all ranks: a checkpoint loaded on "
            "one rank, averaged weights swapped in, clamping or initialisation in the training "
            "loop, or a memory fault.",
            incident.reported,
        ),
        f"Look for code that writes parameters around step {step} under a condition that differs "
        f"between ranks (`if rank == 0:`). {restore(incident)}",
    )


def _frozen(incident: Divergence) -> tuple[str, str]:
    since = "" if incident.last_equal is None else f" after step {incident.last_equal}"
    return (
        f"Parameters that require no gradient are not the same on all ranks at step "
        f"{incident.first_step}. No optimizer moves them, and nothing makes them equal again: they "
        f"were written{since} on some ranks only (a checkpoint or an adapter loaded, a teacher or "
        "target network brought up to date from what is a rank's own), or memory was corrupted.",
        f"Look for code that writes to {incident.tensors[0].name if incident.tensors else 'them'} "
        f"under a condition that differs between ranks (`if rank == 0:`). {restore(incident)}",
    )


def _drift(incident: Divergence) -> tuple[str, str]:
    return (
        "Most tensors differ by little more than rounding: the ranks compute the update with "
        "different arithmetic (mixed devices, library versions, fused against plain kernels). That "
        "is no fault of the synchronisation, but nothing repairs it either.",
        "Use the same devices, libraries and optimizer implementation on all ranks, or "
        "broadcast the parameters from rank 0 every few thousand steps.",
    )


def _update(incident: Divergence) -> tuple[str, str]:
    step = incident.first_step
    agreed = [
        f"the norm of {_LINK[stage]}" if stage in incident.by_norm else _LINK[stage]
        for stage in incident.agreed
        if stage != "start"
    ]
    unsampled = (
        "The gradients were not sampled at this step, so a reduction that failed is not ruled out."
        if "reduced_gradient" not in incident.agreed
        else ""
    )
    before = (
        f"At step {step} {listing(agreed)} agreed, and the parameters after the update do not"
        if agreed
        else f"The parameters differ after step {step}; nothing before them was compared there"
    )
    skipped = ""
    if incident.last_equal is not None and incident.last_equal < step - 1:
        skipped = (
            f"They were last compared and equal at step {incident.last_equal}, so the difference "
            "may have begun at any step in between."
        )
    if incident.tensors and incident.not_held.issuperset(t.name for t in incident.tensors):
        held = listing([t.name for t in incident.tensors], most=4)
        return (
            sentences(
                f"{before}. What differs are tensors that the optimizer which is watched does not "
                f"hold ({held}), and no others: another optimizer has stepped on some ranks only, "
                "or something else writes these tensors, and not alike on all ranks.",
                unsampled,
                skipped,
            ),
            f"Check for conditions around the other optimizer's `step()` on "
            f"{ranks(incident.ranks)}, and that it is set up and restored alike on every rank. "
            f"{restore(incident)}",
        )
    return (
        sentences(
            f"{before}: a rank skipped the step (its own overflow check) or took one more, its "
            "optimizer's state or settings differ, or its update was computed wrongly.",
            unsampled,
            skipped,
        ),
        "Check for conditions around `optimizer.step()` that can differ between ranks (found_inf "
        "not reduced), and that optimizer state was restored on every rank. "
        f"{restore(incident)}",
    )


def _missed(incident: Divergence) -> tuple[str, str]:
    if incident.ended:
        return (
            f"The ranks were made equal {every(incident.missed)} until then, and no longer since: "
            f"at step {incident.first_step} the next synchronisation was due, no rank wrote its "
            f"parameters there or up to step {incident.seen_step}, and each goes on with a model "
            "of its own.",
            "Look at the condition under which the ranks average (a count of steps, an epoch, a "
            f"phase that ended), and at the calls it leads to. {restore(incident)}",
        )
    return (
        f"The ranks were made equal {every(incident.missed)}, and at step "
        f"{incident.first_step} they were not: {_who_missed(incident)}.",
        f"Check that every rank takes part in every averaging. {restore(incident)}",
    )


def _who_missed(incident: Divergence) -> str:
    if not incident.decided or len(incident.groups[0]) < 2:
        return "a rank missed the synchronisation or left it with other values"
    return (
        f"the distance fell to 0 on {ranks(incident.groups[0])}, and not on "
        f"{ranks(incident.ranks)}, which missed the synchronisation or left it with other values"
    )


def _stale(incident: Divergence) -> tuple[str, str]:
    oldest, usual = incident.lag
    return (
        f"The parameters of {ranks(incident.ranks)} are {count(oldest, 'step')} old, and growing "
        f"older; before, no rank was more than {count(usual, 'step')} behind when it caught up. "
        f"{'It pulls' if len(incident.ranks) == 1 else 'They pull'} too seldom, or pulls are "
        "lost.",
        "Find out what that worker waits for, and bound the staleness: let a worker wait (or drop "
        "its gradient) when its version is more than a set number of steps old.",
    )
