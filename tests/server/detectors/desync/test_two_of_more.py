"""Two ranks that differ, of a job that has others which hold something else."""

from dataclasses import replace

import numpy as np
import pytest

from rankscope.server.detectors.desync.detector import Desync
from tests.support.judging import judge
from tests.support.runs.replicas import apart


def beside(fault, rates, *, pushes=False):
    """Two replicas, of which the last one differs, and a rank of another stage for each rate."""
    trace = apart(0, fault=fault, ranks=2, rank=1)
    there = np.ones((2, len(trace.steps)), dtype=bool)
    more = len(rates)
    present = {
        name: np.concatenate(
            [trace.present.get(name, there), np.full((more, len(trace.steps)), name == "lr")]
        )
        for name in trace.series
    }
    series = {
        name: np.concatenate(
            [values, np.repeat(np.array(rates or [])[:, None], len(trace.steps), axis=1)]
        )
        for name, values in trace.series.items()
    }
    if pushes:
        series["push_worker"] = np.ones_like(series["lr"])
        present["push_worker"] = np.zeros_like(present["lr"])
        present["push_worker"][0] = True
    made = replace(trace, series=series, present=present)
    found = judge(made, [Desync()]).alerts
    return [(a.kind, a.ranks) for a in found if a.severity != "info"]


@pytest.mark.parametrize(
    ("rates", "wrong"), [([], (0, 1)), ([0.05], (1,)), ([0.02, 0.02], (0,)), ([0.3], (0, 1))]
)
def test_the_one_whose_rate_other_stages_have_is_right(rates, wrong):
    assert beside("rate", rates)[0] == ("desync.hyperparameters", wrong)


@pytest.mark.parametrize("fault", ["bitflip", "written"])
@pytest.mark.parametrize(("pushes", "wrong"), [(False, (0, 1)), (True, (1,))])
def test_the_server_is_right_where_a_worker_holds_something_else(fault, pushes, wrong):
    assert beside(fault, [], pushes=pushes)[0] == ("desync.parameters", wrong)
