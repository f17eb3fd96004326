"""Alerts in a database reach real receivers, once when they open and once when they end."""

import threading
import time
from concurrent.futures import wait

import pytest
from sqlalchemy import update

from rankscope.server.health import Health
from rankscope.server.notifications import notifier, transports
from rankscope.server.notifications.notifier import Notifier
from rankscope.server.storage import schema
from rankscope.server.storage.database.engine import reading, writing
from rankscope.server.storage.judgement import alerts, notifications
from tests.support.alert_rows import add_run, put_alert
from tests.support.servers.receivers import Collector, Hook, hook


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Telling:
    """A notifier whose rounds are taken one by one, at times of one's own."""

    def __init__(self, engine, deliver=transports.deliver):
        self.engine = engine
        self.clock = Clock()
        self.health = Health()
        self.notifier = self.another(deliver)

    def another(self, deliver=transports.deliver):
        return Notifier(
            self.engine,
            address="http://rankscope.example",
            health=self.health,
            deliver=deliver,
            now=self.clock,
        )

    def target(self, url, **more):
        given = {"name": "ops", "projects": None, "kinds": None, "severity": "warning"}
        with writing(self.engine) as connection:
            made = notifications.add_target(connection, url=url, now=0.0, **(given | more))
        return made

    def put(self, name="a", **more):
        put_alert(self.engine, name, **more)
        self.notifier.changed("otter")

    def round(self, after=0.0, notifier=None):
        self.clock.now += after
        wait((notifier or self.notifier).round(), 30)

    @property
    def rows(self):
        with reading(self.engine) as connection:
            return notifications.of_run(connection, run=1)


@pytest.fixture
def telling(engine):
    add_run(engine)
    made = Telling(engine)
    yield made
    made.notifier.stop()


def told(receiver):
    return [(a["id"], a["what"]) for body in receiver.bodies for a in body["alerts"]]


def url(receiver, scheme="webhook"):
    return f"{scheme}://127.0.0.1:{receiver.port}/"


def test_an_alert_is_told_when_it_opens_and_when_it_ends(telling):
    with hook() as receiver:
        telling.target(url(receiver))
        telling.put(severity="critical")
        telling.round()
        # What follows from it is to join it first.
        assert receiver.taken == []
        telling.round(after=11)
        assert told(receiver) == [("a", "opened")]
        assert receiver.bodies[0]["url"] == "http://rankscope.example/runs/otter"
        for _ in range(3):
            telling.put(severity="critical")
            telling.round(after=100)
        assert len(receiver.taken) == 1
        telling.put(severity="critical", state="resolved", resolved_at=1300.0)
        telling.round()
        telling.round(after=11)
        assert told(receiver) == [("a", "opened"), ("a", "resolved")]
        telling.round(after=10_000)
        assert len(receiver.taken) == 2
    assert telling.health.report()["counts"]["notifications"] == 2


def test_what_opens_together_is_one_message_and_what_follows_comes_a_minute_later(telling):
    with hook() as receiver:
        telling.target(url(receiver))
        telling.put("a")
        telling.put("b")
        telling.round()
        telling.put("c", parent="a")
        telling.round(after=11)
        assert sorted(told(receiver)) == [("a", "opened"), ("b", "opened")]
        assert len(receiver.taken) == 1
        telling.put("d")
        telling.round(after=1)
        telling.put("e")
        telling.round(after=20)
        assert len(receiver.taken) == 1
        telling.round(after=60)
        assert sorted(told(receiver))[2:] == [("d", "opened"), ("e", "opened")]
        assert len(receiver.taken) == 2


def test_one_that_turns_out_to_follow_from_another_is_not_told(telling):
    with hook() as receiver:
        telling.target(url(receiver))
        telling.put("a")
        telling.round()
        telling.put("a", parent="b")
        telling.round(after=11)
        assert receiver.taken == []
        assert _row(telling).due_at is None


def test_a_receiver_that_is_away_loses_nothing(telling):
    receiver = Hook()
    telling.target(url(receiver))
    telling.put("a")
    telling.round()
    telling.round(after=11)
    [row] = telling.rows.values()
    assert row.failures == 1
    assert "does not answer" in row.error
    # It is asked less and less often.
    telling.round(after=6)
    telling.round(after=5)
    assert _row(telling).failures == 2
    telling.put("b")
    receiver.come()
    try:
        receiver.answers = 500
        telling.round(after=20)
        telling.round(after=20)
        assert receiver.taken == []
        assert receiver.refused
        receiver.answers = 200
        telling.round(after=200)
        assert sorted(told(receiver)) == [("a", "opened"), ("b", "opened")]
        telling.round(after=10_000)
        assert len(told(receiver)) == 2
    finally:
        receiver.go()
    assert telling.health.report()["counts"]["notification_failures"] >= 3


def test_a_collector_that_is_away_gets_each_record_once_when_it_is_back(telling):
    receiver = Collector().come()
    try:
        telling.target(url(receiver, "otlp"))
        telling.put("a")
        telling.round()
        telling.round(after=11)
        receiver.go()
        telling.put("b")
        telling.round()
        # It opens and is over while nobody listens; the other one only opens.
        telling.put("a", state="resolved", resolved_at=1100.0)
        for _ in range(3):
            telling.round(after=100)
        assert _row(telling, "b").failures > 0
        receiver.come()
        for _ in range(4):
            telling.round(after=1000)
    finally:
        receiver.go()
    events = [(about["rankscope.alert.id"], r.event_name) for r, about in receiver.records]
    assert sorted(events) == [
        ("a", "rankscope.alert.opened"),
        ("a", "rankscope.alert.resolved"),
        ("b", "rankscope.alert.opened"),
    ]


def _row(telling, alert="a"):
    [row] = [row for (name, _), row in telling.rows.items() if name == alert]
    return row


def test_what_is_over_before_it_could_be_told_is_told_once(telling):
    with hook() as receiver:
        telling.target(url(receiver))
        telling.put("a")
        telling.round()
        telling.put("a", state="resolved", resolved_at=1001.0)
        telling.round(after=11)
        assert told(receiver) == [("a", "resolved")]
        telling.round(after=100)
        assert len(receiver.taken) == 1


def test_it_is_given_up_after_days_and_not_begun_again(telling):
    telling.target(url(Hook()))
    telling.put("a")
    telling.round()
    for _ in range(6):
        telling.round(after=86400)
    assert _row(telling).due_at is None
    assert _row(telling).error
    failures = _row(telling).failures
    telling.put("a")
    telling.round(after=100)
    telling.round(after=100)
    assert _row(telling).failures == failures


def test_who_hangs_holds_up_nobody(engine):
    add_run(engine)
    hanging = threading.Event()

    def deliver(address, message):
        if "slow" in address:
            assert hanging.wait(30)
        transports.deliver(address, message)

    telling = Telling(engine, deliver)
    with hook() as receiver:
        telling.target(f"webhook://127.0.0.1:{receiver.port}/slow")
        telling.target(f"webhook://127.0.0.1:{receiver.port}/quick")
        telling.put("a")
        telling.notifier.round()
        telling.clock.now += 11
        telling.notifier.round()
        deadline = time.monotonic() + 30
        while not receiver.taken:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert [path for path, _ in receiver.taken] == ["/quick"]
        # It is not called again meanwhile.
        telling.clock.now += 1000
        under_way = telling.notifier.round()
        hanging.set()
        wait(under_way, 30)
        assert sorted(path for path, _ in receiver.taken) == ["/quick", "/slow"]
    telling.notifier.stop()


def test_two_servers_tell_it_once(telling):
    with hook() as receiver:
        telling.target(url(receiver))
        telling.put("a")
        others = [telling.another() for _ in range(4)]
        for one in others:
            telling.round(notifier=one)
        telling.clock.now += 11
        threads = [threading.Thread(target=telling.round, kwargs={"notifier": n}) for n in others]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert told(receiver) == [("a", "opened")]
        for one in others:
            one.stop()


def test_one_that_dies_while_it_tells_is_replaced(telling):
    with hook() as receiver:
        made = telling.target(url(receiver))
        telling.put("a")
        telling.round()
        telling.clock.now += 11
        with writing(telling.engine) as connection:
            [due] = notifications.due(connection, now=telling.clock.now)
            assert due.target == made.id
            assert notifications.claim(connection, due, until=telling.clock.now + 120)
            assert not notifications.claim(connection, due, until=telling.clock.now + 120)
        another = telling.another()
        telling.round(notifier=another)
        assert receiver.taken == []
        telling.round(after=121, notifier=another)
        assert told(receiver) == [("a", "opened")]
        another.stop()


def test_what_happened_while_no_server_ran_is_told(telling):
    with hook() as receiver:
        telling.target(url(receiver))
        put_alert(telling.engine, "a")
        another = telling.another()
        telling.round(notifier=another)
        telling.round(after=11, notifier=another)
        assert told(receiver) == [("a", "opened")]
        another.stop()


def test_silences_and_acknowledgements_keep_it_quiet(telling):
    with hook() as receiver:
        telling.target(url(receiver))
        given = alerts.Silence("s", "otter", "loss.spike", 0.0, None, "me", "known")
        with writing(telling.engine) as connection:
            alerts.add_silence(connection, run=1, silence=given)
        telling.put("a", kind="loss.spike")
        telling.put("b")
        telling.round()
        # Somebody is quicker than the message.
        with writing(telling.engine) as connection:
            known = alerts.Acknowledgement("me", "", 1000.0, None)
            alerts.acknowledge(connection, run=1, alert_id="b", given=known)
        telling.round(after=11)
        assert receiver.taken == []


def test_a_higher_severity_is_told_again(telling):
    with hook() as receiver:
        telling.target(url(receiver))
        telling.put("a", severity="warning")
        telling.round()
        telling.round(after=11)
        # A root is as grave as the worst that follows from it.
        put_alert(telling.engine, "b", severity="critical", parent="a")
        telling.notifier.changed("otter")
        telling.round()
        telling.round(after=61)
        assert told(receiver) == [("a", "opened"), ("a", "raised")]
        assert receiver.bodies[1]["severity"] == "critical"


def test_each_target_hears_of_what_it_asked_for(telling):
    add_run(telling.engine, 2, "heron", "text")
    with hook() as receiver:
        base = url(receiver)
        telling.target(base + "critical", severity="critical")
        telling.target(base + "desync", kinds=["desync.*"])
        telling.target(base + "text", projects=["text"])
        telling.put("a", kind="loss.spike")
        put_alert(telling.engine, "b", run=2, severity="critical")
        telling.notifier.changed("heron")
        telling.round()
        telling.round(after=11)
        heard = sorted((path, body["run"]) for path, body in receiver.taken)
        assert heard == [("/critical", "heron"), ("/desync", "heron"), ("/text", "heron")]


def test_an_alertmanager_is_reminded_until_it_is_over(telling):
    with hook() as receiver:
        telling.target(url(receiver, "alertmanager"))
        telling.put("a", severity="critical")
        telling.round()
        telling.round(after=11)
        for _ in range(3):
            telling.round(after=205)
        assert len(receiver.taken) == 4
        telling.put("a", severity="critical", state="resolved", resolved_at=1700.0)
        telling.round()
        # It does not wait for the next reminder.
        telling.round(after=61)
        assert len(receiver.taken) == 5
        assert receiver.bodies[-1][0]["endsAt"].startswith("1970-01-01T00:28:20")
        telling.round(after=10_000)
        assert len(receiver.taken) == 5


def test_a_target_that_is_removed_hears_nothing_more(telling):
    with hook() as receiver:
        made = telling.target(url(receiver))
        telling.put("a")
        telling.round()
        with writing(telling.engine) as connection:
            assert notifications.remove_target(connection, made.id)
            assert not notifications.remove_target(connection, made.id)
        telling.round(after=11)
        assert receiver.taken == []
        assert telling.rows == {}


def test_a_run_that_is_deleted_meanwhile_is_no_news(telling):
    with hook() as receiver:
        telling.target(url(receiver))
        telling.put("a")
        telling.round()
        with writing(telling.engine) as connection:
            connection.execute(update(schema.notification).values(run=77))
        telling.round(after=11)
        assert receiver.taken == []


def test_a_run_that_cannot_be_read_stops_no_other(telling, monkeypatch):
    add_run(telling.engine, 2, "heron")
    roots = alerts.roots

    def spoilt(connection, *, run, run_id):
        if run_id == "heron":
            raise ValueError("what is stored of it makes no sense")
        return roots(connection, run=run, run_id=run_id)

    monkeypatch.setattr(alerts, "roots", spoilt)
    with hook() as receiver:
        telling.target(url(receiver))
        telling.notifier.changed("heron")
        telling.put("a")
        telling.round()
        telling.round(after=11)
        assert told(receiver) == [("a", "opened")]
    assert telling.health.report()["counts"]["notification_failures"] == 1


def test_a_run_that_cannot_be_told_stops_no_other(telling, monkeypatch):
    add_run(telling.engine, 2, "heron")
    with hook() as receiver:
        telling.target(url(receiver))
        put_alert(telling.engine, "b", run=2)
        telling.notifier.changed("heron")
        telling.put("a")
        telling.round()

        def spoilt(base, run):
            if run == "heron":
                raise ValueError("no such page")
            return f"{base}/{run}"

        monkeypatch.setattr(notifier, "link_to", spoilt)
        telling.round(after=11)
        assert told(receiver) == [("a", "opened")]
        monkeypatch.undo()
        telling.round(after=121)
        assert told(receiver) == [("a", "opened"), ("b", "opened")]


def test_what_changes_nothing_writes_nothing(telling, monkeypatch):
    telling.target(url(Hook()))
    telling.put("a", severity="info")
    telling.round()
    telling.put("a", severity="info")

    def none(engine):
        raise AssertionError("batches wait for this")

    monkeypatch.setattr(notifier, "writing", none)
    telling.round(after=11)
    assert telling.rows == {}


def test_the_thread_tells_by_itself(engine):
    add_run(engine, now=time.time())
    telling = Notifier(engine, address="http://h", first_wait=0.0)
    with hook() as receiver:
        Telling(engine).target(url(receiver))
        telling.start()
        put_alert(engine, "a", opened_at=time.time())
        telling.changed("otter")
        deadline = time.monotonic() + 60
        while not receiver.taken:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        telling.stop()
        assert told(receiver) == [("a", "opened")]
