"""Notifications by REST: read, and a test message; addresses are never given away."""

import time

import pytest

from rankscope.server.notifications import transports
from rankscope.server.storage.access.visibility import limited_to
from rankscope.server.storage.database.engine import reading, writing
from rankscope.server.storage.judgement import notifications
from rankscope.server.storage.judgement.notifications import Notification
from tests.support.alert_rows import add_run, put_alert
from tests.support.servers.api import check_problem, get
from tests.support.servers.receivers import hook


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


def test_an_alert_says_who_was_told_of_it(app, client, target):
    add_run(app.state.engine)
    put_alert(app.state.engine, "a")
    put_alert(app.state.engine, "b")
    first, second = target("webhook://h"), target("webhook://h", name="boss")
    late = time.time() + 1000
    with writing(app.state.engine) as connection:
        for alert, made in (("a", first), ("a", second), ("b", second)):
            notifications.want(connection, [(alert, made.id)], run=1, due_at=late, now=5.0)
        one = Notification(1, "a", first.id)
        notifications.told(connection, one, what="critical", now=7.0)
        one = Notification(1, "a", second.id)
        notifications.failed(connection, one, error="h answers 500", again_at=late)
    told, failed = sorted(get(client, "/alerts/a")["notifications"], key=lambda n: n["failures"])
    assert (told["name"], told["told"], told["waits"]) == ("ops", "critical", False)
    assert told["told_at"] == "1970-01-01T00:00:07Z"
    assert (failed["name"], failed["error"], failed["waits"]) == ("boss", "h answers 500", True)
    assert failed["next_try_at"] is not None
    assert get(client, "/notifications", alert="a")["items"] == [told, failed]
    assert [n["alert"] for n in get(client, "/notifications", alert="b")["items"]] == ["b"]
    assert get(client, "/notifications", alert="none")["items"] == []


def test_a_target_says_what_came_of_telling_it(app, client, target):
    add_run(app.state.engine)
    for name in "abcd":
        put_alert(app.state.engine, name)
    made, other = target("webhook://h"), target("webhook://h", name="new")
    late = time.time() + 1000
    with writing(app.state.engine) as connection:
        for n, name in enumerate("abcd"):
            notifications.want(connection, [(name, made.id)], run=1, due_at=late, now=5.0 + n)
        notifications.told(connection, Notification(1, "a", made.id), what="critical", now=6.0)
        for name, error, again in (("b", "older", late), ("c", "newer", None)):
            one = Notification(1, name, made.id)
            notifications.failed(connection, one, error=error, again_at=again)
    outcomes = {t["id"]: t["outcome"] for t in get(client, "/notifications/targets")["items"]}
    assert outcomes[made.id] == {
        "told_at": "1970-01-01T00:00:06Z",
        "waiting": 1,
        "failing": 2,
        "failing_since": "1970-01-01T00:00:07Z",
        "error": "newer",
        "next_try_at": None,
    }
    assert outcomes[other.id] == {
        "told_at": None,
        "waiting": 0,
        "failing": 0,
        "failing_since": None,
        "error": None,
        "next_try_at": None,
    }


def test_what_other_projects_were_told_is_not_counted(app, client, target):
    engine = app.state.engine
    add_run(engine, 1, "otter", "vision")
    add_run(engine, 2, "seal", "speech")
    made = target("webhook://h")
    with writing(engine) as connection:
        for run in (1, 2):
            notifications.want(connection, [("a", made.id)], run=run, due_at=9e9, now=5.0)
        one = Notification(2, "a", made.id)
        notifications.failed(connection, one, error="of speech", again_at=9e9)
    with reading(engine) as connection, limited_to(frozenset({"vision"})):
        seen = notifications.outcomes(connection)[made.id]
    assert (seen.waiting, seen.failing, seen.error) == (1, 0, "")


def test_a_library_that_breaks_is_an_outcome_of_the_test(client, target, monkeypatch):
    def broken(url, message, *, commands):
        raise RuntimeError(f"cannot parse {url}")

    made = target("webhook://h/secret")
    monkeypatch.setattr(transports, "deliver", broken)
    answer = client.post(f"/api/v1/notifications/targets/{made.id}/test")
    assert answer.json() == {"delivered": False, "error": "RuntimeError"}


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
