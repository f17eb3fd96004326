"""Real receivers: SMTP, a webhook, what an Alertmanager takes."""

import base64
import sys
from datetime import datetime

import pytest

from rankscope.server.demo.processes import free_port
from rankscope.server.notifications.message import Message, News, example
from rankscope.server.notifications.transports import (
    BadTarget,
    NotDelivered,
    check,
    deliver,
    masked,
)
from tests.support.incidents import alert
from tests.support.servers.receivers import hook, mailbox

MESSAGE = example("http://localhost/runs/test", 1000.0)


def test_a_mail_arrives():
    with mailbox() as (port, mails):
        deliver(f"mailto://127.0.0.1:{port}?from=a@example.org&to=b@example.org", MESSAGE)
    [mail] = mails
    assert mail["Subject"] == MESSAGE.title
    assert mail["To"] == "b@example.org"
    body = mail.get_body(("plain",)).get_content()
    assert "Cause: Somebody asked" in body
    assert "http://localhost/runs/test" in body


def test_a_webhook_gets_json_and_the_name_that_is_in_its_address():
    with hook() as receiver:
        deliver(f"webhook://me:a%40b@127.0.0.1:{receiver.port}/a/b?c=d", MESSAGE)
    [(path, body)] = receiver.taken
    assert (path, body) == ("/a/b?c=d", MESSAGE.json)
    [headers] = receiver.headers
    assert base64.b64decode(headers["authorization"].removeprefix("Basic ")) == b"me:a@b"
    assert headers["idempotency-key"] == MESSAGE.id


@pytest.mark.parametrize("what", ["opened", "raised", "still", "resolved"])
def test_an_alertmanager_is_told_until_when(what):
    over = what == "resolved"
    found = alert(
        "loss.spike",
        3,
        severity="critical",
        opened_at=100.0,
        state="resolved" if over else "open",
        resolved_at=900.0 if over else None,
    )
    message = Message("otter", "p", "http://h/runs/otter", (News(found, what),))
    with hook() as receiver:
        deliver(f"alertmanager://127.0.0.1:{receiver.port}", message, now=1000.0)
    [(path, entries)] = receiver.taken
    assert path == "/api/v2/alerts"
    ends = {
        e["labels"]["severity"]: datetime.fromisoformat(e["endsAt"]).timestamp() for e in entries
    }
    assert ends["critical"] == (900.0 if over else 1600.0)
    # With another severity it is another alert there: those of before end.
    assert ends == {"critical": ends["critical"]} | (
        {"info": 1000.0, "warning": 1000.0} if what == "raised" else {}
    )
    [entry] = [e for e in entries if e["labels"]["severity"] == "critical"]
    assert entry["labels"]["alertname"] == "loss.spike"
    assert entry["labels"]["run"] == "otter"
    assert entry["annotations"]["summary"] == found.title
    assert datetime.fromisoformat(entry["startsAt"]).timestamp() == 100.0


@pytest.mark.parametrize("scheme", ["webhook", "alertmanager", "json", "mailto"])
def test_who_is_not_there_is_said_to_be(scheme):
    with pytest.raises(NotDelivered) as why:
        deliver(
            f"{scheme}://a:secret@127.0.0.1:{free_port()}/path?to=a@b.org&from=a@b.org", MESSAGE
        )
    assert str(why.value)
    assert "secret" not in str(why.value)


@pytest.mark.parametrize("scheme", ["webhook", "json"])
def test_who_refuses_is_said_to(scheme):
    with hook() as receiver:
        receiver.answers = 503
        with pytest.raises(NotDelivered, match="503"):
            deliver(f"{scheme}://127.0.0.1:{receiver.port}/", MESSAGE)
    assert receiver.refused


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("nothing", "an address such as"),
        ("://x", "an address such as"),
        ("foo://x", "no address of a service that is known"),
        ("webhook:///path", "names no host"),
        ("alertmanager://host:99999", "ut of range"),
        ("slack://secret", "slack://"),
        ("mailto://", "mailto://"),
    ],
)
def test_an_address_that_is_none_is_refused_without_its_secrets(url, said):
    with pytest.raises(BadTarget, match=said) as why:
        check(url)
    assert "secret" not in str(why.value)


def test_without_apprise_webhooks_work_and_the_others_say_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "apprise", None)
    url = "mailto://me:secret@h.org?to=x@y.org"
    for call in (check, lambda url: deliver(url, MESSAGE)):
        with pytest.raises(BadTarget, match="rankscope\\[notify\\]"):
            call(url)
    assert masked(url) == "mailto://..."
    with hook() as receiver:
        deliver(f"webhook://127.0.0.1:{receiver.port}/", MESSAGE)
        assert receiver.taken


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("webhook://me:secret@h:1/secret?k=secret", "webhook://h:1/..."),
        ("alertmanagers://h", "alertmanagers://h"),
        ("mailto://me:secret@h.org?to=x@y.org", "mailto://"),
        ("slack://T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazsecretXrIdevi7F/", "slack://"),
    ],
)
def test_an_address_is_shown_without_its_secrets(url, shown):
    check(url)
    assert masked(url).startswith(shown)
    assert "secret" not in masked(url)
