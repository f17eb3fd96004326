"""Alerts as log records of OpenTelemetry: an event when one opens, and one when it is over."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rankscope.server import otlp
from rankscope.server.notifications.message import Message, News

if TYPE_CHECKING:
    from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
    from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord

# `SeverityNumber`: INFO, WARN, and ERROR2, which the data model gives for syslog's "critical".
_GRADES = {"info": 9, "warning": 13, "critical": 18}
_OVER = 9


def request(message: Message) -> ExportLogsServiceRequest:
    """The log records of a message."""
    from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
    from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
    from opentelemetry.proto.logs.v1.logs_pb2 import ResourceLogs, ScopeLogs

    records = [_record(message, news) for news in message.news]
    scope = ScopeLogs(scope=InstrumentationScope(name=otlp.SCOPE), log_records=records)
    logs = ResourceLogs(resource=otlp.resource(), scope_logs=[scope])
    return ExportLogsServiceRequest(resource_logs=[logs])


def _record(message: Message, news: News) -> LogRecord:
    from opentelemetry.proto.common.v1.common_pb2 import AnyValue
    from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord

    alert, over = news.alert, news.what == "resolved"
    now = time.time()
    happened = {"opened": alert.opened_at, "resolved": alert.resolved_at}.get(news.what) or now
    about: dict[str, otlp.Value | None] = {
        "rankscope.run": message.run,
        "rankscope.project": message.project,
        "rankscope.alert.id": alert.id,
        "rankscope.alert.kind": alert.kind,
        "rankscope.alert.severity": alert.severity,
        "rankscope.alert.state": alert.state,
        "rankscope.alert.ranks": alert.ranks,
        "rankscope.alert.tensors": alert.tensors,
        "rankscope.alert.first_step": alert.first_step,
        "rankscope.alert.stage": alert.stage,
        "rankscope.alert.cause": alert.cause,
        "rankscope.alert.remedy": alert.remedy,
        "url.full": message.link,
    }
    return LogRecord(
        time_unix_nano=round(happened * 1e9),
        observed_time_unix_nano=round(now * 1e9),
        # Numbers of an enumeration that mypy knows by name alone.
        severity_number=_OVER if over else _GRADES[alert.severity],  # type: ignore[arg-type]
        severity_text="resolved" if over else alert.severity,
        event_name=f"rankscope.alert.{news.what}",
        body=AnyValue(string_value=alert.title.encode("utf-8", "replace").decode()),
        attributes=otlp.attributes(about),
    )
