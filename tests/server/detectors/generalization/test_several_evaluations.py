"""A run that evaluates on several sets of data: each is judged for itself."""

from dataclasses import replace

import pytest

from rankscope.server.detectors.generalization.gap import GeneralizationGap
from tests.support.judging import judge
from tests.support.runs.scenarios import recorded

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


@pytest.mark.parametrize("constant", [10.0, 20.0])
def test_the_unit_of_a_density_does_not_count(constant):
    run = recorded(0, trace="F10-overfit")
    series = {name: run.series[name] - constant for name in ("loss", "eval/loss")}
    (alert,) = judge(replace(run, series=series), [GeneralizationGap()]).alerts
    assert alert.severity == "info"
    assert "no lower bound" in alert.cause
    assert "memorises" not in alert.cause
    assert "%" not in alert.title
    # Training has gained 0.3 since, whatever the constant.
    assert 0.3 < alert.evidence["rise"] < 2.0


def test_a_loss_that_is_not_known_is_held_against_what_it_had_gained():
    run = recorded(0, trace="F10-overfit")
    known = judge(run, [GeneralizationGap()]).alerts[0].evidence["rise"]
    series = {name: run.series[name] for name in ("loss", "eval/loss")}
    (alert,) = judge(replace(run, series=series), [GeneralizationGap()]).alerts
    assert "no lower bound that is known" in alert.cause
    assert alert.evidence["rise"] <= known
