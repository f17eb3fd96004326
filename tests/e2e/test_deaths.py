"""Whoever dies, the training goes its own way and the server has each step once."""

import os
import signal

import pytest

from tests.support.jobs.ranks import (
    EXAMPLE,
    finished,
    forked_job,
    output,
    printed_losses,
    run_ranks,
)
from tests.support.servers.service import Service, eventually

pytestmark = pytest.mark.e2e


def test_a_server_that_dies_and_comes_back_costs_no_step(tmp_path):
    steps = 240
    with Service(tmp_path / "server") as service:
        environment = {"RANKSCOPE_SERVER": service.url, "RANKSCOPE_RUN": "survivor"}
        with forked_job(
            EXAMPLE,
            *(f"--steps={steps}", "--pause=0.02", "--print-losses"),
            ranks=2,
            folder=tmp_path / "job",
            environment=environment,
        ) as job:
            service.wait_for_step("survivor", 40)
            service.kill()
            at_death = len(output(job.ranks[0]).splitlines())
            # The training does not notice: it goes on for a while with nobody listening.
            eventually(lambda: len(output(job.ranks[0]).splitlines()) > at_death + 60, timeout_s=30)
            assert job.running
            service.start()
            done = finished(job).check()
        found = service.wait_for_state("survivor", "finished")
        assert found["last_step"] == steps - 1
        printed = printed_losses(done.outputs)
        assert all(sorted(losses) == list(range(steps)) for losses in printed.values())
        assert service.series("survivor") == printed
        assert service.alerts("survivor") == []
        # One process a rank all along: nothing looks like a restart of the training.
        assert {rank["attempt"] for rank in found["rank_status"]} == {0}


def test_a_rank_that_is_killed_is_named(tmp_path):
    with Service(tmp_path / "server") as service:
        environment = {"RANKSCOPE_SERVER": service.url, "RANKSCOPE_RUN": "victim"}
        with forked_job(
            EXAMPLE,
            *("--steps=100000", "--pause=0.01"),
            ranks=3,
            folder=tmp_path / "job",
            environment=environment,
        ) as job:
            service.wait_for_step("victim", 40)
            os.kill(job.ranks[1].pid, signal.SIGKILL)
            codes = finished(job).exit_codes
            assert codes[1] == -signal.SIGKILL
            assert all(codes), "the other ranks cannot have finished"
        (alert,) = eventually(lambda: service.alerts("victim"), timeout_s=90)
        assert (alert["kind"], alert["ranks"]) == ("rank.silent", [1])
        service.wait_for_state("victim", "failed")


def test_without_a_server_the_training_goes_on_with_one_warning(tmp_path):
    steps = 40
    done = run_ranks(
        EXAMPLE,
        *(f"--steps={steps}", "--print-losses"),
        ranks=2,
        folder=tmp_path,
        environment={"RANKSCOPE_SERVER": "http://127.0.0.1:9", "RANKSCOPE_RUN": "alone"},
    ).check()
    printed = printed_losses(done.outputs)
    assert all(sorted(losses) == list(range(steps)) for losses in printed.values())
    others = [line for text in done.outputs for line in text.splitlines() if " loss " not in line]
    assert len(others) == 1, others
    assert "rankscope sync" in others[0]
