"""Parameters that are frozen and trained again, to and fro."""

import numpy as np
import pytest

from rankscope.server.detectors.update.missing import UpdateMissing
from rankscope.server.window import Occurrence
from tests.support.judging import judge
from tests.support.runs.traces import Trace


def alerts(switches, cuts=()):
    """Of a run in which two tensors are frozen for 5 steps, so many times."""
    each = np.arange(400)
    events = []
    for turn in range(switches):
        told = {"count": 2, "names": ["d.weight", "d.bias"]}
        at = 10 + 10 * turn
        events.append(Occurrence(0, at, "parameters.frozen", "", told, 0.0))
        events.append(Occurrence(0, at + 5, "parameters.frozen", "", {"count": 0}, 0.0))
    series = {"loss": np.ones((1, len(each))), "grad_norm": np.ones((1, len(each)))}
    trace = Trace("switched", 0, each, series, events=tuple(events))
    return judge(trace, [UpdateMissing()], cuts).alerts


@pytest.mark.parametrize("cuts", [(), range(0, 400, 7)], ids=["one", "many"])
def test_what_is_switched_to_and_fro_is_no_flood(cuts):
    assert len(alerts(30, cuts)) == 2


def test_once_is_told():
    (alert,) = alerts(1)
    assert (alert.first_step, alert.state) == (10, "resolved")
