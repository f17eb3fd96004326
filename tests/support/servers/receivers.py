"""Whom Rankscope tells of alerts: real receivers, which can be away and come back."""

from __future__ import annotations

import email
import email.policy
import json
import threading
from contextlib import contextmanager
from email.message import EmailMessage
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from aiosmtpd.controller import Controller
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from rankscope.server.demo.processes import free_port


class Hook:
    """Takes JSON by POST, as webhooks and Alertmanagers do.

    Attributes:
        port: stays the same when it is away and comes back.
        answers: status of its answers.
        says: what its answers hold.
        taken: path and body of each request that it answered with 200; `refused`: of the others.
    """

    says = b"that is what I say"

    def __init__(self):
        self.port = free_port()
        self.answers = 200
        self.taken = []
        self.refused = []
        self.headers = []
        self._server = None

    def read(self, path, content):
        """What a request holds."""
        return json.loads(content)

    def come(self):
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = hook.read(self.path, self.rfile.read(int(self.headers["Content-Length"])))
                kept = hook.taken if hook.answers == 200 else hook.refused
                kept.append((self.path, body))
                hook.headers.append({n.lower(): v for n, v in self.headers.items()})
                self.send_response(hook.answers)
                self.end_headers()
                self.wfile.write(hook.says)

            def log_message(self, *said):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def go(self):
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    @property
    def bodies(self):
        return [body for _, body in self.taken]


@contextmanager
def hook():
    made = Hook().come()
    try:
        yield made
    finally:
        made.go()


class Collector(Hook):
    """Takes log records and metrics as a collector of OpenTelemetry does, by HTTP and protobuf."""

    says = b""

    def read(self, path, content):
        message = {"/v1/logs": ExportLogsServiceRequest, "/v1/metrics": ExportMetricsServiceRequest}
        return message[path].FromString(content)

    @property
    def records(self):
        """All log records, in their order, each with its attributes."""
        return [
            (record, attributes_of(record))
            for body in self.bodies
            if isinstance(body, ExportLogsServiceRequest)
            for logs in body.resource_logs
            for scope in logs.scope_logs
            for record in scope.log_records
        ]

    @property
    def exports(self):
        """Each export of metrics: name -> points, each value by its attributes."""
        return [
            {
                metric.name: {
                    tuple(sorted(attributes_of(point).items())): getattr(
                        point, point.WhichOneof("value")
                    )
                    for point in metric.gauge.data_points
                }
                for metrics in body.resource_metrics
                for scope in metrics.scope_metrics
                for metric in scope.metrics
            }
            for body in self.bodies
            if isinstance(body, ExportMetricsServiceRequest)
        ]


def attributes_of(message):
    """Attributes as values of Python."""

    def value(of):
        kind = of.WhichOneof("value")
        found = getattr(of, kind)
        return [value(one) for one in found.values] if kind == "array_value" else found

    return {attribute.key: value(attribute.value) for attribute in message.attributes}


@contextmanager
def collector():
    made = Collector().come()
    try:
        yield made
    finally:
        made.go()


class _Mails:
    def __init__(self):
        self.mails = []

    async def handle_DATA(self, server, session, envelope):
        text = email.message_from_bytes(envelope.content, policy=email.policy.default)
        assert isinstance(text, EmailMessage)
        self.mails.append(text)
        return "250 taken"


@contextmanager
def mailbox():
    """An SMTP server: its port, and the list of mails that it has taken."""
    mails, port = _Mails(), free_port()
    server = Controller(mails, hostname="127.0.0.1", port=port)
    server.start()
    try:
        yield port, mails.mails
    finally:
        server.stop()
