"""Dropout that leaves next to nothing, and batch norm that keeps no statistics."""

import numpy as np

from rankscope.server.detectors.mode_settings import ModeSettings
from rankscope.server.window import Occurrence
from tests.support.judging import judge
from tests.support.traces import Trace

STEPS = 60


def judged(*said, ranks=2):
    events = tuple(
        Occurrence(rank, step, "mode.changed", "", {"of": 2, **data})
        for step, data in said
        for rank in range(ranks)
    )
    series = {"modules_in_eval": np.zeros((ranks, STEPS))}
    trace = Trace("settings", 0, np.arange(STEPS), series, events=events)
    return judge(trace, [ModeSettings()], range(0, STEPS, 7))


def test_a_dropout_that_drops_what_it_should_keep():
    (alert,) = judged((0, {"dropping": [["drop", 0.95]]})).alerts
    assert (alert.kind, alert.severity, alert.first_step) == ("mode.settings", "warning", 0)
    assert alert.title == "`drop` drops 95 % of the units"
    assert (alert.state, alert.evidence["dropping"]) == ("open", {"drop": 0.95})


def test_normalizations_that_keep_no_statistics():
    (alert,) = judged((0, {"still": ["one", "two"]})).alerts
    assert alert.title == "2 normalizations keep the statistics they were made with"
    assert "evaluations by these" in alert.cause


def test_usual_settings():
    found = judged((0, {}), (30, {"whole": True}))
    assert not found.alerts
    assert found.checks["mode.settings"].status == "ok"
    assert judged().checks["mode.settings"].status == "missing_input"
