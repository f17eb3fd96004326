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

from rankscope.server.demo.processes import free_port


class Hook:
    """Takes JSON by POST, as webhooks and Alertmanagers do.

    Attributes:
        port: stays the same when it is away and comes back.
        answers: status of its answers.
        taken: path and body of each request that it answered with 200; `refused`: of the others.
    """

    def __init__(self):
        self.port = free_port()
        self.answers = 200
        self.taken = []
        self.refused = []
        self.headers = []
        self._server = None

    def come(self):
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                kept = hook.taken if hook.answers == 200 else hook.refused
                kept.append((self.path, body))
                hook.headers.append({n.lower(): v for n, v in self.headers.items()})
                self.send_response(hook.answers)
                self.end_headers()
                self.wfile.write(b"that is what I say")

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
