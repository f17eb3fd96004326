"""Runs of Weights & Biases as logs: the file `run-ID.wandb` in a run's folder."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rankscope.server.exchange.logs import Collected, Log, ranks_of
from rankscope.server.exchange.points import ExchangeError

SUFFIX = ".wandb"
# A file is a log of LevelDB behind a header of its own: records in blocks, cut where one ends.
# https://github.com/google/leveldb/blob/main/doc/log_format.md
_MAGIC = b":W&B\xe1\xbe\x00"
_BLOCK = 32_768
_HEADER = struct.Struct("<IHB")  # check sum, length, type
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
# Keys with a low line belong to wandb itself: _step, _runtime, _timestamp, _wandb.
_OWN = "_"
_NOT_FINITE = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


def find(source: Path) -> Path | None:
    """The file that is meant.

    Raises:
        ExchangeError: several are.
    """
    if source.is_file():
        return source
    # `latest-run` is a link to one of the folders beside it.
    below = sorted({path.resolve() for path in source.rglob(f"*{SUFFIX}")})
    if len(below) > 1:
        named = ", ".join(str(path.parent) for path in below[:10])
        raise ExchangeError(f"{source} holds {len(below)} runs; name one of them: {named}")
    return below[0] if below else None


def read(source: Path) -> Log:
    """The run in a `.wandb` file, or in a folder with one.

    Raises:
        ExchangeError: there is none, it is no such file, or the package wandb is missing.
    """
    path = find(source)
    if path is None:
        raise ExchangeError(f"{source} holds no file of wandb (run-ID{SUFFIX})")
    try:
        from wandb.proto.wandb_internal_pb2 import Record
    except ImportError as error:
        raise ExchangeError(
            "reading runs of wandb needs its package: pip install 'rankscope[wandb]'"
        ) from error
    collected = Collected()
    started_at, name = float("nan"), ""
    notes = []
    for data in _records(path):
        if data is None:
            notes.append("The file breaks off, or is damaged: it was read as far as it goes.")
            break
        record = Record.FromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "history":
            _take(collected, record.history)
        elif kind == "run":
            # It comes again where the run is renamed.
            started_at = record.run.start_time.ToNanoseconds() / 1e9
            name = record.run.display_name or record.run.run_id
    place = str(path.resolve())
    ranks, more = ranks_of(place, {0: collected})
    return Log(place, "wandb", ranks, (*more, *notes), started_at, name)


def _take(collected: Collected, history: Any) -> None:
    """The values of one step; text, pictures and tables are no metrics."""
    values = {"/".join(item.nested_key) or item.key: item.value_json for item in history.item}
    step = history.step.num if history.HasField("step") else json.loads(values.get("_step", "-1"))
    for name, text in values.items():
        if not name.startswith(_OWN):
            for tag, value in _numbers(name, json.loads(text)):
                collected.add(tag, int(step), value)


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _numbers(f"{name}/{key}", inner)
    elif isinstance(value, str) and value in _NOT_FINITE:
        yield name, _NOT_FINITE[value]
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, float(value)


def _records(path: Path) -> Iterator[bytes | None]:
    """The records of a file, in their order; at last None, where it breaks off or is damaged."""
    data = path.read_bytes()
    if not data.startswith(_MAGIC):
        raise ExchangeError(f"{path} is no file of wandb, or one of a version that is not known")
    at = len(_MAGIC)
    parts: list[bytes] = []
    while at < len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER.size:
            at += left  # the rest of a block that has no room for a header is empty
            continue
        payload = _payload(data, at)
        if payload is None:
            yield None
            return
        kind, part = payload
        at += _HEADER.size + len(part)
        if kind in (_FULL, _FIRST):
            parts = []
        parts.append(part)
        if kind in (_FULL, _LAST):
            yield b"".join(parts)
    if parts and kind not in (_FULL, _LAST):
        yield None


def _payload(data: bytes, at: int) -> tuple[int, bytes] | None:
    """Type and content of the fragment at a place; None where it is not whole."""
    if at + _HEADER.size > len(data):
        return None
    check, length, kind = _HEADER.unpack_from(data, at)
    part = data[at + _HEADER.size : at + _HEADER.size + length]
    whole = len(part) == length and kind in (_FULL, _FIRST, _MIDDLE, _LAST)
    return (kind, part) if whole and check == zlib.crc32(bytes([kind]) + part) else None
