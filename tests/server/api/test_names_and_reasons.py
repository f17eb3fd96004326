"""Silences and acknowledgements: who, why, until when, and back again."""

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import inspect, select, text

from rankscope.server.storage import schema
from rankscope.server.storage.database import migrate
from rankscope.server.storage.database.engine import open_engine
from tests.support.servers.api import check_problem, desynced, evaluated, get
from tests.support.servers.collector import wait_until

KIND = "desync.parameters"
SILENCES = "/api/v1/runs/otter/silences"


def soon(**later):
    return (datetime.now(UTC) + timedelta(**later)).isoformat()


@pytest.fixture
def alert(client):
    """A critical alert of a run that is judged to its end."""
    desynced(client)
    evaluated(client)
    [found] = get(client, "/runs/otter/alerts")["items"]
    return found


@pytest.fixture(scope="module")
def unchanged(shared_client):
    """As `alert`, for all tests that are refused."""
    desynced(shared_client)
    evaluated(shared_client)
    [found] = get(shared_client, "/runs/otter/alerts")["items"]
    return found


def test_an_acknowledgement_says_who_why_and_until_when(client, alert):
    route = f"/api/v1/alerts/{alert['id']}/acknowledge"
    assert (alert["acknowledged"], alert["acknowledgement"]) == (False, None)
    until = soon(hours=1)
    said = {"name": "Ada", "reason": "known bad host", "until": until}
    assert client.post(route, json=said).status_code == 200
    [listed] = get(client, "/runs/otter/alerts")["items"]
    held = listed["acknowledgement"]
    assert (listed["acknowledged"], held["name"], held["reason"]) == (True, "Ada", "known bad host")
    assert datetime.fromisoformat(held["until"]) == datetime.fromisoformat(until)
    assert held["at"] < held["until"]
    # It tells others, and changes nothing about the verdict.
    assert get(client, "/runs/otter/verdict")["verdict"] == "fail"
    # Said again, it is what was said last; without a body as well.
    assert client.post(route).json()["acknowledgement"]["name"] == ""
    taken_back = client.delete(route).json()
    assert (taken_back["acknowledged"], taken_back["acknowledgement"]) == (False, None)


def test_an_acknowledgement_that_has_ended_does_not_hold(client, alert):
    route = f"/api/v1/alerts/{alert['id']}/acknowledge"
    assert client.post(route, json={"seconds": 2.0}).json()["acknowledged"] is True
    wait_until(lambda: not get(client, f"/alerts/{alert['id']}")["acknowledged"])


def test_a_silence_says_who_why_and_until_when_and_ends(client, alert):
    first = client.post(SILENCES, json={"kind": KIND, "seconds": 3, "name": "Ada"}).json()
    assert (first["name"], first["reason"], first["run"]) == ("Ada", "", "otter")
    assert get(client, "/runs/otter/verdict")["verdict"] == "pass"
    run = get(client, "/runs/otter")
    assert run["worst_alert"] is None
    assert run["silenced_alert"]["id"] == alert["id"]
    [listed] = get(client, "/runs/otter/alerts")["items"]
    assert (listed["silenced"], listed["silence"]) == (True, first)
    # An ended silence no longer silences.
    wait_until(lambda: get(client, "/runs/otter/verdict")["verdict"] == "fail")
    assert get(client, f"/alerts/{alert['id']}")["silence"] is None
    assert get(client, "/runs/otter")["silenced_alert"] is None


def test_of_several_silences_the_one_that_ends_last_is_shown(client, alert):
    for hours, name in ((2, "second"), (1, "first")):
        said = {"kind": KIND, "until": soon(hours=hours), "name": name}
        assert client.post(SILENCES, json=said).status_code == 201
    assert get(client, f"/alerts/{alert['id']}")["silence"]["name"] == "second"
    for_ever = client.post(SILENCES, json={"kind": KIND, "name": "third"}).json()
    assert get(client, f"/alerts/{alert['id']}")["silence"] == for_ever
    # Taken back one by one: the others hold.
    assert client.delete(f"/api/v1/silences/{for_ever['id']}").status_code == 204
    assert get(client, f"/alerts/{alert['id']}")["silence"]["name"] == "second"
    assert [s["name"] for s in get(client, "/runs/otter/silences")["items"]] == ["second", "first"]


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ({"until": "2001-01-01T00:00:00Z"}, "is past"),
        ({"until": "2999-01-01T00:00:00"}, "timezone"),
        ({"until": "tomorrow"}, "until"),
        ({"until": "2999-01-01T00:00:00Z", "seconds": 5}, "not in both"),
        ({"until": "9999-12-31T23:59:59.999999Z"}, "too far"),
        ({"until": "9999-12-31T23:59:59-12:00"}, "too far"),
        ({"until": "0001-01-01T00:00:00+14:00"}, "is past"),
        ({"seconds": 0}, "above 0"),
        ({"name": "x" * 201}, "name"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_what_cannot_be_is_refused(shared_client, unchanged, end, said):
    acknowledge = f"/api/v1/alerts/{unchanged['id']}/acknowledge"
    problem = check_problem(shared_client.post(acknowledge, json=end), 422)
    assert said in problem["detail"]
    assert (
        said
        in check_problem(shared_client.post(SILENCES, json={"kind": KIND, **end}), 422)["detail"]
    )
    assert get(shared_client, "/runs/otter/silences")["items"] == []
    assert get(shared_client, f"/alerts/{unchanged['id']}")["acknowledged"] is False


def test_what_an_older_server_stored_holds_after_the_migration(database_url):
    engine = open_engine(database_url)
    try:
        migrate.upgrade(engine)
        migrate.downgrade(engine, "0004")
        with engine.begin() as connection:
            assert "name" not in {c["name"] for c in inspect(connection).get_columns("silence")}
            connection.execute(
                text(
                    "INSERT INTO silence (run, id, kind, created_at, until, comment) "
                    "VALUES (1, 's', 'loss.spike', 1.0, NULL, 'known')"
                )
            )
        migrate.upgrade(engine)
        with engine.connect() as connection:
            [row] = connection.execute(select(schema.silence)).all()
            assert (row.comment, row.name, row.until) == ("known", "", None)
    finally:
        engine.dispose()
