"""Notifications by REST: read, and a test message; addresses are never given away."""

import time

import pytest

from rankscope.server.storage import notifications
from rankscope.server.storage.engine import writing
from tests.support.alert_rows import add_run, put_alert
from tests.support.api import check_problem, get
from tests.support.receivers import hook


@pytest.fixture
def target(app, client):
    def add(url, **more):
        given = {"name": "ops", "projects": None, "kinds": None, "severity": "info"}
        with writing(app.state.engine) as connection:
            return notifications.add_target(connection, url=url, now=0.0, **(given | more))

    return add


def test_targets_are_listed_without_their_secrets(client, target):
    made = target("webhook://me:secret@h/secret", kinds=["loss.*"])
    [listed] = get(client, "/notifications/targets")["items"]
    assert listed["id"] == made.id
    assert listed["kinds"] == ["loss.*"]
    assert listed["url"] == "webhook://h/..."


def test_what_was_told_and_what_waits(app, client, target):
    add_run(app.state.engine)
    put_alert(app.state.engine, "a")
    made = target("webhook://h")
    with writing(app.state.engine) as connection:
        # Later than the thread that tells looks.
        late = time.time() + 1000
        notifications.want(connection, [("a", made.id)], run=1, due_at=late, now=5.0)
    [entry] = get(client, "/notifications", run="otter", pending=True)["items"]
    assert (entry["alert"], entry["target"], entry["waits"]) == ("a", made.id, True)
    assert entry["told"] is None
    check_problem(client.get("/api/v1/notifications", params={"run": "nobody"}), 404)
    check_problem(client.get("/api/v1/notifications", params={"limit": 0}), 422)


def test_a_test_message(client, target):
    with hook() as receiver:
        made = target(f"webhook://127.0.0.1:{receiver.port}/")
        answer = client.post(f"/api/v1/notifications/targets/{made.id}/test")
        assert answer.json() == {"delivered": True, "error": None}
        assert len(receiver.taken) == 1
        receiver.answers = 401
        answer = client.post(f"/api/v1/notifications/targets/{made.id}/test").json()
    assert answer["delivered"] is False
    assert "answers 401" in answer["error"]
    check_problem(client.post("/api/v1/notifications/targets/nobody/test"), 404)
