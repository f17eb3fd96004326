"""Every recorded series is asked, one event is one alert, and a better name takes it over."""

import numpy as np
import pytest

from rankscope.server.alerts.causes import link
from rankscope.server.detectors.metric.anomaly import MetricAnomaly
from rankscope.server.detectors.metric.series import is_asked, is_clock, is_logged
from rankscope.server.detectors.rank.loss_outlier import RankLossOutlier
from tests.support.judging import judge
from tests.support.runs.logged import logged
from tests.support.runs.scenarios import recorded
from tests.support.runs.traces import Trace

# Healthy courses of a user's series, and what a warning would have to be mistaken for.
COURSES = ("none", "smoothed", "drifts", "phases")


def alerts(trace):
    return judge(trace, [MetricAnomaly()], range(0, 2000, 33)).alerts


@pytest.mark.parametrize("name", ["reward/mean", "loss/policy", "m000", "clip_fraction", "train/x"])
def test_what_a_user_logs_is_asked_both_questions(name):
    assert is_asked(name)
    assert is_logged(name)
    assert not is_clock(name)


@pytest.mark.parametrize("name", ["loss", "grad_norm_local", "eval/val/accuracy", "weight_norm"])
def test_ranks_are_compared_in_what_the_training_is(name):
    assert is_asked(name)
    assert not is_logged(name)


@pytest.mark.parametrize(
    "name", ["lr", "lr/1", "step_seconds", "rankscope/overhead", "hyperparameters/0/eps", "samples"]
)
def test_settings_counts_and_times_of_the_agent_are_not(name):
    assert not is_asked(name)


@pytest.mark.parametrize("name", ["time/rollout", "throughput", "perf/tokens_per_sec", "iter_time"])
def test_clocks_are_known_by_their_names(name):
    assert is_clock(name)


def test_one_event_in_several_series_is_one_alert_that_lists_them():
    (alert,) = alerts(logged(3, fault="both"))
    assert set(alert.evidence["series"]) == {"reward/mean", "margin"}
    assert {s["ranks"][0] for s in alert.evidence["series"].values()} == {1}
    assert alert.title.endswith("and 1 more series")


def test_a_kind_that_names_it_better_is_its_root():
    found = judge(recorded(0, trace="F42-demo-labels"), [MetricAnomaly(), RankLossOutlier()])
    linked = {alert.id: alert for alert in found.alerts}
    linked |= {alert.id: alert for alert in link(found.alerts)}
    (outlier,) = (a for a in linked.values() if a.kind == "rank.loss_outlier")
    (anomaly,) = (a for a in linked.values() if a.kind == "metric.anomaly")
    assert anomaly.parent == outlier.id
    assert outlier.parent is None


def test_another_rank_is_no_root_of_it():
    """A loss that is wrong on rank 0 says nothing of a metric of rank 1."""
    trace = logged(0, fault="shift", at=300)
    trace.series["loss"][0, 300:] += 5.0
    found = judge(trace, [MetricAnomaly(), RankLossOutlier()])
    linked = {alert.id: alert for alert in found.alerts}
    linked |= {alert.id: alert for alert in link(found.alerts)}
    anomalies = [a for a in linked.values() if a.kind == "metric.anomaly"]
    assert any(1 in a.ranks for a in anomalies)


@pytest.mark.parametrize("fault", COURSES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_healthy_courses_raise_no_warning(fault, ranks):
    found = [alerts(logged(seed, fault=fault, ranks=ranks, steps=1500)) for seed in range(5)]
    assert [a.title for of_run in found for a in of_run if a.severity != "info"] == []


def test_a_series_that_ranks_post_at_other_steps_is_compared_where_they_do():
    trace = logged(0, fault="shift")
    present = np.ones((4, 600), dtype=bool)
    present[2, ::3] = False
    trace.present["reward/mean"] = present
    (alert,) = alerts(trace)
    assert (alert.ranks, alert.severity) == ((1,), "warning")


def test_thousands_of_series_are_not_all_judged_and_that_is_said():
    trace = logged(0, steps=160)
    for number in range(600):
        trace.series[f"m{number:03}"] = trace.series["margin"]
    found = judge(trace, [MetricAnomaly()])
    assert found.checks["metric.anomaly"].why.endswith(" more are not.")


@pytest.mark.parametrize("seed", [0, 2, 5])
def test_gradients_under_a_loss_scale_are_compared_without_it(seed):
    """They grow with the scale, and so do the distances of the ranks."""
    random = np.random.default_rng(seed)
    steps = np.arange(700)
    scale = 2.0 ** (12 + steps // 100) * np.ones((2, 1))
    norms = scale * np.exp(0.3 * random.standard_normal((2, len(steps))))
    series = {"grad_norm_local": norms, "amp_scale": scale}
    assert not alerts(Trace("scaled", seed, steps, series))
