"""Series of a batch lie side by side, and come back one by one, whatever sets of them come."""

import random

import numpy as np
import pytest
from sqlalchemy import func, select

from rankscope.agent import wire
from rankscope.server.storage import schema
from rankscope.server.storage.database.engine import reading, writing
from rankscope.server.storage.ingest.batches import store_batches
from rankscope.server.storage.ingest.dictionary import Dictionaries
from rankscope.server.storage.judgement import evaluation
from rankscope.server.storage.reading import runs, series


def column(steps, values):
    return wire.Column(np.array(steps, np.int64), np.array(values, np.float64))


def batch(seq, rank=0, run="r", **fields):
    return wire.Batch(run=run, rank=rank, seq=seq, session=f"s{rank}", **fields)


def store(engine, batches, known=None):
    with writing(engine) as connection:
        received = [(one, 1000.0 + n) for n, one in enumerate(batches)]
        return store_batches(connection, received, known or Dictionaries())


def key_of(connection, run="r"):
    return runs.find_run(connection, run).key


def read(engine, metric, run="r", **options):
    with reading(engine) as connection:
        found = series.read_series(
            connection, run=key_of(connection, run), metric=metric, max_points=10**6, **options
        )
    return {s.rank: dict(zip(s.steps.tolist(), s.values.tolist(), strict=True)) for s in found}


def rows(engine, table):
    with reading(engine) as connection:
        return connection.scalar(select(func.count()).select_from(table))


def test_series_of_the_same_steps_share_a_row(engine):
    steps = [4, 6, 8]
    columns = {name: column(steps, np.arange(3) + n) for n, name in enumerate("cab")}
    columns["d"] = column([8], [9.0])
    digests = {"parameters": wire.Column(np.array(steps), np.array([1, 2, 2**64 - 1], np.uint64))}
    store(engine, [batch(0, columns=columns, words=digests)])
    assert rows(engine, schema.chunk) == 2
    assert read(engine, "c") == {0: {4: 0.0, 6: 1.0, 8: 2.0}}
    assert read(engine, "b") == {0: {4: 2.0, 6: 3.0, 8: 4.0}}
    assert read(engine, "d") == {0: {8: 9.0}}
    with reading(engine) as connection:
        new = evaluation.load_new(connection, run=key_of(connection), after=0)
        (digest,) = new.digests
        assert digest.values.tolist() == [[[1, 2, 2**64 - 1]]]
        assert series.latest_values(connection, run=key_of(connection), metrics=["a", "d"]) == {
            (0, "a"): 3.0,
            (0, "d"): 9.0,
        }
        listed = series.list_metrics(connection, run=key_of(connection))
    assert [(m.name, m.first_step, m.last_step) for m in listed] == [
        ("a", 4, 8),
        ("b", 4, 8),
        ("c", 4, 8),
        ("d", 8, 8),
    ]


def test_ever_other_sets_of_series_do_not_fill_the_dictionary(engine):
    draw = random.Random(1)
    names = [f"m{n}" for n in range(12)]
    expected = {name: {} for name in names}
    known = Dictionaries()
    for seq in range(300):
        chosen = draw.sample(names, draw.randint(1, 12))
        for name in chosen:
            expected[name][seq] = float(seq)
        store(engine, [batch(seq, columns={name: column([seq], [seq]) for name in chosen})], known)
    assert rows(engine, schema.layout) <= 64 + len(names)
    for name in names:
        assert read(engine, name) == {0: expected[name]}


@pytest.mark.parametrize("seed", range(4))
def test_batches_together_are_as_one_by_one(engine, seed):
    """Groups, repetitions, gaps, late batches, two runs, restarts: the same, each batch once."""
    draw = random.Random(seed)
    sent = []
    for run in "ab":
        for rank in range(3):
            for seq in [*range(6), 2 + (1 << 32), 9]:
                at = 10 * (seq % 100) + (seq >> 32)
                columns = {"loss": column(range(at, at + 4), np.arange(4) + rank)}
                sent.append(batch(seq, rank, run, columns=columns))
    expected = {
        (run, rank): {
            10 * (seq % 100) + (seq >> 32) + n: float(n + rank)
            for seq in [*range(6), 2 + (1 << 32), 9]
            for n in range(4)
        }
        for run in "ab"
        for rank in range(3)
    }
    todo = sent * 3
    draw.shuffle(todo)
    known = Dictionaries()
    accepted = 0
    while todo:
        size = draw.randint(1, 20)
        group, todo = todo[:size], todo[size:]
        accepted += sum(answer.accepted for answer in store(engine, group, known))
        if draw.random() < 0.3:
            known = Dictionaries()  # another server
    assert accepted == sum(one.points for one in sent)
    for run in "ab":
        found = read(engine, "loss", run)
        for rank, points in found.items():
            assert points.keys() == expected[run, rank].keys()
        with reading(engine) as connection:
            new = evaluation.load_new(connection, run=key_of(connection, run), after=0)
        assert new.arrival == 24
        assert sum(part.values.size for part in new.columns) == 3 * 8 * 4


def test_a_transaction_that_fails_leaves_no_numbers_behind(engine):
    known = Dictionaries()
    with engine.connect() as connection, connection.begin() as transaction:
        store_batches(connection, [(batch(0, columns={"x": column([0], [1.0])}), 1.0)], known)
        transaction.rollback()
    known.forget()
    store(engine, [batch(0, columns={"y": column([0], [2.0])})], known)
    store(engine, [batch(1, columns={"x": column([1], [3.0])})], known)
    assert read(engine, "y") == {0: {0: 2.0}}
    assert read(engine, "x") == {0: {1: 3.0}}
