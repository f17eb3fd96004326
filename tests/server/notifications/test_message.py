"""What is said about alerts."""

from rankscope.server.notifications.message import Message, News, link_to
from tests.support.incidents import alert


def made(*news, run="bert 17"):
    return Message(run, "text", link_to("http://h:1/", run), tuple(news))


def desync(**more):
    given = {
        "title": "Rank 2 has drifted",
        "ranks": (2,),
        "tensors": ("a.weight",),
        "cause": "c " * 400,
    }
    return alert("desync.parameters", 120, severity="critical", **(given | more))


def test_one_alert_is_the_title_and_all_that_is_known_is_in_the_text():
    message = made(News(desync(), "opened"))
    assert message.title == "CRITICAL in bert 17: Rank 2 has drifted"
    head, since, cause, todo, end = [line for line in message.text.split("\n") if line]
    assert head == "CRITICAL desync.parameters: Rank 2 has drifted"
    assert since == "Since step 120, rank 2. Tensors: a.weight."
    assert cause.startswith("Cause: c c")
    assert cause.endswith("…")
    assert len(cause) < 620
    assert todo.startswith("What to do: ")
    assert end == "Project text. http://h:1/runs/bert%2017"


def test_several_are_counted_and_the_worst_decides():
    spike = alert("loss.spike", 5, severity="warning")
    over = alert("rank.slow", 7, severity="warning", state="resolved")
    message = made(News(spike, "opened"), News(desync(), "raised"), News(over, "resolved"))
    assert message.title == "CRITICAL in bert 17: 2 alerts, 1 resolved"
    assert "CRITICAL (raised) desync.parameters" in message.text
    assert "RESOLVED rank.slow" in message.text
    assert message.severity == "critical"
    only = made(News(over, "resolved"))
    assert (only.severity, only.title) == ("resolved", f"RESOLVED in bert 17: {over.title}")


def test_a_storm_is_one_page():
    many = [News(alert("loss.spike", n, severity="warning"), "opened") for n in range(200)]
    message = made(*many)
    assert "And 190 further alerts." in message.text
    assert len(message.text) < 15_000
    assert len(message.json["alerts"]) == 200


def test_the_same_news_have_the_same_id_and_others_another():
    one, same = made(News(desync(), "opened")), made(News(desync(cause="more"), "opened"))
    assert one.id == same.id
    assert one.id != made(News(desync(), "resolved")).id
    assert one.id != made(News(desync(), "opened"), run="other").id


def test_json_has_what_the_alert_has():
    [fields] = made(News(desync(), "opened")).json["alerts"]
    assert fields["what"] == "opened"
    assert fields["ranks"] == [2]
    assert fields["since"] == {"after": 119, "by": 120}
    assert fields["resolved_at"] is None
