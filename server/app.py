"""The application: where everything on the server side comes together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import HTMLResponse
from starlette.middleware.base import RequestResponseEndpoint

from rankscope.dashboard import pages
from rankscope.server.api import (
    alerts,
    divergence,
    health,
    ingest,
    problems,
    reference,
    runs,
    series,
    stream,
    verdict,
)
from rankscope.server.dashboard_data import DatabaseSource
from rankscope.server.news import Counters, News
from rankscope.server.settings import Settings
from rankscope.server.storage import migrate
from rankscope.server.storage.engine import open_engine
from rankscope.server.worker import Worker

_ROUTERS = (ingest, runs, series, divergence, alerts, verdict, stream)


def create_app(settings: Settings) -> FastAPI:
    """An application on a database, which is migrated when the application starts."""
    engine = open_engine(settings.database)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        migrate.upgrade(engine)
        worker = Worker(engine, app.state.news.wake)
        if settings.evaluate:
            worker.start()
        try:
            yield
        finally:
            app.state.news.stopping.set()
            worker.stop()
            engine.dispose()

    app = FastAPI(
        title="Rankscope",
        summary="Watches every rank of a distributed training job",
        lifespan=lifespan,
        # FastAPI's own pages load their scripts from elsewhere.
        docs_url=None,
        redoc_url=None,
    )
    app.state.engine = engine
    app.state.news = News()
    app.state.counters = Counters()
    problems.install(app)
    api = APIRouter(prefix="/api/v1")
    for module in _ROUTERS:
        api.include_router(module.router)
    app.include_router(api)
    app.include_router(health.router)

    @app.get("/docs", include_in_schema=False)
    def docs() -> HTMLResponse:
        return HTMLResponse(reference.page(app.openapi()))

    pages.install(app, DatabaseSource(engine))

    @app.middleware("http")
    async def security(request: Request, call_next: RequestResponseEndpoint) -> Response:
        response = await call_next(request)
        for name, value in pages.SECURITY_HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    return app
