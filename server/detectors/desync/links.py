"""What breaks each link of the chain, and what to do about it."""

from __future__ import annotations

import math

from rankscope.server.detectors.desync.incident import Divergence
from rankscope.server.detectors.desync.order import SETTINGS
from rankscope.server.detectors.wording import (
    agree,
    count,
    every,
    listing,
    number,
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


# Two factors are one: float32 rounds a product to 6e-8, and a factor is read off sketches in which
# as much as 1e-5 of the tensor may be left over.
_ALIKE = 1e-4

# Comparisons from which on "at every step" says something.
_A_FEW = 4

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
        return _gradients(incident)
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


def shown_groups(incident: Divergence) -> str:
    """The groups of equal ranks: `(0 and 1) and (2 and 3)`."""
    return listing([f"({listing([str(r) for r in group])})" for group in incident.groups])


def stage_of(incident: Divergence) -> str:
    """The stage to report, of those of the contract."""
    if incident.from_start or (incident.at_start and incident.kind == "desync.optimizer"):
        return "start"
    written = incident.written or incident.stage == "frozen"
    return "outside_optimizer" if written else incident.stage


def _restore(incident: Divergence, source: str = "") -> str:
    """How to get out of it once the cause is mended."""
    good = next((group for group in incident.groups if incident.decided), ())
    source = source or (f"rank {good[0]}" if good else "a rank that you trust")
    again = (
        f"go back to a checkpoint from before step {incident.first_step}"
        if incident.first_step > 0
        else "start again"
    )
    return (
        "Then make the ranks equal again: broadcast parameters and optimizer state from "
        f"{source}, or {again}."
    )


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
        f"{_restore(incident)}",
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
            f"on {ranks(incident.ranks)} only (`if rank == ...`). {_restore(incident)}",
        )
    alone = (
        "Where rank 0 is alone it is mostly the one that did load, and the others are wrong."
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


def _gradients(incident: Divergence) -> tuple[str, str]:
    source = ""
    partly = bool(incident.tensors) and not incident.everywhere
    subgroups = incident.subgroups
    alone = all(len(group) == 1 for group in incident.groups)
    if incident.stage == "clipped_gradient":
        cause = sentences(
            f"The gradients agreed before clipping at step {incident.first_step} and differ after "
            "it: the ranks clipped to different norms, or not all of them clipped.",
            _clipped(incident),
        )
        remedy = (
            "Clip on all ranks or on none, by the norm of the whole reduced gradient and to one "
            "limit: look for a condition on the rank around the clipping."
        )
    elif subgroups and partly:
        shown = shown_groups(incident)
        held = listing([t.name for t in incident.tensors], most=4)
        cause = (
            f"The gradient of {held} agrees inside the groups of ranks {shown} and not between "
            "them, that of the other tensors as it should: ranks that share the model between "
            "them (tensor or sequence parallel, tied layers of a pipeline) hold these tensors "
            "all, and each has a part of their gradient only."
        )
        remedy = (
            "Sum the gradient of these tensors over the tensor-parallel (or tied) group as well, "
            "before the reduction over the data-parallel ranks. If the ranks share nothing, check "
            "the process group of that reduction."
        )
    elif subgroups:
        shown = shown_groups(incident)
        cause = (
            f"The gradients agree inside the groups of ranks {shown} and not between them: they "
            "were reduced inside these groups only."
        )
        remedy = "Reduce over all data-parallel ranks: check the process group or mesh dimension."
    elif incident.parts:
        cause, remedy = _of_parts(incident)
    elif alone and len(incident.ranks) > 2 and partly:
        held = listing([t.name for t in incident.tensors], most=4)
        cause = (
            f"At step {incident.first_step} every rank applied a gradient of its own of {held}, "
            "and one that all share of the other tensors: these are not reduced. They were "
            "replaced or added after the model was wrapped, their hooks were lost, or they are "
            "missing from the all-reduce."
        )
        remedy = (
            "Wrap the model last, after every change to its parameters, or add these tensors to "
            "what is all-reduced."
        )
    elif _exchanged(incident):
        held = listing([f"{t.name} (that of {t.partner})" for t in incident.tensors], most=4)
        cause = (
            f"At step {incident.first_step} {ranks(incident.ranks)} "
            f"{agree(len(incident.ranks), 'holds')} in one tensor the gradient that the "
            f"other ranks hold in another one of the same shape: {held}. "
            f"{ranks(incident.ranks).capitalize()} started these reductions in another order, so "
            "that they were paired wrongly on all ranks."
        )
        remedy = (
            "Reduce in one fixed order on every rank, sorted by name, and not in the order of a "
            "set or of the gradients' arrival. No rank's gradient of these tensors was right."
        )
        source = "any one rank"
    elif _zeroed(incident):
        held = listing([t.name for t in incident.tensors], most=4)
        cause = (
            f"At step {incident.first_step} the gradient of {held} was zero on "
            f"{ranks(incident.ranks)} after the reduction: its buffer was cleared, was not "
            "written, or was read before the reduction was done, or the reduction lost it."
        )
        remedy = (
            f"Check what touches the gradient of {incident.tensors[0].name} on "
            f"{ranks(incident.ranks)} between the reduction and the step: `zero_grad`, buffers "
            "that are used again, handles that are not waited for. If the code is sound, suspect "
            "the interconnect: run nccl-tests, try without P2P."
        )
    elif multiple := _multiple(incident):
        cause = (
            f"At step {incident.first_step} the gradient that {ranks(incident.ranks)} applied was "
            f"that of the other ranks in direction, and {multiple}"
        )
        remedy = (
            "Compute divisors, weights and scales alike on every rank, and after the reduction "
            f"multiply gradients on all ranks or on none: look for a condition on the rank, and "
            f"for a world size or a number of samples that {ranks(incident.ranks)} counts "
            "otherwise."
        )
    elif alone and len(incident.ranks) > 2:
        cause = (
            f"At step {incident.first_step} every rank applied a gradient of its own: no "
            f"all-reduce took place. {_unreduced(incident)}"
        )
        remedy = (
            "Call the wrapped model itself, run the last micro-batch (forward and backward) "
            "outside `no_sync`, or all-reduce the gradients yourself before the step."
        )
    elif alone and incident.everywhere and _never_equal(incident):
        cause = (
            f"At every step since step {incident.first_step} each rank applied a gradient of its "
            f"own: no all-reduce took place, or {ranks(incident.ranks)} change what it gave. "
            f"{_unreduced(incident)}"
        )
        remedy = (
            "Call the wrapped model itself, run the last micro-batch (forward and backward) "
            "outside `no_sync`, or all-reduce the gradients yourself before the step."
        )
    elif partly and incident.decided:
        who = ranks(incident.ranks)
        cause = (
            f"At step {incident.first_step} the gradient of these tensors was not that of the "
            f"other ranks on {who} after the reduction: {who} read it before the all-reduce was "
            "done, a communication hook or other code changed it there, or the reduction "
            f"delivered something else to {who}."
        )
        remedy = (
            f"Check what touches these gradients on {who} between backward and step: asynchronous "
            "handles and streams that are not waited for, communication hooks, conditions on the "
            "rank. If the code is sound, suspect the interconnect: run nccl-tests, try without P2P."
        )
    elif partly:
        cause = (
            f"At step {incident.first_step} not all tensors had the same gradient on all ranks "
            "after the reduction: these were left out of the all-reduce, read before it was done, "
            "belong to parameters that were replaced or added after wrapping, or are held by ranks "
            "that share the rest of the model between them and did not sum their parts."
        )
        remedy = (
            f"Check what touches the gradient of {incident.tensors[0].name}: communication hooks, "
            "asynchronous handles that are not waited for, parameters replaced after wrapping "
            "(wrap last). If the code is sound, suspect the interconnect: run nccl-tests, try "
            "without P2P."
        )
    else:
        cause = (
            f"At step {incident.first_step} the gradients that the ranks applied were not the same "
            "after the reduction: the all-reduce was skipped or not waited for on a rank, it "
            "delivered different results, or a rank changed its gradient afterwards."
        )
        remedy = (
            "Check `no_sync`, communication hooks, and code that touches gradients between "
            "backward and step on that rank only. If the code is sound, suspect the interconnect: "
            "run nccl-tests, try without P2P."
        )
    return cause, f"{remedy} {_restore(incident, source)}"


def _of_parts(incident: Divergence) -> tuple[str, str]:
    """Of ranks that share the model between them: what each has a copy of got another gradient."""
    who = ranks(sorted(r for group in incident.groups for r in group))
    held = listing([t.name for t in incident.tensors], most=4) or "some tensors"
    began = (
        f"{who.capitalize()} hold different parts of the model and compute one result (tensor "
        f"parallelism); of {held} each has a copy, and at step {incident.first_step} these "
        "got different gradients."
    )
    if incident.own_batches:
        return (
            f"{began} The ranks read different batches at that step: what parts of a model make of "
            "different batches is the result of none of them.",
            "Give all ranks that share a model the same batch: seed and shard the loader by the "
            "data-parallel rank, not by the global one. If they are meant to read different ones "
            "(sequence parallelism), sum the gradients of what they all hold.",
        )
    return (
        f"{began} Each has a part of their gradient, which was not summed over the ranks that "
        "share the model, or something random (dropout) was drawn differently on them.",
        "Sum the gradient of these tensors over the ranks that share the model before the step, "
        "and let what follows a gathered result draw the same random numbers on all of them.",
    )


def _unreduced(incident: Divergence) -> str:
    """Why nothing was reduced: what has worked before is more often left out than gone around."""
    around, inside = "the forward pass went around the wrapper (`ddp.module(x)`)", "`no_sync`"
    if incident.last_equal is None:
        return f"{around.capitalize()}, or the step was taken inside {inside}."
    return f"The last backward pass before the step was inside {inside}, or {around}."


def _never_equal(incident: Divergence) -> bool:
    """Whether these gradients were never seen to agree, at more than a few steps."""
    compared = incident.compared.get(incident.stage, 0)
    seen_equal = incident.last_equal is not None and incident.last_equal < incident.first_step
    return not seen_equal and incident.broken.get(incident.stage, 0) == compared >= _A_FEW


def _exchanged(incident: Divergence) -> bool:
    """Whether each tensor that differs is another rank's other tensor."""
    return incident.decided and bool(incident.tensors) and all(t.partner for t in incident.tensors)


def _zeroed(incident: Divergence) -> bool:
    """Whether what differs was zero on the suspect ranks."""
    return (
        incident.decided and bool(incident.tensors) and all(t.factor == 0 for t in incident.tensors)
    )


def _multiple(incident: Divergence) -> str:
    """By what the suspect's gradient was multiplied, where all that differs is that one factor."""
    factors = [t.factor for t in incident.tensors]
    if not incident.decided or not factors or any(math.isnan(f) for f in factors):
        return ""
    factor, size = factors[0], sum(map(len, incident.groups))
    # Alike in all tensors, as far as float32 and sketches go.
    if max(factors) - min(factors) > _ALIKE * abs(factor) or abs(factor - 1) <= _ALIKE:
        return ""
    times = f"{number(factor)} times as large"
    if abs(factor - size) <= _ALIKE * size:
        return f"{times}: it is the sum over the {size} ranks, not divided by their number."
    if abs(factor * size - 1) <= _ALIKE:
        return f"{times}: it was divided by the number of ranks twice."
    if factor < 0:
        return f"{number(factor)} times it: its sign was turned after the reduction."
    return (
        f"{times}: after the reduction it was divided by another number there, weighted, clipped, "
        "or a loss scale was taken out of it that is not the others'."
    )


def _clipped(incident: Divergence) -> str:
    """How the clipped gradients are related, where one is a multiple of the other."""
    factors = [t.factor for t in incident.tensors]
    same = incident.decided and factors and max(factors) - min(factors) <= 1e-3 * abs(factors[0])
    if not same or factors[0] <= 0:
        return ""
    who = "it" if len(incident.ranks) == 1 else "they"
    more = f"{who} alone clipped, or to a smaller norm" if factors[0] < 1 else f"{who} clipped less"
    return f"That of {ranks(incident.ranks)} is {number(factors[0])} times the others': {more}."


def _hyperparameters(incident: Divergence) -> tuple[str, str]:
    if not incident.values:
        return (
            f"From step {incident.first_step} on the ranks step with different settings of the "
            "optimizer, and their parameters diverge: built with other options on some ranks, "
            "changed under a condition that differs between ranks, or restored on some ranks only.",
            "Compare the series `hyperparameters/...` of the ranks, and set and restore the "
            f"optimizer alike on every rank. {_restore(incident)}",
        )
    if incident.setting not in SETTINGS.values():
        return (
            f"From step {incident.first_step} on the ranks step with another "
            f"{incident.setting} of the optimizer, and their parameters diverge: it was built with "
            "other options on some ranks, changed under a condition that differs between ranks, "
            "or restored on some ranks only.",
            f"Set and restore the optimizer's {incident.setting} alike on every rank. "
            f"{_restore(incident)}",
        )
    if incident.setting == "loss scale":
        return (
            f"From step {incident.first_step} on the ranks multiply their losses by different "
            "scales: their gradients are weighted unequally in the reduction, each takes another "
            "scale out of the result, and their parameters diverge. A rank saw an overflow alone, "
            "its scaler was restored or updated alone, or began with another value.",
            "Let all ranks agree on overflows (reduce `found_inf` before `scaler.update()`), "
            "restore the scaler's state on every rank, and start it with one value. "
            f"{_restore(incident)}",
        )
    if incident.at_start:
        return (
            "The ranks have stepped with different learning rates since their first step, and "
            "their parameters diverge: the rate comes from what each rank computes for itself (its "
            "number of samples, its arguments or environment), or the optimizer was restored on "
            "some ranks only.",
            "Compute the learning rate from what is the same on all ranks, and restore the "
            f"optimizer on every rank. {_restore(incident)}",
        )
    return (
        f"From step {incident.first_step} on the ranks step with different learning rates, and "
        "their parameters diverge. A scheduler decided on a rank's own metric "
        "(`ReduceLROnPlateau` on its own validation loss), was advanced at another pace, or was "
        "restored on some ranks only.",
        "Average the metric over the ranks before the scheduler sees it, and restore scheduler and "
        f"optimizer on every rank. {_restore(incident)}",
    )


def _optimizer(incident: Divergence) -> tuple[str, str]:
    unwatched = _unwatched(incident)
    if incident.reported:
        return (
            f"{incident.reported} The other ranks went on with theirs: from this step on the "
            "updates differ, and the parameters with them.",
            "Look for code that builds the optimizer anew, loads its state or clears it on "
            f"{ranks(incident.ranks)} only. {_restore(incident)}",
        )
    if incident.shown_by is not None:
        return (
            sentences(
                f"At step {incident.tensor_step} the optimizer's state differs although the "
                f"gradients agreed, and the parameters have since step {incident.shown_by}: "
                "gradients are all that goes into this state, so it was there first: "
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
        return f"{_RESTORE_STATE} {_restore(incident)}"
    return (
        f"Look for code that loads or writes the optimizer's state after step {since}, up to step "
        f"{step}, on some ranks only; if there is none, test the device and memory of "
        f"{ranks(incident.ranks)}. {_restore(incident)}"
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
        "computation (one bucket of its sketch differs, all others are equal to the last bit).",
        f"Take the device or memory of {ranks(incident.ranks)} out of service and test it (ECC "
        f"errors, memtest, dcgmi diag). {_restore(incident)}",
    )


def _outside(incident: Divergence) -> tuple[str, str]:
    step = incident.first_step
    return (
        f"Between step {step - 1} and the update of step {step} parameters were changed by "
        "something else than the optimizer, and not alike on all ranks: a checkpoint loaded on one "
        "rank, averaged weights swapped in, clamping or initialisation in the training loop, or a "
        "memory fault.",
        f"Look for code that writes parameters around step {step} under a condition that differs "
        f"between ranks (`if rank == 0:`). {_restore(incident)}",
    )


def _frozen(incident: Divergence) -> tuple[str, str]:
    since = "" if incident.last_equal is None else f" after step {incident.last_equal}"
    return (
        f"Parameters that require no gradient are not the same on all ranks at step "
        f"{incident.first_step}. No optimizer moves them, and nothing makes them equal again: they "
        f"were written{since} on some ranks only (a checkpoint or an adapter loaded, a teacher or "
        "target network brought up to date from what is a rank's own), or memory was corrupted.",
        f"Look for code that writes to {incident.tensors[0].name if incident.tensors else 'them'} "
        f"under a condition that differs between ranks (`if rank == 0:`). {_restore(incident)}",
    )


def _drift(incident: Divergence) -> tuple[str, str]:
    return (
        "Most tensors differ by little more than rounding: the ranks compute the update with "
        "different arithmetic (mixed devices, library versions, fused against plain kernels). That "
        "is no fault of the synchronisation, but nothing repairs it either.",
        "Use the same devices, libraries and optimizer implementation on all ranks, or broadcast "
        "the parameters from rank 0 every some thousand steps.",
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
            f"They were last compared and equal at step {incident.last_equal}, so it may have "
            "begun at any step in between."
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
        f"{_restore(incident)}",
    )


def _missed(incident: Divergence) -> tuple[str, str]:
    return (
        f"The ranks were made equal {every(incident.missed)}, and at step "
        f"{incident.first_step} they were not: {_who_missed(incident)}.",
        f"Check that every rank takes part in every averaging. {_restore(incident)}",
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
        f"older; no rank has caught up with more than {count(usual, 'step')} before. "
        f"{'It pulls' if len(incident.ranks) == 1 else 'They pull'} too seldom, or pulls are lost.",
        "Find out what that worker waits for, and bound the staleness: let a worker wait (or drop "
        "its gradient) when its version is more than a set number of steps old.",
    )
