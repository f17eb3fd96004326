"""Figures that show a whole run at once: ranks x steps, layers x steps, where the time goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import plotly.graph_objects as go
from fastapi import APIRouter, HTTPException, Query, Request, Response

from rankscope.dashboard import alert_chart, assets, growing
from rankscope.dashboard.figures import (
    THEMES,
    data_by_rank,
    data_over_steps,
    divergence_heatmap,
    gradient_noise,
    layer_heatmap,
    metric_heatmap,
    overlap_matrix,
    rank_curves,
    reduced,
    scaling_efficiency,
    time_by_rank,
    time_shares,
)
from rankscope.dashboard.figures.text import inert
from rankscope.dashboard.figures.times import SERIES
from rankscope.dashboard.parameters import Theme, View, Viewed, known
from rankscope.dashboard.source import DataRead, LayerValues, Selection, Source

_MOST_TICKS = 6
# Steps around an alert that its chart shows at least.
_AROUND = 20
# Of its lines: a point every other pixel of the narrow chart that it is.
_ALERT_POINTS = 200
# It is a quarter as tall as the heatmap of the run.
_ALERT_ROWS = 4
# Characters of the name of a tensor over a chart that is as wide as a phone.
_LONGEST_TITLE = 48


def router_of(source: Source) -> APIRouter:
    """Routes below `/runs/{run}/figures`."""
    router = APIRouter(prefix="/runs/{run}/figures")
    _by_rank(router, source)
    _of_data(router, source)
    _of_noise(router, source)
    _by_layer_and_alert(router, source)
    return router


def _by_rank(router: APIRouter, source: Source) -> None:
    @router.get("/ranks.json")
    def ranks_by_steps(
        request: Request,
        run: str,
        view: Viewed,
        metric: str,
        relative: bool = False,
        columns: Annotated[int, Query(ge=10, le=1000)] = 240,
    ) -> Response:
        known(source, run)
        wanted = Selection(from_step=view.from_step, to_step=view.to_step, max_points=columns)
        figure = metric_heatmap(
            source.curves(run, metric, wanted),
            metric=metric,
            theme=view.theme,
            suspects=source.suspects(run),
            relative=relative,
            marks=source.marks(run),
            x_range=view.axis,
        )
        return assets.figure_response(request, figure)

    @router.get("/times.json")
    def times(
        request: Request,
        run: str,
        view: Viewed,
    ) -> Response:
        known(source, run)
        wanted = Selection(from_step=view.from_step, to_step=view.to_step, max_points=200)
        figure = time_by_rank(
            {name: source.curves(run, name, wanted) for name in SERIES},
            theme=view.theme,
            suspects=source.suspects(run),
        )
        return assets.figure_response(request, figure)

    @router.get("/shares.json")
    def shares(
        request: Request,
        run: str,
        view: Viewed,
    ) -> Response:
        known(source, run)
        wanted = Selection(from_step=view.from_step, to_step=view.to_step, max_points=300)
        names = ("wait_seconds", "data_seconds", "step_seconds")
        figure = time_shares(
            {name: source.curves(run, name, wanted) for name in names}, theme=view.theme
        )
        if (span := view.axis) is not None:
            figure.layout.xaxis.range = list(span)
        return assets.figure_response(request, figure)

    @router.get("/scaling.json")
    def scaling(request: Request, run: str, theme: Theme = "light") -> Response:
        known(source, run)
        found = source.scaling(run)
        figure = scaling_efficiency(found, theme=THEMES[theme]) if found else _nothing()
        return assets.figure_response(request, figure)


def _of_noise(router: APIRouter, source: Source) -> None:
    @router.get("/noise.json")
    def noise(request: Request, run: str, view: Viewed) -> Response:
        known(source, run)
        found = source.noise(run, from_step=view.from_step, to_step=view.to_step)
        if found is None:
            # No error: it takes norms that few runs lack, and steps that all lack at first.
            return assets.figure_response(request, _nothing())
        figure = gradient_noise(
            found.steps,
            found.scale,
            found.batch,
            counted=found.counted,
            theme=view.theme,
            marks=source.marks(run),
            x_range=view.axis,
        )
        return assets.figure_response(request, figure)


def _of_data(router: APIRouter, source: Source) -> None:
    def read(run: str, view: View) -> DataRead:
        known(source, run)
        found = source.data(run, from_step=view.from_step, to_step=view.to_step)
        if found is None:
            raise HTTPException(404, "No rank of this run has reported batches at these steps.")
        return found

    @router.get("/data-ranks.json")
    def data_ranks(request: Request, run: str, view: Viewed) -> Response:
        found = read(run, view)
        figure = data_by_rank(
            found.ranks,
            found.of_ranks,
            passes=len(found.passes),
            by_samples=found.by_samples,
            theme=view.theme,
            suspects=source.suspects(run),
        )
        if not found.complete:
            first, last = int(found.steps[0]), int(found.steps[-1])
            figure.layout.meta["summary"] += f". These are the newest steps, {first:,} to {last:,}"
        return assets.figure_response(request, figure)

    @router.get("/data-steps.json")
    def data_steps(request: Request, run: str, view: Viewed) -> Response:
        found = read(run, view)
        figure = data_over_steps(
            found.steps,
            found.of_steps,
            passes=found.passes,
            by_samples=found.by_samples,
            theme=view.theme,
            x_range=view.axis,
        )
        return assets.figure_response(request, figure)

    @router.get("/overlap.json")
    def overlap(request: Request, run: str, view: Viewed) -> Response:
        found = read(run, view)
        figure = overlap_matrix(
            found.ranks, found.shared, by_samples=found.by_samples, theme=view.theme
        )
        return assets.figure_response(request, figure)


def _by_layer_and_alert(router: APIRouter, source: Source) -> None:
    @router.get("/layers.json")
    def layers_by_steps(
        request: Request,
        run: str,
        view: Viewed,
        metric: str,
        table: str = "parameters",
        rank: Annotated[int | None, Query(ge=0)] = None,
        columns: Annotated[int, Query(ge=10, le=1000)] = 200,
        letters: Annotated[int, Query(ge=4, le=100)] = 30,
    ) -> Response:
        known(source, run)
        ranks = None if rank is None else [rank]
        wanted = Selection(ranks=ranks, from_step=view.from_step, to_step=view.to_step)
        found = source.layers(run, metric, table, wanted)
        if found is None:
            found = LayerValues(rank or 0, (), np.empty(0, np.int64), np.empty((0, 0)))
        steps, low, high = reduced(found.steps, found.values, columns=columns)
        figure = layer_heatmap(
            found.names,
            steps,
            low,
            high,
            metric=metric,
            rank=found.rank,
            theme=view.theme,
            marks=source.marks(run),
            x_range=view.axis,
            letters=letters,
            last=(int(found.steps[-1]), found.values[:, -1]) if len(found.steps) else None,
        )
        return assets.figure_response(request, figure)

    @router.get("/alerts/{alert}.json")
    def of_alert(request: Request, run: str, alert: str, theme: Theme = "light") -> Response:
        everyone = known(source, run)
        about = source.alert(run, alert)
        if about is None:
            raise HTTPException(404, f"No alert {alert!r} in this run.")
        choice = alert_chart.choose(
            about.kind,
            about.evidence,
            frozenset(source.metrics(run)),
            tensor=about.tensor,
            of_tensor=about.of_tensor,
        )
        room = max(_AROUND, about.last_step - about.first_step) // 2
        first, last = max(0, about.first_step - room), about.last_step + room
        marks = [mark for mark in source.marks(run) if mark.id == alert]
        if choice.bits:
            for stage in alert_chart.stages(about.stage):
                facts = source.divergence(run, stage=stage, from_step=first, to_step=last)
                if np.any(facts.relative[facts.checked] != 0):
                    break
            if len(facts.steps):
                figure = divergence_heatmap(
                    facts.ranks,
                    facts.steps,
                    facts.relative,
                    facts.checked,
                    stage=facts.stage,
                    theme=THEMES[theme],
                    marks=marks,
                    columns=120,
                    until=facts.until,
                    counts=facts.counts,
                    undecided=facts.undecided,
                    legend=False,
                    # The title of the card says who it is, and cells are few.
                    named=False,
                    fewer=_ALERT_ROWS,
                )
                # The colours are those of the heatmap below, which says what they are.
                figure.update_traces(showscale=False, selector={"type": "heatmap"})
                # The chart is small: room for the suspects and the ends of the axis.
                figure.layout.yaxis.update(_few_ticks(figure.layout.yaxis, about.ranks))
                figure.layout.meta = {**figure.layout.meta, "shows": "divergence"}
                return assets.figure_response(request, figure)
        if choice.metric is None:
            # No error: a run need not have a series that shows it.
            return assets.figure_response(request, go.Figure(layout={"meta": {"shows": ""}}))
        wanted = Selection(from_step=first, to_step=last, max_points=_ALERT_POINTS)
        figure = rank_curves(
            source.curves(run, choice.metric, wanted),
            metric=choice.metric,
            theme=THEMES[theme],
            highlight=about.ranks,
            suspects=about.ranks,
            # A spike is what it may be about.
            whole=True,
            marks=marks,
            color_ranks=everyone,
            legend=False,
        )
        if choice.tensor:
            # The axis has room for the name of the metric alone.
            title = {"text": inert(choice.tensor, _LONGEST_TITLE), "x": 0, "xref": "paper"}
            figure.update_layout(title={**title, "font": {"size": 12}}, margin={"t": 28})
        figure.layout.meta = {**figure.layout.meta, "shows": choice.metric}
        growing.outline_later(figure)
        return assets.figure_response(request, figure)


def _nothing() -> go.Figure:
    """What a panel that is there for some runs only hides itself by."""
    return go.Figure(layout={"meta": {"nothing": True}})


def _few_ticks(axis: Any, ranks: Sequence[int]) -> dict[str, Any]:
    """Of the ticks of an axis of ranks those of some ranks, the first and the last."""
    ticks = list(zip(axis.tickvals, axis.ticktext, strict=True))
    if len(ticks) <= _MOST_TICKS:
        return {}
    named = {str(rank) for rank in ranks}
    kept = [t for n, t in enumerate(ticks) if n in (0, len(ticks) - 1) or t[1] in named]
    if len(kept) > _MOST_TICKS:
        kept = ticks[:: -(-len(ticks) // _MOST_TICKS)]
    return {"tickvals": [place for place, _ in kept], "ticktext": [text for _, text in kept]}
