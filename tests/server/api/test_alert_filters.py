"""Alerts that fit a filter: words, kinds, ranks, projects; page by page; what is no filter."""

import pytest

from tests.support.alert_rows import add_run, put_alert
from tests.support.servers.api import check_problem, get


@pytest.fixture
def ids(three_runs):
    """Ids of the alerts that a list has, in its order."""

    def ids(path="/alerts", **wanted):
        return [alert["id"] for alert in get(three_runs, path, **wanted)["items"]]

    return ids


@pytest.fixture(scope="module")
def three_runs(shared_app, shared_client):
    """A client of a server with alerts a to f, of three runs in two projects; f follows from a."""
    engine = shared_app.state.engine
    # Finished: the server judges no silence of theirs while it is asked.
    add_run(engine, 1, "otter", "vision", state="finished")
    add_run(engine, 2, "seal_1", "vision", state="finished")
    add_run(engine, 3, "seal-2", "speech", state="finished")
    put_alert(engine, "a", 1, "desync.parameters", 1.0, tensors=("conv1.weight",), title="Apart")
    put_alert(engine, "b", 1, "loss.spike", 2.0, severity="info", ranks=(12,), title="100 % up")
    put_alert(engine, "c", 2, "desync.gradients", 3.0, state="resolved", tensors=("fc.bias",))
    put_alert(engine, "d", 3, "loss.spike", 4.0, severity="info", ranks=(1, 2), title='It "jumps"')
    put_alert(engine, "e", 3, "gone.kind_x", 5.0, ranks=(), tensors=("größe", "[0,1]"))
    put_alert(engine, "f", 1, "rank.loss_outlier", 6.0, parent="a", tensors=("conv1.weight",))
    return shared_client


@pytest.mark.parametrize(
    ("q", "found"),
    [
        ("", "edcba"),
        ("spike", "db"),
        ("SEAL", "edc"),
        ("seal_", "c"),
        ("conv1", "a"),
        ("seal jumps", "d"),
        ("jumps seal", "d"),
        ("otter conv1 apart desync", "a"),
        ("otter bias", ""),
        ("%", "b"),
        ('"', "d"),
        ("größe", "e"),
        ("[0,1]", "e"),
        # Of the list as it is written, not of a name in it.
        ('", "', ""),
        ("u00f6", ""),
        ("\\", ""),
    ],
)
def test_every_word_is_in_kind_title_run_or_a_tensor(ids, q, found):
    assert ids(q=q) == list(found)


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({"kind": "loss.spike"}, "db"),
        ({"kind": "desync.*"}, "ca"),
        ({"kind": "*.grad????s"}, "c"),
        ({"kind": "*"}, "edcba"),
        # No detector has it any more.
        ({"kind": "gone.kind_x"}, "e"),
        ({"kind": "gone.*_x"}, "e"),
        ({"rank": 2}, "dca"),
        ({"rank": 1}, "d"),
        ({"rank": 0}, ""),
        ({"project": "vision"}, "cba"),
        ({"project": "none"}, ""),
        ({"state": "open", "project": "vision"}, "ba"),
        ({"severity": "info", "q": "otter"}, "b"),
        ({"consequences": True, "q": "conv1"}, "fa"),
    ],
)
def test_filters_are_all_to_fit(ids, wanted, found):
    assert ids(**wanted) == list(found)


def test_the_alerts_of_one_run_are_filtered_in_the_same_way(ids):
    assert ids("/runs/otter/alerts", q="spike") == ["b"]
    assert ids("/runs/otter/alerts", kind="desync.*") == ["a"]
    assert ids("/runs/otter/alerts", q="seal") == []


def test_pages_of_a_filtered_list_have_each_alert_once(app, client):
    add_run(app.state.engine, 1, "otter", "vision")
    put_alert(app.state.engine, "a", 1, ranks=(3,), title="Apart")
    for n in range(12):
        put_alert(
            app.state.engine, f"m{n:02}", 1, opened_at=100.0 + n // 3, ranks=(n % 4,), title="many"
        )
    seen, cursor, pages = [], None, 0
    while True:
        page = get(
            client, "/alerts", q="many", rank=3, limit=2, **({"cursor": cursor} if cursor else {})
        )
        seen += [alert["id"] for alert in page["items"]]
        cursor, pages = page["next_cursor"], pages + 1
        if cursor is None:
            break
    assert seen == ["m11", "m07", "m03"]
    assert pages == 2


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"severity": "loud"}, "severity"),
        ({"state": "closed"}, "state"),
        ({"rank": "two"}, "rank"),
        ({"rank": -1}, "rank"),
        ({"rank": 2**40}, "rank"),
        ({"kind": "loss.spik"}, "kind: there is no 'loss.spik'; did you mean 'loss.spike'?"),
        ({"kind": "no.such*"}, "kind: there is no 'no.such*'"),
        ({"kind": "loss.[sp]ike"}, "kind"),
        ({"kind": "k" * 65}, "kind"),
        ({"q": "x" * 201}, "q"),
        ({"q": "a\0b"}, "q: has a NUL"),
        ({"limit": 100_000}, "limit"),
    ],
)
def test_what_is_no_filter_is_refused_with_the_reason(three_runs, wanted, said):
    for path in ("/api/v1/alerts", "/api/v1/runs/otter/alerts"):
        assert said in check_problem(three_runs.get(path, params=wanted), 422)["detail"]


def test_projects_are_listed_with_their_runs(three_runs):
    first = get(three_runs, "/projects", limit=1)
    assert first["items"] == [{"name": "speech", "runs": 1}]
    second = get(three_runs, "/projects", limit=1, cursor=first["next_cursor"])
    assert second == {"items": [{"name": "vision", "runs": 2}], "next_cursor": None}
