"""Ranks x ranks: how far any two of them differ at one step."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from rankscope.dashboard.figures.arrays import Float64, rank_list
from rankscope.dashboard.figures.distance_scale import KEY_ABOVE, cell_traces, legend_traces
from rankscope.dashboard.figures.labels import SUSPECT_SIGN
from rankscope.dashboard.figures.rows import Rows, rows_of
from rankscope.dashboard.figures.theme import LIGHT, Theme, layout
from rankscope.dashboard.figures.ticks import rank_ticks

# More numbers would not fit into their cells; then signs distinguish equal from different.
_MAX_NUMBERED = 4
_MAX_SIGNED = 10
_MAX_WRITTEN = 64


def distance_matrix(
    ranks: Sequence[int],
    distance: Float64,
    equal: np.ndarray[Any, np.dtype[np.bool_]],
    *,
    step: int,
    stage: str = "parameters",
    suspects: Collection[int] = (),
    theme: Theme = LIGHT,
    legend: bool = True,
) -> go.Figure:
    """L2 distance between every two ranks at one step.

    Blocks of equal cells are groups of ranks that went their way together. Of more than 128 ranks
    those outside the largest group have rows of their own, others share some: such a cell shows the
    worst of its pairs.

    Args:
        ranks: [R], ascending.
        distance: float64 [R, R]; NaN where it is not known.
        equal: bool [R, R]: whether the two hold the same bits (decided by digests, not by the
            distance).
        step: the step.
        stage: link of the chain that was compared.
        suspects: ranks that an alert blames: they are marked on both axes, as a cell is coloured
            for both of its ranks.
        theme: colours.
        legend: whether to explain the colours above the chart; a page explains them once.

    Returns:
        A square figure; up to 4 ranks have their distances written into the cells.
    """
    count = len(ranks)
    distances = np.where(equal | ~(distance > 0), np.nan, distance)
    unsized = ~equal & np.isnan(distances)
    blamed = sorted({*suspects} & {*ranks})
    summary = _summary(ranks, distances, equal, step, stage, blamed)
    minority = sorted({*_minority(ranks, equal), *blamed})
    rows = rows_of(ranks, minority)
    same = equal & ~np.eye(count, dtype=np.bool_)
    if rows.grouped:
        largest = _on_rows(rows, np.where(np.isnan(distances), -np.inf, distances))
        distances = np.where(np.isfinite(largest), largest, np.nan)
        unsized = _on_rows(rows, unsized) & np.isnan(distances)
        equal = ~unsized & np.isnan(distances)
        same = equal
        count = len(rows)
    places = np.arange(count)
    axis = {
        **_ticks(rows, minority, blamed, theme),
        "showgrid": False,
        "range": [-0.5, count - 0.5],
        "fixedrange": True,
        "title": {"text": "rank"},
        "constrain": "domain",
    }
    settings = layout(theme)
    settings |= {
        "xaxis": axis,
        "yaxis": {**axis, "range": [count - 0.5, -0.5], "scaleanchor": "x"},
        "plot_bgcolor": theme.unchecked,
        "hovermode": "closest",
        "dragmode": False,
        "margin": {"l": 50, "r": 10, "t": 44 if legend else 12, "b": 42},
        "showlegend": legend,
        "legend": {**settings["legend"], **KEY_ABOVE},
    }
    # A text for each cell of a large matrix would be megabytes; its rows are mostly its ranks.
    written = count <= _MAX_WRITTEN or list(ranks) != list(range(count))
    names = [name.removeprefix("ranks ").removeprefix("rank ") for name in rows.names()]
    pairs = {"text": [[f"ranks {a} and {b}" for b in names] for a in names]} if written else {}
    where = "%{text}" if written else "ranks %{y} and %{x}"
    traces = cell_traces(
        equal=equal,
        distance=distances,
        unsized=unsized,
        theme=theme,
        title="L2 distance",
        common={
            "x": places,
            "y": places,
            "xgap": 1 if count <= 64 else 0,
            "ygap": 1 if count <= 64 else 0,
            **pairs,
        },
        hover=(
            where + "<br>equal to the last bit",
            where + "<br>L2 distance %{customdata:.4g}",
            where + "<br>differ, distance not sampled",
        ),
    )
    traces += legend_traces(
        theme,
        equal=bool(same.any()),
        differs=bool(np.isfinite(distances).any()),
        unsized=bool(unsized.any()),
        unchecked=False,
    )
    if count <= _MAX_SIGNED:
        settings["annotations"] = _numbers(distances, equal, unsized, theme)
    settings["shapes"] = _dividers(rows, theme)
    settings["meta"] = {"summary": summary, "step": step, "rows": count}
    return go.Figure(data=traces, layout=settings)


def _on_rows(rows: Rows, cells: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """[R, R] to [Q, Q]: the largest of each block."""
    return rows.largest(rows.largest(cells).T).T


def _ticks(
    rows: Rows, minority: Sequence[int], blamed: Sequence[int], theme: Theme
) -> dict[str, Any]:
    """Few: the matrix is small. Ranks that are blamed bear the sign that their curves bear."""
    ticks = rows.axis(minority) if rows.grouped else rank_ticks(rows.ranks, minority, 8)
    every = -(-len(ticks["tickvals"]) // 8) if rows.grouped else 1
    red = f'<span style="color:{theme.critical}">{SUSPECT_SIGN}'
    signs = {str(rank): f"{red}{rank}</span>" for rank in blamed}
    return {
        "tickvals": ticks["tickvals"][::every],
        "ticktext": [signs.get(text, text) for text in ticks["ticktext"][::every]],
    }


def _dividers(rows: Rows, theme: Theme) -> list[dict[str, Any]]:
    """Between suspect ranks and the others, across both axes, as far as the cells go."""
    ends = {"xref": "x", "yref": "y", "x0": -0.5, "x1": len(rows) - 0.5}
    across = [{**line, **ends} for line in rows.divider(theme)]
    turned = {"x0": "y0", "x1": "y1", "y0": "x0", "y1": "x1"}
    return across + [{**line, **{to: line[of] for to, of in turned.items()}} for line in across]


def _numbers(
    distances: Float64,
    equal: np.ndarray[Any, np.dtype[np.bool_]],
    unsized: np.ndarray[Any, np.dtype[np.bool_]],
    theme: Theme,
) -> list[dict[str, Any]]:
    labels = []
    dark_from = _dark_from(distances)
    for (row, column), value in np.ndenumerate(distances):
        if row == column:
            continue
        if unsized[row, column]:
            text, color = "\u2260", theme.panel
        elif equal[row, column]:
            text, color = "=", theme.text
        else:
            deep = value >= dark_from
            ink = ("#ffffff", "#18202b") if theme.name == "light" else ("#18202b", "#ffffff")
            text = _short(float(value)) if len(distances) <= _MAX_NUMBERED else "\u2260"
            color = ink[0] if deep else ink[1]
        labels.append(
            {
                "x": column,
                "y": row,
                "text": text,
                "showarrow": False,
                "font": {"size": 11, "color": color},
            }
        )
    return labels


def _short(value: float) -> str:
    """Two digits, as a decimal where it is short: 1.2, 0.33; else 1.2e-5."""
    if 0.01 <= value < 100:
        return f"{float(f'{value:.2g}'):g}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def _dark_from(distances: Float64) -> float:
    """Distances from here on lie in the deep half of the colour scale."""
    there = distances[np.isfinite(distances)]
    if not there.size:
        return np.inf
    low, high = np.floor(np.log10(there.min())), np.ceil(np.log10(there.max()))
    return float(10 ** (low + 0.5 * max(high - low, 2.0)))


def _minority(ranks: Sequence[int], equal: np.ndarray[Any, np.dtype[np.bool_]]) -> list[int]:
    """Ranks outside the largest group of equal ones."""
    sizes = equal.sum(axis=1)
    return [rank for rank, size in zip(ranks, sizes, strict=True) if size < sizes.max(initial=0)]


def _summary(
    ranks: Sequence[int],
    distances: Float64,
    equal: np.ndarray[Any, np.dtype[np.bool_]],
    step: int,
    stage: str,
    blamed: Sequence[int],
) -> str:
    groups = len({row.tobytes() for row in equal})
    head = f"{stage} of {len(ranks)} ranks at step {step}"
    if groups <= 1:
        return f"{head}: all equal to the last bit"
    known = distances[np.isfinite(distances)]
    size = f", distance at most {known.max():.3g} (L2)" if known.size else ", distances not sampled"
    who = f"; rank{'s' if len(blamed) > 1 else ''} {rank_list(blamed)} at fault" if blamed else ""
    return f"{head}: {groups} groups that differ{size}{who}"
