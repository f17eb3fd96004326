"""The application: where everything on the server side comes together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from anyio import to_thread
from fastapi import APIRouter, FastAPI
from fastapi.responses import HTMLResponse
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rankscope.dashboard import pages
from rankscope.server.api import (
    alerts,
    audit,
    batch_schema,
    compare,
    data,
    detectors,
    divergence,
    fleet,
    health,
    ingest,
    login,
    notifications,
    problems,
    reference,
    runs,
    series,
    stream,
    verdict,
)
from rankscope.server.api.admission import Admission
from rankscope.server.api.compressing import CompressedJson
from rankscope.server.api.guard import COOKIE, Guard
from rankscope.server.dashboard_data import DatabaseSource
from rankscope.server.health import Health
from rankscope.server.processes.background import background
from rankscope.server.processes.events import Counters, RunEvents
from rankscope.server.processes.postgres_listen import Messenger
from rankscope.server.settings import Settings
from rankscope.server.storage.database import migrate
from rankscope.server.storage.database.engine import open_engine
from rankscope.server.storage.ingest.writer import Writer

_INGEST = ("/api/v1/ingest", "POST")
# Pages and queries that are answered at a time. Python runs one thread of a process: each more is
# one more that the thread which takes batches has to wait for, again and again.
_READERS = 2
# Requests that wait for these: those behind them would be given up before they are answered.
_MAX_ASKED = 1000
_RAW_SECURITY_HEADERS = [
    (name.lower().encode(), value.encode()) for name, value in pages.SECURITY_HEADERS.items()
]
_ROUTERS = (
    ingest,
    runs,
    series,
    divergence,
    data,
    alerts,
    verdict,
    detectors,
    stream,
    compare,
    notifications,
    fleet,
    audit,
)


def create_app(settings: Settings) -> FastAPI:
    """An application on a database, which is migrated when the application starts."""
    engine = open_engine(settings.database)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        migrate.upgrade(engine)
        # What has a route that is no coroutine: what is asked for with GET, nearly all of it.
        to_thread.current_default_thread_limiter().total_tokens = _READERS
        run_events: RunEvents = app.state.run_events
        app.state.writer.start()
        messenger = Messenger(engine, run_events, app.state.health)
        messenger.start()
        work = background(settings, engine, run_events, app.state.health)
        work.start()
        try:
            yield
        finally:
            run_events.stopping.set()
            work.stop()
            app.state.writer.stop()
            messenger.stop()
            engine.dispose()

    app = _Application(
        title="Rankscope",
        summary="Watches every rank of a distributed training job",
        lifespan=lifespan,
        # FastAPI's own pages load their scripts from elsewhere.
        docs_url=None,
        redoc_url=None,
    )
    app.state.engine = engine
    app.state.given = settings.detectors
    app.state.cordon_commands = settings.cordon_commands
    app.state.health = Health()
    app.state.admission = Admission()
    app.state.writer = Writer(engine, app.state.health)
    app.state.run_events = RunEvents()
    app.state.counters = Counters()
    problems.install(app)
    api = APIRouter(prefix="/api/v1", responses=problems.RESPONSES)
    for module in _ROUTERS:
        api.include_router(module.router)
    app.include_router(api)
    app.include_router(health.router, responses=problems.RESPONSES)
    app.include_router(login.router)

    @app.get("/docs", include_in_schema=False)
    def docs() -> HTMLResponse:
        return HTMLResponse(reference.page(app.openapi()))

    pages.install(app, DatabaseSource(engine), cookie=COOKIE)
    app.add_middleware(_SecurityHeaders)
    app.add_middleware(CompressedJson)
    app.state.guard = Guard(
        app.let_in, engine, hosts=settings.hosts, headers=pages.SECURITY_HEADERS
    )
    return app


class _Application(FastAPI):
    """The application behind its guard, with a way of their own for batches.

    See `guard.Guard` and `ingest.directly`.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.state.guard(scope, receive, send)

    def openapi(self) -> dict[str, Any]:
        """The description of the interface, with the shape of a batch, which is no model."""
        made = super().openapi()
        made["components"]["schemas"].setdefault(batch_schema.NAME, batch_schema.SCHEMA)
        return made

    async def let_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request that the guard lets through."""
        if scope["type"] != "http" or (scope["path"], scope["method"]) != _INGEST:
            readers = to_thread.current_default_thread_limiter()
            if scope["type"] == "http" and readers.statistics().tasks_waiting >= _MAX_ASKED:
                text = f"{_MAX_ASKED} requests wait to be answered: ask again later"
                answer = problems.answer(
                    429, text, instance=scope["path"], headers=dict(problems.RETRY_LATER)
                )
                await answer(scope, receive, send)
                return
            await super().__call__(scope, receive, send)
            return
        await ingest.directly(
            scope,
            receive,
            send,
            state=self.state,
            headers=_RAW_SECURITY_HEADERS,
            otherwise=super().__call__,
        )


class _SecurityHeaders:
    """Adds what a page may load to every answer; a plain wrapper, as streams pass through it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in pages.SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, with_headers)
