"""Alerts as log records of OpenTelemetry, at a receiver that decodes them."""

import base64
import subprocess
import sys

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse

from rankscope.server.notifications.message import Message, News
from rankscope.server.notifications.transports import (
    BadTarget,
    NotDelivered,
    check,
    deliver,
    masked,
)
from tests.support.incidents import alert
from tests.support.servers.receivers import attributes_of, collector

OPEN = alert(
    "desync.parameters",
    10,
    id="a",
    ranks=(2,),
    tensors=("fc.weight",),
    opened_at=1000.5,
    severity="critical",
)


def message(*news):
    return Message("otter", "vision", "http://h/runs/otter", news)


def test_an_alert_is_a_record_with_all_that_is_known_of_it():
    with collector() as receiver:
        deliver(f"otlp://me:a%40b@127.0.0.1:{receiver.port}", message(News(OPEN, "opened")))
    [(record, about)] = receiver.records
    assert record.event_name == "rankscope.alert.opened"
    assert record.time_unix_nano == 1_000_500_000_000
    assert record.observed_time_unix_nano > record.time_unix_nano
    assert record.body.string_value == OPEN.title
    assert (record.severity_number, record.severity_text) == (18, "critical")
    assert about["rankscope.run"] == "otter"
    assert about["rankscope.project"] == "vision"
    assert about["rankscope.alert.kind"] == "desync.parameters"
    assert about["rankscope.alert.ranks"] == [2]
    assert about["rankscope.alert.tensors"] == ["fc.weight"]
    assert about["rankscope.alert.first_step"] == 10
    assert about["url.full"] == "http://h/runs/otter"
    [headers] = receiver.headers
    assert headers["content-type"] == "application/x-protobuf"
    assert base64.b64decode(headers["authorization"].removeprefix("Basic ")) == b"me:a@b"


def test_one_that_is_over_is_a_record_of_its_own():
    over = alert("loss.spike", 3, id="b", state="resolved", resolved_at=2000.0, severity="warning")
    with collector() as receiver:
        sent = message(News(OPEN, "raised"), News(over, "resolved"))
        deliver(f"otlp://127.0.0.1:{receiver.port}/", sent)
    (raised, _), (resolved, about) = receiver.records
    assert raised.event_name == "rankscope.alert.raised"
    assert resolved.event_name == "rankscope.alert.resolved"
    assert (resolved.severity_number, resolved.severity_text) == (9, "resolved")
    assert resolved.time_unix_nano == 2000 * 10**9
    assert about["rankscope.alert.severity"] == "warning"


def test_a_title_that_is_no_text_arrives():
    with collector() as receiver:
        odd = alert("loss.spike", 3, id="b", title="\ud800 went up", cause="\udfff")
        deliver(f"otlp://127.0.0.1:{receiver.port}", message(News(odd, "opened")))
    [(record, _)] = receiver.records
    assert record.body.string_value == "? went up"


def test_variables_of_opentelemetry_are_heeded(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=se%20cret, x-scope = a=b")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=lab")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "watcher")
    with collector() as receiver:
        deliver(f"otlp://127.0.0.1:{receiver.port}", message(News(OPEN, "opened")))
    [headers] = receiver.headers
    assert (headers["api-key"], headers["x-scope"]) == ("se cret", "a=b")
    [body] = receiver.bodies
    assert attributes_of(body.resource_logs[0].resource) == {
        "service.name": "watcher",
        "deployment.environment.name": "lab",
    }


def test_what_is_not_taken_is_said():
    rejected = ExportLogsServiceResponse()
    rejected.partial_success.rejected_log_records = 1
    rejected.partial_success.error_message = "too old"
    with collector() as receiver:
        url = f"otlp://127.0.0.1:{receiver.port}"
        for answers, says, why in (
            (503, b"full", "answers 503 full"),
            (200, rejected.SerializeToString(), "1 rejected: too old"),
            (200, b"<html>", "something else than OTLP"),
        ):
            receiver.answers, receiver.says = answers, says
            with pytest.raises(NotDelivered, match=why):
                deliver(url, message(News(OPEN, "opened")))
    with pytest.raises(NotDelivered, match="does not answer"):
        deliver(url, message(News(OPEN, "opened")))


def test_addresses_are_checked_and_masked():
    check("otlp://collector:4318")
    check("otlps://me:secret@collector/otlp")
    assert masked("otlps://me:secret@collector/otlp") == "otlps://collector/..."
    with pytest.raises(BadTarget, match="names no host"):
        check("otlp://")


def test_without_the_package_it_says_what_to_install():
    program = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from rankscope.server.notifications.transports import check\n"
        "from rankscope.server.settings import Settings\n"
        "for used in (lambda: check('otlp://h'),"
        " lambda: Settings(database='sqlite://', otlp='http://h')):\n"
        "    try:\n"
        "        used()\n"
        "    except ValueError as error:\n"
        "        print(error)\n"
        "check('webhook://h')\n"
    )
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.count("pip install 'rankscope[otel]'") == 2
