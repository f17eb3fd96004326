"""Detectors of single layers, batches and gradients: what must not matter to them."""

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rankscope.server.alerts.causes import link
from rankscope.server.detectors import build
from rankscope.server.detectors.batch.noise import BatchNoise
from rankscope.server.detectors.compression.error import CompressionError
from rankscope.server.detectors.data.outlier import DataOutlier
from rankscope.server.detectors.gradient.vanishing import GradientVanishing
from rankscope.server.detectors.layer.dead import LayerDead
from rankscope.server.detectors.update.ratio import UpdateRatio
from tests.support.judging import judge
from tests.support.runs.layered import (
    NAMES,
    TENSORS,
    compressed,
    layered,
    noisy_gradients,
    odd_batches,
)

OURS = (LayerDead, GradientVanishing, UpdateRatio, BatchNoise, CompressionError, DataOutlier)

RUNS = {
    "cut": lambda: layered(0, fault="cut"),
    "missing": lambda: layered(1, fault="missing"),
    "cut for a while": lambda: layered(0, fault="cut-for-a-while"),
    "norms alone": lambda: layered(0, fault="cut", without=("tensors_without_gradient",)),
    "never": lambda: layered(0, fault="never"),
    "experts": lambda: layered(0, fault="experts"),
    "dead": lambda: layered(0, fault="dead"),
    "saturated": lambda: layered(0, fault="saturated"),
    "fading": lambda: layered(0, fault="fading"),
    "large": lambda: layered(0, fault="large"),
    "one large": lambda: layered(0, fault="one-large"),
    "odd once": lambda: odd_batches(0, at=(240,)),
    "odd again": lambda: odd_batches(0, at=(150, 290), same="batch"),
    "odd by sample": lambda: odd_batches(0, at=(150, 310), same="sample"),
    "odd in turn": lambda: odd_batches(0, at=(150, 240, 330, 420), ranks=3),
    "noise": lambda: noisy_gradients(0, scale=20000, batch=2),
    "large batch": lambda: noisy_gradients(0, scale=40, batch=512, falls=0.01),
    "compressed": lambda: compressed(0, share=0.005, after=60),
}


@cache
def run(name):
    return RUNS[name]()


def ours():
    return [detector() for detector in OURS]


@cache
def whole(name):
    return judge(run(name), ours())


def exact(judgement):
    return [repr(alert) for alert in judgement.alerts], judgement.checks


def verdicts(judgement, among=None):
    return [
        (
            *(alert.kind, alert.severity, alert.state),
            *(alert.first_step, alert.seen_step, alert.last_step, alert.tensors),
            tuple(sorted(alert.ranks if among is None else (among[r] for r in alert.ranks))),
        )
        for alert in judgement.alerts
    ]


few = settings(
    max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)


@given(name=st.sampled_from(sorted(RUNS)), cuts=st.lists(st.integers(0, 500), max_size=8))
@few
def test_cutting_the_steps_into_blocks_changes_nothing(name, cuts):
    assert exact(judge(run(name), ours(), cuts)) == exact(whole(name))


@pytest.mark.parametrize("name", RUNS)
def test_step_by_step_is_as_good_as_at_once(name):
    assert exact(judge(run(name), ours(), range(600))) == exact(whole(name))


@pytest.mark.parametrize("factor", [1e-3, 1e3])
@pytest.mark.parametrize("name", RUNS)
def test_the_unit_of_the_loss_changes_no_verdict(name, factor):
    assert verdicts(judge(run(name).scaled(factor), ours())) == verdicts(whole(name))


@given(name=st.sampled_from(sorted(RUNS)), data=st.data())
@few
def test_numbering_the_ranks_otherwise_permutes_the_answer(name, data):
    order = data.draw(st.permutations(range(run(name).ranks)))
    found = judge(run(name).permuted(order), ours())
    assert verdicts(found, among=dict(enumerate(order))) == verdicts(whole(name))


@pytest.mark.parametrize("name", RUNS)
def test_logging_every_fifth_step_adds_no_warning(name):
    thin = judge(run(name).thinned(5), ours())
    known = {alert.kind for alert in whole(name).alerts}
    assert {alert.kind for alert in thin.alerts if alert.severity != "info"} <= known


def test_what_was_lost_by_logging_less_is_reported():
    thin = judge(run("large").thinned(20), ours())
    assert thin.checks["update.ratio"].status == "insufficient_data"
    assert "of 16 needed" in thin.checks["update.ratio"].why


def test_a_detached_layer_is_one_alert_of_all_detectors():
    alerts = judge(run("cut"), build()).alerts
    (alert,) = [a for a in link(alerts) or alerts if a.parent is None and a.severity != "info"]
    assert alert.kind == "layer.dead"
    assert alert.tensors == NAMES[:4]


def test_parts_that_are_trained_in_turn_are_reported_once():
    trace = run("cut for a while")
    counts = trace.series["tensors_without_gradient"].copy()
    counts[:, 220:260] = 4
    again = replace(trace, series={**trace.series, "tensors_without_gradient": counts}, layers=())
    found = judge(again, [LayerDead()]).of("layer.dead")
    assert [a.first_step for a in found] == [120]


def test_a_gradient_that_is_not_finite_is_not_missing():
    trace = layered(0)
    spoilt = tuple(
        replace(made, values=np.where(np.arange(6) < 4, math.nan, made.values))
        if made.metric == "grad_norm" and made.step >= 120
        else made
        for made in trace.layers
    )
    assert judge(replace(trace, layers=spoilt), [LayerDead()]).alerts == ()


def test_a_tensor_has_a_gradient_if_it_has_one_on_any_rank():
    """As where each rank holds a part of it."""
    trace = layered(0, ranks=3, without=("tensors_without_gradient",))
    spoilt = tuple(
        replace(made, values=np.where(np.arange(6) < 2, 0.0, made.values))
        if made.metric == "grad_norm" and made.rank != 1
        else made
        for made in trace.layers
    )
    assert judge(replace(trace, layers=spoilt), [LayerDead()]).alerts == ()


def test_other_parameters_are_another_training():
    """Half of the model is frozen on the way: what is left has its gradients."""
    trace = layered(0, without=("tensors_without_gradient",))
    fields = ("names", "shapes", "dtypes", "shards")
    head = replace(TENSORS, **{f: getattr(TENSORS, f)[4:] for f in fields})
    less = tuple(
        replace(made, table=head, values=made.values[4:])
        if made.step >= 120 and made.table.names == NAMES
        else made
        for made in trace.layers
    )
    assert judge(replace(trace, layers=less), [LayerDead()]).alerts == ()


def test_the_noise_scale_is_that_of_the_gradients():
    """Of 20 runs, the estimate is within half of the truth, and the median within a tenth."""
    found = []
    for seed in range(20):
        check = judge(
            noisy_gradients(seed, scale=500, batch=32, falls=0.01), [BatchNoise()]
        ).checks["batch.noise"]
        found.append(float(check.why.split("scale is ")[1].split(" ")[0].replace(",", "")))
    assert all(250 < scale < 1000 for scale in found)
    assert 450 < float(np.median(found)) < 550


def test_outliers_of_all_ranks_by_turns_have_no_rank():
    trace = odd_batches(0, at=(150,), rank=0)
    for step, rank in ((201, 1), (290, 2), (390, 3), (450, 1)):
        trace.series["loss"][rank, step] *= 30
    found = judge(trace, [DataOutlier()]).of("data.outlier")
    assert [a.severity for a in found] == ["info"] * 5
    assert [a.ranks for a in found] == [(0,), (1,), (2,), (3,), (1,)]
