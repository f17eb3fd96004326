"""What a batch may be at most: refused by the name of its field, and never sent by an agent."""

from __future__ import annotations

import json
import math
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rankscope.agent import wire
from rankscope.agent.wire import limits
from rankscope.agent.wire.counting import check_msgpack
from tests.support.batches import batches, same

relaxed = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], deadline=None)


def plain(**fields: Any) -> dict[str, Any]:
    return {"run": "r", "rank": 0, "seq": 0, **fields}


def hello(**fields: Any) -> dict[str, Any]:
    return plain(hello=fields)


def table(**fields: Any) -> dict[str, Any]:
    one = {"names": ["w"], "shapes": [[2]], "dtypes": ["float32"], "shards": [""]}
    return hello(tables={"parameters": one | fields})


def nested(depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = {}
    for _ in range(depth):
        inner = {"a": inner}
    return inner


STEP = 2**53
LONG = "x" * 70_000

HOSTILE = {
    "rank": (plain(rank=2**20), "rank"),
    "rank of many digits": (plain(rank=10**4000), "rank"),
    "world size": (plain(world_size=5_000_000), "world_size"),
    "attempt": (plain(attempt=2**31 - 1), "attempt"),
    "seq": (plain(seq=2**63 - 1), "seq"),
    "through_step": (plain(through_step=2**63 - 1), "through_step"),
    "step of a series": (
        plain(columns={"loss": {"steps": [0, STEP], "values": [0, 0]}}),
        "columns.loss.steps",
    ),
    "step of a range": (
        plain(columns={"loss": {"steps": {"range": [STEP, STEP + 1, 1]}, "values": [0]}}),
        "columns.loss.steps",
    ),
    "step of a row": (plain(rows=[[STEP, {"loss": 0.5}]]), "rows[0]"),
    "step of a fingerprint": (
        plain(prints=[{"step": STEP, "stage": "start", "digests": []}]),
        "prints[0].step",
    ),
    "step of layers": (plain(layers=[{"step": STEP, "metric": "n", "values": []}]), "layers[0]"),
    "step of an event": (plain(events=[{"step": STEP, "kind": "mark"}]), "events[0].step"),
    "session": (plain(session="x" * 65), "session"),
    "phase": (plain(phase=LONG), "phase"),
    "error": (plain(error=LONG), "error"),
    "text of an event": (plain(events=[{"kind": "mark", "text": LONG}]), "events[0].text"),
    "kind of an event": (plain(events=[{"kind": LONG}]), "events[0].kind"),
    "data of an event": (
        plain(events=[{"kind": "mark", "data": {"a": ["b"] * 100_000}}]),
        "events[0].data",
    ),
    "events": (plain(events=[{"kind": "mark"}] * 10_001), "events"),
    "prints": (plain(prints=[{}] * 10_001), "prints"),
    "layers": (plain(layers=[{}] * 10_001), "layers"),
    "reasons": (plain(dropped={f"r{n}": 1 for n in range(101)}), "dropped"),
    "a reason": (plain(dropped={LONG: 1}), "dropped."),
    "what was dropped": (plain(dropped={"closed": 2**53}), "dropped.closed"),
    "table of a fingerprint": (
        plain(prints=[{"step": 0, "stage": "start", "table": "x" * 65, "digests": []}]),
        "prints[0].table",
    ),
    "host": (hello(host=LONG), "hello.host"),
    "launcher": (hello(launcher=LONG), "hello.launcher"),
    "pid": (hello(pid=2**31), "hello.pid"),
    "local rank": (hello(local_rank=2**20), "hello.local_rank"),
    "heartbeat": (hello(heartbeat_seconds=1e300), "hello.heartbeat_seconds"),
    "negative heartbeat": (hello(heartbeat_seconds=-1), "hello.heartbeat_seconds"),
    "long configuration": (hello(config={"a": "x" * 300_000}), "hello.config"),
    "configuration of many": (hello(config={str(n): n for n in range(50_000)}), "hello.config"),
    "deep configuration": (hello(config=nested(900)), "hello.config"),
    "sharded over": (
        hello(config={"sharded_over": {"first": 0, "step": 1, "count": 10**15}}),
        "hello.config.sharded_over.count",
    ),
    "tables": (hello(tables={str(n): {} for n in range(1001)}), "hello.tables"),
    "name of a table": (hello(tables={LONG: {}}), "hello.tables."),
    "name of a tensor": (table(names=[LONG]), "hello.tables.parameters.names[0]"),
    "shard": (table(shards=[LONG]), "hello.tables.parameters.shards[0]"),
    "dimensions": (table(shapes=[[1] * 65]), "hello.tables.parameters.shapes"),
    "elements": (table(shapes=[[2**20] * 8]), "hello.tables.parameters.shapes"),
    "no elements of many": (table(shapes=[[2**60, 0]]), "hello.tables.parameters.shapes"),
}


@pytest.mark.parametrize(("fields", "where"), HOSTILE.values(), ids=HOSTILE)
def test_what_is_over_a_limit_is_refused_by_its_name(fields: dict[str, Any], where: str) -> None:
    with pytest.raises(wire.WireError) as refusal:
        wire.from_json(fields)

    assert refusal.value.where.startswith(where)
    assert len(str(refusal.value)) < 1000


def test_dimensions_are_not_multiplied_before_they_are_refused() -> None:
    shape = [2**63 - 1] * 200_000
    values = {"dtype": "<f8", "shape": shape, "data": b""}

    with pytest.raises(wire.WireError, match="dimensions"):
        wire.decode(msgpack.packb(plain(columns={"loss": {"steps": [], "values": values}})))


@pytest.mark.parametrize("text", ['{"rank": ' + "1" * 5000 + "}", "[" * 100_000])
def test_json_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(wire.WireError, match="body: is not JSON"):
        wire.decode_json(text.encode())


# ---------------------------------------------------------------------------------- the counting

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(width=64)
    | st.text(max_size=300)
    | st.binary(max_size=300)
    | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=300)),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=40), inner),
    max_leaves=30,
)


def count(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(1 + count(part) for part in value.values())
    return 1 + sum(map(count, value)) if type(value) is list else 1


@relaxed
@given(values)
def test_values_are_counted_without_being_made(value: Any) -> None:
    exactly = count(value)
    packed = msgpack.packb(value, use_bin_type=True)
    before = limits.OBJECTS.most
    try:
        object.__setattr__(limits.OBJECTS, "most", exactly)
        check_msgpack(packed)
        object.__setattr__(limits.OBJECTS, "most", exactly - 1)
        # Each takes a byte at least, which is why shorter ones are not counted.
        assert len(packed) >= exactly
        with pytest.raises(wire.WireError, match="values"):
            check_msgpack(packed)
    finally:
        object.__setattr__(limits.OBJECTS, "most", before)


@pytest.mark.parametrize("one", [b"\x80", b"\x90", b"\x81\x00\x80", b"\xc0", b"\xdc\x00\x00"])
def test_too_many_values_are_refused(one: bytes) -> None:
    many = 3_000_000 // len(one) * 2
    body = b"\x81\xa1x\xdd" + many.to_bytes(4, "big") + one * many

    with pytest.raises(wire.WireError, match="body: has over 1000000 values"):
        wire.decode(body)
    with pytest.raises(wire.WireError, match="body: has over 1000000 values"):
        wire.decode_json(b'{"x": [' + b"{}," * many + b"0]}")


def test_many_points_are_few_values() -> None:
    columns = {f"m{n}": wire.Column(np.arange(300_000), np.zeros(300_000)) for n in range(10)}
    sent = wire.Batch(run="r", rank=0, seq=0, columns=columns)

    assert same(wire.decode(wire.encode(sent)), sent)


# --------------------------------------------------------------------------------------- the agent


@relaxed
@given(batches)
def test_all_that_an_agent_can_say_is_taken(sent: wire.Batch) -> None:
    assert same(wire.decode(wire.encode(sent)), wire.in_columns(sent))


def test_what_a_program_says_at_length_is_cut_to_what_is_taken() -> None:
    # Fifty thousand tensors of a mixture of experts, reported three times, and groups for each.
    names = tuple(f"layers.{n}.experts.{n % 256}.weight" for n in range(50_000))
    large = wire.TensorTable(
        names, ((512, 512),) * len(names), ("bfloat16",) * len(names), ("",) * len(names)
    )
    small = wire.TensorTable(("y" * 5000, "y" * 5001), ((), ()), ("f", "f"), ("s" * 3000, ""))
    sent = wire.Batch(
        run="r",
        rank=0,
        seq=0,
        error=LONG * 2,
        phase=LONG,
        events=(wire.Event(step=0, kind=LONG, text=LONG, data={"a": [1.5] * 100_000, "b": 2}),),
        hello=wire.Hello(
            started_at=0.0,
            host=LONG,
            tables={f"t{n}": large for n in range(4)} | {"small": small},
            config={
                "groups": [{"lr": 0.1 * n, "eps": 1e-8} for n in range(20_000)],
                "deep": nested(300),
                "model": "GPT",
            },
        ),
    )

    taken = wire.decode(wire.encode(sent))

    assert taken.hello is not None
    assert taken.hello.config["model"] == "GPT"
    assert "deep" in taken.hello.config
    assert taken.hello.config["left_out"] == ["groups", "tables.t2", "tables.t3"]
    assert [*taken.hello.tables] == ["t0", "t1", "small"]
    assert same(taken.hello.tables["t0"], large)
    first, second = taken.hello.tables["small"].names
    assert first != second  # also where they differ after what is kept
    assert len(first) == len(second) == limits.TENSOR_NAME.most
    assert taken.events[0].data == {"b": 2}
    assert (len(taken.error), len(taken.phase)) == (limits.TEXT.most, limits.WORD.most)
    # Nothing more is left out when it is sent on.
    assert wire.encode(wire.decode(wire.encode(taken))) == wire.encode(taken)
    assert same(wire.from_json(json.loads(json.dumps(wire.to_json(sent)))), taken)


def test_what_is_at_its_limit_is_taken() -> None:
    taken = wire.from_json(
        plain(
            rank=limits.RANK.most,
            world_size=limits.RANKS.most,
            attempt=limits.ATTEMPT.most,
            seq=limits.SEQ.most,
            through_step=limits.STEP.most,
            columns={"loss": {"steps": [limits.STEP.most], "values": [math.pi]}},
            error="x" * limits.TEXT.most,
            hello={
                "config": nested(limits.DEPTH.most - 1),
                "heartbeat_seconds": limits.HEARTBEAT.most,
                "pid": limits.PID.most,
            },
        )
    )

    assert taken.columns["loss"].steps.tolist() == [limits.STEP.most]
    assert wire.encode(wire.decode(wire.encode(taken))) == wire.encode(taken)


def test_every_limit_is_one_that_the_table_has() -> None:
    declared = {id(value) for value in vars(limits).values() if isinstance(value, wire.Limit)}

    assert {id(limit) for limit in wire.LIMITS} == declared
    assert all(limit.fields and limit.because for limit in wire.LIMITS)
