"""Steps that are taken while gradients wait for their reduction."""

import numpy as np
import pytest

from rankscope.server.detectors.reduction.wrong import ReductionWrong
from tests.support.judging import judge
from tests.support.runs.traces import Trace


def alerts(left, cuts):
    steps = np.arange(left.shape[1])
    trace = Trace("unreduced", 0, steps, {"gradients_unreduced": left, "loss": np.ones(left.shape)})
    return judge(trace, [ReductionWrong()], cuts).alerts


@pytest.mark.parametrize("cuts", [(), range(0, 40, 3)], ids=["whole", "blocks"])
def test_gradients_that_are_always_left_are_missing_from_the_steps(cuts):
    left = np.zeros((2, 40))
    left[:, 12:] = 6
    (alert,) = alerts(left, cuts)
    assert (alert.severity, alert.ranks, alert.first_step) == ("warning", (0, 1), 12)
    assert alert.evidence["tensors"] == 6
    assert "set_requires_gradient_sync" in alert.remedy


def test_those_of_one_step_may_be_the_end_of_an_epoch():
    left = np.zeros((2, 40))
    left[:, 12] = 6
    assert not alerts(left, ())
