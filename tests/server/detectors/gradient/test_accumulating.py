"""Whose gradients add up."""

import numpy as np
import pytest

from rankscope.server.detectors.gradient.accumulating import GradientAccumulating
from rankscope.server.window import Reduction
from tests.support.judging import judge
from tests.support.runs.traces import Trace

RANKS, STEPS, AT = 4, 40, 20


def found(keeping):
    """The alert of a job in which these ranks keep their gradients from step `AT` on."""
    carried = np.zeros((RANKS, STEPS))
    carried[list(keeping), AT:] = 0.3
    reductions = tuple(
        Reduction(
            step=step,
            ranks=np.arange(RANKS),
            tensor_count=6,
            known=6,
            ratio=1.0 if step < AT else np.nan,
            pattern="" if step < AT else "accumulated",
        )
        for step in range(STEPS)
    )
    series = {"gradient_carried": carried, "grad_norm": np.ones((RANKS, STEPS))}
    trace = Trace("carried", 0, np.arange(STEPS), series, reductions=reductions)
    [alert] = judge(trace, [GradientAccumulating()]).alerts
    return alert


@pytest.mark.parametrize("keeping", [(2,), (0, 3)])
def test_ranks_that_alone_keep_their_gradients_are_named(keeping):
    alert = found(keeping)
    assert (alert.ranks, alert.first_step, alert.severity) == (keeping, AT, "critical")
    assert "the other ranks had none" in alert.cause


def test_where_all_do_all_are():
    alert = found(range(RANKS))
    assert (alert.ranks, alert.first_step) == ((0, 1, 2, 3), AT)
    assert "other ranks" not in alert.cause


def test_where_none_does_it_is_the_reduction():
    alert = found(())
    assert alert.ranks == (0, 1, 2, 3)
    assert "although the gradients were set to zero" in alert.cause
