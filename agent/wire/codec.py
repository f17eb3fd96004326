"""A batch as bytes (msgpack) and as plain JSON values, and back, with every field checked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import msgpack
import numpy as np

from rankscope.agent.wire.batch import (
    Array,
    Batch,
    Column,
    Event,
    Hello,
    Int64,
    Layers,
    Print,
    TensorTable,
)
from rankscope.agent.wire.names import RANK_STATES, STAGES

VERSION = 1
CONTENT_TYPE = "application/msgpack"

MAX_BODY_BYTES = 32 * 2**20
MAX_NAME_LENGTH = 250
MAX_COLUMNS = 10_000

# What is on the wire, by what is made of it.
_LITTLE = {of: np.dtype(of).newbyteorder("<") for of in (np.float64, np.uint64, np.int64)}

_NAME = {of: little.str for of, little in _LITTLE.items()}

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class WireError(ValueError):
    """A batch that cannot be taken; says where in it and what is wrong.

    Attributes:
        where: path of the field, for example `columns.loss.values`.
    """

    def __init__(self, where: str, problem: str) -> None:
        # Both may quote what was sent, which may be long.
        where, problem = where[:300], problem[:500]
        super().__init__(f"{where}: {problem}")
        self.where = where
        self.problem = problem


def encode(batch: Batch) -> bytes:
    """Bytes (msgpack) of a batch."""
    # Text may hold what is no Unicode (file names in error messages): better a `?` than no batch.
    packed: bytes = msgpack.packb(
        _to_plain(batch, _pack_array, _pack_steps), use_bin_type=True, unicode_errors="replace"
    )
    return packed


def decode(data: bytes) -> Batch:
    """The batch that `encode` wrote, at any version up to ours.

    Raises:
        WireError: the bytes are no batch, or one of a version that is not known here.
    """
    try:
        plain = msgpack.unpackb(data, raw=False)
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise WireError("body", f"is not msgpack: {error}") from error
    return _from_plain(plain)


def to_json(batch: Batch) -> dict[str, Any]:
    """The batch as plain JSON values."""
    return _to_plain(batch, _list_array, lambda steps: steps.tolist())


def from_json(plain: Any) -> Batch:
    """The batch that `to_json` wrote, or a script by hand.

    Raises:
        WireError: naming the field that is missing or wrong.
    """
    return _from_plain(plain)


def number_to_json(value: float) -> float | str:
    """A float as JSON can carry it: the three non-finite numbers become strings."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def numbers_to_json(values: Array) -> list[Any]:
    """The values of an array as JSON can carry them; see `number_to_json`."""
    plain: list[Any] = values.tolist()
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        return [number_to_json(v) for v in plain]
    return plain


def table_to_json(table: TensorTable) -> dict[str, Any]:
    """A tensor table as plain JSON values."""
    return {
        "names": list(table.names),
        "shapes": [list(shape) for shape in table.shapes],
        "dtypes": list(table.dtypes),
        "shards": list(table.shards),
    }


def to_plain(value: Any, depth: int = 16) -> Any:
    """The value as JSON, msgpack and every database can carry it.

    Keys become text, the three non-finite numbers become strings, tuples and sets lists, and what
    is not plain (or nested deeper than `depth`) its `str`.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _clean(value)
    if isinstance(value, np.generic):
        return to_plain(value.item(), depth)
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return int(value)
    if isinstance(value, float):
        return number_to_json(float(value))
    if isinstance(value, Mapping) and depth:
        return {_clean(str(k)): to_plain(v, depth - 1) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset) and depth:
        return [to_plain(v, depth - 1) for v in value]
    return _clean(str(value))


def _clean(text: str) -> str:
    # Databases take neither NUL nor halves of surrogate pairs.
    if text.isprintable():
        return text
    return text.encode("utf-8", "replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")


# ------------------------------------------------------------------------------------------ writing


def _pack_array(array: Array) -> dict[str, Any]:
    contiguous = np.ascontiguousarray(array)
    little = contiguous.astype(contiguous.dtype.newbyteorder("<"), copy=False)
    return {"dtype": little.dtype.str, "shape": list(little.shape), "data": little.tobytes()}


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
        "v": VERSION,
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
    if batch.layers:
        plain["layers"] = [
            {"step": m.step, "table": m.table, "metric": m.metric, "values": pack(m.values)}
            for m in batch.layers
        ]
    if batch.hello is not None:
        h = batch.hello
        plain["hello"] = {
            "started_at": h.started_at,
            "host": h.host,
            "pid": h.pid,
            "local_rank": h.local_rank,
            "launcher": h.launcher,
            "wrapper": h.wrapper,
            "heartbeat_seconds": h.heartbeat_seconds,
            "config": to_plain(h.config),
            "tables": {name: table_to_json(t) for name, t in h.tables.items()},
        }
    return plain


# ------------------------------------------------------------------------------------------ reading


def _from_plain(plain: Any) -> Batch:
    fields = _mapping(plain, "body")
    version = fields.get("v", VERSION)
    if isinstance(version, bool) or not isinstance(version, int) or not 1 <= version <= VERSION:
        raise WireError(
            "v", f"version {version!r} is not known here (up to {VERSION}): update the server"
        )
    state = _text(fields, "state", "running")
    if state not in RANK_STATES:
        raise WireError("state", f"{state!r} is none of {', '.join(RANK_STATES)}")
    attempt = fields.get("attempt")
    rank = _integer(fields, "rank", minimum=0)
    hello = fields.get("hello")
    return Batch(
        project=_name(fields, "project", "default"),
        run=_name(fields, "run"),
        rank=rank,
        session=_text(fields, "session", ""),
        attempt=None if attempt is None else _integer(fields, "attempt", minimum=0),
        seq=_integer(fields, "seq", minimum=0),
        world_size=_integer(fields, "world_size", 1, minimum=1),
        sent_at=_real(fields, "sent_at", 0.0),
        through_step=_integer(fields, "through_step", -1, minimum=-1),
        state=state,
        phase=_text(fields, "phase", ""),
        error=_text(fields, "error", ""),
        hello=None if hello is None else _hello(_mapping(hello, "hello")),
        columns=_columns(fields, "columns", np.float64),
        words=_columns(fields, "words", np.uint64),
        prints=tuple(
            _print(_mapping(p, f"prints[{i}]"), f"prints[{i}]")
            for i, p in enumerate(_sequence(fields, "prints"))
        ),
        layers=tuple(
            _layers(_mapping(m, f"layers[{i}]"), f"layers[{i}]")
            for i, m in enumerate(_sequence(fields, "layers"))
        ),
        events=tuple(
            _event(_mapping(e, f"events[{i}]"), f"events[{i}]")
            for i, e in enumerate(_sequence(fields, "events"))
        ),
        dropped={
            _clean(str(k)): _size(v, f"dropped.{k}")
            for k, v in _optional_mapping(fields, "dropped").items()
        },
    )


def _columns(fields: Mapping[str, Any], key: str, dtype: type[Any]) -> dict[str, Column]:
    items = _optional_mapping(fields, key)
    if len(items) > MAX_COLUMNS:
        raise WireError(key, f"has {len(items)} series; at most {MAX_COLUMNS} fit into a batch")
    columns = {}
    before: Any = _REQUIRED
    steps = np.zeros(0, dtype=np.int64)
    for name, item in items.items():
        # What an error would say of the place costs more than to look whether there is one.
        if not _is_known(name):
            _check_name(name, f"{key}.{name}")
        parts = item if type(item) is dict else _mapping(item, f"{key}.{name}")
        values = _flat(parts.get("values"), dtype)
        if values is None:
            values = _array(parts.get("values"), dtype, f"{key}.{name}.values")
        given = parts.get("steps")
        # Most series of a batch have the same steps: they are made and checked once, and are one
        # object, by which others know that they are the same.
        if given != before or values.size != steps.size:
            before, steps = given, _steps(given, f"{key}.{name}.steps", values.size)
        if values.ndim != 1 or steps.shape != values.shape:
            raise WireError(
                f"{key}.{name}",
                f"has {steps.size} steps but values of shape {list(values.shape)}",
            )
        columns[name] = Column(steps, values)
    return columns


def _print(fields: Mapping[str, Any], where: str) -> Print:
    stage = _text(fields, "stage", where=where)
    if stage not in STAGES:
        raise WireError(f"{where}.stage", f"{stage!r} is none of {', '.join(STAGES)}")
    digests = _array(fields.get("digests"), np.uint64, f"{where}.digests")
    if digests.ndim != 1:
        raise WireError(f"{where}.digests", "must be one word a tensor")
    sketches = fields.get("sketches")
    if sketches is not None:
        sketches = _array(sketches, np.float64, f"{where}.sketches")
        if sketches.ndim != 2 or len(sketches) != len(digests):
            raise WireError(f"{where}.sketches", "must be one row for each digest")
    return Print(
        step=_integer(fields, "step", minimum=-1, where=where),
        stage=stage,
        table=_text(fields, "table", "parameters", where=where),
        digests=digests,
        sketches=sketches,
    )


def _layers(fields: Mapping[str, Any], where: str) -> Layers:
    metric = _text(fields, "metric", where=where)
    _check_name(metric, f"{where}.metric")
    values = _array(fields.get("values"), np.float64, f"{where}.values")
    if values.ndim != 1:
        raise WireError(f"{where}.values", "must be one number a tensor")
    return Layers(
        step=_integer(fields, "step", minimum=0, where=where),
        table=_text(fields, "table", "parameters", where=where),
        metric=metric,
        values=values,
    )


def _event(fields: Mapping[str, Any], where: str) -> Event:
    return Event(
        step=_integer(fields, "step", -1, minimum=-1, where=where),
        kind=_text(fields, "kind", where=where),
        text=_text(fields, "text", "", where=where),
        data=to_plain(_optional_mapping(fields, "data", where)),
    )


def _hello(fields: Mapping[str, Any]) -> Hello:
    tables = {}
    for name, item in _optional_mapping(fields, "tables", "hello").items():
        where = f"hello.tables.{name}"
        parts = _mapping(item, where)
        names = _texts(parts, "names", where)
        table = TensorTable(
            names=names,
            shapes=tuple(_shape(s, f"{where}.shapes") for s in _sequence(parts, "shapes", where)),
            dtypes=_texts(parts, "dtypes", where),
            shards=_texts(parts, "shards", where) or ("",) * len(names),
        )
        if not len(names) == len(table.shapes) == len(table.dtypes) == len(table.shards):
            raise WireError(where, "names, shapes, dtypes and shards must be of one length")
        tables[_clean(str(name))] = table
    return Hello(
        started_at=(
            _real(fields, "started_at", 0.0, "hello") if "started_at" in fields else math.nan
        ),
        host=_text(fields, "host", "", "hello"),
        pid=_integer(fields, "pid", 0, minimum=0, where="hello"),
        local_rank=_integer(fields, "local_rank", 0, minimum=0, where="hello"),
        launcher=_text(fields, "launcher", "", "hello"),
        wrapper=_text(fields, "wrapper", "", "hello"),
        heartbeat_seconds=_real(fields, "heartbeat_seconds", 5.0, "hello"),
        tables=tables,
        config=to_plain(_optional_mapping(fields, "config", "hello")),
    )


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    # An instance of a dict is known at once, one of an abstract class is looked for.
    if type(value) is not dict and not isinstance(value, Mapping):
        raise WireError(where, f"must be an object, not {type(value).__name__}")
    return value


def _optional_mapping(fields: Mapping[str, Any], key: str, where: str = "") -> Mapping[str, Any]:
    value = fields.get(key)
    return {} if value is None else _mapping(value, _path(where, key))


def _shape(value: Any, where: str) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or not all(_is_size(n) for n in value):
        raise WireError(where, f"a shape is a list of integers from 0, not {value!r}")
    return tuple(value)


def _size(value: Any, where: str) -> int:
    if not _is_size(value) or value >= 2**63:
        raise WireError(where, f"must be an integer from 0, not {value!r}")
    return int(value)


def _texts(fields: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    values = tuple(_sequence(fields, key, where))
    if not all(isinstance(value, str) for value in values):
        raise WireError(_path(where, key), "must be a list of texts")
    return tuple(map(_clean, values))


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _sequence(fields: Mapping[str, Any], key: str, where: str = "") -> Iterable[Any]:
    value = fields.get(key)
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise WireError(_path(where, key), f"must be a list, not {type(value).__name__}")
    return value


def _path(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


_REQUIRED = object()


def _text(fields: Mapping[str, Any], key: str, default: Any = _REQUIRED, where: str = "") -> str:
    value = fields.get(key, default)
    if value is _REQUIRED:
        raise WireError(_path(where, key), "is missing")
    if not isinstance(value, str):
        raise WireError(_path(where, key), f"must be text, not {type(value).__name__}")
    return _clean(value)


def _check_name(value: Any, where: str) -> None:
    if not isinstance(value, str) or not value or len(value) > MAX_NAME_LENGTH:
        raise WireError(where, f"a name is text of 1 to {MAX_NAME_LENGTH} characters")
    if not value.isprintable():
        raise WireError(where, "a name has printable characters only")


@lru_cache(maxsize=4096)
def _is_known(name: Any) -> bool:
    """Whether it is a name; jobs post the same ones over and over."""
    return isinstance(name, str) and 0 < len(name) <= MAX_NAME_LENGTH and name.isprintable()


def _name(fields: Mapping[str, Any], key: str, default: Any = _REQUIRED) -> str:
    value = _text(fields, key, default)
    _check_name(value, key)
    return value


def _integer(
    fields: Mapping[str, Any], key: str, default: Any = _REQUIRED, *, minimum: int, where: str = ""
) -> int:
    value = fields.get(key, default)
    if value is _REQUIRED:
        raise WireError(_path(where, key), "is missing")
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value < 2**63:
        raise WireError(_path(where, key), f"must be an integer from {minimum}, not {value!r}")
    return value


def _real(fields: Mapping[str, Any], key: str, default: float, where: str = "") -> float:
    value = fields.get(key, default)
    try:
        number = math.nan if isinstance(value, bool | str) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise WireError(_path(where, key), f"must be a finite number, not {value!r}")
    return number


def _steps(value: Any, where: str, expected: int) -> Int64:
    if isinstance(value, Mapping) and "range" in value:
        bounds = value["range"]
        if (
            not isinstance(bounds, list | tuple)
            or len(bounds) != 3
            or not all(_is_size(b) and b < 2**63 for b in bounds)
            or bounds[2] < 1
        ):
            raise WireError(where, "a range is [first, end, stride] with a stride from 1")
        count = len(range(*bounds))
        # Before they are made: a few bytes must not ask for much memory.
        if count != expected:
            raise WireError(where, f"are {count}, but there are {expected} values")
        steps = np.arange(*bounds, dtype=np.int64)
    else:
        steps = _array(value, np.int64, where)
    if steps.ndim != 1 or (steps.size and int(steps.min()) < 0):
        raise WireError(where, "steps are a flat list of integers from 0")
    return steps


def _array(value: Any, dtype: type[Any], where: str) -> Array:
    """An array of exactly `dtype` from its msgpack or its JSON form; read-only where it can be."""
    if isinstance(value, Mapping):
        flat = _flat(value, dtype)
        if flat is not None:
            return flat
        raw, shape, given = value.get("data"), value.get("shape"), value.get("dtype")
        wanted = _LITTLE[dtype]
        if given != wanted.str:
            raise WireError(where, f"has dtype {given!r}; {wanted.str!r} is expected")
        if not isinstance(raw, bytes) or not isinstance(shape, list | tuple):
            raise WireError(where, "an array has dtype, shape and data")
        if not all(_is_size(n) for n in shape) or (math.prod(shape) * wanted.itemsize != len(raw)):
            raise WireError(where, f"{len(raw)} bytes are no array of shape {list(shape)}")
        try:
            return np.frombuffer(raw, dtype=wanted).reshape(shape).astype(dtype, copy=False)
        except ValueError as error:
            raise WireError(where, f"no array has the shape {list(shape)}") from error
    if not isinstance(value, list | tuple):
        raise WireError(where, "is missing" if value is None else "must be a list of numbers")
    try:
        if dtype is np.uint64:
            return np.array([_word(w) for w in value], dtype)
        if dtype is np.float64:
            if any(isinstance(row, list | tuple) for row in value):
                return np.array([[_number(v) for v in row] for row in value], dtype)
            return np.array([_number(v) for v in value], dtype)
        if not all(isinstance(v, int) and not isinstance(v, bool) for v in value):
            raise WireError(where, "must be a list of integers")
        return np.array(value, dtype)
    except WireError:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(where, f"is no list of numbers: {error}") from error


def _flat(value: Any, dtype: type[Any]) -> Array | None:
    """A flat array from its msgpack form, as nearly all are; None for whatever else it is."""
    if type(value) is not dict:
        return None
    raw, wanted = value.get("data"), _LITTLE[dtype]
    if (
        type(raw) is bytes
        and value.get("dtype") == _NAME[dtype]
        and value.get("shape") == [len(raw) / 8]
    ):
        made = np.frombuffer(raw, dtype=wanted)
        return made if wanted.isnative else made.astype(dtype)
    return None


def _word(value: Any) -> int:
    if isinstance(value, str):
        return int(value, 16)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{value!r} is no word of 64 bits")
    return value


def _number(value: Any) -> float:
    if isinstance(value, str):
        if value not in _NON_FINITE:
            raise ValueError(f"{value!r}: only NaN, Infinity and -Infinity are written as text")
        return _NON_FINITE[value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number")
    return float(value)
