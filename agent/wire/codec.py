"""A batch as bytes (msgpack) and as plain JSON values, and back, with every field checked.

Nothing is built of a field before its limit has been checked (`limits.py`), and no values at all
of bytes that hold too many (`counting.py`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import msgpack
import numpy as np

from rankscope.agent.wire import limits
from rankscope.agent.wire.batch import (
    Array,
    Batch,
    Column,
    Event,
    Fingerprint,
    Hello,
    Int64,
    Layers,
    TensorTable,
)
from rankscope.agent.wire.counting import check_json, check_msgpack, check_plain, check_sharding
from rankscope.agent.wire.fields import (
    MAX_COLUMNS,
    WireError,
    array_of,
    check_count,
    check_length,
    check_name,
    flat_array,
    integer_of,
    is_known_name,
    items_of,
    mapping_of,
    name_of,
    optional_mapping_of,
    quoted,
    real_of,
    rows_of,
    shape_of,
    size_of,
    steps_of,
    text_of,
    texts_of,
)
from rankscope.agent.wire.fitting import fitted
from rankscope.agent.wire.limits import Limit
from rankscope.agent.wire.names import RANK_STATES, STAGES
from rankscope.agent.wire.plain import clean, numbers_to_json, to_plain
from rankscope.agent.wire.rows import columns_of, in_columns

VERSION = 2
# The version since when a batch may have rows.
_ROWS_SINCE = 2
CONTENT_TYPE = "application/msgpack"

_LITTLE_ENDIAN = {np.dtype(name): name for name in ("<f8", "<f4", "<u8", "<i8")}

MAX_BODY_BYTES = limits.BODY.most


def encode(batch: Batch) -> bytes:
    """Bytes (msgpack) of a batch, which keeps to the limits; see `fitting.fitted`."""
    batch = fitted(batch)
    # Text may hold what is no Unicode (file names in error messages): better a `?` than no batch.
    packed: bytes = msgpack.packb(
        _to_plain(batch, _pack_array, _PackedSteps()), use_bin_type=True, unicode_errors="replace"
    )
    return packed


def decode(data: bytes) -> Batch:
    """The batch that `encode` wrote, at any version up to ours.

    Raises:
        WireError: the bytes are no batch, or one of a version that is not known here.
    """
    check_msgpack(data)
    try:
        plain = msgpack.unpackb(data, raw=False)
    except (ValueError, OverflowError, msgpack.exceptions.UnpackException) as error:
        raise WireError("body", f"is not msgpack: {error}") from error
    return _from_plain(plain)


def decode_json(data: bytes) -> Batch:
    """The batch of a body of JSON.

    Raises:
        WireError: the bytes are no batch.
    """
    check_json(data)
    try:
        plain = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise WireError("body", f"is not JSON: {error}") from error
    return _from_plain(plain)


def to_json(batch: Batch) -> dict[str, Any]:
    """The batch as plain JSON values; see `encode`."""
    return _to_plain(in_columns(fitted(batch)), _list_array, lambda steps: steps.tolist())


def from_json(plain: Any) -> Batch:
    """The batch that `to_json` wrote, or a script by hand.

    Raises:
        WireError: naming the field that is missing or wrong.
    """
    return _from_plain(plain)


def table_to_json(table: TensorTable) -> dict[str, Any]:
    """A tensor table as plain JSON values."""
    return {
        "names": list(table.names),
        "shapes": [list(shape) for shape in table.shapes],
        "dtypes": list(table.dtypes),
        "shards": list(table.shards),
    }


# ------------------------------------------------------------------------------------------ writing


def _pack_array(array: Array) -> dict[str, Any]:
    # Arrays as they come, as nearly all are, without numpy's conversions: beside a training, which
    # has the caches to itself, these take five times as long as in a loop.
    dtype = _LITTLE_ENDIAN.get(array.dtype)
    if dtype is not None:
        return {"dtype": dtype, "shape": list(array.shape), "data": array.tobytes()}
    contiguous = np.ascontiguousarray(array)
    little = contiguous.astype(contiguous.dtype.newbyteorder("<"), copy=False)
    return {"dtype": little.dtype.str, "shape": list(little.shape), "data": little.tobytes()}


class _PackedSteps:
    """Packs steps; those that several series share, once. For one batch, which holds them."""

    def __init__(self) -> None:
        self._packed: dict[int, dict[str, Any]] = {}

    def __call__(self, steps: Int64) -> dict[str, Any]:
        packed = self._packed.get(id(steps))
        if packed is None:
            packed = self._packed[id(steps)] = _pack_steps(steps)
        return packed


def _pack_steps(steps: Int64) -> dict[str, Any]:
    # Steps are nearly always an arithmetic sequence: three numbers instead of 8 bytes a point.
    if len(steps) > 2:
        stride = int(steps[1] - steps[0])
        if stride > 0 and bool((np.diff(steps) == stride).all()):
            return {"range": [int(steps[0]), int(steps[-1]) + 1, stride]}
    return _pack_array(steps)


def _list_array(array: Array) -> Any:
    if array.dtype == np.uint64:
        return [f"{int(word):016x}" for word in array]
    if array.ndim == 2:
        return [numbers_to_json(row) for row in array]
    return numbers_to_json(array)


def _to_plain(batch: Batch, pack: Any, pack_steps: Any) -> dict[str, Any]:
    def columns(items: Mapping[str, Column]) -> dict[str, Any]:
        return {
            name: {"steps": pack_steps(c.steps), "values": pack(c.values)}
            for name, c in items.items()
        }

    plain: dict[str, Any] = {
        "v": 1,
        "project": batch.project,
        "run": batch.run,
        "rank": batch.rank,
        "session": batch.session,
        "attempt": batch.attempt,
        "seq": batch.seq,
        "world_size": batch.world_size,
        "sent_at": batch.sent_at,
        "through_step": batch.through_step,
        "state": batch.state,
        "phase": batch.phase,
        "error": batch.error,
        "columns": columns(batch.columns),
        "words": columns(batch.words),
        "prints": [
            {
                "step": p.step,
                "stage": p.stage,
                "table": p.table,
                "digests": pack(p.digests),
                "sketches": None if p.sketches is None else pack(p.sketches),
            }
            for p in batch.prints
        ],
        "events": [
            {"step": e.step, "kind": e.kind, "text": e.text, "data": to_plain(e.data)}
            for e in batch.events
        ],
        "dropped": dict(batch.dropped),
    }
    if batch.rows or batch.word_rows:
        plain["v"] = _ROWS_SINCE
        plain["rows"], plain["word_rows"] = batch.rows, batch.word_rows
    if batch.layers:
        plain["layers"] = [
            {"step": m.step, "table": m.table, "metric": m.metric, "values": pack(m.values)}
            for m in batch.layers
        ]
    if batch.hello is not None:
        h = batch.hello
        plain["hello"] = {
            **({} if math.isnan(h.started_at) else {"started_at": h.started_at}),
            "host": h.host,
            "pid": h.pid,
            "local_rank": h.local_rank,
            "launcher": h.launcher,
            "wrapper": h.wrapper,
            "heartbeat_seconds": h.heartbeat_seconds,
            **({"boot": h.boot, "steady": h.steady} if h.boot else {}),
            "config": to_plain(h.config),
            "tables": {name: table_to_json(t) for name, t in h.tables.items()},
        }
    return plain


# ------------------------------------------------------------------------------------------ reading


def _from_plain(plain: Any) -> Batch:
    fields = mapping_of(plain, "body")
    version = fields.get("v", VERSION)
    if isinstance(version, bool) or not isinstance(version, int) or not 1 <= version <= VERSION:
        raise WireError(
            "v",
            f"version {quoted(version)} is not known here (up to {VERSION}): update the server",
        )
    state = text_of(fields, "state", "running")
    if state not in RANK_STATES:
        raise WireError("state", f"{state!r} is none of {', '.join(RANK_STATES)}")
    attempt = fields.get("attempt")
    rank = integer_of(fields, "rank", minimum=0, limit=limits.RANK)
    hello = fields.get("hello")
    dropped = optional_mapping_of(fields, "dropped")
    check_count(dropped, "dropped", limits.REASONS)
    return Batch(
        project=name_of(fields, "project", "default"),
        run=name_of(fields, "run"),
        rank=rank,
        session=text_of(fields, "session", "", limit=limits.LABEL),
        attempt=(
            None
            if attempt is None
            else integer_of(fields, "attempt", minimum=0, limit=limits.ATTEMPT)
        ),
        seq=integer_of(fields, "seq", minimum=0, limit=limits.SEQ),
        world_size=integer_of(fields, "world_size", 1, minimum=1, limit=limits.RANKS),
        sent_at=real_of(fields, "sent_at", 0.0),
        through_step=integer_of(fields, "through_step", -1, minimum=-1, limit=limits.STEP),
        state=state,
        phase=text_of(fields, "phase", ""),
        error=text_of(fields, "error", "", limit=limits.TEXT),
        hello=None if hello is None else _hello(mapping_of(hello, "hello")),
        columns=_columns(fields, "columns", np.float64) | _rows(fields, "rows", np.float64),
        words=_columns(fields, "words", np.uint64) | _rows(fields, "word_rows", np.uint64),
        prints=tuple(
            _fingerprint(mapping_of(p, f"prints[{i}]"), f"prints[{i}]")
            for i, p in enumerate(items_of(fields, "prints", limit=limits.ITEMS))
        ),
        layers=tuple(
            _layers(mapping_of(m, f"layers[{i}]"), f"layers[{i}]")
            for i, m in enumerate(items_of(fields, "layers", limit=limits.ITEMS))
        ),
        events=tuple(
            _event(mapping_of(e, f"events[{i}]"), f"events[{i}]")
            for i, e in enumerate(items_of(fields, "events", limit=limits.ITEMS))
        ),
        dropped={
            _key(k, "dropped", limits.WORD): size_of(v, f"dropped.{k}", limits.COUNT)
            for k, v in dropped.items()
        },
    )


def _key(key: Any, where: str, limit: Limit) -> str:
    """A key of an object as text."""
    text = str(key)
    check_length(text, f"{where}.{text[:100]}", limit)
    return clean(text)


def _columns(fields: Mapping[str, Any], key: str, dtype: type[Any]) -> dict[str, Column]:
    items = optional_mapping_of(fields, key)
    if len(items) > MAX_COLUMNS:
        raise WireError(key, f"has {len(items)} series; at most {MAX_COLUMNS} fit into a batch")
    columns = {}
    before: Any = object()
    steps = np.zeros(0, dtype=np.int64)
    for name, item in items.items():
        # To name the place for an error costs more than to check whether there is one.
        if not is_known_name(name):
            check_name(name, f"{key}.{name}")
        parts = item if type(item) is dict else mapping_of(item, f"{key}.{name}")
        values = flat_array(parts.get("values"), dtype)
        if values is None:
            values = array_of(parts.get("values"), dtype, f"{key}.{name}.values")
        given = parts.get("steps")
        # Most series of a batch have the same steps: they are made and checked once, and are one
        # object, by which others know that they are the same.
        if given != before or values.size != steps.size:
            before, steps = given, steps_of(given, f"{key}.{name}.steps", values.size)
        if values.ndim != 1 or steps.shape != values.shape:
            raise WireError(
                f"{key}.{name}",
                f"has {steps.size} steps but values of shape {list(values.shape)}",
            )
        columns[name] = Column(steps, values)
    return columns


def _rows(fields: Mapping[str, Any], key: str, dtype: type[Any]) -> dict[str, Column]:
    columns = columns_of(rows_of(fields, key, dtype), dtype)
    beside = "words" if dtype is np.uint64 else "columns"
    twice = columns.keys() & optional_mapping_of(fields, beside).keys()
    if twice:
        raise WireError(f"{key}.{min(twice)}", f"stands in {beside} as well")
    return columns


def _fingerprint(fields: Mapping[str, Any], where: str) -> Fingerprint:
    stage = text_of(fields, "stage", where=where)
    if stage not in STAGES:
        raise WireError(f"{where}.stage", f"{stage!r} is none of {', '.join(STAGES)}")
    table = text_of(fields, "table", "parameters", where=where, limit=limits.LABEL)
    digests = array_of(fields.get("digests"), np.uint64, f"{where}.digests")
    if digests.ndim != 1:
        raise WireError(f"{where}.digests", "must be one digest a tensor")
    sketches = fields.get("sketches")
    if sketches is not None:
        sketches = array_of(sketches, np.float64, f"{where}.sketches")
        if sketches.ndim != 2 or len(sketches) != len(digests):
            raise WireError(f"{where}.sketches", "must be one row for each digest")
    return Fingerprint(
        step=integer_of(fields, "step", minimum=-1, limit=limits.STEP, where=where),
        stage=stage,
        table=table,
        digests=digests,
        sketches=sketches,
    )


def _layers(fields: Mapping[str, Any], where: str) -> Layers:
    metric = text_of(fields, "metric", where=where, limit=limits.TENSOR_NAME)
    check_name(metric, f"{where}.metric")
    values = array_of(fields.get("values"), np.float64, f"{where}.values")
    if values.ndim != 1:
        raise WireError(f"{where}.values", "must be one number a tensor")
    return Layers(
        step=integer_of(fields, "step", minimum=0, limit=limits.STEP, where=where),
        table=text_of(fields, "table", "parameters", where=where, limit=limits.LABEL),
        metric=metric,
        values=values,
    )


def _event(fields: Mapping[str, Any], where: str) -> Event:
    return Event(
        step=integer_of(fields, "step", -1, minimum=-1, limit=limits.STEP, where=where),
        kind=text_of(fields, "kind", where=where),
        text=text_of(fields, "text", "", where=where, limit=limits.TEXT),
        data=_plain_of(fields, "data", where),
    )


def _plain_of(fields: Mapping[str, Any], key: str, where: str) -> Any:
    """An object of whatever values, which are neither too many nor too deep."""
    given = optional_mapping_of(fields, key, where)
    check_plain(given, f"{where}.{key}")
    return to_plain(given, limits.DEPTH.most)


def _hello(fields: Mapping[str, Any]) -> Hello:
    tables = {}
    given = optional_mapping_of(fields, "tables", "hello")
    check_count(given, "hello.tables", limits.TABLES)
    for name, item in given.items():
        where = f"hello.tables.{name}"
        parts = mapping_of(item, where)
        names = texts_of(parts, "names", where, limits.TENSOR_NAME)
        table = TensorTable(
            names=names,
            shapes=tuple(shape_of(s, f"{where}.shapes") for s in items_of(parts, "shapes", where)),
            dtypes=texts_of(parts, "dtypes", where, limits.WORD),
            shards=texts_of(parts, "shards", where, limits.TENSOR_NAME) or ("",) * len(names),
        )
        if not len(names) == len(table.shapes) == len(table.dtypes) == len(table.shards):
            raise WireError(where, "names, shapes, dtypes and shards must be of one length")
        tables[_key(name, "hello.tables", limits.TENSOR_NAME)] = table
    config = _plain_of(fields, "config", "hello")
    check_sharding(config)
    return Hello(
        started_at=(
            real_of(fields, "started_at", 0.0, "hello") if "started_at" in fields else math.nan
        ),
        host=text_of(fields, "host", "", "hello"),
        pid=integer_of(fields, "pid", 0, minimum=0, limit=limits.PID, where="hello"),
        local_rank=integer_of(fields, "local_rank", 0, minimum=0, limit=limits.RANK, where="hello"),
        launcher=text_of(fields, "launcher", "", "hello"),
        wrapper=text_of(fields, "wrapper", "", "hello"),
        heartbeat_seconds=real_of(
            fields, "heartbeat_seconds", 5.0, "hello", minimum=0.0, most=limits.HEARTBEAT.most
        ),
        boot=text_of(fields, "boot", "", "hello", limit=limits.LABEL),
        steady=real_of(fields, "steady", 0.0, "hello"),
        tables=tables,
        config=config,
    )
