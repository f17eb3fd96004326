"""Figures that are sent in parts: what is put together from them is the whole."""

import numpy as np
import pytest

from rankscope.dashboard import growing
from rankscope.dashboard.figures import Curve, rank_curves


def figure(points: int, *, ranks: int = 2, buckets: bool = False, **options):
    """A loss of the given number of points; every seventh is a gap."""
    steps = np.arange(points)
    curves = []
    for rank in range(ranks):
        values = np.where(steps % 7 == 6, np.nan, 1.0 + rank + np.sin(steps / 5))
        around = (values - 0.5, values + 0.5) if buckets else (None, None)
        curves.append(Curve(rank, steps, values, *around))
    return rank_curves(curves, metric="loss", **options)


def known(made) -> growing.Known:
    tail = made.layout.meta["tail"]
    return growing.Known.parse(f"{tail['from']}:{tail['digest']}")


def cut_of(made):
    return [made.data[place] for place in made.layout.meta["appended"]["traces"]]


def test_what_is_known_is_not_sent_again():
    first = figure(400)
    growing.cut(first, None)
    assert "appended" not in first.layout.meta
    # The last two points are held open: of buckets the last is filling.
    assert first.layout.meta["tail"]["from"] == 398
    second = figure(410)
    growing.cut(second, known(first))
    assert second.layout.meta["appended"] == {"from": 398, "traces": [0, 1]}
    assert [trace.x.tolist() for trace in cut_of(second)] == [list(range(398, 410))] * 2
    assert second.layout.meta["tail"]["from"] == 408


@pytest.mark.parametrize("options", [{"smoothing": 0.5}, {"buckets": True}, {"ranks": 20}])
def test_of_smoothed_lines_areas_and_bands_too(options):
    first, second = figure(400, **options), figure(410, **options)
    growing.cut(first, None)
    growing.cut(second, known(first))
    # All but the signs of what is not finite.
    assert len(cut_of(second)) == len(second.data) - 1
    for trace in cut_of(second):
        assert len(trace.x) < 100
        assert len(trace.x) == len(trace.y)
        assert trace.x[~np.isnan(trace.x)].min() >= 380
        # A stretch goes there and back: of what remains no gap stands at the beginning.
        assert not np.isnan(trace.x[0])


def test_a_value_that_came_late_brings_the_whole():
    first, second = figure(400), figure(410)
    growing.cut(first, None)
    values = np.array(second.data[1].y)
    values[100] = 7.0
    second.data[1].y = values
    growing.cut(second, known(first))
    assert "appended" not in second.layout.meta
    assert len(second.data[0].x) == 410


def test_another_rank_brings_the_whole():
    first, second = figure(400, ranks=2), figure(410, ranks=3)
    growing.cut(first, None)
    growing.cut(second, known(first))
    assert "appended" not in second.layout.meta


def test_rounding_to_single_precision_changes_nothing():
    first, second = figure(400), figure(400)
    growing.cut(first, None)
    for trace in second.data:
        trace.y = np.asarray(trace.y, np.float32).astype(np.float64)
    growing.cut(second, known(first))
    assert "appended" in second.layout.meta


def test_few_points_are_sent_whole():
    made = figure(2)
    growing.cut(made, None)
    assert "tail" not in made.layout.meta


@pytest.mark.parametrize("text", ["", "nonsense", "x:y"])
def test_what_nobody_was_told_is_not_known(text):
    assert growing.Known.parse(text) is None
