"""One number a tensor: stored by batch, read as a series of one tensor."""

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rankscope.agent import wire
from rankscope.server.storage.database.engine import open_engine, reading, writing
from rankscope.server.storage.database.migrate import upgrade
from rankscope.server.storage.ingest.batches import store_batch
from rankscope.server.storage.reading import layers, runs, series


def table(*names):
    return wire.TensorTable(names, ((),) * len(names), ("f",) * len(names), ("",) * len(names))


def hello(**tables):
    return wire.Hello(started_at=1.0, tables=tables)


def norms(step, values, *, metric="grad_norm", of="parameters"):
    return wire.Layers(step=step, table=of, metric=metric, values=np.array(values, np.float64))


def store(engine, seq, *made, rank=0, session="a", **fields):
    batch = wire.Batch(run="r", rank=rank, seq=seq, session=session, layers=made, **fields)
    with writing(engine) as connection:
        return store_batch(connection, batch, received_at=1000.0)


def read(engine, name, **options):
    with reading(engine) as connection:
        key = runs.find_run(connection, "r").key
        found = series.read_series(connection, run=key, metric=name, **options)
    return {s.rank: dict(zip(s.steps.tolist(), s.values.tolist(), strict=True)) for s in found}


def families(engine):
    with reading(engine) as connection:
        return layers.list_families(connection, run=runs.find_run(connection, "r").key)


def test_a_tensor_s_numbers_are_a_series(engine):
    tables = hello(parameters=table("a.weight", "b/c.weight"))
    made = [norms(s, [s, 10 + s]) for s in (0, 1, 8)]
    answer = store(engine, 0, *made, norms(8, [7, 8], metric="dead/share"), hello=tables)
    assert answer.accepted == 8
    store(engine, 1, norms(16, [math.nan, math.inf]))
    store(engine, 0, norms(8, [0.5, -0.0]), rank=3, hello=tables)
    first = read(engine, "grad_norm/a.weight")
    assert list(first) == [0, 3]
    assert math.isnan(first[0].pop(16))
    assert first == {0: {0: 0, 1: 1, 8: 8}, 3: {8: 0.5}}
    second = read(engine, "grad_norm/b/c.weight")
    assert second[0] == {0: 10, 1: 11, 8: 18, 16: math.inf}
    assert read(engine, "dead/share/b/c.weight") == {0: {8: 8.0}}
    assert read(engine, "grad_norm/b/c.weight", ranks=[0], from_step=1, to_step=8) == {
        0: {1: 11, 8: 18}
    }
    for name in ("grad_norm/c.weight", "grad_norm", "grad_norm/", "/a.weight", "loss/a.weight"):
        assert read(engine, name) == {}
    assert [
        (f.metric, f.tensors, f.ranks, f.first_step, f.last_step) for f in families(engine)
    ] == [
        ("dead/share", ("a.weight", "b/c.weight"), (0,), 8, 8),
        ("grad_norm", ("a.weight", "b/c.weight"), (0, 3), 0, 16),
    ]


def test_numbers_keep_their_meaning_when_the_table_is_replaced(engine):
    store(engine, 0, norms(0, [1, 2]), hello=hello(parameters=table("a", "b")))
    # A parameter was added in front; the hello comes again with it.
    store(engine, 1, norms(1, [9, 3, 4]), hello=hello(parameters=table("new", "a", "b")))
    store(engine, 2, norms(2, [8, 5, 6]))
    assert read(engine, "grad_norm/a") == {0: {0: 1, 1: 3, 2: 5}}
    assert read(engine, "grad_norm/b") == {0: {0: 2, 1: 4, 2: 6}}
    assert read(engine, "grad_norm/new") == {0: {1: 9, 2: 8}}
    [family] = families(engine)
    assert family.tensors == ("new", "a", "b")


def test_a_table_that_is_reported_later_names_what_came_before(engine):
    store(engine, 0, norms(0, [1, 2], of="watched/ema"), hello=hello(parameters=table("a")))
    assert read(engine, "grad_norm/x") == {}
    assert families(engine) == []
    store(engine, 1, hello=hello(**{"watched/ema": table("x", "y")}))
    assert read(engine, "grad_norm/y") == {0: {0: 2}}
    store(engine, 2, norms(1, [3, 4], of="watched/ema"))
    assert read(engine, "grad_norm/y") == {0: {0: 2, 1: 4}}


def test_numbers_without_names_do_not_read_over_the_end(engine):
    store(engine, 0, norms(0, [1, 2]), hello=hello(parameters=table("a", "b", "c")))
    assert read(engine, "grad_norm/b") == {0: {0: 2}}
    assert read(engine, "grad_norm/c") == {}


def test_what_a_later_attempt_posts_stands(engine):
    tables = hello(parameters=table("a"))
    store(engine, 0, norms(4, [1]), norms(8, [2]), hello=tables)
    store(engine, 0, norms(8, [3]), session="b", hello=tables)
    store(engine, 1, norms(8, [9]), norms(8, [10]))
    assert read(engine, "grad_norm/a") == {0: {4: 1, 8: 3}}


def test_a_scalar_of_the_same_name_goes_first(engine):
    column = wire.Column(np.array([5]), np.array([7.0]))
    columns = {"grad_norm/a": column}
    store(engine, 0, norms(4, [1]), hello=hello(parameters=table("a")), columns=columns)
    assert read(engine, "grad_norm/a") == {0: {5: 7}}


steps = st.dictionaries(
    st.integers(0, 60),
    st.lists(st.floats(width=64), min_size=3, max_size=3),
    min_size=1,
    max_size=12,
)


@settings(
    deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(batches=st.lists(steps, min_size=1, max_size=4))
def test_what_is_posted_comes_back(batches, tmp_path_factory):
    engine = open_engine(f"sqlite:///{tmp_path_factory.mktemp('db') / 'x.db'}")
    upgrade(engine)
    names = ("a", "b", "c")
    expected = {name: {} for name in names}
    for seq, batch in enumerate(batches):
        made = [norms(step, values) for step, values in batch.items()]
        store(engine, seq, *made, hello=hello(parameters=table(*names)) if seq == 0 else None)
        for step, values in batch.items():
            for name, value in zip(names, values, strict=True):
                expected[name][step] = value
    for name in names:
        found = read(engine, f"grad_norm/{name}", max_points=1000)[0]
        assert list(found) == sorted(expected[name])
        got, want = (np.array([d[s] for s in sorted(d)]) for d in (found, expected[name]))
        np.testing.assert_array_equal(got, want)
    engine.dispose()


@pytest.mark.parametrize("where", ["layers", "prints"])
def test_names_of_tables_are_bounded(sqlite, where):
    made = {
        "layers": wire.Layers(step=0, table="t" * 65, metric="m", values=np.zeros(1)),
        "prints": wire.Fingerprint(
            step=0, stage="start", table="t" * 65, digests=np.zeros(1, np.uint64)
        ),
    }
    batch = wire.Batch(run="r", rank=0, seq=0, **{where: (made[where],)})
    with (
        pytest.raises(wire.WireError, match=f"{where}.0..table: has at most 64"),
        writing(sqlite) as connection,
    ):
        store_batch(connection, batch, received_at=1.0)
