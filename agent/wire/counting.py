"""How much there is in what came, found out before any value is made of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rankscope.agent.wire import limits
from rankscope.agent.wire.fields import WireError

# Bytes of a value by its first byte (msgpack's specification, "Formats"), the first one included,
# and how many bytes after the first say how many more follow.
_SIZE = [1] * 256
_LENGTH = [0] * 256
for _byte in range(0xA0, 0xC0):  # short texts
    _SIZE[_byte] = 1 + (_byte & 0x1F)
for _byte, _more in (
    *((0xC4, 1), (0xC5, 2), (0xC6, 4)),  # bytes
    *((0xC7, 1), (0xC8, 2), (0xC9, 4)),  # extensions
    *((0xD9, 1), (0xDA, 2), (0xDB, 4)),  # texts
):
    _LENGTH[_byte] = _more
    # An extension has a byte more, for its type.
    _SIZE[_byte] = 1 + _more + (0xC7 <= _byte <= 0xC9)
for _byte, _size in (
    *((0xCA, 5), (0xCB, 9)),  # numbers with a fraction
    *((0xCC, 2), (0xCD, 3), (0xCE, 5), (0xCF, 9)),  # integers without a sign
    *((0xD0, 2), (0xD1, 3), (0xD2, 5), (0xD3, 9)),  # and with one
    *((0xD4, 3), (0xD5, 4), (0xD6, 6), (0xD7, 10), (0xD8, 18)),  # extensions of fixed size
    *((0xDC, 3), (0xDD, 5), (0xDE, 3), (0xDF, 5)),  # lists and objects
):
    _SIZE[_byte] = _size


def check_msgpack(data: bytes) -> None:
    """Checks for more values than a batch may have, without making any.

    Each takes a byte at least: most batches are too short for that.

    Raises:
        WireError: it has too many.
    """
    if len(data) <= limits.OBJECTS.most:
        return
    at, end, left = 0, len(data), limits.OBJECTS.most
    size, length = _SIZE, _LENGTH
    while at < end:
        left -= 1
        if left < 0:
            raise _too_many("body")
        first = data[at]
        more = length[first]
        if more:
            at += int.from_bytes(data[at + 1 : at + 1 + more], "big")
        at += size[first]


def check_json(data: bytes) -> None:
    """The same for JSON; of what stands in texts, too much may be counted.

    Raises:
        WireError: it has too many.
    """
    if len(data) > limits.OBJECTS.most:
        values = sum(data.count(mark) for mark in (b",", b":", b"[", b"{"))
        if values > limits.OBJECTS.most:
            raise _too_many("body")


def check_plain(value: Mapping[str, Any], where: str) -> None:
    """Checks how deep and how long an object of whatever values is.

    Raises:
        WireError: it is too deep, or too long.
    """
    left = limits.CONFIG.most
    # Level by level, not one in the other: it may be deeper than calls may be.
    level: list[Any] = [value]
    depth = 0
    while level:
        depth += 1
        if depth > limits.DEPTH.most:
            raise WireError(where, f"is nested over {limits.DEPTH.most} levels deep")
        inner: list[Any] = []
        for node in level:
            parts = [*node.keys(), *node.values()] if isinstance(node, Mapping) else node
            for part in parts:
                left -= length_of(part)
                if isinstance(part, Mapping | list | tuple):
                    inner.append(part)
            if left < 0:
                raise WireError(where, f"has over {limits.CONFIG.most} characters as JSON")
        level = inner


def length_of(value: Any) -> int:
    """Characters of a value as JSON, about; of a list or an object, without what is in it."""
    if isinstance(value, str | bytes):
        return len(value) + 4
    return 4 if isinstance(value, Mapping | list | tuple) else 10


def check_sharding(config: Mapping[str, Any]) -> None:
    """Checks what says over how many ranks a model is sharded: others compute with it.

    Raises:
        WireError: no job has so many ranks.
    """
    said = config.get("sharded_over")
    most = limits.SHARDED_OVER.most
    for key, value in said.items() if isinstance(said, Mapping) else ():
        if isinstance(value, int | float) and not abs(value) <= most:
            raise WireError(f"hello.config.sharded_over.{key}", f"is over {most}")


def _too_many(where: str) -> WireError:
    most = limits.OBJECTS.most
    return WireError(where, f"has over {most} values: send it in parts, and arrays as bytes")
