"""The gate against a server that answers what a real one answered: exit codes and text."""

import json

import pytest

from rankscope.server.gate.gate import gate
from tests.support.servers.recorded import (
    DESYNC,
    FAIL,
    PASS,
    PENDING,
    REQUIRED,
    SPIKE,
    Recorded,
    printed,
)


@pytest.mark.parametrize("resumed_step", [None, 200])
def test_alerts_of_earlier_starts_are_not_in_the_report(server, capsys, resumed_step):
    past = DESYNC | {"id": "1", "consequences": [], "state": "resolved", "start": 0}
    over = past | {"id": "2", "kind": "rank.failed", "start": 1, "last_step": 150}
    server.pages = [[SPIKE | {"parent": None, "start": 1}, past, over]]
    server.verdicts = [(200, FAIL | {"start": 1, "resumed_step": resumed_step})]
    assert gate(["digits", "--server", server.url, "--format", "json"]) == 1
    shown = {alert["kind"] for alert in json.loads(capsys.readouterr().out)["alerts"]}
    assert shown == {"loss.spike"} | (set() if resumed_step else {"rank.failed"})


def problem(status: int, detail: str) -> tuple[int, dict]:
    return status, {"type": "about:blank", "title": "T", "status": status, "detail": detail}


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ((200, PASS), 0),
        ((200, FAIL), 1),
        ((200, PENDING), 4),
        (problem(404, "there is no run 'digits'"), 4),
        (problem(422, "kind: is none of them"), 2),
        (problem(401, "no token"), 2),
        (problem(503, "the database is away"), 3),
        ((404, b"<html>nothing here</html>"), 3),
        ((200, b"hello"), 3),
        ((200, {"verdict": "splendid"}), 3),
    ],
)
def test_exit_codes(server, capsys, answer, code):
    server.verdicts = [answer]
    assert gate(["digits", "--server", server.url]) == code
    printed = capsys.readouterr()
    assert bool(printed.out) is (answer[1] in (PASS, FAIL, PENDING))
    assert bool(printed.err) is not bool(printed.out)


@pytest.fixture
def nobody() -> str:
    """An address at which nobody listens."""
    with Recorded() as gone:
        return gone.url


def test_no_server(nobody, capsys):
    assert gate(["digits", "--server", nobody]) == 3
    error = capsys.readouterr().err
    assert error.startswith(f"rankscope gate: the server {nobody} cannot be reached: ")


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        ([], "RUN"),
        (["digits", "--kind", "loss.spikes"], "did you mean 'loss.spike'?"),
        (["digits", "--ignore", "nonsense"], "the kinds are desync.parameters"),
        (["digits", "--fail-on", "info"], "invalid choice"),
        (["digits", "--format", "yaml"], "invalid choice"),
        (["digits", "--wait", "soon"], "no number of seconds"),
        (["digits", "--wait", "-1"], "no number of seconds"),
        (["digits", "--server", "localhost:8642"], "http://"),
    ],
)
def test_usage(capsys, arguments, output):
    with pytest.raises(SystemExit) as ended:
        gate(arguments)
    assert ended.value.code == 2
    assert output in capsys.readouterr().err


def test_what_is_asked(server):
    arguments = [
        "a/b c",
        "--server",
        f"{server.url}/",
        "--token",
        "secret",
        "--fail-on",
        "critical",
    ]
    arguments += ["--kind", "loss.spike", "--kind", "loss.nonfinite", "--ignore", "batch.noise"]
    # A kind of somebody else's detector is the server's to know.
    arguments += ["--ignore", "acme.tokens"]
    gate(arguments)
    (path, query, headers), (alerts, _, _) = server.asked
    assert path == "/api/v1/runs/a/b c/verdict"
    assert alerts == "/api/v1/runs/a/b c/alerts"
    assert query == {
        "fail_on": ["critical"],
        "kind": ["loss.spike", "loss.nonfinite"],
        "ignore": ["batch.noise", "acme.tokens"],
    }
    assert headers["Authorization"] == "Bearer secret"


def test_the_server_may_come_from_the_environment(server, monkeypatch, capsys):
    monkeypatch.setenv("RANKSCOPE_SERVER", server.url)
    monkeypatch.setenv("RANKSCOPE_TOKEN", "secret")
    assert gate(["digits"]) == 1
    assert server.asked[0][2]["Authorization"] == "Bearer secret"


def test_waits_for_the_run_and_for_its_end(server, capsys, monkeypatch):
    monkeypatch.setattr("rankscope.server.gate.gate._POLL_SECONDS", 0.01)
    server.verdicts = [problem(404, "there is no run 'digits'"), (200, PENDING), (200, PASS)]
    assert gate(["digits", "--server", server.url, "--wait", "60"]) == 0
    printed = capsys.readouterr()
    assert printed.err == "rankscope gate: waiting up to 60 s: there is no run 'digits'\n"
    assert printed.out.startswith("PASS")


def test_waits_no_longer_than_allowed(server, monkeypatch):
    monkeypatch.setattr("rankscope.server.gate.gate._POLL_SECONDS", 0.01)
    server.verdicts = [(200, PENDING)]
    assert gate(["digits", "--server", server.url, "--wait", "0.1"]) == 4
    assert len(server.asked) > 2


def test_the_evaluation_of_a_run_that_has_ended_is_waited_for_anyway(server, monkeypatch):
    # How long the server takes for it is a matter of the machine's load.
    monkeypatch.setattr("rankscope.server.gate.gate._POLL_SECONDS", 0.01)
    not_evaluated = PENDING | {"state": "finished", "evaluated": False}
    server.verdicts = [*[(200, not_evaluated)] * 5, (200, PASS)]
    assert gate(["digits", "--server", server.url]) == 0


def test_what_was_found_may_be_over_in_what_is_yet_to_be_evaluated(server, monkeypatch):
    monkeypatch.setattr("rankscope.server.gate.gate._POLL_SECONDS", 0.01)
    transient = FAIL | {"state": "finished", "evaluated": False}
    server.verdicts = [*[(200, transient)] * 5, (200, PASS)]
    assert gate(["digits", "--server", server.url]) == 0
    # Of one that goes on nobody knows how it ends.
    server.verdicts = [(200, transient | {"state": "running"}), (200, PASS)]
    assert gate(["digits", "--server", server.url]) == 1


@pytest.mark.parametrize("state", [{"state": "running", "evaluated": False}, {"state": "finished"}])
def test_what_does_not_come_of_an_evaluation_is_not_waited_for(server, state):
    server.verdicts = [(200, PENDING | state), (200, PASS)]
    assert gate(["digits", "--server", server.url]) == 4


def test_does_not_wait_when_it_is_decided(server):
    assert gate(["digits", "--server", server.url, "--wait", "3600"]) == 1


def test_text(server, capsys):
    assert printed(server, capsys, "text") == (
        f"""\
FAIL  run digits  {server.url}/runs/digits
  Required for a pass, all judged: loss.nonfinite, loss.spike (judged by loss.diverging in its
    place).
  Not checked: 1 of 4 kinds of alert (does not apply: 1).

  desync.gradients  critical  (open)
    The gradient of rank 2 differs from the other ranks
    since step: 147, last seen at step 299
    ranks: 2
    first broken link: reduced_gradient
    tensors: conv2.weight
    cause: 100 % of it: the all-reduce, or its reader, was skipped.
    remedy: Wait for the collective, then read.
    consequences: loss.spike (step 150)

  failed too:
    loss.spike: as a consequence of desync.gradients

  not checked:
    rank.loss_outlier: does not apply: 2 ranks

  passed: loss.nonfinite
"""
    )


def test_text_of_a_run_that_cannot_be_judged_yet(server, capsys):
    server.verdicts, server.pages = [(200, PENDING)], [[]]
    lines = printed(server, capsys, "text").splitlines()
    assert lines[0].startswith("PENDING  run digits")
    assert lines[1] == "  - the run is still running"


def test_what_does_not_apply_is_not_said_to_be_judged(server, capsys):
    # As the parameters of ranks that hold shards of them.
    without = {"name": "desync.parameters", "state": "not_applicable", "by": None, "why": "Shards."}
    server.verdicts, server.pages = [(200, PASS | {"required": [without, REQUIRED[0]]})], [[]]
    assert (
        "Required for a pass, all that apply judged: desync.parameters (does not apply), "
        "loss.nonfinite."
    ) in " ".join(printed(server, capsys, "text").split())


def test_a_server_that_does_not_show_what_it_requires(server, capsys):
    server.verdicts = [(200, {k: v for k, v in PASS.items() if k != "required"})]
    server.pages = [[]]
    assert "Required" not in printed(server, capsys, "text")


@pytest.mark.parametrize("form", ["text", "json", "junit", "sarif", "github"])
@pytest.mark.parametrize("answer", [PASS, PENDING, FAIL])
def test_every_format_says_what_was_required_and_what_was_not_checked(server, capsys, form, answer):
    server.verdicts, server.pages = [(200, answer)], [[]]
    reported = " ".join(printed(server, capsys, form).split())
    assert "Not checked: 1 of " in reported
    assert "rank.loss_outlier" in reported
    assert "2 ranks" in reported
    if answer is PENDING:
        assert "1 of 2 not judged: loss.nonfinite, loss.spike (not judged)." in reported
    else:
        assert "loss.spike (judged by loss.diverging in its place)." in reported


@pytest.mark.parametrize("form", ["text", "json", "junit", "sarif", "github"])
def test_every_format_says_what_share_of_the_steps_was_sampled(server, capsys, form):
    unseen = (
        "In the 75 % of the steps that were not sampled in full this is not seen: update.ratio."
    )
    server.pages = [[]]
    server.verdicts = [(200, PASS | {"sampled": 0.25, "not_seen": unseen})]
    reported = " ".join(printed(server, capsys, form).replace("%25", "%").split())
    assert "Steps sampled in full on every rank: 25 %." in reported
    assert unseen in reported
    server.verdicts = [(200, PASS | {"sampled": 0.9999, "not_seen": None})]
    assert "on every rank: 99.9 %" in printed(server, capsys, form).replace("%25", "%")


def test_text_reports_a_failed_run_besides_its_alerts(server, capsys):
    server.verdicts = [(200, FAIL | {"reasons": ["the run failed", *FAIL["reasons"]]})]
    out = printed(server, capsys, "text")
    assert "  - the run failed\n" in out
    assert out.count(DESYNC["title"]) == 1


def test_alerts_come_in_pages(server, capsys):
    other = DESYNC | {"id": "1", "kind": "loss.nonfinite", "first_step": 3}
    server.pages = [[SPIKE], [DESYNC], [other]]
    kinds = [a["kind"] for a in json.loads(printed(server, capsys, "json"))["alerts"]]
    assert kinds == ["loss.nonfinite", "desync.gradients"]


@pytest.mark.parametrize(
    ("arguments", "kinds"),
    [
        ([], ["desync.gradients"]),
        (["--kind", "loss.spike"], ["loss.spike"]),
        (["--ignore", "loss.spike"], ["desync.gradients"]),
        (["--ignore", "desync.gradients"], []),
    ],
)
def test_which_alerts_are_shown(server, capsys, arguments, kinds):
    reported = json.loads(printed(server, capsys, "json", *arguments))
    assert [a["kind"] for a in reported["alerts"]] == kinds


@pytest.mark.parametrize("run", ["..", ".", ""])
def test_what_would_be_another_address_is_no_run(server, capsys, run):
    assert gate([run, "--server", server.url]) == 2
    assert f"{run!r} is no id of a run" in capsys.readouterr().err
