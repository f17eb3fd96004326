"""A run that is deleted by REST."""

from sqlalchemy import update

from rankscope.server.storage import schema
from rankscope.server.storage.database.engine import writing
from tests.support.alert_rows import add_run, put_alert
from tests.support.servers.api import check_problem, get


def is_now(app, state):
    with writing(app.state.engine) as connection:
        connection.execute(update(schema.run).values(state=state))


def test_it_is_gone_with_its_alerts(app, client):
    add_run(app.state.engine)
    put_alert(app.state.engine, "a")
    is_now(app, "finished")
    assert client.delete("/api/v1/runs/otter").status_code == 204
    assert get(client, "/runs")["items"] == []
    assert get(client, "/alerts")["items"] == []
    problem = check_problem(client.delete("/api/v1/runs/otter"), 404)
    assert "there is no run 'otter'" in problem["detail"]


def test_one_that_is_running_stays(app, client):
    add_run(app.state.engine)
    put_alert(app.state.engine, "a")
    is_now(app, "running")
    problem = check_problem(client.delete("/api/v1/runs/otter"), 409)
    assert "stop its job first" in problem["detail"]
    assert get(client, "/runs/otter")["id"] == "otter"
    assert len(get(client, "/alerts")["items"]) == 1
