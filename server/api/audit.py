"""`GET /audit`: who did what, when, and from where."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from pydantic import BaseModel, Field

from rankscope.server.api.deps import Database, Page, next_cursor, paging
from rankscope.server.api.models import Items, time_of
from rankscope.server.storage.access import audit
from rankscope.server.storage.database.engine import reading

router = APIRouter(tags=["audit"])


class AuditEntry(BaseModel):
    """One administrative act."""

    id: str
    at: datetime
    act: audit.Act
    name: str = Field(
        description="of the token, or the system's user of a command; empty where none is asked for"
    )
    token: str = Field(description="id of the token; empty where there is none")
    origin: str = Field(description="address of the client, or name of the host of a command")
    subject: str = Field(
        description="what it was done to: id of a token, target, run, silence or alert; a project"
    )
    details: dict[str, Any]


@router.get("/audit")
def list_entries(
    engine: Database,
    page: Annotated[Page, Depends(paging(float, str))],
    act: audit.Act | None = None,
) -> Items[AuditEntry]:
    """Administrative acts, newest first; with tokens, for those of the scope `admin` alone."""
    with reading(engine) as connection:
        found, after = audit.entries(connection, limit=page.limit, after=page.after, act=act)
    return Items(items=[entry_model(one) for one in found], next_cursor=next_cursor(after))


def entry_model(one: audit.Entry) -> AuditEntry:
    """An entry as it is shown."""
    return AuditEntry(
        id=one.id,
        at=time_of(one.at),
        act=one.act,
        name=one.by.name,
        token=one.by.token,
        origin=one.by.origin,
        subject=one.subject,
        details=dict(one.details),
    )
