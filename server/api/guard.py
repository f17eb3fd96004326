"""Who gets in: the guard before every route, page and batch.

As long as no token has ever been made, everybody who reaches the port may do everything: on one's
own machine nothing else is wanted. From the first token on every request needs one, in the header
`Authorization: Bearer ...` or, from a browser, in the cookie that `/login` sets. Each route needs
one scope:

- `write`: to post batches, which is what agents do;
- `read`: whatever asks with GET;
- `admin`: whatever else changes something, as silences and acknowledgements do.

A token that is bound to projects sees their runs, and no others; to it they are not there.

With or without tokens a page of another site must not act in the name of whoever has it open. A
request that changes something and comes from a browser must come from a page of this server; and a
server that listens on its own machine alone answers only to that machine's names, or a name that
leads here by a trick (DNS rebinding) would make any page a page of this server.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from anyio import CapacityLimiter, to_thread
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError
from starlette.datastructures import Headers
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from rankscope.server.api import problems
from rankscope.server.storage.access import tokens
from rankscope.server.storage.access.visibility import limited_to
from rankscope.server.storage.database.engine import reading

COOKIE = "rankscope_token"
"""Where a browser keeps the secret that it has logged in with."""

TOKEN = "rankscope.token"
"""Where a request's scope has its `Token`; missing where none is asked for."""

# How long a token that was made or revoked may go unnoticed.
_FRESH_SECONDS = 5.0
# How soon the database is asked again for a secret that is not known: it may be new.
_UNKNOWN_SECONDS = 1.0
_INGEST = "/api/v1/ingest"
# What says nothing of any run.
_OPEN = ("/healthz", "/readyz", "/openapi.json", "/docs", "/login", "/favicon.ico")
_OPEN_BELOW = ("/static/",)
# What speaks of all runs at once.
_OF_ALL = ("/metrics", "/api/v1/audit")
# What is only for those who administer, though it changes nothing.
_FOR_ADMINISTRATORS = ("/api/v1/audit",)
_HARMLESS = ("GET", "HEAD", "OPTIONS")


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not let in."""

    status: int
    why: str


class Guard:
    """Lets requests through to an application, or refuses them.

    Args:
        hosts: further names that requests may call the server by; None: any, which is right where
            others than its own machine are to reach it.
        headers: those that every answer has.
    """

    def __init__(
        self,
        app: ASGIApp,
        engine: Engine,
        *,
        hosts: tuple[str, ...] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._app = app
        self._engine = engine
        self._hosts = hosts
        self._headers = dict(headers or {})
        self._tokens: Mapping[str, tokens.Token] | None = None
        self._read_at = -float("inf")
        self._thread: CapacityLimiter | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, by the application or by a refusal."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            known = await self._known()
        except SQLAlchemyError as error:
            if _path(scope) not in _OPEN:
                why = f"the database does not answer: {type(error).__name__}; send it again"
                await self._refuse(Refusal(503, why), scope, receive, send)
                return
            known = {}
        headers = Headers(scope=scope)
        refusal = _of_another_site(scope, headers) or self._of_another_name(headers, known)
        token = None
        if refusal is None and known:
            token = await self._find(_secret(headers))
            refusal = _not_allowed(scope, headers, token)
        if refusal is not None:
            await self._refuse(refusal, scope, receive, send)
            return
        if token is not None:
            scope[TOKEN] = token
        projects = None if token is None else token.projects
        with nullcontext() if projects is None else limited_to(projects):
            await self._app(scope, receive, send)

    async def _refuse(self, refusal: Refusal, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        path = _path(scope)
        asks_for_page = "text/html" in headers.get("accept", "") and not path.startswith("/api/")
        answer: Response
        if refusal.status == 401 and asks_for_page and scope["method"] in _HARMLESS:
            query = scope["query_string"].decode("latin-1")
            there = quote(f"{path}?{query}" if query else path, safe="")
            root = scope.get("root_path", "")
            answer = RedirectResponse(f"{root}/login?next={there}", 303, self._headers)
        else:
            challenge = {"WWW-Authenticate": "Bearer"} if refusal.status == 401 else {}
            if refusal.status == 503:
                challenge = problems.RETRY_LATER
            answer = problems.answer(
                refusal.status, refusal.why, instance=path, headers=challenge | self._headers
            )
        await answer(scope, receive, send)

    async def token_of(self, secret: str) -> tokens.Token | None:
        """The token of a secret, if it holds.

        Raises:
            SQLAlchemyError: the database does not answer.
        """
        return await self._find(secret)

    async def holds(self, token: tokens.Token) -> bool:
        """Whether a token that was let in earlier still opens anything.

        Raises:
            SQLAlchemyError: the database does not answer.
        """
        now = time.time()
        return any(t.id == token.id and t.holds(now) for t in (await self._known()).values())

    async def _find(self, secret: str) -> tokens.Token | None:
        found = _holding(secret, await self._known())
        if found is None and secret:
            found = _holding(secret, await self._known(_UNKNOWN_SECONDS))
        return found

    async def _known(self, fresh: float | None = None) -> Mapping[str, tokens.Token]:
        """All tokens by the digest of their secret.

        Args:
            fresh: as they were this many seconds ago at most; None: `_FRESH_SECONDS`.
        """
        now = time.monotonic()
        fresh = _FRESH_SECONDS if fresh is None else fresh
        if self._tokens is None or now - self._read_at >= fresh:
            self._read_at = now  # one asks; the others go on with what held a moment ago
            try:
                # Not by the threads that readers have: whoever posts would wait for them.
                if self._thread is None:
                    self._thread = CapacityLimiter(1)
                self._tokens = await to_thread.run_sync(self._read, limiter=self._thread)
            except SQLAlchemyError:
                if self._tokens is None:
                    raise
        return self._tokens

    def _read(self) -> Mapping[str, tokens.Token]:
        with reading(self._engine) as connection:
            return tokens.by_digest(connection)

    def _of_another_name(
        self, headers: Headers, known: Mapping[str, tokens.Token]
    ) -> Refusal | None:
        # Whoever has to bring a token does not bring it to another site's name.
        if self._hosts is None or known or (host := headers.get("host")) is None:
            return None
        name = _name_of(host)
        if name == "localhost" or name.endswith(".localhost") or _is_address(name):
            return None
        if name in self._hosts:
            return None
        return Refusal(
            421,
            f"this server listens on its own machine alone and is not known as {name!r}. If "
            f"that is the name of a proxy before it, start it with --allowed-host {name}",
        )


def _path(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "")) or "/"


def _name_of(host: str) -> str:
    """Of a Host header, without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".").lower()


def _is_address(name: str) -> bool:
    """Whether it is an address, which no trick leads elsewhere."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _of_another_site(scope: Scope, headers: Headers) -> Refusal | None:
    """A change that a browser asks for on behalf of another site's page."""
    if scope["method"] in _HARMLESS:
        return None
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    if site is not None:
        # What the browser itself says holds behind a proxy that changes the name of the host, too.
        fine = site in ("same-origin", "none")
    else:
        # Who names no origin is no browser: they do with whatever changes something.
        fine = origin is None or _site_of(origin) == headers.get("host")
    if fine:
        return None
    return Refusal(403, f"a page of {origin or 'another site'} may not change anything here")


def _site_of(origin: str) -> str | None:
    """Host and port of an origin; None where it is malformed."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def _secret(headers: Headers) -> str:
    """What a request brings; empty where it brings none."""
    scheme, _, secret = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        secret = _cookie(headers)
    return secret


def _holding(secret: str, known: Mapping[str, tokens.Token]) -> tokens.Token | None:
    # Found by a digest: how long that takes says nothing of the secret.
    token = known.get(tokens.digest_of(secret.strip())) if secret else None
    return token if token is not None and token.holds(time.time()) else None


def _cookie(headers: Headers) -> str:
    # By hand: `SimpleCookie` gives up at the first odd cookie, and others on this host set theirs.
    for part in headers.get("cookie", "").split(";"):
        name, _, value = part.strip().partition("=")
        if name == COOKIE:
            return value.strip('"')
    return ""


def needed(method: str, path: str) -> str | None:
    """The scope that a request needs; None for what everybody may ask."""
    if method in _HARMLESS:
        is_open = path in _OPEN or path.startswith(_OPEN_BELOW)
        if path in _FOR_ADMINISTRATORS:
            return "admin"
        return None if is_open else "read"
    if path in ("/login", "/logout"):
        return None
    return "write" if path == _INGEST else "admin"


def _not_allowed(scope: Scope, headers: Headers, token: tokens.Token | None) -> Refusal | None:
    method, path = scope["method"], _path(scope)
    scope_needed = needed(method, path)
    if scope_needed is None:
        return None
    if token is None:
        brought = "authorization" in headers or _cookie(headers)
        return Refusal(
            401,
            "the token is not known here, or holds no more: `rankscope token list` on the server "
            "shows which there are"
            if brought
            else "this server asks for a token: set RANKSCOPE_TOKEN, or log in at /login; "
            "`rankscope token create` on the server makes one",
        )
    if not token.may(scope_needed):
        has = " and ".join(token.scopes)
        return Refusal(403, f"token {token.name!r} may {has}; {method} {path} needs {scope_needed}")
    if token.projects is not None and path in _OF_ALL:
        return Refusal(403, f"{path} speaks of all projects; token {token.name!r} is bound to some")
    return None
