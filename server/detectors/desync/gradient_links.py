"""Why gradients differ between ranks after the reduction or after clipping, and what to do."""

from __future__ import annotations

import math

from rankscope.server.detectors.desync.applied import of_what_went_in, why_unreduced
from rankscope.server.detectors.desync.incident import Divergence
from rankscope.server.detectors.desync.recovery import restore, shown_groups
from rankscope.server.detectors.mechanisms.wording import (
    agree,
    count,
    listing,
    number,
    ranks,
    sentences,
)

# Two factors are one: float32 rounds a product to 6e-8, and a factor is read off sketches in which
# as much as 1e-5 of the tensor may be left over.
_ALIKE = 1e-4

# Comparisons from which on "at every step" says something.
_A_FEW = 4


def gradient_link(incident: Divergence) -> tuple[str, str]:
    """Cause and remedy where gradients were the first that differed, reduced or clipped."""
    source = ""
    partly = bool(incident.tensors) and not incident.everywhere
    subgroups = incident.subgroups
    alone = all(len(group) == 1 for group in incident.groups)
    if incident.inside:
        cause = (
            f"At every step since step {incident.first_step} the gradients that the ranks gave to "
            "their optimizers were not the same, and after each of these steps the parameters "
            f"were, at {count(incident.compared['parameters'], 'step')}: the optimizer reduces "
            "the gradients itself, in its own step (a sharded optimizer, `reduce_scatter` and "
            "`all_gather`), or one rank's parameters are sent to all in it."
        )
        remedy = (
            "Nothing, if `step()` is meant to reduce. If it only sends one rank's parameters to "
            "the others, what these have learned is lost: reduce the gradients before."
        )
        return cause, remedy
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
            "them; that of the other tensors is as it should be. Ranks that share the model "
            "between them (tensor or sequence parallel, tied layers of a pipeline) all hold "
            "these tensors, and each has only a part of their gradient."
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
            f"At step {incident.first_step} every rank applied its own gradient for {held} but "
            f"the shared one for all other tensors: {held} {agree(len(incident.tensors), 'is')} "
            "not all-reduced. The parameters were replaced or added after the model was "
            "wrapped, their hooks were lost, or they are missing from the all-reduce."
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
            f"At step {incident.first_step} the gradient that {ranks(incident.ranks)} applied "
            f"was {multiple}"
        )
        remedy = (
            "Compute divisors, weights and scales alike on every rank, and after the reduction "
            "multiply gradients on all ranks or on none: look for a condition on the rank, and "
            f"for a world size or a number of samples that {ranks(incident.ranks)} counts "
            "differently."
        )
    elif known := of_what_went_in(incident):
        cause, remedy = known
    elif alone and len(incident.ranks) > 2:
        cause = (
            f"At step {incident.first_step} every rank applied another gradient: no all-reduce "
            "took place, or the ranks changed what it gave, or did not wait for it "
            f"(`async_op=True` and no `wait()`). {why_unreduced(incident)}"
        )
        remedy = (
            "Call the wrapped model itself, run the last micro-batch (forward and backward) "
            "outside `no_sync`, or all-reduce the gradients yourself before the step."
        )
    elif alone and incident.everywhere and _never_equal(incident):
        cause = (
            f"At every step since step {incident.first_step} each rank applied another gradient: "
            f"no all-reduce took place, or {ranks(incident.ranks)} change what it gave, or do not "
            "wait for it (`async_op=True` and no `wait()`). "
            f"{why_unreduced(incident)}"
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
    return cause, f"{remedy} {restore(incident, source)}"


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
    times = f"{number(factor)} times that of the other ranks"
    if abs(factor - size) <= _ALIKE * size:
        return f"{times}: it is the sum over the {size} ranks, not divided by their number."
    if abs(factor * size - 1) <= _ALIKE:
        return f"{times}: it was divided by the number of ranks twice."
    if factor < 0:
        return f"{times}: its sign was turned after the reduction."
    return (
        f"{times}: after the reduction it was divided by another number than on the other ranks, "
        "weighted, clipped, or unscaled by another loss scale."
    )


def _clipped(incident: Divergence) -> str:
    """How the clipped gradients are related, where one is a multiple of the other."""
    factors = [t.factor for t in incident.tensors]
    same = incident.decided and factors and max(factors) - min(factors) <= 1e-3 * abs(factors[0])
    if not same or factors[0] <= 0:
        return ""
    who = "it" if len(incident.ranks) == 1 else "they"
    more = f"{who} alone clipped, or to a smaller norm" if factors[0] < 1 else f"{who} clipped less"
    return (
        f"The gradient of {ranks(incident.ranks)} is {number(factors[0])} times the others': "
        f"{more}."
    )
