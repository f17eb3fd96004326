"""Ranks x steps: who left the others, when, and how far."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import plotly.graph_objects as go

from rankscope.dashboard.figures.arrays import Bool, Float64, Int64, Mark, rank_list
from rankscope.dashboard.figures.binning import Bins, bin_steps
from rankscope.dashboard.figures.distance_scale import KEY_ABOVE, cell_traces, legend_traces
from rankscope.dashboard.figures.marks import mark_layout, with_marks
from rankscope.dashboard.figures.rows import Rows, rows_of
from rankscope.dashboard.figures.theme import LIGHT, Theme, faded, layout

# Ranks that leave are named in the chart up to here; beyond, the colours show the pattern.
_MAX_LEAVERS = 8


def divergence_heatmap(
    ranks: Sequence[int],
    steps: Int64,
    relative: Float64,
    checked: Bool,
    *,
    stage: str = "parameters",
    theme: Theme = LIGHT,
    marks: Sequence[Mark] = (),
    columns: int = 240,
    x_range: tuple[float, float] | None = None,
    selected: int | None = None,
    until: Int64 | None = None,
    counts: Int64 | None = None,
    undecided: Collection[int] = (),
    legend: bool = True,
    named: bool = True,
    fewer: int = 1,
) -> go.Figure:
    """Relative distance of every rank from the reference, at every checked step.

    Four kinds of cells that no colour scale can mix up: equal to the last bit, differing by a
    relative distance (logarithmic colour), differing by an amount not sampled, not checked.
    Where there are more steps than columns, a column shows the worst of its steps; of more than 128
    ranks those that differ have rows of their own at the top, and others share rows (see `rows`).

    Args:
        ranks: [R], ascending.
        steps: int64 [S], ascending.
        relative: float64 [R, S]: L2 distance over the L2 norm of the reference; 0 for equal bits,
            NaN where the rank differs by an unknown amount.
        checked: bool [R, S].
        stage: link of the chain that was compared.
        theme: colours.
        marks: alerts.
        columns: at most this many.
        x_range: first and last step that the axis shows; default: those of the data.
        selected: step whose distance matrix is shown elsewhere: marked.
        until: int64 [S]: last step up to which each entry holds; default: the step itself.
        counts: int64 [S]: how many steps of such a stretch were compared; default: all.
        undecided: steps at which no majority says who the reference is.
        legend: whether to explain the colours above the chart; a page explains them once.
        named: whether who differs stands beside the first cell that does, over those that follow.
        fewer: as of `rows.rows_of`.

    Returns:
        A figure; `layout.meta` holds the width of a column in steps and a summary.
    """
    settings = layout(theme)
    settings |= {
        "xaxis": {"title": {"text": "step"}, "tickformat": ",d", "showgrid": False},
        "yaxis": {
            "title": {"text": "rank"},
            "showgrid": False,
            "fixedrange": True,
        },
        "plot_bgcolor": theme.unchecked,
        "dragmode": "zoom",
        "hovermode": "closest",
        "margin": {"l": 56, "r": 16, "t": 44 if legend else 22, "b": 42},
        "showlegend": legend,
        "legend": {**settings["legend"], **KEY_ABOVE, "yref": "paper", "entrywidthmode": "pixels"},
    }
    if not steps.size or not len(ranks):
        settings["meta"] = {"summary": f"{stage}: nothing compared yet", "width": 1}
        settings["annotations"] = [_nothing(theme, zoomed=x_range is not None)]
        # Numbers along the axes of nothing would be taken for ranks and steps.
        settings["yaxis"]["visible"] = False
        if x_range is None:
            settings["xaxis"]["visible"] = False
        else:
            settings["xaxis"]["range"] = list(x_range)
        return go.Figure(data=[], layout=settings)
    span = (
        (int(steps[0]), int((steps if until is None else until).max()))
        if x_range is None
        else (int(np.floor(x_range[0])), int(np.ceil(x_range[1])))
    )
    bins = bin_steps(
        steps, relative, checked, columns=columns, span=span, until=until, counts=counts
    )
    centers = bins.starts + (bins.width - 1) / 2
    ends = steps if until is None else until
    leavers = _leavers(ranks, steps, ends, checked & ~(relative == 0), span)
    rows = rows_of(ranks, leavers, fewer=fewer)
    bins = _on_rows(bins, rows)
    # Rank numbers need not be without gaps; the axis counts rows and its ticks name the ranks.
    common = {
        "x": centers,
        "y": np.arange(len(rows)),
        "xgap": 1 if len(centers) <= 60 else 0,
        "ygap": 1 if len(rows) <= 64 else 0,
    }
    equal = bins.checked & ~bins.differs
    unsized = bins.differs & np.isnan(bins.relative)
    when = _when(bins)
    names = np.array(rows.names())
    text = np.char.add(np.char.add(names[:, None], ", "), when[None, :])
    few = text.size <= 20_000
    counted = not rows.grouped and list(ranks) == list(range(len(ranks)))
    where = "%{text}" if few else f"{'rank' if counted else 'row'} %{{y}}, step %{{x:.0f}}"
    traces = cell_traces(
        equal=equal,
        distance=bins.relative,
        unsized=unsized,
        theme=theme,
        title="relative L2 distance",
        common=common | ({"text": text} if few else {}),
        hover=(
            where + "<br>equal to the last bit",
            where + "<br>relative distance %{customdata:.3g}",
            where + "<br>differs, distance not sampled",
        ),
    )
    # A rank that differs at the first step of a zoomed view has left before it: no mark.
    marked = {r: s for r, s in leavers.items() if x_range is None or s > span[0]}
    if 0 < len(marked) <= _MAX_LEAVERS:
        traces.append(_leaver_trace(rows, marked, theme))
    traces += legend_traces(
        theme,
        equal=bool(equal.any()),
        differs=bool(np.isfinite(bins.relative).any()),
        unsized=bool(unsized.any()),
        unchecked=bool((~bins.checked).any()),
    )
    edges = (float(bins.starts[0]) - 0.5, float(bins.starts[-1] + bins.width) - 0.5)
    if x_range is None:
        edges = with_marks(edges, marks)
    shapes, labels = mark_layout(marks, theme, edges)
    # Spans of alerts would lie under the opaque cells and over the background only.
    shapes = [s for s in shapes if s["type"] == "line"]
    if selected is not None and edges[0] <= selected <= edges[1]:
        shapes.append(_selection(selected, theme))
    settings["xaxis"]["range"] = list(edges)
    if named and len(marked) <= _MAX_LEAVERS:
        labels += _leaver_labels(rows, marked, theme, span)
    settings["shapes"], settings["annotations"] = shapes + rows.divider(theme), labels
    settings["yaxis"] |= rows.axis(leavers) | {"range": [len(rows) - 0.5, -0.5]}
    settings["meta"] = {
        "summary": _summary(stage, ranks, bins, leavers, len(undecided)),
        "width": bins.width,
        "stage": stage,
        "leavers": {str(rank): step for rank, step in leavers.items()},
        "rows": len(rows),
    }
    return go.Figure(data=traces, layout=settings)


def _nothing(theme: Theme, *, zoomed: bool) -> dict[str, Any]:
    return {
        "x": 0.5,
        "y": 0.5,
        "xref": "paper",
        "yref": "paper",
        "showarrow": False,
        "text": "Nothing was compared at these steps"
        if zoomed
        else "No two ranks have posted a fingerprint<br>of the same step yet",
        "font": {"size": 12, "color": theme.muted},
    }


def _when(bins: Bins) -> np.ndarray[Any, np.dtype[np.str_]]:
    if bins.width == 1:
        return np.array([f"step {s}" for s in bins.starts])
    return np.array([f"steps {s} to {s + bins.width - 1}" for s in bins.starts])


def _leavers(
    ranks: Sequence[int], steps: Int64, ends: Int64, differs: Bool, span: tuple[int, int]
) -> dict[int, int]:
    """First of the shown steps at which each rank differs."""
    inside = (ends >= span[0]) & (steps <= span[1])
    return {
        rank: max(int(steps[inside][np.argmax(row)]), span[0])
        for rank, row in zip(ranks, differs[:, inside], strict=True)
        if row.any()
    }


def _on_rows(bins: Bins, rows: Rows) -> Bins:
    """The worst rank of each row; not checked where none of them was."""
    known = np.where(np.isnan(bins.relative), -np.inf, bins.relative)
    largest = rows.largest(known)
    return replace(
        bins,
        checked=rows.largest(bins.checked),
        differs=rows.largest(bins.differs),
        relative=np.where(np.isfinite(largest), largest, np.nan),
    )


def _leaver_trace(rows: Rows, leavers: dict[int, int], theme: Theme) -> dict[str, Any]:
    place = rows.row_of()
    return {
        "type": "scatter",
        "mode": "markers",
        "x": list(leavers.values()),
        "y": [place[rank] for rank in leavers],
        "marker": {
            "symbol": "triangle-right",
            "size": 10,
            "color": theme.text,
            "line": {"width": 1, "color": theme.panel},
        },
        "text": [f"rank {r} differs first at step {s}" for r, s in leavers.items()],
        "hovertemplate": "%{text}<extra></extra>",
        "cliponaxis": False,
        "showlegend": False,
        "name": "differs first",
        "meta": {"role": "leavers"},
    }


def _leaver_labels(
    rows: Rows, leavers: dict[int, int], theme: Theme, span: tuple[int, int]
) -> list[dict[str, Any]]:
    """Names beside the marks: before them, over cells that are still equal, where there is room."""
    # On a narrow page the text takes nearly half of the chart.
    room = span[0] + 0.5 * (span[1] - span[0])
    place = rows.row_of()
    return [
        {
            "x": step,
            "y": place[rank],
            "xanchor": "right" if step > room else "left",
            "xshift": -8 if step > room else 8,
            "showarrow": False,
            "text": f"rank {rank} from step {step}",
            "font": {"size": 11, "color": theme.text},
            "bgcolor": faded(theme.panel, 0.8),
            "borderpad": 1,
        }
        for rank, step in leavers.items()
    ]


def _selection(step: int, theme: Theme) -> dict[str, Any]:
    return {
        "type": "line",
        "xref": "x",
        "yref": "paper",
        "x0": step,
        "x1": step,
        "y0": -0.02,
        "y1": 1.02,
        "line": {"color": theme.text, "width": 1.5},
        "name": "selected",
    }


def _summary(
    stage: str, ranks: Sequence[int], bins: Bins, leavers: dict[int, int], undecided: int
) -> str:
    first, last = int(bins.starts[0]), int(bins.starts[-1]) + bins.width - 1
    head = f"{stage} of {len(ranks)} ranks, steps {first} to {last}"
    if not leavers:
        return f"{head}: equal to the last bit wherever checked"
    tail = "; at some steps no majority names the reference" if undecided else ""
    return (
        f"{head}: rank {rank_list(list(leavers))} differ{'s' if len(leavers) == 1 else ''}, "
        f"first at step {min(leavers.values())}{tail}"
    )
