"""Roll-ups say what the points say, whatever came when, and whoever was killed in between."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sqlalchemy import func, select

from rankscope.agent import wire
from rankscope.server.storage import schema
from rankscope.server.storage.database.engine import reading, writing
from rankscope.server.storage.ingest.batches import store_batch, store_batches
from rankscope.server.storage.ingest.dictionary import Dictionaries
from rankscope.server.storage.maintenance import compaction, rollups, watermarks
from rankscope.server.storage.reading import runs, series, zoom

_names = itertools.count()
_ALL = 100_000


@pytest.fixture(autouse=True)
def roll_ups_are_read(monkeypatch):
    """Also where there are so few points that these would be read."""
    monkeypatch.setattr(zoom, "_FEW_POINTS", 0)


def batch(run, steps, values, *, seq, rank=0, session="a", metric="loss", **more):
    at = np.array(steps, np.int64)
    columns = {metric: wire.Column(at, np.array(values, np.float64)), **more}
    return wire.Batch(run=run, rank=rank, seq=seq, session=session, columns=columns)


def store(engine, *batches):
    with writing(engine) as connection:
        for one in batches:
            store_batch(connection, one, received_at=1000.0)


def key_of(engine, run):
    with reading(engine) as connection:
        return runs.find_run(connection, run).key


def compact(engine, run, **options):
    for _ in range(200):
        if not compaction.compact(engine, key_of(engine, run), **options):
            return
    raise AssertionError("it does not come to an end")


def read(engine, run, metric="loss", **options):
    with reading(engine) as connection:
        key = runs.find_run(connection, run).key
        found = series.read_series(connection, run=key, metric=metric, **options)
    return {s.rank: s for s in found}


def rows_of(engine, run, table):
    with reading(engine) as connection:
        key = runs.find_run(connection, run).key
        return connection.scalar(select(func.count()).select_from(table).where(table.c.run == key))


def expected(raw, width):
    """Steps, means, smallest and largest of buckets, the slow way."""
    found = {}
    for step, value in zip(raw.steps.tolist(), raw.values.tolist(), strict=True):
        found.setdefault(step // width * width, []).append(value)
    table = []
    for step, values in found.items():
        numbers = [v for v in values if not math.isnan(v)] or [math.nan]
        with np.errstate(invalid="ignore"):
            table.append((step, sum(v / len(values) for v in values), min(numbers), max(numbers)))
    return np.array(table).T


def check(engine, run, metric="loss", **options):
    """A view is what the points in it give; returns its widths."""
    widths = set()
    raw = read(engine, run, metric, max_points=_ALL)
    found = read(engine, run, metric, **options)
    low, high = options.get("from_step"), options.get("to_step")
    for rank, points in raw.items():
        inside = (points.steps >= (low or 0)) & (points.steps <= (_ALL if high is None else high))
        if not inside.any():
            # A bucket may begin before what was asked for, and hold something there.
            continue
        got = found[rank]
        widths.add(got.width)
        assert len(got.steps) <= options["max_points"]
        if inside.sum() <= options["max_points"] and got.width == 1:
            np.testing.assert_array_equal(got.steps, points.steps[inside])
            np.testing.assert_array_equal(got.values, points.values[inside])
            continue
        steps, mean, smallest, largest = expected(points, got.width)
        a = np.searchsorted(steps, got.steps[0])
        shown = slice(a, a + len(got.steps))
        np.testing.assert_array_equal(got.steps, steps[shown])
        assert got.steps[0] <= points.steps[inside][0]
        assert got.steps[-1] + got.width > points.steps[inside][-1]
        # Buckets at the ends are whole, and no others are there.
        assert got.steps[0] > (low or 0) - got.width
        assert got.steps[-1] <= (_ALL if high is None else high)
        scale = np.abs(points.values[np.isfinite(points.values)]).max(initial=0)
        for name, ours, theirs in (
            ("mean", got.values, mean),
            ("low", got.low, smallest),
            ("high", got.high, largest),
        ):
            np.testing.assert_allclose(
                ours, theirs[shown], rtol=1e-6, atol=scale * 1e-6, err_msg=name
            )
    return widths


@st.composite
def stretches(draw):
    """Steps from somewhere, with strides and gaps, of one process of one rank."""
    first = draw(st.integers(0, 6000))
    count = draw(st.integers(1, 2500))
    stride = draw(st.sampled_from([1, 1, 1, 2, 7, 16, 100]))
    steps = first + stride * np.arange(count if stride < 16 else count // 10 + 1)
    rng = np.random.default_rng(draw(st.integers(0, 10)))
    values = rng.normal(draw(st.sampled_from([0.0, 5.0, 1e6])), 1.0, len(steps))
    for odd in draw(st.lists(st.sampled_from([math.nan, math.inf, -math.inf, 1e39]), max_size=3)):
        values[rng.integers(len(steps))] = odd
    if draw(st.booleans()):
        kept = rng.random(len(steps)) < 0.7
        kept[0] = True
        steps, values = steps[kept], values[kept]
    order = rng.permutation(len(steps)) if draw(st.booleans()) else slice(None)
    return draw(st.integers(0, 2)), draw(st.sampled_from("abc")), steps[order], values[order]


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    parts=st.lists(stretches(), min_size=1, max_size=6),
    compacted=st.lists(st.booleans(), min_size=6, max_size=6),
    max_points=st.sampled_from([2, 10, 60, 400]),
    window=st.tuples(st.integers(0, 7000), st.integers(0, 7000)),
    shared=st.booleans(),
)
def test_buckets_are_those_of_the_points(engine, parts, compacted, max_points, window, shared):
    run = f"r{next(_names)}"
    for seq, (rank, session, steps, values) in enumerate(parts):
        more = {}
        if shared and seq % 2:
            # The same series in another set of series.
            more["other"] = wire.Column(np.array(steps, np.int64), np.array(values) * 2)
        store(engine, batch(run, steps, values, seq=seq, rank=rank, session=session, **more))
        if compacted[seq]:
            # In small steps, so that it is met half-way.
            compaction.compact(engine, key_of(engine, run), max_points=20_000)
            compaction.compact(engine, key_of(engine, run), max_points=20_000)
    check(engine, run, max_points=max_points)
    low, high = sorted(window)
    check(engine, run, max_points=max_points, from_step=low, to_step=high)
    compact(engine, run)
    check(engine, run, max_points=max_points)
    check(engine, run, max_points=max_points, from_step=low, to_step=high)


def test_a_long_run_is_read_from_roll_ups_of_all_widths(engine):
    rng = np.random.default_rng(1)
    values = rng.normal(size=70_000)
    values[12_345] = 1e6
    values[[20_000, 50_000]] = math.nan, math.inf
    for seq, first in enumerate(range(0, 70_000, 700)):
        steps = np.arange(first, first + 700)
        store(engine, batch("long", steps, values[steps], seq=seq))
        if seq % 9 == 0:
            compact(engine, "long")
    compact(engine, "long")
    widths = set()
    for max_points in (20, 100, 500, 2000, 30_000):
        widths |= check(engine, "long", max_points=max_points)
        assert read(engine, "long", max_points=max_points)[0].high.max() == math.inf
    widths |= check(engine, "long", max_points=100, from_step=10_000, to_step=15_000)
    assert {4096, 768, 192, 64} <= widths
    spike = read(engine, "long", max_points=100, from_step=10_000, to_step=15_000)[0]
    assert spike.high.max() == pytest.approx(1e6)


def test_what_is_rolled_up_is_not_read_again(engine):
    """Points that were rolled up may go, and the view of the whole run stays."""
    steps = np.arange(4096)
    store(engine, batch("gone", steps, np.sin(steps / 50), seq=0))
    compact(engine, "gone")
    before = read(engine, "gone", max_points=256)[0]
    with writing(engine) as connection:
        connection.execute(
            schema.chunk.update()
            .where(schema.chunk.c.run == runs.find_run(connection, "gone").key)
            .values(values=b"\0" * 8 * 4096)
        )
    after = read(engine, "gone", max_points=256)[0]
    np.testing.assert_array_equal(before.values, after.values)
    assert before.width == 16
    assert len(before.steps) == 256


def test_late_points_and_a_restart_change_what_was_rolled_up(engine):
    steps = np.arange(3000)
    store(engine, batch("late", steps, np.zeros(3000), seq=0))
    compact(engine, "late")
    store(engine, batch("late", [100], [7.0], seq=1))
    assert read(engine, "late", max_points=100)[0].high.max() == 7
    check(engine, "late", max_points=100)
    again = np.arange(1000, 2000)
    store(engine, batch("late", again, np.full(1000, 3.0), seq=0, session="b"))
    check(engine, "late", max_points=100)
    compact(engine, "late")
    check(engine, "late", max_points=100)
    found = read(engine, "late", max_points=100)[0]
    assert found.high[(found.steps >= 1056) & (found.steps < 1900)].min() == 3


class Killed(BaseException):
    """Nothing of ours catches this."""


def test_a_compaction_that_is_killed_leaves_nothing_half_done(engine, monkeypatch):
    steps = np.arange(5000)
    store(engine, batch("killed", steps, np.cos(steps / 9), seq=0))
    write = compaction._write

    def dies(*arguments):
        write(*arguments)
        raise Killed

    monkeypatch.setattr(compaction, "_write", dies)
    with pytest.raises(Killed):
        compaction.compact(engine, key_of(engine, "killed"))
    assert rows_of(engine, "killed", schema.rollup) == 0
    assert rows_of(engine, "killed", schema.rollup_mark) == 0
    check(engine, "killed", max_points=100)
    monkeypatch.undo()
    compact(engine, "killed")
    assert rows_of(engine, "killed", schema.rollup) > 0
    check(engine, "killed", max_points=100)


def test_of_two_servers_one_compacts(engine, monkeypatch):
    """The slower one's work is void, and it says that there may be more to do."""
    steps = np.arange(5000)
    store(engine, batch("two", steps, np.cos(steps / 9), seq=0))
    take_arrivals = compaction._take_arrivals

    def while_the_other_is_faster(connection, run, watermark):
        more = take_arrivals(connection, run, watermark)
        monkeypatch.undo()
        compact(engine, "two")
        return more

    monkeypatch.setattr(compaction, "_take_arrivals", while_the_other_is_faster)
    key = key_of(engine, "two")
    assert compaction.compact(engine, key)
    with reading(engine) as connection:
        number = watermarks.load(connection, run=key).number
        assert compaction.runs_to_compact(connection) == []
    assert not compaction.compact(engine, key)
    check(engine, "two", max_points=100)
    with reading(engine) as connection:
        assert watermarks.load(connection, run=key).number == number + 1


def test_compacting_again_changes_nothing(engine):
    steps = np.arange(5000)
    store(engine, batch("again", steps, np.cos(steps / 9), seq=0))
    compact(engine, "again")
    with reading(engine) as connection:
        before = connection.execute(select(schema.rollup)).all()
    compact(engine, "again")
    with reading(engine) as connection:
        assert connection.execute(select(schema.rollup)).all() == before


@example(values=[2.7043636194195453e294, -1.7976931348622888e308], gaps=[0] * 60)
@given(
    values=st.lists(st.floats(width=64), min_size=1, max_size=60),
    gaps=st.lists(st.integers(0, 40), min_size=60, max_size=60),
)
def test_rows_give_back_their_buckets(values, gaps):
    steps = np.cumsum(np.array(gaps[: len(values)]) + 1)
    made = rollups.of_points(steps // rollups.BASE, np.array([values]))

    class Row:
        def __init__(self, fields):
            self.__dict__ |= fields

    back = rollups.read_rows([Row(row) for row in rollups.rows(made, 0)], 0)
    np.testing.assert_array_equal(back.index, made.index)
    np.testing.assert_array_equal(back.count, made.count)
    finite = [v for v in values if math.isfinite(v)]
    # Divided first: the span itself may be more than float64 holds.
    atol = max(finite) / 4096 - min(finite) / 4096 if finite else 0.0
    for ours, theirs in ((back.mean, made.mean), (back.low, made.low), (back.high, made.high)):
        np.testing.assert_array_equal(np.isfinite(ours), np.isfinite(theirs))
        strange = ~np.isfinite(theirs)
        np.testing.assert_array_equal(ours[strange], theirs[strange])
        np.testing.assert_allclose(ours[~strange], theirs[~strange], rtol=0, atol=atol)


_FAR = 2**52
_LAST = 2**63 - 1


@pytest.mark.parametrize(
    "steps",
    [
        [0, _FAR],
        [*range(5000), *range(_FAR, _FAR + 5000)],
        [n * 2**39 + n for n in range(3000)],
        # What came before steps had a limit is in the database still.
        [0, _LAST - 20, _LAST - 1, _LAST],
        [n * (_LAST // 2000) for n in range(2000)],
    ],
    ids=["two", "two parts", "evenly", "last", "to the last"],
)
@pytest.mark.parametrize("batches", [1, 3])
def test_steps_that_are_far_apart_cost_no_more_than_others(sqlite, monkeypatch, steps, batches):
    monkeypatch.setattr(compaction, "_MAX_POINTS", 20_000)
    parts = [steps[n::batches] for n in range(batches)]
    for seq, part in enumerate(parts):
        sent = batch("r", part, np.arange(len(part)) / 7, seq=seq)
        with writing(sqlite) as connection:
            store_batches(connection, [(sent, 1000.0)], Dictionaries())
    compact(sqlite, "r")
    key = key_of(sqlite, "r")
    with reading(sqlite) as connection:
        assert compaction.runs_to_compact(connection) == []
        assert watermarks.load(connection, run=key).ranks[0].end > steps[-1] - 2 * rollups.BASE
    raw = read(sqlite, "r", max_points=_ALL)[0]
    assert raw.steps.tolist() == sorted(steps)
    found = read(sqlite, "r", max_points=50)[0]
    assert len(found.steps) <= 50
    assert (found.low.min(), found.high.max()) == (raw.values.min(), raw.values.max())


def test_many_points_far_apart_are_rolled_up_in_parts(sqlite):
    # More than are examined at once, of series of different lengths.
    steps = [n * 2**36 for n in range(4000)]
    other = wire.Column(np.array(steps[::3]), np.arange(len(steps[::3]), dtype=float))
    store(sqlite, batch("r", steps, np.sin(steps), seq=0, other=other))
    compact(sqlite, "r", max_points=500)
    for metric in ("loss", "other"):
        raw = read(sqlite, "r", metric, max_points=_ALL)[0]
        for points in (3, 40):
            found = read(sqlite, "r", metric, max_points=points)[0]
            table = expected(raw, found.width)
            assert found.steps.tolist() == table[0].tolist()
            np.testing.assert_allclose(found.low, table[2], atol=2e-3)
            np.testing.assert_allclose(found.high, table[3], atol=2e-3)
