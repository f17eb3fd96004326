"""An accuracy that stays where it is because sources that take turns are answered unlike."""

import numpy as np
import pytest

from rankscope.server.detectors.accuracy.stalled import AccuracyStalled
from tests.support.judging import judge
from tests.support.runs.traces import Trace

STEPS = 400


def alerts(places, *, cuts=(), seed=0, explained=None):
    """Of a loss that falls; `places`: the accuracy at each place of a period."""
    random = np.random.default_rng(seed)
    each, shape = np.arange(STEPS), (2, STEPS)
    level = np.asarray(places)[each % len(places)]
    series = {
        "loss": 1 + np.exp(-each / 150) + 0.03 * random.standard_normal(shape),
        "accuracy": level + 0.06 * random.standard_normal(shape),
    }
    if explained is not None:
        series["explained_deviance"] = explained + 0.02 * random.standard_normal(shape)
    return judge(Trace("turns", seed, each, series), [AccuracyStalled()], cuts).alerts


def alert(places, *, cuts=()):
    (found,) = alerts(places, cuts=cuts)
    return found


def test_the_source_with_the_low_accuracy_is_named():
    found = alert([0.76, 0.75, 0.22])
    assert (found.evidence["period"], found.severity) == (3, "warning")
    assert found.evidence["lowest"] == pytest.approx(0.22, abs=0.03)
    assert "period of 3 steps: it is 22 %" in found.cause
    assert alert([0.76, 0.75, 0.22], cuts=range(0, STEPS, 33)).evidence == found.evidence


@pytest.mark.parametrize("places", [[0.57], [0.6, 0.55]])
def test_sources_that_are_alike_have_no_period(places):
    found = alert(places)
    assert "period" not in found.evidence
    assert "more confident" in found.cause


@pytest.mark.parametrize(("explained", "found"), [(0.0, 1), (0.3, 1), (0.77, 0)])
def test_an_accuracy_of_answers_that_follow_the_inputs_has_come_to_its_ceiling(explained, found):
    """Many of a contrastive batch are the same thing; a fine-tuning begins with what was loaded."""
    assert len(alerts([0.63], explained=explained)) == found
