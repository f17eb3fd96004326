"""Whether a run trains worse than earlier runs of the same training did. Pure.

Each measure is one number a run, taken at steps that all of them have. What further runs of the
same training would give is predicted from the earlier ones (`bands`); a run regresses where its
number is beyond that *and* beyond the tolerance: the band is what seeds and machines do, the
tolerance is what matters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from rankscope.server.comparison.courses import Course
from rankscope.server.comparison.levels import at_the_end, evaluated
from rankscope.server.comparison.measures import Measured, NotMeasured, Recorded, Sides
from rankscope.server.comparison.resources import MEMORY, STEP_SECONDS, peak, step_seconds
from rankscope.server.comparison.steps_to_loss import STEPS_TO_LOSS, steps_to_loss

LOSS, ACCURACY = "loss", "accuracy"
EVALUATED = re.compile(r"eval/(?:.+/)?(?:loss|accuracy)")
# Share of the baseline's steps up to which a run has to come to be compared with it, and share of
# the others' steps that a baseline has to have to be one.
_LEAST, _WHOLE = 0.5, 0.9


@dataclass(frozen=True, slots=True)
class Compared:
    """A run beside its baseline.

    Attributes:
        measures: convergence first.
        steps: first and last of the common steps; None: there are none.
        left_out: baselines that nothing was compared with, and why.
    """

    measures: tuple[Measured, ...]
    steps: tuple[int, int] | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def convergence(self) -> list[Measured]:
        """What was measured of how well the run learns."""
        return [m for m in self.measures if m.state != "not_run" and not _of_machine(m.name)]


def compared(
    run: Recorded,
    baseline: Sequence[Recorded],
    *,
    tolerance: float,
    no_measure: str = "",
    other_machine: str = "",
) -> Compared:
    """Measures a run beside earlier ones, at equal steps.

    Args:
        tolerance: by what share of a loss or accuracy a run may be worse, below 1.
        no_measure: why the loss does not say how well this training learns; empty: it does.
        other_machine: why times and memory are not comparable; empty: they are.
    """
    spans = {r.name: span for r in (run, *baseline) if (span := _span(r)) is not None}
    kept, left_out = _long_enough(run, baseline, spans)
    if run.name not in spans or not kept:
        whose = "run" if run.name not in spans else "baseline"
        why = f"the {whose} has recorded neither loss nor times of steps"
        return Compared((Measured(LOSS, "not_run", why),), left_out=left_out)
    first = max(spans[r.name][0] for r in (run, *kept))
    last = min(spans[r.name][1] for r in (run, *kept))
    usual = float(np.median([spans[r.name][1] - spans[r.name][0] + 1 for r in kept]))
    if last - first + 1 < _LEAST * usual:
        why = (
            f"the run and its baseline have {max(0, last - first + 1):,} steps in common, fewer "
            f"than half of the baseline's {usual:,.0f}"
        )
        return Compared((Measured(LOSS, "not_run", why),), left_out=left_out)
    sides = Sides(
        _cut(run, first, last), tuple(_cut(r, first, last) for r in kept), first, last, tolerance
    )
    measures = tuple(_measures(sides, no_measure, other_machine))
    return Compared(measures, (first, last), left_out)


def _span(run: Recorded) -> tuple[int, int] | None:
    """First and last step of which the loss was recorded, or where it was not the time."""
    for metric in (LOSS, STEP_SECONDS):
        course = run.courses.get(metric)
        if course is not None and len(course.steps):
            return int(course.steps[0]), int(course.steps[-1])
    return None


def _long_enough(
    run: Recorded, baseline: Sequence[Recorded], spans: Mapping[str, tuple[int, int]]
) -> tuple[list[Recorded], dict[str, str]]:
    """Baselines that cover about the steps of the others and the run; of those left out, why."""
    why = "it has recorded neither loss nor times of steps"
    left_out = {r.name: why for r in baseline if r.name not in spans}
    kept = [r for r in baseline if r.name in spans]
    if not kept or run.name not in spans:
        return kept, left_out
    usual = min(spans[run.name][1], float(np.median([spans[r.name][1] for r in kept])))
    # A resumed one has no beginning.
    begin = max(spans[run.name][0], float(np.median([spans[r.name][0] for r in kept])))
    for name, (first, end) in ((r.name, spans[r.name]) for r in kept):
        if end < _WHOLE * usual:
            left_out[name] = f"it ends at step {end:,}"
        elif first - begin > (1 - _WHOLE) * (usual - begin):
            left_out[name] = f"it begins at step {first:,}"
    return [r for r in kept if r.name not in left_out], left_out


def _cut(run: Recorded, first: int, last: int) -> Recorded:
    courses = {}
    for metric, course in run.courses.items():
        within = (course.steps >= first) & (course.steps <= last)
        if within.any():
            courses[metric] = Course(course.steps[within], course.values[within])
    return replace(run, courses=courses)


def _measures(sides: Sides, no_measure: str, other_machine: str) -> Iterator[Measured]:
    for name, measure in _table({m for r in sides.runs for m in r.courses}):
        refused = other_machine if _of_machine(name) else ""
        if name in (LOSS, STEPS_TO_LOSS):
            refused = no_measure
        try:
            if refused:
                raise NotMeasured(refused)
            yield measure(_on_machines_alike(sides) if _of_machine(name) else sides)
        except NotMeasured as reason:
            yield Measured(name, "not_run", str(reason))


def _on_machines_alike(sides: Sides) -> Sides:
    others = {r.name for r in sides.baseline if r.elsewhere}
    return sides.without(others) if others else sides


def _of_machine(name: str) -> bool:
    return name in (STEP_SECONDS, *MEMORY)


def _table(metrics: set[str]) -> Iterator[tuple[str, Callable[[Sides], Measured]]]:
    """What can be measured where some of the runs have these metrics."""
    if LOSS in metrics:
        yield LOSS, partial(at_the_end, metric=LOSS)
        yield STEPS_TO_LOSS, steps_to_loss
    if ACCURACY in metrics:
        yield ACCURACY, partial(at_the_end, metric=ACCURACY)
    for metric in sorted(m for m in metrics if EVALUATED.fullmatch(m)):
        yield metric, partial(evaluated, metric=metric)
    if STEP_SECONDS in metrics:
        yield STEP_SECONDS, step_seconds
    for metric in (m for m in MEMORY if m in metrics):
        yield metric, partial(peak, metric=metric)
