"""Inputs that are of another size since a step, on every rank."""

import numpy as np
import pytest

from rankscope.server.detectors.data.outlier import DataOutlier
from tests.support.judging import judge
from tests.support.runs.traces import Trace

STEPS = 240


def alerts(
    factor,
    *,
    at=120,
    rise=0.0,
    ranks=2,
    until=STEPS,
    late=0,
    every=1,
    cuts=(),
    noise=0.05,
    received=0,
):
    """A run whose inputs have another size from step `at` to `until`, and whose loss rises then.

    Args:
        rise: of the loss, as a share of it.
        late: steps by which the last rank is later than the others.
        received: the last ones of the ranks, which are given what others have computed.
    """
    random = np.random.default_rng(3)
    each, shape = np.arange(STEPS), (ranks, STEPS)
    moved = np.tile((each >= at) & (each < until), (ranks, 1))
    moved[-1, at : at + late] = False
    size = np.exp(0.01 * random.standard_normal(shape)) * np.where(moved, factor, 1.0)
    loss = np.exp(noise * random.standard_normal(shape)) * (1 + 2 * np.exp(-each / 30))
    present = np.tile(each % every == 0, (ranks, 1))
    made = Trace(
        "moved",
        0,
        each,
        {
            "loss": np.where(moved, loss * (1 + rise), loss),
            "input_rms": size,
            "input_received": np.tile(np.arange(ranks)[:, None] >= ranks - received, STEPS) * 1.0,
        },
        present={"loss": np.ones_like(present), "input_rms": present},
    )
    return judge(made, [DataOutlier()], cuts).alerts


@pytest.mark.parametrize(("factor", "size"), [(4.0, "larger"), (0.1, "smaller")])
def test_what_later_stages_of_a_pipeline_are_given_is_no_data(factor, size):
    (alert,) = alerts(factor, rise=1.0, ranks=4, received=2)
    assert f"times {size} since step 120" in alert.title
    (cut,) = alerts(factor, rise=1.0, ranks=4, received=2, cuts=(1, *range(0, STEPS, 33)))
    assert (cut.first_step, cut.evidence) == (alert.first_step, alert.evidence)
    assert not alerts(factor, rise=1.0, ranks=2, received=2)


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize(("factor", "size"), [(4.0, "larger"), (0.1, "smaller")])
def test_other_inputs_and_a_loss_that_rises_with_them(factor, size, ranks):
    (alert,) = alerts(factor, rise=1.0, ranks=ranks)
    assert (alert.kind, alert.severity, alert.state) == ("data.outlier", "warning", "open")
    assert (alert.first_step, alert.ranks, alert.stage) == (120, (), "batch")
    assert f"times {size} since step 120" in alert.title
    assert "The loss went from" in alert.cause
    assert ("every rank" in alert.cause) == (ranks > 1)
    assert alert.evidence["factor"] == pytest.approx(factor, rel=0.05)


@pytest.mark.parametrize("factor", [1 / 255, 255.0])
def test_no_other_data_explain_a_factor_of_255(factor):
    """Where layers normalise, the loss does not show it."""
    (alert,) = alerts(factor)
    assert alert.first_step == 120
    assert "The loss went from" not in alert.cause


@pytest.mark.parametrize("ranks", [1, 2])
def test_inputs_that_are_nothing_but_zeros(ranks):
    (alert,) = alerts(0.0, ranks=ranks)
    assert (alert.severity, alert.state, alert.first_step) == ("warning", "open", 120)
    assert alert.title == "All inputs are zero since step 120"
    assert "  " not in alert.cause
    assert [a for a in alerts(0.0, until=122) if a.key == "inputs:all"] == []
    # Before all others, and in between: they are the data's.
    assert [a for a in alerts(0.0, at=0, until=40) if a.key == "inputs:all"] == []


@pytest.mark.parametrize("cuts", [(), range(0, STEPS, 7)], ids=["one", "many"])
def test_batches_of_zeros_now_and_then_are_the_data_s(cuts):
    random = np.random.default_rng(0)
    size = np.where(random.random((2, 2000)) < 0.3, 0.0, 1.0)
    size[1] = size[0]
    series = {"loss": np.ones((2, 2000)), "input_rms": size}
    made = Trace("sparse", 0, np.arange(2000), series)
    found = judge(made, [DataOutlier()], cuts).alerts
    assert [a for a in found if a.key == "inputs:all"] == []


@pytest.mark.parametrize(
    "healthy",
    [
        {"factor": 4.0},
        {"factor": 0.2},
        {"factor": 1.5, "rise": 1.0},
        {"factor": 1.0, "rise": 1.0},
        {"factor": 4.0, "rise": -0.5},
        {"factor": 4.0, "rise": 1.0, "until": 122},
    ],
)
def test_other_data_whose_loss_is_no_worse_are_nothing(healthy):
    assert [a for a in alerts(**healthy) if a.key == "inputs:all"] == []


def test_it_is_over_where_they_are_as_before():
    (alert,) = alerts(4.0, rise=1.0, until=180)
    assert alert.state == "resolved"
    assert 176 <= alert.last_step <= 180


def test_it_is_the_same_whenever_it_is_asked_and_where_inputs_are_measured_now_and_then():
    once = alerts(4.0, rise=1.0)
    assert alerts(4.0, rise=1.0, cuts=range(3, STEPS, 17)) == once
    (alert,) = alerts(4.0, rise=1.0, every=4)
    assert alert.first_step == 120


def test_one_rank_alone_is_another_finding():
    assert all(alert.key != "inputs:all" for alert in alerts(4.0, rise=1.0, late=STEPS))
