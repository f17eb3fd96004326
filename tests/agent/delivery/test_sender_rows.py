"""In which form the sender passes points on, and what that costs the training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rankscope.agent import wire
from rankscope.agent.delivery.records import ENTRIES_A_GO, Records
from rankscope.agent.delivery.sender import Sender
from rankscope.agent.launcher import Identity
from rankscope.agent.options import Options
from tests.support.servers.collector import Collector, Reply
from tests.support.servers.sending import Rank, assert_everything_arrived


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[wire.Batch]:
    """What was encoded."""
    batches: list[wire.Batch] = []
    encode = wire.encode

    def recorded(batch: wire.Batch) -> bytes:
        batches.append(batch)
        return encode(batch)

    monkeypatch.setattr(wire, "encode", recorded)
    return batches


def sender(records: Records, spool: Path) -> Sender:
    return Sender(
        records,
        options=Options(mode="offline", spool=spool),
        identity=Identity(run="run", rank=0),
        hello=lambda: wire.Hello(started_at=1.0),
        phase=lambda: "step",
        on_problem=lambda text: None,
    )


def publish(records: Records, scalars: int, digests: int) -> None:
    for step in range(scalars):
        records.scalars(step, {"loss": float(step), "lr": 0.1})
    for step in range(digests):
        records.digests(step, {"parameters": -step})


@pytest.mark.parametrize(
    ("scalars", "digests", "rows"),
    [
        *((1, 0, True), (0, 1, True), (100, 56, True), (100, 57, False)),
        *((128, 0, True), (129, 0, False), (0, 256, True), (0, 257, False)),
    ],
)
def test_few_points_go_as_rows_and_many_as_series(
    tmp_path: Path, encoded: list[wire.Batch], scalars: int, digests: int, rows: bool
) -> None:
    records = Records()
    made = sender(records, tmp_path)
    publish(records, scalars, digests)
    made.close()

    (batch,) = encoded
    assert (len(batch.rows), len(batch.word_rows)) == ((scalars, digests) if rows else (0, 0))
    read = wire.decode(wire.encode(batch))
    expected: dict[str, Any] = {"loss": range(scalars), "lr": [0.1] * scalars} if scalars else {}
    assert {name: c.values.tolist() for name, c in read.columns.items()} == {
        name: list(values) for name, values in expected.items()
    }
    assert [c.values.tolist() for c in read.words.values()] == (
        [[-step % 2**64 for step in range(digests)]] if digests else []
    )


def test_a_server_that_knows_no_rows_gets_columns(
    tmp_path: Path, encoded: list[wire.Batch]
) -> None:
    refusal = {"title": "Unprocessable", "detail": "v: version 2 is not known here (up to 1)"}
    with Collector() as collector:
        collector.replies.append(Reply(status=422, body=refusal))
        one = Rank(collector.url, tmp_path)
        one.train(3)
        one.sender.start()
        collector.wait_for(lambda c: c.stored() == 9)
        before = len(encoded)
        one.train(3)
        one.sender.close()

        assert_everything_arrived(collector, one)
    assert one.problems == []
    assert one.sender.counters.dropped == {}
    assert one.sender.counters.accepted == one.produced == 18
    assert encoded[0].rows
    assert not any(batch.rows or batch.word_rows for batch in encoded[before:])


def test_a_value_that_is_said_twice_is_one(tmp_path: Path, encoded: list[wire.Batch]) -> None:
    for count in (20, 200):
        records = Records()
        made = sender(records, tmp_path / str(count))
        for step in range(count):
            records.scalars(step, {"loss": 9.0, "lr": 0.1})
            records.scalars(step, {"loss": float(step)})
        made.close()

        assert made.counters.spooled == 2 * count
        read = wire.decode(wire.encode(encoded[-1]))
        assert read.columns["loss"].values.tolist() == [float(step) for step in range(count)]


def test_the_training_thread_is_let_go_on_in_between(
    tmp_path: Path, encoded: list[wire.Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses = []
    monkeypatch.setattr("rankscope.agent.delivery.sender.time.sleep", pauses.append)
    records = Records()
    made = sender(records, tmp_path)
    publish(records, 4 * ENTRIES_A_GO, 0)
    made._collect()

    assert len(encoded[0].columns["loss"].steps) == 4 * ENTRIES_A_GO
    # When they are taken out, and when series are made of them.
    assert len(pauses) == 3 + 4
    publish(records, 10, 10)
    made._collect()
    assert len(pauses) == 3 + 4
    made.close()
