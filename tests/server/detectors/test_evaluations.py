"""A run that evaluates on several sets of data: each is judged for itself."""

from dataclasses import replace

import pytest

from rankscope.server.detectors.generalization import GeneralizationGap
from tests.support.judging import judge
from tests.support.scenarios import recorded

_SERIES = {"eval/loss", "eval/accuracy"}


def renamed(**names):
    """The recorded run that memorises its samples, with its evaluation under other names."""
    run = recorded(0, trace="F10-overfit")
    series = {name: values for name, values in run.series.items() if name not in _SERIES}
    present = {name: there for name, there in run.present.items() if name not in _SERIES}
    for name, falls in names.items():
        loss = run.series["eval/loss"]
        # One that becomes better all the time has as many evaluations.
        series[f"eval/{name}/loss"] = run.series["loss"] * 0 + 1 if falls else loss
        present[f"eval/{name}/loss"] = run.present["eval/loss"]
    return replace(run, series=series, present=present)


@pytest.mark.parametrize("name", ["val", "2"])
def test_the_evaluation_that_rises_is_named(name):
    found = judge(renamed(**{name: False, "other": True}), [GeneralizationGap()])
    (alert,) = found.alerts
    assert (alert.key, alert.severity) == (name, "warning")
    assert f"The loss of the evaluation `{name}` is" in alert.title
    assert alert.evidence["evaluation"] == name


def test_an_evaluation_of_the_training_data_is_none_to_generalise_to():
    found = judge(renamed(train=False), [GeneralizationGap()])
    assert found.alerts == ()
    assert found.checks["generalization.gap"].status == "insufficient_data"
