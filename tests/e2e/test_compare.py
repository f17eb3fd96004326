"""Two runs side by side: real trainings with the same seed, and one that is disturbed at a step."""

import json
import os
import subprocess

import httpx
import numpy as np
import pytest

from rankscope.agent import wire
from rankscope.server.demo.processes import RANKSCOPE
from tests.support.jobs.ranks import REPOSITORY, TORCHRUN
from tests.support.jobs.seeded_job import NUDGED, STEPS
from tests.support.servers.api import MSGPACK, batch, column
from tests.support.servers.browser import HOW_TO_INSTALL, chromium, find_chromium, watched_page
from tests.support.servers.service import Service

pytestmark = pytest.mark.e2e

NUDGE = 17
JOB = REPOSITORY / "tests" / "support" / "jobs" / "seeded_job.py"


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with Service(tmp_path_factory.mktemp("server")) as service:
        runs = ("first", "second", f"third:nudge={NUDGE}", "fourth:seed=1:lr=0.05")
        done = subprocess.run(
            [TORCHRUN, "--standalone", "--nproc-per-node=2", JOB, *runs],
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(REPOSITORY),
                "RANKSCOPE_SERVER": service.url,
                # Every step is sampled.
                "CI": "true",
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        for run in runs:
            service.wait_for_state(run.partition(":")[0], "finished")
        yield service


def rankscope(service, *arguments):
    return subprocess.run(
        [*RANKSCOPE, *arguments, "--server", service.url],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def compared(service, a, b):
    answer = httpx.get(f"{service.url}/api/v1/compare", params={"runs": [a, b]}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_two_runs_of_one_seed_are_equal_bit_for_bit(service):
    found = compared(service, "first", "second")
    bits = found["bits"]
    assert (bits["state"], bits["first"], bits["ranks"]) == ("equal", None, [0, 1])
    assert (bits["steps"], bits["first_step"], bits["last_step"]) == (STEPS, 0, STEPS - 1)
    assert bits["not_compared"] == []
    assert found["configuration"]["differing"] == []
    assert found["configuration"]["equal"] > 20
    assert found["checks"] == found["alerts"] == []
    loss = next(m for m in found["metrics"] if m["metric"] == "loss")
    assert (loss["steps"], loss["first_differing"], loss["mean_difference"]) == (STEPS, None, 0)
    assert loss["final"][0] == loss["final"][1]


def test_the_step_and_the_tensor_at_which_a_run_was_disturbed_are_found(service):
    found = compared(service, "first", "third")
    first = found["bits"]["first"]
    assert found["bits"]["state"] == "differ"
    assert (first["step"], first["after"], first["ranks"]) == (NUDGE, NUDGE - 1, [1])
    # The nudge is no step of the optimizer's; the tensor stands in the fingerprint of parameters.
    assert first["stage"] == "outside_optimizer"
    assert (first["tensor"], first["tensor_step"]) == (NUDGED, NUDGE)
    assert [t["name"] for t in first["tensors"]] == [NUDGED]
    [tensor] = first["tensors"]
    assert tensor["ranks"] == [1]
    # One element of four by 1e-3; a sketch estimates the length of it.
    assert tensor["distance"] == pytest.approx(1e-3, rel=0.5)
    assert found["bits"]["not_compared"] == [
        f"Steps after {NUDGE}: what follows from a difference differs."
    ]
    [kind] = found["alerts"]
    assert (kind["kind"], kind["runs"][0]) == ("desync.parameters", None)
    assert kind["runs"][1]["first_step"] == NUDGE
    assert {"name": "desync.parameters", "states": ["passed", "failed"]}.items() <= found["checks"][
        0
    ].items()
    loss = next(m for m in found["metrics"] if m["metric"] == "loss")
    assert loss["first_differing"] == NUDGE + 1


def test_runs_of_other_seeds_differ_from_the_start(service):
    found = compared(service, "first", "fourth")
    first = found["bits"]["first"]
    assert (first["step"], first["after"], first["ranks"]) == (0, None, [0, 1])
    assert first["tensor"] == "0.weight"
    [setting] = found["configuration"]["differing"]
    assert setting == {"key": "parameter_groups.0.lr", "values": [0.1, 0.05]}


def posted(service, run, steps, **fields):
    """A run of one rank with a digest at some steps."""
    sent = batch(
        run=run,
        world_size=1,
        through_step=max(steps),
        state="finished",
        hello=wire.Hello(started_at=1000.0, config=fields.pop("config", {})),
        words={"parameters": column(steps, np.array(steps) + 7, np.uint64)},
        columns={"loss": column(range(max(steps) + 1), np.ones(max(steps) + 1))},
        **fields,
    )
    answer = httpx.post(f"{service.url}/api/v1/ingest", content=wire.encode(sent), headers=MSGPACK)
    assert answer.status_code == 200, answer.text


def test_what_could_not_be_compared_is_said(service):
    posted(service, "even", range(0, 40, 2))
    posted(service, "odd", range(1, 40, 2))
    posted(service, "sometimes", [0, 4, 8, 9, 11, 13, 41])
    posted(service, "seed-1", range(0, 40, 2), config={"data": {"seed": 1}})
    posted(service, "seed-2", range(0, 40, 2), config={"data": {"seed": 2}})
    bits = compared(service, "even", "odd")["bits"]
    assert bits["state"] == "not_compared"
    assert bits["summary"] == (
        "The bits were not compared: No step was sampled in both runs (20 of even, 19 of odd)."
    )
    bits = compared(service, "even", "sometimes")["bits"]
    assert (bits["state"], bits["steps"], bits["last_step"]) == ("equal", 3, 8)
    assert bits["not_compared"] == [
        "Steps from 9 on: none of them was sampled in both runs (sampled: 20 steps of even, 6 of "
        "sometimes, 3 of them in both).",
        "Steps from 39 on: only sometimes has them.",
    ]
    found = compared(service, "seed-1", "seed-2")
    assert found["bits"]["same_seed"] is False
    assert found["bits"]["not_compared"] == ["Their configurations name different seeds."]
    assert found["configuration"]["differing"][0]["key"] == "data.seed"
    bits = compared(service, "even", "first")["bits"]
    assert "Rank 1 of first: even has none such." in bits["not_compared"]


def test_the_command_says_the_same(service):
    done = rankscope(service, "compare", "first", "third")
    assert done.returncode == 0, done.stderr
    assert f"Rank 1 differs from step {NUDGE} on, at outside optimizer" in done.stdout
    assert NUDGED in done.stdout
    assert "desync.parameters" in done.stdout
    assert f"step {NUDGE + 1}" in done.stdout
    done = rankscope(service, "compare", "first", "third", "--json")
    assert json.loads(done.stdout) == compared(service, "first", "third")
    done = rankscope(service, "compare", "first", "nobody")
    assert done.returncode == 4
    assert "there is no run 'nobody'" in done.stderr
    answer = httpx.get(f"{service.url}/api/v1/compare", params={"runs": ["first"]})
    assert answer.status_code == 422


@pytest.mark.skipif(find_chromium() is None, reason=HOW_TO_INSTALL)
def test_the_page_shows_both_on_one_chart(service):
    with chromium() as browser, watched_page(browser, service.url, height=2400) as watched:
        page = watched.page
        page.goto("/")
        page.get_by_label("Compare first").check()
        page.get_by_label("Compare third").check()
        page.get_by_role("link", name="Compare the two").click()
        page.wait_for_url("**/compare?runs=first,third")
        page.wait_for_selector('.chart[data-metric="loss"][data-drawn]')
        assert f"differs from step {NUDGE}" in page.inner_text("#headline")
        assert NUDGED in page.inner_text("#bits")
        assert "desync.parameters" in page.inner_text("#alerts")
        drawn = page.evaluate(
            """() => document.querySelector('.chart[data-metric="loss"] .plot').data
              .filter((t) => t.meta.role === "raw")
              .map((t) => [t.name, Array.from(t.y._inputArray ?? t.y)])"""
        )
        assert [name for name, _ in drawn] == ["first", "third"]
        for run, values in drawn:
            ranks = service.series(run)
            mean = [sum(ranks[r][step] for r in ranks) / len(ranks) for step in range(STEPS)]
            assert values == pytest.approx(mean)
        page.keyboard.press("y")
        page.wait_for_function(
            """() => document.querySelector('.chart[data-metric="loss"] .plot')
              ._fullLayout.yaxis.type === "log" """
        )
        page.set_viewport_size({"width": 400, "height": 3000})
        page.goto("/compare?runs=first,third")
        page.wait_for_selector('.chart[data-metric="loss"][data-drawn]')
        assert page.evaluate("document.documentElement.scrollWidth") == 400
        watched.assert_clean()
