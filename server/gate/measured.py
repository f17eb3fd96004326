"""Measures of a run beside its baseline, in words and as JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from rankscope.agent.wire import number_to_json
from rankscope.server.comparison.measures import Measured
from rankscope.server.comparison.regression import Compared
from rankscope.server.comparison.resources import MEMORY, STEP_SECONDS
from rankscope.server.comparison.steps_to_loss import STEPS_TO_LOSS
from rankscope.server.detectors.mechanisms.wording import count, duration, listing, percent, size

# Of fewer runs the spread between seeds is assumed rather than known.
_ENOUGH = 4


def sentence(measure: Measured) -> str:
    """Number, baseline, limit and steps of a measure; or why there is none."""
    if measure.why:
        return measure.why
    if measure.name == STEPS_TO_LOSS:
        return _reached(measure)
    if measure.name == STEP_SECONDS:
        took = "the median step took"
        if measure.quantile != 0.5:
            took = f"all but {percent(measure.quantile)} of the steps took more than"
        value = f"{took} {duration(measure.value)} ({_steps(measure)}), "
        return f"{value}{_beside(measure, duration)}"
    if measure.name in MEMORY:
        value = f"its largest value is {size(measure.value)} ({_steps(measure)}), "
        return f"{value}{_beside(measure, size)}"
    first, last = measure.steps or (0, 0)
    where = f"at step {last}" if first == last else f"at the end (mean of {_steps(measure)})"
    return f"{_number(measure.value)} {where}, {_beside(measure, _number)}"


def _reached(measure: Measured) -> str:
    target = f"a loss of {_number(measure.target)} was"
    if math.isinf(measure.value):
        first, last = measure.steps or (0, 0)
        took = f"{target} not reached in {count(last - first + 1, 'step')}; the baseline took "
        return f"{took}{_number(round(measure.expected))} {_band(measure, _whole)}"
    took = f"{target} reached after {count(round(measure.value), 'step')}, "
    return f"{took}{_beside(measure, _whole)}"


def _beside(measure: Measured, form: Callable[[float], str]) -> str:
    share = measure.value / measure.expected - 1 if measure.expected else math.nan
    if not math.isfinite(share) or measure.expected < 0:
        how = "beside the baseline's"
    elif share >= 1:
        how = f"{1 + share:.1f} times the baseline's"
    elif abs(share) < 5e-4:
        how = "as is the baseline's"
    else:
        digits = f"{100 * abs(share):.1f} %" if abs(share) < 0.1 else percent(abs(share))
        how = f"{digits} {'above' if share > 0 else 'below'} the baseline's"
    return f"{how} {form(measure.expected)} {_band(measure, form)}"


def _band(measure: Measured, form: Callable[[float], str]) -> str:
    runs = count(len(measure.runs), "run")
    low, high = form(min(measure.values)), form(max(measure.values))
    between = f": {low} to {high}" if low != high else ""
    return f"({runs}{between}); the limit is {form(measure.bound)}"


def _steps(measure: Measured) -> str:
    first, last = measure.steps or (0, 0)
    return f"steps {first}-{last}"


def _number(value: float) -> str:
    return f"{value:.4g}"


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def of_the_comparison(found: Compared, runs: list[str]) -> Iterator[str]:
    """With which runs a run was compared, where, and with which not: sentences."""
    used = [run for run in runs if run not in found.left_out]
    if found.steps is not None:
        first, last = found.steps
        yield f"Compared with {listing(used, most=4)} at steps {first}-{last}."
    for run, why in found.left_out.items():
        yield f"Not compared with {run}: {why}."
    fewest = min((len(m.runs) for m in found.measures if m.runs), default=_ENOUGH)
    if fewest < _ENOUGH:
        yield (
            f"Of {count(fewest, 'run')} the spread between seeds is largely assumed and the limits "
            "are wide: a baseline of more runs narrows them."
        )


def as_json(found: Compared, runs: list[str], *, tolerance: float) -> dict[str, Any]:
    """The comparison for machines; numbers that are not known are null."""
    return {
        "runs": runs,
        "left_out": dict(found.left_out),
        "tolerance": tolerance,
        "steps": found.steps,
        "measures": [
            {
                "name": m.name,
                "state": m.state,
                "why": sentence(m),
                "value": _json(m.value),
                "expected": _json(m.expected),
                "bound": _json(m.bound),
                "steps": m.steps,
                "target": _json(m.target),
                "runs": dict(zip(m.runs, map(_json, m.values), strict=True)),
            }
            for m in found.measures
        ],
    }


def _json(value: float) -> float | str | None:
    return None if math.isnan(value) else number_to_json(value)
