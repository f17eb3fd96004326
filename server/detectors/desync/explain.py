"""Puts a desync into words: what, why, and what to do about it."""

from __future__ import annotations

import sys

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.desync.incident import Apart, Growth
from rankscope.server.detectors.wording import count, listing, number, ranks, sentences
from rankscope.server.window import TensorDifference

_MAX_DETAILS = 16
_TINY = sys.float_info.min
# Steps within which ranks that go their own ways from the start may be made equal.
_PATIENCE = 64

_LINK = {
    "start": "parameters before the first step",
    "outside_optimizer": "the parameters before the step",
    "reduced_gradient": "the gradient after the all-reduce",
    "clipped_gradient": "the gradient after clipping",
    "optimizer_state": "the optimizer's state",
    "hyperparameters": "the learning rate",
    "parameters": "the parameters after the update",
}


def finding_of(incident: Apart, drift: float, critical: float) -> Finding:
    """The finding as it stands.

    Args:
        incident: what is known.
        drift: relative distance below which it is mere drift.
        critical: relative distance from which it is critical.
    """
    # What no sketch shows are zeros of another sign.
    drifting = incident.relative < drift and (incident.spread or incident.relative <= _TINY)
    cause, remedy = _explain(incident, drifting)
    return Finding(
        kind=incident.kind,
        # Beside the alert that ranks are apart between synchronisations, which they are again next.
        key="missed" if incident.missed else "",
        severity=_severity(incident, drifting, critical),
        title=_title(incident),
        seen_step=incident.seen_step,
        last_step=incident.last_step,
        first_step=incident.first_step,
        ranks=incident.ranks,
        # The state of an optimizer has several tensors of one name.
        tensors=tuple(dict.fromkeys(t.name for t in incident.tensors)),
        # What the optimizer brought along was there before the first step.
        stage=_stage(incident),
        cause=cause,
        remedy=remedy,
        clear_after=incident.clear_after,
        evidence={
            "groups": [list(group) for group in incident.groups],
            "decided": incident.decided,
            "last_equal_step": incident.last_equal,
            "agreed": list(incident.agreed),
            "relative": incident.relative,
            "tensor_step": incident.tensor_step,
            "tensor_stage": incident.tensor_stage,
            "tensors_differing": len(incident.tensors),
            "tensor_count": incident.tensor_count,
            "tensor_details": [_detail(t) for t in incident.tensors[:_MAX_DETAILS]],
            "one_element": incident.one_element,
            "growth": str(incident.growth),
            "sizes": [list(size) for size in incident.sizes],
            "broken": dict(incident.broken),
            "compared": dict(incident.compared),
            **(
                {"values": {str(rank): value for rank, value in incident.values.items()}}
                if incident.values
                else {}
            ),
        },
    )


def periodic_finding(*, period: int, since: int, seen: int, last_step: int) -> Finding:
    """Ranks that are apart and made equal again every so many steps."""
    return Finding(
        kind="desync.parameters",
        key="synchronised",
        severity="info",
        title=f"The ranks are apart between synchronisations, every {period} steps",
        seen_step=seen,
        last_step=last_step,
        first_step=since,
        stage="parameters",
        cause=(
            f"The parameters are equal at every {period}th step and differ in between: local SGD, "
            "DiLoCo or another periodic averaging. A synchronisation that does not make all ranks "
            "equal is reported as a desync."
        ),
        remedy=(
            "Nothing, if this is meant. If it is not, look for gradients that are not reduced in "
            "every step (`no_sync`) and for parameters that are broadcast now and then."
        ),
        clear_after=2 * period,
        evidence={"period": period},
    )


def versions_finding(*, since: int, last_step: int, caught_up: int) -> Finding:
    """Ranks that hold versions of one model."""
    return Finding(
        kind="desync.parameters",
        key="versions",
        severity="info",
        title="The ranks hold different versions of one model, as under a parameter server",
        seen_step=since,
        last_step=last_step,
        first_step=since,
        stage="parameters",
        cause=(
            "One rank makes each new version of the parameters, and what the others hold are "
            f"versions of before, up to {count(caught_up, 'step')} old when they caught up: "
            "workers that pull from a parameter server. A worker that falls further behind is "
            "reported as a desync."
        ),
        remedy="Nothing, if this is meant. If it is not, broadcast the parameters in every step.",
        clear_after=16,
        evidence={"caught_up": caught_up},
    )


def _stage(incident: Apart) -> str:
    if incident.at_start and incident.kind == "desync.optimizer":
        return "start"
    return "outside_optimizer" if incident.written else incident.stage


_RESTORE_STATE = "Restore the optimizer on every rank, or broadcast its state after loading."


def _detail(tensor: TensorDifference) -> dict[str, object]:
    return {
        "name": tensor.name,
        "shape": list(tensor.shape),
        "ranks": list(tensor.ranks),
        "distance": tensor.distance,
        "relative": tensor.relative,
        "buckets": tensor.buckets,
        "table": tensor.table,
    }


def _severity(incident: Apart, drifting: bool, critical: float) -> str:
    if drifting or _may_be_meant(incident):
        return "info"
    # What is small in a gradient, a learning rate or the first weights is not small for long.
    spreads = incident.kind in ("desync.gradients", "desync.hyperparameters")
    if spreads or incident.stage == "start" or incident.relative >= critical:
        return "critical"
    return "warning"


def _may_be_meant(incident: Apart) -> bool:
    """Whether ranks that were never kept equal may be made so yet, or stay near each other."""
    if not incident.tentative:
        return False
    if 0 < len(incident.tensors) < incident.tensor_count / 2:
        return False  # ranks that go their own ways differ in nearly all of their tensors
    if incident.last_step - incident.first_step <= _PATIENCE:
        return True
    return incident.bounded or incident.growth in (Growth.CONSTANT, Growth.SHRINKING)


def _title(incident: Apart) -> str:
    who, what = ranks(incident.ranks).capitalize(), _what(incident)
    when = "from the start" if incident.stage == "start" else f"since step {incident.first_step}"
    where = _where(incident)
    if incident.decided:
        verb = "has" if len(incident.ranks) == 1 else "have"
        title = f"{who} {verb} {what[0]} than the other ranks {when}"
    else:
        title = f"{who} have {what[1]} {when}"
    return f"{title} ({where})" if where else title


def _what(incident: Apart) -> tuple[str, str]:
    """What ranks have that they should not: one rank against others, and ranks among each other."""
    if incident.kind == "desync.gradients":
        return "another gradient", "different gradients"
    if incident.kind == "desync.hyperparameters":
        if not incident.values:
            return "other optimizer settings", "different optimizer settings"
        return f"another {incident.setting}", f"different {incident.setting}s"
    if incident.kind == "desync.optimizer":
        return "another optimizer state", "different optimizer states"
    return "other parameters", "different parameters"


def _where(incident: Apart) -> str:
    if incident.values:
        return _values(incident)
    names = list(dict.fromkeys(t.name for t in incident.tensors))
    if not names:
        return ""
    if incident.everywhere:
        return f"all {incident.tensor_count} tensors"
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _values(incident: Apart) -> str:
    guilty = sorted({v for r, v in incident.values.items() if r in incident.ranks})
    others = sorted({v for r, v in incident.values.items() if r not in incident.ranks})
    found = listing([number(v) for v in guilty], most=4)
    return f"{found} instead of {number(others[0])}" if others else found


def _explain(incident: Apart, drifting: bool) -> tuple[str, str]:
    if incident.missed:
        cause, remedy = _missed(incident)
    elif incident.lag[0]:
        cause, remedy = _stale(incident)
    elif incident.kind == "desync.gradients":
        cause, remedy = _gradients(incident)
    elif incident.kind == "desync.hyperparameters":
        cause, remedy = _hyperparameters(incident)
    elif incident.kind == "desync.optimizer":
        cause, remedy = _optimizer(incident)
    elif incident.stage == "start":
        cause, remedy = _start(incident)
    elif drifting:
        cause, remedy = _drift(incident)
    elif incident.one_element:
        cause, remedy = _one_element(incident)
    elif incident.stage == "outside_optimizer":
        cause, remedy = _outside(incident)
    else:
        cause, remedy = _update(incident)
    return (
        sentences(cause, _tensors(incident), _guilt(incident), _size(incident), _since(incident)),
        remedy,
    )


def _restore(incident: Apart) -> str:
    """How to get out of it once the cause is mended."""
    good = next((group for group in incident.groups if incident.decided), ())
    source = f"rank {good[0]}" if good else "a rank that you trust"
    return (
        f"Then make the ranks equal again: broadcast parameters and optimizer state from {source}, "
        f"or restart from a checkpoint before step {incident.first_step}."
    )


# --------------------------------------------------------------------------- one for each link


def _start(incident: Apart) -> tuple[str, str]:
    return (
        f"When the monitor was attached, before step {incident.first_step}, the ranks did not hold "
        "the same parameters: built from different seeds without a broadcast, or loaded from a "
        "checkpoint on some ranks only, after the wrapper had made them equal.",
        "Load the checkpoint on every rank before wrapping the model "
        "(`DistributedDataParallel` broadcasts from rank 0 when it is built), or broadcast the "
        "parameters after loading. Nothing repairs the offset by itself: restart.",
    )


def _gradients(incident: Apart) -> tuple[str, str]:
    subgroups = len(incident.groups) > 1 and all(len(group) > 1 for group in incident.groups)
    alone = all(len(group) == 1 for group in incident.groups)
    if incident.stage == "clipped_gradient":
        cause = (
            f"The gradients agreed before clipping at step {incident.first_step} and differ after "
            "it: the ranks clipped by different norms, or not all of them clipped."
        )
        remedy = "Clip on every rank, by one global norm of the reduced gradient."
    elif subgroups and incident.tensors and not incident.everywhere:
        shown = listing([f"({listing([str(r) for r in group])})" for group in incident.groups])
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
        shown = listing([f"({listing([str(r) for r in group])})" for group in incident.groups])
        cause = (
            f"The gradients agree inside the groups of ranks {shown} and not between them: they "
            "were reduced inside these groups only."
        )
        remedy = "Reduce over all data-parallel ranks: check the process group or mesh dimension."
    elif alone and len(incident.ranks) > 2:
        cause = (
            f"At step {incident.first_step} every rank applied a gradient of its own: no "
            "all-reduce took place. The forward pass went around the wrapper (`ddp.module(x)`), "
            "or the step was taken inside `no_sync`."
        )
        remedy = (
            "Call the wrapped model itself, run the last micro-batch (forward and backward) "
            "outside `no_sync`, or all-reduce the gradients yourself before the step."
        )
    elif incident.tensors and not incident.everywhere:
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
    return cause, f"{remedy} {_restore(incident)}"


def _hyperparameters(incident: Apart) -> tuple[str, str]:
    if not incident.values:
        return (
            f"From step {incident.first_step} on the ranks step with different settings of the "
            "optimizer, and their parameters part: built with other options on some ranks, "
            "changed under a condition that differs between ranks, or restored on some ranks only.",
            "Compare the series `hyperparameters/...` of the ranks, and set and restore the "
            f"optimizer alike on every rank. {_restore(incident)}",
        )
    if incident.setting == "loss scale":
        return (
            f"From step {incident.first_step} on the ranks multiply their losses by different "
            "scales: their gradients are weighted unequally in the reduction, each takes another "
            "scale out of the result, and their parameters part. A rank saw an overflow alone, "
            "its scaler was restored or updated alone, or began with another value.",
            "Let all ranks agree on overflows (reduce `found_inf` before `scaler.update()`), "
            "restore the scaler's state on every rank, and start it with one value. "
            f"{_restore(incident)}",
        )
    return (
        f"From step {incident.first_step} on the ranks step with different learning rates, and "
        "their parameters part. A scheduler decided on a rank's own metric "
        "(`ReduceLROnPlateau` on its own validation loss), was advanced at another pace, or was "
        "restored on some ranks only.",
        "Average the metric over the ranks before the scheduler sees it, and restore scheduler and "
        f"optimizer on every rank. {_restore(incident)}",
    )


def _optimizer(incident: Apart) -> tuple[str, str]:
    if incident.shown_by is not None:
        return (
            f"At step {incident.tensor_step} the optimizer's state differs although the gradients "
            f"agreed, and the parameters have since step {incident.shown_by}: gradients are all "
            "that goes into this state, so it was there first. It was restored on some ranks only, "
            "or one rank's was corrupted.",
            f"{_RESTORE_STATE} {_restore(incident)}",
        )
    state = (
        "it was restored on some ranks only, or one rank's was corrupted. The parameters part with "
        "the next update."
    )
    if set(incident.agreed) & {"reduced_gradient", "clipped_gradient"}:
        cause = f"At step {incident.first_step} gradients agreed and the optimizer's state differs"
        return f"{cause}: {state}", f"{_RESTORE_STATE} {_restore(incident)}"
    since = "" if incident.last_equal is None else f", and agreed at step {incident.last_equal}"
    return (
        f"At step {incident.first_step} the optimizer's state differs{since}: {state} Gradients "
        "were not sampled at this step: a reduction that failed would show like this, too.",
        "Check `no_sync` and code that touches gradients on these ranks only. "
        f"{_RESTORE_STATE} {_restore(incident)}",
    )


def _one_element(incident: Apart) -> tuple[str, str]:
    tensor = incident.tensors[0]
    since = "" if incident.last_equal is None else f" after step {incident.last_equal}"
    how = (
        f"between two optimizer steps{since}"
        if _stage(incident) == "outside_optimizer"
        else "although everything that was compared before it agreed"
    )
    return (
        f"A single element of {tensor.name} changed {how}: a bit that flipped in memory or in "
        "computation (one bucket of its sketch differs, all others are equal to the last bit).",
        f"Take the device or memory of {ranks(incident.ranks)} out of service and test it (ECC "
        f"errors, memtest, dcgmi diag). {_restore(incident)}",
    )


def _outside(incident: Apart) -> tuple[str, str]:
    step = incident.first_step
    return (
        f"Between step {step - 1} and the update of step {step} parameters were changed by "
        "something else than the optimizer, and not alike on all ranks: a checkpoint loaded on one "
        "rank, averaged weights swapped in, clamping or initialisation in the training loop, or a "
        "memory fault.",
        f"Look for code that writes parameters around step {step} under a condition that differs "
        f"between ranks (`if rank == 0:`). {_restore(incident)}",
    )


def _drift(incident: Apart) -> tuple[str, str]:
    return (
        "Most tensors differ by little more than rounding: the ranks compute the update with "
        "different arithmetic (mixed devices, library versions, fused against plain kernels). That "
        "is no fault of the synchronisation, but nothing repairs it either.",
        "Use the same devices, libraries and optimizer implementation on all ranks, or broadcast "
        "the parameters from rank 0 every some thousand steps.",
    )


def _update(incident: Apart) -> tuple[str, str]:
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


def _missed(incident: Apart) -> tuple[str, str]:
    return (
        f"The ranks were made equal every {incident.missed} steps, and at step "
        f"{incident.first_step} they were not: {_who_missed(incident)}.",
        f"Check that every rank takes part in every averaging. {_restore(incident)}",
    )


def _who_missed(incident: Apart) -> str:
    if not incident.decided or len(incident.groups[0]) < 2:
        return "a rank missed the synchronisation or left it with other values"
    return (
        f"the distance fell to 0 on {ranks(incident.groups[0])}, and not on "
        f"{ranks(incident.ranks)}, which missed the synchronisation or left it with other values"
    )


def _stale(incident: Apart) -> tuple[str, str]:
    oldest, usual = incident.lag
    return (
        f"What {ranks(incident.ranks)} computes with are parameters {oldest} steps old, "
        f"and growing older; no rank has caught up with more than {count(usual, 'step')} before. "
        "It pulls too seldom, or its pulls are lost.",
        "Look at what that worker waits for, and bound the staleness: let a worker wait (or drop "
        "its gradient) when its version is more than so many steps old.",
    )


# --------------------------------------------------------------------------- what holds for all


def _tensors(incident: Apart) -> str:
    if incident.stage == "hyperparameters" or incident.missed or incident.lag[0]:
        return ""
    if not incident.tensor_count:
        return "Which tensors differ is not known yet; it is with the next full fingerprint."
    if incident.one_element:
        return ""
    names = [_named(t) for t in incident.tensors]
    looked = f"at step {incident.tensor_step}"
    of = f"{len(names)} of {count(incident.tensor_count, 'tensor')}"
    if incident.everywhere:
        return f"All {incident.tensor_count} tensors differ {looked}."
    return f"{of} {'differs' if len(names) == 1 else 'differ'} {looked}: {listing(names)}."


def _named(tensor: TensorDifference) -> str:
    _, _, part = tensor.table.partition("/")
    return f"{part} of {tensor.name}" if part else tensor.name


def _guilt(incident: Apart) -> str:
    if incident.lag[0] or (incident.missed and incident.decided):
        return ""
    if incident.decided:
        rest = incident.groups[0]
        return f"{ranks(rest).capitalize()} agree with each other." if len(rest) > 1 else ""
    if sum(len(group) for group in incident.groups) == 2:
        return "With two ranks, nothing tells which one is wrong."
    if all(len(group) == 1 for group in incident.groups):
        return "No two ranks agree, so nothing tells which ones are wrong."
    return "No group of equal ranks is the largest, so nothing tells which ones are wrong."


def _size(incident: Apart) -> str:
    if not incident.sizes:
        return ""
    step, distance, relative = incident.sizes[-1]
    now = (
        f"At step {step} the parameters lie {number(distance)} apart ({number(relative)} of their "
        "norm)"
    )
    match incident.growth:
        case Growth.CONSTANT:
            return f"{now}, an offset that stays as it is and that nothing repairs."
        case Growth.SHRINKING:
            return f"{now}, and come closer."
        case Growth.GROWING:
            return f"{now}, and move further apart: their updates differ."
        case Growth.EXPONENTIAL:
            return f"{now}, and the distance multiplies."
        case _:
            return f"{now}."


def _since(incident: Apart) -> str:
    """Whether the broken link broke once, or goes on."""
    if incident.stage not in ("reduced_gradient", "clipped_gradient", "hyperparameters"):
        return ""
    broken, compared = incident.broken.get(incident.stage, 0), incident.compared[incident.stage]
    if compared < 4:
        return ""
    if broken == 1:
        return f"It happened once; at {count(compared - 1, 'step')} since, this link agreed again."
    return f"This link differed at {broken:,} of {count(compared, 'step')} compared since."
