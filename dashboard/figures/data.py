"""The data ledger: which samples came again, to whom, and which two ranks had both."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from rankscope.dashboard.figures.arrays import Float64, Int64
from rankscope.dashboard.figures.cells import nothing
from rankscope.dashboard.figures.rows import rows_of
from rankscope.dashboard.figures.theme import LIGHT, Theme, blended, faded, layout
from rankscope.dashboard.figures.ticks import rank_ticks

# What samples are counted by; a pass is once through the data.
CLASSES = (
    "new",
    "read in an earlier pass",
    "read again by the same rank",
    "had been another rank's",
)
# Columns of the chart over the steps: a stripe of three pixels each.
_COLUMNS = 200
# More lines than this between passes hide what they divide.
_MOST_PASSES = 40
# Percentages of more ranks do not fit into their cells.
_MOST_WRITTEN = 10
_MOST_TICKS = 8
# Rows of a matrix of 240 pixels between which there is room for a line.
_MOST_GAPS = 32
# Colours end at this share at least: a chance meeting of a few samples is no pattern.
_LEAST_SCALE = 0.02


def data_by_rank(
    ranks: Sequence[int],
    of_ranks: Int64,
    *,
    passes: int,
    by_samples: bool = True,
    theme: Theme = LIGHT,
    suspects: Collection[int] = (),
) -> go.Figure:
    """A bar for each rank: what share of the samples that it read had been read before, by whom.

    Of more than 128 ranks suspects have bars of their own, others share some.

    Args:
        ranks: [R], ascending.
        of_ranks: int64 [R, 4]: samples by `CLASSES`.
        passes: through the data, for the summary.
        by_samples: single samples were identified; else whole batches count as samples.
        theme: colours.
        suspects: ranks that alerts name.

    Returns:
        A figure; `layout.meta` has a summary, and by class the `shares` of each rank.
    """
    what = "samples" if by_samples else "batches"
    settings = _layout(theme, f"share of the {what}")
    settings["xaxis"] = {"title": {"text": "rank"}, "showgrid": False, "fixedrange": True}
    rows = rows_of(ranks, suspects)
    counts = np.add.reduceat(of_ranks[rows.order], rows.starts) if len(ranks) else of_ranks
    share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    traces = [
        {
            "type": "bar",
            "x": np.arange(len(rows)),
            "y": share[:, n],
            "name": name,
            "marker": {"color": color, "line": {"width": 0}},
            "customdata": [
                [who, int(count)] for who, count in zip(rows.names(), counts[:, n], strict=True)
            ],
            "hovertemplate": "%{customdata[0]}: %{y:.1%} (%{customdata[1]:,})",
            "meta": {"role": "part", "part": name},
        }
        for n, (name, color) in enumerate(_colors(theme))
        if counts[:, n].any()
    ]
    settings["barmode"] = "stack"
    settings["bargap"] = 0.25 if len(rows) <= 32 else 0.0
    settings["xaxis"] |= {
        **rows.axis([r for r in suspects if r in set(ranks)]),
        "range": [-0.6, len(rows) - 0.4],
        "unifiedhovertitle": {"text": ""},
    }
    each = of_ranks / np.maximum(of_ranks.sum(axis=1, keepdims=True), 1)
    settings["meta"] = {
        "summary": _summary(ranks, of_ranks, passes, what),
        "shares": {
            name: dict(zip(map(str, ranks), each[:, n].tolist(), strict=True))
            for n, name in enumerate(CLASSES)
        },
    }
    return go.Figure(data=traces, layout=settings)


def data_over_steps(
    steps: Int64,
    of_steps: Int64,
    *,
    passes: Sequence[int],
    by_samples: bool = True,
    theme: Theme = LIGHT,
    x_range: tuple[float, float] | None = None,
) -> go.Figure:
    """What share of the samples of a step had been read before, by whom; lines where passes begin.

    Args:
        steps: int64 [S], ascending.
        of_steps: int64 [S, 4]: samples by `CLASSES`.
        passes: steps at which a pass through the data begins.
        by_samples: single samples were identified; else whole batches count as samples.
        theme: colours.
        x_range: first and last step that the axis shows; default: those of the data.
    """
    settings = _layout(theme, f"share of the {'samples' if by_samples else 'batches'}")
    span = (int(steps[0]), int(steps[-1])) if len(steps) else (0, 1)
    settings["xaxis"] = {
        "title": {"text": "step"},
        "tickformat": ",d",
        "range": list(x_range or span),
        "unifiedhovertitle": {"text": "step %{x:,d}"},
    }
    settings["dragmode"] = "zoom"
    width = max(1, -(-(span[1] - span[0] + 1) // _COLUMNS))
    place, first = np.unique((steps - span[0]) // width, return_index=True)
    counts = np.add.reduceat(of_steps, first) if len(place) else of_steps
    share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    traces = [
        {
            "type": "scatter",
            "mode": "lines",
            "stackgroup": "read",
            "x": span[0] + place * width,
            "y": share[:, n],
            "name": name,
            "line": {"color": color, "width": 1, "shape": "hv"},
            "fillcolor": faded(color, 0.75),
            "hovertemplate": "%{y:.1%}",
            "meta": {"role": "raw"},
        }
        for n, (name, color) in enumerate(_colors(theme))
        if counts[:, n].any()
    ]
    begun = passes[1:] if len(passes) <= _MOST_PASSES else ()
    settings["shapes"] = [
        {
            "type": "line",
            "x0": step,
            "x1": step,
            "y0": 0,
            "y1": 1,
            "yref": "paper",
            "line": {"color": theme.text, "width": 1, "dash": "dot"},
            "name": "pass",
        }
        for step in begun
    ]
    settings["meta"] = {"summary": f"{_passes_text(passes)} in steps {span[0]:,} to {span[1]:,}"}
    return go.Figure(data=traces, layout=settings)


def overlap_matrix(
    ranks: Sequence[int],
    shared: Float64,
    *,
    by_samples: bool = True,
    theme: Theme = LIGHT,
) -> go.Figure:
    """Which share of what they read in one pass through the data any two ranks read both.

    Of more than 128 ranks those that share most have rows of their own, others share some: such a
    cell shows the largest of its pairs.

    Args:
        ranks: [R], ascending.
        shared: float64 [R, R], 0 to 1; NaN where it is not known.
        by_samples: single samples were identified; else whole batches count as samples.
        theme: colours.

    Returns:
        A square figure; up to 10 ranks have percentages written into the cells.
    """
    what = "samples" if by_samples else "batches"
    settings = layout(theme)
    known = np.nan_to_num(shared, nan=-1.0)
    most = known.max(axis=1, initial=-1.0) if len(ranks) else np.empty(0)
    rows = rows_of(ranks, [r for r, own in zip(ranks, most, strict=True) if own > _LEAST_SCALE])
    cells = rows.largest(rows.largest(known).T).T if rows.grouped else known
    count = len(rows)
    ticks = rows.axis([]) if rows.grouped else rank_ticks(rows.ranks, [], _MOST_TICKS)
    axis = {
        **ticks,
        "showgrid": False,
        "range": [-0.5, count - 0.5],
        "fixedrange": True,
        "title": {"text": "rank"},
        "constrain": "domain",
    }
    settings |= {
        "xaxis": axis,
        "yaxis": {**axis, "range": [count - 0.5, -0.5], "scaleanchor": "x"},
        "plot_bgcolor": theme.unchecked,
        "hovermode": "closest",
        "dragmode": False,
        "margin": {"l": 50, "r": 10, "t": 12, "b": 42},
        "meta": {"summary": _of_pairs(ranks, known, what), "rows": count},
    }
    if not (cells >= 0).any():
        settings["annotations"] = [nothing("Of no two ranks is known what they read", theme)]
        return go.Figure(data=[], layout=settings)
    largest = max(float(cells.max()), _LEAST_SCALE)
    low, high = theme.equal, theme.differing[-1] if theme.name == "light" else theme.differing[2]
    trace = {
        "type": "heatmap",
        "x": np.arange(count),
        "y": np.arange(count),
        "z": np.where(cells >= 0, cells, np.nan).astype(np.float32),
        "zmin": 0,
        "zmax": largest,
        "colorscale": [[0, low], [1, high]],
        "xgap": 1 if count <= _MOST_GAPS else 0,
        "ygap": 1 if count <= _MOST_GAPS else 0,
        "hoverongaps": False,
        "hovertemplate": "ranks %{y} and %{x}<br>%{z:.1%} of the " + what + "<extra></extra>",
        "colorbar": {
            "title": {
                "text": f"{what} of both",
                "side": "right",
                "font": {"size": 11, "color": theme.muted},
            },
            "tickfont": {"size": 10, "color": theme.muted},
            # Ticks of a scale that ends at 2 % are parts of a percent.
            "tickformat": ".2~%",
            "thickness": 10,
            "outlinewidth": 0,
            "xpad": 6,
        },
        "meta": {"role": "shared"},
    }
    if list(rows.ranks) != list(range(count)) or rows.grouped:
        names = [n.removeprefix("ranks ").removeprefix("rank ") for n in rows.names()]
        trace["text"] = [[f"ranks {a} and {b}" for b in names] for a in names]
        trace["hovertemplate"] = "%{text}<br>%{z:.1%} of the " + what + "<extra></extra>"
    if count <= _MOST_WRITTEN:
        trace |= {"texttemplate": "%{z:.0%}", "textfont": {"size": 11}}
    return go.Figure(data=[trace], layout=settings)


def _passes_text(passes: Sequence[int]) -> str:
    """`3 passes through the data`."""
    if len(passes) < 2:
        return "one pass through the data so far"
    return f"{len(passes):,} passes through the data"


def _layout(theme: Theme, title: str) -> dict[str, Any]:
    settings = layout(theme)
    return settings | {
        "yaxis": {
            "title": {"text": title},
            "tickformat": ".0%",
            "range": [0, 1],
            "fixedrange": True,
        },
        "hovermode": "x unified",
        "dragmode": False,
        "showlegend": True,
        "legend": {**settings["legend"], "orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"},
        "margin": {"l": 60, "r": 16, "t": 36, "b": 42},
    }


def _colors(theme: Theme) -> list[tuple[str, str]]:
    # What is as it should be stays behind what is not, and is seen on either ground.
    new, earlier = (
        blended(color, theme.panel, share)
        for color, share in ((theme.accent, 0.6), (theme.muted, 0.4))
    )
    colors = (new, earlier, theme.warning, theme.unsized)
    return list(zip(CLASSES, colors, strict=True))


def _summary(ranks: Sequence[int], of_ranks: Int64, passes: int, what: str) -> str:
    total = int(of_ranks.sum())
    if not total:
        return f"No {what} are known"
    share = (of_ranks.sum(axis=0) / total).tolist()
    return (
        f"{total:,} {what} of {len(ranks)} rank{'s' if len(ranks) != 1 else ''} were identified, "
        f"in {_passes_text(range(passes))}. Within a pass {_percent(share[2])} of them had been "
        f"read before by the same rank, {_percent(share[3])} by another one"
    )


def _percent(share: float) -> str:
    """`0 %`, `< 0.1 %`, `0.4 %`, `27 %`."""
    if 0 < share < 0.001:
        return "< 0.1 %"
    return f"{100 * share:.1f} %" if 0 < share < 0.1 else f"{100 * share:.0f} %"


def _of_pairs(ranks: Sequence[int], known: Float64, what: str) -> str:
    if not (known >= 0).any():
        return "Of no two ranks is known what they read"
    a, b = np.unravel_index(int(known.argmax()), known.shape)
    largest = float(known[a, b])
    if not largest:
        return f"No two ranks read the same {what} in one pass through the data"
    low, high = sorted((ranks[int(a)], ranks[int(b)]))
    return (
        f"Ranks {low} and {high} share most: {_percent(largest)} of the {what} "
        "that they read in one pass through the data"
    )
