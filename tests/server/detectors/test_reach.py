"""What sparse logs cannot show reads as not judged, and never as passed."""

from __future__ import annotations

import numpy as np
import pytest

from rankscope.server.detectors.gradient.exploding import GradientExploding
from rankscope.server.detectors.loss.diverging import LossDiverging
from rankscope.server.detectors.loss.spike import LossSpike, SpikePolicy
from rankscope.server.detectors.lr.too_high import RateTooHigh
from rankscope.server.detectors.push.lost import PushLost
from rankscope.server.window import Status
from tests.support.judging import judge
from tests.support.runs.traces import Trace

RANKS = 2


def falling(steps, *, bend=None):
    """A loss that falls smoothly under a little noise, and the norms that go with it."""
    random = np.random.default_rng(0)
    noise = random.lognormal(0, 0.05, (RANKS, steps))
    loss = (0.2 + 2 * np.exp(-np.arange(steps) / 200)) * noise
    norms = np.broadcast_to(random.lognormal(0, 0.1, steps), (RANKS, steps)).copy()
    if bend is not None:
        bend(loss, norms)
    series = {"loss": loss, "grad_norm": norms, "lr": np.full((RANKS, steps), 0.1)}
    return Trace("falling", 0, np.arange(steps), series)


def reported(run, detector):
    found = judge(run, [detector])
    (check,) = found.checks.values()
    return [alert.kind for alert in found.alerts], check


def test_an_explosion_between_two_logged_steps_is_not_said_to_have_been_looked_for():
    def explodes(loss, norms):
        norms[:, 301:309] *= 40
        # Of a norm that rises while the loss goes on falling nothing is said.
        loss[:, 302:310] *= 3

    run = falling(600, bend=explodes)
    assert reported(run, GradientExploding())[0] == ["gradient.exploding"]
    alerts, check = reported(run.thinned(10), GradientExploding())
    assert alerts == []
    assert check.status == Status.INSUFFICIENT_DATA
    assert "`grad_norm` is recorded at one of 10 steps" in check.why


@pytest.mark.parametrize("detector", [LossSpike, LossDiverging, GradientExploding, RateTooHigh])
def test_where_every_step_is_logged_a_healthy_run_is_judged(detector):
    alerts, check = reported(falling(400), detector())
    assert alerts == []
    assert check.status == Status.OK
    assert "recorded at one of" not in check.why


def test_single_steps_that_are_missing_make_no_log_sparse():
    run = falling(400)
    present = np.ones((RANKS, 400), dtype=bool)
    present[:, ::10] = False
    gaps = Trace("gaps", 0, run.steps, run.series, dict.fromkeys(run.series, present))
    assert reported(gaps, LossSpike())[1].status == Status.OK


def test_a_long_sparse_log_reports_what_lasts_and_says_what_it_cannot_show():
    # 120 observations, of which a divergence needs 30: a quarter of the run.
    alerts, check = reported(falling(600).thinned(5), LossDiverging())
    assert (alerts, check.status) == ([], Status.INSUFFICIENT_DATA)
    # 1,200 of them: a fortieth.
    alerts, check = reported(falling(6000).thinned(5), LossDiverging())
    assert (alerts, check.status) == ([], Status.OK)
    assert "a fault that lasts less than 150 steps may go unseen" in check.why


def test_what_a_rate_follows_from_limits_what_can_be_said_of_it():
    check = reported(falling(6000).thinned(5), RateTooHigh())[1]
    assert check.status == Status.INSUFFICIENT_DATA


def test_values_that_are_not_finite_show_nothing_of_a_step():
    def overflows(loss, norms):
        norms[:, np.arange(600) % 4 != 0] = np.inf

    check = reported(falling(600, bend=overflows), GradientExploding())[1]
    assert check.status == Status.INSUFFICIENT_DATA


def test_a_loss_that_begins_to_scatter_and_rises_makes_no_jump_of_a_sparse_log():
    def scatters(loss, norms):
        random = np.random.default_rng(1)
        grown = np.exp(np.linspace(-5, 7, 300) + random.normal(0, 1.5, 300))
        loss[:, 300:] = 0.2 * grown

    run = falling(600, bend=scatters)
    assert reported(run.thinned(5), LossSpike())[0] == []
    # By the 64 values alone, which reach back to before it, it would be one.
    assert reported(run.thinned(5), LossSpike(SpikePolicy(recent_z=0.0)))[0] == ["loss.spike"]


def test_a_jump_in_a_sparse_log_is_found():
    def jumps(loss, norms):
        loss[:, 400:] *= 30

    alerts, check = reported(falling(600, bend=jumps).thinned(5), LossSpike())
    assert alerts == ["loss.spike"]
    assert check.status == Status.OPEN


def server_and_workers(*, every=1):
    """An asynchronous parameter server that takes the pushes of two workers before both pull."""
    steps = np.arange(400)
    even = steps % 2 == 0
    rows = np.zeros((3, 400), bool)
    of_server, of_workers = rows.copy(), rows.copy()
    of_server[0, 1:] = True
    of_workers[1:, even & (steps // 2 % every == 0)] = True
    random = np.random.default_rng(0)
    falling = (0.2 + 2 * np.exp(-steps / 100)) * random.lognormal(0, 0.05, (3, 400))
    series = {
        "push_worker": np.where(even, 2.0, 1.0),
        "push_staleness": np.where(even, 1.0, 0.0),
        "pushes": steps / 2,
        "loss": falling,
    }
    present = dict.fromkeys(series, of_server) | dict.fromkeys(("pushes", "loss"), of_workers)
    everywhere = {name: np.broadcast_to(row, (3, 400)).copy() for name, row in series.items()}
    return Trace("server", 0, steps, everywhere, present)


def test_versions_that_no_worker_pulled_have_no_loss_that_could_be_left_out():
    found = judge(server_and_workers(), [LossSpike(), PushLost()])
    assert [alert.kind for alert in found.alerts] == []
    assert found.checks["loss.spike"].status == Status.OK
    assert "recorded at one of" not in found.checks["loss.spike"].why


def test_versions_that_a_worker_pulled_and_left_out_are_said_to_be():
    checks = judge(server_and_workers(every=4), [LossSpike(), PushLost()]).checks
    assert checks["loss.spike"].status == Status.INSUFFICIENT_DATA
    assert "`loss` is recorded at one of 4 steps" in checks["loss.spike"].why
