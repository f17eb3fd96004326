"""`GET /compare`: what the route itself is to be asked."""

from collections import Counter
from threading import get_ident

from sqlalchemy import event

from tests.support.api import batch, check_problem, column, get, post


def test_it_holds_one_connection_at_a_time(app, client):
    for run in ("otter", "heron"):
        post(client, batch(run=run, columns={"loss": column([0, 1], [2.0, 1.0])}))
    # By thread: the worker asks meanwhile, too.
    held, most = Counter(), Counter()

    def out(*_):
        held[get_ident()] += 1
        most[get_ident()] = max(most[get_ident()], held[get_ident()])

    def back(*_):
        held[get_ident()] -= 1

    engine = app.state.engine
    event.listen(engine, "checkout", out)
    event.listen(engine, "checkin", back)
    try:
        answer = get(client, "/compare", runs=["otter", "heron"])
    finally:
        event.remove(engine, "checkout", out)
        event.remove(engine, "checkin", back)
    assert [run["id"] for run in answer["runs"]] == ["otter", "heron"]
    assert max(most.values()) == 1


def test_what_cannot_be_compared_is_a_problem(client):
    post(client, batch(columns={"loss": column([0], [2.0])}))
    for runs in ([], ["otter"], ["otter"] * 3):
        query = "&".join(f"runs={run}" for run in runs)
        check_problem(client.get(f"/api/v1/compare?{query}"), 422)
    check_problem(client.get("/api/v1/compare?runs=otter&runs=nobody"), 404)
