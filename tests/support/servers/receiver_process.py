"""A receiver of alerts in a process of its own, which can be killed:

    python -m tests.support.servers.receiver_process mail|json PORT FILE

Each thing that it has taken is a line of JSON in FILE, written before it answers.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from aiosmtpd.controller import Controller


def main(kind: str, port: int, path: str) -> None:
    lock = threading.Lock()

    def keep(what: object) -> None:
        with lock, open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(what) + "\n")
            file.flush()
            os.fsync(file.fileno())

    if kind == "mail":

        class Mails:
            async def handle_DATA(self, server, session, envelope):
                keep(envelope.content.decode())
                return "250 taken"

        Controller(Mails(), hostname="127.0.0.1", port=port).start()
        threading.Event().wait()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            keep(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *said):
            pass

    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
