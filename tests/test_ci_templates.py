"""Templates for pipelines are what GitHub and GitLab read, and their commands run."""

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from rankscope.server.demo.local_server import LocalServer
from tests.support.runs.fixture_run import SyntheticRun, post, wait_until_evaluated

TEMPLATES = Path(__file__).parent.parent / "examples" / "ci"
ACTION = TEMPLATES / "rankscope-gate" / "action.yml"
BIN = Path(sys.executable).parent


@pytest.mark.parametrize(
    ("path", "schema"),
    [
        (ACTION, "vendor.github-actions"),
        (TEMPLATES / "train.yml", "vendor.github-workflows"),
        (TEMPLATES / "gitlab-ci.yml", "vendor.gitlab-ci"),
    ],
    ids=lambda given: getattr(given, "name", None),
)
def test_the_schema_accepts_it(path, schema):
    checked = subprocess.run(
        [BIN / "check-jsonschema", "--builtin-schema", schema, path],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def step(inputs, folder):
    """The action's step with what a workflow gives it, as a runner does it."""
    action = yaml.safe_load(ACTION.read_text())
    given = {name: one.get("default") for name, one in action["inputs"].items()} | inputs
    (one,) = action["runs"]["steps"]
    environment = {
        name: given[value.removeprefix("${{ inputs.").removesuffix(" }}")]
        for name, value in one["env"].items()
    }
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", one["run"]],
        cwd=folder,
        env={**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server with a run that passes and one that does not."""
    with LocalServer(tmp_path_factory.mktemp("server")) as local:
        for run in (
            SyntheticRun(run="good", ranks=2, steps=200, seed=1),
            SyntheticRun(run="bad", ranks=2, steps=200, seed=1, nan=(1, 80)),
        ):
            post(local.url, run)
            wait_until_evaluated(local.url, run)
        yield local.url


def test_the_action_fails_where_the_gate_does(server, tmp_path):
    good = step({"server": server, "run": "good"}, tmp_path)
    assert (good.returncode, good.stderr) == (0, ""), good.stdout
    bad = step({"server": server, "run": "bad", "sarif": "found.sarif"}, tmp_path)
    assert bad.returncode == 1, bad.stderr
    assert "::error title=loss.nonfinite in run bad::" in bad.stdout
    sarif = json.loads((tmp_path / "found.sarif").read_text())
    assert "loss.nonfinite" in {result["ruleId"] for result in sarif["runs"][0]["results"]}


def test_an_input_is_no_command(server, tmp_path):
    asked = {"run": "$(touch run) `touch run`; touch run", "wait": "2"}
    hostile = step({"server": server, **asked}, tmp_path)
    assert hostile.returncode == 4  # no such run
    against = step({"server": server, "run": "good", "against": "bad; touch run"}, tmp_path)
    assert against.returncode == 4
    assert list(tmp_path.iterdir()) == []


def test_jobs_of_the_pipeline_run_as_written(server, tmp_path):
    jobs = yaml.safe_load((TEMPLATES / "gitlab-ci.yml").read_text())
    script = [line for line in jobs["gate"]["script"] if not line.startswith("pip install")]
    assert script
    codes = {}
    for run in ("good", "bad"):
        done = subprocess.run(
            ["bash", "-e", "-c", "\n".join(script)],
            cwd=tmp_path,
            env={
                **os.environ,
                "PATH": f"{BIN}:{os.environ['PATH']}",
                "RANKSCOPE_SERVER": server,
                "RANKSCOPE_RUN": run,
            },
            check=False,
            timeout=120,
        )
        codes[run] = done.returncode
        report = ElementTree.parse(tmp_path / jobs["gate"]["artifacts"]["reports"]["junit"])
        failed = report.getroot().get("failures")
        assert (failed == "0") == (run == "good")
    assert codes == {"good": 0, "bad": 1}
