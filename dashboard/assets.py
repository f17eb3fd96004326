"""What the browser loads besides the pages: plotly.js, our scripts and styles, figures."""

from __future__ import annotations

import gzip
import re
import stat
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, HTTPException, Request, Response
from starlette.datastructures import Headers
from starlette.responses import FileResponse
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from rankscope.dashboard.report import PLOTLY

router = APIRouter()

_STATIC = Path(__file__).parent / "static"
_IMPORTED = re.compile(r'^import [^"]*from "\./([\w.]+)";$', re.MULTILINE)
_TEXTS = ("text/", "image/svg")

# Below this a figure fits into two packets; an open page asks for several every three seconds.
_WORTH_COMPRESSING = 2_048
# Figures are small and many, and cross the network once each: zlib's own middle way.
_LEVEL = 6


@cache
def plotly_js() -> bytes:
    """The library that draws."""
    return PLOTLY.read_bytes()


def plotly_name() -> str:
    """File name of plotly.js; its version is part of it, so that it may be kept for ever."""
    return f"plotly-{_plotly_version()}.min.js"


@cache
def _plotly_version() -> str:
    found = re.search(rb"plotly\.js \(cartesian - minified\) v([\d.]+)", plotly_js()[:200])
    assert found is not None, "the bundle does not name its version"
    return found[1].decode()


@router.get("/static/plotly-{version}.min.js")
async def plotly(request: Request, version: str) -> Response:
    """The library that draws; from memory, so that it need not wait for queries."""
    if version != _plotly_version():
        raise HTTPException(404, f"This server draws with {plotly_name()}.")
    packed = "gzip" in request.headers.get("accept-encoding", "")
    headers = {
        "Cache-Control": "public, max-age=31536000, immutable",
        "Vary": "Accept-Encoding",
        "X-Content-Type-Options": "nosniff",
    }
    if packed:
        headers["Content-Encoding"] = "gzip"
    if packed and not _plotly_packed.cache_info().currsize:
        # A tenth of a second, in which the loop would answer nobody; in a thread of its own.
        await to_thread.run_sync(_plotly_packed, limiter=CapacityLimiter(1))
    body = _plotly_packed() if packed else plotly_js()
    return Response(body, media_type="text/javascript; charset=utf-8", headers=headers)


@cache
def _plotly_packed() -> bytes:
    # Once for as long as the server lives.
    return gzip.compress(plotly_js(), compresslevel=9)


@cache
def modules(script: str) -> tuple[str, ...]:
    """A script of ours and all that it imports, itself first: names in the folder `static`.

    The browser would learn of each only when it has read the one before.
    """
    found = [script]
    for name in found:
        text = (_STATIC / name).read_text(encoding="utf-8")
        found += [other for other in _IMPORTED.findall(text) if other not in found]
    return tuple(found)


class _OwnFiles(StaticFiles):
    """Our files: asked for again every time (a 304 mostly), as their names carry no version."""

    def __init__(self, *, directory: Path, html: bool = False) -> None:
        super().__init__(directory=directory, html=html)
        # That the folder is there has been looked at by now; the first request would do it again,
        # in one of the threads for queries.
        self.config_checked = True

    async def get_response(self, path: str, scope: Scope) -> Response:
        answer = self._at_once(path, scope) or await super().get_response(path, scope)
        if isinstance(answer, FileResponse) and _is_packed(scope, answer):
            body = _packed(str(answer.path), answer.headers["etag"])
            # Length and encoding are of what is sent, the rest of the file.
            kept = ("etag", "last-modified", "content-type")
            headers = {name: answer.headers[name] for name in kept}
            headers["Content-Encoding"] = "gzip"
            answer = Response(body, headers=headers)
        answer.headers["Vary"] = "Accept-Encoding"
        answer.headers["Cache-Control"] = "no-cache"
        answer.headers["X-Content-Type-Options"] = "nosniff"
        return answer

    def _at_once(self, path: str, scope: Scope) -> Response | None:
        """A file that is there, looked up without a thread; None for all else.

        The threads are those that answer queries, and few: a page's scripts would wait behind what
        its first one asks for.
        """
        if scope["method"] not in ("GET", "HEAD"):
            return None
        try:
            full_path, found = self.lookup_path(path)
        except (OSError, ValueError):
            return None
        if found is None or not stat.S_ISREG(found.st_mode):
            return None
        return self.file_response(full_path, found, scope)


def _is_packed(scope: Scope, answer: FileResponse) -> bool:
    """Whether a file goes out compressed: a whole text, to who can unpack it."""
    text = answer.headers["content-type"].startswith(_TEXTS)
    accepted = Headers(scope=scope).get("accept-encoding", "")
    return answer.status_code == 200 and text and "gzip" in accepted and scope["method"] == "GET"


@lru_cache(maxsize=256)
def _packed(path: str, etag: str) -> bytes:
    # Once for each version of a file; the tag changes with it.
    return gzip.compress(Path(path).read_bytes(), compresslevel=9)


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
        body = gzip.compress(body, compresslevel=_LEVEL)
        headers["Content-Encoding"] = "gzip"
    return Response(body, media_type="application/json", headers=headers)
