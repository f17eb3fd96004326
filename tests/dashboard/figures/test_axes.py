"""Other axes than the step."""

import numpy as np
import pytest

from rankscope.dashboard.figures import Axis, Curve, Mark, axis_of, on_axis, rank_curves


def curve(steps, values, rank=0) -> Curve:
    return Curve(rank, np.array(steps, np.int64), np.array(values, np.float64))


def test_time_is_that_of_the_steps_before_mean_over_the_ranks():
    steps = range(100)
    axis = axis_of("time", [curve(steps, [1.0] * 100), curve(steps, [3.0] * 100, rank=1)])
    assert axis.title == "training time (min)"
    assert axis.place([0, 30, 99]) == pytest.approx([0, 1, 99 * 2 / 60])
    # Beyond the last one as fast as there.
    assert axis.place([129])[0] == pytest.approx(129 * 2 / 60)


@pytest.mark.parametrize(("seconds", "unit"), [(0.01, "s"), (60.0, "min"), (3600.0, "h")])
def test_the_unit_is_one_that_can_be_read(seconds, unit):
    axis = axis_of("time", [curve(range(10), [seconds] * 10)])
    assert axis.title == f"training time ({unit})"


def test_tokens_are_those_of_all_ranks_wherever_they_were_sampled():
    curves = [curve([0, 10, 20], [100.0] * 3), curve([0, 20], [100.0] * 2, rank=1)]
    axis = axis_of("tokens", curves)
    assert axis.place([0, 10, 20]) == pytest.approx([0, 2000, 4000])


def test_whole_epochs_begin_where_they_are_logged_first():
    axis = axis_of("epoch", [curve(range(30), [n // 10 for n in range(30)])])
    assert axis.place([0, 10, 20, 25]) == pytest.approx([0, 1, 2, 2.5])
    part = axis_of("epoch", [curve([0, 5, 10], [0.0, 0.25, 0.5])])
    assert part.place([2]) == pytest.approx([0.1])


def test_what_is_not_enough_for_an_axis():
    assert axis_of("time", []) is None
    assert axis_of("epoch", [curve(range(5), [1.0] * 5)]) is None
    assert axis_of("time", [curve([0, 1], [np.nan, np.nan])]) is None


def test_a_figure_is_moved_with_its_marks_and_gaps():
    curves = [
        Curve(rank, np.arange(20), np.full(20, 1.0 + rank), np.full(20, 0.5), np.full(20, 2.5))
        for rank in range(2)
    ]
    curves[0].minimum[7] = np.nan
    figure = rank_curves(
        curves, metric="loss", marks=[Mark("a", "critical", "broken", 10, 15)], highlight=[1]
    )
    before = [np.array(trace.x, np.float64) for trace in figure.data]
    axis = Axis("training time (s)", "%{x}", np.array([0, 10, 20]), np.array([0.0, 1.0, 5.0]))
    on_axis(figure, axis)
    for old, trace in zip(before, figure.data, strict=True):
        np.testing.assert_allclose(trace.x, axis.place(old))
    assert any(np.isnan(trace.x).any() for trace in figure.data)
    lines = [shape for shape in figure.layout.shapes if shape.type == "line"]
    assert [(line.x0, line.x1) for line in lines] == [(1.0, 1.0)]
    (sign,) = [note for note in figure.layout.annotations if note.name == "a"]
    assert sign.x == 1.0
    low, high = figure.layout.xaxis.range
    assert low < 0
    assert high == pytest.approx(axis.place([19.19])[0])
    assert figure.layout.meta["axis"]["at"] == [0.0, 1.0, 5.0]
    assert figure.layout.xaxis.title.text == "training time (s)"
