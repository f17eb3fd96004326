"""Who is notified of alerts and what came of it: on its own page, and on the card of an alert."""

import time
from contextlib import contextmanager
from types import SimpleNamespace

import httpx
import pytest
from playwright.sync_api import expect

from rankscope.server.storage.access import tokens
from rankscope.server.storage.database.engine import open_engine, writing
from rankscope.server.storage.judgement import notifications
from tests.support.alert_rows import add_run, put_alert
from tests.support.servers.browser import HOW_TO_INSTALL, find_chromium, watched_page
from tests.support.servers.collector import wait_until
from tests.support.servers.receivers import hook
from tests.support.servers.service import Service

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(find_chromium() is None, reason=HOW_TO_INSTALL),
]


@contextmanager
def serving(folder):
    """A server with a finished run; `url`, `engine`, and `add` for targets."""
    with Service(folder) as service:
        engine = open_engine(f"sqlite:///{folder / 'rankscope.db'}")
        add_run(engine, state="finished")
        put_alert(engine, "a", opened_at=2000.0, title="Rank 2 differs")
        put_alert(engine, "b", opened_at=2001.0, title="It follows", parent="a")

        def add(url, **more):
            given = {"name": "ops", "projects": None, "kinds": None, "severity": "info"}
            with writing(engine) as connection:
                # What opened before it is there is not sent.
                return notifications.add_target(connection, url=url, now=3000.0, **(given | more))

        yield SimpleNamespace(url=service.url, engine=engine, add=add)
        engine.dispose()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("server")) as made:
        yield made


@pytest.fixture
def server(served):
    """The server, without targets at first."""
    yield served
    with writing(served.engine) as connection:
        for target in notifications.targets(connection):
            notifications.remove_target(connection, target.id)


def deliver(server, target, alert="a", *, error=""):
    """Notes that an alert was sent to a target, or not; the next attempt is far away."""
    one = notifications.Notification(1, alert, target.id)
    late = time.time() + 5000
    with writing(server.engine) as connection:
        notifications.want(connection, [(alert, target.id)], run=1, due_at=late, now=4000.0)
        if error:
            notifications.failed(connection, one, error=error, again_at=late)
        else:
            notifications.told(connection, one, what="critical", now=4001.0)


@pytest.fixture
def page(browser, server):
    with watched_page(browser, server.url) as watched:
        yield watched.page
        # Distances that a run does not have are missed by the browser, and said on the page.
        watched.complaints = [said for said in watched.complaints if "404" not in said]
        watched.assert_clean()


def row(page, target):
    return page.locator(f'#targets tr[data-target="{target.id}"]')


def test_without_targets_the_page_says_how_to_add_one(page):
    page.goto("/notifications")
    page.wait_for_selector("#how:not([hidden])")
    text = page.inner_text("#how")
    assert "Nobody is notified of alerts yet" in text
    assert "rankscope notify add" in text
    assert page.locator("#listing").is_hidden()


def test_targets_are_listed_with_what_came_of_them(page, server):
    good = server.add(
        "webhook://me:secret@h.example/secret", kinds=["desync.*"], severity="critical"
    )
    bad = server.add("webhook://127.0.0.1:1", name="on call", projects=["vision", "speech"])
    idle = server.add("webhook://127.0.0.1:1", name="idle")
    deliver(server, good)
    deliver(server, bad, error="127.0.0.1:1 answers 500")
    page.goto("/")
    page.get_by_role("link", name="Notifications").click()
    row(page, good).wait_for()
    assert "secret" not in page.inner_text("main")
    said = row(page, good).inner_text()
    for part in ("ops", "webhook://h.example/...", "desync.*, critical", "delivered"):
        assert part in said
    said = row(page, bad).inner_text()
    for part in ("all kinds in vision, speech", "failed", "1 alert not delivered since"):
        assert part in said
    assert "127.0.0.1:1 answers 500" in said
    assert "Next attempt at" in said
    assert "nothing sent yet" in row(page, idle).inner_text()
    assert page.locator("#log tr").count() == 2
    page.get_by_label("only waiting and failed ones").check()
    page.wait_for_function("() => document.querySelectorAll('#log tr').length === 1")
    assert page.url.endswith("?pending=true")
    assert "on call" in page.inner_text("#log")
    page.go_back()
    page.wait_for_function("() => document.querySelectorAll('#log tr').length === 2")
    page.locator("#log a").first.click()
    page.wait_for_url("**/runs/otter#alert-a")


def test_a_test_is_sent_by_a_button_and_its_outcome_is_said(page, server):
    with hook() as receiver:
        target = server.add(f"webhook://127.0.0.1:{receiver.port}/")
        page.goto("/notifications")
        button = row(page, target).get_by_role("button")
        button.focus()
        page.keyboard.press("Enter")
        row(page, target).locator(".tested .is-ok").wait_for()
        assert [body["alerts"][0]["kind"] for body in receiver.bodies] == ["test"]
        # The row is made anew; whoever pressed the button by a key goes on from there.
        assert page.evaluate("document.activeElement.dataset.target") == target.id
        assert "Test delivered to ops" in page.inner_text("#said")
        receiver.answers = 401
        button.click()
        row(page, target).locator(".tested .is-critical").wait_for()
        assert "answers 401" in row(page, target).inner_text()


def test_a_token_that_may_only_read_sends_no_test(browser, tmp_path):
    with serving(tmp_path) as server, hook() as receiver:
        target = server.add(f"webhook://127.0.0.1:{receiver.port}/")
        with writing(server.engine) as connection:
            _, secret = tokens.create(
                connection, name="reader", scopes=("read",), projects=None, now=time.time()
            )
        # A server notices the first token within some seconds.
        wait_until(lambda: httpx.get(f"{server.url}/api/v1/runs").status_code == 401)
        with watched_page(browser, server.url) as watched:
            page = watched.page
            page.set_extra_http_headers({"Authorization": f"Bearer {secret}"})
            page.goto("/notifications")
            row(page, target).get_by_role("button").click()
            row(page, target).locator(".tested .is-warning").wait_for()
            assert "token 'reader' may read" in row(page, target).inner_text()
        assert receiver.taken == []


def test_the_card_of_an_alert_says_who_was_notified(page, server):
    good, bad = server.add("webhook://h.example"), server.add("webhook://h.example", name="boss")
    deliver(server, good)
    deliver(server, bad, error="h.example answers 500")
    for path in ("/runs/otter", "/alerts"):
        page.goto(path)
        part = page.locator("#alert-a [data-part=history]")
        part.locator("summary").click()
        part.locator(f'li[data-target="{bad.id}"]').wait_for()
        entry = part.locator(f'li[data-target="{good.id}"]').inner_text()
        assert entry.startswith("ops delivered at ")
        assert entry.endswith("(critical)")
        entry = part.locator(f'li[data-target="{bad.id}"]').inner_text()
        assert entry.startswith("boss failed once, next attempt at ")
        assert entry.endswith(": h.example answers 500")
    # It stays open as the list is read again, and says what has happened since.
    deliver(server, bad)
    part.locator(f'li[data-target="{bad.id}"]', has_text="boss delivered at").wait_for()
    assert part.evaluate("node => node.open")
    part.get_by_role("link", name="Notification targets").click()
    page.wait_for_url("**/notifications")


def test_the_card_of_an_alert_that_nobody_was_notified_of_says_so(page, server):
    page.goto("/alerts?consequences=true")
    for alert, said in (("a", "No notification of it was sent"), ("b", "follows from another")):
        part = page.locator(f"#alert-{alert} [data-part=history]")
        part.locator("summary").click()
        expect(part).to_contain_text(said)


@pytest.mark.parametrize("some", [True, False])
def test_nothing_sticks_out_at_400_pixels(page, server, some):
    if some:
        target = server.add("webhook://a-host-of-a-very-long-name.example.org/x", name="w" * 250)
        deliver(server, target, error="x" * 300)
    page.set_viewport_size({"width": 400, "height": 900})
    page.goto("/notifications")
    page.wait_for_selector("#how:not([hidden])")
    assert page.evaluate("document.documentElement.scrollWidth") == 400
