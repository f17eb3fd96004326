import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.dashboard.figures import DARK, LIGHT, Mark, distance_matrix, divergence_heatmap
from rankscope.dashboard.figures.binning import bin_steps


def layer(figure, role: str):
    found = [t for t in figure.data if isinstance(t.meta, dict) and t.meta.get("role") == role]
    return found[0] if found else None


def healthy(ranks: int, steps: int):
    return np.zeros((ranks, steps)), np.ones((ranks, steps), np.bool_)


def test_zero_tiny_unknown_and_unchecked_are_four_different_things():
    relative, checked = healthy(4, 5)
    relative[1, 1] = 1e-15
    relative[2, 2] = np.nan
    checked[:, 3] = False
    figure = divergence_heatmap([0, 1, 2, 3], np.arange(5), relative, checked)
    equal, sized, unsized = (layer(figure, r) for r in ("equal", "distance", "unsized"))
    shown = np.stack([np.isfinite(t.z) for t in (equal, sized, unsized)])
    assert shown.sum(axis=0).max() == 1
    assert shown[1, 1, 1]
    assert shown[2, 2, 2]
    assert not shown[:, :, 3].any()
    assert sized.z[1, 1] == pytest.approx(-15)
    assert {t.name for t in figure.data if t.showlegend} >= {
        "equal to the last bit",
        "differs, colour = distance",
        "differs, distance not sampled",
        "not checked",
    }


@pytest.mark.parametrize("theme", [LIGHT, DARK])
@pytest.mark.parametrize("ranks", [2, 256])
def test_who_left_and_when_is_written_into_the_chart(ranks, theme):
    relative, checked = healthy(ranks, 1000)
    relative[1, 700:] = 1e-3
    figure = divergence_heatmap(list(range(ranks)), np.arange(1000), relative, checked, theme=theme)
    leavers = layer(figure, "leavers")
    assert "rank 1 from step 700" in [a.text for a in figure.layout.annotations]
    assert "1" in figure.layout.yaxis.ticktext
    assert list(leavers.x) == [700]
    assert "rank 1 differs, first at step 700" in figure.layout.meta["summary"]
    assert figure.layout.xaxis.title.text == "step"
    assert figure.layout.yaxis.title.text == "rank"
    assert layer(figure, "distance").colorbar.title.text == "relative L2 distance"


def test_rank_numbers_need_not_be_without_gaps():
    relative, checked = healthy(2, 3)
    relative[1, 2] = 0.5
    figure = divergence_heatmap([3, 17], np.arange(3), relative, checked)
    assert list(figure.layout.yaxis.ticktext) == ["3", "17"]
    assert "rank 17 differs, first at step 2" in figure.layout.meta["summary"]


def test_nothing_compared_yet_says_so():
    figure = divergence_heatmap([], np.empty(0, np.int64), np.empty((0, 0)), np.empty((0, 0), bool))
    assert figure.layout.meta["summary"] == "parameters: nothing compared yet"
    # Numbers along an empty chart would be taken for ranks and steps.
    assert figure.layout.xaxis.visible is False
    assert figure.layout.yaxis.visible is False
    [note] = figure.layout.annotations
    assert "No two ranks have posted a fingerprint" in note.text


def test_steps_at_which_nothing_was_compared_say_so():
    nothing = np.empty(0, np.int64), np.empty((0, 0)), np.empty((0, 0), bool)
    figure = divergence_heatmap([], *nothing, x_range=(10, 20))
    assert tuple(figure.layout.xaxis.range) == (10, 20)
    assert [note.text for note in figure.layout.annotations] == [
        "Nothing was compared at these steps"
    ]


def test_alerts_and_the_selected_step_are_marked():
    relative, checked = healthy(2, 50)
    figure = divergence_heatmap(
        [0, 1],
        np.arange(50),
        relative,
        checked,
        marks=[Mark("a", "critical", "left", 20, 49)],
        selected=30,
    )
    assert sorted((s.type, s.x0) for s in figure.layout.shapes) == [("line", 20), ("line", 30)]


@given(
    st.integers(1, 2000),
    st.integers(1, 300),
    st.lists(st.tuples(st.integers(0, 1999), st.floats(1e-12, 1e3)), max_size=8),
)
def test_no_difference_disappears_in_the_columns(count, columns, spots):
    relative, checked = healthy(2, count)
    for step, size in spots:
        relative[1, step % count] = size
    bins = bin_steps(
        np.arange(count), relative, checked, columns=columns, span=(0, max(count - 1, 0))
    )
    assert len(bins.starts) <= max(columns, 1)
    assert bins.checked.all()
    places = np.arange(count) // bins.width
    for column in range(len(bins.starts)):
        worst = relative[1, places == column].max()
        assert bins.differs[1, column] == (worst > 0)
        if worst > 0:
            assert bins.relative[1, column] == worst
    assert not bins.differs[0].any()


def test_a_stretch_of_equal_outcome_is_as_its_single_steps():
    # Equal from 0 to 99, every tenth step compared; then rank 1 differs at all steps up to 149.
    steps, until = np.array([0, 100]), np.array([90, 149])
    counts = np.array([10, 50])
    relative = np.array([[0.0, 0.0], [0.0, 0.5]])
    checked = np.ones((2, 2), np.bool_)
    bins = bin_steps(
        steps, relative, checked, columns=1000, span=(0, 149), until=until, counts=counts
    )
    assert np.flatnonzero(bins.checked[0]).tolist() == [*range(0, 100, 10), *range(100, 150)]
    assert np.flatnonzero(bins.differs[1]).tolist() == [*range(100, 150)]
    coarse = bin_steps(
        steps, relative, checked, columns=15, span=(0, 149), until=until, counts=counts
    )
    assert coarse.width == 10
    assert coarse.checked.all()
    figure = divergence_heatmap([0, 1], steps, relative, checked, until=until, counts=counts)
    assert figure.layout.meta["leavers"] == {"1": 100}
    zoomed = divergence_heatmap(
        [0, 1], steps, relative, checked, until=until, counts=counts, x_range=(120, 130)
    )
    assert zoomed.layout.meta["leavers"] == {"1": 120}


def test_columns_stay_where_they_are_as_steps_are_appended():
    relative, checked = healthy(1, 1999)
    first = bin_steps(
        np.arange(1900), relative[:, :1900], checked[:, :1900], columns=200, span=(0, 1899)
    )
    later = bin_steps(np.arange(1999), relative, checked, columns=200, span=(0, 1998))
    assert first.width == later.width == 10
    assert np.array_equal(first.starts, later.starts[: len(first.starts)])


def distances(points):
    points = np.asarray(points, np.float64)
    distance = np.abs(points[:, None] - points[None])
    return distance, distance == 0


def test_the_matrix_shows_groups_and_writes_distances_of_four_ranks():
    distance, equal = distances([0, 0, 2, 0])
    figure = distance_matrix([0, 1, 2, 3], distance, equal, step=137)
    texts = {(a.y, a.x): a.text for a in figure.layout.annotations}
    assert texts[0, 1] == "="
    assert texts[0, 2] == texts[2, 3] == "2"
    assert figure.layout.meta["summary"] == (
        "parameters of 4 ranks at step 137: 2 groups that differ, distance at most 2 (L2)"
    )
    assert layer(figure, "distance").colorbar.title.text == "L2 distance"


def test_bits_that_differ_by_an_unknown_amount_are_not_equal():
    equal = np.eye(2, dtype=np.bool_)
    distance = np.where(equal, 0.0, np.nan)
    figure = distance_matrix([0, 1], distance, equal, step=3)
    assert np.isfinite(layer(figure, "unsized").z).sum() == 2
    assert {a.text for a in figure.layout.annotations} == {"\u2260"}
    assert "distances not sampled" in figure.layout.meta["summary"]


def test_256_ranks_have_no_text_in_the_cells_and_few_ticks():
    distance, equal = distances([0] * 255 + [1])
    figure = distance_matrix(list(range(256)), distance, equal, step=3)
    assert not figure.layout.annotations
    assert len(figure.layout.xaxis.ticktext) <= 9


@pytest.mark.parametrize("count", [1, 12, 40])
def test_of_many_ranks_those_that_differ_have_rows_of_their_own(count):
    broken = list(range(7, 1024, 25))[:count]
    relative, checked = healthy(1024, 8)
    relative[broken, 4:] = 1e-3
    figure = divergence_heatmap(list(range(1024)), np.arange(8), relative, checked)
    cells = layer(figure, "distance").z
    own = np.flatnonzero(np.isfinite(cells).any(axis=1))
    # From 33 on they share rows, among themselves: no healthy rank is painted.
    assert own.tolist() == list(range(len(own)))
    assert len(own) == (count if count <= 32 else 20)
    assert np.isfinite(cells[own, 4:]).all()
    assert cells.shape[0] <= 96
    assert figure.layout.yaxis.ticktext[0] == "7"
    away = np.zeros(1024)
    away[broken] = 1 + np.arange(count)
    distance = np.abs(away[:, None] - away[None])
    matrix = distance_matrix(list(range(1024)), distance, distance == 0, step=7)
    blocks = np.isfinite(layer(matrix, "distance").z)
    assert blocks.shape == (cells.shape[0],) * 2
    assert blocks[: len(own), len(own) :].all()
    assert not blocks[len(own) :, len(own) :].any()
    ends = {(s.x0, s.x1, s.y0, s.y1) for s in matrix.layout.shapes}
    edge = len(own) - 0.5
    assert ends == {
        (-0.5, len(blocks) - 0.5, edge, edge),
        (edge, edge, -0.5, len(blocks) - 0.5),
    }


def test_a_small_chart_has_fewer_rows_and_one_for_who_differs():
    relative = np.zeros((256, 20))
    relative[99, 10:] = 1e-3
    checked = np.ones((256, 20), np.bool_)
    figure = divergence_heatmap(range(256), np.arange(20), relative, checked, fewer=4)
    [distance] = [t for t in figure.data if (t.meta or {}).get("role") == "distance"]
    differs = np.isfinite(np.array(distance.z, float))
    assert len(differs) == 1 + 16
    assert differs[0].any()
    assert not differs[1:].any()
