"""What is said about the alerts of a run: as text for people, and as JSON for programs."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from rankscope.agent import wire
from rankscope.server.alerts import onset
from rankscope.server.alerts.fields import alert_fields
from rankscope.server.detectors.mechanisms.wording import count, listing, ranks
from rankscope.server.window import Alert

# Of one message, after which there is a number: what is read on a telephone.
_MOST = 10
_PARAGRAPH = 600
# Version of the JSON.
_VERSION = 1


@dataclass(frozen=True, slots=True)
class News:
    """An alert, and why it is told.

    Attributes:
        what: `opened`, `raised` (a higher severity), `reopened`, `resolved` or `still` (told again
            to who forgets).
    """

    alert: Alert
    what: str


@dataclass(frozen=True, slots=True)
class Message:
    """What one target is told of one run at one time.

    Attributes:
        link: address of the run's page.
        news: at least one.
        hosts: those that it accuses, each with its suspect ranks; for hooks alone (`cordon.py`).
        is_test: whether nothing has happened.
    """

    run: str
    project: str
    link: str
    news: tuple[News, ...]
    hosts: Mapping[str, Sequence[int]] = field(default_factory=dict)
    is_test: bool = False

    @property
    def id(self) -> str:
        """The same for the same news: who gets them twice after a crash can tell."""
        parts = [self.run, *(f"{n.alert.id} {n.what} {n.alert.severity}" for n in self.news)]
        return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:16]

    @property
    def severity(self) -> str:
        """The highest of what is not resolved; `resolved` where all is."""
        left = [n.alert.severity for n in self.news if n.what != "resolved"]
        return max(left, key=wire.SEVERITIES.index) if left else "resolved"

    @property
    def title(self) -> str:
        """One line."""
        severity, news = self.severity, self.news
        if len(news) == 1:
            return f"{severity.upper()} in {self.run}: {news[0].alert.title}"
        over = sum(n.what == "resolved" for n in news)
        if over == len(news):
            return f"RESOLVED in {self.run}: {count(over, 'alert')}"
        also = f", {over} resolved" if over else ""
        return f"{severity.upper()} in {self.run}: {count(len(news) - over, 'alert')}{also}"

    @property
    def text(self) -> str:
        """What is wrong, since when, who, why, and what to do; plain."""
        parts = [_paragraph(news) for news in self.news[:_MOST]]
        if len(self.news) > _MOST:
            parts.append(f"And {count(len(self.news) - _MOST, 'further alert')}.")
        return "\n\n".join([*parts, f"Project {self.project}. {self.link}"])

    @property
    def json(self) -> dict[str, Any]:
        """The same for a program; docs/notifications.md has the fields."""
        return {
            "version": _VERSION,
            "id": self.id,
            "run": self.run,
            "project": self.project,
            "url": self.link,
            "severity": self.severity,
            "title": self.title,
            "alerts": [_fields(news) for news in self.news],
        }


def link_to(base: str, run: str) -> str:
    """Address of a run's page."""
    return f"{base.rstrip('/')}/runs/{quote(run, safe='')}"


def since(alert: Alert) -> str:
    """`step 120`, `a step from 100 to 120`."""
    earliest, latest = onset.since(alert)
    return f"step {latest}" if earliest == latest else f"a step from {earliest} to {latest}"


def _paragraph(news: News) -> str:
    alert = news.alert
    who = f", {ranks(alert.ranks)}" if alert.ranks else ""
    head = alert.severity.upper() if news.what != "resolved" else "RESOLVED"
    said = {"raised": " (raised)", "reopened": " (again)"}.get(news.what, "")
    lines = [
        f"{head}{said} {alert.kind}: {alert.title}",
        f"Since {since(alert)}{who}."
        + (f" Tensors: {listing(alert.tensors, most=4)}." if alert.tensors else ""),
    ]
    if news.what != "resolved":
        lines += [f"Cause: {_short(alert.cause)}", f"What to do: {_short(alert.remedy)}"]
    return "\n".join(lines)


def _short(text: str) -> str:
    return text if len(text) <= _PARAGRAPH else f"{text[: _PARAGRAPH - 1].rstrip()}…"


def _fields(news: News) -> dict[str, Any]:
    """The alert's members by REST, but for what takes much room, and why it is told."""
    fields = alert_fields(news.alert)
    for left_out in ("run", "evidence", "parent", "consequences", "start"):
        del fields[left_out]
    for name in ("opened_at", "resolved_at"):
        if fields[name] is not None:
            fields[name] = time_text(fields[name])
    return {"what": news.what, **fields}


def time_text(seconds: float) -> str:
    """A time as RFC 3339 has it, UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def example(link: str, now: float) -> Message:
    """A message that says that messages arrive."""
    alert = Alert(
        id="0" * 16,
        run="test",
        kind="test",
        key="test",
        severity="info",
        state="open",
        title="This is a test: nothing is wrong",
        first_step=0,
        seen_step=0,
        last_step=0,
        opened_at=now,
        resolved_at=None,
        ranks=(),
        tensors=(),
        stage=None,
        clear_after=None,
        cause="Somebody asked whether what Rankscope finds arrives here.",
        remedy="Nothing.",
        evidence={},
        parent=None,
        consequences=(),
    )
    return Message("test", "test", link, (News(alert, "opened"),), is_test=True)
