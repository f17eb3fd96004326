import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.dashboard.figures import (
    DARK,
    LIGHT,
    MAX_LINES,
    Curve,
    Mark,
    axis_title,
    rank_colors,
    rank_curves,
    smooth,
)
from rankscope.dashboard.figures.bands import Crowd


def curves(ranks: int, steps: int = 100, seed: int = 0) -> list[Curve]:
    rng = np.random.default_rng(seed)
    return [
        Curve(r, np.arange(steps, dtype=np.int64), rng.lognormal(size=steps)) for r in range(ranks)
    ]


def of_role(figure, role: str) -> list:
    return [t for t in figure.data if isinstance(t.meta, dict) and t.meta.get("role") == role]


def test_two_ranks_are_two_lines_with_the_very_values():
    data = curves(2)
    figure = rank_curves(data, metric="loss")
    lines = of_role(figure, "raw")
    assert [t.name for t in lines] == ["rank 0", "rank 1"]
    for line, curve in zip(lines, data, strict=True):
        assert np.array_equal(line.x, curve.steps)
        assert np.array_equal(line.y, curve.values)
    assert figure.layout.meta["drawn"] == "lines"
    assert len({t.line.color for t in lines}) == 2


@pytest.mark.parametrize(
    ("metric", "title"),
    [
        ("loss", "loss"),
        ("step_seconds", "step time (s)"),
        ("samples_per_second", "throughput (samples/s)"),
        ("accuracy", "accuracy (fraction)"),
        ("grad_norm", "gradient norm (L2)"),
        ("grad_norm/conv1.weight", "gradient norm (L2), conv1.weight"),
        ("perplexity", "perplexity"),
    ],
)
def test_axes_carry_units(metric, title):
    figure = rank_curves(curves(1), metric=metric)
    assert figure.layout.yaxis.title.text == title
    assert figure.layout.xaxis.title.text == "step"


def test_256_ranks_are_a_median_and_quantile_bands():
    data = curves(256)
    figure = rank_curves(data, metric="loss")
    values = np.stack([c.values for c in data])
    bands = of_role(figure, "band")
    assert [t.meta["percentiles"] for t in bands] == [[0, 100], [7, 93], [16, 84], [31, 69]]
    for band in bands:
        low, high = band.meta["percentiles"]
        count = values.shape[1]
        assert np.allclose(band.y[:count], np.percentile(values, high, axis=0))
        assert np.allclose(band.y[count : 2 * count][::-1], np.percentile(values, low, axis=0))
    (median,) = of_role(figure, "median")
    assert np.allclose(median.y, np.median(values, axis=0))
    assert figure.layout.meta["drawn"] == "bands"


def test_seventeen_ranks_are_the_first_that_become_bands():
    assert rank_curves(curves(MAX_LINES), metric="loss").layout.meta["drawn"] == "lines"
    assert rank_curves(curves(MAX_LINES + 1), metric="loss").layout.meta["drawn"] == "bands"


def test_a_spike_of_one_rank_in_256_survives_in_the_outermost_band():
    data = curves(256)
    data[77].values[50] = 1e6
    outermost = of_role(rank_curves(data, metric="loss"), "band")[0]
    assert np.nanmax(outermost.y) == 1e6


def test_a_rank_that_stays_outside_256_others_is_named_without_being_asked():
    data = curves(256)
    rng = np.random.default_rng(1)
    data = [Curve(c.rank, c.steps, 1 + 0.01 * rng.standard_normal(100)) for c in data]
    data[41] = Curve(41, data[41].steps, data[41].values + 1)
    figure = rank_curves(data, metric="loss")
    assert figure.layout.meta["named"] == [41]
    assert [t.meta["rank"] for t in of_role(figure, "raw")] == [41]
    assert "rank 41" in [a.text for a in figure.layout.annotations]


def test_equal_ranks_have_no_outlier():
    steps = np.arange(50)
    data = [Curve(r, steps, np.linspace(2, 1, 50)) for r in range(20)]
    assert rank_curves(data, metric="loss").layout.meta["named"] == []


def test_nonfinite_values_are_marked_at_the_top_edge_by_step_and_rank():
    data = curves(4, 200)
    data[2].values[120] = np.nan
    data[0].values[[5, 6, 7]] = np.inf
    data[1].values[[5, 6, 7]] = np.inf
    data[3].values[9] = -np.inf
    figure = rank_curves(data, metric="loss")
    (mark,) = [t for t in figure.data if t.name == "not finite"]
    assert mark.yaxis == "y2"
    assert list(figure.layout.yaxis2.range) == [0, 1]
    symbols = dict(zip(mark.text, mark.marker.symbol, strict=True))
    assert symbols == {
        "Infinity from step 5 to 7, ranks 0-1": "triangle-up",
        "-Infinity at step 9, rank 3": "triangle-down",
        "NaN at step 120, rank 2": "x",
    }
    assert np.isnan(of_role(figure, "raw")[2].y[120])
    assert "Infinity from step 5 to 7, ranks 0-1 and 2 more" in figure.layout.meta["summary"]


def test_a_series_of_nan_alone_is_still_a_figure():
    steps = np.arange(30)
    figure = rank_curves(
        [Curve(r, steps, np.full(30, np.nan)) for r in range(2)], metric="loss", highlight=[1]
    )
    assert "NaN from step 0 to 29, ranks 0-1" in [
        text for t in figure.data if t.name == "not finite" for text in t.text
    ]
    assert "rank 1" in [a.text for a in figure.layout.annotations]


def test_nothing_yet_says_so():
    assert rank_curves([], metric="loss").layout.meta["summary"] == "loss: no values yet"
    empty = Curve(0, np.empty(0, np.int64), np.empty(0))
    assert rank_curves([empty], metric="loss").layout.meta["summary"] == "loss: no values yet"


def test_buckets_have_their_range_behind_the_line():
    steps = np.arange(0, 1000, 10)
    mean, low, high = np.ones(100), np.full(100, 0.5), np.full(100, 3.0)
    high[40] = 99.0
    figure = rank_curves([Curve(0, steps, mean, low, high)], metric="loss")
    (area,) = of_role(figure, "envelope")
    assert area.fill == "toself"
    assert area.y.max() == 99.0
    assert area.y.min() == 0.5
    (line,) = of_role(figure, "raw")
    assert np.array_equal(line.customdata[40], [0.5, 99.0])
    assert figure.layout.meta["buckets"] is True


def test_a_gap_splits_the_range_of_the_buckets():
    steps = np.arange(6)
    low = np.array([0, 0, np.nan, 0, 0, 0.0])
    (area,) = of_role(
        rank_curves([Curve(0, steps, low + 1, low, low + 2)], metric="loss"), "envelope"
    )
    assert np.isnan(area.y).sum() == 1


def test_smoothing_keeps_the_raw_line_faded_behind():
    data = curves(1)
    figure = rank_curves(data, metric="loss", smoothing=0.9)
    (raw,), (line,) = of_role(figure, "raw"), of_role(figure, "smoothed")
    assert np.array_equal(raw.y, data[0].values)
    assert (raw.opacity, raw.line.width) == (0.3, 1)
    assert line.line.width == 2.25
    assert np.array_equal(line.y, smooth(data[0].values, 0.9))


def test_log_axis_shows_what_it_cannot_draw_as_gaps_and_counts_it():
    data = [Curve(0, np.arange(4), np.array([1.0, 0.0, -3.0, 100.0]))]
    figure = rank_curves(data, metric="lr", log_y=True)
    assert figure.layout.yaxis.type == "log"
    (line,) = of_role(figure, "raw")
    assert np.isnan(line.y[[1, 2]]).all()
    assert any("2 values &lt;= 0" in a.text for a in figure.layout.annotations)


def test_end_labels_on_a_log_axis_are_in_decades():
    data = [Curve(0, np.arange(3), np.array([1.0, 10.0, 1000.0]))]
    figure = rank_curves(data, metric="lr", log_y=True, highlight=[0])
    (label,) = figure.layout.annotations
    assert (label.text, label.y) == ("rank 0", 3.0)


def test_suspect_ranks_lie_on_top_and_neighbours_share_their_label():
    steps = np.arange(10)
    data = [Curve(r, steps, np.linspace(5, 1 if r < 3 else 4, 10)) for r in range(4)]
    figure = rank_curves(data, metric="loss", highlight=[0, 1, 3])
    assert [t.meta["rank"] for t in of_role(figure, "raw")] == [2, 0, 1, 3]
    assert {a.text for a in figure.layout.annotations} == {"ranks 0-1", "rank 3"}


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([255], "rank 255"),
        ([2, 3], "ranks 2-3"),
        ([3, 77], "ranks<br>3, 77"),
        ([16383], "rank<br>16383"),
        ([3, 77, 201], "3 ranks"),
    ],
)
def test_a_label_fits_beside_the_chart(ranks, text):
    steps = np.arange(10)
    data = [Curve(r, steps, np.linspace(5, 1, 10)) for r in ranks]
    other = Curve(17000, steps, np.full(10, 5.0))
    figure = rank_curves([*data, other], metric="loss", highlight=ranks)
    assert [a.text for a in figure.layout.annotations] == [text]


def test_a_rank_keeps_its_colour_and_who_is_suspect_has_a_sign():
    data = curves(4)
    colors = {
        named: {
            t.meta["rank"]: (t.line.color, t.line.width)
            for t in of_role(rank_curves(data, metric="loss", highlight=named), "raw")
        }
        for named in [(), (2,), (1, 2), (0, 1, 2, 3)]
    }
    # Highlighting is no accusation: a rank's colour is its own.
    assert {rank: c for rank, (c, _) in colors[2,].items()} == {
        rank: c for rank, (c, _) in colors[()].items()
    }
    assert colors[2,][2][1] > colors[2,][0][1]
    assert colors[1, 2][1][0] == colors[()][1][0] != colors[1, 2][2][0]
    assert colors[1, 2][1][1] > colors[1, 2][0][1]
    assert colors[0, 1, 2, 3] == colors[()]
    figure = rank_curves(data, metric="loss", highlight=[1, 2], suspects=[2])
    signs = {a.text.replace("<br>", " "): a.font.color for a in figure.layout.annotations}
    assert signs == {"\u25b2 rank 2": LIGHT.critical, "rank 1": LIGHT.text}


def test_a_spike_does_not_flatten_a_chart_and_is_said():
    data = curves(4)
    spiky = [Curve(c.rank, c.steps, c.values.copy()) for c in data]
    spiky[1].values[20] = 5000.0
    spiky[2].values[30] = -700.0
    figure = rank_curves(spiky, metric="loss")
    low, high = figure.layout.yaxis.range
    usual = np.concatenate([c.values for c in data])
    assert low < usual.min() < usual.max() < high < 10 * usual.max()
    assert figure.layout.meta["cut"]
    (note,) = [a.text for a in figure.layout.annotations]
    assert note == "2 values beyond, up to 5000: not shown"
    whole = rank_curves(spiky, metric="loss", whole=True)
    assert whole.layout.yaxis.range is None
    assert not whole.layout.meta["cut"]
    # What is one of four ranks is no outlier, and neither is what all do in the end.
    apart = [Curve(c.rank, c.steps, c.values * (1e4 if c.rank == 3 else 1)) for c in data]
    diverging = [Curve(c.rank, c.steps, c.values * np.where(c.steps > 90, 1e4, 1)) for c in data]
    for shown in (data, apart, diverging):
        assert rank_curves(shown, metric="loss").layout.yaxis.range is None


def test_alerts_are_lines_and_spans_at_their_first_step():
    marks = [
        Mark("a1", "critical", "rank 2 left", 40, 99),
        Mark("a2", "warning", "spike", 60),
        Mark("a3", "info", "elsewhere", 4000),
    ]
    figure = rank_curves(curves(2), metric="loss", marks=marks)
    assert sorted((s.type, s.x0) for s in figure.layout.shapes) == [
        ("line", 40),
        ("line", 60),
        ("rect", 40),
    ]
    assert {a.name: a.text for a in figure.layout.annotations} == {"a1": "\u25b2", "a2": "\u25c6"}
    assert figure.layout.annotations[0].hovertext == "critical, step 40: rank 2 left"


def test_an_alert_just_behind_the_last_step_is_on_the_chart():
    figure = rank_curves(curves(2), metric="loss", marks=[Mark("m", "critical", "gone", 100)])
    assert figure.layout.xaxis.range[1] > 100
    assert [s.x0 for s in figure.layout.shapes] == [100]


def test_names_from_outside_are_inert():
    hostile = "<a href='https://example.invalid'>x</a>"
    figure = rank_curves(
        curves(1), metric=hostile, marks=[Mark("m", "critical", hostile + "<img src=x>", 3)]
    )
    assert "<" not in figure.layout.yaxis.title.text
    assert "<" not in figure.layout.annotations[0].hovertext


def test_a_rank_keeps_its_colour_where_others_are_left_out():
    data = curves(4)
    everyone = rank_curves(data, metric="loss")
    alone = rank_curves([data[2]], metric="loss", color_ranks=[0, 1, 2, 3])
    assert of_role(alone, "raw")[0].line.color == of_role(everyone, "raw")[2].line.color


def test_ranks_with_different_sampling_do_not_make_the_bands_jump():
    # Every 8th step is shared by all ranks, the others are sampled by two of twenty.
    data = [
        Curve(r, steps := np.arange(0, 400, 1 if r < 2 else 8), np.full(len(steps), float(r)))
        for r in range(20)
    ]
    (median,) = of_role(rank_curves(data, metric="grad_norm_local"), "median")
    assert np.array_equal(median.x, np.arange(0, 400, 8))
    assert (median.y == 9.5).all()


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_text_stands_out_by_wcag_aa(theme):
    for color in (theme.text, theme.muted, theme.critical, theme.warning, theme.info, theme.accent):
        for ground in (theme.panel, theme.page):
            assert contrast(color, ground) >= 4.5, (color, ground)


@pytest.mark.parametrize("theme", [LIGHT, DARK])
@pytest.mark.parametrize("count", [1, 2, 16])
def test_rank_colours_differ_and_can_be_seen(theme, count):
    colors = rank_colors(count, theme)
    assert len(set(colors)) == count
    assert min(contrast(c, theme.panel) for c in colors) >= 1.7


def luminance(color: str) -> float:
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    high, low = sorted([luminance(a), luminance(b)], reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(
    ("metric", "title"),
    [
        ("loss", "loss"),
        ("grad_norm/fc.weight", "gradient norm (L2), fc.weight"),
        ("grad_norm/blocks.12.attention.weight", "gradient norm (L2)"),
        ("weight_norm/blocks.12.attention.weight", "weight norm (L2)"),
        ("val/top5", "val/top5"),
        ("something/that/has/a/very/long/name/indeed", "something"),
        ("a_metric_of_the_user_that_has_a_long_name", "a_metric_of_the_user_that_has_a_long_name"),
    ],
)
def test_what_the_axis_says(metric, title):
    assert axis_title(metric) == title


@pytest.mark.parametrize(("last", "dtick"), [(0, 1), (3, 1), (7, 1), (8, None), (500, None)])
def test_no_tick_stands_between_two_steps(last, dtick):
    """Plotly would number them like the step before, several times over."""
    steps = np.arange(last + 1)
    axis = rank_curves([Curve(0, steps, steps * 1.0)], metric="loss").layout.xaxis
    assert axis.dtick == dtick
    low, high = axis.range
    assert low < 0
    assert high > last
    # A single step stands in the middle, and alone.
    assert last > 0 or (low, high) == (-0.5, 0.5)


@pytest.mark.parametrize(("value", "low", "high"), [(0.002, 0.0, 0.004), (-0.5, -1.0, 0.0)])
def test_one_small_value_does_not_look_like_zero(value, low, high):
    steps = np.arange(20)
    held = np.where(steps == 3, np.nan, value)
    flat = [Curve(r, steps, held, held, held) for r in range(2)]
    assert list(rank_curves(flat, metric="lr").layout.yaxis.range) == [low, high]
    assert rank_curves(flat, metric="lr", log_y=True).layout.yaxis.range is None
    for other in (np.zeros(20), np.full(20, 32.0), np.linspace(0.001, 0.002, 20)):
        assert rank_curves([*flat, Curve(2, steps, other)], metric="lr").layout.yaxis.range is None
    buckets = Curve(2, steps, held, held, np.full(20, 0.9))
    assert rank_curves([*flat, buckets], metric="lr").layout.yaxis.range is None
    assert rank_curves([Curve(0, steps, np.zeros(20))], metric="lr").layout.yaxis.range is None


def test_values_that_differ_by_the_rounding_of_float32_are_one():
    """Ticks between the two would read 0.0199999996."""
    values = np.where(np.arange(50) % 2, np.nextafter(np.float32(0.02), np.float32(0)), 0.02)
    axis = rank_curves([Curve(0, np.arange(50), values)], metric="lr").layout.yaxis
    assert axis.range == pytest.approx((0.0, 0.04))
    # A thousandth is no rounding.
    moved = np.linspace(0.02, 0.02002, 50)
    assert rank_curves([Curve(0, np.arange(50), moved)], metric="lr").layout.yaxis.range != (
        0,
        0.04,
    )


@given(st.integers(0, 2**32 - 1), st.floats(0, 1))
def test_percentiles_over_the_ranks_are_those_of_numpy(seed, missing):
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((23, 9)) * 10.0 ** rng.integers(-3, 4, 9)
    values[rng.random(values.shape) < missing] = rng.choice([np.nan, np.inf, -np.inf])
    crowd = Crowd([Curve(rank, np.arange(9), row) for rank, row in enumerate(values)])
    for percent in (7.0, 31.0, 50.0, 93.0):
        for column, found in zip(values.T, crowd.percentile(percent), strict=True):
            there = column[np.isfinite(column)]
            expected = np.percentile(there, percent) if there.size else np.nan
            assert np.array_equal(found, expected, equal_nan=True)
