"""`rankscope notify`."""

import json

import pytest

from rankscope.server import cli
from rankscope.server.commands.notify import notify
from rankscope.server.storage.database import migrate
from rankscope.server.storage.database.engine import open_engine, writing
from rankscope.server.storage.judgement import notifications
from tests.support.alert_rows import add_run, put_alert
from tests.support.servers.receivers import Hook, hook


@pytest.fixture
def db(tmp_path):
    return f"sqlite:///{tmp_path / 'test.db'}"


@pytest.fixture
def called(db, capsys):
    """Calls the command; its exit code, and what it prints to stdout and stderr."""

    def call(*arguments):
        try:
            code = notify([*arguments, "--db", db])
        except SystemExit as ended:  # argparse's way
            code = ended.code
        return (code, *capsys.readouterr())

    return call


def items(called, *arguments):
    code, printed, _ = called(*arguments, "--json")
    assert code == cli.OK
    return json.loads(printed)["items"]


def test_add_list_remove(called):
    code, printed, _ = called("list")
    assert (code, printed) == (
        cli.OK,
        "Nobody is told of alerts. `rankscope notify add --help` says how.\n",
    )
    limits = ("--project", "a", "--kind", "desync.*", "--kind", "rank.*", "--severity", "critical")
    code, printed, said = called("add", "webhook://me:secret@h/secret", "--name", "ops", *limits)
    assert code == cli.OK
    assert "(ops) is told of desync.*, rank.* in a, critical from now on" in printed
    assert "rankscope notify test" in said
    assert called("add", "mailto://me:secret@example.org?to=a@example.org")[0] == cli.OK
    first, second = items(called, "list")
    assert first["kinds"] == ["desync.*", "rank.*"]
    assert first["url"] == "webhook://h/..."
    assert second["name"].startswith("mailto://me:****@example.org")
    printed = called("list")[1]
    assert "secret" not in printed
    assert called("remove", first["id"])[0] == cli.OK
    assert called("remove", first["id"])[0] == cli.FAILED
    assert [t["id"] for t in items(called, "list")] == [second["id"]]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("add", "foo://x"), "no address of a service that is known"),
        (("add", "x" * 5000), "the most are 4,000"),
        (("add", "webhook://h", "--name", " "), "1 to 250 printable characters"),
        (("add", "webhook://h", "--severity", "worst"), "invalid choice: 'worst'"),
        ((), "add|list|remove|test|log"),
    ],
)
def test_what_cannot_be_is_refused(called, arguments, said):
    code, _, error = called(*arguments)
    assert code == cli.USAGE
    assert said in error


def test_a_test_message_and_what_came_of_it(called):
    receiver = Hook()
    called("add", f"webhook://127.0.0.1:{receiver.port}/", "--name", "ops")
    [target] = items(called, "list")
    code, _, said = called("test", target["id"])
    assert code == cli.FAILED
    assert "ops: 127.0.0.1" in said
    assert "does not answer" in said
    with hook() as other:
        called("add", f"webhook://127.0.0.1:{other.port}/", "--name", "there")
        there = items(called, "list")[1]["id"]
        assert called("test", there)[:2] == (cli.OK, "there has taken a test message\n")
        [message] = other.bodies
    assert message["title"] == "INFO in test: This is a test: nothing is wrong"
    assert called("test", "nobody")[0] == cli.FAILED


def test_the_log_says_what_was_told_what_waits_and_what_failed(called, db):
    engine = open_engine(db)
    migrate.upgrade(engine)
    add_run(engine)
    put_alert(engine, "a", title="Ranks drift")
    with writing(engine) as connection:
        t = notifications.add_target(
            connection,
            name="ops",
            url="webhook://h",
            projects=None,
            kinds=None,
            severity="info",
            now=0.0,
        )
        notifications.want(connection, [("a", t.id)], run=1, due_at=10.0, now=5.0)
    assert "waits" in called("log")[1]
    with writing(engine) as connection:
        [row] = notifications.due(connection, now=20.0)
        notifications.failed(connection, row, error="away", again_at=30.0)
    [entry] = items(called, "log", "--pending")
    assert (entry["failures"], entry["error"], entry["waits"]) == (1, "away", True)
    assert (entry["run"], entry["title"], entry["name"]) == ("otter", "Ranks drift", "ops")
    assert "failed 1 times: away" in called("log", "otter")[1]
    with writing(engine) as connection:
        notifications.told(connection, row, what="warning", now=40.0)
    assert items(called, "log", "--pending") == []
    printed = called("log")[1]
    assert "1970-01-01T00:00:40  otter  ops  warning  Ranks drift" in printed
    assert called("log", "nobody")[0] == cli.FAILED
    engine.dispose()
