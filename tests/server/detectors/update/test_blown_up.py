"""Parameters that large steps have blown up, and that come back."""

import numpy as np
import pytest

from rankscope.server.detectors.update.drift import UpdateDrift
from tests.support.judging import judge
from tests.support.runs.traces import Trace


@pytest.mark.parametrize(("last", "found"), [(240.0, 0), (8.0, 1)])
def test_shrinking_is_fading_below_a_tenth_of_ten_times_the_start_only(last, found):
    each = np.arange(300)
    norm = np.where(each < 20, 14 * (2400 ** (each / 20)), 33_600 * (last / 33_600) ** (each / 299))
    trace = Trace("blown up", 0, each, {"weight_norm": np.tile(norm, (2, 1))})
    faded = [a for a in judge(trace, [UpdateDrift()]).alerts if a.key == "faded"]
    assert len(faded) == found
