"""Batches in, series out: exactly what was posted, once, whatever the order."""

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rankscope.agent import wire
from rankscope.server.storage.database.engine import open_engine, writing
from rankscope.server.storage.database.migrate import upgrade
from rankscope.server.storage.ingest.batches import store_batch
from rankscope.server.storage.judgement import evaluation
from rankscope.server.storage.reading import runs, series


def column(steps, values, dtype=np.float64):
    return wire.Column(np.array(steps, np.int64), np.array(values, dtype))


def store(engine, batch, at=1000.0):
    with writing(engine) as connection:
        return store_batch(connection, batch, received_at=at)


def read(engine, metric="loss", run="r", **options):
    with engine.connect() as connection:
        key = runs.find_run(connection, run).key
        return {
            s.rank: s for s in series.read_series(connection, run=key, metric=metric, **options)
        }


def batch(seq=0, rank=0, session="a", **fields):
    return wire.Batch(run="r", rank=rank, seq=seq, session=session, **fields)


def test_non_finite_numbers_come_back(engine):
    values = [1.5, math.nan, math.inf, -math.inf, -0.0, 5e-324]
    store(engine, batch(columns={"loss": column(range(6), values)}))
    np.testing.assert_array_equal(read(engine)[0].values, values)


def test_a_batch_that_comes_twice_is_stored_once(engine):
    sent = batch(columns={"loss": column([0, 1], [1.0, 2.0])})
    assert store(engine, sent).accepted == 2
    again = store(engine, sent)
    assert (again.accepted, again.duplicate) == (0, True)
    assert read(engine)[0].values.tolist() == [1.0, 2.0]


def test_a_restarted_rank_gets_an_attempt_of_its_own_and_the_later_one_stands(engine):
    store(engine, batch(columns={"loss": column([0, 1, 2], [1.0, 2.0, 3.0])}))
    store(engine, batch(session="b", columns={"loss": column([1, 2, 3], [20.0, 30.0, 40.0])}))
    # The first one's last batch comes late; it does not win.
    store(engine, batch(seq=1, columns={"loss": column([2], [99.0])}))
    found = read(engine)[0]
    assert found.steps.tolist() == [0, 1, 2, 3]
    assert found.values.tolist() == [1.0, 20.0, 30.0, 40.0]


def test_the_run_ends_when_all_its_ranks_have(engine):
    for rank in range(2):
        store(engine, batch(rank=rank, world_size=2))

    def state():
        with engine.connect() as connection:
            return runs.find_run(connection, "r").state

    store(engine, batch(seq=1, rank=0, world_size=2, state="finished"))
    assert state() == "running"
    store(engine, batch(seq=1, rank=1, world_size=2, state="failed", error="boom"))
    assert state() == "failed"
    store(engine, batch(seq=0, rank=1, session="b", world_size=2))
    assert state() == "running"


def test_a_piece_of_an_early_batch_is_not_the_last_report(engine):
    for seq in (0, 5 << 32, 1):
        store(engine, batch(seq))
    store(engine, batch(seq=2, state="finished"))
    store(engine, batch(seq=7 << 32))  # of the first one, and late
    with engine.connect() as connection:
        assert runs.find_run(connection, "r").state == "finished"


def test_an_unknown_session_is_asked_for_its_hello(engine):
    assert store(engine, batch(seq=5)).hello_wanted
    hello = wire.Hello(started_at=1.0, config={"lr": math.nan})
    assert not store(engine, batch(seq=6, hello=hello)).hello_wanted
    assert not store(engine, batch(seq=7)).hello_wanted


def test_what_is_new_is_read_in_pages(engine):
    for seq in range(5):
        print_ = wire.Fingerprint(
            step=seq,
            stage="parameters",
            table="parameters",
            digests=np.array([seq, 2**64 - 1], np.uint64),
            sketches=np.full((2, 3), math.nan),
        )
        digests = {"parameters": column([seq], [2**63 + seq], np.uint64)}
        columns = {"loss": column([seq], [float(seq)]), "other": column([seq], [0.0])}
        store(engine, batch(seq, columns=columns, words=digests, prints=(print_,)))
    after, losses, digests, fingerprints = 0, [], [], []
    with engine.connect() as connection:
        key = runs.find_run(connection, "r").key
        while True:
            data = evaluation.load_new(connection, run=key, after=after, limit=2, metrics={"loss"})
            losses += [(p.names, v) for p in data.columns for v in p.values.ravel().tolist()]
            digests += [v for p in data.digests for v in p.values.ravel().tolist()]
            fingerprints += [p.fingerprint for p in data.fingerprints]
            after = data.arrival
            if not data.more:
                break
    assert losses == [(("loss",), float(s)) for s in range(5)]
    assert digests == [2**63 + s for s in range(5)]
    assert [p.digests.tolist() for p in fingerprints] == [[s, 2**64 - 1] for s in range(5)]
    assert np.isnan(fingerprints[0].sketches).all()


floats = st.floats(allow_nan=True, allow_infinity=True)
points = st.dictionaries(st.integers(0, 300), floats, min_size=1, max_size=40)


@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(batches=st.lists(points, min_size=1, max_size=5), data=st.data())
def test_any_order_and_any_repetition_store_the_same(batches, data, tmp_path_factory):
    engine = open_engine(f"sqlite:///{tmp_path_factory.mktemp('db') / 'x.db'}")
    upgrade(engine)
    sent = [
        batch(seq, columns={"loss": column(list(p), list(p.values()))})
        for seq, p in enumerate(batches)
    ]
    order = data.draw(st.permutations(sent + sent))
    for one in order:
        store(engine, one)
    found = read(engine, max_points=10_000)[0]
    assert found.steps.tolist() == sorted(set().union(*batches))
    possible = {}
    for p in batches:
        for step, value in p.items():
            possible.setdefault(step, []).append(value)
    for step, value in zip(found.steps.tolist(), found.values.tolist(), strict=True):
        assert any(value == v or (math.isnan(v) and math.isnan(value)) for v in possible[step])
    engine.dispose()


@given(
    values=st.lists(floats, min_size=1, max_size=500),
    max_points=st.integers(2, 50),
    stride=st.integers(1, 7),
)
def test_no_bucket_hides_an_extreme(values, max_points, stride):
    steps = np.arange(len(values), dtype=np.int64) * stride
    array = np.array(values)
    found = series.in_buckets(0, steps, array, first=0, last=int(steps[-1]), max_points=max_points)
    assert len(found.steps) <= max(max_points, 1)
    numbers = array[~np.isnan(array)]
    if len(numbers):
        assert np.nanmax(found.high) == numbers.max()
        assert np.nanmin(found.low) == numbers.min()
    if np.isnan(array).any():
        assert np.isnan(found.values).any()
    assert found.steps[0] == steps[0]


@pytest.mark.parametrize("window", [(0, 99), (10, 19), (95, 200), (300, 400)])
def test_ranges_are_cut_before_they_are_drawn(engine, window):
    store(engine, batch(columns={"loss": column(range(100), range(100))}))
    found = read(engine, from_step=window[0], to_step=window[1], max_points=1000)
    steps = found[0].steps.tolist() if found else []
    assert steps == [s for s in range(100) if window[0] <= s <= window[1]]
