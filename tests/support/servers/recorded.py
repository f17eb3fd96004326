"""A server whose answers to the gate are set by a test, as a real one has answered."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

from rankscope.server.gate.gate import gate

DESYNC = {
    "id": "00c0ffee00c0ffee",
    "run": "digits",
    "kind": "desync.gradients",
    "severity": "critical",
    "state": "open",
    "title": "The gradient of rank 2 differs from the other ranks",
    "ranks": [2],
    "tensors": ["conv2.weight"],
    "first_step": 147,
    "last_step": 299,
    "opened_at": "2026-01-01T00:00:00Z",
    "resolved_at": None,
    "acknowledged": False,
    "silenced": False,
    "stage": "reduced_gradient",
    "cause": "100 % of it:\nthe all-reduce, or its reader, was skipped.",
    "remedy": "Wait for the collective, then read.",
    "evidence": {"distance": "NaN"},
    "parent": None,
    "consequences": ["00c0ffee00c0fff0"],
}
SPIKE = DESYNC | {
    "id": "00c0ffee00c0fff0",
    "kind": "loss.spike",
    "severity": "warning",
    "title": "The loss jumped from 0.1 to 2",
    "ranks": [],
    "tensors": [],
    "first_step": 150,
    "stage": None,
    "parent": DESYNC["id"],
    "consequences": [],
}
CHECKS = [
    {"name": "desync.gradients", "state": "failed", "why": DESYNC["title"]},
    {"name": "loss.spike", "state": "failed", "why": "as a consequence of desync.gradients"},
    {"name": "loss.nonfinite", "state": "passed", "why": "300 steps were finite."},
    {"name": "rank.loss_outlier", "state": "not_run", "why": "does not apply: 2 ranks"},
]
REQUIRED = [
    {"name": "loss.nonfinite", "state": "judged", "by": "loss.nonfinite", "why": "All finite."},
    {"name": "loss.spike", "state": "judged", "by": "loss.diverging", "why": "Seldom recorded."},
]
UNJUDGED = {"name": "loss.spike", "state": "not_judged", "by": None, "why": "12 of 32 needed."}
FAIL = {
    "verdict": "fail",
    "reasons": [f"desync.gradients (critical): {DESYNC['title']}"],
    "checks": CHECKS,
    "required": REQUIRED,
}
PASS = {"verdict": "pass", "reasons": [], "checks": CHECKS[2:], "required": REQUIRED}
PENDING = {
    "verdict": "pending",
    "reasons": ["the run is still running"],
    "checks": CHECKS[2:],
    "required": [REQUIRED[0], UNJUDGED],
    "state": "running",
    "evaluated": True,
}


class Recorded(ThreadingHTTPServer):
    """A server whose answers are set by the test; `asked` holds path, query and headers."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.verdicts: list[tuple[int, object]] = [(200, FAIL)]
        self.pages: list[list[dict]] = [[SPIKE, DESYNC]]
        self.asked: list[tuple[str, dict[str, list[str]], dict[str, str]]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Recorded

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = parse_qs(parts.query)
        self.server.asked.append((unquote(parts.path), query, dict(self.headers)))
        status, body = 200, object()
        if parts.path.endswith("/verdict"):
            # The last answer holds from then on.
            verdicts = self.server.verdicts
            status, body = verdicts.pop(0) if len(verdicts) > 1 else verdicts[0]
        elif parts.path.endswith("/alerts"):
            page = int(query.get("cursor", ["0"])[0])
            more = page + 1 < len(self.server.pages)
            body = {
                "items": self.server.pages[page],
                "next_cursor": str(page + 1) if more else None,
            }
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Nothing: the test's output is the gate's."""


def printed(server, capsys, form, *more):
    gate(["digits", "--server", server.url, "--format", form, *more])
    return capsys.readouterr().out
