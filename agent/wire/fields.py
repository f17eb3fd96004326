"""Fields of a batch as they came over the wire, each checked.

What is wrong raises a `WireError`; `where` is the path of the object that a field stands in. What a
field may be at most is said in `limits.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from rankscope.agent.wire import limits
from rankscope.agent.wire.batch import Array, Int64, Row
from rankscope.agent.wire.limits import Limit
from rankscope.agent.wire.plain import clean

MAX_NAME_LENGTH = limits.NAME.most
MAX_COLUMNS = limits.SERIES.most
MAX_ROWS = limits.ROWS.most
MAX_STEP = limits.STEP.most
# An array is a list or a table: more dimensions would be multiplied before they are refused.
_MAX_DIMENSIONS = 2

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
        # Both may quote what was sent, which may be long, and no text to a client.
        where, problem = clean(where[:300]), clean(problem[:500])
        super().__init__(f"{where}: {problem}")
        self.where = where
        self.problem = problem


def mapping_of(value: Any, where: str) -> Mapping[str, Any]:
    """An object."""
    # An instance of a dict is known at once, one of an abstract class is searched for.
    if type(value) is not dict and not isinstance(value, Mapping):
        raise WireError(where, f"must be an object, not {type(value).__name__}")
    return value


def optional_mapping_of(fields: Mapping[str, Any], key: str, where: str = "") -> Mapping[str, Any]:
    """The object of a field; empty where there is none."""
    value = fields.get(key)
    return {} if value is None else mapping_of(value, _path(where, key))


def shape_of(value: Any, where: str) -> tuple[int, ...]:
    """The shape of a tensor: integers from 0."""
    if not isinstance(value, list | tuple) or not all(_is_size(n) for n in value):
        raise WireError(where, f"a shape is a list of integers from 0, not {quoted(value)}")
    if len(value) > limits.DIMENSIONS.most:
        raise WireError(where, f"has {len(value)} dimensions; at most {limits.DIMENSIONS.most}")
    elements = 1
    for n in value:
        # In this order: the product of large numbers is larger than any of them.
        elements = max(elements * n, n) if elements else n
        if elements > limits.ELEMENTS.most:
            raise WireError(where, f"has over {limits.ELEMENTS.most} elements")
    return tuple(value)


def size_of(value: Any, where: str, limit: Limit) -> int:
    """An integer from 0 up to a limit."""
    if not _is_size(value) or value > limit.most:
        raise WireError(where, f"must be an integer from 0 to {limit.most}, not {quoted(value)}")
    return int(value)


def texts_of(fields: Mapping[str, Any], key: str, where: str, limit: Limit) -> tuple[str, ...]:
    """The texts of a field; none where it is missing."""
    values = tuple(items_of(fields, key, where))
    if not all(isinstance(value, str) for value in values):
        raise WireError(_path(where, key), "must be a list of texts")
    for n, value in enumerate(values):
        if len(value) > limit.most:
            check_length(value, f"{_path(where, key)}[{n}]", limit)
    return tuple(map(clean, values))


def check_length(text: str, where: str, limit: Limit) -> None:
    """Raises where a text is too long."""
    if len(text) > limit.most:
        raise WireError(where, f"has {len(text)} characters; at most {limit.most} are taken")


def check_count(values: Any, where: str, limit: Limit) -> None:
    """Raises where something has too many parts."""
    if len(values) > limit.most:
        raise WireError(where, f"has {len(values)} {limit.unit}; at most {limit.most} are taken")


def quoted(value: Any) -> str:
    """What was sent, for a refusal to quote: not all of what may be long or deep."""
    if isinstance(value, int) and not -(10**40) < value < 10**40:
        return "one of many digits"
    if isinstance(value, str | bytes):
        return repr(value[:100])
    return type(value).__name__ if isinstance(value, list | tuple | Mapping) else repr(value)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def items_of(
    fields: Mapping[str, Any], key: str, where: str = "", limit: Limit | None = None
) -> Iterable[Any]:
    """The items of a list of a field; none where it is missing."""
    value = fields.get(key)
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise WireError(_path(where, key), f"must be a list, not {type(value).__name__}")
    if limit is not None:
        check_count(value, _path(where, key), limit)
    return value


def _path(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


_REQUIRED = object()


def text_of(
    fields: Mapping[str, Any],
    key: str,
    default: Any = _REQUIRED,
    where: str = "",
    *,
    limit: Limit = limits.WORD,
) -> str:
    """The text of a field."""
    value = fields.get(key, default)
    if value is _REQUIRED:
        raise WireError(_path(where, key), "is missing")
    if not isinstance(value, str):
        raise WireError(_path(where, key), f"must be text, not {type(value).__name__}")
    if len(value) > limit.most:
        check_length(value, _path(where, key), limit)
    return clean(value)


def check_name(value: Any, where: str) -> None:
    """Raises where a value is no name."""
    if not isinstance(value, str) or not value or len(value) > MAX_NAME_LENGTH:
        raise WireError(where, f"a name is text of 1 to {MAX_NAME_LENGTH} characters")
    if not value.isprintable():
        raise WireError(where, "a name has printable characters only")


@lru_cache(maxsize=4096)
def is_known_name(name: Any) -> bool:
    """Whether it is a name; jobs post the same ones over and over."""
    return isinstance(name, str) and 0 < len(name) <= MAX_NAME_LENGTH and name.isprintable()


def name_of(fields: Mapping[str, Any], key: str, default: Any = _REQUIRED) -> str:
    """The name in a field."""
    value = text_of(fields, key, default, limit=limits.TENSOR_NAME)
    check_name(value, key)
    return value


def integer_of(
    fields: Mapping[str, Any],
    key: str,
    default: Any = _REQUIRED,
    *,
    minimum: int,
    limit: Limit,
    where: str = "",
) -> int:
    """The integer of a field, from a minimum on up to a limit."""
    value = fields.get(key, default)
    if value is _REQUIRED:
        raise WireError(_path(where, key), "is missing")
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= limit.most:
        raise WireError(
            _path(where, key),
            f"must be an integer from {minimum} to {limit.most}, not {quoted(value)}",
        )
    return value


def real_of(
    fields: Mapping[str, Any],
    key: str,
    default: float,
    where: str = "",
    *,
    minimum: float = -math.inf,
    most: float = math.inf,
) -> float:
    """The finite number of a field, within bounds."""
    value = fields.get(key, default)
    try:
        number = math.nan if isinstance(value, bool | str) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise WireError(_path(where, key), f"must be a finite number, not {quoted(value)}")
    if not minimum <= number <= most:
        raise WireError(_path(where, key), f"must be from {minimum:g} to {most:g}, not {number!r}")
    return number


def steps_of(value: Any, where: str, expected: int) -> Int64:
    """Steps from their range or their list; int64 [expected]."""
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
        steps = array_of(value, np.int64, where)
    if steps.ndim != 1 or (steps.size and int(steps.min()) < 0):
        raise WireError(where, "steps are a flat list of integers from 0")
    if steps.size and int(steps.max()) > MAX_STEP:
        raise WireError(where, f"the last of them is {int(steps.max())}; at most {MAX_STEP}")
    return steps


def rows_of(fields: Mapping[str, Any], key: str, dtype: type[Any]) -> list[Row]:
    """The rows of a field, each `[step, {name: value}]`; none where it is missing."""
    number = _digest if dtype is np.uint64 else _number
    rows: list[Row] = []
    names: set[str] = set()
    for place, row in enumerate(items_of(fields, key)):
        if not isinstance(row, list | tuple) or len(row) != 2:
            raise WireError(f"{key}[{place}]", "a row is [step, {name: value}]")
        step, values = row
        if not _is_size(step) or step > MAX_STEP:
            raise WireError(
                f"{key}[{place}]", f"begins with a step from 0 to {MAX_STEP}, not {quoted(step)}"
            )
        made = {}
        for name, value in mapping_of(values, f"{key}[{place}]").items():
            if not is_known_name(name):
                check_name(name, f"{key}[{place}].{name}")
            try:
                made[name] = number(value)
            except (TypeError, ValueError, OverflowError) as error:
                raise WireError(f"{key}[{place}].{name}", f"is no number: {error}") from error
        rows.append((step, made))
        names.update(made)
        # Before more is made of them: a few bytes must not ask for much memory.
        if len(names) > MAX_COLUMNS:
            raise WireError(key, f"have over {MAX_COLUMNS} series, more than fit into a batch")
        if len(rows) > MAX_ROWS:
            raise WireError(key, f"are over {MAX_ROWS}, more than fit into a batch: send columns")
    return rows


def array_of(value: Any, dtype: type[Any], where: str) -> Array:
    """An array of exactly `dtype` from its msgpack or its JSON form; read-only where it can be."""
    if isinstance(value, Mapping):
        flat = flat_array(value, dtype)
        if flat is not None:
            return flat
        raw, shape, given = value.get("data"), value.get("shape"), value.get("dtype")
        wanted = _LITTLE[dtype]
        if given != wanted.str:
            raise WireError(where, f"has dtype {quoted(given)}; {wanted.str!r} is expected")
        if not isinstance(raw, bytes) or not isinstance(shape, list | tuple):
            raise WireError(where, "an array has dtype, shape and data")
        if len(shape) > _MAX_DIMENSIONS:
            raise WireError(where, f"has {len(shape)} dimensions; at most {_MAX_DIMENSIONS}")
        if not all(_is_size(n) for n in shape):
            raise WireError(where, "a shape is a list of integers from 0")
        if math.prod(shape) * wanted.itemsize != len(raw):
            raise WireError(where, f"{len(raw)} bytes are no array of shape {list(shape)}")
        try:
            return np.frombuffer(raw, dtype=wanted).reshape(shape).astype(dtype, copy=False)
        except ValueError as error:
            raise WireError(where, f"no array has the shape {list(shape)}") from error
    if not isinstance(value, list | tuple):
        raise WireError(where, "is missing" if value is None else "must be a list of numbers")
    try:
        if dtype is np.uint64:
            return np.array([_digest(w) for w in value], dtype)
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


def flat_array(value: Any, dtype: type[Any]) -> Array | None:
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


def _digest(value: Any) -> int:
    word = int(value, 16) if isinstance(value, str) else value
    if isinstance(word, bool) or not isinstance(word, int) or not 0 <= word < 2**64:
        raise ValueError(f"{quoted(value)} is no integer of 64 bits")
    return word


def _number(value: Any) -> float:
    if isinstance(value, str):
        if value not in _NON_FINITE:
            raise ValueError(
                f"{quoted(value)}: only NaN, Infinity and -Infinity are written as text"
            )
        return _NON_FINITE[value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{quoted(value)} is no number")
    return float(value)
