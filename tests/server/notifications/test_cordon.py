"""Hooks that take a host out of service: real programs and real receivers."""

import json
import os
import time

import pytest
from sqlalchemy import insert

from rankscope.server.notifications import cordon, transports
from rankscope.server.notifications.message import Message, News, example
from rankscope.server.notifications.transports import BadTarget, NotDelivered
from rankscope.server.settings import Settings
from rankscope.server.storage import schema
from rankscope.server.storage.database.engine import writing
from tests.server.notifications.test_notifier import Telling, url
from tests.support.alert_rows import add_run
from tests.support.incidents import alert
from tests.support.servers.receivers import hook

HOSTS = {0: "node-1", 1: "node-1", 2: "node-2", 3: "node-2"}
ECC = {"gpus": {"2": {"gpu_ecc_uncorrected": 3.0, "throttles": []}}}


@pytest.mark.parametrize(
    ("kind", "ranks", "evidence", "chosen", "found"),
    [
        ("rank.straggler", (2,), {}, False, {"node-2": [2]}),
        ("rank.silent", (2, 3), {}, False, {"node-2": [2, 3]}),
        ("rank.straggler", (1, 2), {}, False, {"node-1": [1], "node-2": [2]}),
        # All but one, and all: of a machine that says nothing.
        ("rank.silent", (1, 2, 3), {}, False, {}),
        ("rank.silent", (0, 1, 2, 3), {}, False, {}),
        # Mostly of the program, unless the device reports errors, or somebody wants it so.
        ("rank.failed", (2,), {}, False, {}),
        ("loss.spike", (2,), {}, False, {}),
        ("desync.parameters", (2,), ECC, False, {"node-2": [2]}),
        ("desync.parameters", (3,), ECC, False, {}),
        ("desync.parameters", (3,), {}, True, {"node-2": [3]}),
        # Never heard of: there is no host.
        ("rank.silent", (7,), {}, False, {}),
        ("rank.straggler", (), {}, False, {}),
    ],
)
def test_which_host_an_alert_accuses(kind, ranks, evidence, chosen, found):
    given = alert(kind, 10, ranks=ranks, evidence=evidence)
    assert cordon.accused(given, HOSTS, chosen=chosen) == found


@pytest.mark.parametrize("host", ["-rf", "a b", "$(reboot)", "a;b", "", "x" * 300, "a\nb"])
def test_what_is_no_name_of_a_host_goes_to_no_program(host):
    given = alert("rank.straggler", 10, ranks=(2,))
    assert cordon.accused(given, HOSTS | {2: host}, chosen=False) == {}


@pytest.fixture
def program(tmp_path):
    """Writes a script that a server may call; the settings that allow it."""

    def write(text):
        path = tmp_path / "drain.sh"
        path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        path.chmod(0o755)
        return {"drain": str(path)}

    return write


def message(**more):
    found = alert("rank.straggler", 10, ranks=(2,), evidence={"seconds": "NaN"}, **more)
    news = (News(found, "opened"),)
    return Message("otter's; run", "p", "http://h/runs/otter", news, {"node-2": [2]})


def test_a_command_gets_host_rank_and_evidence(program, tmp_path):
    commands = program('cat > "$0.json"; env | grep ^RANKSCOPE_ > "$0.env"; echo fine >&2')
    transports.deliver("cordon-command://drain", message(id="a1"), commands=commands)
    given = json.loads((tmp_path / "drain.sh.json").read_text())
    assert given["hosts"] == [{"host": "node-2", "ranks": [2]}]
    assert (given["run"], given["test"]) == ("otter's; run", False)
    assert given["alert"]["kind"] == "rank.straggler"
    assert given["alert"]["evidence"] == {"seconds": "NaN"}
    said = dict(line.split("=", 1) for line in (tmp_path / "drain.sh.env").read_text().splitlines())
    expected = {
        "RANKSCOPE_HOSTS": "node-2",
        "RANKSCOPE_RANKS": "2",
        "RANKSCOPE_KIND": "rank.straggler",
        "RANKSCOPE_SEVERITY": "warning",
        "RANKSCOPE_ALERT": "a1",
        "RANKSCOPE_URL": "http://h/runs/otter",
    }
    assert {name: said[name] for name in expected} == expected
    # Names that trainers choose stand in the JSON alone.
    assert not any("otter's" in value for value in said.values())


def test_a_webhook_gets_the_same():
    with hook() as receiver:
        transports.deliver(f"cordon-webhook://127.0.0.1:{receiver.port}/drain", message())
    [(path, given)] = receiver.taken
    assert path == "/drain"
    assert given == cordon.payload(message())
    assert receiver.headers[0]["idempotency-key"] == message().id


def test_a_test_names_no_host(program, tmp_path):
    commands = program('cat > "$0.json"; echo "<$RANKSCOPE_HOSTS>$RANKSCOPE_TEST" > "$0.out"')
    transports.deliver("cordon-command://drain", example("", 0.0), commands=commands)
    assert (tmp_path / "drain.sh.out").read_text() == "<>1\n"
    given = json.loads((tmp_path / "drain.sh.json").read_text())
    assert (given["hosts"], given["test"]) == ([], True)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("echo first >&2; echo no such node >&2; exit 3", "drain ended with 3 first\nno such node"),
        ("kill -9 $$", "drain was ended by signal 9"),
        # It reads nothing of what it is given, and says more than a pipe holds.
        ("yes | head -c 300000 >&2; exit 1", "drain ended with 1 y\ny\n"),
    ],
)
def test_what_went_wrong_is_said(program, text, said):
    with pytest.raises(NotDelivered) as raised:
        transports.deliver("cordon-command://drain", message(), commands=program(text))
    assert str(raised.value).startswith(said)
    assert len(str(raised.value)) < 400


def test_a_command_that_hangs_is_ended_with_its_children(program, tmp_path, monkeypatch):
    monkeypatch.setattr(cordon, "TIMEOUT_S", 1.0)
    commands = program('sleep 600 & echo $! > "$0.pid"; exec 2>&-; wait')
    with pytest.raises(NotDelivered, match="drain was ended after 1 s"):
        transports.deliver("cordon-command://drain", message(), commands=commands)
    child = int((tmp_path / "drain.sh.pid").read_text())
    deadline = time.monotonic() + 30
    while _runs(child):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _runs(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            # A zombie is no process any more.
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_what_a_command_leaves_running_is_not_waited_for(program, tmp_path):
    commands = program('sleep 60 & echo $! > "$0.pid"')
    began = time.monotonic()
    transports.deliver("cordon-command://drain", message(), commands=commands)
    assert time.monotonic() - began < cordon.TIMEOUT_S
    child = int((tmp_path / "drain.sh.pid").read_text())
    assert _runs(child)
    os.kill(child, 9)


def test_a_target_alone_executes_nothing(program):
    program("exit 0")
    with pytest.raises(NotDelivered, match="--cordon-command drain=PROGRAM, and this process was"):
        transports.deliver("cordon-command://drain", message())


@pytest.mark.parametrize(
    ("commands", "said"),
    [
        ({"drain": "drain.sh"}, "no full path of a program"),
        ({"drain": "/nowhere/drain.sh"}, "no full path of a program"),
        ({"drain": os.devnull}, "no full path of a program"),
        ({"../drain": "/bin/true"}, "is no name of a command"),
    ],
)
def test_what_cannot_be_called_stops_the_server_at_its_start(commands, said):
    with pytest.raises(ValueError, match=said):
        Settings(database="sqlite://", cordon_commands=commands)


def test_a_program_that_may_not_be_executed_stops_it_too(tmp_path):
    path = tmp_path / "drain.sh"
    path.touch()
    with pytest.raises(ValueError, match="may not be executed"):
        Settings(database="sqlite://", cordon_commands={"drain": str(path)})


@pytest.mark.parametrize(
    "address", ["cordon-command:///bin/sh", "cordon-command://a/b", "cordon-webhook://"]
)
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(BadTarget):
        transports.check(address)


def test_addresses_are_shown_without_secrets():
    assert transports.masked("cordon-command://drain") == "cordon-command://drain"
    assert transports.masked("cordon-webhook://me:x@h/secret") == "cordon-webhook://h/..."


# ------------------------------------------------------------------------- by way of the notifier


def _attempt(rank, number, host):
    """What a database knows of a rank that was started."""
    steps = {"first_seq": 0, "end_seq": 0, "last_seq": 0, "last_step": 9, "through_step": 9}
    times = dict.fromkeys(("sent_at", "started_at", "first_seen", "last_seen"), 1000.0)
    about = {"world_size": 4, "state": "running", "dropped": {}, "tables": {}}
    who = {"run": 1, "rank": rank, "session": f"{rank}.{number}", "attempt": number, "host": host}
    return who | steps | times | about


@pytest.fixture
def telling(engine):
    add_run(engine)
    with writing(engine) as connection:
        connection.execute(
            insert(schema.attempt),
            [
                _attempt(rank, number, host if number or rank != 2 else "node-9")
                for rank, host in HOSTS.items()
                for number in (0, 1)
            ],
        )
    made = Telling(engine)
    yield made
    made.notifier.stop()


def test_it_is_called_once_an_alert_with_the_host_where_the_rank_is_now(telling):
    with hook() as receiver:
        telling.target(url(receiver, "cordon-webhook"))
        telling.put("a", kind="rank.straggler", ranks=(2,), severity="warning")
        telling.put("b", kind="rank.silent", ranks=(0,), severity="critical")
        telling.put("c", kind="loss.spike", ranks=(1,), severity="critical")
        telling.put("d", kind="rank.straggler", ranks=(1,), severity="info")
        telling.round()
        telling.round(after=11)
        called = {body["alert"]["id"]: body["hosts"] for body in receiver.bodies}
        assert called == {
            "a": [{"host": "node-2", "ranks": [2]}],
            "b": [{"host": "node-1", "ranks": [0]}],
        }
        # One call an alert, although both were due at once.
        assert len(receiver.taken) == 2
        # It grows worse, is over, and comes again: the host was taken out of service once.
        more = {"kind": "rank.straggler", "ranks": (2,)}
        for state in ("open", "resolved", "open"):
            over = 1300.0 if state == "resolved" else None
            telling.put("a", severity="critical", state=state, resolved_at=over, **more)
            telling.round(after=100)
            telling.round(after=100)
        assert len(receiver.taken) == 2
    assert telling.health.report()["counts"]["notifications"] == 2


def test_a_receiver_that_fails_is_called_again(telling):
    with hook() as receiver:
        receiver.answers = 503
        telling.target(url(receiver, "cordon-webhook"))
        telling.put("a", kind="rank.straggler", ranks=(2,))
        telling.round()
        telling.round(after=11)
        [row] = telling.rows.values()
        assert (row.failures, row.told) == (1, "")
        assert "answers 503" in row.error
        receiver.answers = 200
        telling.round(after=11)
        assert [body["alert"]["id"] for body in receiver.bodies] == ["a"]
        [row] = telling.rows.values()
        assert (row.error, row.told) == ("", "warning")


def test_what_is_over_before_it_is_called_cordons_nothing(telling):
    with hook() as receiver:
        telling.target(url(receiver, "cordon-webhook"))
        telling.put("a", kind="rank.straggler", ranks=(2,))
        telling.round()
        telling.put("a", kind="rank.straggler", ranks=(2,), state="resolved", resolved_at=1001.0)
        telling.round(after=11)
        assert receiver.taken == []


def test_kinds_that_were_asked_for_stand_for_those_of_a_machine(telling):
    with hook() as receiver:
        telling.target(url(receiver, "cordon-webhook"), kinds=["desync.*"])
        telling.put("a", kind="rank.straggler", ranks=(2,))
        telling.put("b", kind="desync.parameters", ranks=(3,))
        telling.round()
        telling.round(after=11)
        assert [body["alert"]["id"] for body in receiver.bodies] == ["b"]
