"""Numbers of single tensors, from the database to the window of their step."""

from dataclasses import replace

import numpy as np

from rankscope.agent import wire
from rankscope.server.evaluation.align import WATCHED_LAYERS, Aligner
from rankscope.server.storage.database.engine import reading, writing
from rankscope.server.storage.ingest.batches import store_batch
from rankscope.server.storage.judgement import evaluation
from rankscope.server.storage.reading import layers, runs
from rankscope.server.window import LayerPart, LivenessPart, NewData, RankLiveness
from tests.support.runs.columns import of_rank

TABLE = wire.TensorTable(("a", "b"), ((2, 2), (2,)), ("float32",) * 2, ("",) * 2)


def post(engine, seq, *made, rank=0, session="s", table=TABLE, described=True, **fields):
    hello = (
        wire.Hello(started_at=1.0, tables={"parameters": table}) if described and seq == 0 else None
    )
    batch = wire.Batch(
        run="r", rank=rank, seq=seq, session=session, layers=made, hello=hello, **fields
    )
    with writing(engine) as connection:
        store_batch(connection, batch, received_at=1000.0)


def norms(step, *values, metric="grad_norm"):
    return wire.Layers(
        step=step, table="parameters", metric=metric, values=np.array(values, np.float64)
    )


def load(engine, after=0, beyond=-1, until=10**6):
    with reading(engine) as connection:
        key = runs.find_run(connection, "r").key
        parts, read = layers.load_new(
            connection, run=key, after=after, until=until, metrics=WATCHED_LAYERS, beyond=beyond
        )
    return [part for _, part in parts], read


def test_what_is_new_of_the_first_ranks_is_read(engine):
    for rank in (0, 3, 4):
        post(engine, 0, norms(0, 1, 2), norms(8, 3, 4), norms(8, 9, 9, metric="other"), rank=rank)
    parts, _ = load(engine)
    assert [(p.rank, p.metric, p.steps.tolist()) for p in parts] == [
        (0, "grad_norm", [0, 8]),
        (3, "grad_norm", [0, 8]),
    ]
    assert parts[0].table == TABLE
    assert parts[0].values.tolist() == [[1, 3], [2, 4]]
    post(engine, 1, norms(16, 5, 6))
    parts, _ = load(engine, after=3)
    assert [(p.rank, p.steps.tolist()) for p in parts] == [(0, [16])]
    assert load(engine, beyond=16)[0] == []


def test_numbers_that_came_before_their_table(engine):
    post(engine, 0, norms(0, 1, 2), described=False)
    assert load(engine)[0] == []
    batch = wire.Batch(
        run="r",
        rank=0,
        seq=1,
        session="s",
        hello=wire.Hello(started_at=1.0, tables={"parameters": TABLE}),
    )
    with writing(engine) as connection:
        store_batch(connection, batch, received_at=1000.0)
    (part,), _ = load(engine)
    assert part.table == TABLE


def test_a_page_ends_between_two_batches(engine, monkeypatch):
    for seq in range(4):
        post(engine, seq, norms(seq, 1, 2))
    monkeypatch.setattr(layers, "_PAGE_BYTES", 20)
    parts, read = load(engine)
    assert [p.steps.tolist() for p in parts] == [[0], [1]]
    rest, _ = load(engine, after=read)
    assert [p.steps.tolist() for p in rest] == [[2], [3]]


def test_new_data_has_them_with_the_scalars(engine):
    losses = {"loss": wire.Column(np.array([0, 1]), np.array([2.0, 1.0]))}
    post(engine, 0, norms(0, 1, 2), norms(1, 3, 4), columns=losses)
    with reading(engine) as connection:
        data = evaluation.load_new(
            connection,
            run=runs.find_run(connection, "r").key,
            after=0,
            metrics={"loss"},
            stages=(),
            layers=WATCHED_LAYERS,
        )
    assert [part.metric for part in data.layers] == ["grad_norm"]
    assert data.columns


def part(rank, steps, values, attempt=0, metric="grad_norm"):
    return LayerPart(
        rank=rank,
        attempt=attempt,
        metric=metric,
        name="parameters",
        table=TABLE,
        steps=np.array(steps),
        values=np.array(values, np.float64),
    )


def data(parts, through, *, attempts=(0, 0), first=0):
    liveness = [
        LivenessPart(RankLiveness(r, 0.0, 0.0, through, attempt=a), a, through, 0.0)
        for r, a in enumerate(attempts)
    ]
    columns = [
        of_rank(r, a, "loss", range(first, through + 1), np.ones(through + 1 - first))
        for r, a in enumerate(attempts)
    ]
    return NewData(
        arrival=1,
        more=False,
        columns=tuple(columns),
        digests=(),
        fingerprints=(),
        liveness=tuple(liveness),
        tables={r: {"parameters": TABLE} for r in range(len(attempts))},
        world_size=len(attempts),
        config={},
        layers=tuple(parts),
    )


def reported(windows):
    return [
        (made.step, made.metric, made.rank, made.values.tolist())
        for window in windows
        for made in window.layers
    ]


def test_a_window_has_the_numbers_of_its_steps_in_order():
    aligner = Aligner({"loss"})
    parts = [part(1, [0, 4], [[5, 7], [6, 8]]), part(0, [0, 4], [[1, 3], [2, 4]])]
    parts += [part(0, [0], [[9], [9]], metric="weight_norm")]
    aligner.add(data(parts, through=2))
    assert reported(aligner.windows(0.0)) == [
        (0, "grad_norm", 0, [1, 2]),
        (0, "grad_norm", 1, [5, 6]),
        (0, "weight_norm", 0, [9, 9]),
    ]
    aligner.add(data([], through=5, first=3))
    assert reported(aligner.windows(0.0)) == [
        (4, "grad_norm", 0, [3, 4]),
        (4, "grad_norm", 1, [7, 8]),
    ]
    # What comes after its step was evaluated is not examined.
    aligner.add(data([part(0, [4], [[0], [0]])], through=6, first=6))
    assert reported(aligner.windows(0.0)) == []


def test_what_a_restarted_rank_says_anew_counts():
    aligner = Aligner({"loss"})
    parts = [part(0, [0, 8, 16], [[1, 2, 3]] * 2), part(0, [8], [[20]] * 2, attempt=1)]
    made = data(parts, through=20, attempts=(1, 0))
    # Its first process came to step 19, the second one began at step 8.
    columns = (
        of_rank(0, 0, "loss", range(20), np.ones(20)),
        of_rank(0, 1, "loss", range(8, 21), np.ones(13)),
        of_rank(1, 0, "loss", range(21), np.ones(21)),
    )
    aligner.add(replace(made, columns=columns))
    assert reported(aligner.windows(0.0)) == [
        (0, "grad_norm", 0, [1, 1]),
        (8, "grad_norm", 0, [20, 20]),
    ]
