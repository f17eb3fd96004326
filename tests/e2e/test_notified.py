"""A real server tells real receivers what it found in a real job, whoever is away in between."""

import json
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


def test_a_server_calls_the_program_that_it_was_started_with(tmp_path):
    drain = tmp_path / "drain"
    # A node that cannot be drained at first.
    drain.write_text(
        "#!/bin/sh\n"
        f"cd {tmp_path}\n"
        'echo "$RANKSCOPE_TEST $RANKSCOPE_HOSTS $RANKSCOPE_RANKS $RANKSCOPE_KIND" >> calls\n'
        "cat > given\n"
        'test -e ready || { echo "not now" >&2; exit 1; }\n',
        encoding="utf-8",
    )
    drain.chmod(0o755)
    calls = tmp_path / "calls"
    database = f"sqlite:///{tmp_path / 'server' / 'rankscope.db'}"
    arguments = ("--cordon-command", f"drain={drain}")
    with Service(tmp_path / "server", arguments=arguments) as server:
        address = ["cordon-command://drain", "--name", "drain", "--kind", "desync.*"]
        assert notify(["add", *address, "--db", database]) == 0
        with httpx.Client(base_url=server.url) as client:
            desynced(client)
            [alert] = eventually(lambda: get(client, "/runs/otter/alerts")["items"], timeout_s=60)

            def log():
                [one] = get(client, "/notifications", run="otter")["items"] or [None]
                return one

            failed = eventually(lambda: (one := log()) and one["failures"] and one, timeout_s=60)
            assert failed["error"] == "drain ended with 1 not now"
            (tmp_path / "ready").touch()
            told = eventually(lambda: (one := log()) and one["told"] and one, timeout_s=120)
            assert (told["alert"], told["waits"], told["error"]) == (alert["id"], False, None)
            given = json.loads((tmp_path / "given").read_text())
            assert given["hosts"] == [{"host": "node-2", "ranks": [2]}]
            assert given["alert"]["evidence"] == get(client, f"/alerts/{alert['id']}")["evidence"]
            lines = calls.read_text().splitlines()
            assert len(lines) >= 2
            assert set(lines) == {f" node-2 2 {alert['kind']}"}
            [target] = get(client, "/notifications/targets")["items"]
            answer = client.post(f"/api/v1/notifications/targets/{target['id']}/test")
            assert answer.json() == {"delivered": True, "error": None}
            assert calls.read_text().splitlines()[len(lines) :] == ["1   test"]
