"""Rows that are merged say what their parts said, to those who read by steps and by arrival."""

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from sqlalchemy import func, select, update

from rankscope.agent import wire
from rankscope.server.storage import schema
from rankscope.server.storage.database.engine import reading, writing
from rankscope.server.storage.ingest.batches import store_batches
from rankscope.server.storage.ingest.dictionary import Dictionaries
from rankscope.server.storage.judgement import evaluation
from rankscope.server.storage.maintenance import compaction, merging
from rankscope.server.storage.reading import runs, series

_names = itertools.count()


def batch(run, steps, *, seq, rank=0, session="a", names=("loss", "lr"), shift=0.0, started=1.0):
    """Values encode rank, step, series and batch, so that none is taken for another."""
    at = np.array(steps, np.int64)
    columns = {
        name: wire.Column(at, at * 1000.0 + rank * 10 + n + seq / 1000 + shift)
        for n, name in enumerate(names)
    }
    digests = wire.Column(at, at.astype(np.uint64) + np.uint64(2**63 + seq))
    hello = None
    if seq == 0:
        hello = wire.Hello(started_at=started, pid=1, host="h")
    return wire.Batch(
        run=run,
        rank=rank,
        seq=seq,
        session=session,
        world_size=3,
        through_step=int(at[-1]),
        columns=columns,
        words={"parameters": digests},
        hello=hello,
    )


def store(engine, *batches):
    known = Dictionaries()
    with writing(engine) as connection:
        store_batches(connection, [(one, 1000.0) for one in batches], known)


def key_of(engine, run):
    with reading(engine) as connection:
        return runs.find_run(connection, run).key


def compact(engine, run):
    for _ in range(500):
        if not compaction.compact(engine, key_of(engine, run)):
            return
    raise AssertionError("it does not come to an end")


def rows_of(engine, run, table=schema.chunk):
    with reading(engine) as connection:
        key = runs.find_run(connection, run).key
        return connection.scalar(select(func.count()).select_from(table).where(table.c.run == key))


def page(engine, run, after, limit):
    """What the evaluation reads, in plain lists."""
    with reading(engine) as connection:
        key = runs.find_run(connection, run).key
        found = evaluation.load_new(connection, run=key, after=after, limit=limit)
    parts = [
        (
            *(part.ranks.tolist(), part.arrivals.tolist(), part.attempt, part.names),
            *(part.steps.tolist(), part.values.dtype, part.values.tobytes()),
        )
        for part in (*found.columns, *found.digests)
    ]
    return found.arrival, found.more, parts


def pages(engine, run, limit):
    after, found = 0, []
    while True:
        after, more, parts = page(engine, run, after, limit)
        found.append((after, parts))
        if not more:
            return found


def views(engine, run):
    """All that is read by steps."""
    with reading(engine) as connection:
        key = runs.find_run(connection, run).key
        listed = series.list_metrics(connection, run=key)
        drawn = [
            (s.rank, s.width, s.steps.tolist(), s.values.tobytes(), s.low.tobytes())
            for name in ("loss", "lr", "odd")
            for options in (
                {"max_points": 100_000},
                {"max_points": 40},
                {"max_points": 500, "from_step": 300, "to_step": 700},
            )
            for s in series.read_series(connection, run=key, metric=name, **options)
        ]
        return listed, drawn


def without(monkeypatch):
    monkeypatch.setattr(merging, "_SHORT", (0, 0))


@st.composite
def posts(draw):
    """Batches of some ranks as they may come: short and long, in turns, again, and restarted."""
    made = []
    for rank in range(draw(st.integers(1, 3))):
        seqs = {"a": itertools.count(), "b": itertools.count()}
        at = draw(st.sampled_from([0, 0, 500, 5000]))
        session = "a"
        for _ in range(draw(st.integers(1, 5))):
            kind = draw(
                st.sampled_from(["short", "short", "short", "long", "back", "again", "gap"])
            )
            if kind == "back":
                session, at = "b", max(0, at - draw(st.integers(1, 300)))
            elif kind == "gap":
                at += draw(st.sampled_from([40, 3000]))
            elif kind == "again":
                at = max(0, at - draw(st.integers(1, 40)))
            elif kind == "long":
                count = draw(st.integers(48, 200))
                made.append((rank, session, next(seqs[session]), range(at, at + count), ("loss",)))
                at += count
            else:
                each = draw(st.sampled_from([1, 1, 5, 16]))
                stride = draw(st.sampled_from([1, 1, 1, 3]))
                names = draw(st.sampled_from([("loss", "lr"), ("loss",)]))
                odd = draw(st.sampled_from([0, 0, 7]))
                for n in range(draw(st.sampled_from([3, 40, 150])) // each + 1):
                    steps = range(at, at + each * stride, stride)
                    more = ("odd",) if odd and n % odd == 0 else ()
                    made.append((rank, session, next(seqs[session]), steps, names + more))
                    at += each * stride
    order = draw(st.sampled_from(["ranks in turns", "one after the other", "mixed"]))
    if order == "ranks in turns":
        made.sort(key=lambda one: one[3][0])
    elif order == "mixed":
        # Batches that had to wait come among later ones.
        rng = np.random.default_rng(draw(st.integers(0, 5)))
        late = np.argsort(np.arange(len(made)) + rng.integers(0, 30, len(made)), kind="stable")
        made = [made[n] for n in late]
    return made, draw(st.integers(1, 4))


@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(posts(), st.sampled_from([3, 50, 700]))
def test_nobody_sees_a_difference(sqlite, monkeypatch, posted, limit):
    made, cuts = posted
    assume(made)
    merged, plain = f"m{next(_names)}", f"p{next(_names)}"
    for name in (merged, plain):
        with monkeypatch.context() as patched:
            if name is plain:
                without(patched)
            for some in np.array_split(np.arange(len(made)), cuts):
                sent = [made[n] for n in some]
                if not sent:
                    continue
                store(
                    sqlite,
                    *(
                        batch(
                            name,
                            *(steps,),
                            seq=seq,
                            rank=rank,
                            session=session,
                            names=names,
                            started=1.0 if session == "a" else 2.0,
                        )
                        for rank, session, seq, steps, names in sent
                    ),
                )
                compact(sqlite, name)
    assert pages(sqlite, merged, limit) == pages(sqlite, plain, limit)
    listed, drawn = views(sqlite, merged)
    assert listed == views(sqlite, plain)[0]
    assert drawn == views(sqlite, plain)[1]
    assert rows_of(sqlite, merged) <= rows_of(sqlite, plain)


def test_a_rank_that_posts_each_step_has_few_rows(engine):
    store(engine, *(batch("each", [n], seq=n, rank=rank) for n in range(1100) for rank in (0, 1)))
    before = pages(engine, "each", 300)
    assert rows_of(engine, "each") == 2200
    compact(engine, "each")
    # Two of 512 steps and what has come since: a row of 32, and the rest as it came.
    assert rows_of(engine, "each") == 2 * (2 + 2 + 12)
    assert rows_of(engine, "each", schema.merged_chunk) == 2 * (2 + 2)
    assert pages(engine, "each", 300) == before
    compact(engine, "each")
    assert rows_of(engine, "each") == 2 * (2 + 2 + 12)


def test_rows_become_no_longer_than_is_good_to_read(engine):
    names = tuple(f"m{n:03}" for n in range(200))
    store(engine, *(batch("wide", [n], seq=n, names=names) for n in range(600)))
    compact(engine, "wide")
    with reading(engine) as connection:
        size = func.length(schema.chunk.c["values"])
        most = connection.scalar(
            select(func.max(size)).where(
                schema.chunk.c.run == runs.find_run(connection, "wide").key
            )
        )
    assert 16 * 1024 < most <= 48 * 1024


def test_long_rows_stay_as_they_came(engine):
    store(engine, *(batch("long", range(n, n + 50), seq=n // 50) for n in range(0, 2000, 50)))
    compact(engine, "long")
    assert rows_of(engine, "long") == 40
    assert rows_of(engine, "long", schema.merged_chunk) == 0


def test_who_reads_from_within_a_merged_row_gets_the_rest_of_it(engine):
    store(engine, *(batch("within", [n], seq=n) for n in range(600)))
    compact(engine, "within")
    arrival, more, parts = page(engine, "within", 100, 50)
    assert (arrival, more) == (150, True)
    # The hundred and first step, and 49 more; twice, as scalars and as digests.
    assert [part[4] for part in parts] == [[n] for n in range(100, 150)] * 2


class Killed(BaseException):
    """Nothing of ours catches this."""


def test_a_merge_that_is_killed_loses_nothing(engine, monkeypatch):
    store(engine, *(batch("killed", [n], seq=n) for n in range(600)))
    before, add = pages(engine, "killed", 100), merging.add_rows
    seen = []

    def dies(connection, table, rows):
        add(connection, table, rows)
        seen.append(connection.scalar(select(func.count()).select_from(schema.chunk)))
        if table is schema.merged_chunk:
            raise Killed

    monkeypatch.setattr(merging, "add_rows", dies)
    with pytest.raises(Killed):
        compact(engine, "killed")
    assert seen[-1] < 600
    assert rows_of(engine, "killed") == 600
    assert pages(engine, "killed", 100) == before
    monkeypatch.undo()
    compact(engine, "killed")
    assert rows_of(engine, "killed") < 50
    assert pages(engine, "killed", 100) == before


def test_rows_that_were_numbered_anew_meanwhile_are_not_overwritten(engine, monkeypatch):
    """An earlier process's digests come after a later one's: attempts get other numbers."""
    store(engine, *(batch("anew", [n], seq=n) for n in range(600)))
    make, c = merging.make, schema.chunk.c
    key = key_of(engine, "anew")

    def while_numbers_change(connection, run, watermark):
        made = make(connection, run, watermark)
        assert made
        monkeypatch.undo()
        return made

    write = merging.write

    def overtaken(connection, run, made):
        connection.execute(
            update(schema.chunk).where(c.run == run, c.first_step == 7).values(attempt=5)
        )
        write(connection, run, made)

    monkeypatch.setattr(merging, "write", overtaken)
    assert compaction.compact(engine, key)
    assert rows_of(engine, "anew") == 600
    monkeypatch.setattr(merging, "write", write)
    monkeypatch.setattr(merging, "make", while_numbers_change)
    compact(engine, "anew")
    assert rows_of(engine, "anew") < 50


def test_points_that_come_later_stand_behind_merged_ones(engine):
    store(engine, *(batch("later", [n], seq=n) for n in range(600)))
    compact(engine, "later")
    store(engine, batch("later", [100], seq=600, shift=0.5))
    with reading(engine) as connection:
        key = runs.find_run(connection, "later").key
        (found,) = series.read_series(connection, run=key, metric="loss", from_step=99, to_step=101)
    assert found.values.tolist() == [99000.099, 100001.1, 101000.101]
    compact(engine, "later")
    with reading(engine) as connection:
        (again,) = series.read_series(connection, run=key, metric="loss", from_step=99, to_step=101)
    assert again.values.tolist() == found.values.tolist()


def test_rows_of_a_run_that_has_no_short_ones_are_not_examined(engine, monkeypatch):
    """But for those of a database of which nobody knows that."""
    store(engine, *(batch("seen", range(n, n + 50), seq=n // 50) for n in range(0, 4000, 50)))
    read, rows = [], merging._rows

    def noted(*arguments):
        read.append(arguments)
        return rows(*arguments)

    monkeypatch.setattr(merging, "_rows", noted)
    compact(engine, "seen")
    assert not read
    t = schema.rollup_mark
    with writing(engine) as connection:
        connection.execute(update(t).values(merges=None, pending=True))
    compact(engine, "seen")
    assert read
    assert rows_of(engine, "seen") == 80
