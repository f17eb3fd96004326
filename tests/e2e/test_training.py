"""A user's training script under torchrun: what it prints is what the server has."""

import math
import os
import subprocess

import pytest

from rankscope.server.demo.processes import RANKSCOPE
from tests.support.jobs.ranks import EXAMPLE, TORCHRUN, printed_losses
from tests.support.servers.browser import (
    HOW_TO_INSTALL,
    chromium,
    find_chromium,
    wait_until_drawn,
    watched_page,
)
from tests.support.servers.service import Service

pytestmark = pytest.mark.e2e

STEPS, NAN_STEP, RANKS = 120, 90, 4


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with Service(tmp_path_factory.mktemp("server")) as service:
        yield service


# What a chart draws: name -> [[step, value as text], ...].
DRAWN = """() => Object.fromEntries(
  document.querySelector('.chart[data-metric="loss"] .plot').data
    .filter((line) => line.meta && line.meta.role === "raw")
    .map((line) => {
      const numbers = (a) => Array.from(a._inputArray ?? a);
      const values = numbers(line.y);
      return [line.name, numbers(line.x).map((step, i) => [step, String(values[i])])];
    }))"""


def torchrun(service, run, *arguments, ranks=RANKS):
    """Output of the example under torchrun."""
    done = subprocess.run(
        [TORCHRUN, "--standalone", f"--nproc-per-node={ranks}", EXAMPLE, *arguments],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "RANKSCOPE_SERVER": service.url,
            "RANKSCOPE_RUN": run,
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def gate(service_url, run, *arguments):
    return subprocess.run(
        [*RANKSCOPE, "gate", run, *arguments],
        env={**os.environ, "RANKSCOPE_SERVER": service_url},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.fixture(scope="module")
def healthy(service):
    done = torchrun(service, "healthy", f"--steps={STEPS}", "--print-losses", "--seed=3")
    service.wait_for_state("healthy", "finished")
    return done


@pytest.fixture(scope="module")
def spoiled(service):
    done = torchrun(
        service, "spoiled", f"--steps={STEPS}", "--print-losses", f"--nan-step={NAN_STEP}"
    )
    service.wait_for_state("spoiled", "finished")
    return done


def test_the_server_has_every_loss_that_was_printed(service, healthy):
    printed = printed_losses([healthy.stdout])
    assert sorted(printed) == list(range(RANKS))
    assert all(sorted(losses) == list(range(STEPS)) for losses in printed.values())
    assert service.series("healthy") == printed


def test_a_loss_that_is_nan_stays_one(service, spoiled):
    printed = printed_losses([spoiled.stdout])
    stored = service.series("spoiled")
    assert math.isnan(printed[0].pop(NAN_STEP))
    assert math.isnan(stored[0].pop(NAN_STEP))
    assert stored == printed
    answer = service.get("/runs/spoiled/series", metric="loss", rank=0, from_step=NAN_STEP)
    assert answer["series"][0]["values"][0] == "NaN"


@pytest.mark.skipif(find_chromium() is None, reason=HOW_TO_INSTALL)
def test_the_browser_draws_what_was_printed(service, spoiled):
    printed = printed_losses([spoiled.stdout])
    with chromium() as browser, watched_page(browser, service.url, height=2400) as watched:
        watched.page.goto("/runs/spoiled")
        wait_until_drawn(watched.page)
        watched.page.locator('.chart[data-metric="loss"]').scroll_into_view_if_needed()
        watched.page.wait_for_selector('.chart[data-metric="loss"][data-drawn]')
        drawn = watched.page.evaluate(DRAWN)
        watched.assert_clean()
    assert sorted(drawn) == [f"rank {rank}" for rank in range(RANKS)]
    for rank, losses in printed.items():
        found = {step: float(value) for step, value in drawn[f"rank {rank}"]}
        assert math.isnan(found.get(NAN_STEP, 0.0)) == (rank == 0)
        assert {s: repr(v) for s, v in found.items()} == {s: repr(v) for s, v in losses.items()}


def test_what_is_recorded_without_being_asked(service, healthy):
    names = {item["name"] for item in service.get("/runs/healthy/metrics")["items"]}
    assert names >= {"loss", "accuracy", "grad_norm", "lr", "step_seconds", "samples_per_second"}
    assert "epoch" in names  # the example logs it
    assert service.series("healthy", "lr")[0][STEPS - 1] == 0.05
    found = service.run("healthy")
    assert (found["world_size"], found["last_step"]) == (RANKS, STEPS - 1)


def test_the_address_is_reported_once(service, healthy):
    reported = [line for line in healthy.stderr.splitlines() if "rankscope" in line]
    assert reported == [f"rankscope: run healthy at {service.url}/runs/healthy"]


def test_a_healthy_run_passes_the_gate(service, healthy):
    done = gate(service.url, "healthy", "--wait", "30")
    assert done.returncode == 0, done.stdout + done.stderr
    assert service.alerts("healthy") == []


def test_a_broken_run_fails_the_gate_and_the_alert_names_rank_and_step(service, spoiled):
    done = gate(service.url, "spoiled", "--wait", "30")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "loss.nonfinite" in done.stdout
    (alert,) = service.alerts("spoiled")
    assert (alert["kind"], alert["ranks"], alert["first_step"]) == (
        "loss.nonfinite",
        [0],
        NAN_STEP,
    )


def test_what_cannot_be_judged_never_passes_the_gate(service):
    torchrun(service, "short", "--steps=5", ranks=2)
    service.wait_for_state("short", "finished")
    assert gate(service.url, "short").returncode == 4
    assert gate(service.url, "nobody").returncode == 4
    assert gate("http://127.0.0.1:9", "healthy").returncode == 3
