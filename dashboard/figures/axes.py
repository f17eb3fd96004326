"""Other axes than the step: training time, epochs, tokens, each a function of the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go

from rankscope.dashboard.figures.arrays import Curve, Float64, Int64, align

# The series that each axis is made of.
SERIES: Mapping[str, str] = {"time": "step_seconds", "epoch": "epoch", "tokens": "tokens"}
# Seconds of a unit, and from how many seconds on it is used.
_UNITS = ((3600.0, "h", 3 * 3600.0), (60.0, "min", 180.0), (1.0, "s", 0.0))


@dataclass(frozen=True, slots=True)
class Axis:
    """Where each step lies on another axis: straight between K knots, and beyond them.

    Attributes:
        title: of the axis, with its unit.
        value: a value as plotly writes it when it is pointed at.
        steps: int64 [K], ascending.
        at: float64 [K], ascending: where these steps lie.
    """

    title: str
    value: str
    steps: Int64
    at: Float64

    def place(self, steps: npt.ArrayLike) -> Float64:
        """Where steps lie; NaN where they are NaN."""
        x = np.asarray(steps, np.float64)
        knots, at = self.steps.astype(np.float64), self.at
        inside = np.interp(x, knots, at)
        before, after = (np.diff(at)[end] / np.diff(knots)[end] for end in (0, -1))
        low = np.where(x < knots[0], at[0] + (x - knots[0]) * before, inside)
        return np.where(x > knots[-1], at[-1] + (x - knots[-1]) * after, low)


def axis_of(kind: str, curves: Sequence[Curve]) -> Axis | None:
    """An axis, of the series that it is made of.

    - `time`: the time of all steps before, mean over the ranks; what lies between two steps that is
      no part of either (an evaluation, a pause) is not in it.
    - `tokens`: those of all steps before, of all ranks together.
    - `epoch`: what the trainer logged as such; whole numbers begin where they are logged first.

    Args:
        kind: one of `SERIES`.
        curves: of that series, one a rank; buckets have their means.

    Returns:
        None where that is not enough for an axis.
    """
    curves = [c for c in curves if c.steps.size]
    if not curves:
        return None
    steps, values, _, _ = align(curves)
    there = np.isfinite(values)
    known = there.any(axis=0)
    mean = np.where(there, values, 0.0).sum(axis=0)[known] / there.sum(axis=0)[known]
    steps = steps[known]
    if kind == "epoch":
        return _increasing("epoch", "epoch %{x:.3~f}", steps, mean)
    whole = mean * (len(curves) if kind == "tokens" else 1)
    total = np.concatenate([[0.0], np.cumsum(whole[:-1] * np.diff(steps))])
    if kind == "tokens":
        return _increasing("tokens", "%{x:,.0f} tokens", steps, total)
    size, unit = next((s, u) for s, u, least in _UNITS if total[-1:].sum() >= least)
    return _increasing(f"training time ({unit})", f"%{{x:.2f}} {unit}", steps, total / size)


def on_axis(figure: go.Figure, axis: Axis) -> None:
    """Moves a figure of lines from the steps to another axis, its marks and its range, too.

    `layout.meta.axis` has the knots: what is pointed at is a step all the same.
    """
    for trace in figure.data:
        trace.x = axis.place(trace.x)
    for shape in figure.layout.shapes:
        if shape.xref != "paper":
            shape.x0, shape.x1 = axis.place([shape.x0, shape.x1]).tolist()
    for note in figure.layout.annotations:
        if note.xref != "paper":
            note.x = float(axis.place(note.x))
    x = figure.layout.xaxis
    settings: dict[str, Any] = {
        "title": {"text": axis.title},
        "range": axis.place(x.range).tolist(),
        "tickformat": "~s" if axis.title == "tokens" else "",
        "dtick": None,
        "unifiedhovertitle": {"text": axis.value},
    }
    x.update(settings)
    meta = {"title": axis.title, "steps": axis.steps.tolist(), "at": axis.at.tolist()}
    figure.layout.meta = {**figure.layout.meta, "axis": meta}


def _increasing(title: str, value: str, steps: Int64, at: Float64) -> Axis | None:
    """With the knots at which more has been reached than at any before."""
    if not len(at):
        return None
    most = np.maximum.accumulate(at)
    new = np.append(True, most[1:] > most[:-1])
    return Axis(title, value, steps[new], at[new]) if new.sum() > 1 else None
