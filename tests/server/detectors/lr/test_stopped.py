"""Steps that come to nothing, of trainings that post no rate."""

import numpy as np
import pytest

from rankscope.server.detectors.lr.too_low import RateTooLow
from tests.support.judging import judge
from tests.support.runs.traces import Trace

STEPS = 160
CUTS = pytest.mark.parametrize(
    "cuts", [(), range(0, STEPS, 7), range(STEPS)], ids=["one", "many", "each"]
)


def found(
    cuts=(),
    *,
    at=60,
    falls=1e-6,
    remains=1.0,
    until=STEPS,
    norm="grad_norm",
    rate_at=STEPS,
    moves=3e-3,
):
    random = np.random.default_rng(0)
    shape, late = (2, STEPS), (np.arange(STEPS) >= at) & (np.arange(STEPS) < until)
    series = {
        "loss": 1 + 0.1 * random.standard_normal(shape),
        "update_ratio": np.where(late, falls, 1) * moves * np.exp(random.normal(0, 0.3, shape)),
        norm: np.where(late, remains, 1) * np.exp(random.normal(0, 0.2, shape)),
    }
    present = {}
    if rate_at < STEPS:
        series["lr"] = np.full(shape, 0.1)
        present["lr"] = np.tile(np.arange(STEPS) >= rate_at, (2, 1))
    trace = Trace("stopped", 0, np.arange(STEPS), series, present)
    result = judge(trace, [RateTooLow()], cuts)
    return [alert for alert in result.alerts if alert.key == "stopped"]


@CUTS
@pytest.mark.parametrize("norm", ["grad_norm", "grad_norm_local"])
def test_steps_that_come_to_nothing(cuts, norm):
    (alert,) = found(cuts, norm=norm)
    assert (alert.severity, alert.state, alert.first_step) == ("warning", "open", 60)
    assert alert.evidence["update_ratio"] == pytest.approx(3e-9, rel=0.3)


@CUTS
def test_it_is_over_once_a_rate_is_posted(cuts):
    (alert,) = found(cuts, rate_at=110)
    assert (alert.state, alert.last_step) == ("resolved", 109)


@pytest.mark.parametrize(
    "more",
    [
        {"falls": 0.01},  # a decay in steps
        {"moves": 1e-8},  # nothing was learned before, either
        {"remains": 0.1},  # it has converged
        {"until": 80},  # a stretch of steps that are skipped
        {"rate_at": 0},  # what becomes of a rate that is known is judged by it
    ],
)
def test_what_may_be_meant_is_none(more):
    assert found(**more) == []
