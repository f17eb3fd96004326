"""Alerts of a run in a database, as an evaluation leaves them there."""

from sqlalchemy import delete, insert

from rankscope.server.storage import schema
from rankscope.server.storage.database.engine import writing
from rankscope.server.storage.judgement import alerts
from tests.support.incidents import alert


def add_run(engine, key=1, run="otter", project="default", now=1000.0, state="running"):
    with writing(engine) as connection:
        connection.execute(insert(schema.run_name).values(key=key, id=run))
        connection.execute(
            insert(schema.run).values(
                key=key,
                id=run,
                project=project,
                state=state,
                world_size=4,
                started_at=now,
                last_seen_at=now,
                last_step=100,
                config={},
            )
        )


def put_alert(engine, name="a", run=1, kind="desync.parameters", opened_at=1000.0, **more):
    """Stores an alert in place of the one of that name."""
    made = alert(kind, 10, **({"id": name, "opened_at": opened_at, "ranks": (2,)} | more))
    a = schema.alert
    with writing(engine) as connection:
        connection.execute(delete(a).where(a.c.run == run, a.c.id == name))
        connection.execute(insert(a).values(alerts.alert_to_row(made, run)))
    return made
