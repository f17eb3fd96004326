"""Values as JSON, msgpack and every database can carry them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from rankscope.agent.wire.batch import Array


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


def to_plain(value: Any, depth: int = 16) -> Any:
    """The value as JSON, msgpack and every database can carry it.

    Keys become text, the three non-finite numbers become strings, tuples and sets lists, and what
    is not plain (or nested deeper than `depth`) its `str`.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, np.generic):
        return to_plain(value.item(), depth)
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return int(value)
    if isinstance(value, float):
        return number_to_json(float(value))
    if isinstance(value, Mapping) and depth:
        return {clean(str(k)): to_plain(v, depth - 1) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset) and depth:
        return [to_plain(v, depth - 1) for v in value]
    return clean(str(value))


def clean(text: str) -> str:
    """The text without NUL and halves of surrogate pairs, which databases do not take."""
    if text.isprintable():
        return text
    return text.encode("utf-8", "replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")
