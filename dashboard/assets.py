"""What the browser loads besides the pages: plotly.js, our scripts and styles, figures."""

from __future__ import annotations

import gzip
from functools import cache
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from fastapi import APIRouter, HTTPException, Request, Response
from plotly.offline import get_plotlyjs, get_plotlyjs_version
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

router = APIRouter()

# Below this a figure fits into two packets; an open page asks for several every three seconds.
_WORTH_COMPRESSING = 2_048


def plotly_name() -> str:
    """File name of plotly.js; its version is part of it, so that it may be kept for ever."""
    return f"plotly-{get_plotlyjs_version()}.min.js"


@router.get("/static/plotly-{version}.min.js")
def plotly(request: Request, version: str) -> Response:
    """The library that draws, out of the installed plotly package."""
    if version != get_plotlyjs_version():
        raise HTTPException(404, f"This server draws with {plotly_name()}.")
    packed = "gzip" in request.headers.get("accept-encoding", "")
    headers = {
        "Cache-Control": "public, max-age=31536000, immutable",
        "Vary": "Accept-Encoding",
        "X-Content-Type-Options": "nosniff",
    }
    if packed:
        headers["Content-Encoding"] = "gzip"
    body = _plotly_packed() if packed else get_plotlyjs().encode()
    return Response(body, media_type="text/javascript; charset=utf-8", headers=headers)


@cache
def _plotly_packed() -> bytes:
    return gzip.compress(get_plotlyjs().encode(), compresslevel=6)


class _OwnFiles(StaticFiles):
    """Our files: asked for again every time (a 304 mostly), as their names carry no version."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        answer = await super().get_response(path, scope)
        answer.headers["Cache-Control"] = "no-cache"
        answer.headers["X-Content-Type-Options"] = "nosniff"
        return answer


def own_files(folder: Path) -> StaticFiles:
    """The application that serves our static files."""
    return _OwnFiles(directory=folder)


def help_pages(folder: Path) -> StaticFiles | None:
    """The application that serves the built documentation; None where it was not built."""
    if not (folder / "index.html").is_file():
        return None
    return _OwnFiles(directory=folder, html=True)


def figure_response(request: Request, figure: go.Figure) -> Response:
    """A figure as plotly JSON; arrays travel as base64 of their bytes, NaN included."""
    body: bytes = figure.to_json(validate=False).encode()
    headers: dict[str, Any] = {"Cache-Control": "no-store", "Vary": "Accept-Encoding"}
    if len(body) >= _WORTH_COMPRESSING and "gzip" in request.headers.get("accept-encoding", ""):
        body = gzip.compress(body, compresslevel=1)
        headers["Content-Encoding"] = "gzip"
    return Response(body, media_type="application/json", headers=headers)
