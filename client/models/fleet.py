"""What is open in all runs.

Written by docs/client_models.py (`make docs`). Do not edit by hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True)
class Recurring:
    """Alerts of one kind, or that name ranks of one host.

    Attributes:
        name: kind, or host.
        open: alerts that are open.
        alerts: alerts of the days asked for, and older open ones.
        runs: runs that they are of.
        newest_runs: ids of up to 10 of them, newest alert first.
        others: hosts of a kind, kinds of a host.
        severity: the gravest.
        newest_at: when the newest opened.
    """

    name: str
    open: int
    alerts: int
    runs: int
    newest_runs: list[str]
    others: list[str]
    severity: str
    newest_at: datetime


@dataclass(frozen=True)
class Fleet:
    """What is open, and what comes again and again."""

    days: float
    kinds: list[Recurring]
    hosts: list[Recurring]
