"""A block of the loss may begin at any step: what is found must not depend on where."""

from dataclasses import replace
from pathlib import Path

import pytest

from rankscope.server.detectors.loss.diverging import LossDiverging
from rankscope.server.detectors.lr.too_high import RateTooHigh
from tests.support.judging import judge
from tests.support.runs.traces import Trace

TRACE = Path("tests/server/detectors/traces/F43-demo-lr-x30.npz")


@pytest.mark.parametrize("skipped", range(10))
def test_a_rate_that_is_raised_in_the_midst_of_a_block_is_named(skipped):
    """It was raised at step 200; before the mending 3 of 10 said that it had not been (6, 7, 8)."""
    whole = Trace.load(TRACE)
    run = replace(
        whole,
        steps=whole.steps[skipped:],
        series={name: values[:, skipped:] for name, values in whole.series.items()},
        present={name: mask[:, skipped:] for name, mask in whole.present.items()},
    )
    found = judge(run, [LossDiverging(), RateTooHigh()], range(0, len(run.steps), 50))
    (diverging,) = found.of("loss.diverging")
    assert "learning rate had been raised" in diverging.cause
    assert found.of("lr.too_high")
    assert 200 <= diverging.first_step <= 210
