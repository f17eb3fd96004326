"""Hypothesis strategies for everything that a batch can be."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rankscope.agent import wire
from rankscope.agent.wire import limits

names = st.text("ab/%. é漢🦉", min_size=1, max_size=6).filter(str.isprintable)
# Without what no database takes, and is replaced on the way.
texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=6)
finite = st.floats(allow_nan=False, allow_infinity=False)
steps = st.integers(0, limits.STEP.most)
# Every float there is: NaN and the infinities are data.
floats = st.floats(width=64)
words = st.integers(0, 2**64 - 1)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | finite | names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=4,
)


@st.composite
def columns(draw: st.DrawFn, values: st.SearchStrategy[Any], dtype: type[Any]) -> wire.Column:
    if draw(st.booleans()):
        first, stride, count = draw(st.tuples(st.integers(0, 10**9), st.integers(1, 64), counts))
        at = np.arange(first, first + stride * count, stride, dtype=np.int64)
    else:
        at = np.array(draw(st.lists(steps, max_size=6, unique=True)), dtype=np.int64)
    drawn = draw(st.lists(values, min_size=len(at), max_size=len(at)))
    return wire.Column(at, np.array(drawn, dtype=dtype))


counts = st.integers(0, 5)


def rows(values: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[wire.Row, ...]]:
    # What stands in rows stands in no column.
    row = st.tuples(steps, st.dictionaries(names.map("row {}".format), values, max_size=3))
    return st.lists(row, max_size=4).map(tuple)


@st.composite
def prints(draw: st.DrawFn) -> wire.Fingerprint:
    tensors, buckets = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    sketches = st.none() | hnp.arrays(np.float64, (tensors, buckets), elements=floats)
    return wire.Fingerprint(
        step=draw(st.integers(-1, limits.STEP.most)),
        stage=draw(st.sampled_from(wire.STAGES)),
        table=draw(names),
        digests=np.array(draw(st.lists(words, min_size=tensors, max_size=tensors)), np.uint64),
        sketches=draw(sketches),
    )


layers = st.builds(
    wire.Layers,
    step=steps,
    table=names,
    metric=names,
    values=hnp.arrays(np.float64, st.integers(0, 4), elements=floats),
)


@st.composite
def tables(draw: st.DrawFn) -> wire.TensorTable:
    count = draw(st.integers(0, 3))

    def some(what: st.SearchStrategy[Any]) -> tuple[Any, ...]:
        return tuple(draw(st.lists(what, min_size=count, max_size=count)))

    return wire.TensorTable(
        names=some(names),
        shapes=some(st.lists(st.integers(0, 2**13), max_size=4).map(tuple)),
        dtypes=some(names),
        shards=some(names),
    )


hellos = st.builds(
    wire.Hello,
    started_at=finite,
    host=names,
    pid=st.integers(0, limits.PID.most),
    local_rank=st.integers(0, 10**4),
    launcher=names,
    wrapper=names,
    heartbeat_seconds=st.floats(0, limits.HEARTBEAT.most),
    tables=st.dictionaries(names, tables(), max_size=2),
    config=st.dictionaries(names, json_values, max_size=3),
)

events = st.builds(
    wire.Event,
    step=st.integers(-1, limits.STEP.most),
    kind=names,
    text=texts,
    data=st.dictionaries(names, json_values, max_size=3),
)

batches = st.builds(
    wire.Batch,
    project=names,
    run=names,
    rank=st.integers(0, limits.RANK.most),
    session=names,
    attempt=st.none() | st.integers(0, limits.ATTEMPT.most),
    seq=st.integers(0, limits.SEQ.most),
    world_size=st.integers(1, limits.RANKS.most),
    sent_at=finite,
    through_step=st.integers(-1, limits.STEP.most),
    state=st.sampled_from(wire.RANK_STATES),
    phase=texts,
    error=texts,
    hello=st.none() | hellos,
    columns=st.dictionaries(names, columns(floats, np.float64), max_size=3),
    words=st.dictionaries(names, columns(words, np.uint64), max_size=2),
    rows=rows(floats),
    word_rows=rows(words),
    prints=st.lists(prints(), max_size=2).map(tuple),
    layers=st.lists(layers, max_size=2).map(tuple),
    events=st.lists(events, max_size=2).map(tuple),
    dropped=st.dictionaries(names, st.integers(0, limits.COUNT.most), max_size=2),
)


def same(one: Any, other: Any) -> bool:
    """Equality down to the bits of the numbers, NaN equal to NaN."""
    if isinstance(one, np.ndarray):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and bool(np.array_equal(one, other, equal_nan=one.dtype.kind == "f"))
        )
    if hasattr(one, "__dataclass_fields__"):
        return type(one) is type(other) and all(
            same(getattr(one, name), getattr(other, name)) for name in one.__dataclass_fields__
        )
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and math.isnan(one):
        return isinstance(other, float) and math.isnan(other)
    return bool(one == other)
