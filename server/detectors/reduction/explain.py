"""What an alert says of a reduction that gave something other than the mean."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from rankscope.server.comparison.rank_weights import SAME
from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.mechanisms.episode import Episode
from rankscope.server.detectors.mechanisms.incident import AGREED_UNTIL
from rankscope.server.detectors.mechanisms.wording import (
    agree,
    count,
    listing,
    number,
    ranks,
    sentences,
)
from rankscope.server.window import Misreduced, Reduction

_MAX_DETAILS = 16
_RESTORE = (
    "All ranks have taken the same wrong steps: where that matters, go back to a checkpoint from "
    "before step {step}."
)
_START_AGAIN = "All ranks have taken the same wrong steps from the first one on: start again."


@dataclass(frozen=True, slots=True)
class Divisor:
    """By what it looks as if the sum over ranks had been divided.

    Attributes:
        value: 0 where it is no whole number.
        name: what that is, as a part of a sentence.
        known: whether it is one that gets mixed up with the number of ranks.
    """

    value: int = 0
    name: str = ""
    known: bool = False


@dataclass(slots=True)
class Fault:
    """What was found at the first observation of an episode.

    Attributes:
        expected: factor that clipping and loss scale leave.
        factor: times what the gradient is the mean, these taken out.
        pattern: `factor`, `ranks`, `weights`, `clipped` (to the norm `factor`), `stale`, `nothing`,
            `swapped` or `other`.
        by: what ranks count by in that mean; empty for equally.
        divisor: of a factor.
        changed: whether the factor was 1 before.
        odd: of `ranks`, rank -> times what it should count in all tensors; of `weights`, all ranks.
        tensors: those that are wrong; empty for all.
        most: whether these are those that have the factor of most, and the others are right.
        note: whether it may well be meant.
        observed: observations that found it.
    """

    reduction: Reduction
    expected: float
    factor: float = 1.0
    pattern: str = ""
    by: str = ""
    divisor: Divisor = Divisor()
    changed: bool = False
    odd: dict[int, float] = field(default_factory=dict)
    tensors: tuple[Misreduced, ...] = ()
    most: bool = False
    note: bool = False
    observed: int = 1


def finding_of(episode: Episode[Fault]) -> Finding:
    """The finding of an episode as it stands."""
    fault = episode.facts
    made, step = fault.reduction, episode.first_step
    everyone = tuple(int(r) for r in made.ranks)
    cause, remedy = _explain(fault, step)
    odd = fault.odd if fault.pattern in ("ranks", "late") else {}
    suspects = tuple(sorted({*odd, *(r for t in fault.tensors for r in t.ranks)}))
    return episode.finding(
        kind="reduction.wrong",
        key="factor" if fault.note else "",
        severity=_severity(fault, size=len(everyone)),
        title=_title(fault, step),
        # One and the same factor is what all ranks did.
        ranks=suspects or everyone,
        tensors=tuple(t.name for t in fault.tensors),
        stage="reduced_gradient",
        cause=sentences(cause, _where(fault), _often(episode)),
        remedy=sentences(remedy, _RESTORE.format(step=step) if step > 0 else _START_AGAIN),
        evidence={
            "pattern": fault.pattern,
            "factor": fault.factor,
            "ratio": made.ratio,
            "expected_ratio": fault.expected,
            "observed": fault.observed,
            "ranks_in_it": len(everyone),
            "wrong_count": (
                made.wrong_count if fault.tensors and not fault.most else _of_most(made)
            ),
            "tensor_count": made.tensor_count,
            "weights": list(made.weights),
            "weight_errors": list(made.weight_errors),
            "weighted_by": fault.by,
            "divisor": fault.divisor.value,
            "odd": {str(rank): times for rank, times in sorted(fault.odd.items())},
            AGREED_UNTIL: episode.agreed_until,
            "tensor_details": [_detail(t) for t in fault.tensors[:_MAX_DETAILS]],
        },
    )


def _of_most(made: Reduction) -> int:
    """Number of tensors that have the factor of most."""
    return made.known - made.wrong_count if made.common else made.known


def _title(fault: Fault, step: int) -> str:
    since = f"since step {step}"
    if fault.pattern == "factor" and not math.isnan(in_common := _times(fault)):
        which = _named(fault.tensors)
        return f"The reduced gradient{which} is {number(in_common)} times the mean {since}"
    if fault.pattern == "ranks" and fault.odd:
        who, times = ranks(sorted(fault.odd)), _together(fault.odd)
        if times == 0:
            return f"The reduced gradient lacks the gradient of {who} {since}"
        if times is None:
            return f"The gradients of {who} have the wrong weights in the reduction {since}"
        whose = (
            f"{who.capitalize()}'s gradient" if len(fault.odd) == 1 else f"The gradients of {who}"
        )
        verb = agree(len(fault.odd), "counts")
        return f"{whose} {verb} {number(times)} times in the reduction {since}"
    if fault.pattern == "late":
        who = ranks(sorted(fault.odd)).capitalize()
        return f"{who} puts the gradient of {_before(fault)} into the reduction {since}"
    if fault.pattern == "clipped":
        return f"Each rank clips its own gradient before the reduction {since}"
    if fault.pattern == "weights":
        return f"The reduced gradient weights the ranks unequally {since}"
    which = _named(fault.tensors)
    what = {
        "stale": f"is that of {_before(fault)}",
        "nothing": "is zero although gradients went in",
        "swapped": "holds that of another tensor",
        "ranks": (
            "lacks the gradient of some ranks"
            if all(abs(t.factor) <= SAME for t in fault.tensors)
            else "weights some ranks wrongly"
        ),
        "factor": "is scaled differently from the rest",
    }.get(fault.pattern, "is not the mean of what went in")
    return f"The reduced gradient{which} {what} {since}"


def _severity(fault: Fault, *, size: int) -> str:
    if fault.note and fault.factor > 0:
        return "info"
    mild = fault.pattern in ("nothing", "other", "weights", "clipped", "late")
    if fault.pattern == "factor" and (fault.most or not fault.tensors):
        of_ranks = any(abs(fault.factor / f - 1.0) <= SAME for f in (size, 1.0 / size))
        mild = fault.factor > 0 and not of_ranks
    elif fault.pattern == "factor":
        mild = fault.divisor.known
    if fault.pattern == "ranks" and fault.odd:
        # What a rank counts too much or too little of is less than another batch would change.
        mild = all(0.5 < times < 1.5 for times in fault.odd.values())
    return "warning" if mild else "critical"


def _together(odd: dict[int, float]) -> float | None:
    """Times what ranks count, where it is the same for all; None where it is not."""
    times = list(odd.values())
    if all(abs(t) <= SAME for t in times):
        return 0.0
    return times[0] if all(abs(t - times[0]) <= SAME * abs(times[0]) for t in times) else None


def _times(fault: Fault) -> float:
    """Times what the mean the wrong tensors are; NaN where they have no factor in common."""
    factors = [t.factor for t in fault.tensors] or [1.0]
    alike = all(t.how == "factor" for t in fault.tensors) and (
        max(factors) - min(factors) <= SAME * abs(factors[0])
    )
    return fault.factor * factors[0] if alike else math.nan


def _before(fault: Fault) -> str:
    made = fault.reduction
    return "the step before" if made.before == made.step - 1 else f"step {made.before}"


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
            return _of_some_tensors(fault, size)
        case "factor" if min(abs(fault.factor / f - 1.0) for f in (size, 1 / size)) > SAME:
            return _of_a_factor(fault, size)
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
                f"With SGD that is 1/{size} of the learning rate; Adam hides most of it.",
                "DistributedDataParallel and `ReduceOp.AVG` divide already: remove the division "
                "by the world size from the loss or from the gradients.",
            )
        case "ranks":
            return _of_ranks(fault, step)
        case "late":
            who = ranks(sorted(fault.odd))
            return (
                f"What came out at step {step} is the mean of all ranks' gradients, but that of "
                f"{who} is its gradient of {_before(fault)}: it reduced a buffer that had not been "
                "filled again, or before its backward pass was done.",
                f"Check on {who} that the buffer is filled from this step's gradients before each "
                "reduction, and that the stream or thread which reduces waits for the backward "
                "pass.",
            )
        case "clipped":
            return (
                f"In the mean each rank counts with its gradient scaled down to a norm of "
                f"{number(fault.factor)}, however large that was: ranks with large gradients count "
                "less than others, and the mean is not that of all samples. So it is where "
                "gradients are clipped between the backward pass and the reduction.",
                "Clip after the reduction: there the norm is that of the mean, and the same on all "
                "ranks. If clipping each rank's own is meant (differential privacy), silence this "
                "kind.",
            )
        case "weights":
            shares = listing([f"{number(times)} on rank {r}" for r, times in fault.odd.items()])
            return (
                f"At consecutive samples each rank kept its own weight, in units of 1/{size}: "
                f"{shares}. These weights are neither equal nor the ranks' shares of the "
                "recorded samples or tokens.",
                "Give all ranks the same weight, or their share of the samples. Where the weights "
                "are those of tokens, log them (`monitor.log(tokens=n)`): then they are checked.",
            )
        case "stale":
            return (
                f"What was applied at step {step} is the reduced gradient of {_before(fault)}: "
                "the optimizer stepped before the reduction was finished, or on a buffer that had "
                "not been filled again.",
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


def _of_some_tensors(fault: Fault, size: int) -> tuple[str, str]:
    """A factor that some tensors have, be they most of them, and others have not."""
    check = "Check the code that reduces or scales these tensors' gradients by hand."
    times = _times(fault)
    if math.isnan(times):
        return (
            f"In some tensors the ranks' gradients were divided by {size} once more or once less "
            "than in the others.",
            check,
        )
    held = listing([t.name for t in fault.tensors], most=4)
    cause = f"The reduced gradient of {held} is {number(times)} times the mean of the ranks' own"
    beside = 1.0 if fault.most else fault.factor
    others = "That of the other tensors is the mean"
    if abs(beside - 1.0) > SAME:
        others = f"That of the other tensors is {number(beside)} times the mean"
    how = ""
    if abs(times / beside / size - 1.0) <= SAME:
        how = f": it was added up and not divided by the {size} ranks, or multiplied again"
    elif abs(times / beside * size - 1.0) <= SAME:
        how = f": it was divided by the {size} ranks twice"
    elif fault.divisor.known:
        name = fault.divisor.name
        how = f", as if their sum had been divided by {name}, and not by the {size} ranks"
    return f"{cause}{how}. {others}.", check


def _of_a_factor(fault: Fault, size: int) -> tuple[str, str]:
    """A factor that is neither the number of ranks nor one over it."""
    factor, divisor = fault.factor, fault.divisor
    if factor > 1:
        much = f"{number(factor)} times too large"
    else:
        much = "it points the other way" if factor < 0 else f"{number(1 / factor)} times too small"
    mean = f"mean by {fault.by}" if fault.by else "mean"
    cause = (
        f"The reduced gradient is {number(factor)} times the {mean} of the ranks' own gradients, "
        f"in every tensor: {much}"
    )
    if divisor.name:
        cause += (
            f", as if their sum had been divided by {divisor.name}, and not by the {size} ranks"
        )
    if fault.changed:
        cause += ". Before, it was the mean itself"
    if factor < 0:
        return (
            f"{cause}. Steps that follow it go up the loss.",
            "Look for what turns the sign of gradients after the reduction (`neg_()`, a gradient "
            "reversal, `maximize=True`). If these steps are meant to go up, silence this kind.",
        )
    return (
        f"{cause}. With SGD that is a learning rate {number(factor)} times as high; Adam hides "
        "most of it, clipping what is too large.",
        f"Divide what comes out of the reduction once, by the {size} ranks whose gradients went "
        "in. Where gradients are scaled on purpose, silence this kind.",
    )


def _of_ranks(fault: Fault, step: int) -> tuple[str, str]:
    """Some ranks do not count like the others: in all tensors, or in some."""
    odd = dict(fault.odd)
    if not odd:
        first = fault.tensors[0]
        odd = dict.fromkeys(first.ranks, first.factor)
    lost = [rank for rank, times in odd.items() if abs(times) <= SAME]
    twice = [rank for rank, times in odd.items() if abs(times - 2.0) <= 2.0 * SAME]
    if len(lost) == len(odd):
        return (
            f"What {ranks(lost)} put into the reduction of step {step} is not in what came "
            "out, although all ranks received the same: these ranks reduced zeros, something "
            "else, or in another group, or a buffer was reused before its reduction was done.",
            "Check on these ranks that gradients are written before they are reduced and that "
            "asynchronous handles are waited for; check the process group.",
        )
    if lost and len(lost) + len(twice) == len(odd):
        return (
            f"What {ranks(lost)} put into the reduction of step {step} is not in what came out, "
            f"and what {ranks(twice)} put in is there twice: one was reduced in place of the "
            "other.",
            "Check which buffer each rank hands to the collective, and the ranks of the process "
            "groups.",
        )
    parts = [f"{ranks([rank])} counts {number(times)} times" for rank, times in odd.items()]
    said = (
        f"In the reduced gradient of step {step} the ranks are weighted unequally: relative to "
        f"the others, {listing(parts)}"
    )
    if len(twice) == len(odd):
        why = "what they put in was added twice"
    elif any(times < 0 for times in odd.values()):
        why = "their sign was turned, so that they pull against the others"
    else:
        why = "their gradients were scaled between the backward pass and the reduction"
    return (
        f"{said}. All ranks received the same, so it was done before, or in, the reduction: {why}.",
        "Check on these ranks what is done to gradients after the backward pass (weights, loss "
        "scales, clipping before the reduction), and that each rank reduces once.",
    )


def _where(fault: Fault) -> str:
    if not fault.tensors:
        made = fault.reduction
        if made.wrong and fault.odd:
            return f"It is so in {made.known - made.wrong_count} of {made.known} tensors examined."
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
