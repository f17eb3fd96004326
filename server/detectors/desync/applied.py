"""Why applied gradients differ, where it is known what went into their reduction."""

from __future__ import annotations

import math

from rankscope.server.detectors.desync.incident import Divergence
from rankscope.server.detectors.mechanisms.wording import agree, listing, number, ranks
from rankscope.server.window import Applied

_ALL_REDUCE = (
    "Call the wrapped model itself, run the last micro-batch (forward and backward) outside "
    "`no_sync`, or all-reduce the gradients yourself before the step."
)


def of_what_went_in(incident: Divergence) -> tuple[str, str] | None:
    """Cause and remedy by what each rank applied of what all put in; None where it says nothing."""
    applied = incident.applied
    if applied is None:
        return None
    at = f"At step {incident.first_step}"
    whole = applied.tensors
    if all(count == whole for count in applied.own):
        return (
            f"{at} every rank applied its own gradient: no all-reduce took place. "
            f"{why_unreduced(incident)}",
            _ALL_REDUCE,
        )
    if all(count == whole for count in applied.averaged):
        return _times_the_mean(at, applied, incident.applied_ranks)
    if applied.unreduced and all(
        count + applied.unreduced_count == whole for count in applied.averaged
    ):
        return _left_out(at, applied)
    return _suspects(at, applied, incident.applied_ranks)


def why_unreduced(incident: Divergence) -> str:
    """Why nothing was reduced: what has worked before is more often left out than gone around."""
    around, inside = "the forward pass went around the wrapper (`ddp.module(x)`)", "`no_sync`"
    if incident.last_equal is None:
        return f"Without one, {around}, or the step was taken inside {inside}."
    return f"Without one, the last backward pass before the step was inside {inside}, or {around}."


def _times_the_mean(at: str, applied: Applied, members: tuple[int, ...]) -> tuple[str, str] | None:
    if any(math.isnan(factor) for factor in applied.factors):
        return None
    return (
        f"{at} every rank applied the mean of all gradients, as the all-reduce gives it, times a "
        f"number of its own: {_factors(applied, members)}.",
        "Compute divisors, weights, loss scales and the coefficient of clipping alike on every "
        "rank, from what is reduced: by the norm of the whole gradient, and by counts over all "
        "ranks.",
    )


def _left_out(at: str, applied: Applied) -> tuple[str, str]:
    held = listing(applied.unreduced, most=4)
    one = applied.unreduced_count == 1
    times = ""
    if not any(math.isnan(factor) for factor in applied.factors):
        if max(applied.factors) - min(applied.factors) > 1e-4 * abs(max(applied.factors)):
            times = (
                " These others were multiplied by another number on every rank, as clipping does "
                "by a norm of which a part differs: so they differ, too."
            )
    return (
        f"{at} every rank applied its own gradient for {held}, and the mean of all for the other "
        f"tensors: {held} {'is' if one else 'are'} not all-reduced.{times} The parameters were "
        "replaced or added after the model was wrapped, their hooks were lost, or they are missing "
        "from the all-reduce.",
        "Wrap the model last, after every change to its parameters, or add these tensors to what "
        "is all-reduced.",
    )


def _suspects(at: str, applied: Applied, members: tuple[int, ...]) -> tuple[str, str] | None:
    """Ranks that did not apply the mean: their own gradient, or something else."""
    whole = applied.tensors
    odd = [i for i, count in enumerate(applied.averaged) if count < whole]
    who = ranks([members[i] for i in odd])
    rest = [members[i] for i in range(len(members)) if i not in odd]
    others = f" {ranks(rest).capitalize()} applied the mean of all gradients." if rest else ""
    if all(applied.own[i] + applied.averaged[i] == whole for i in odd):
        if not rest:
            return None
        return (
            f"{at} {who} applied {_whose(odd)} own gradient where the other ranks applied the mean "
            f"of all: {who} {agree(len(odd), 'reads')} the gradient before the reduction is done, "
            f"{agree(len(odd), 'writes')} an earlier copy back, or "
            f"{agree(len(odd), 'steps')} without waiting for it.",
            f"Look at what touches gradients on {who} between the backward pass and the step: "
            "handles and streams that are not waited for, copies that are written back, conditions "
            "on the rank.",
        )
    stale = applied.stale or (0,) * len(applied.averaged)
    if rest and all(stale[i] + applied.averaged[i] == whole for i in odd):
        return (
            f"{at} {who} applied the mean of the step before, where the other ranks applied that "
            f"of this one: {who} {agree(len(odd), 'reads')} a buffer before it is filled again, "
            f"{agree(len(odd), 'keeps')} what was reduced for one step too long, or "
            f"{agree(len(odd), 'steps')} without waiting for the reduction.",
            f"Look at what {who} {agree(len(odd), 'copies')} back after the reduction, and when: "
            "handles and streams that are not waited for, buffers that two steps share.",
        )
    some = applied.subsets or ((),) * len(applied.averaged)
    if any(some) and all(some[i] or applied.own[i] == whole for i in odd):
        return _of_some(at, applied, members, odd, others)
    if any(applied.own[i] for i in odd):
        return None
    where = ""
    if any(applied.averaged[i] for i in odd):
        where = f" in {listing(applied.changed, most=4)}"
    beside = ""
    if seen := [i for i in odd if applied.received[i]]:
        sizes = listing([f"{number(applied.rest[i])} on rank {members[i]}" for i in seen], most=4)
        beside = (
            ": the gradients of other ranks were in it, so that a reduction took place, and beside "
            f"the mean something else (in lengths of that mean: {sizes})"
        )
    return (
        f"{at} what {who} applied{where} was neither a multiple of the mean of all gradients nor "
        f"of {_whose(odd)} own{beside}.{others} The "
        "gradient was changed there after the reduction (noise, a filter, a penalty or "
        "a hook of that rank), was read before the reduction was done, or the "
        "reduction delivered something else there.",
        f"Look at what changes gradients between the backward pass and the step on {who}, or draws "
        "random numbers for them that differ between ranks: do it alike on all ranks, with one "
        "seed, or before the reduction. If the code is sound, suspect the interconnect: run "
        "nccl-tests, try without P2P.",
    )


def _of_some(
    at: str, applied: Applied, members: tuple[int, ...], odd: list[int], others: str
) -> tuple[str, str]:
    """Ranks that applied the mean of some ranks' gradients alone."""
    each = listing(
        [
            f"rank {members[i]} that of {ranks([members[j] for j in applied.subsets[i]])}"
            if applied.subsets[i]
            else f"rank {members[i]} its own"
            for i in odd
        ],
        most=4,
    )
    return (
        f"{at} these ranks applied the mean of some ranks' gradients in place of that of all: "
        f"{each}.{others} The reduction goes over other ranks than those that hold the model: a "
        "process group that is a part of them, an exchange with neighbours (a ring, gossip) that "
        "ends too soon, or gradients that do not arrive.",
        "Reduce over the group of all ranks that hold the model (`group=None`, or the group of its "
        "mesh dimension). If ranks are to exchange with neighbours alone, let them average their "
        "parameters as well: gradients by themselves do not keep them together.",
    )


def _whose(odd: list[int]) -> str:
    return "its" if len(odd) == 1 else "their"


def _factors(applied: Applied, members: tuple[int, ...]) -> str:
    pairs = zip(members, applied.factors, strict=True)
    return listing([f"{factor:.4g} on rank {rank}" for rank, factor in pairs], most=4)
