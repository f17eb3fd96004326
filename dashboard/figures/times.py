"""Where the time of a step goes: computing, waiting for the others, waiting for data."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from rankscope.dashboard.figures.arrays import Curve, Float64, Int64, rank_list
from rankscope.dashboard.figures.rows import rows_of
from rankscope.dashboard.figures.theme import LIGHT, Theme, layout

# What the parts are computed from.
SERIES = ("compute_seconds", "wait_seconds", "data_seconds", "step_seconds")
_PARTS = ("compute", "compute and waiting", "wait for other ranks", "data", "step")
# The rank that holds the others up waits less than half as long as any of them, and by 5 % of the
# step less: below that, ranks of one job differ by what else their machines do.
_FEW_WAITS = 0.5
_LEAST_GAP = 0.05


def time_by_rank(
    times: Mapping[str, Sequence[Curve]],
    *,
    theme: Theme = LIGHT,
    suspects: Collection[int] = (),
) -> go.Figure:
    """A bar for each rank, stacked: mean times of its steps, in milliseconds.

    What a rank waits for the others is a part of its `compute_seconds`, and is taken off it. Where
    it is not reported, and there are others, that part of the bar says so by its name; where only
    the step is timed, the bar is not divided. Of more than 128 ranks suspects have bars of their
    own, others share some.

    Args:
        times: curves of the ranks by series, of `SERIES`.
        theme: colours.
        suspects: ranks that alerts name.

    Returns:
        A figure; `layout.meta` has a summary, `wait_share` and `data_share` of the steps over all
        ranks (None where they are not known), and by rank the `milliseconds` of each part.
    """
    ranks = sorted({c.rank for curves in times.values() for c in curves if c.steps.size})
    means = {name: _means(times.get(name, ()), ranks) for name in SERIES}
    parts = _parts(means)
    settings = layout(theme)
    settings |= {
        "barmode": "stack",
        "xaxis": {"title": {"text": "rank"}, "showgrid": False, "fixedrange": True},
        "yaxis": {
            "title": {"text": "mean time of a step (ms)"},
            "rangemode": "tozero",
            "fixedrange": True,
        },
        "bargap": 0.25 if len(ranks) <= 32 else 0.0,
        "dragmode": False,
        "hovermode": "x unified",
        "showlegend": True,
        "legend": {**settings["legend"], "orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"},
        "margin": {"l": 60, "r": 16, "t": 36, "b": 42},
    }
    if not ranks:
        settings["meta"] = {"summary": "no step was timed", "wait_share": None, "data_share": None}
        settings["xaxis"]["visible"] = settings["yaxis"]["visible"] = False
        return go.Figure(data=[], layout=settings)
    rows = rows_of(ranks, suspects)
    starts = rows.starts
    places = np.arange(len(rows))
    traces: list[dict[str, Any]] = []
    for (name, color), values in zip(_colors(theme), parts.values(), strict=True):
        if not np.isfinite(values).any():
            continue
        ordered = np.where(np.isfinite(values), values, 0.0)[rows.order]
        sizes = np.diff(np.append(starts, len(ordered)))
        traces.append(
            {
                "type": "bar",
                "x": places,
                "y": np.add.reduceat(ordered, starts) / sizes,
                "name": name,
                "marker": {"color": color, "line": {"width": 0}},
                "customdata": rows.names(),
                "hovertemplate": "%{y:.3g} ms",
                "meta": {"role": "part", "part": name},
            }
        )
    ticks = rows.axis([r for r in suspects if r in set(ranks)])
    settings["xaxis"] |= {**ticks, "range": [-0.6, len(rows) - 0.4]}
    settings["xaxis"]["unifiedhovertitle"] = {"text": "%{customdata}"}
    settings["meta"] = _facts(parts, ranks)
    return go.Figure(data=traces, layout=settings)


def time_shares(times: Mapping[str, Sequence[Curve]], *, theme: Theme = LIGHT) -> go.Figure:
    """Shares of the step over the steps: waiting for other ranks, waiting for data.

    Each is the mean over the ranks that report it, of what they wait over what they take for the
    step; the first is what communication costs beyond what it hides behind the computation.

    Args:
        times: curves of the ranks by series, of `SERIES`.
        theme: colours.

    Returns:
        A figure with a line for each share that is known.
    """
    settings = layout(theme)
    settings |= {
        "xaxis": {"title": {"text": "step"}, "tickformat": ",d"},
        "yaxis": {
            "title": {"text": "share of the step"},
            "tickformat": ".0%",
            "rangemode": "tozero",
            "fixedrange": True,
        },
        "hovermode": "x unified",
        "dragmode": "zoom",
        "showlegend": True,
        "legend": {**settings["legend"], "orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"},
        "margin": {"l": 60, "r": 16, "t": 36, "b": 42},
    }
    colors = dict(_colors(theme))
    traces: list[dict[str, Any]] = []
    whole = {c.rank: c for c in times.get("step_seconds", ())}
    for series, name in (("wait_seconds", _PARTS[2]), ("data_seconds", _PARTS[3])):
        steps, share = _share(times.get(series, ()), whole)
        if steps.size:
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers" if len(steps) <= 60 else "lines",
                    "marker": {"size": 4},
                    "x": steps,
                    "y": share,
                    "name": name,
                    "line": {"color": colors[name], "width": 1.8},
                    "hovertemplate": "%{y:.1%}",
                    "meta": {"role": "raw"},
                }
            )
    last = [f"{t['name']} {t['y'][-1]:.1%}" for t in traces]
    settings["meta"] = {"summary": f"shares of the step, last: {', '.join(last) or 'not known'}"}
    return go.Figure(data=traces, layout=settings)


def _colors(theme: Theme) -> list[tuple[str, str]]:
    # Of one bar there is only one of the first two.
    colors = (theme.accent, theme.accent, theme.warning, theme.unsized, theme.muted)
    return list(zip(_PARTS, colors, strict=True))


def _means(curves: Sequence[Curve], ranks: Sequence[int]) -> Float64:
    """[R]: mean of what is finite; NaN of ranks that have none."""
    result = np.full(len(ranks), np.nan)
    place = {rank: row for row, rank in enumerate(ranks)}
    for curve in curves:
        there = curve.values[np.isfinite(curve.values)]
        if there.size:
            result[place[curve.rank]] = there.mean()
    return result


def _parts(means: Mapping[str, Float64]) -> dict[str, Float64]:
    """Milliseconds [R] of each of `_PARTS`; what is not known of a rank is NaN."""
    compute, wait = means["compute_seconds"], means["wait_seconds"]
    data, step = means["data_seconds"], means["step_seconds"]
    unknown = np.isnan(wait) & (len(wait) > 1)
    own = np.where(np.isnan(wait), compute, np.maximum(compute - wait, 0.0))
    mixed = np.where(unknown, compute, np.nan)
    own[unknown] = np.nan
    undivided = np.where(np.isnan(compute), step, np.nan)
    return {
        name: 1e3 * values
        for name, values in zip(_PARTS, (own, mixed, wait, data, undivided), strict=True)
    }


def _share(curves: Sequence[Curve], whole: Mapping[int, Curve]) -> tuple[Int64, Float64]:
    """Steps that any rank reports a part of, and the mean of the ranks' shares there."""
    steps, shares = [np.empty(0, np.int64)], [np.empty(0)]
    for curve in curves:
        if curve.rank not in whole:
            continue
        step = whole[curve.rank]
        place = np.clip(np.searchsorted(step.steps, curve.steps, "right") - 1, 0, None)
        with np.errstate(divide="ignore", invalid="ignore"):
            share = curve.values / step.values[place] if step.steps.size else np.empty(0)
        usable = np.isfinite(share)
        steps.append(curve.steps[: len(share)][usable])
        shares.append(np.clip(share[usable], 0.0, 1.0))
    unique, inverse = np.unique(np.concatenate(steps), return_inverse=True)
    total = np.bincount(inverse, np.concatenate(shares), minlength=len(unique))
    return unique, total / np.maximum(np.bincount(inverse, minlength=len(unique)), 1)


def _facts(parts: Mapping[str, Float64], ranks: Sequence[int]) -> dict[str, Any]:
    _, mixed, wait, data, _ = parts.values()
    total = np.nansum(np.stack(list(parts.values())), axis=0)

    def share(part: Float64) -> float | None:
        known = np.isfinite(part) & (total > 0)
        return float((part[known] / total[known]).mean()) if known.any() else None

    facts = {"wait_share": share(wait), "data_share": share(data)}
    said = [f"mean step {total.mean():.3g} ms on {len(ranks)} ranks"]
    if facts["wait_share"] is not None:
        said.append(f"{facts['wait_share']:.0%} of it waiting for other ranks")
    if facts["data_share"] is not None:
        said.append(f"{facts['data_share']:.0%} for data")
    if (holder := _holding_up(wait, total)) is not None:
        said.append(_held_up(holder, parts, ranks))
    elif np.isfinite(mixed).any() and not np.isfinite(wait).any():
        slowest = ranks[int(np.argmax(np.where(np.isfinite(mixed), mixed, 0.0)))]
        said.append(
            "how long a rank waits for the others is not known, and counts as computing; longest "
            f"computing: rank {rank_list([slowest])}"
        )
    milliseconds = {
        name: {str(r): float(v) for r, v in zip(ranks, values, strict=True) if np.isfinite(v)}
        for name, values in parts.items()
    }
    return {"summary": "; ".join(said), **facts, "milliseconds": milliseconds}


def _holding_up(wait: Float64, total: Float64) -> int | None:
    """Row of the rank for which the others wait; None where none stands out.

    Args:
        wait: milliseconds [R]; NaN where it is not known.
        total: milliseconds [R] of the whole step.
    """
    if len(wait) < 2 or not np.isfinite(wait).all():
        return None
    row = int(np.argmin(wait))
    others = float(np.delete(wait, row).min())
    gap = others - float(wait[row])
    stands_out = wait[row] < _FEW_WAITS * others and gap > _LEAST_GAP * float(np.median(total))
    return row if stands_out else None


def _held_up(row: int, parts: Mapping[str, Float64], ranks: Sequence[int]) -> str:
    """`rank 3 holds the others up: it waits 1 ms (the others 30), ...`."""
    own, _, wait, data, _ = parts.values()
    words = [
        f"{name} {values[row]:.3g} ms (the others {np.median(rest):.3g})"
        for name, values in (("waits", wait), ("data", data), ("computing", own))
        for rest in (np.delete(values, row)[np.isfinite(np.delete(values, row))],)
        if np.isfinite(values[row]) and rest.size
    ]
    return f"rank {ranks[row]} holds the others up: {', '.join(words)}"
