"""A decay that takes back what gradients add."""

import numpy as np
import pytest

from rankscope.server.detectors.update.drift import UpdateDrift
from tests.support.judging import judge
from tests.support.runs.traces import Trace

STEPS = 300


def run(
    *, shrinks=0.3, cosine=0.6, asks=0.3, falls=0.0, decay=20.0, adam=False, joined=None, cuts=()
):
    """A loss that comes to 0.7 within 40 steps.

    Args:
        shrinks: what the norm of the parameters comes to.
        cosine: of gradients of consecutive steps, from step 40 on.
        asks: what the size of the gradient comes to.
        falls: what the loss falls by afterwards.
        joined: whether the decay is part of Adam's gradient, where that is known.
    """
    random = np.random.default_rng(0)
    each, shape = np.arange(STEPS), (2, STEPS)
    early = np.exp(-each / 12)
    noise = 0.03 * random.standard_normal(shape)
    series = {
        "loss": 0.7 + 1.3 * early - falls * each / STEPS + noise,
        "weight_norm": 15 * (shrinks + (1 - shrinks) * np.exp(-each / 30)) + 0 * noise,
        "grad_cosine": cosine + (0.8 - cosine) * early + 5 * noise,
        "grad_norm": 3 * (asks + (1 - asks) * early) + noise,
        "lr": np.full(shape, 1e-3),
        "hyperparameters/0/weight_decay": np.full(shape, decay),
    }
    if adam:
        series["hyperparameters/0/betas.0"] = np.full(shape, 0.9)
    if joined is not None:
        series["hyperparameters/0/decoupled_weight_decay"] = np.full(shape, float(not joined))
    return judge(Trace("held", 0, each, series), [UpdateDrift()], cuts).alerts


def test_parameters_that_a_decay_holds_down():
    (alert,) = run()
    assert (alert.kind, alert.severity, alert.state) == ("update.drift", "warning", "open")
    assert 20 <= alert.first_step <= 100
    assert "what was learned 50 steps ago has faded to a third" in alert.cause
    assert alert.evidence["decay"] == pytest.approx(0.02)
    assert run(cuts=range(7, STEPS, 33)) == (alert,)


def test_a_decay_that_takes_most_back_while_the_loss_falls():
    (alert,) = run(falls=0.5, decay=0.1)
    assert alert.evidence["takes"] == pytest.approx(0.65, abs=0.05)
    assert "takes 67 % of it back at each step" in alert.cause
    assert run(falls=0.5, decay=0.1, adam=True) == ()


def test_a_decay_that_is_part_of_adams_gradient_is_not_what_a_step_takes_off():
    (alert,) = run(adam=True)
    assert "decay" not in alert.evidence
    assert "stronger than what the gradients add" in alert.cause


@pytest.mark.parametrize(
    "healthy",
    [
        {"cosine": 0.05},  # the noise of a minimum
        {"falls": 0.5},  # it learns
        {"falls": 0.5, "decay": 0.02},
        {"shrinks": 0.9},
        {"asks": 0.02},  # the balance of a usual decay
    ],
)
def test_a_training_in_which_nothing_is_taken_back(healthy):
    assert run(**healthy) == ()


def test_what_has_faded_away_is_not_back_because_nothing_is_left():
    each = np.arange(STEPS)
    norm = np.tile(4 * np.exp(-np.minimum(each, 120) / 20), (2, 1))
    (alert,) = judge(Trace("faded", 0, each, {"weight_norm": norm}), [UpdateDrift()]).alerts
    assert (alert.kind, alert.key, alert.state) == ("update.drift", "faded", "open")
    assert alert.last_step == STEPS - 1


def test_what_has_faded_and_is_back_is_over():
    each = np.arange(STEPS)
    norm = np.tile(np.where(each < 160, 4 * np.exp(-np.minimum(each, 120) / 20), 4), (2, 1))
    (alert,) = judge(Trace("faded", 0, each, {"weight_norm": norm}), [UpdateDrift()]).alerts
    assert alert.state == "resolved"
    assert 155 <= alert.last_step <= 165


def test_a_decay_in_which_adams_gradient_drowns():
    (alert,) = run(shrinks=0.8, adam=True, joined=True, decay=0.3)
    assert (alert.kind, alert.severity) == ("update.drift", "warning")
    assert alert.evidence["drowns"] == pytest.approx(0.3 * 12 / 0.9, rel=0.1)
    assert "drowns in it" in alert.cause


def test_a_usual_decay_of_adam_or_one_beside_its_gradient_is_none():
    assert run(shrinks=0.8, adam=True, joined=True, decay=0.03) == ()
    assert run(shrinks=0.8, adam=True, joined=False, decay=0.3) == ()
    assert run(shrinks=0.8, adam=True, decay=0.3) == ()
    assert run(shrinks=0.8, adam=True, joined=True, decay=0.3, falls=0.5) == ()
    assert run(shrinks=0.8, adam=True, joined=True, decay=0.3, cosine=0.1) == ()


def forgetting(*, decay=0.2, rate=0.05, update=0.05, plain=True, ends=True):
    """Parameters that a decay shrinks to a fifth while the loss goes on falling."""
    each, shape = np.arange(STEPS), (2, STEPS)
    noise = 0.03 * np.random.default_rng(1).standard_normal(shape)
    rates = rate * (0.5 * (1 + np.cos(np.pi * each / STEPS)) if ends else np.ones(STEPS))
    series = {
        "loss": 2.0 - 1.4 * each / STEPS + noise,
        "weight_norm": 3 + 10 * np.exp(-each / 12) + 0 * noise,
        "update_ratio": np.full(shape, update),
        "lr": rates * np.ones((2, 1)),
        "hyperparameters/0/weight_decay": np.full(shape, decay),
    }
    if plain:
        series["hyperparameters/0/nesterov"] = np.zeros(shape)
    return judge(Trace("forgets", 0, each, series), [UpdateDrift()]).alerts


def test_a_decay_that_forgets_whatever_the_loss_does():
    (alert,) = forgetting()
    assert (alert.severity, alert.key, alert.state) == ("warning", "held", "open")
    assert "the weight decay takes 1 % off at each step" in alert.title
    assert alert.evidence["decay"] == pytest.approx(0.009, abs=0.001)


@pytest.mark.parametrize(
    "healthy",
    [
        {"decay": 0.01},  # 5e-4 a step
        {"update": 1e-3},  # steps are small beside what is left
        {"plain": False},  # of an optimizer that may divide it
    ],
)
def test_decays_that_do_not(healthy):
    assert forgetting(**healthy) == ()
