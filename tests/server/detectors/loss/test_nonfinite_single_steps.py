"""A loss that is not finite at single steps, and finite in between: nothing was lost."""

import numpy as np
import pytest

from rankscope.server.detectors.loss.nonfinite import LossNonFinite
from tests.support.judging import judge
from tests.support.runs.traces import Trace


@pytest.mark.parametrize(("lasts", "lost"), [(1, False), (40, True)])
def test_a_checkpoint_is_advised_where_the_losses_stay_so(lasts, lost):
    losses = np.ones((3, 80))
    losses[1, 40 : 40 + lasts] = np.nan
    (alert,) = judge(Trace("made", 0, np.arange(80), {"loss": losses}), [LossNonFinite()]).alerts
    assert ("from a checkpoint" in alert.remedy) is lost
    assert ("no checkpoint has to be restored" in alert.remedy) is not lost
