"""Publishing from the training thread: nothing waits, nothing grows, nothing vanishes."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.agent import wire
from rankscope.agent.delivery.records import Drained, Records


def a_fingerprint(step: int = 0, tensors: int = 2, buckets: int = 64) -> wire.Fingerprint:
    return wire.Fingerprint(
        step=step,
        stage="parameters",
        table="parameters",
        digests=np.arange(tensors, dtype=np.uint64),
        sketches=np.zeros((tensors, buckets)),
    )


def points(drained: Drained) -> int:
    return sum(len(values) for _, values in (*drained.rows, *drained.word_rows))


def columns(drained: Drained) -> dict[str, wire.Column]:
    return wire.columns_of(drained.rows, np.float64)


def test_facts_become_columns() -> None:
    records = Records()
    for step in range(3):
        records.scalars(step, {"loss": 1.0 / (step + 1), "lr": 0.1})
        records.digests(step, {"parameters": -step})
        records.complete(step)
    records.fingerprint(a_fingerprint(step=2))
    records.event(wire.Event(step=2, kind="mark", text="epoch"))

    drained = records.drain()

    assert columns(drained)["loss"].steps.tolist() == [0, 1, 2]
    assert columns(drained)["loss"].values.tolist() == [1.0, 0.5, 1 / 3]
    assert drained.word_rows == (
        (0, {"parameters": 0}),
        (1, {"parameters": 2**64 - 1}),
        (2, {"parameters": 2**64 - 2}),
    )
    assert [p.step for p in drained.fingerprints] == [2]
    assert [e.text for e in drained.events] == ["epoch"]
    assert drained.through_step == 2
    assert not drained.more
    assert records.drain() == Drained(through_step=2)
    assert records.drain().empty
    assert records.waiting == 0


def test_the_later_value_of_a_step_stays() -> None:
    records = Records()
    records.scalars(4, {"accuracy": 0.1})
    records.scalars(5, {"accuracy": 0.2})
    records.scalars(4, {"accuracy": 0.3})

    column = columns(records.drain())["accuracy"]

    assert dict(zip(column.steps.tolist(), column.values.tolist(), strict=True)) == {4: 0.3, 5: 0.2}
    assert records.dropped == {}


def test_whole_numbers_are_numbers() -> None:
    records = Records()
    for step in range(3):
        records.scalars(step, {"epoch": 3, "best": True, "loss": 0.5})

    rows = records.drain().rows

    assert rows == tuple((step, {"epoch": 3.0, "best": 1.0, "loss": 0.5}) for step in range(3))
    assert {type(value) for _, values in rows for value in values.values()} == {float}


def test_a_large_backlog_comes_in_parts_and_in_order() -> None:
    records = Records()
    for step in range(1000):
        records.scalars(step, {"loss": float(step)})
        records.complete(step)

    parts = [records.drain(max_points=300)]
    while parts[-1].more:
        parts.append(records.drain(max_points=300))

    assert [points(part) for part in parts] == [300, 300, 300, 100]
    # No part claims to be complete beyond what has been drained with it.
    for part in parts:
        assert part.through_step <= columns(part)["loss"].steps[-1]
    assert parts[-1].through_step == 999


def test_a_fingerprint_takes_the_place_of_its_bytes() -> None:
    records = Records()
    for step in range(4):
        records.fingerprint(a_fingerprint(step, tensors=100))  # 52 kB each

    assert len(records.drain(max_points=5000).fingerprints) == 2


def test_beyond_the_limit_the_oldest_go_and_are_counted() -> None:
    records = Records(limit=100)
    for step in range(150):
        records.scalars(step, {"loss": 0.0, "lr": 0.0})

    drained = records.drain()

    assert columns(drained)["loss"].steps.tolist() == list(range(100, 150))
    assert records.dropped == {"memory_full": 200}


def test_markers_alone_do_not_grow_either() -> None:
    records = Records(limit=100)
    for step in range(1000):
        records.complete(step)

    assert records.waiting == 0
    assert records.drain().through_step == 999
    assert records.dropped == {}


def test_fingerprints_are_bounded_by_their_bytes() -> None:
    records = Records(fingerprint_bytes=10 * a_fingerprint().digests.nbytes * 65)
    for step in range(25):
        records.fingerprint(a_fingerprint(step))

    drained = records.drain()

    assert [p.step for p in drained.fingerprints] == list(range(15, 25))
    assert records.dropped == {"memory_full": 15}


@pytest.mark.parametrize(
    ("publish", "dropped"),
    [
        (lambda r: r.scalars(0, {"": 1.0}), {"bad_name": 1}),
        (lambda r: r.scalars(0, {"a\nb": 1.0}), {"bad_name": 1}),
        (lambda r: r.scalars(0, {"x" * 251: 1.0}), {"bad_name": 1}),
        (lambda r: r.scalars(0, {7: 1.0}), {"bad_name": 1}),
        (lambda r: r.scalars(0, {"a": "b", "c": None}), {"not_a_number": 2}),
        (lambda r: r.scalars(0, {"a": 10**400}), {"not_a_number": 1}),
        (lambda r: r.scalars(-1, {"a": 1.0, "b": 1.0}), {"bad_step": 2}),
        (lambda r: r.scalars(2**53, {"a": 1.0}), {"bad_step": 1}),
        (lambda r: r.digests(-1, {"parameters": 0}), {"bad_step": 1}),
    ],
)
def test_what_the_wire_cannot_carry_costs_only_itself(
    publish: Any, dropped: dict[str, int]
) -> None:
    records = Records()
    publish(records)
    records.scalars(0, {"loss": math.nan})

    drained = records.drain()

    assert drained.rows[0][1].keys() == {"loss"}
    assert records.dropped == dropped
    sent = wire.Batch(run="r", rank=0, seq=0, rows=drained.rows, word_rows=drained.word_rows)
    assert wire.decode(wire.encode(sent)).points == 1


def test_after_the_end_everything_is_counted() -> None:
    records = Records()
    records.stop()
    records.scalars(0, {"loss": 1.0, "lr": 0.1})

    assert records.drain().empty
    assert records.dropped == {"closed": 2}


@settings(max_examples=30, deadline=None)
@given(
    limit=st.integers(1, 60),
    fingerprint_room=st.integers(1, 8),
    moves=st.lists(
        st.one_of(
            st.tuples(st.just("scalars"), st.integers(1, 4)),
            st.tuples(st.just("digest"), st.just(0)),
            st.tuples(st.just("fingerprint"), st.just(0)),
            st.tuples(st.just("complete"), st.just(0)),
            st.tuples(st.just("drain"), st.integers(1, 20)),
        ),
        max_size=120,
    ),
)
def test_produced_is_drained_and_dropped(
    limit: int, fingerprint_room: int, moves: list[tuple[str, int]]
) -> None:
    records = Records(limit=limit, fingerprint_bytes=fingerprint_room * 1040)
    produced = drained = 0
    through = -1
    for step, (move, size) in enumerate(moves):
        if move == "scalars":
            records.scalars(step, {f"m{i}": 0.0 for i in range(size)})
            produced += size
        elif move == "digest":
            records.digests(step, {"parameters": step})
            produced += 1
        elif move == "fingerprint":
            records.fingerprint(a_fingerprint(step))
            produced += 1
        elif move == "complete":
            records.complete(step)
        else:
            part = records.drain(max_points=size)
            drained += points(part) + len(part.fingerprints)
            assert part.through_step >= through
            through = part.through_step
        assert records.waiting <= limit
    more = True
    while more:
        part = records.drain()
        drained += points(part) + len(part.fingerprints)
        more = part.more

    assert produced == drained + sum(records.dropped.values())


def test_threads_lose_no_count() -> None:
    records = Records(limit=500, fingerprint_bytes=8 * 1040)
    each, threads = 4000, 3
    drained = 0
    stop = threading.Event()

    def produce(number: int) -> None:
        for step in range(each):
            records.scalars(step, {f"m{number}": 0.0})
            if step % 10 == 0:
                records.fingerprint(a_fingerprint(step))

    def consume() -> None:
        nonlocal drained
        while True:
            last = stop.is_set()
            part = records.drain(max_points=100)
            drained += points(part) + len(part.fingerprints)
            if last and not part.more:
                return

    consumer = threading.Thread(target=consume)
    producers = [threading.Thread(target=produce, args=(n,)) for n in range(threads)]
    for thread in (consumer, *producers):
        thread.start()
    for thread in producers:
        thread.join()
    stop.set()
    consumer.join()

    assert drained + sum(records.dropped.values()) == threads * (each + each // 10)
