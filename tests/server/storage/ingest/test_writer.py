"""Many batches in one transaction: each answered for itself, when it is there."""

import asyncio

import numpy as np
import pytest
from sqlalchemy import event, func, select, text

from rankscope.agent import wire
from rankscope.server.storage import schema
from rankscope.server.storage.database.engine import reading
from rankscope.server.storage.ingest.writer import Closed, Writer


def batch(seq, rank=0, run="r", **fields):
    columns = {"loss": wire.Column(np.array([seq]), np.array([float(rank)]))}
    return wire.Batch(run=run, rank=rank, seq=seq, session="s", columns=columns, **fields)


@pytest.fixture
def writer(engine):
    made = Writer(engine)
    made.start()
    yield made
    made.stop()


def stored(engine):
    with reading(engine) as connection:
        return connection.scalar(select(func.count()).select_from(schema.chunk))


def all_of(writer, batches):
    async def post():
        return await asyncio.gather(*map(writer.store, batches), return_exceptions=True)

    return asyncio.run(post())


def test_what_waits_together_is_committed_together(engine, writer):
    commits = []
    event.listen(engine, "commit", commits.append)
    sent = [batch(seq, rank) for rank in range(10) for seq in range(10)]
    answers = all_of(writer, sent)
    assert [answer.accepted for answer in answers] == [1] * 100
    assert stored(engine) == 100
    # The first ones alone, and the others while these were written.
    assert len(commits) < 50


def test_what_is_answered_is_there_for_others(engine, writer):
    async def post():
        for seq in range(5):
            await writer.store(batch(seq))
            assert stored(engine) == seq + 1

    asyncio.run(post())


def test_the_same_batch_twice_in_one_transaction_is_stored_once(engine, writer):
    answers = all_of(writer, [batch(0), batch(1), batch(0), batch(1), batch(0)])
    assert sorted(answer.duplicate for answer in answers) == [False, False, True, True, True]
    assert stored(engine) == 2


def test_one_that_cannot_be_stored_does_not_take_the_others_with_it(engine, writer):
    def refuse(connection, clause, multi, params, options):
        assert not any(row.get("phase") == "bad" for row in [*multi, params])

    event.listen(engine, "before_execute", refuse)
    sent = [batch(seq) for seq in range(20)]
    bad = batch(0, rank=1, phase="bad")
    answers = all_of(writer, [*sent[:10], bad, *sent[10:]])
    assert isinstance(answers[10], AssertionError)
    assert all(answer.accepted == 1 for n, answer in enumerate(answers) if n != 10)
    assert stored(engine) == 20


def test_numbers_that_no_database_takes_are_reported_before_anything_is_written(engine, writer):
    answers = all_of(writer, [batch(0, rank=2**31), batch(0)])
    assert isinstance(answers[0], wire.WireError)
    assert answers[1].accepted == 1


def test_a_database_that_is_away_is_reported_to_all(engine, writer):
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE chunk"))
    answers = all_of(writer, [batch(seq) for seq in range(5)])
    assert all(isinstance(answer, Exception) for answer in answers)


def test_what_was_taken_is_stored_before_the_end(engine):
    writer = Writer(engine)
    writer.start()

    async def post():
        waiting = [asyncio.create_task(writer.store(batch(seq))) for seq in range(50)]
        await asyncio.sleep(0)
        await asyncio.to_thread(writer.stop)
        with pytest.raises(Closed):
            await writer.store(batch(99))
        return await asyncio.gather(*waiting)

    assert [answer.accepted for answer in asyncio.run(post())] == [1] * 50
    assert stored(engine) == 50
