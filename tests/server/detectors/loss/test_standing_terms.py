"""Parts of the loss that are logged and stay where they began while the whole falls."""

import numpy as np
import pytest

from rankscope.server.detectors.loss.plateau import LossPlateau
from tests.support.judging import judge
from tests.support.runs.traces import Trace

STEPS = 300
CUTS = [(), (7, 8, 150), range(0, STEPS, 11)]


def alerts(
    part, *, name="cls_loss", whole=lambda t: 60 * 0.97**t + 3, cuts=(), accuracy=0.4, first=0
):
    """Of a job that logs a part of its loss; both as functions of the step."""
    at = np.arange(STEPS)
    noise = np.exp(0.03 * np.random.default_rng(0).standard_normal((2, STEPS)))
    series = {"loss": whole(at) * noise, name: part(at) * noise}
    series["accuracy"] = np.full((2, STEPS), accuracy)
    found = judge(Trace("parts", 0, at + first, series), [LossPlateau()], cuts).alerts
    return [alert for alert in found if alert.key]


@pytest.mark.parametrize("cuts", CUTS)
def test_one_that_is_not_learned_is_named(cuts):
    [alert] = alerts(lambda t: 1.1 - 0.0001 * t, cuts=cuts)
    assert (alert.kind, alert.severity, alert.first_step) == ("loss.plateau", "warning", 0)
    assert alert.title.startswith("`cls_loss` stays near 1.0")
    assert alert.seen_step == 199
    assert alert.evidence["loss_after"] < 0.1 * alert.evidence["loss_before"]


def test_it_is_over_when_the_part_falls():
    [alert] = alerts(lambda t: np.where(t < 210, 1.1, 0.6))
    assert alert.state == "resolved"


@pytest.mark.parametrize(
    ("part", "more"),
    [
        (lambda t: 1.1 * 0.99**t, {}),  # it falls
        (lambda t: np.where(t < 60, 1.1 - 0.005 * t, 0.8), {}),  # it fell, and has come to its end
        (lambda t: 1.1 + 0 * t, {"whole": lambda t: 4 - 0.004 * t}),  # so does the whole, or nearly
        (lambda t: 1.1 + 0.01 * t, {}),  # it rises
        (lambda t: 1.1 + 0 * t, {"first": 5000}),  # who goes on has learned it before
        (lambda t: 1.1 + 0 * t, {"name": "kl_loss"}),  # it need not fall
        (lambda t: 1.1 + 0 * t, {"name": "moe_loss"}),
        (lambda t: 1.1 + 0 * t, {"name": "loss_tokens"}),
        (lambda t: 1.1 + 0 * t, {"name": "val_loss"}),  # an evaluation has a kind of its own
        (lambda t: 1.1 + 0 * t, {"name": "loss_d"}),  # a player's
        (lambda t: 1.1 + 0 * t, {"name": "codes_used"}),  # no error at all
    ],
)
def test_others_are_not(part, more):
    assert alerts(part, **more) == []


@pytest.mark.parametrize("accuracy", [0.9, np.nan])
def test_where_answers_are_right_or_unknown_it_is_a_remark(accuracy):
    [alert] = alerts(lambda t: 1.1 - 0.0001 * t, accuracy=accuracy)
    assert alert.severity == "info"


def test_what_never_changes_is_a_setting():
    at = np.arange(STEPS)
    series = {"loss": np.tile(60 * 0.97**at + 3, (2, 1)), "l2": np.full((2, STEPS), 0.01)}
    assert judge(Trace("parts", 0, at, series), [LossPlateau()]).alerts == ()
