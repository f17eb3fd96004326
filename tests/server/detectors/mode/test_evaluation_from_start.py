"""Modules that evaluate from the first step on, and a whole model of the user's own modules."""

import numpy as np
import pytest

from rankscope.server.detectors.mode.evaluation import EvaluationMode
from rankscope.server.window import Occurrence
from tests.support.judging import judge
from tests.support.runs.traces import Trace

STEPS = 60


def run(*changes):
    """One rank; what it says at some steps of its modules, of which there are four."""
    events = tuple(
        Occurrence(0, step, "mode.changed", "", {"of": 4, "names": ["norm"] * (count > 0), **more})
        for step, more in changes
        for count in [more.get("count", 0)]
    )
    series = {"modules_in_eval": np.full((1, STEPS), 0.25)}
    return Trace("mode", 0, np.arange(STEPS), series, events=events)


@pytest.mark.parametrize("trained", [0, 1])
def test_a_part_that_normalizes_by_no_statistics_while_it_is_trained(trained):
    part = {"count": 1, "normalization": 1, "new": 1, "new_trained": trained}
    found = judge(run((0, part)), [EvaluationMode()])
    assert [a.severity for a in found.alerts] == ["warning"] * trained
    if trained:
        assert "with weights that are trained" in found.alerts[0].cause


@pytest.mark.parametrize(("since", "severity"), [(0, "info"), (20, "warning")])
def test_a_whole_model_that_trained_before_does_not_evaluate_on_purpose(since, severity):
    whole = {"count": 1, "own": 1, "whole": True}
    changes = [(0, {}), (since, whole)] if since else [(0, whole)]
    (alert,) = judge(run(*changes), [EvaluationMode()]).alerts
    assert (alert.severity, alert.first_step) == (severity, since)


def of_two(*changes):
    """Two ranks of one model: who changes, and at which step."""
    whole = {"count": 2, "whole": True, "dropout": 1, "normalization": 1, "of": 2, "names": ["a"]}
    from_start = {rank for rank, step in changes if not step}
    events = [Occurrence(r, 0, "mode.changed", "", {"of": 2}) for r in {0, 1} - from_start]
    events += [Occurrence(rank, step, "mode.changed", "", whole) for rank, step in changes]
    series = {"modules_in_eval": np.full((2, STEPS), 0.25)}
    made = Trace("mode", 0, np.arange(STEPS), series, events=tuple(events))
    return judge(made, [EvaluationMode()]).alerts


@pytest.mark.parametrize("rank", [0, 1])
def test_of_two_ranks_the_one_that_left_the_common_mode_is_named(rank):
    (alert,) = of_two((rank, 20))
    assert (alert.ranks, alert.first_step, alert.severity) == ((rank,), 20, "warning")
    assert f"Rank {rank} trains in evaluation mode since step 20" in alert.title


def test_of_two_that_began_in_different_modes_nothing_shows_which_is_meant():
    (alert,) = of_two((0, 0))
    assert alert.ranks == (0, 1)
    assert "Nothing shows which mode is meant" in alert.cause
