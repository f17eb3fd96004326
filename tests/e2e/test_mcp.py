"""`rankscope mcp`: a real client of the protocol, a real server, real runs."""

import asyncio
import json
import socket
import subprocess
import sys

import httpx
import pytest
import torch
from mcp import Client, StdioServerParameters, stdio_client
from torch import nn
from torch.nn import functional

from rankscope import agent
from rankscope.server.demo.processes import RANKSCOPE
from tests.support.runs.fixture_run import SyntheticRun, post, wait_until_evaluated
from tests.support.servers.service import Service

pytestmark = pytest.mark.e2e

TOOLS = {"list_runs", "why", "evidence", "series", "compare"}
STEPS = 60
# Of 20 ranks, one whose reduced gradients and parameters differ from a step on.
BROKEN = SyntheticRun(run="broken", ranks=20, steps=200, desync=(17, 37), buckets=4)


def train(url, folder):
    """A training of this process, every step of which is recorded."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = agent.attach(
        model, optimizer, server=url, run="fine", spool=str(folder), allowance=1000.0
    )
    for _ in range(STEPS):
        x = torch.randn(32, 8)
        optimizer.zero_grad()
        functional.cross_entropy(model(x), (x.sum(1) > 0).long()).backward()
        optimizer.step()
    monitor.close()


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with Service(tmp_path_factory.mktemp("server")) as service:
        train(service.url, tmp_path_factory.mktemp("spool"))
        post(service.url, BROKEN)
        wait_until_evaluated(service.url, BROKEN)
        service.wait_for_state("fine", "finished")
        yield service


def session(url, calls):
    """What a client gets from a process of the command: its tools, and a result for each call."""
    command, *arguments = [*RANKSCOPE, "mcp", "--server", url]
    started = stdio_client(StdioServerParameters(command=str(command), args=arguments))

    async def ask():
        async with Client(started) as asked:
            listed = await asked.list_tools()
            return listed.tools, [await asked.call_tool(name, given) for name, given in calls]

    return asyncio.run(asyncio.wait_for(ask(), 240))


@pytest.fixture(scope="module")
def alert(service):
    """The alert of the broken run, as the REST interface has it."""
    [found] = [a for a in service.alerts("broken") if a["kind"].startswith("desync")]
    return httpx.get(f"{service.url}/api/v1/alerts/{found['id']}").json()


CALLS = {
    "runs": ("list_runs", {}),
    "page": ("list_runs", {"limit": 1}),
    "fine": ("why", {"run": "fine"}),
    "broken": ("why", {"run": "broken"}),
    "whole": ("series", {"run": "fine", "max_points": 500}),
    "few": ("series", {"run": "broken", "max_points": 10}),
    "part": ("series", {"run": "broken", "ranks": [1], "from_step": 30, "to_step": 34}),
    "no ranks": ("series", {"run": "broken", "ranks": [], "max_points": 10}),
    "compared": ("compare", {"a": "fine", "b": "broken"}),
    "no run": ("why", {"run": "brokem"}),
    "no metric": ("series", {"run": "fine", "metric": "los"}),
    "no alert": ("evidence", {"alert": "no-such-alert"}),
    "no id": ("why", {"run": "../fine"}),
    "too many": ("series", {"run": "fine", "max_points": 100_000}),
    "no rank": ("series", {"run": "fine", "ranks": [0, 7]}),
}


@pytest.fixture(scope="module")
def asked(service, alert):
    """All that one client asks in its session: the tools, and call -> result."""
    calls = {**CALLS, "evidence": ("evidence", {"alert": alert["id"]})}
    tools, results = session(service.url, calls.values())
    return tools, dict(zip(calls, results, strict=True))


@pytest.fixture
def answer(asked):
    """The structured answer to a call, of which the text says the same."""

    def of(name):
        result = asked[1][name]
        assert not result.is_error, result.content
        assert json.loads(result.content[0].text) == result.structured_content
        return result.structured_content

    return of


@pytest.fixture
def error(asked):
    def of(name):
        result = asked[1][name]
        assert result.is_error
        return result.content[0].text

    return of


def test_the_tools_say_what_they_do_and_that_they_only_read(asked):
    tools = asked[0]
    assert {tool.name for tool in tools} == TOOLS
    for tool in tools:
        assert tool.annotations.read_only_hint is True
        assert tool.output_schema["type"] == "object"
        assert len(tool.description) > 40


def test_from_the_list_of_runs_to_the_cause(answer, alert):
    runs = {run["id"]: run for run in answer("runs")["runs"]}
    assert runs.keys() == {"fine", "broken"}
    assert runs["broken"]["verdict"] == "fail"
    assert len(answer("page")["runs"]) == 1
    assert answer("page")["next_cursor"] is not None
    broken = answer("broken")
    assert broken["headline"] == f"Critical problem: {alert['title']}"
    assert broken["verdict"] == "fail"
    assert runs["broken"]["worst_alert"] == alert["title"]
    first = broken["alerts"][0]
    assert (first["id"], first["ranks"]) == (alert["id"], [17])
    assert first["after"] < 37 <= first["by"]
    for name in ("cause", "remedy", "stage", "tensors"):
        assert first[name]
        assert first[name] == alert[name]
    # What was not judged is listed, and why.
    assert answer("fine")["alerts_in_all"] == len(answer("fine")["alerts"])
    assert "desync.parameters" in {check["name"] for check in answer("fine")["not_checked"]}


def test_one_alert_whole(answer, alert):
    whole = answer("evidence")
    assert (whole["title"], whole["cause"]) == (alert["title"], alert["cause"])
    assert whole["evidence"].keys() == alert["evidence"].keys()
    assert bool(whole["shortened"]) == (
        (whole["evidence"], whole["history"]) != (alert["evidence"], alert["history"])
    )


def test_series_are_bounded_and_lose_nothing_that_was_asked_for(answer, service):
    address = f"{service.url}/api/v1/runs/fine/series"
    kept = httpx.get(address, params={"metric": "loss", "max_points": 500}).json()
    [whole] = answer("whole")["ranks"]
    assert whole["values"] == kept["series"][0]["values"]
    assert len(whole["values"]) == STEPS
    few = answer("few")
    assert [r["rank"] for r in few["ranks"]] == list(range(8))
    assert few["ranks_left_out"] == list(range(8, 20))
    for rank in few["ranks"]:
        assert len(rank["steps"]) <= 10
        assert max(rank["max"]) == pytest.approx(BROKEN.values("loss", rank["rank"]).max())
    assert answer("no ranks") == few
    [part] = answer("part")["ranks"]
    assert (part["rank"], part["steps"]) == (1, [30, 31, 32, 33, 34])


def test_two_runs_are_compared(answer, service):
    kept = httpx.get(f"{service.url}/api/v1/compare", params={"runs": ["fine", "broken"]}).json()
    found = answer("compared")
    assert found["bits"]["summary"] == kept["bits"]["summary"]
    assert found["verdicts"][1]["verdict"] == "fail"
    assert [run["id"] for run in found["runs"]] == ["fine", "broken"]


def test_errors_say_what_to_do(error):
    assert "'broken'" in error("no run")
    assert "list_runs" in error("no run")
    assert "has no series 'los'. It has loss," in error("no metric")
    assert "`why` lists the ids" in error("no alert")
    assert "is no id" in error("no id")
    assert "500" in error("too many")
    assert error("no rank").endswith("loss has no rank 7. It has ranks 0.")


def test_a_server_that_is_away_is_an_error_of_the_tool_that_says_what_to_do():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    [result] = session(address, [("list_runs", {})])[1]
    text = result.content[0].text
    assert result.is_error
    assert "rankscope serve" in text
    assert "RANKSCOPE_SERVER" in text


def test_without_the_package_the_command_says_how_to_install_it():
    program = (
        "import sys; sys.modules['mcp'] = None\n"
        "from rankscope.agent.cli import main; sys.exit(main(['mcp']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 2
    assert "pip install 'rankscope[mcp]'" in done.stderr
