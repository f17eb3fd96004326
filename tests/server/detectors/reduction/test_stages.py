"""Reductions of several stages of one job, each over its own replicas."""

import numpy as np
import pytest

from rankscope.server.detectors.reduction.wrong import ReductionWrong
from rankscope.server.window import Reduction
from tests.support.judging import judge
from tests.support.runs.traces import Trace

STEPS = 30


def found(*factors, micro=2):
    """Stages of two ranks each, and the factor by which each one's mean is off."""
    made = tuple(
        Reduction(
            step=step,
            ranks=np.arange(2 * stage, 2 * stage + 2),
            tensor_count=4,
            known=4,
            ratio=factor,
        )
        for step in range(STEPS)
        for stage, factor in enumerate(factors)
    )
    shape = (2 * len(factors), STEPS)
    series = {"loss": np.ones(shape), "micro_steps": np.full(shape, float(micro))}
    trace = Trace("stages", 0, np.arange(STEPS), series, reductions=made)
    alerts = {cuts: judge(trace, [ReductionWrong()], cuts).alerts for cuts in ((), (1, 7, 20))}
    assert len({repr(one) for one in alerts.values()}) == 1
    return alerts[()]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_one_stage_divides_by_the_micro_batches_and_the_others_do_not(stage):
    factors = [1.0, 1.0, 1.0]
    factors[stage] = 0.25
    (alert,) = found(*factors, micro=4)
    assert (alert.kind, alert.ranks) == ("reduction.wrong", (2 * stage, 2 * stage + 1))
    assert alert.severity in ("warning", "critical")
    assert alert.first_step <= 1


@pytest.mark.parametrize("factors", [(0.5,), (0.5, 0.5), (1.0, 1.0)])
def test_stages_that_all_take_the_mean_over_micro_batches_are_right(factors):
    assert found(*factors) == ()
