"""`GET /runs` sorted by a column, in the database, page by page."""

from datetime import datetime

import pytest

from rankscope.agent import wire
from tests.support.servers.api import batch, check_problem, column, desynced, evaluated, get, post

# project, ranks that post, steps.
RUNS = {"ant": ("zoo", 1, 30), "bee": ("farm", 3, 10), "cat": ("farm", 2, 20)}


@pytest.fixture(scope="module")
def runs(shared_client):
    """A client of a server with these runs."""
    post_runs(shared_client)
    return shared_client


def post_runs(client):
    for n, (name, (project, ranks, steps)) in enumerate(RUNS.items()):
        for rank in range(ranks):
            sent = batch(
                rank,
                run=name,
                project=project,
                world_size=ranks,
                hello=wire.Hello(started_at=1000.0 + n),
                state="failed" if name == "ant" else "finished",
                columns={"loss": column(range(steps), [1.0] * steps)},
            )
            assert post(client, sent).status_code == 200


def names(client, **asked):
    """Of all pages, a run each."""
    found, cursor = [], None
    while True:
        page = get(client, "/runs", limit=1, **asked, **({"cursor": cursor} if cursor else {}))
        found += [run["id"] for run in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            return found


@pytest.mark.parametrize(
    ("sort", "expected"),
    [
        ("run", ["ant", "bee", "cat"]),
        ("ranks", ["ant", "cat", "bee"]),
        ("last_step", ["bee", "cat", "ant"]),
        ("heard", ["ant", "bee", "cat"]),
        ("started", ["ant", "bee", "cat"]),
        ("duration", None),
    ],
)
def test_by_each_column_and_the_other_way_round(runs, sort, expected):
    if expected is None:
        expected = [run["id"] for run in sorted(get(runs, "/runs")["items"], key=_lasted)]
    assert names(runs, sort=sort) == expected
    assert names(runs, sort=f"-{sort}") == expected[::-1]


def _lasted(run):
    first, last = (datetime.fromisoformat(run[n]) for n in ("started_at", "last_seen_at"))
    return last - first


def test_equal_ones_come_once_each(runs):
    assert names(runs, sort="project") == ["bee", "cat", "ant"]
    assert names(runs, sort="-state") == ["cat", "bee", "ant"]
    assert names(runs, sort="project", project="farm") == ["bee", "cat"]


def test_the_gravest_alerts_first(client):
    post_runs(client)
    desynced(client)
    assert evaluated(client)["open_alerts"] > 0
    assert names(client, sort="-alerts")[0] == "otter"
    assert names(client, sort="alerts")[-1] == "otter"


def test_what_cannot_be_sorted_by(runs):
    check_problem(runs.get("/api/v1/runs", params={"sort": "verdict"}), 422)
    cursor = get(runs, "/runs", sort="run", limit=1)["next_cursor"]
    for other in ("-ranks", None):
        asked = {"cursor": cursor} | ({"sort": other} if other else {})
        body = check_problem(runs.get("/api/v1/runs", params=asked), 422)
        assert "another order" in body["detail"]
