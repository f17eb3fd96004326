"""What is reported of reductions that were in order, or that could not be examined."""

from __future__ import annotations

from rankscope.server.detectors.mechanisms.wording import count, listing, ranks
from rankscope.server.detectors.reduction.state import ReductionState
from rankscope.server.window import Check, Window

# Steps after which a run without any reduction that could be examined has none that ever can be.


def check_of(window: Window, state: ReductionState) -> Check:
    """What the reductions examined so far show, and what was not examined and why."""
    hooks = _hooks(window)
    if not state.compared and state.averages.kept:
        kept = count(state.averages.kept, "average")
        return Check.ok(f"At {kept} of the parameters the mean of the ranks stayed where it was.")
    if not state.compared:
        return Check.missing(
            "No step has the gradients of all ranks before the reduction and after it: they "
            "are read at sampled steps only, and not under FSDP.",
            early="No reduction has been examined yet.",
        )
    if state.compared == state.unequal:
        return Check.suspended("The ranks never agreed on what came out: that is desync.gradients.")
    if state.compressed and not state.tensors:
        return Check.not_applicable(
            f"{listing(hooks)} sends approximations of all tensors examined: "
            "`compression.error` says how near they come."
        )
    if state.unexplained and state.unexplained >= state.kept:
        return Check.not_applicable(
            "From the start on, the applied gradient was not the mean of the ranks' "
            "gradients: "
            + (f"{listing(hooks)} compresses it" if hooks else "something changes it")
            + " between the reduction and the step, so the reduction cannot be checked."
        )
    if not state.kept:
        why = "All gradients that were reduced were zero or rounding: any reduction is right."
        return Check.insufficient(why)
    where = count(state.compared - state.unequal, "checked step")
    left = ""
    if state.unknown:
        left = f" {listing(state.unknown, most=3)} could not be examined."
    if state.compressed:
        left += (
            f" Of {count(state.compressed, 'other')}, {listing(hooks)} sends an "
            "approximation: `compression.error` says how near it comes."
        )
    scaled = ""
    if state.scaled:
        scaled = f" At {count(state.scaled, 'step')} it was scaled or weighted as a whole."
    who = ranks(range(state.ranks)) if state.ranks == window.world_size else f"{state.ranks} ranks"
    return Check.ok(
        f"The reduced gradient was the mean of what {who} put in at {state.kept:,} of {where}, "
        f"in {state.tensors} of {count(state.tensor_count, 'tensor')}.{scaled}{left}"
    )


def _hooks(window: Window) -> list[str]:
    parallel = window.config.get("data_parallel")
    found = parallel.get("communication_hooks") if isinstance(parallel, dict) else None
    return [str(name) for name in found] if isinstance(found, list) else []
