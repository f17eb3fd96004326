"""`POST /ingest`: a batch of one rank."""

from __future__ import annotations

import gzip
import json
import time
import zlib
from typing import Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool

from rankscope.agent import wire
from rankscope.server.api.models import Accepted
from rankscope.server.api.problems import Problem
from rankscope.server.storage.engine import writing
from rankscope.server.storage.ingest import store_batch

router = APIRouter(tags=["ingest"])

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
    try:
        body = await _body(request)
        return await run_in_threadpool(_store, request, body)
    except Problem:
        request.app.state.counters.refused += 1
        raise


def _store(request: Request, body: bytes) -> Accepted:
    state = request.app.state
    try:
        batch = _decode(request.headers.get("content-type", ""), body)
        with writing(state.engine) as connection:
            answer = store_batch(connection, batch, received_at=time.time())
    except wire.WireError as error:
        raise Problem(
            422,
            f"batch not taken: {error}",
            errors=[{"where": error.where, "problem": error.problem}],
        ) from error
    state.counters.took(batch, answer)
    state.news.announce(batch.run, batch.points)
    return Accepted(
        accepted=answer.accepted,
        duplicate=answer.duplicate,
        dense_until=answer.dense_until,
        hello_wanted=answer.hello_wanted,
    )


def _decode(content_type: str, body: bytes) -> wire.Batch:
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


async def _body(request: Request) -> bytes:
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
        return body
    if encoding != "gzip":
        raise Problem(415, f"Content-Encoding {encoding!r} is not taken; send gzip or none")
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
