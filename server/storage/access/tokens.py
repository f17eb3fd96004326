"""Tokens: who may read, write and administer, and in which projects.

A secret is shown once, when it is made. The database has its SHA-256 alone, which is enough for 256
random bits: there is nothing to guess, as there is with a password.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, insert, select, update

from rankscope.server.storage import schema

SCOPES = ("read", "write", "admin")
_PREFIX = "rankscope_"


@dataclass(frozen=True, slots=True)
class Token:
    """What is known of a token; not its secret.

    Attributes:
        scopes: of `SCOPES`; `admin` may do what the others may.
        projects: to which it is bound, or None for all.
        created_at, expires_at, revoked_at: seconds since 1970; None: never.
    """

    id: str
    name: str
    scopes: tuple[str, ...]
    projects: frozenset[str] | None
    created_at: float
    expires_at: float | None = None
    revoked_at: float | None = None

    def holds(self, now: float) -> bool:
        """Whether it opens anything at a time, seconds since 1970."""
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)

    def may(self, scope: str) -> bool:
        """Whether it has a scope, or `admin`."""
        return scope in self.scopes or "admin" in self.scopes


def digest_of(secret: str) -> str:
    """What is stored of a secret: its SHA-256, as hexadecimal digits."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def create(
    connection: Connection,
    *,
    name: str,
    scopes: Sequence[str],
    projects: Sequence[str] | None,
    now: float,
    expires_at: float | None = None,
    secret: str | None = None,
) -> tuple[Token, str]:
    """A new token and its secret, which nobody can read again.

    Args:
        secret: one that was made elsewhere, as hard to guess; None: a new one.
    """
    token = Token(
        secrets.token_hex(4),
        name,
        tuple(s for s in SCOPES if s in scopes),
        None if projects is None else frozenset(projects),
        now,
        expires_at,
    )
    secret = secret or f"{_PREFIX}{secrets.token_urlsafe(32)}"
    connection.execute(
        insert(schema.access_token).values(
            id=token.id,
            name=name,
            digest=digest_of(secret),
            scopes=list(token.scopes),
            projects=None if token.projects is None else sorted(token.projects),
            created_at=now,
            expires_at=expires_at,
        )
    )
    return token, secret


def by_digest(connection: Connection) -> dict[str, Token]:
    """All tokens, also those that hold no more, by the digest of their secret; oldest first."""
    t = schema.access_token
    rows = connection.execute(select(t).order_by(t.c.created_at, t.c.id))
    return {row.digest: _token(row) for row in rows}


def revoke(connection: Connection, token_id: str, *, now: float) -> Token | None:
    """Ends a token for ever; None where there is none of that id."""
    t = schema.access_token
    connection.execute(
        update(t).where(t.c.id == token_id, t.c.revoked_at.is_(None)).values(revoked_at=now)
    )
    row = connection.execute(select(t).where(t.c.id == token_id)).first()
    return None if row is None else _token(row)


def _token(row: Any) -> Token:
    projects = None if row.projects is None else frozenset(row.projects)
    return Token(
        row.id,
        row.name,
        tuple(row.scopes),
        projects,
        row.created_at,
        row.expires_at,
        row.revoked_at,
    )
