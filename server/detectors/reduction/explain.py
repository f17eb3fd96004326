"""What an alert says of a reduction that gave something other than the mean."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.episode import Episode
from rankscope.server.detectors.incident import AGREED_UNTIL
from rankscope.server.detectors.wording import agree, count, listing, number, ranks, sentences
from rankscope.server.window import Misreduced, Reduction

_MAX_DETAILS = 16
_RESTORE = (
    "All ranks have taken the same wrong steps: where that matters, go back to a checkpoint from "
    "before step {step}."
)
_START_AGAIN = "All ranks have taken the same wrong steps from the first one on: start again."


@dataclass(slots=True)
class Fault:
    """What was found at the first observation of an episode.

    Attributes:
        expected: factor that clipping and loss scale leave.
        factor: times what the gradient is the mean, these taken out.
        pattern: `factor`, `ranks`, `stale`, `nothing`, `swapped` or `other`.
        lost: ranks whose part is missing everywhere.
        tensors: those that are wrong; empty for all.
        observed: observations that found it.
    """

    reduction: Reduction
    expected: float
    factor: float = 1.0
    pattern: str = ""
    lost: tuple[int, ...] = ()
    tensors: tuple[Misreduced, ...] = ()
    observed: int = 1


def finding_of(episode: Episode[Fault]) -> Finding:
    """The finding of an episode as it stands."""
    fault = episode.facts
    made, step = fault.reduction, episode.first_step
    everyone = tuple(int(r) for r in made.ranks)
    cause, remedy = _explain(fault, step)
    mild = fault.pattern in ("nothing", "other")
    suspects = tuple(sorted({*fault.lost, *(r for t in fault.tensors for r in t.ranks)}))
    return Finding(
        kind="reduction.wrong",
        severity="warning" if mild else "critical",
        title=_title(fault, step),
        seen_step=episode.seen_step,
        last_step=episode.last_step,
        first_step=step,
        # One and the same factor is what all ranks did.
        ranks=suspects or everyone,
        tensors=tuple(t.name for t in fault.tensors),
        stage="reduced_gradient",
        cause=sentences(cause, _where(fault), _often(episode)),
        remedy=sentences(remedy, _RESTORE.format(step=step) if step > 0 else _START_AGAIN),
        clear_after=episode.clear_after,
        evidence={
            "pattern": fault.pattern,
            "factor": fault.factor,
            "ratio": made.ratio,
            "expected_ratio": fault.expected,
            "observed": fault.observed,
            "ranks_in_it": len(everyone),
            "wrong_count": made.wrong_count if fault.tensors else made.known,
            "tensor_count": made.tensor_count,
            "weights": list(made.weights),
            AGREED_UNTIL: episode.agreed_until,
            "tensor_details": [_detail(t) for t in fault.tensors[:_MAX_DETAILS]],
        },
    )


def _title(fault: Fault, step: int) -> str:
    since = f"since step {step}"
    if fault.pattern == "factor":
        return f"The reduced gradient is {number(fault.factor)} times the mean {since}"
    if fault.pattern == "ranks" and fault.lost:
        return f"The reduced gradient lacks what {ranks(fault.lost)} put in {since}"
    which = _named(fault.tensors)
    what = {
        "stale": "is that of the step before",
        "nothing": "is zero although gradients went in",
        "swapped": "holds that of another tensor",
        "ranks": "lacks the part of some ranks",
        "factor": "differs from the rest in its factor",
    }.get(fault.pattern, "is not the mean of what went in")
    return f"The reduced gradient{which} {what} {since}"


def _named(tensors: tuple[Misreduced, ...]) -> str:
    if not tensors:
        return ""
    more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
    return f" of {_shortened(tensors[0].name)}{more}"


def _shortened(name: str) -> str:
    return name if len(name) <= 40 else f"...{name[-37:]}"


def _explain(fault: Fault, step: int) -> tuple[str, str]:
    made = fault.reduction
    size = len(made.ranks)
    match fault.pattern:
        case "factor" if fault.tensors:
            return (
                f"In some tensors the ranks' gradients were divided by {size} once more or once "
                "less than in the others.",
                "Check the code that reduces or scales these tensors' gradients by hand.",
            )
        case "factor" if fault.factor > 1:
            return (
                f"The reduced gradient is {number(fault.factor)} times the mean of the ranks' "
                f"own gradients, in every tensor: they were added up and not divided by the "
                f"{size} ranks, or multiplied again afterwards. With SGD that is a learning rate "
                f"{number(fault.factor)} times as high; Adam hides most of it, clipping all of "
                "it.",
                f"Divide by the world size after `all_reduce(SUM)`, or use `ReduceOp.AVG`. If the "
                f"sum is meant (losses that are already divided by the samples of all {size} "
                "ranks), silence this kind.",
            )
        case "factor":
            return (
                f"The reduced gradient is {number(fault.factor)} times the mean of the ranks' "
                f"own gradients, in every tensor: they were divided by the {size} ranks twice. "
                f"With SGD that is one {size}th of the learning rate; Adam hides most of it.",
                "DistributedDataParallel and `ReduceOp.AVG` divide already: remove the division "
                "by the world size from the loss or from the gradients.",
            )
        case "ranks":
            lost = fault.lost or fault.tensors[0].ranks
            return (
                f"What {ranks(lost)} put into the reduction of step {step} is not in what came "
                "out, although all ranks received the same: these ranks reduced zeros, something "
                "else, or in another group, or a buffer was reused before its reduction was done.",
                "Check on these ranks that gradients are written before they are reduced and that "
                "asynchronous handles are waited for; check the process group.",
            )
        case "stale":
            return (
                f"What was applied at step {step} is the reduced gradient of the step before: the "
                "optimizer stepped before the reduction was finished, or on a buffer that had not "
                "been filled again.",
                "Wait for the handles of asynchronous reductions before `optimizer.step()`; turn "
                "off overlapping of communication to confirm.",
            )
        case "nothing":
            return (
                "Gradients went into the reduction and zeros were applied: the result was lost or "
                "cleared, or these parameters are held back on purpose.",
                "Check what is done with these tensors' gradients between `backward` and "
                "`optimizer.step()`.",
            )
        case "swapped":
            first = fault.tensors[0]
            whose = f"of {ranks(first.ranks)} " if first.ranks else ""
            return (
                f"What came out for {first.name} holds the gradient {whose}of {first.partner}, "
                "which has the same shape: tensors were reduced, or copied back from a flat "
                "buffer, in another order than they were put in.",
                "Reduce in one fixed order on every rank, sorted by name, and not in the order "
                "of a set or of the gradients' arrival.",
            )
        case _:
            return (
                "What was applied is no longer the mean of what the ranks computed: not a "
                "multiple of it, not without some rank, not another tensor's. Parts were lost or "
                "spoilt in the reduction, or something has begun to change gradients afterwards.",
                "Check what touches gradients between `backward` and `optimizer.step()`; if "
                "nothing does, suspect the collective library or the links (run its own tests).",
            )


def _where(fault: Fault) -> str:
    if not fault.tensors:
        made = fault.reduction
        return f"It is so in all {made.known} tensors examined."
    partial = [t for t in fault.tensors if t.how == "other" and 0 < t.buckets <= 16]
    if partial:
        names = listing([t.name for t in partial], most=4)
        return f"In {names} only a part of the elements is wrong."
    names = listing([t.name for t in fault.tensors], most=4)
    hows = Counter(t.how for t in fault.tensors)
    verb = agree(len(fault.tensors), "is")
    wrong = f"{names} {verb} wrong, of {count(fault.reduction.known, 'tensor')}"
    return f"{wrong}." if len(hows) == 1 else f"{wrong}, in {len(hows)} ways."


def _often(episode: Episode[Fault]) -> str:
    return "" if episode.seen == 1 else f"It was seen at {count(episode.seen, 'checked step')}."


def _detail(tensor: Misreduced) -> dict[str, object]:
    return {
        "name": tensor.name,
        "shape": list(tensor.shape),
        "relative": tensor.relative,
        "instead": tensor.how,
        "factor": tensor.factor,
        "partner": tensor.partner,
        "ranks": list(tensor.ranks),
        "buckets": tensor.buckets,
    }
