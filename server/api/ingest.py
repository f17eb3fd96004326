"""`POST /ingest`: a batch of one rank."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from rankscope.agent import wire
from rankscope.server.api.models import Accepted
from rankscope.server.api.problems import Problem
from rankscope.server.storage.writer import Closed

router = APIRouter(tags=["ingest"])

# Bytes of a body that are decoded in no time.
_LARGE = 2**20

_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            wire.CONTENT_TYPE: {"schema": {"type": "string", "format": "binary"}},
            "application/json": {"schema": {"type": "object"}},
        },
    }
}


@router.post("/ingest", openapi_extra=_BODY)
async def ingest(request: Request) -> Accepted:
    """Takes a batch (msgpack or JSON, gzip if wanted); a batch sent twice is stored once."""
    return Accepted(**await _take(request))


class Direct:
    """The same as an ASGI application: what comes thousands of times a second has the short way.

    Between a route's function and its answer FastAPI spends more than all of storing a batch.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        answer = await _take(Request(scope, receive))
        await JSONResponse(answer)(scope, receive, send)


def direct(path: str) -> Route:
    """The route that goes before the router's own."""
    return Route(path, Direct(), methods=["POST"], include_in_schema=False)


async def _take(request: Request) -> dict[str, Any]:
    """Stores what a request brings; the fields of the answer."""
    state = request.app.state
    try:
        body, packed = await _body(request)
        kind = request.headers.get("content-type", "")
        batch: wire.Batch
        if packed or len(body) > _LARGE or "json" in kind:
            # What takes long must not hold up all others.
            batch = await run_in_threadpool(_decode, kind, body, packed)
        else:
            batch = _decode(kind, body, packed)
        answer: wire.Answer = await state.writer.store(batch)
    except wire.WireError as error:
        state.counters.refused += 1
        raise Problem(
            422,
            f"batch not taken: {error}",
            errors=[{"where": error.where, "problem": error.problem}],
        ) from error
    except Closed as error:
        raise Problem(503, "the server is about to end; send it again") from error
    except Problem:
        state.counters.refused += 1
        raise
    state.counters.took(batch, answer)
    state.news.announce(batch.run, batch.points)
    return {
        "accepted": answer.accepted,
        "duplicate": answer.duplicate,
        "dense_until": answer.dense_until,
        "hello_wanted": answer.hello_wanted,
    }


def _decode(content_type: str, body: bytes, packed: bool) -> wire.Batch:
    if packed:
        body = _unpack(body)
    kind = content_type.partition(";")[0].strip().lower()
    if kind in (wire.CONTENT_TYPE, "application/x-msgpack", "application/octet-stream"):
        return wire.decode(body)
    if kind == "application/json":
        try:
            plain: Any = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise wire.WireError("body", f"is not JSON: {error}") from error
        return wire.from_json(plain)
    raise Problem(
        415, f"Content-Type {kind or '(none)'!r} is not taken; send {wire.CONTENT_TYPE} or JSON"
    )


async def _body(request: Request) -> tuple[bytes, bool]:
    """The body as it came, and whether it is gzip."""
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > wire.MAX_BODY_BYTES:
            raise _too_large()
        parts.append(part)
    body = b"".join(parts)
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding in ("", "identity"):
        return body, False
    if encoding != "gzip":
        raise Problem(415, f"Content-Encoding {encoding!r} is not taken; send gzip or none")
    return body, True


def _unpack(body: bytes) -> bytes:
    try:
        # Not `gzip.decompress`: a small body must not be able to fill the memory.
        unpacker = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
        plain = unpacker.decompress(body, wire.MAX_BODY_BYTES + 1)
    except (zlib.error, gzip.BadGzipFile) as error:
        raise Problem(422, f"body: is not gzip: {error}") from error
    if len(plain) > wire.MAX_BODY_BYTES:
        raise _too_large()
    return plain


def _too_large() -> Problem:
    return Problem(
        413,
        f"the batch is larger than {wire.MAX_BODY_BYTES} bytes: send it in parts",
        limit_bytes=wire.MAX_BODY_BYTES,
    )
