"""Jumps of a loss that one or two wrong answers of a batch explain."""

import numpy as np
import pytest

from rankscope.server.detectors.gradient.exploding import GradientExploding
from rankscope.server.detectors.loss.spike import LossSpike
from tests.support.judging import judge
from tests.support.runs.traces import Trace

STEPS, SAMPLES, RANKS = 400, 64, 2
HARD = (200, 230, 261, 262, 290, 330)


def learned(*, wrong, cost=9.0, norms=None, tokens=False, accuracies=True):
    """A training that is done: at some steps so many answers of one rank's batch are wrong."""
    random = np.random.default_rng(0)
    each = np.arange(STEPS)
    course = 1.4 * np.exp(-each / 15) + 0.002
    loss = course * np.exp(0.1 * random.standard_normal((RANKS, STEPS)))
    accuracy = np.tile(1 - 0.75 * np.exp(-each / 15), (RANKS, 1))
    accuracy[:, each > 60] = 1.0
    for step in HARD:
        loss[0, step] += wrong * cost / SAMPLES
        accuracy[0, step] -= wrong / SAMPLES
    series = {"loss": loss, "samples": np.full(loss.shape, float(SAMPLES))}
    if accuracies:
        series["accuracy"] = accuracy
    if tokens:
        series["tokens"] = np.full(loss.shape, 32.0 * SAMPLES)
    if norms is not None:
        series["grad_norm"] = np.tile(norms(each), (RANKS, 1))
    return Trace("learned", 0, each, series)


def spikes(trace, cuts=()):
    return [(a.severity, a.cause) for a in judge(trace, [LossSpike()], cuts).alerts]


@pytest.mark.parametrize("cuts", [(), range(0, STEPS, 9)], ids=["one", "many"])
@pytest.mark.parametrize("wrong", [1, 2])
def test_one_or_two_hard_samples_are_information(wrong, cuts):
    found = spikes(learned(wrong=wrong), cuts)
    assert found
    assert {severity for severity, _ in found} == {"info"}
    assert "one or two answers of the batch were wrong" in found[0][1]


@pytest.mark.parametrize(
    "made",
    [
        {"wrong": 20, "cost": 1.0},
        {"wrong": 1, "cost": 500.0},
        {"wrong": 1, "tokens": True},
        {"wrong": 1, "accuracies": False},
    ],
    ids=["many answers", "more than an answer costs", "of sequences", "nothing known"],
)
def test_other_jumps_that_come_again_are_critical(made):
    assert "critical" in {severity for severity, _ in spikes(learned(**made))}


@pytest.mark.parametrize(("height", "severity"), [(0.8, "info"), (40.0, "critical")])
def test_gradients_as_large_as_at_the_start_that_the_loss_hardly_feels(height, severity):
    def norms(each):
        return np.where(each < 40, 1.0, np.where((each >= 300) & (each < 380), height, 0.005))

    trace = learned(wrong=0, norms=norms)
    trace.series["loss"][:, 300:] += 0.05
    (alert,) = judge(trace, [GradientExploding()]).alerts
    assert alert.severity == severity


def test_a_loss_that_is_lost_is_hardly_what_it_was():
    def norms(each):
        return np.where(each < 40, 1.0, np.where(each >= 300, 0.8, 0.005))

    trace = learned(wrong=0, norms=norms)
    trace.series["loss"][:, 300:310] += 0.05
    trace.series["loss"][:, 310:] = np.nan
    (alert,) = judge(trace, [GradientExploding()]).alerts
    assert alert.severity == "critical"
