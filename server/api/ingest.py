"""`POST /ingest`: a batch of one rank."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import zlib
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from anyio import to_thread
from fastapi import APIRouter, Request
from sqlalchemy import Engine
from starlette.datastructures import State
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rankscope.agent import wire
from rankscope.server.api import batch_schema, threads
from rankscope.server.api.admission import Admission, Busy
from rankscope.server.api.guard import TOKEN
from rankscope.server.api.models import Accepted
from rankscope.server.api.problems import Problem
from rankscope.server.storage.access.tokens import Token
from rankscope.server.storage.access.visibility import limited_to
from rankscope.server.storage.database.engine import reading
from rankscope.server.storage.ingest.writer import Closed
from rankscope.server.storage.reading import runs

router = APIRouter(tags=["ingest"])

# Where an error of the fast path lies for the long one.
_FAILED = "rankscope.failed"
# The project of a batch that names none.
_NO_PROJECT = "default"
# Bytes of a body that are decoded in no time.
_LARGE = 2**20
# Of larger ones, and of packed ones, this many at a time; and tokens' projects are checked so.
_DECODED_AT_ONCE = 2
# Of a packed one, which name the run.
_FIRST_BYTES = 4096
# A body takes no longer than this from its head on: ten times what the largest one takes by 10
# Mbit/s. What an agent does not get rid of within a second it sends again.
_BODY_SECONDS = 30.0

_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            wire.CONTENT_TYPE: {"schema": {"type": "string", "format": "binary"}},
            "application/json": {"schema": {"$ref": f"#/components/schemas/{batch_schema.NAME}"}},
        },
    }
}


@router.post("/ingest", openapi_extra=_BODY)
async def ingest(request: Request) -> Accepted:
    """Takes a batch (msgpack or JSON, gzip if wanted); a batch sent twice is stored once."""
    failed: Exception | None = request.scope.get(_FAILED)
    if failed is not None:
        raise failed
    return Accepted(**await _take(request.scope, request.receive, request.app.state))


async def directly(
    scope: Scope,
    receive: Receive,
    send: Send,
    *,
    state: State,
    headers: Sequence[tuple[bytes, bytes]],
    otherwise: ASGIApp,
) -> None:
    """The same on the fast path, for what comes thousands of times a second.

    Between a request and a route's function the application spends more than it takes to store a
    batch. What goes wrong here goes wrong there: `otherwise` makes the answer of it.

    Args:
        headers: those that every answer has.
        otherwise: the application, with the route above.
    """
    raised = _Raised()
    with raised:
        answer = await _take(scope, receive, state)
    if raised.error is not None:
        scope[_FAILED] = raised.error
        await otherwise(scope, receive, send)
        return
    body = json.dumps(answer, separators=(",", ":")).encode()
    length = (b"content-length", str(len(body)).encode())
    given = [(b"content-type", b"application/json"), length, *headers]
    await send({"type": "http.response.start", "status": 200, "headers": given})
    await send({"type": "http.response.body", "body": body})


class _Raised:
    """Keeps what a block raises, for the route to raise it once more."""

    error: Exception | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if isinstance(error, Exception):
            self.error = error
        return isinstance(error, Exception)


async def _take(scope: Scope, receive: Receive, state: State) -> dict[str, Any]:
    """Stores what a request brings; the fields of the answer."""
    token: Token | None = scope.get(TOKEN)
    # Whoever brings a token may do so from many addresses, as the nodes of a job do.
    sender = (scope.get("client") or ("",))[0] if token is None else f"token {token.id}"
    admission: Admission = state.admission
    body = _Body(receive, admission, sender)
    try:
        batch, answer = await _admitted(scope, body, state, token)
    except wire.WireError as error:
        state.counters.refused += 1
        raise Problem(
            422,
            f"batch not taken: {error}",
            errors=[{"where": error.where, "problem": error.problem}],
        ) from error
    except Busy as error:
        after = {"Retry-After": str(error.retry_after)}
        text = f"{error}: send it again in {error.retry_after} s"
        raise Problem(429, text, headers=after) from error
    except Closed as error:
        raise Problem(503, "the server is about to end; send it again") from error
    except Problem:
        state.counters.refused += 1
        raise
    finally:
        body.let_go()
    state.counters.took(batch, answer)
    state.run_events.announce(batch.run, batch.points)
    return {
        "accepted": answer.accepted,
        "duplicate": answer.duplicate,
        "dense_until": answer.dense_until,
        "hello_wanted": answer.hello_wanted,
    }


async def _admitted(
    scope: Scope, body: _Body, state: State, token: Token | None
) -> tuple[wire.Batch, wire.Answer]:
    """Stores what a request brings once it is its turn."""
    kind, encoding = "", "identity"
    for name, value in scope["headers"]:
        if name == b"content-type":
            kind = value.decode("latin-1")
        elif name == b"content-encoding":
            encoding = value.decode("latin-1")
    packed = await body.read(encoding)
    # Before it is decoded, which is most of the work of this thread.
    named = body.run(packed) if kind.startswith(wire.CONTENT_TYPE) else None
    admission: Admission = state.admission
    decoding = threads.own(state, "decoding", _DECODED_AT_ONCE)
    # Those of new runs are one: else who makes many runs would get as many parts.
    flow = named if named is not None and state.writer.knows(named) else ""
    await admission.enter(body.sender, flow)
    try:
        if packed or len(body.data) > _LARGE or "json" in kind:
            # What takes long must not hold up all others.
            # A few at a time: each may take a hundred megabytes while it is decoded.
            batch = await to_thread.run_sync(_decode, kind, body.data, packed, limiter=decoding)
        else:
            batch = _decode(kind, body.data, packed)
        if named is not None and batch.run != named:
            raise wire.WireError("run", "is given twice")
        if token is not None:
            # Not by the threads that readers have.
            await to_thread.run_sync(_check_project, state.engine, batch, token, limiter=decoding)
        answer: wire.Answer = await state.writer.store(batch)
        return batch, answer
    finally:
        admission.leave(body.sender, flow)


class _Body:
    """The body of a request, for which there is no more room than others leave.

    Attributes:
        sender: whose it is.
        data: what was received.
    """

    def __init__(self, receive: Receive, admission: Admission, sender: str) -> None:
        self.sender = sender
        self.data = b""
        self._receive = receive
        self._admission = admission
        self._held = 0

    async def read(self, encoding: str) -> bool:
        """Receives it; whether it is gzip.

        Raises:
            Busy: there is no room for it.
            Problem: it is too large, or too slow.
        """
        parts = []
        more = True
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                while more:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    parts.append(self._part(message))
                    more = message.get("more_body", False)
        except TimeoutError as error:
            text = f"the batch was not there within {_BODY_SECONDS:.0f} s; send it again"
            raise Problem(408, text, headers={"Connection": "close"}) from error
        self.data = parts[0] if len(parts) == 1 else b"".join(parts)
        encoding = encoding.strip().lower()
        if encoding not in ("", "identity", "gzip"):
            raise Problem(415, f"Content-Encoding {encoding!r} is not taken; send gzip or none")
        return encoding == "gzip"

    def run(self, packed: bool) -> str | None:
        """The run that it names in its first bytes."""
        if not packed:
            return wire.run_of(self.data)
        with contextlib.suppress(zlib.error):
            return wire.run_of(_unpacker().decompress(self.data, _FIRST_BYTES))
        return None

    def let_go(self) -> None:
        """Nothing of it is needed any more."""
        self._admission.let_go(self.sender, self._held)
        self._held = 0

    def _part(self, message: Message) -> bytes:
        part: bytes = message.get("body", b"")
        if self._held + len(part) > wire.MAX_BODY_BYTES:
            raise _too_large()
        self._hold(len(part))
        return part

    def _hold(self, size: int) -> None:
        self._admission.hold(self.sender, size)
        self._held += size


def _check_project(engine: Engine, batch: wire.Batch, token: Token) -> None:
    """A run is written to as one of its own project, by whoever may write there.

    Else whoever takes a name first would get what others send under it. A batch that names no
    project is for the run's.

    Raises:
        Problem: the run is another project's, or the token is bound to others.
    """
    with reading(engine) as connection, limited_to(None):
        row = runs.find_run(connection, batch.run)
    project = batch.project if row is None else row.project
    named = batch.project in (project, _NO_PROJECT)
    if named and (token.projects is None or project in token.projects):
        return
    # The same text whether the run is there or not: not everybody is to know.
    bound = (
        "" if token.projects is None else f"; it is bound to {', '.join(sorted(token.projects))}"
    )
    raise Problem(
        403,
        f"token {token.name!r} may not write to a run {batch.run!r} of project {batch.project!r}: "
        f"a run has one project, and the name may be another's{bound}",
    )


def _decode(content_type: str, body: bytes, packed: bool) -> wire.Batch:
    if packed:
        body = _unpack(body)
    kind = content_type.partition(";")[0].strip().lower()
    if kind in (wire.CONTENT_TYPE, "application/x-msgpack", "application/octet-stream"):
        return wire.decode(body)
    if kind == "application/json":
        return wire.decode_json(body)
    raise Problem(
        415, f"Content-Type {kind or '(none)'!r} is not taken; send {wire.CONTENT_TYPE} or JSON"
    )


def _unpacker() -> Any:
    return zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)


def _unpack(body: bytes) -> bytes:
    try:
        # Not `gzip.decompress`: a small body must not be able to fill the memory.
        unpacker = _unpacker()
        plain: bytes = unpacker.decompress(body, wire.MAX_BODY_BYTES + 1)
    except (zlib.error, gzip.BadGzipFile) as error:
        raise Problem(422, f"body: is not gzip: {error}") from error
    if len(plain) > wire.MAX_BODY_BYTES:
        raise _too_large()
    # Only at its end has the check sum been examined.
    if not unpacker.eof or unpacker.unused_data:
        what = "goes on behind its end" if unpacker.eof else "breaks off before its end"
        raise Problem(422, f"body: the gzip {what}; send the whole batch again")
    return plain


def _too_large() -> Problem:
    return Problem(
        413,
        f"the batch is larger than {wire.MAX_BODY_BYTES} bytes: send it in parts",
        limit_bytes=wire.MAX_BODY_BYTES,
    )
