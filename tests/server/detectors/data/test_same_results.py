"""Ranks of which nobody sees the batches, and what they compute of them."""

import numpy as np
import pytest

from rankscope.server.detectors.data.duplicated import Duplicated
from tests.support.judging import judge
from tests.support.runs.traces import Trace

STEPS = 40


def alerts(same, *, ranks=3, since=0, cuts=()):
    random = np.random.default_rng(0)
    losses = 2.0 + 0.1 * random.standard_normal((ranks, STEPS))
    norms = 1.0 + 0.1 * random.standard_normal((ranks, STEPS))
    for values in (losses, norms):
        values[same[1:], since:] = values[same[0], since:]
    series = {"loss": losses, "grad_norm_local": norms}
    return judge(Trace("results", 0, np.arange(STEPS), series), [Duplicated()], cuts).alerts


@pytest.mark.parametrize("cuts", [(), range(0, STEPS, 7)], ids=["one", "many"])
@pytest.mark.parametrize("since", [0, 11])
def test_equal_losses_and_gradients_come_of_equal_batches(since, cuts):
    (alert,) = alerts([1, 2], since=since, cuts=cuts)
    assert (alert.severity, alert.ranks, alert.first_step) == ("warning", (1, 2), since)
    assert alert.evidence["losses_equal"] is True


def test_what_all_ranks_report_alike_may_be_that_of_the_whole_job():
    assert not alerts([0, 1, 2])
    assert not alerts([0, 1], ranks=2)
    assert not alerts([0])


def test_those_that_report_may_all_have_the_result_of_the_whole_job():
    random = np.random.default_rng(0)
    whole = np.tile(random.random(STEPS), (4, 1))
    there = np.tile(np.arange(4)[:, None] < 3, STEPS)
    series, present = {"loss": whole, "grad_norm_local": whole}, {"loss": there}
    made = Trace("results", 0, np.arange(STEPS), series, present)
    assert not judge(made, [Duplicated()]).alerts
