"""The web pages: templates, the figures as JSON, the static files, and nothing from outside.

    pages.install(app, source)

A page is a frame; what it shows comes to the browser by the public REST interface, and its figures
as plotly JSON from `/runs/{run}/figures/...`, made by `rankscope.dashboard.figures`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, HTTPException, Query, Request, Response
from fastapi.exception_handlers import http_exception_handler
from fastapi.templating import Jinja2Templates
from starlette.exceptions import HTTPException as StarletteHTTPException

from rankscope.dashboard import assets, growing, overviews, ranges
from rankscope.dashboard.figures import (
    THEMES,
    axes,
    axis_of,
    distance_matrix,
    divergence_heatmap,
    on_axis,
    rank_curves,
    run_curves,
)
from rankscope.dashboard.parameters import Step, Theme, Viewed, known, shown
from rankscope.dashboard.source import Selection, Source

_FOLDER = Path(__file__).parent
# Of an axis of time: straight between them, so that no step is more than a pixel off.
_KNOTS = 400

# Nothing may be loaded from elsewhere, and no script may stand in a page: a hostile metric name has
# nowhere to run. Plotly writes style attributes and shows heatmaps as data: images.
SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
        "object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def install(
    app: FastAPI, source: Source, *, cookie: str = "", site: Path = _FOLDER / "help"
) -> None:
    """Adds the pages, their figures, static files and error pages to the application.

    Args:
        cookie: who brings it is logged in, and can log out.
        site: folder of the built documentation; it need not be there.

    Call it after the application's own error handlers are in place: those go on answering whatever
    is not a browser asking for a page.
    """
    templates = Jinja2Templates(directory=_FOLDER / "templates")
    templates.env.globals["cookie"] = cookie
    app.include_router(_pages(templates, source), include_in_schema=False)
    app.include_router(_figures(source), include_in_schema=False)
    app.include_router(overviews.router_of(source), include_in_schema=False)
    app.include_router(_figures_of_several(source), include_in_schema=False)
    app.include_router(assets.router, include_in_schema=False)
    app.mount("/static", assets.own_files(_FOLDER / "static"), name="static")
    _install_help(app, templates, site)
    _install_error_page(app, templates)


def _install_help(app: FastAPI, templates: Jinja2Templates, folder: Path) -> None:
    """Adds the documentation, which a wheel has, and a clone after `make docs`; else says so."""
    if (site := assets.help_pages(folder)) is not None:
        app.mount("/help", site, name="help")
        return

    @app.get("/help", include_in_schema=False)
    @app.get("/help/{path:path}", include_in_schema=False)
    def not_built(request: Request, path: str = "") -> Response:
        # The link in the frame leads to a page; what a link names in the documentation is not here.
        status = 404 if path else 200
        return _page(templates, request, "no_help.html", status_code=status)


def _pages(templates: Jinja2Templates, source: Source) -> APIRouter:
    router = APIRouter()

    @router.get("/")
    def runs(request: Request) -> Response:
        base_url = str(request.base_url).rstrip("/")
        return _page(templates, request, "runs.html", page="runs", base_url=base_url)

    @router.get("/fleet")
    def fleet(request: Request) -> Response:
        return _page(templates, request, "fleet.html", page="fleet")

    @router.get("/alerts")
    def alerts(request: Request) -> Response:
        return _page(templates, request, "alerts.html", page="alerts")

    @router.get("/notifications")
    def notifications(request: Request) -> Response:
        return _page(templates, request, "notifications.html", page="notifications")

    @router.get("/compare")
    def compare(request: Request) -> Response:
        return _page(templates, request, "compare.html", plotly=assets.plotly_name())

    @router.get("/login")
    def login(request: Request, next: str = "/", wrong: bool = False) -> Response:
        return _page(templates, request, "login.html", next=next, wrong=wrong)

    @router.get("/runs/{run}")
    def run_page(request: Request, run: str) -> Response:
        if source.ranks(run) is None:
            alike = " or ".join(repr(one) for one in source.similar(run))
            meant = f"Did you mean {alike}? " if alike else ""
            raise HTTPException(
                404,
                f"No run {run!r} has reported to this server. {meant}A run appears with the first "
                "post of its first rank; if the trainer is running, compare its RANKSCOPE_SERVER "
                "with the address of this page.",
            )
        return _page(
            templates,
            request,
            "run.html",
            run=run,
            plotly=assets.plotly_name(),
            modules=assets.modules("run.js"),
        )

    return router


def _figures_of_several(source: Source) -> APIRouter:
    router = APIRouter(prefix="/compare/figures")

    @router.get("/curves.json")
    def curves(
        request: Request,
        runs: Annotated[list[str], Query(min_length=1, max_length=4)],
        metric: str,
        max_points: Annotated[int, Query(ge=2, le=10_000)] = 600,
        log: bool = False,
        marked_step: Step = None,
        theme: Theme = "light",
    ) -> Response:
        for run in runs:
            known(source, run)
        wanted = Selection(max_points=max_points)
        figure = run_curves(
            {run: source.curves(run, metric, wanted) for run in runs},
            metric=metric,
            theme=THEMES[theme],
            log_y=log,
            marked_step=marked_step,
        )
        return assets.figure_response(request, figure)

    return router


def _figures(source: Source) -> APIRouter:
    router = APIRouter(prefix="/runs/{run}/figures")

    @router.get("/curves.json")
    def curves(
        request: Request,
        run: str,
        metric: str,
        ranks: str = "",
        highlight: str = "",
        from_step: Step = None,
        to_step: Step = None,
        max_points: Annotated[int, Query(ge=2, le=10_000)] = 600,
        smoothing: Annotated[float, Query(ge=0, lt=1)] = 0.0,
        log: bool = False,
        whole: bool = False,
        theme: Theme = "light",
        axis: Annotated[str, Query(pattern=f"^({'|'.join(axes.SERIES)})?$")] = "",
        known_points: Annotated[str, Query(alias="known", max_length=64)] = "",
    ) -> Response:
        everyone = known(source, run)
        chosen = ranges.parse(ranks) if ranks else None
        suspects = source.suspects(run)
        named = ranges.parse(highlight) if highlight else suspects
        wanted = Selection(
            ranks=chosen, from_step=from_step, to_step=to_step, max_points=max_points, steady=True
        )
        figure = rank_curves(
            source.curves(run, metric, wanted),
            metric=metric,
            theme=THEMES[theme],
            smoothing=smoothing,
            log_y=log,
            highlight=named,
            suspects=suspects,
            whole=whole,
            marks=source.marks(run),
            x_range=shown(from_step, to_step),
            color_ranks=everyone,
            legend=False,
        )
        if axis:
            of = source.curves(run, axes.SERIES[axis], Selection(max_points=_KNOTS))
            if (made := axis_of(axis, of)) is not None:
                on_axis(figure, made)
        growing.outline_later(figure)
        growing.cut(figure, growing.Known.parse(known_points))
        return assets.figure_response(request, figure)

    @router.get("/divergence.json")
    def divergence(
        request: Request,
        run: str,
        view: Viewed,
        stage: str | None = None,
        selected: Step = None,
        columns: Annotated[int, Query(ge=10, le=1000)] = 240,
    ) -> Response:
        known(source, run)
        facts = source.divergence(run, stage=stage, from_step=view.from_step, to_step=view.to_step)
        figure = divergence_heatmap(
            facts.ranks,
            facts.steps,
            facts.relative,
            facts.checked,
            stage=facts.stage,
            theme=view.theme,
            marks=source.marks(run),
            columns=columns,
            x_range=view.axis,
            selected=selected,
            until=facts.until,
            counts=facts.counts,
            undecided=facts.undecided,
            legend=False,
        )
        figure.layout.meta = {**(figure.layout.meta or {}), "stages": list(facts.stages)}
        return assets.figure_response(request, figure)

    @router.get("/distances.json")
    def distances(
        request: Request,
        run: str,
        stage: str | None = None,
        step: Step = None,
        theme: Theme = "light",
    ) -> Response:
        known(source, run)
        facts = source.distances(run, stage=stage, step=step)
        if facts is None:
            raise HTTPException(404, "No step of this run has been fingerprinted tensor by tensor.")
        figure = distance_matrix(
            facts.ranks,
            facts.distance,
            facts.equal,
            step=facts.step,
            stage=facts.stage,
            suspects=facts.suspects,
            theme=THEMES[theme],
            legend=False,
        )
        return assets.figure_response(request, figure)

    return router


def _page(
    templates: Jinja2Templates,
    request: Request,
    name: str,
    *,
    status_code: int = 200,
    **context: object,
) -> Response:
    root = request.scope.get("root_path", "").rstrip("/")
    return templates.TemplateResponse(
        request,
        name,
        {"root": root, "page": "", **context},
        status_code=status_code,
        headers=SECURITY_HEADERS,
    )


def _install_error_page(app: FastAPI, templates: Jinja2Templates) -> None:
    """Browsers that ask for a page get one; the interface keeps its own answer."""
    refused = app.exception_handlers.get(StarletteHTTPException, http_exception_handler)
    failed = app.exception_handlers.get(Exception)

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, StarletteHTTPException)
        if not _wants_page(request):
            return await _answer(refused, request, error)
        missing = error.status_code == 404
        said = str(error.detail)
        return _page(
            templates,
            request,
            "error.html",
            status_code=error.status_code,
            status=error.status_code,
            title="Not here" if missing else "That did not work",
            detail=f"Nothing is at {request.url.path}." if said == "Not Found" else said,
        )

    async def fail(request: Request, error: Exception) -> Response:
        # The application's own handler goes first: it is the one that writes the log.
        answer = None if failed is None else await _answer(failed, request, error)
        if answer is not None and not _wants_page(request):
            return answer
        return _page(
            templates,
            request,
            "error.html",
            status_code=500,
            status=500,
            title="The server failed at this page",
            detail="Its log says why. The data are safe: they are stored before they are shown.",
        )

    app.add_exception_handler(StarletteHTTPException, refuse)
    app.add_exception_handler(Exception, fail)


async def _answer(handler: Any, request: Request, error: Exception) -> Response:
    answer = handler(request, error)
    return answer if isinstance(answer, Response) else await answer


def _wants_page(request: Request) -> bool:
    path = request.url.path.removeprefix(request.scope.get("root_path", ""))
    return not path.startswith("/api/") and "text/html" in request.headers.get("accept", "")
