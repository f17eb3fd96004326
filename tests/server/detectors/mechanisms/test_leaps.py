"""Rises of the loss that are held against the step before them."""

from dataclasses import replace

import numpy as np
import pytest

from rankscope.server.detectors.loss.diverging import LossDiverging
from rankscope.server.detectors.loss.spike import LossSpike
from rankscope.server.window import Occurrence
from tests.support.judging import judge
from tests.support.runs.traces import Trace

STEPS, AT = 160, 100


def leaping(*, update=0.02, gradient=0.5, shards=1, until=STEPS, written=False):
    """A loss that has come down to 0.01 and is 2 from step `AT` on, of two ranks.

    The learning rate had been raised at step 80, and has come down to half of it since.

    Args:
        update, gradient: norms of a step, and of the gradient once the loss is high.
        shards: each rank holds a part of them that differs from the other one's by this factor.
        until: the step at which the loss is low again.
        written: the parameters are written otherwise right before the leap.
    """
    random = np.random.default_rng(3)
    each = np.arange(STEPS)
    high = (each >= AT) & (each < until)
    course = np.where(high, 2.0, 0.01 + 2 * np.exp(-each / 8))
    losses = course * np.exp(0.1 * random.standard_normal((2, STEPS)))
    share = np.array([[1.0], [shards]])
    series = {
        "loss": losses,
        "grad_norm": np.where(high, gradient, 0.05) * share,
        "update_norm": np.full((2, STEPS), update) * share,
        "lr": np.tile(np.where(each < 80, 0.01, 0.1 * 0.97 ** (each - 80)), (2, 1)),
    }
    present = {}
    if written:
        series["parameters_written"] = np.ones((2, STEPS))
        present = {"parameters_written": np.tile(each == AT, (2, 1))}
    return Trace("leaping", 3, each, series, present)


@pytest.mark.parametrize("shards", [1, 3])
def test_data_that_have_changed_are_told_from_a_rate_that_was_raised(shards):
    (alert,) = judge(leaping(shards=shards), [LossDiverging()]).alerts
    assert alert.first_step == AT
    assert "it is what the loss is" in alert.cause
    assert "learning rate had been raised" not in alert.cause
    assert 0 < alert.evidence["reach"] < 0.2


@pytest.mark.parametrize("step", [{"update": 2.0}, {"gradient": 40.0}])
def test_a_step_that_can_have_done_it_is_not_excluded(step):
    (alert,) = judge(leaping(**step), [LossDiverging()]).alerts
    assert "learning rate had been raised" in alert.cause
    assert "reach" not in alert.evidence


def test_parameters_that_were_written_are_no_step():
    (alert,) = judge(leaping(written=True), [LossDiverging()]).alerts
    assert "it is what the loss is" not in alert.cause


def test_a_spike_has_it_too():
    (alert,) = judge(leaping(until=AT + 4), [LossSpike()]).alerts
    assert alert.first_step == AT
    assert "it is what the loss is" in alert.cause


@pytest.mark.parametrize("since", [0.0, 0.3])
def test_answers_that_are_worth_nothing_any_more(since):
    trace = leaping(gradient=40.0)
    each = np.arange(STEPS)
    trace.series["explained_deviance"] = np.tile(np.where(each < AT, 0.5, since), (2, 1))
    trace.series["lr"] = np.full((2, STEPS), 0.1)
    (alert,) = judge(trace, [LossDiverging()]).alerts
    assert ("50 %" in alert.cause) == (since == 0)
    assert ("no longer belongs to the targets" in alert.cause) == (since == 0)


def test_of_steps_whose_norms_are_not_known_nothing_is_said():
    trace = leaping()
    there = np.tile(np.arange(STEPS) % 8 == 0, (2, 1))
    trace.present.update(grad_norm=there, update_norm=there)
    (alert,) = judge(trace, [LossDiverging()]).alerts
    assert "it is what the loss is" not in alert.cause


def test_of_players_of_a_game_nothing_is_said():
    trace = leaping(until=AT + 4)
    turns = Occurrence(0, 0, "optimizers.turns", "turns", {"optimizers": 2}, 0.0)
    (alert,) = judge(replace(trace, events=(turns,)), [LossSpike()]).alerts
    assert "it is what the loss is" not in alert.cause


@pytest.mark.parametrize("detector", [LossDiverging(), LossSpike()])
def test_what_comes_without_losses_is_not_kept(detector):
    trace, state = leaping(), detector.start()
    trace.series["loss"][:, AT:] = np.nan
    for window in trace.windows(range(0, STEPS, 10)):
        detector.advance(window, state)
    assert not state.leaps._waiting
