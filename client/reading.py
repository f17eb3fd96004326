"""JSON of the server as the dataclasses of `models`, driven by their annotations."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Hashable
from datetime import datetime
from typing import Any, TypeVar

Model = TypeVar("Model")
Reader = Callable[[Any], Any]


def read(kind: type[Model], value: Any) -> Model:
    """An answer, or a part of one, as a dataclass.

    Members that the dataclass does not have are those of a newer server, and are left out.

    Raises:
        ValueError: a member is missing, or is not what it should be.
    """
    try:
        model: Model = _reader(typing.cast(Hashable, kind))(value)
    except (TypeError, KeyError, AttributeError) as error:
        name = getattr(kind, "__name__", kind)  # `X | None` and lists have none
        raise ValueError(f"{name}: {type(error).__name__}: {error}") from error
    return model


@functools.cache
def _reader(kind: Any) -> Reader:
    if dataclasses.is_dataclass(kind):
        return _reader_of_members(kind)
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        # All of the interface are `X | None`, or plain values of JSON.
        kinds = [part for part in parts if part is not types.NoneType]
        if len(kinds) > 1:
            return _as_it_is
        inner = _reader(kinds[0])
        return lambda value: None if value is None else inner(value)
    if origin is list:
        inner = _reader(parts[0])
        return list if inner is _as_it_is else lambda value: [inner(one) for one in value]
    if origin is dict:
        inner = _reader(parts[1])
        return lambda value: {key: inner(one) for key, one in value.items()}
    if kind is datetime:
        return datetime.fromisoformat
    if kind is float:
        return float  # "NaN" and "Infinity" as well, which are strings in JSON
    return _as_it_is


def _reader_of_members(kind: Any) -> Reader:
    hints = typing.get_type_hints(kind)
    # Looked up when the first one is read: a dataclass may have members of its own kind.
    members = [
        (member.name, hints[member.name], member.default is dataclasses.MISSING)
        for member in dataclasses.fields(kind)
    ]

    def read_members(value: Any) -> Any:
        return kind(
            **{
                name: _reader(hint)(value[name])
                for name, hint, needed in members
                if needed or name in value
            }
        )

    return read_members


def _as_it_is(value: Any) -> Any:
    return value
