"""What is said of loads that are not what was saved, and when it is over."""

import numpy as np
import pytest

from rankscope.server.detectors.checkpoint.mismatch import CheckpointMismatch
from rankscope.server.window import Occurrence
from tests.support.judging import judge
from tests.support.runs.checkpoints import STEPS, load
from tests.support.runs.traces import Trace


def judged(*events, cuts=()):
    series = {"loss": np.ones((2, STEPS))}
    trace = Trace("checkpoints", 0, np.arange(STEPS), series, events=events)
    return judge(trace, [CheckpointMismatch()], cuts)


@pytest.mark.parametrize("cuts", [(), (1,), (20, 40)])
def test_all_ranks_that_loaded_other_bits_are_one_alert(cuts):
    found = judged(load(0, 3, ("a", "b")), load(1, 3, ("b", "c")), cuts=cuts)
    (alert,) = found.alerts
    assert (alert.state, alert.severity, alert.ranks) == ("open", "critical", (0, 1))
    assert alert.tensors == ("a", "b", "c")
    assert alert.title == "Ranks 0 and 1 have loaded other bits than were saved: 2 tensors of 10"
    assert "`run/step500.pt`, saved after step 500" in alert.cause
    assert "rankscope verify run/step500.pt run/step500.pt.digests/rank_0.json" in alert.remedy


def test_it_is_over_once_the_rank_has_loaded_what_was_saved():
    found = judged(load(1, 3, ("a",)), load(1, 30), cuts=(20,))
    (alert,) = found.alerts
    assert (alert.state, alert.ranks) == ("resolved", (1,))


@pytest.mark.parametrize("cuts", [(), (1,), (20, 40)])
def test_another_file_of_the_same_load_hides_nothing(cuts):
    model, optimizer = load(0, 3, ("a",)), load(0, 3)
    optimizer = Occurrence(0, 3, "checkpoint", "", {**optimizer.data, "path": "run/optimizer.pt"})
    (alert,) = judged(model, optimizer, cuts=cuts).alerts
    assert (alert.state, alert.tensors) == ("open", ("a",))
    later = Occurrence(0, 30, "checkpoint", "", {**optimizer.data, "path": "run/step600.pt"})
    (alert,) = judged(model, optimizer, later, cuts=(20,)).alerts
    assert alert.state == "resolved"


@pytest.mark.parametrize(
    ("events", "status"),
    [
        ((), "missing_input"),
        ((load(0, 3, loaded=False),), "missing_input"),
        # Nothing could be compared: that is no pass.
        ((load(0, 3, tensors=0),), "missing_input"),
        ((load(0, 3), load(1, 3)), "ok"),
    ],
)
def test_only_what_was_compared_counts_as_checked(events, status):
    found = judged(*events)
    assert found.alerts == ()
    assert found.checks["checkpoint.mismatch"].status == status


@pytest.mark.parametrize("data", [{"differing": "many"}, {"names": 3}, {"saved": None}])
def test_what_any_agent_may_send_breaks_nothing(data):
    event = load(0, 3, ("a",))
    changed = Occurrence(0, 3, "checkpoint", "", {**event.data, **data})
    assert len(judged(changed).alerts) == ("differing" not in data)
