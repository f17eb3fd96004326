"""Parameters that the optimizer does not hold, and what the training makes of it."""

import numpy as np
import pytest

from rankscope.server.detectors.update.missing import UpdateMissing
from tests.support.judging import judge
from tests.support.runs.traces import Trace


def alerts(gained, *, left_out=6, steps=260):
    config = {
        "parameter_tensors": 8,
        "optimizer_tensors": {
            "count": 8 - left_out,
            "of_the_model": 8 - left_out,
            "missing_count": left_out,
            "missing": [f"body.{number}" for number in range(left_out)],
        },
    }
    loss = 2.3 * (1 - gained * np.linspace(0, 1, steps)) * np.ones((2, 1))
    series = {"loss": loss, "tensors_never_updated": np.full((2, steps), float(left_out))}
    trace = Trace("left out", 0, np.arange(steps), series, configs={0: config, 1: config})
    return judge(trace, [UpdateMissing()]).alerts


@pytest.mark.parametrize(
    ("gained", "more", "severity", "says"),
    [
        # A head on a body that is as it was: fine-tuning, where it learns.
        (0.6, {}, "info", "It may be meant"),
        (0.03, {}, "warning", "learns next to nothing"),
        (0.03, {"steps": 180}, "info", "It may be meant"),
        (0.6, {"left_out": 2}, "warning", "bit for bit"),
    ],
)
def test_a_part_of_the_model_that_no_optimizer_holds(gained, more, severity, says):
    (alert,) = alerts(gained, **more)
    assert alert.severity == severity
    assert says in alert.cause
