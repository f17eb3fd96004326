"""Errors as RFC 9457 problem details, whatever raised them."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from sqlalchemy.exc import DataError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from rankscope.server.health import Sparingly
from rankscope.server.storage.database.engine import is_unable, why

CONTENT_TYPE = "application/problem+json"

# Enough for all kinds there are.
_MAX_DETAIL = 2000
RETRY_LATER = {"Retry-After": "5"}
"""Headers of a 503, by which whoever asked knows when to ask again."""

# The shape of every error, for the OpenAPI document.
_SCHEMA: dict[str, Any] = {
    "type": "object",
    "description": "An error, as RFC 9457 describes it.",
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "instance": {"type": "string"},
        "errors": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"where": {"type": "string"}, "problem": {"type": "string"}},
                "required": ["where", "problem"],
            },
        },
    },
    "required": ["type", "title", "status", "detail", "instance"],
}
_CONTENT = {CONTENT_TYPE: {"schema": _SCHEMA}}
RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "What was asked for cannot be; it says why", "content": _CONTENT},
    "503": {"description": "Not now: ask again later", "content": _CONTENT},
}
"""The errors that every route may answer with, for the OpenAPI document."""

_logger = logging.getLogger(__name__)


class Problem(Exception):
    """An answer that is an error.

    Args:
        status: HTTP status.
        detail: what is wrong, where, and what to do.
        headers: of the answer.
        further: members beside the standard ones.
    """

    def __init__(
        self, status: int, detail: str, *, headers: dict[str, str] | None = None, **further: Any
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.headers = headers
        self.further = further


def answer(
    status: int, detail: str, *, instance: str, headers: dict[str, str] | None = None, **more: Any
) -> JSONResponse:
    """A problem as a response."""
    if len(detail) > _MAX_DETAIL:
        # What was sent is quoted, and may be long.
        detail = f"{detail[: _MAX_DETAIL // 2]} ... {detail[-_MAX_DETAIL // 2 :]}"
    # Nor need it be text that an answer can carry.
    detail = detail.encode("utf-8", "replace").decode()
    body = {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
        "instance": instance,
        **more,
    }
    return JSONResponse(body, status, media_type=CONTENT_TYPE, headers=headers)


def install(app: FastAPI) -> None:
    """Makes every error of the application a problem."""

    @app.exception_handler(Problem)
    async def problem(request: Request, error: Problem) -> Response:
        headers = RETRY_LATER if error.status == 503 else error.headers
        where = request.url.path
        return answer(error.status, error.detail, instance=where, headers=headers, **error.further)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        detail = str(error.detail)
        if error.status_code == 404 and detail == "Not Found":
            detail = f"there is nothing at {request.url.path}; /docs lists the routes"
        headers = dict(error.headers) if error.headers else None
        return answer(error.status_code, detail, instance=request.url.path, headers=headers)

    @app.exception_handler(RequestValidationError)
    async def validation(request: Request, error: RequestValidationError) -> Response:
        errors = [
            {"where": ".".join(str(part) for part in e["loc"]), "problem": e["msg"]}
            for e in error.errors()
        ]
        detail = "; ".join(f"{e['where']}: {e['problem']}" for e in errors)
        return answer(422, detail, instance=request.url.path, errors=errors)

    @app.exception_handler(DataError)
    async def impossible(request: Request, error: DataError) -> Response:
        # For example a NUL, which PostgreSQL's texts cannot hold: so there is nothing of that name.
        detail = f"the database knows no such value: {str(error.orig).splitlines()[0]}"
        return answer(422, detail, instance=request.url.path)

    failures = Sparingly()

    async def unable(request: Request, error: Exception) -> Response:
        if not is_unable(error):
            return await unexpected(request, error)
        failures.warn(_logger, f"{request.method} {request.url.path}: {why(error)}")
        detail = f"the database does not answer, or takes nothing: {why(error)}; send it again"
        return answer(503, detail, instance=request.url.path, headers=RETRY_LATER)

    for kind in (OperationalError, InterfaceError, PoolTimeout):
        app.add_exception_handler(kind, unable)

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> Response:
        _logger.debug("%s %s was broken off", request.method, request.url.path)
        return Response(status_code=400)  # nobody reads it

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        _logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return answer(
            500,
            "the server failed at this request; its log says why",
            instance=request.url.path,
        )
