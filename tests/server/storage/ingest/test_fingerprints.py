"""What fingerprints say is stored once, and comes back for each who said it."""

import numpy as np
from sqlalchemy import func, select

from rankscope.agent import wire
from rankscope.server.storage import schema
from rankscope.server.storage.database.engine import reading, writing
from rankscope.server.storage.ingest.batches import store_batches
from rankscope.server.storage.ingest.dictionary import Dictionaries
from rankscope.server.storage.ingest.fingerprints import content_of
from rankscope.server.storage.judgement.evaluation import load_new


def made(step=0, stage="parameters", fill=1.0, tensors=3, buckets=4, **fields):
    sketches = np.full((tensors, buckets), fill) if buckets else None
    digests = np.arange(tensors, dtype=np.uint64)
    return wire.Fingerprint(
        step=step, stage=stage, table="parameters", digests=digests, sketches=sketches, **fields
    )


def store(engine, *batches):
    with writing(engine) as connection:
        return store_batches(connection, [(batch, 1000.0) for batch in batches], Dictionaries())


def batch(rank, *fingerprints, seq=0):
    return wire.Batch(run="r", rank=rank, seq=seq, session="s", prints=fingerprints, world_size=4)


def contents(engine):
    with reading(engine) as connection:
        return connection.scalar(select(func.count()).select_from(schema.print_content))


def everything(engine):
    with reading(engine) as connection:
        return load_new(connection, run=connection.scalar(select(schema.run.c.key)), after=0)


def test_ranks_that_say_the_same_share_one_content_across_transactions(engine):
    store(engine, *(batch(rank, made(), made(stage="reduced_gradient")) for rank in range(3)))
    store(engine, batch(3, made()))
    assert contents(engine) == 1
    fingerprints = everything(engine).fingerprints
    assert [
        (p.rank, p.fingerprint.stage) for p in fingerprints if p.fingerprint.stage == "parameters"
    ] == [(rank, "parameters") for rank in range(4)]
    # Of one load they share their memory, too.
    assert len({id(p.fingerprint.digests) for p in fingerprints}) == 1


def test_one_bit_of_a_sketch_is_another_content(engine):
    store(engine, batch(0, made()), batch(1, made(fill=np.nextafter(1.0, 2.0))))
    assert contents(engine) == 2
    first, second = (p.fingerprint.sketches for p in everything(engine).fingerprints)
    assert first[0, 0] == 1.0
    assert second[0, 0] == np.nextafter(1.0, 2.0)
    assert first.shape == (3, 4)


def test_nan_and_negative_zero_come_back_as_they_were(engine):
    odd = made(fill=np.nan)
    odd.sketches[0] = -0.0
    store(engine, batch(0, odd), batch(1, made(fill=0.0)))
    back = everything(engine).fingerprints[0].fingerprint.sketches
    assert back.tobytes() == odd.sketches.tobytes()


def test_fingerprints_without_sketches_and_steps_apart(engine):
    store(engine, batch(0, made(buckets=0), made(step=1)), batch(1, made(step=1)))
    assert contents(engine) == 2
    fingerprints = everything(engine).fingerprints
    assert [p.fingerprint.step for p in fingerprints] == [0, 1, 1]
    assert fingerprints[0].fingerprint.sketches is None


def test_digests_are_distinguished_from_sketches():
    one = wire.Fingerprint(
        step=0, stage="parameters", table="p", digests=np.array([0, 0], np.uint64), sketches=None
    )
    other = wire.Fingerprint(
        step=0,
        stage="parameters",
        table="p",
        digests=np.array([0], np.uint64),
        sketches=np.array([[0.0]]),
    )
    assert content_of(one).key != content_of(other).key


def test_a_page_ends_between_batches_where_contents_are_many(engine, monkeypatch):
    monkeypatch.setattr("rankscope.server.storage.judgement.evaluation._PAGE_BYTES", 300)
    store(engine, *(batch(rank, made(fill=float(rank)), made(step=1)) for rank in range(4)))
    with reading(engine) as connection:
        run = connection.scalar(select(schema.run.c.key))
        data = load_new(connection, run=run, after=0)
        assert data.more
        found = [p.rank for p in data.fingerprints]
        while data.more:
            data = load_new(connection, run=run, after=data.arrival)
            found += [p.rank for p in data.fingerprints]
    assert found == [0, 0, 1, 1, 2, 2, 3, 3]
