"""A real server tells real receivers what it found in a real job, whoever is away in between."""

import time

import httpx
import pytest

from rankscope.server.commands.notify import notify
from tests.support.servers.api import desynced, get
from tests.support.servers.receivers import Hook
from tests.support.servers.service import Service, eventually

pytestmark = pytest.mark.e2e


def test_an_alert_reaches_a_receiver_over_a_server_that_is_killed(tmp_path):
    receiver = Hook()
    database = f"sqlite:///{tmp_path / 'server' / 'rankscope.db'}"
    with Service(tmp_path / "server") as server:
        address = f"webhook://127.0.0.1:{receiver.port}/alerts"
        assert notify(["add", address, "--name", "ops", "--db", database]) == 0
        with httpx.Client(base_url=server.url) as client:
            desynced(client)
            [alert] = eventually(lambda: get(client, "/runs/otter/alerts")["items"], timeout_s=60)

            def failed():
                found = get(client, "/notifications", pending=True)["items"]
                return [one for one in found if one["failures"]]

            # Nobody is there to be told.
            [waits] = eventually(failed, timeout_s=60)
            assert (waits["alert"], waits["told"]) == (alert["id"], None)
            server.kill()
            receiver.come()
            time.sleep(1.0)
            server.start()
            try:
                eventually(lambda: receiver.taken, timeout_s=120)
                [told] = get(client, "/notifications", run="otter")["items"]
                assert (told["told"], told["waits"]) == ("critical", False)
                metrics = client.get("/metrics").text
            finally:
                receiver.go()
    [(path, message)] = receiver.taken
    assert path == "/alerts"
    assert message["url"] == f"{server.url}/runs/otter"
    assert [(a["id"], a["what"]) for a in message["alerts"]] == [(alert["id"], "opened")]
    assert "rankscope_notifications_total 1" in metrics
