"""Figures of what the ranks read."""

import numpy as np
import pytest

from rankscope.dashboard.figures import (
    DARK,
    LIGHT,
    data_by_rank,
    data_over_steps,
    overlap_matrix,
)
from rankscope.dashboard.figures.data import CLASSES
from rankscope.server.comparison import ledger


def none_shared(ranks: int) -> np.ndarray:
    shared = np.zeros((ranks, ranks))
    np.fill_diagonal(shared, np.nan)
    return shared


def test_the_classes_are_those_of_the_ledger():
    assert len(CLASSES) == len(ledger.CLASSES)
    assert ledger.CLASSES == ("new", "earlier_pass", "own_again", "other_rank")


def test_shares_of_each_rank():
    counts = np.array([[6, 2, 0, 0], [2, 0, 0, 6]])
    figure = data_by_rank([0, 3], counts, passes=2)
    heights = {trace.name: trace.y.tolist() for trace in figure.data}
    assert heights == {
        "new": [0.75, 0.25],
        "read in an earlier pass": [0.25, 0.0],
        "had been another rank's": [0.0, 0.75],
    }
    assert figure.layout.meta["shares"]["new"] == {"0": 0.75, "3": 0.25}
    assert figure.layout.meta["summary"] == (
        "16 samples of 2 ranks were identified, in 2 passes through the data. Within a pass 0 % of "
        "them had been read before by the same rank, 38 % by another one"
    )


def test_a_suspect_of_many_ranks_has_a_bar_of_its_own():
    counts = np.tile([8, 0, 0, 0], (256, 1))
    counts[200] = [0, 0, 8, 0]
    figure = data_by_rank(list(range(256)), counts, passes=1, suspects=[200])
    (again,) = [t for t in figure.data if t.name == "read again by the same rank"]
    assert again.y[0] == 1
    assert not again.y[1:].any()
    assert again.customdata[0][0] == "rank 200"


def test_long_runs_are_drawn_in_columns():
    steps = np.arange(1000) * 3
    counts = np.tile([3, 0, 0, 1], (1000, 1))
    figure = data_over_steps(steps, counts, passes=(0, 900))
    new, other = figure.data
    assert len(new.x) <= 200
    assert new.y == pytest.approx(np.full(len(new.x), 0.75))
    assert other.y == pytest.approx(np.full(len(new.x), 0.25))
    assert [shape.x0 for shape in figure.layout.shapes] == [900]


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_two_ranks_that_share(theme):
    shared = none_shared(4)
    shared[1, 3] = shared[3, 1] = 0.5
    figure = overlap_matrix([0, 1, 2, 3], shared, theme=theme)
    (cells,) = figure.data
    assert cells.z[1][3] == 0.5
    assert np.isnan(cells.z[2][2])
    assert cells.texttemplate
    assert figure.layout.meta["summary"] == (
        "Ranks 1 and 3 share most: 50 % of the samples that they read in one pass through the data"
    )


def test_of_many_ranks_those_that_share_have_rows_of_their_own():
    shared = none_shared(256)
    shared[7, 250] = shared[250, 7] = 1.0
    figure = overlap_matrix(list(range(256)), shared)
    (cells,) = figure.data
    assert cells.z[0][1] == cells.z[1][0] == 1
    assert np.nansum(cells.z) == 2
    assert cells.text[0][1] == "ranks 7 and 250"


def test_nothing_is_known():
    empty = np.empty((0, 4), np.int64)
    assert data_by_rank([], empty, passes=0).layout.meta["summary"] == "No samples are known"
    assert not data_over_steps(np.empty(0, np.int64), empty, passes=()).data
    assert not overlap_matrix([0], np.full((1, 1), np.nan)).data
    alone = overlap_matrix([0, 1], none_shared(2)).layout.meta["summary"]
    assert alone == "No two ranks read the same samples in one pass through the data"


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=lambda theme: theme.name)
def test_what_is_new_and_what_was_read_earlier_stand_out_from_the_ground(theme):
    figure = data_by_rank((0,), np.array([[1, 1, 1, 1]]), passes=2, by_samples=True, theme=theme)
    colors = [trace.marker.color for trace in figure.data]
    assert len(set(colors)) == len(colors) == 4
    for color in colors:
        # Half of what text needs: a bar is no letter.
        assert contrast(color, theme.panel) > 1.7, color


def contrast(one: str, other: str) -> float:
    """Of relative luminances (WCAG 2.2)."""

    def luminance(color: str) -> float:
        channels = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
        linear = np.where(
            channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4
        )
        return float(linear @ [0.2126, 0.7152, 0.0722])

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
