"""Real jobs that log metrics of their own: what no other kind names is found, and nothing else."""

from pathlib import Path

import pytest

from tests.support.jobs import logging_jobs
from tests.support.jobs.judged_job import judged_job

pytestmark = pytest.mark.e2e

SCRIPT = Path(logging_jobs.__file__)
# Four processes may have fewer processors: what is late then is truly late.
OF_A_BUSY_MACHINE = {"rank.straggler", "rank.starved", "collective.slow"}
AT, SUSPECT = logging_jobs.AT, logging_jobs.SUSPECT


@pytest.mark.parametrize(
    ("fault", "series"),
    [
        ("shifted", "train/margin"),
        pytest.param("silent", "train/entropy", marks=pytest.mark.jobs),
        pytest.param("spikes", "train/entropy", marks=pytest.mark.jobs),
    ],
)
def test_what_no_other_kind_names_is_found_with_its_rank_and_step(tmp_path, fault, series):
    job = judged_job(SCRIPT, fault, ranks=4, folder=tmp_path)
    alert = job.alerts["metric.anomaly"]
    assert (alert.severity, alert.ranks) == ("warning", [SUSPECT])
    # A change point is found to a few steps; the others are seen at their very step.
    assert abs(alert.first_step - AT) <= 5
    assert series in alert.evidence["series"]
    if fault == "spikes":
        assert alert.evidence["period"] == logging_jobs.EVERY
    others = {kind for kind, a in job.alerts.items() if a.severity != "info"} - {"metric.anomaly"}
    assert others <= OF_A_BUSY_MACHINE


@pytest.mark.jobs
def test_a_gradient_half_as_large_again_has_a_better_name_than_an_anomaly(tmp_path):
    job = judged_job(SCRIPT, "gradient", ranks=4, folder=tmp_path)
    alert = job.alerts["rank.gradient_outlier"]
    assert (alert.severity, alert.ranks) == ("warning", [SUSPECT])
    assert abs(alert.first_step - AT) <= 5
    assert alert.evidence["factor"] == pytest.approx(1.5, abs=0.25)
    others = {kind for kind, a in job.alerts.items() if a.severity != "info"}
    assert others - {"rank.gradient_outlier"} <= OF_A_BUSY_MACHINE


# Each takes half a minute; the other healthy courses are cases of the detector.
@pytest.mark.jobs
@pytest.mark.parametrize("healthy", ["rewards", "gan"])
def test_healthy_jobs_raise_nothing(tmp_path, healthy):
    job = judged_job(SCRIPT, healthy, ranks=4, folder=tmp_path)
    assert "metric.anomaly" not in job.alerts
    assert job.checks["metric.anomaly"].status == "ok"
