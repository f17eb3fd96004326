"""What is said beside the figures of times and layers."""

from __future__ import annotations

import numpy as np
import pytest

from rankscope.dashboard.figures import layer_heatmap, time_by_rank
from rankscope.dashboard.figures.arrays import Curve


def timed(name, values):
    steps = np.arange(4)
    return name, [Curve(rank, steps, np.full(4, value)) for rank, value in enumerate(values)]


def said(compute, wait, data):
    series = [timed("compute_seconds", compute), timed("data_seconds", data)]
    if wait is not None:
        series.append(timed("wait_seconds", wait))
    return time_by_rank(dict(series)).layout.meta["summary"]


def test_who_waits_least_while_the_others_wait_holds_them_up():
    # Rank 2 loads its data for 30 ms; rank 0 computes the longest, and waits like the others.
    text = said([0.045, 0.04, 0.012], [0.03, 0.03, 0.001], [0.001, 0.001, 0.03])
    assert (
        "rank 2 holds the others up: waits 1 ms (the others 30), data 30 ms (the others 1)" in text
    )
    assert "computing 11 ms (the others 12.5)" in text
    assert "longest" not in text


def test_nobody_holds_the_others_up_where_all_wait_alike():
    text = said([0.05, 0.04, 0.04], [0.010, 0.009, 0.011], [0.001, 0.001, 0.001])
    assert "holds" not in text
    assert "longest" not in text


def test_of_ranks_whose_waiting_is_not_known_the_longest_computing_is_named():
    text = said([0.02, 0.05], None, [0.001, 0.001])
    assert "longest computing: rank 1" in text
    assert "waits for the others is not known, and counts as computing" in text


def parts_of(compute, wait):
    series = [timed("compute_seconds", compute)]
    if wait is not None:
        series.append(timed("wait_seconds", wait))
    return {trace.name: list(trace.y) for trace in time_by_rank(dict(series)).data}


def test_what_contains_waiting_is_not_called_computing():
    assert parts_of([0.02, 0.05], None) == {"compute and waiting": pytest.approx([20, 50])}
    # Who is alone waits for nobody.
    assert parts_of([0.02], None) == {"compute": pytest.approx([20])}
    assert parts_of([0.02, 0.05], [0.01, 0.01]) == {
        "compute": pytest.approx([10, 40]),
        "wait for other ranks": pytest.approx([10, 10]),
    }


@pytest.mark.parametrize("last", [None, (199, np.array([0.3, 0.002, np.nan]))])
def test_the_caption_of_layers_names_those_of_the_last_sample(last):
    steps = np.arange(0, 200, 50)
    # 4.bias vanishes at the end; over all steps it is the largest.
    values = np.array([[0.3, 0.3, 0.3, 0.3], [9, 9, 9, 0.002], [1, 1, 1, np.nan]], float)
    figure = layer_heatmap(
        ["2.weight", "4.bias", "6.bias"],
        steps,
        values,
        values,
        metric="grad_norm",
        rank=0,
        last=last,
    )
    step = 150 if last is None else 199
    assert (
        f"at step {step}: smallest 4.bias (0.002), largest 2.weight (0.3)"
        in figure.layout.meta["summary"]
    )
