"""`rankscope gate RUN --against`: real trainings on a real server, from loss to exit code."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from rankscope.client import Client
from rankscope.server.gate.gate import gate
from tests.support.jobs import seeds_job
from tests.support.servers.service import Service, eventually

pytestmark = pytest.mark.e2e

GOOD = ("one", "two", "three")
LAST = seeds_job.STEPS - 1
# The run whose steps are long has them many times as long.
TIMES = "N times"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server with three good runs of the project `seeds`, one more, and some that are worse."""
    folder = tmp_path_factory.mktemp("against")
    good = [f"{run}:{seed}:good" for seed, run in enumerate(GOOD)]
    others = ["good:7:good", "worse:8:worse", "slow:9:slow", "timed:0:only-timed"]

    def train(*wanted):
        subprocess.run(
            [sys.executable, "-P", "-m", "tests.support.jobs.seeds_job", *wanted],
            cwd=Path(__file__).parents[3],
            env={
                **os.environ,
                "PYTHONPATH": ".",
                "RANKSCOPE_SERVER": service.url,
                "RANKSCOPE_PROJECT": "seeds",
                "RANKSCOPE_SPOOL": str(folder / "spool"),
                # What the agent samples besides losses and times costs more than the trainings.
                "RANKSCOPE_ALLOWANCE": "0",
            },
            check=True,
            timeout=300,
        )
        for run in wanted:
            service.wait_for_state(run.partition(":")[0], "finished")

    with Service(folder) as service:
        train(*good)
        # The server judges runs within seconds of their end; those that begin then are held
        # against them.
        eventually(lambda: set(GOOD) <= set(kept(service)), timeout_s=60)
        train(*others)
        yield service


def kept(server):
    """The baselines of the project, and how they became that."""
    listed = server.get("/runs", project="seeds", baseline="true")["items"]
    return {run["id"]: run["baseline"] for run in listed}


@pytest.fixture
def judged(server, capsys):
    """Calls the gate; returns exit code and what it printed."""

    def call(run, *arguments, against=",".join(GOOD), form="json"):
        # What a machine has to do besides while a run trains is no matter of these tests, nor is
        # what the server itself finds beside the baselines.
        for kind in ("throughput.dropped", "baseline.loss", "baseline.metric"):
            arguments += ("--ignore", kind)
        code = gate(
            [run, "--server", server.url, "--against", against, "--format", form, *arguments]
        )
        printed = capsys.readouterr().out
        return code, json.loads(printed) if form in ("json", "sarif") else printed

    return call


def measures(report):
    return {m["name"]: m for m in report["against"]["measures"]}


def test_another_seed_passes_and_says_of_what_it_was_no_worse(judged):
    # How long a step takes on a machine that others use as well is another matter.
    times = ("--ignore", "regression.step_seconds")
    code, report = judged("good", *times)
    assert (code, report["verdict"], report["reasons"]) == (0, "pass", [])
    assert report["against"]["runs"] == list(GOOD)
    assert report["against"]["steps"] == [0, LAST]
    found = measures(report)
    assert {
        *("loss", "steps_to_loss", "accuracy", "eval/loss", "eval/accuracy"),
        *("step_seconds", "process_resident_memory_bytes"),
    } == set(found)
    # How often an accuracy is recorded is a matter of the machine, too.
    del found["step_seconds"], found["accuracy"]
    assert {m["state"] for m in found.values()} == {"passed"}
    for name, measure in found.items():
        assert set(measure["runs"]) == set(GOOD), name
        assert {"name": f"regression.{name}", "state": "passed", "why": measure["why"]} in report[
            "checks"
        ]
    _, text = judged("good", *times, form="text")
    assert "no worse than the baseline:" in text
    assert "Compared with one, two and three at steps 0-159." in text
    assert "a baseline of more runs narrows them" in text.replace("\n    ", " ")


def test_a_worse_training_fails_with_number_band_and_step(judged, server):
    code, report = judged("worse")
    assert (code, report["verdict"]) == (1, "fail")
    found = measures(report)
    failed = {name for name, m in found.items() if m["state"] == "failed"}
    assert {"loss", "steps_to_loss", "eval/loss"} <= failed
    loss = found["loss"]
    assert loss["value"] > loss["bound"] > loss["expected"]
    first, last = loss["steps"]
    points = server.series("worse")[0]
    late = [value for step, value in points.items() if first <= step <= last]
    assert loss["value"] == pytest.approx(sum(late) / len(late), rel=0.01)
    (reason,) = (r for r in report["reasons"] if r.startswith("regression.loss: "))
    for part in (
        f"{loss['value']:.4g} ",
        f"steps {first}-{last}",
        f"{loss['bound']:.4g}",
        "3 runs:",
    ):
        assert part in reason


def test_the_server_itself_says_so_while_a_run_goes_on(server):
    def found(run):
        items = server.get(f"/runs/{run}/alerts", limit=100)["items"]
        return {a["kind"]: a for a in items if a["kind"].startswith("baseline.")}

    def checks(run):
        listed = server.get(f"/runs/{run}/verdict")["checks"]
        return {c["name"]: c for c in listed if c["name"].startswith("baseline.")}

    assert found("good") == {}
    for check in checks("good").values():
        assert (check["state"], "baselines" in check["why"]) == ("passed", True)
    assert "The project has no baselines" in checks("one")["baseline.loss"]["why"]
    worse = found("worse")["baseline.loss"]
    assert (worse["severity"], worse["state"], worse["ranks"]) == ("warning", "open", [])
    assert worse["first_step"] < LAST / 2
    assert set(worse["evidence"]["baselines"]) >= set(GOOD)
    assert worse["evidence"]["value"] > worse["evidence"]["limit"]
    assert "parameter_groups.0.lr 0.02 (there 0.1)" in worse["cause"]


def test_slower_steps_fail_unless_they_are_ignored(judged):
    code, report = judged("slow")
    assert code == 1
    assert [r.partition(":")[0] for r in report["reasons"]] == ["regression.step_seconds"]
    code, report = judged("slow", "--ignore", "regression.step_seconds")
    assert (code, report["reasons"]) == (0, [])
    assert {
        "name": "regression.step_seconds",
        "state": "not_run",
        "why": "ignored, as was asked for",
    } in report["checks"]
    assert judged("slow", "--kind", "regression.loss")[0] == 0
    code, report = judged("slow", "--kind", "regression.perplexity")
    assert code == 4
    assert "perplexity: there is no such measure" in report["reasons"][0]


@pytest.mark.parametrize("form", ["text", "junit", "sarif", "github"])
def test_every_format_says_what_became_worse(judged, form):
    code, printed = judged("slow", form=form)
    assert code == 1
    if form == "junit":
        cases = {c.get("name"): c for c in ElementTree.fromstring(printed).iter("testcase")}
        failure = cases["regression.step_seconds"].find("failure")
        assert f" {TIMES} the baseline's " in re.sub(r"\d+\.\d", "N", failure.get("message"))
        assert cases["regression.loss"].find("failure") is None
    elif form == "sarif":
        (run,) = printed["runs"]
        (result,) = run["results"]
        assert (result["ruleId"], result["level"]) == ("regression.step_seconds", "error")
        assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
        assert run["properties"]["against"]["runs"] == list(GOOD)
    elif form == "github":
        (error,) = (line for line in printed.splitlines() if line.startswith("::error "))
        assert "regression.step_seconds: " in error
        assert "%0Aregression.loss: " in printed
    else:
        assert "- regression.step_seconds: " in printed
        assert "  failed too" not in printed


def test_a_project_is_its_baselines_without_this_one(judged, server):
    eventually(lambda: {*GOOD, "good"} <= set(kept(server)), timeout_s=60)
    baselines = kept(server)
    _, report = judged("good", against="project:seeds")
    assert measures(report)["loss"]["state"] == "passed"
    assert report["against"]["runs"] == [run for run in baselines if run != "good"]
    # It recorded no loss, so it has no verdict.
    assert "timed" not in baselines
    # By hand: one that is taken away is not compared with, one that is marked comes first.
    with Client(server.url) as client:
        client.baseline("one", marked=False)
        client.baseline("two")
    _, report = judged("good", against="project:seeds")
    assert report["against"]["runs"][0] == "two"
    assert set(report["against"]["runs"]) == {*baselines} - {"good", "one"}


@pytest.mark.parametrize(
    ("against", "missing"),
    [
        ("one,nobody", "there is no run 'nobody'"),
        ("project:nobody", "project 'nobody' has no baseline but for this run"),
        ("timed", "nothing that shows how well the run learns was compared"),
    ],
)
def test_what_cannot_be_compared_is_no_pass(judged, against, missing):
    code, report = judged("good", against=against)
    assert (code, report["verdict"]) == (4, "pending")
    assert missing in report["reasons"][0]


def test_of_one_baseline_what_is_much_worse_is_found(judged):
    times = ("--ignore", "regression.step_seconds")
    assert judged("good", *times, against="one")[0] == 0
    assert judged("worse", *times, against="one")[0] == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--against", "one,,two"], "is no baseline"),
        (["--against", "project:"], "is no baseline"),
        (["--against", "one,good"], "is the run itself"),
        (["--against", "one", "--tolerance", "2"], "write 0.02 for 2 %"),
        (["--against", "one", "--tolerance", "much"], "write 0.02 for 2 %"),
    ],
)
def test_usage(capsys, arguments, text):
    with pytest.raises(SystemExit) as ended:
        gate(["good", *arguments])
    assert ended.value.code == 2
    assert text in capsys.readouterr().err


def test_measures_are_unknown_without_a_baseline(server, capsys):
    assert gate(["good", "--server", server.url, "--ignore", "regression.loss"]) == 2
    assert "is none of" in capsys.readouterr().err


def test_a_gate_without_a_baseline_does_not_load_what_compares():
    program = "import sys, rankscope.server.gate.gate; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-P", "-c", program],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout.split()
    assert "rankscope.server.gate.gate" in loaded
    assert not {m for m in loaded if m.startswith("rankscope.server.comparison.re")}
    assert "rankscope.server.gate.against" not in loaded
