"""What the server said, against what was drawn. Pure.

Which kinds are right follows from the contract: a broken link has its kind, and a fault that does
not break a link is named by its symptom or by the rank that has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tests.lab.drawn.fault import Fault
from tests.lab.drawn.recipe import Recipe

Alert = Mapping[str, Any]

# Symptoms that show on all ranks; a name that ends in a dot stands for all kinds that begin so.
_COURSE = (
    "loss.", "accuracy.", "gradient.", "layer.", "update.", "lr.", "amp.", "clipping.",
    "generalization.", "metric.anomaly", "eval.", "buffers.", "batch.noise",
)  # fmt: skip
_ONE_RANK = ("rank.loss_outlier", "rank.gradient_outlier", "metric.anomaly")
_REDUCTION = ("desync.gradients", "reduction.wrong", "push.")
# Site -> kinds that place a fault there, beside symptoms where these are all there is.
_PLACES: Mapping[str, tuple[str, ...]] = {
    "batch": ("data.", "desync.batch", *_ONE_RANK),
    "labels": ("data.", *_ONE_RANK),
    "activations": ("layer.dead", *_ONE_RANK),
    "loss": _ONE_RANK,
    "local_gradient": ("gradient.", "reduction.wrong", *_ONE_RANK),
    "reduced_gradient": _REDUCTION,
    "clipped_gradient": ("desync.gradients",),
    "optimizer_state": ("desync.optimizer",),
    "hyperparameters": ("desync.hyperparameters", "schedule.mismatch", "lr."),
    "parameters": ("desync.parameters", "update.drift"),
    "buffers": ("desync.buffers", "buffers.nonfinite"),
    "time": (
        "rank.straggler",
        "rank.starved",
        "collective.slow",
        "throughput.dropped",
        "metric.anomaly",
    ),
    "process": ("rank.failed", "rank.silent", "rank.stalled", "desync.progress"),
    "loop": ("gradient.accumulating", "update.missing", "desync.", "mode.evaluation"),
}
# Sites at which copies that have to agree tell which rank it is, if it is not on all of them.
_COMPARED = (
    "reduced_gradient", "clipped_gradient", "optimizer_state", "hyperparameters", "parameters",
)  # fmt: skip
# Share of the run by which what only statistics can tell may be dated wrongly.
_LATE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One faulty run.

    Attributes:
        found: a root alert of severity warning or above that does not begin before the fault.
        placed: one of them has a kind that is right for the site.
        rank: it names the ranks of the fault; None where there is nothing to name.
        step: it began, as well as can be told, where the fault did.
        extra: further root alerts of severity warning or above.
    """

    found: bool
    placed: bool
    rank: bool | None
    step: bool
    extra: int
    kind: str

    def as_json(self) -> dict[str, Any]:
        """All of it, JSON-able."""
        return asdict(self)


def score_of(fault: Fault, recipe: Recipe, alerts: Sequence[Alert]) -> Score:
    """Judges the alerts of a faulty run."""
    late = max(int(_LATE * recipe.steps), 8)
    own = [a for a in serious(alerts) if a["first_step"] >= fault.onset - late]
    named = fault.ranks if 0 < len(fault.ranks) < recipe.world else ()
    if not own:
        return Score(
            found=False, placed=False, rank=False if named else None, step=False, extra=0, kind=""
        )
    allowed = _allowed(fault, recipe)

    def marks(alert: Alert) -> tuple[bool, bool, bool]:
        placed = any(alert["kind"].startswith(kind) for kind in allowed)
        return placed, _names(alert, named, recipe), _dated(alert, fault, late)

    best = max(own, key=lambda alert: marks(alert))
    placed, rank, step = marks(best)
    return Score(
        found=True,
        placed=placed,
        rank=rank if named else None,
        step=step,
        extra=len(own) - 1,
        kind=best["kind"],
    )


def serious(alerts: Sequence[Alert]) -> list[Alert]:
    """Root alerts of severity warning or above."""
    return [a for a in alerts if a["parent"] is None and a["severity"] != "info"]


def _allowed(fault: Fault, recipe: Recipe) -> tuple[str, ...]:
    places = _PLACES[fault.site]
    if fault.transform == "nonfinite":
        places += ("loss.nonfinite", "gradient.nonfinite", "eval.nonfinite", "buffers.nonfinite")
    alike = len(fault.ranks) == recipe.world or recipe.world == 1
    if fault.transform == "stale" and fault.site.endswith("gradient"):
        places += ("push.stale",)
    compared = recipe.scheme in ("ddp", "manual", "accumulated")
    if alike or not (compared and fault.site in _COMPARED):
        # Where no copies can be compared, its symptom is all that shows.
        places += _COURSE
    return places


def _names(alert: Alert, named: Sequence[int], recipe: Recipe) -> bool:
    ranks = set(alert["ranks"])
    if ranks == set(named):
        return True
    # Of two ranks that differ nothing tells which one is wrong; nor of two halves.
    undecided = 2 * len(named) >= recipe.world
    return undecided and ranks in (set(range(recipe.world)), set(range(recipe.world)) - set(named))


def _dated(alert: Alert, fault: Fault, late: int) -> bool:
    after = alert["since"]["after"] if alert.get("since") else None
    if after is not None and after < fault.onset <= alert["since"]["by"]:
        return True
    exact = alert["kind"].startswith(("desync.", "reduction."))
    near = 2 if exact else late
    return bool(-near <= alert["first_step"] - fault.onset <= near)
