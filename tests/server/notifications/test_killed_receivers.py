"""Receivers in processes of their own, killed and started again, hear of each alert as it is."""

import email
import email.policy
import json
import re
import socket
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import pytest

from rankscope.server.demo.processes import free_port
from tests.server.notifications.test_notifier import Telling
from tests.support.alert_rows import add_run

TREE = Path(__file__).parents[3]


class Receiver:
    """A process that takes what it is sent, on a port that stays the same."""

    def __init__(self, kind, folder):
        self.kind, self.port, self.file = kind, free_port(), folder / "taken"
        self._process = None

    def start(self):
        command = ["-m", "tests.support.servers.receiver_process", self.kind]
        self._process = subprocess.Popen(
            [sys.executable, *command, str(self.port), str(self.file)], cwd=TREE
        )
        deadline = time.monotonic() + 60
        while True:
            assert self._process.poll() is None
            assert time.monotonic() < deadline
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                time.sleep(0.05)

    def kill(self):
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    @property
    def taken(self):
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        return [json.loads(line) for line in lines]


def from_webhook(body):
    return [(a["title"], a["what"]) for a in body["alerts"]]


def from_mail(text):
    mail = email.message_from_string(text, policy=email.policy.default)
    said = re.findall(r"^(WARNING|RESOLVED) \S+: (.*?)\r?$", mail.get_content(), re.MULTILINE)
    return [(title, {"WARNING": "opened", "RESOLVED": "resolved"}[word]) for word, title in said]


def from_alertmanager(entries):
    """To an Alertmanager an alert that is open ends later, at a time that it is not told yet."""
    over = [datetime.fromisoformat(e["endsAt"]).timestamp() == RESOLVED_AT for e in entries]
    return [
        (entry["annotations"]["summary"], "resolved" if ended else "opened")
        for entry, ended in zip(entries, over, strict=True)
    ]


RESOLVED_AT = 1234.0
KINDS = {
    "webhook": ("json", "webhook://127.0.0.1:{port}/hook", from_webhook),
    "smtp": ("mail", "mailto://127.0.0.1:{port}?from=a@example.org&to=b@example.org", from_mail),
    "alertmanager": ("json", "alertmanager://127.0.0.1:{port}", from_alertmanager),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_alert_is_told_once_when_it_opens_and_once_when_it_ends(kind, tmp_path, engine):
    process, address, read = KINDS[kind]
    receiver = Receiver(process, tmp_path)
    add_run(engine)
    telling = Telling(engine)
    telling.target(address.format(port=receiver.port))

    def opens(name):
        telling.put(name, title=f"Alert {name}")

    def ends(name):
        telling.put(name, title=f"Alert {name}", state="resolved", resolved_at=RESOLVED_AT)

    def rounds(*seconds):
        for after in seconds:
            telling.round(after=after)

    try:
        receiver.start()
        opens("a")
        rounds(0, 11)
        # The receiver is killed: one alert ends, another one opens, a third one does both.
        receiver.kill()
        ends("a")
        for name in ("b", "c"):
            opens(name)
        rounds(61, 20)
        assert [row.failures > 0 for (name, _), row in telling.rows.items() if name == "b"] == [
            True
        ]
        ends("c")
        # So is the server; another one takes its place.
        telling.notifier.stop()
        telling.notifier = telling.another()
        rounds(30)
        receiver.start()
        # Less than the time after which an Alertmanager is reminded.
        rounds(60, 60, 60)
        receiver.kill()
        ends("b")
        rounds(10, 61)
        receiver.start()
        rounds(60, 60, 60, 1000)
    finally:
        receiver.kill()
        telling.notifier.stop()
    told = [news for message in receiver.taken for news in read(message)]
    assert sorted(told) == [
        ("Alert a", "opened"),
        ("Alert a", "resolved"),
        ("Alert b", "opened"),
        ("Alert b", "resolved"),
        # It was over before anybody could be told that it was there.
        ("Alert c", "resolved"),
    ]
