"""Puts a desync into words: title, tensors, suspects, size and course.

Cause and remedy of each broken link are in `links.py`, those of gradients in `gradient_links.py`.
"""

from __future__ import annotations

import math
import sys

from rankscope.server.detectors.base import Finding
from rankscope.server.detectors.desync.incident import Divergence, Growth
from rankscope.server.detectors.desync.links import broken_link, stage_of
from rankscope.server.detectors.desync.order import SETTINGS
from rankscope.server.detectors.desync.recovery import shown_groups
from rankscope.server.detectors.mechanisms.incident import AGREED_UNTIL, Incident
from rankscope.server.detectors.mechanisms.wording import (
    agree,
    count,
    every,
    listing,
    number,
    ranks,
    sentences,
)
from rankscope.server.window import TensorDifference

_MAX_DETAILS = 16
_TINY = sys.float_info.min
# Steps within which ranks that go their own ways from the start may be made equal.
_PATIENCE = 64
# The same where they stay near each other, as averages keep them, and small learning rates, too.
_PATIENCE_NEAR = 128


def finding_of(incident: Divergence, drift: float, critical: float) -> Finding:
    """The finding as it stands.

    Args:
        incident: what is known.
        drift: relative distance below which it is mere drift.
        critical: relative distance from which it is critical.
    """
    # What no sketch shows are zeros of another sign.
    drifting = incident.relative < drift and (incident.spread or incident.relative <= _TINY)
    alone = _train_alone(incident, critical)
    cause, remedy = _explain(incident, drifting, alone=alone)
    return incident.finding(
        kind=incident.kind,
        # Beside the alert that ranks differ between synchronisations, which they are again next.
        key="missed" if incident.missed else "frozen" if incident.stage == "frozen" else "",
        severity=_severity(incident, drifting, critical),
        title=_title(incident, alone=alone),
        ranks=incident.ranks,
        # The state of an optimizer has several tensors of one name.
        tensors=tuple(dict.fromkeys(t.name for t in incident.tensors)),
        # What the optimizer brought along was there before the first step.
        stage=stage_of(incident),
        cause=cause,
        remedy=remedy,
        evidence={
            "groups": [list(group) for group in incident.groups],
            "decided": incident.decided,
            "last_equal_step": incident.last_equal,
            AGREED_UNTIL: incident.agreed_until,
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
    """Ranks that differ and are made equal again every N steps."""
    return Finding(
        kind="desync.parameters",
        key="synchronised",
        severity="info",
        title=f"The ranks differ between synchronisations, {every(period)}",
        seen_step=seen,
        last_step=last_step,
        first_step=since,
        stage="parameters",
        cause=(
            f"The parameters are made equal {every(period)} and differ in between: "
            "local SGD, DiLoCo or another periodic averaging. A synchronisation that does not make "
            "all ranks equal is reported as a desync."
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
    return Incident.since(since, last_step, clear_after=16).finding(
        kind="desync.parameters",
        key="versions",
        severity="info",
        title="The ranks hold different versions of one model, as under a parameter server",
        stage="parameters",
        cause=(
            "One rank makes each new version of the parameters, and the others hold earlier "
            f"versions, up to {count(caught_up, 'step')} old when they caught up: workers that "
            "pull from a parameter server. A worker that falls further behind is reported as a "
            "desync."
        ),
        remedy="Nothing, if this is meant. If it is not, broadcast the parameters in every step.",
        evidence={"caught_up": caught_up},
    )


def _detail(tensor: TensorDifference) -> dict[str, object]:
    return {
        "name": tensor.name,
        "shape": list(tensor.shape),
        "ranks": list(tensor.ranks),
        "distance": tensor.distance,
        "relative": tensor.relative,
        "buckets": tensor.buckets,
        "table": tensor.table,
        **({} if math.isnan(tensor.factor) else {"factor": tensor.factor}),
        **({"partner": tensor.partner} if tensor.partner else {}),
    }


def _severity(incident: Divergence, drifting: bool, critical: float) -> str:
    if drifting or incident.inside or _may_be_meant(incident):
        return "info"
    # What is small in a gradient, a learning rate or the first weights is not small for long.
    spreads = incident.kind in ("desync.gradients", "desync.hyperparameters")
    if spreads or incident.from_start or incident.relative >= critical:
        return "critical"
    return "warning"


def _may_be_meant(incident: Divergence) -> bool:
    """Whether ranks that were never kept equal may be made so yet, or stay near each other."""
    if not incident.tentative:
        return False
    if incident.applied is not None and incident.applied.reduced:
        return False  # ranks that are averaged now and then do not exchange gradients as well
    if 0 < len(incident.tensors) < incident.tensor_count / 2:
        return False  # ranks that go their own ways differ in nearly all of their tensors
    if incident.last_step - incident.first_step <= _PATIENCE or incident.in_part:
        return True
    if incident.met >= 0 and not incident.unmet:
        # All of them write their parameters now and then, and nobody saw that it is no average.
        return incident.last_step - incident.met <= max(_PATIENCE, incident.met_after)
    if incident.alone and incident.last_step - incident.first_step > _PATIENCE_NEAR:
        return False
    return incident.bounded or incident.growth in (Growth.CONSTANT, Growth.SHRINKING)


def _train_alone(incident: Divergence, critical: float) -> bool:
    """Whether it is certain that these ranks exchange nothing, and not by design."""
    late = incident.last_step - incident.first_step > _PATIENCE
    # Of gradients that are nearly the same, something is shared.
    near = incident.relative < critical
    return incident.alone and late and not near and not _may_be_meant(incident)


def _title(incident: Divergence, *, alone: bool) -> str:
    if alone:
        return "The ranks train alone: the model is not wrapped, gradients are not reduced"
    one, several = _what(incident)
    when = "from the start" if incident.from_start else f"since step {incident.first_step}"
    if _once(incident):
        when = f"at step {incident.first_step}, once"
    where = _where(incident)
    who = ranks(incident.ranks)
    if incident.decided and len(incident.ranks) == 1:
        verb = "differ" if one == several else "differs"
        title = f"{who.capitalize()}'s {one} {verb} from the other ranks' {when}"
    elif incident.decided:
        title = f"The {several} of {who} differ from the other ranks' {when}"
    else:
        title = f"{who.capitalize()} have different {several} {when}"
        if incident.subgroups and incident.kind == "desync.gradients":
            title += f", equal only inside {shown_groups(incident)}"
    return f"{title} ({where})" if where else title


def _what(incident: Divergence) -> tuple[str, str]:
    """What differs: of one rank, and of several."""
    if incident.stage == "clipped_gradient":
        return "gradient after clipping", "gradients after clipping"
    if incident.kind == "desync.gradients":
        return "gradient", "gradients"
    if incident.kind == "desync.hyperparameters":
        if not incident.values:
            return "optimizer settings", "optimizer settings"
        if incident.setting in SETTINGS.values():
            return incident.setting, f"{incident.setting}s"
        return incident.setting, f"values of {incident.setting}"
    if incident.stage == "frozen":
        return "frozen parameters", "frozen parameters"
    if incident.kind == "desync.optimizer":
        return "optimizer state", "optimizer states"
    return "parameters", "parameters"


def _where(incident: Divergence) -> str:
    if incident.values:
        return _values(incident)
    names = list(dict.fromkeys(t.name for t in incident.tensors))
    if not names:
        return ""
    if incident.everywhere:
        return f"all {incident.tensor_count} tensors"
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _values(incident: Divergence) -> str:
    suspects = sorted({v for r, v in incident.values.items() if r in incident.ranks})
    others = sorted({v for r, v in incident.values.items() if r not in incident.ranks})
    shown = number
    if others and number(others[0]) in map(number, suspects):
        shown = _exactly  # they differ beyond three digits
    found = listing([shown(v) for v in suspects], most=4)
    return f"{found} instead of {shown(others[0])}" if others else found


def _exactly(value: float) -> str:
    return f"{value:.9g}"


def _explain(incident: Divergence, drifting: bool, *, alone: bool) -> tuple[str, str]:
    cause, remedy = broken_link(incident, drifting, alone=alone)
    # Where all of them are wrong, nothing has to show which one is.
    suspects = "" if alone else _suspects(incident)
    return (
        sentences(cause, _tensors(incident), suspects, _size(incident), _since(incident)),
        remedy,
    )


# --------------------------------------------------------------------------- what holds for all


def _tensors(incident: Divergence) -> str:
    if incident.stage == "hyperparameters" or incident.missed or incident.lag[0]:
        return ""
    if not incident.tensor_count:
        return "Which tensors differ is not known yet; the next full fingerprint shows it."
    if incident.one_element:
        return ""
    names = [_named(t) for t in incident.tensors]
    at_step = f"at step {incident.tensor_step}"
    of = f"{len(names)} of {count(incident.tensor_count, 'tensor')}"
    if incident.everywhere:
        return f"All {incident.tensor_count} tensors differ {at_step}."
    return f"{of} {agree(len(names), 'differs')} {at_step}: {listing(names)}."


def _named(tensor: TensorDifference) -> str:
    _, _, part = tensor.table.partition("/")
    return f"{part} of {tensor.name}" if part else tensor.name


def _suspects(incident: Divergence) -> str:
    if incident.lag[0] or incident.ended or (incident.missed and incident.decided):
        return ""
    if incident.decided:
        rest = incident.groups[0]
        return f"{ranks(rest).capitalize()} agree with each other." if len(rest) > 1 else ""
    if sum(len(group) for group in incident.groups) == 2:
        return "With two ranks, nothing shows which one is wrong."
    if all(len(group) == 1 for group in incident.groups):
        return "No two ranks agree, so nothing shows which ones are wrong."
    if incident.subgroups and incident.kind == "desync.gradients":
        return ""  # what each group has is wrong
    return "No group of equal ranks is larger than all others: nothing shows which ones are wrong."


def _size(incident: Divergence) -> str:
    if not incident.sizes:
        return ""
    step, distance, relative = incident.sizes[-1]
    # Of a norm of 0 nothing is a share.
    shares = all(math.isfinite(share) for _, _, share in (incident.sizes[0], incident.sizes[-1]))
    of_norm = f" ({number(relative)} of their norm)" if shares else ""
    now = f"At step {step} the parameters differ by about {number(distance)}{of_norm}"
    if len(incident.sizes) > 1:
        began, first, share = incident.sizes[0]
        of_it = f" ({number(share)} of it)" if shares else ""
        now = f"{now}, compared with {number(first)}{of_it} at step {began}"
    match incident.growth:
        case Growth.CONSTANT:
            return f"{now}: nothing repairs that."
        case Growth.SHRINKING:
            return f"{now}: they come closer to each other."
        case Growth.GROWING:
            return f"{now}: they diverge further, as their updates differ."
        case Growth.EXPONENTIAL:
            return f"{now}: the distance grows exponentially."
        case _:
            return f"{now}."


def _since(incident: Divergence) -> str:
    """Whether the broken link broke once, or goes on, and whether it was whole before."""
    if incident.stage not in ("reduced_gradient", "clipped_gradient", "hyperparameters"):
        return ""
    broken, compared = incident.broken.get(incident.stage, 0), incident.compared[incident.stage]
    before = (
        f"The ranks agreed in it up to step {incident.last_equal}."
        if incident.last_equal is not None and 0 <= incident.last_equal < incident.first_step
        else ""
    )
    if compared < 4:
        return before
    if _once(incident):
        since = count(compared - 1, "step")
        return sentences(
            f"It happened once; at the {since} compared since, the ranks agreed again.", before
        )
    return sentences(
        f"The ranks disagreed at {broken:,} of {count(compared, 'step')} compared.", before
    )


def _once(incident: Divergence) -> bool:
    """Whether the link broke at one step and has been whole since."""
    stage = incident.stage
    if stage not in ("reduced_gradient", "clipped_gradient", "hyperparameters"):
        return False
    return incident.broken.get(stage, 0) == 1 and incident.compared.get(stage, 0) >= 4
