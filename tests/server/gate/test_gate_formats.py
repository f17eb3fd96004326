"""What the gate prints for machines: JSON, JUnit, SARIF and workflow commands."""

import json
from xml.etree import ElementTree

import pytest

from rankscope.server.gate.gate import gate
from tests.support.servers.recorded import (
    DESYNC,
    FAIL,
    PASS,
    PENDING,
    REQUIRED,
    SPIKE,
    printed,
)


def test_json(server, capsys):
    reported = json.loads(printed(server, capsys, "json"))
    assert reported["run"] == "digits"
    assert reported["address"] == f"{server.url}/runs/digits"
    assert {k: reported[k] for k in FAIL} == FAIL
    assert reported["not_checked"] == [
        {"name": "rank.loss_outlier", "why": "does not apply: 2 ranks"}
    ]
    assert reported["alerts"] == [DESYNC]


def test_junit(server, capsys):
    suites = ElementTree.fromstring(printed(server, capsys, "junit").encode())
    assert suites.tag == "testsuites"
    (suite,) = suites
    counts = {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": "5", "failures": "3", "errors": "0", "skipped": "1"}
    cases = {case.get("name"): [child.tag for child in case] for case in suite.iter("testcase")}
    assert cases == {
        "verdict": ["failure"],
        "desync.gradients": ["failure"],
        "loss.spike": ["failure"],
        "loss.nonfinite": [],
        "rank.loss_outlier": ["skipped"],
    }
    failure = suite.find("testcase[@name='desync.gradients']/failure")
    assert failure is not None
    assert "conv2.weight" in (failure.text or "")
    properties = {p.get("name"): p.get("value") for p in suite.iter("property")}
    assert properties["required"] == "loss.nonfinite, loss.spike"
    assert properties["judged"] == "loss.nonfinite, loss.diverging"
    assert properties["not_checked"] == "rank.loss_outlier"


def test_junit_counts_a_pending_run_as_an_error(server, capsys):
    server.verdicts, server.pages = [(200, PENDING)], [[]]
    suites = ElementTree.fromstring(printed(server, capsys, "junit").encode())
    assert suites.get("errors") == "1"


def test_junit_stays_xml_whatever_a_name_holds(server, capsys):
    server.pages = [[DESYNC | {"title": "a\x00b\x1b[31m <&> \ud800 \u2028 ]]>"}]]
    suites = ElementTree.fromstring(printed(server, capsys, "junit").encode())
    assert "<&>" in "".join(suites.itertext())


def test_sarif(server, capsys):
    reported = json.loads(printed(server, capsys, "sarif"))
    assert reported["version"] == "2.1.0"
    (run,) = reported["runs"]
    driver = run["tool"]["driver"]
    assert driver["name"] == "rankscope"
    (result,) = run["results"]
    assert driver["rules"][result["ruleIndex"]]["id"] == result["ruleId"] == "desync.gradients"
    assert result["level"] == "error"
    assert DESYNC["title"] in result["message"]["text"]
    assert result["partialFingerprints"] == {"alert/v1": DESYNC["id"]}
    names = result["locations"][0]["logicalLocations"]
    assert [name["fullyQualifiedName"] for name in names] == ["conv2.weight"]
    (invocation,) = run["invocations"]
    assert invocation["executionSuccessful"] is True
    reported = [n["message"]["text"] for n in invocation["toolExecutionNotifications"]]
    assert "rank.loss_outlier was not run: does not apply: 2 ranks" in reported
    assert run["properties"]["required"] == REQUIRED
    assert run["properties"]["notChecked"] == ["rank.loss_outlier"]


def test_sarif_of_a_pending_run_is_no_success(server, capsys):
    server.verdicts, server.pages = [(200, PENDING)], [[]]
    (run,) = json.loads(printed(server, capsys, "sarif"))["runs"]
    assert run["invocations"][0]["executionSuccessful"] is False


def test_github(server, capsys):
    lines = printed(server, capsys, "github").splitlines()
    assert lines[0].startswith(
        "::error title=desync.gradients in run digits::The gradient of rank 2 differs"
    )
    assert "cause: 100 %25 of it:%0Athe all-reduce" in lines[0]
    assert lines[1].startswith("::notice title=run digits%3A what was checked::Required for a pass")
    assert lines[1].endswith("%0Arank.loss_outlier: does not apply: 2 ranks")
    assert lines[2:] == [f"FAIL  run digits  {server.url}/runs/digits"]


def test_github_says_why_a_run_is_pending(server, capsys):
    server.verdicts, server.pages = [(200, PENDING)], [[]]
    first = printed(server, capsys, "github").splitlines()[0]
    assert first == "::warning title=run digits%3A pending::the run is still running"


@pytest.mark.parametrize(
    ("alert", "arguments", "level"),
    [
        (DESYNC | {"silenced": True}, [], "warning"),
        (DESYNC | {"severity": "info"}, [], "notice"),
        (SPIKE | {"parent": None}, ["--fail-on", "critical"], "warning"),
    ],
)
def test_github_levels(server, capsys, alert, arguments, level):
    server.verdicts, server.pages = [(200, PASS)], [[alert]]
    assert printed(server, capsys, "github", *arguments).startswith(f"::{level} title=")


def test_a_name_cannot_be_a_workflow_command(server, capsys):
    gate(["x\n::error::no, y: z", "--server", server.url, "--format", "github"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["::error", "::notice", "FAIL"]
    assert "title=desync.gradients in run x%0A%3A%3Aerror%3A%3Ano%2C y%3A z::" in lines[0]
