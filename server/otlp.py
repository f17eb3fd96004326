"""OpenTelemetry's protocol over HTTP (OTLP): what both signals that are sent have in common.

Requests are made of the protocol's own messages (`opentelemetry-proto`). The SDK's exporters try
again by themselves and do not say what went wrong: here that is the part of who sends, alerts with
a memory on disk, metrics with the next values.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol
from urllib.parse import unquote, urlsplit

from rankscope.server.outbound_post import NotTaken, post

if TYPE_CHECKING:
    from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
        ExportMetricsServiceRequest,
    )
    from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
    from opentelemetry.proto.resource.v1.resource_pb2 import Resource


class _Message(Protocol):
    """What is used of a message of protobuf."""

    def SerializeToString(self) -> bytes:
        """Its bytes."""

    def MergeFromString(self, serialized: bytes) -> int:
        """Takes over what bytes hold."""


Value = str | int | float | bool | Sequence[str] | Sequence[int]

_INTERVAL, _DEFAULT_INTERVAL_MS = "OTEL_METRIC_EXPORT_INTERVAL", "60000"

SCOPE = "rankscope"
"""The instrumentation scope of all that is sent."""

MISSING = "needs the package opentelemetry-proto: pip install 'rankscope[otel]'"
"""What is said where `is_there` is not so."""


def is_there() -> bool:
    """Whether the package with the protocol's messages is installed."""
    # The packages above it are namespaces that other packages of OpenTelemetry share.
    return bool(find_spec("opentelemetry") and find_spec("opentelemetry.proto"))


def metric_interval() -> float:
    """Seconds between two exports of metrics, by OpenTelemetry's own variable.

    Raises:
        ValueError: it is no number of milliseconds.
    """
    text = os.environ.get(_INTERVAL) or _DEFAULT_INTERVAL_MS
    try:
        milliseconds = float(text)
    except ValueError:
        milliseconds = 0.0
    if not 0 < milliseconds < math.inf:
        raise ValueError(f"{_INTERVAL}={text!r} is no number of milliseconds above 0")
    # The database is read for each: no more than a page that is open asks of it.
    return max(milliseconds / 1000, 1.0)


def send_logs(
    endpoint: str, request: ExportLogsServiceRequest, headers: Mapping[str, str] | None = None
) -> None:
    """Posts log records to `<endpoint>/v1/logs`.

    Raises:
        NotTaken: they were not taken, or not all of them.
    """
    from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse

    taken = ExportLogsServiceResponse()
    _post(f"{endpoint}/v1/logs", request, headers or {}, taken)
    _raise_rejected(taken.partial_success.rejected_log_records, taken.partial_success.error_message)


def send_metrics(endpoint: str, request: ExportMetricsServiceRequest) -> None:
    """Posts metrics to `<endpoint>/v1/metrics`.

    Raises:
        NotTaken: as `send_logs`.
    """
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
        ExportMetricsServiceResponse,
    )

    taken = ExportMetricsServiceResponse()
    _post(f"{endpoint}/v1/metrics", request, {}, taken)
    _raise_rejected(taken.partial_success.rejected_data_points, taken.partial_success.error_message)


def _post(address: str, request: _Message, headers: Mapping[str, str], answer: _Message) -> None:
    """Posts a request, and fills in what is answered."""
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    given = {"Content-Type": "application/x-protobuf", "User-Agent": "rankscope"}
    given |= _pairs(os.environ.get("OTEL_EXPORTER_OTLP_HEADERS", ""))
    said = post(address, request.SerializeToString(), {**given, **headers})
    try:
        answer.MergeFromString(said)
    except DecodeError as error:
        host = urlsplit(address).netloc
        raise NotTaken(f"{host} answers something else than OTLP: {error}") from error


def _raise_rejected(count: int, why: str) -> None:
    if count:
        raise NotTaken(f"{count} rejected: {why}" if why else f"{count} rejected")


def resource() -> Resource:
    """Who says it: the service, and what `OTEL_RESOURCE_ATTRIBUTES` adds."""
    from opentelemetry.proto.resource.v1.resource_pb2 import Resource

    found = {
        "service.name": "rankscope",
        **_pairs(os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")),
    }
    if name := os.environ.get("OTEL_SERVICE_NAME"):
        found["service.name"] = name
    return Resource(attributes=attributes(found))


def _pairs(text: str) -> dict[str, str]:
    """`key=value,key=value` with percent-encoded values, as OpenTelemetry's variables have it."""
    pairs = (pair.partition("=") for pair in text.split(","))
    return {name.strip(): unquote(value.strip()) for name, equals, value in pairs if equals}


def attributes(values: Mapping[str, Value | None]) -> list[KeyValue]:
    """Attributes, without those that are None."""
    from opentelemetry.proto.common.v1.common_pb2 import KeyValue

    return [
        KeyValue(key=name, value=_any(value)) for name, value in values.items() if value is not None
    ]


def _any(value: Value) -> AnyValue:
    from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue

    match value:
        case bool():
            return AnyValue(bool_value=value)
        case str():
            # Texts of users may hold halves of surrogate pairs, which UTF-8 has not.
            return AnyValue(string_value=value.encode("utf-8", "replace").decode())
        case int():
            return AnyValue(int_value=value)
        case float():
            return AnyValue(double_value=value)
    return AnyValue(array_value=ArrayValue(values=[_any(one) for one in value]))
