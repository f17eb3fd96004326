"""The wire carries every batch unchanged, and answers everything else with a WireError."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rankscope.agent import wire
from tests.support.batches import batches, same

relaxed = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], deadline=None)
thorough = settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow], deadline=None)


def batch(**fields: Any) -> wire.Batch:
    return wire.Batch(**{"run": "r", "rank": 0, "seq": 0, **fields})


def plain(**fields: Any) -> dict[str, Any]:
    return {"run": "r", "rank": 0, "seq": 0, **fields}


@relaxed
@given(batches)
def test_msgpack_brings_back_what_was_sent(sent: wire.Batch) -> None:
    assert same(wire.decode(wire.encode(sent)), wire.in_columns(sent))


@relaxed
@given(batches)
def test_json_brings_back_what_was_sent(sent: wire.Batch) -> None:
    text = json.dumps(wire.to_json(sent), allow_nan=False)

    assert same(wire.from_json(json.loads(text)), wire.in_columns(sent))


@relaxed
@given(batches)
def test_both_forms_say_the_same(sent: wire.Batch) -> None:
    assert same(wire.decode(wire.encode(sent)), wire.from_json(wire.to_json(sent)))


def test_rows_are_read_as_columns() -> None:
    rows = ((4, {"loss": 0.5, "lr": 0.1}), (2, {"loss": math.nan}), (4, {"loss": 0.25}))
    sent = batch(rows=rows, word_rows=((4, {"parameters": 2**64 - 1}),))

    read = wire.decode(wire.encode(sent))

    assert (read.rows, read.word_rows) == ((), ())
    loss, lr = read.columns["loss"], read.columns["lr"]
    # The later value of a step stands.
    assert dict(zip(loss.steps.tolist(), loss.values.tolist(), strict=True)) == {
        4: 0.25,
        2: pytest.approx(math.nan, nan_ok=True),
    }
    assert (lr.steps.tolist(), lr.values.tolist()) == ([4], [0.1])
    assert read.words["parameters"].values.tolist() == [2**64 - 1]
    assert (sent.points, read.points) == (5, 4)


def test_rows_are_not_overlooked_by_one_that_cannot_read_them() -> None:
    with_rows = wire.encode(batch(rows=((0, {"loss": 0.5}),)))
    with_word_rows = wire.encode(batch(word_rows=((0, {"parameters": 5}),)))

    versions = [msgpack.unpackb(made)["v"] for made in (with_rows, with_word_rows)]
    assert versions == [2, 2]
    assert msgpack.unpackb(wire.encode(batch()))["v"] == 1


def test_series_with_the_same_steps_share_them() -> None:
    # By which the server knows, without comparing, what it can store together.
    sent = batch(rows=tuple((step, {"loss": 0.5, "lr": 0.1}) for step in (0, 64)))

    columns = wire.decode(wire.encode(sent)).columns

    assert columns["loss"].steps is columns["lr"].steps


def test_non_finite_numbers_are_data() -> None:
    values = np.array([math.nan, math.inf, -math.inf, -0.0, 5e-324])
    column = wire.Column(np.arange(5), values)

    packed = wire.decode(wire.encode(batch(columns={"loss": column}))).columns["loss"].values
    listed = wire.to_json(batch(columns={"loss": column}))["columns"]["loss"]["values"]

    assert packed.tobytes() == values.tobytes()
    assert listed == ["NaN", "Infinity", "-Infinity", -0.0, 5e-324]


def test_digests_keep_all_their_bits_in_json() -> None:
    words = np.array([0, 1, 2**53 + 1, 2**64 - 1], np.uint64)
    sent = batch(words={"parameters": wire.Column(np.arange(4), words)})

    received = wire.from_json(json.loads(json.dumps(wire.to_json(sent))))

    assert received.words["parameters"].values.tolist() == words.tolist()


def test_what_was_digested_may_have_any_name() -> None:
    names = ["batch", "local_gradient", "buffers", "watched", "rng/torch", "rng/cuda"]
    words = {name: wire.Column(np.arange(1), np.array([1], np.uint64)) for name in names}

    assert list(wire.decode(wire.encode(batch(words=words))).words) == names


def test_points_of_layers_count() -> None:
    made = wire.Layers(step=0, table="parameters", metric="grad_norm", values=np.zeros(7))
    column = wire.Column(np.arange(3), np.zeros(3))

    assert batch(layers=(made, made), columns={"loss": column}).points == 17


def test_regular_steps_cost_nothing() -> None:
    def size(count: int, stride: int) -> int:
        steps = np.arange(0, count * stride, stride)
        return len(wire.encode(batch(columns={"loss": wire.Column(steps, np.zeros(count))})))

    assert size(2000, 1) - size(1000, 1) == 8 * 1000
    assert size(2000, 64) - size(1000, 64) == pytest.approx(8 * 1000, abs=8)


# ------------------------------------------------------------------------------- what is refused

junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=9)
    | st.sampled_from(["NaN", "run", "<f8", "<i8", "<u8", "range", "data", "shape", "dtype"]),
    # Keys may be anything that msgpack lets stand there.
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5) | st.integers(0, 9), inner, max_size=3)
        | st.fixed_dictionaries(
            {
                "dtype": st.sampled_from(["<f8", "<i8", "<u8"]) | inner,
                "shape": st.lists(st.integers(-1, 3), max_size=2) | inner,
                "data": st.binary(max_size=16) | inner,
            }
        )
        | st.fixed_dictionaries({"range": st.lists(st.integers(-3, 2**62), max_size=4) | inner})
    ),
    max_leaves=5,
)


def _places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values in plain data."""
    found = [path]
    if isinstance(node, dict | list):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            found += _places(value, (*path, key))
    return found


def _replaced(node: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    copy = dict(node) if isinstance(node, dict) else list(node)
    copy[path[0]] = _replaced(node[path[0]], path[1:], value)
    return copy


@st.composite
def spoilt(draw: st.DrawFn, form: Any) -> Any:
    """A batch with junk in one or two of its places."""
    node = form(draw(batches))
    for _ in range(draw(st.integers(1, 2))):
        node = _replaced(node, draw(st.sampled_from(_places(node)[1:])), draw(junk))
    return node


def assert_taken_or_refused(read: Callable[[Any], wire.Batch], given: Any) -> None:
    try:
        taken = read(given)
    except wire.WireError as error:
        refusal = error
    else:
        # What is taken is a batch: it can be sent on, and is the same then.
        sent = wire.encode(taken)
        assert wire.encode(wire.decode(sent)) == sent
        return
    assert refusal.where
    assert len(str(refusal)) < 1000


@thorough
@given(st.binary(max_size=60) | junk.map(lambda j: msgpack.packb(j, use_bin_type=True)))
def test_garbage_bytes_are_refused(garbage: bytes) -> None:
    with pytest.raises(wire.WireError):
        wire.decode(garbage)


@thorough
@given(spoilt(lambda b: msgpack.unpackb(wire.encode(b), strict_map_key=False)))
def test_a_spoilt_msgpack_batch_is_taken_or_refused(node: Any) -> None:
    assert_taken_or_refused(wire.decode, msgpack.packb(node, use_bin_type=True))


@thorough
@given(spoilt(wire.to_json))
def test_a_spoilt_json_batch_is_taken_or_refused(node: Any) -> None:
    assert_taken_or_refused(wire.from_json, node)


@relaxed
@given(batches, st.data())
def test_bytes_that_broke_on_the_way_are_taken_or_refused(sent: wire.Batch, data: Any) -> None:
    body = bytearray(wire.encode(sent))
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))

    assert_taken_or_refused(wire.decode, bytes(body[: data.draw(st.integers(0, len(body)))]))


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"run": ""}, "run"),
        ({"run": "a\nb"}, "run"),
        ({"run": "x" * 251}, "run"),
        ({"rank": -1}, "rank"),
        ({"rank": True}, "rank"),
        ({"rank": "0"}, "rank"),
        ({"seq": 2**63}, "seq"),
        ({"world_size": 0}, "world_size"),
        ({"state": "asleep"}, "state"),
        ({"v": wire.VERSION + 1}, "v"),
        ({"v": True}, "v"),
        ({"sent_at": "NaN"}, "sent_at"),
        ({"sent_at": 10**400}, "sent_at"),
        ({"rank": 10**400}, "rank"),
        ({"columns": []}, "columns"),
        ({"columns": {"loss": {"steps": [0]}}}, "columns.loss.values"),
        ({"columns": {"loss": {"values": [0.0]}}}, "columns.loss.steps"),
        ({"columns": {"loss": {"steps": [0, 1], "values": [1.0]}}}, "columns.loss"),
        ({"columns": {"loss": {"steps": [-1], "values": [1.0]}}}, "columns.loss.steps"),
        ({"columns": {"loss": {"steps": [0.5], "values": [1.0]}}}, "columns.loss.steps"),
        ({"columns": {"loss": {"steps": [0], "values": ["nan"]}}}, "columns.loss.values"),
        ({"columns": {"loss": {"steps": [0], "values": [[1.0]]}}}, "columns.loss"),
        ({"rows": {"loss": 1.0}}, "rows"),
        ({"rows": [[0, {}], 7]}, "rows[1]"),
        ({"rows": [[0]]}, "rows[0]"),
        ({"rows": [[-1, {"loss": 1.0}]]}, "rows[0]"),
        ({"rows": [[2**63, {"loss": 1.0}]]}, "rows[0]"),
        ({"rows": [[0.5, {"loss": 1.0}]]}, "rows[0]"),
        ({"rows": [[True, {"loss": 1.0}]]}, "rows[0]"),
        ({"rows": [[0, 1.0]]}, "rows[0]"),
        ({"rows": [[0, {"a\n": 1.0}]]}, "rows[0].a\n"),
        ({"rows": [[0, {"loss": None}]]}, "rows[0].loss"),
        ({"rows": [[0, {"loss": "nan"}]]}, "rows[0].loss"),
        ({"rows": [[0, {"loss": 10**400}]]}, "rows[0].loss"),
        ({"rows": [[0, {f"m{i}": 1.0 for i in range(10_001)}]]}, "rows"),
        ({"rows": [[0, {}]] * 10_001}, "rows"),
        (
            {
                "rows": [[0, {"loss": 1.0}]],
                "columns": {"loss": {"steps": [1], "values": [1.0]}},
            },
            "rows.loss",
        ),
        ({"word_rows": [[0, {"parameters": 2**64}]]}, "word_rows[0].parameters"),
        ({"word_rows": [[0, {"parameters": -1}]]}, "word_rows[0].parameters"),
        ({"word_rows": [[0, {"parameters": 0.5}]]}, "word_rows[0].parameters"),
        ({"word_rows": [[0, {"parameters": "-1"}]]}, "word_rows[0].parameters"),
        ({"columns": {"": {"steps": [], "values": []}}}, "columns."),
        ({"words": {"start": {"steps": [0], "values": ["xyz"]}}}, "words.start.values"),
        ({"words": {"start": {"steps": [0], "values": [-1]}}}, "words.start.values"),
        ({"words": {"start": {"steps": [0], "values": [1.5]}}}, "words.start.values"),
        ({"columns": {"loss": {"steps": [0], "values": [10**400]}}}, "columns.loss.values"),
        ({"columns": {"loss": {"steps": [2**63], "values": [0.0]}}}, "columns.loss.steps"),
        ({"prints": [{"step": 0, "stage": "nowhere", "digests": []}]}, "prints[0].stage"),
        (
            {"prints": [{"step": 0, "stage": "start", "digests": ["0"], "sketches": []}]},
            "prints[0].sketches",
        ),
        ({"layers": [{"step": 0, "values": [1.0]}]}, "layers[0].metric"),
        ({"layers": [{"step": 0, "metric": "", "values": []}]}, "layers[0].metric"),
        ({"layers": [{"step": 0, "metric": "a\n", "values": []}]}, "layers[0].metric"),
        ({"layers": [{"step": -1, "metric": "norm", "values": []}]}, "layers[0].step"),
        ({"layers": [{"step": 0, "metric": "norm", "table": 3, "values": []}]}, "layers[0].table"),
        ({"layers": [{"step": 0, "metric": "norm"}]}, "layers[0].values"),
        ({"layers": [{"step": 0, "metric": "norm", "values": [[1.0]]}]}, "layers[0].values"),
        ({"layers": [{"step": 0, "metric": "norm", "values": ["many"]}]}, "layers[0].values"),
        ({"layers": {"step": 0}}, "layers"),
        ({"layers": [7]}, "layers[0]"),
        ({"events": [{"step": 0}]}, "events[0].kind"),
        ({"dropped": {"memory_full": -1}}, "dropped.memory_full"),
        ({"hello": {"tables": {"p": {"names": ["w"], "shapes": []}}}}, "hello.tables.p"),
        ({"hello": {"tables": {"p": {"names": ["w"], "shapes": ["xy"]}}}}, "hello.tables.p"),
        ({"hello": {"tables": {"p": {"names": ["w"], "shapes": [5]}}}}, "hello.tables.p"),
    ],
)
def test_a_refusal_names_the_place(fields: dict[str, Any], where: str) -> None:
    with pytest.raises(wire.WireError) as refusal:
        wire.from_json(plain(**fields))

    assert refusal.value.where.startswith(where)


def test_a_few_bytes_cannot_ask_for_much_memory() -> None:
    # 33 million steps would be 268 MB, for 60 bytes on the wire.
    values = {"dtype": "<f8", "shape": [0], "data": b""}
    steps = {"range": [0, 33_000_000, 1]}

    with pytest.raises(wire.WireError) as refusal:
        wire.decode(msgpack.packb(plain(columns={"loss": {"steps": steps, "values": values}})))

    assert refusal.value.where == "columns.loss.steps"


def test_unknown_fields_are_ignored() -> None:
    sent = plain(columns={}, colour="red", hello={"started_at": 1.0, "mood": "good"})

    received = wire.from_json(sent)

    assert received.hello is not None
    assert received.hello.started_at == 1.0


def test_what_a_script_may_leave_out() -> None:
    received = wire.from_json(
        {"run": "r", "rank": 3, "seq": 0, "columns": {"loss": {"steps": [0], "values": [1]}}}
    )

    assert received.project == "default"
    assert received.through_step == -1
    assert received.columns["loss"].values.tolist() == [1.0]


def test_a_hello_that_leaves_out_when_it_began_can_be_sent_on() -> None:
    taken = wire.from_json(plain(hello={"host": "node-7"}))

    for again in (wire.decode(wire.encode(taken)), wire.from_json(wire.to_json(taken))):
        assert again.hello is not None
        assert math.isnan(again.hello.started_at)
        assert again.hello.host == "node-7"


def test_too_many_series_are_refused() -> None:
    column = {"steps": [], "values": []}

    with pytest.raises(wire.WireError, match=r"^columns: has 10001 series"):
        wire.from_json(plain(columns={f"m{i}": column for i in range(10_001)}))


def test_configuration_becomes_plain() -> None:
    odd = {
        "path": Path("/data"),
        "rate": math.nan,
        3: (1, {2}),
        "big": 2**70,
        "numpy": np.float32(0.5),
        "error": "caf\udce9\0",
    }
    sent = batch(hello=wire.Hello(started_at=0.0, config=odd), error="caf\udce9\0")

    received = wire.decode(wire.encode(sent))

    assert received.hello is not None
    assert received.hello.config == {
        "path": "/data",
        "rate": "NaN",
        "3": [1, [2]],
        "big": str(2**70),
        "numpy": 0.5,
        "error": "caf?\N{REPLACEMENT CHARACTER}",
    }
    assert received.error == "caf?\N{REPLACEMENT CHARACTER}"


def test_configuration_that_contains_itself_ends() -> None:
    endless: dict[str, Any] = {}
    endless["again"] = endless

    reported = wire.decode(wire.encode(batch(hello=wire.Hello(started_at=0.0, config=endless))))

    assert reported.hello is not None
    config, depth = reported.hello.config, 0
    while isinstance(config, Mapping):
        config, depth = config["again"], depth + 1
    assert 0 < depth < 100
