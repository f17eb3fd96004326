"""How a message gets to a target: by apprise, to a webhook, an Alertmanager, a hook, or as OTLP."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

import urllib3

from rankscope.agent import wire
from rankscope.server import otlp
from rankscope.server.notifications import cordon, otlp_logs
from rankscope.server.notifications.message import Message, News, time_text
from rankscope.server.outbound_post import NotTaken, post

_OURS = {
    "webhook": "http",
    "webhooks": "https",
    "alertmanager": "http",
    "alertmanagers": "https",
    "otlp": "http",
    "otlps": "https",
    **cordon.WEBHOOKS,
}
_ALERTMANAGER_PATH = "/api/v2/alerts"
# An Alertmanager forgets what nobody says again by then.
FORGETS_AFTER_S = 600.0
_MOST_OF_ERROR = 300


class BadTarget(ValueError):
    """An address that is none, or of a service that nobody knows."""


class NotDelivered(Exception):
    """A target could not be told; why, for a person."""


def is_forgetful(url: str) -> bool:
    """Whether a target has to be told again and again what is open."""
    return urlsplit(url).scheme in ("alertmanager", "alertmanagers")


def check(url: str) -> None:
    """Makes sure that a target's address can be used; nothing is sent.

    Raises:
        BadTarget: it cannot; what is wrong, without the address's secrets.
    """
    scheme = _scheme(url)
    if scheme == cordon.COMMAND:
        try:
            cordon.check_name(cordon.command_name(url))
        except ValueError as error:
            raise BadTarget(f"{scheme}://...: {error}") from error
        return
    if scheme in _OURS:
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise BadTarget(f"{scheme}://...: {error}") from error
        if not host or port == 0:
            raise BadTarget(f"{scheme}://... names no host; write {scheme}://HOST:PORT/PATH")
        if scheme in ("otlp", "otlps") and not otlp.is_there():
            raise BadTarget(f"{scheme}://... {otlp.MISSING}")
        return
    _apprise(url)


def masked(url: str) -> str:
    """A target's address without what gives access to it."""
    if _scheme(url) == cordon.COMMAND:
        return url
    if _scheme(url) in _OURS:
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
        hidden = "/..." if parts.path.strip("/") or parts.query else ""
        return f"{parts.scheme}://{host}{hidden}"
    try:
        shown: str = _apprise(url).url(privacy=True)
    except BadTarget:
        return f"{_scheme(url)}://..."
    return shown.partition("?")[0]


def deliver(
    url: str,
    message: Message,
    *,
    now: float | None = None,
    commands: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Tells a target; takes some seconds at most.

    Args:
        now: seconds since 1970; for Alertmanagers, which are told how long to remember.
        commands: programs that this process may call for targets, by their names.

    Raises:
        NotDelivered: it could not be told.
        BadTarget: its address cannot be used, or not without a package that is missing.
    """
    scheme = _scheme(url)
    try:
        if scheme in ("webhook", "webhooks"):
            _post(url, "", message.json, {"Idempotency-Key": message.id})
        elif scheme in cordon.WEBHOOKS:
            _post(url, "", cordon.payload(message), {"Idempotency-Key": message.id})
        elif scheme == cordon.COMMAND:
            cordon.call(url, message, commands)
        elif scheme in ("alertmanager", "alertmanagers"):
            when = time.time() if now is None else now
            entries = [entry for news in message.news for entry in _labelled(message, news, when)]
            _post(url, _ALERTMANAGER_PATH, entries, {})
        elif scheme in ("otlp", "otlps"):
            if not otlp.is_there():
                raise BadTarget(f"{scheme}://... {otlp.MISSING}")
            address, who = _address(url)
            otlp.send_logs(address.rstrip("/"), otlp_logs.request(message), who)
        else:
            _by_apprise(url, message)
    except NotTaken as why:
        raise NotDelivered(str(why)) from why


def _scheme(url: str) -> str:
    scheme, colon, _ = url.partition("://")
    if not colon or not scheme:
        raise BadTarget(
            "a target is an address such as mailto://USER:PASSWORD@HOST, slack://..., "
            "webhook://HOST/PATH or alertmanager://HOST:9093; apprise's list has 100 more"
        )
    return scheme.lower()


def _post(url: str, path: str, body: Any, headers: Mapping[str, str]) -> None:
    """Posts JSON to a path below a target's address.

    Raises:
        NotTaken: it was not taken.
    """
    address, who = _address(url, path)
    given = {"Content-Type": "application/json", **headers, **who}
    post(address, json.dumps(body).encode(), given)


def _address(url: str, path: str = "") -> tuple[str, Mapping[str, str]]:
    """The address behind a target's, and the headers that say who posts."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    scheme = _OURS[parts.scheme.lower()]
    address = urlunsplit(SplitResult(scheme, host, parts.path.rstrip("/") + path, parts.query, ""))
    if parts.username is None:
        return address, {}
    who = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return address, urllib3.make_headers(basic_auth=who, user_agent="rankscope")


def _labelled(message: Message, news: News, now: float) -> list[dict[str, Any]]:
    """An alert as Alertmanager's API has it (version 2, `postableAlert`).

    There an alert is its labels: with another severity it is another one, and the one before ends.
    """
    alert = news.alert
    ends = (alert.resolved_at or now) if news.what == "resolved" else now + FORGETS_AFTER_S
    ended = {alert.severity: ends}
    if news.what == "raised":
        lower = wire.SEVERITIES[: wire.SEVERITIES.index(alert.severity)]
        ended |= dict.fromkeys(lower, now)
    return [
        {
            "labels": {
                "alertname": alert.kind,
                "rankscope_alert": alert.id,
                "run": message.run,
                "project": message.project,
                "severity": severity,
            },
            "annotations": {
                "summary": alert.title,
                "description": alert.cause,
                "remedy": alert.remedy,
                "ranks": ", ".join(map(str, alert.ranks)),
                "first_step": str(alert.first_step),
            },
            "startsAt": time_text(min(alert.opened_at, until)),
            "endsAt": time_text(until),
            "generatorURL": message.link,
        }
        for severity, until in ended.items()
    ]


# ------------------------------------------------------------------------------------------ apprise


class _Said(logging.Handler):
    """What apprise logs in one thread: it says in no other way what went wrong."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._thread = threading.get_ident()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread == self._thread:
            self.lines.append(record.getMessage())

    def __enter__(self) -> _Said:
        logging.getLogger("apprise").addHandler(self)
        return self

    def __exit__(self, *error: object) -> None:
        logging.getLogger("apprise").removeHandler(self)

    @property
    def text(self) -> str:
        return " ".join(self.lines)[:_MOST_OF_ERROR]


def _apprise(url: str) -> Any:
    try:
        import apprise
    except ImportError as error:
        raise BadTarget(
            f"{_scheme(url)}://... needs the package apprise: pip install 'rankscope[notify]'"
        ) from error
    with _Said():
        try:
            service = apprise.Apprise.instantiate(url, suppress_exceptions=False)
        except TypeError as error:
            raise BadTarget(f"{_scheme(url)}://...: {error}") from error
    if service is None:
        raise BadTarget(
            f"{_scheme(url)}://... is no address of a service that is known; apprise's "
            "documentation has those that are, and webhook://HOST/PATH takes JSON"
        )
    return service


def _by_apprise(url: str, message: Message) -> None:
    service = _apprise(url)
    import apprise

    kinds = {
        "resolved": apprise.NotifyType.SUCCESS,
        "info": apprise.NotifyType.INFO,
        "warning": apprise.NotifyType.WARNING,
        "critical": apprise.NotifyType.FAILURE,
    }
    with _Said() as said:
        # The service itself: `Apprise.notify` hands it to threads of its own.
        delivered = service.notify(
            title=message.title,
            body=message.text,
            notify_type=kinds[message.severity],
            body_format=apprise.NotifyFormat.TEXT,
        )
    if not delivered:
        raise NotDelivered(said.text or f"{_scheme(url)}://... did not take it")
