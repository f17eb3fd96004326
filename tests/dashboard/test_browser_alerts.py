"""The alerts of all runs: found by a filter that the server applies and the address has."""

from urllib.parse import parse_qsl, urlsplit

import pytest

from rankscope.server.storage.database.engine import open_engine
from tests.support.alert_rows import add_run, put_alert
from tests.support.servers.browser import HOW_TO_INSTALL, find_chromium, watched_page
from tests.support.servers.service import Service

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(find_chromium() is None, reason=HOW_TO_INSTALL),
]

EVIDENCE = {
    "relative": None,
    "value": "NaN",
    "a_step": 1234567,
    "of_a_loss": 12345678901234567890.0,
    "also": 123456789012.3,
    "several": [1 / 14, None, 3],
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    with Service(folder) as service:
        engine = open_engine(f"sqlite:///{folder / 'rankscope.db'}")
        # Over: nobody judges them again.
        add_run(engine, 1, "otter", "vision", state="finished")
        add_run(engine, 2, "seal", "speech", state="finished")
        put_alert(engine, "a", 1, tensors=("conv1.weight",), severity="critical")
        put_alert(engine, "b", 1, "rank.loss_outlier", 1001.0, parent="a", tensors=("fc.bias",))
        for n in range(120):
            put_alert(
                engine,
                f"m{n:03}",
                2,
                "loss.spike",
                2000.0 + n,
                severity="warning",
                ranks=(n % 40,),
                state="open" if n % 2 else "resolved",
                title=f"Spike number {n}",
                evidence=EVIDENCE if n == 119 else {},
            )
        engine.dispose()
        yield service.url


@pytest.fixture
def open_page(browser, server):
    """Opens one page and, at the end, fails where it complained or reached for another origin."""
    with watched_page(browser, server) as watched:

        def open_page(path, **size):
            if size:
                watched.page.set_viewport_size(size)
            watched.page.goto(path)
            return watched.page

        yield open_page
        # A filter that is refused is reported on the page, and by the browser, too.
        watched.complaints = [said for said in watched.complaints if "422" not in said]
        watched.assert_clean()


def address(page):
    return dict(parse_qsl(urlsplit(page.url).query))


def wait_for_alerts(page, number):
    page.wait_for_function("(n) => document.querySelectorAll('.alert').length === n", arg=number)


def test_each_filter_is_applied_by_the_server_and_stands_in_the_address(open_page):
    page = open_page("/alerts")
    wait_for_alerts(page, 50)
    # Of none of the alerts that the first page of the list has.
    with page.expect_request(lambda request: "q=OTTER" in request.url):
        page.locator("#filter").fill("OTTER conv1")
    wait_for_alerts(page, 1)
    assert address(page) == {"q": "OTTER conv1"}
    page.locator("#filter").fill("")
    wait_for_alerts(page, 50)
    page.wait_for_selector("#project option[value=vision]", state="attached")
    for name, value, left in (
        ("severity", "critical", 1),
        ("project", "vision", 1),
        ("state", "open", 1),
        ("kind", "desync.*", 1),
    ):
        page.select_option(f"#{name}", value)
        wait_for_alerts(page, left)
        assert address(page)[name] == value
    page.locator("#rank").fill("2")
    page.wait_for_function("() => location.search.includes('rank=2')")
    wait_for_alerts(page, 1)
    assert len(address(page)) == 5
    page.get_by_role("link", name="otter").click()
    page.wait_for_url("**/runs/otter#alert-a")


def test_numbers_of_the_evidence_are_short_and_exact_where_they_count(open_page):
    page = open_page("/alerts?q=spike&rank=39")
    wait_for_alerts(page, 3)
    page.locator("#alert-m119 [data-part=evidence] summary").click()
    rows = page.locator("#alert-m119 .evidence tr").all_inner_texts()
    assert [row.split("\t")[1] for row in rows] == [
        "\u2013", "NaN", "1234567", "1.235e+19", "1.235e+11", "0.07143, \u2013, 3",
    ]  # fmt: skip


def test_what_is_open_and_grave_comes_first(open_page):
    page = open_page("/alerts?shown=200")
    wait_for_alerts(page, 121)
    titles = page.locator(".alert h3").all_inner_texts()
    # The critical one is the oldest of all; of one severity the newest comes first.
    assert page.locator(".alert").first.get_attribute("id") == "alert-a"
    assert titles[1:] == [
        *(f"Spike number {n}" for n in range(119, 0, -2)),
        *(f"Spike number {n}" for n in range(118, -1, -2)),
    ]


def test_a_link_brings_the_filter_and_how_much_of_the_list_is_shown(open_page):
    page = open_page("/alerts?q=spike&severity=warning&project=speech&kind=loss.spike&shown=100")
    wait_for_alerts(page, 100)
    assert page.input_value("#filter") == "spike"
    assert page.input_value("#severity") == "warning"
    assert page.inner_text("#count") == "100+ alerts"
    page.wait_for_selector("#kind optgroup[label=loss]", state="attached")
    assert (page.input_value("#kind"), page.input_value("#project")) == ("loss.spike", "speech")
    page.get_by_role("button", name="Show more").click()
    wait_for_alerts(page, 120)
    assert address(page)["shown"] == "150"
    assert page.inner_text("#count") == "120 alerts"
    assert page.get_by_role("button", name="Show more").is_hidden()


def test_back_leads_to_the_filter_before(open_page):
    page = open_page("/alerts?project=speech")
    wait_for_alerts(page, 50)
    page.locator("#rank").press_sequentially("39", delay=300)
    page.wait_for_function("() => location.search.includes('rank=39')")
    wait_for_alerts(page, 3)
    page.select_option("#state", "resolved")
    page.wait_for_selector("#nothing:not([hidden])")
    page.go_back()
    wait_for_alerts(page, 3)
    assert page.input_value("#state") == ""
    # What was typed is undone as a whole.
    page.go_back()
    wait_for_alerts(page, 50)
    assert (page.input_value("#rank"), address(page)) == ("", {"project": "speech"})


def test_the_keyboard_filters_and_clears(open_page):
    page = open_page("/alerts")
    wait_for_alerts(page, 50)
    page.keyboard.press("/")
    page.keyboard.type("otter")
    wait_for_alerts(page, 1)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "severity"
    page.keyboard.press("w")
    page.wait_for_selector("#nothing:not([hidden])")
    assert address(page) == {"q": "otter", "severity": "warning"}
    text = page.inner_text("#nothing")
    assert "No alert fits the filter" in text
    assert "Asked for: words otter, severity warning." in text
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("c")
    wait_for_alerts(page, 50)
    assert address(page) == {}
    assert page.evaluate("document.activeElement.id") == "filter"


def test_an_empty_list_says_what_was_asked_and_how_to_see_more(open_page):
    page = open_page("/alerts?q=fc.bias")
    page.wait_for_selector("#nothing:not([hidden])")
    assert "Alerts that follow from others are not listed" in page.inner_text("#nothing")
    page.get_by_role("button", name="List them, too").click()
    wait_for_alerts(page, 1)
    assert address(page) == {"q": "fc.bias", "consequences": "true"}
    page.locator("#filter").fill("nothing like it")
    page.wait_for_selector("#nothing:not([hidden])")
    assert page.locator("#nothing-hidden").is_hidden()
    page.locator("#reset").click()
    wait_for_alerts(page, 50)
    assert page.evaluate("document.activeElement.id") == "filter"


def test_what_is_no_filter_is_said_and_not_asked(open_page):
    page = open_page("/alerts?severity=loud&rank=two&state=closed&shown=-1")
    wait_for_alerts(page, 50)
    page.locator("#rank").fill("x")
    page.wait_for_selector("#rank-hint:not([hidden])")
    assert page.get_attribute("#rank", "aria-invalid") == "true"
    assert page.locator(".alert").count() == 50
    page = open_page("/alerts?kind=loss.spik")
    page.wait_for_selector("#nothing:not([hidden])")
    assert "did you mean 'loss.spike'?" in page.inner_text("#nothing")
    assert page.input_value("#kind") == "loss.spik"
    page.locator("#clear").click()
    wait_for_alerts(page, 50)


@pytest.mark.parametrize("path", ["/alerts", "/alerts?q=none&kind=desync.parameters&rank=3"])
def test_the_filter_fits_into_400_pixels(open_page, path):
    page = open_page(path, width=400, height=900)
    page.wait_for_selector("#listing:not([hidden]), #nothing:not([hidden])")
    page.wait_for_selector("#kind optgroup", state="attached")
    assert page.evaluate("document.documentElement.scrollWidth") == 400
