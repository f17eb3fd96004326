"""Administrative acts.

Written by docs/client_models.py (`make docs`). Do not edit by hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal


@dataclass(frozen=True)
class AuditEntry:
    """One administrative act.

    Attributes:
        name: of the token, or the system's user of a command; empty where none is asked for.
        token: id of the token; empty where there is none.
        origin: address of the client, or name of the host of a command.
        subject: what it was done to: id of a token, target, run, silence or alert; a project.
    """

    id: str
    at: datetime
    act: Literal[
        "token.create",
        "token.revoke",
        "target.add",
        "target.remove",
        "run.delete",
        "baseline.mark",
        "baseline.unmark",
        "run.tags",
        "project.detectors",
        "silence.create",
        "silence.end",
        "alert.acknowledge",
        "alert.unacknowledge",
    ]
    name: str
    token: str
    origin: str
    subject: str
    details: dict[str, Any]
