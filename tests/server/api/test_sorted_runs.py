"""`GET /runs` sorted by a column, in the database, page by page."""

import math
import time
from datetime import datetime

import pytest
from sqlalchemy import select, update

from rankscope.agent import wire
from rankscope.server.storage import schema
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
    check_problem(runs.get("/api/v1/runs", params={"sort": "config"}), 422)
    cursor = get(runs, "/runs", sort="run", limit=1)["next_cursor"]
    for other in ("-ranks", None):
        asked = {"cursor": cursor} | ({"sort": other} if other else {})
        body = check_problem(runs.get("/api/v1/runs", params=asked), 422)
        assert "another order" in body["detail"]


# Of each run the losses of its ranks; the last steps of `gone` are no numbers.
LOSSES = {"low": [0.5, 0.7, 9.0], "high": [2.0], "gone": [math.nan], "none": []}


def eventually(names_of, expected):
    """Judged in the background, within a second or two of what has changed."""
    deadline = time.monotonic() + 30
    while (found := names_of()) != expected and time.monotonic() < deadline:
        time.sleep(0.05)
    assert found == expected


@pytest.fixture
def judged(client):
    """One that fails, with an alert; one that passes; one that has too little to be judged."""
    desynced(client)
    desynced(client, since=1000, run="sound")
    short = batch(run="short", state="finished", columns={"loss": column([0], [1.0])})
    assert post(client, short).status_code == 200
    for run in ("otter", "sound", "short"):
        evaluated(client, run)
    return client


def test_by_the_median_of_the_newest_losses(client):
    for run, losses in LOSSES.items():
        for rank in range(len(losses) or 1):
            columns = {"loss": column(range(3), [5.0, 4.0, losses[rank]])} if losses else {}
            sent = batch(rank, run=run, world_size=3, state="finished", columns=columns)
            assert post(client, sent).status_code == 200
    # What has none is last, whichever end comes first; what is not finite is the largest.
    eventually(lambda: names(client, sort="-loss"), ["gone", "high", "low", "none"])
    eventually(lambda: names(client, sort="loss"), ["low", "high", "gone", "none"])


def test_the_loss_of_a_run_that_goes_on_is_read_again(client, app, monkeypatch):
    monkeypatch.setattr("rankscope.server.storage.judgement.sort_keys._AGAIN_S", 0.2)
    for run, loss in (("a", 1.0), ("b", 2.0)):
        assert (
            post(client, batch(run=run, columns={"loss": column([0], [loss])})).status_code == 200
        )
    eventually(lambda: names(client, sort="-loss"), ["b", "a"])
    sent = batch(seq=1, run="a", columns={"loss": column([1], [3.0])})
    assert post(client, sent).status_code == 200
    eventually(lambda: names(client, sort="-loss"), ["a", "b"])


def shown(client):
    """Runs and what the list says of them, those that fail first."""
    items = get(client, "/runs", sort="-verdict")["items"]
    return [(run["id"], run["verdict"]) for run in items]


def test_by_the_verdict_which_a_silence_changes_until_it_ends(judged):
    def order(*verdicts):
        return list(zip(("otter", "short", "sound"), verdicts, strict=True))

    eventually(lambda: shown(judged), order("fail", "pending", "pass"))
    assert names(judged, sort="verdict") == ["sound", "short", "otter"]
    (alert,) = get(judged, "/runs/otter/alerts")["items"]
    body = {"kind": alert["kind"], "seconds": 4}
    answer = judged.post("/api/v1/runs/otter/silences", json=body)
    assert answer.status_code == 201
    eventually(lambda: names(judged, sort="-verdict")[0], "short")
    assert dict(shown(judged))["otter"] == "pass"
    # It ends by itself, and nobody has to ask.
    eventually(lambda: shown(judged), order("fail", "pending", "pass"))
    answer = judged.post("/api/v1/runs/otter/silences", json={"kind": alert["kind"]})
    eventually(lambda: names(judged, sort="-verdict")[0], "short")
    judged.delete(f"/api/v1/silences/{answer.json()['id']}")
    eventually(lambda: names(judged, sort="-verdict")[0], "otter")


def test_runs_of_an_older_database_are_judged_when_a_server_looks(judged, app):
    eventually(lambda: names(judged, sort="-verdict"), ["otter", "short", "sound"])
    engine = app.state.engine
    # As the migration leaves them.
    with engine.begin() as connection:
        empty = {"verdict": None, "loss": None, "judge_at": 0.0}
        connection.execute(update(schema.run).values(**empty))
    eventually(lambda: names(judged, sort="-verdict"), ["otter", "short", "sound"])
    eventually(lambda: names(judged, sort="-loss"), ["sound", "otter", "short"])
    # Of what has ended and is known nothing is asked again.
    ended = select(schema.run.c.judge_at).where(schema.run.c.state == "finished")
    with engine.connect() as connection:
        assert connection.scalars(ended).all() == [None, None, None]
