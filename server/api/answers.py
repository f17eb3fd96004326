"""Answers with many numbers: compact where the client takes that, packed where that pays."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack
import numpy as np
from fastapi import Request, Response

from rankscope.agent.wire import Int64, numbers_to_json
from rankscope.server.storage.database.packing import pack
from rankscope.server.storage.maintenance.rollups import narrowed
from rankscope.server.storage.reading.series import RankSeries

BINARY = "application/msgpack"
# Below this an answer fits into a few packets.
_WORTH_COMPRESSING = 16_384
_SAMPLE = 32_768
# Noise in floating point shrinks to nine tenths, for more time than it takes to send it.
_PAYS = 0.7
# Numbers that are made narrow at once.
_AT_ONCE = 16_384


def wants_binary(request: Request) -> bool:
    """True where the client takes msgpack rather than JSON."""
    accepted = request.headers.get("accept", "")
    return BINARY in accepted or "application/octet-stream" in accepted


def not_changed(request: Request, tag: str) -> bool:
    """True where the client has the answer with this tag."""
    known = request.headers.get("if-none-match", "")
    return tag in [one.strip() for one in known.split(",")]


def answer(request: Request, body: bytes, media_type: str, headers: Mapping[str, str]) -> Response:
    """An answer, compressed where the client takes that and a sample of it gets much shorter."""
    more = {**headers, "Vary": "Accept, Accept-Encoding"}
    packs = "gzip" in request.headers.get("accept-encoding", "")
    if packs and len(body) >= _WORTH_COMPRESSING:
        middle = max(0, len(body) - _SAMPLE) // 2
        sample = body[middle : middle + _SAMPLE]
        if len(gzip.compress(sample, 1)) < _PAYS * len(sample):
            body = gzip.compress(body, 1)
            more["Content-Encoding"] = "gzip"
    return Response(body, media_type=media_type, headers=more)


def json_series(metric: str, found: Sequence[RankSeries]) -> bytes:
    """Series as JSON, as the model `Series` describes it.

    Not through the model: the arrays are ours, and there may be a million numbers in them. And in
    pieces: nothing else of the process runs while one of them is written, batches included.
    """
    pieces = []
    for one in found:
        piece = {"rank": one.rank, "width": one.width, "steps": one.steps.tolist()}
        for name, values in (("values", one.values), ("min", one.low), ("max", one.high)):
            piece[name] = numbers_to_json(values)
        pieces.append(json.dumps(piece, allow_nan=False, separators=(",", ":")))
    return f'{{"metric":{json.dumps(metric)},"series":[{",".join(pieces)}]}}'.encode()


def pack_series(metric: str, found: Sequence[RankSeries]) -> bytes:
    """Series as msgpack; all numbers little-endian.

    The map of the JSON answer, but for: `steps` are int64, or `[first, stride, count]`; `values`,
    `min` and `max` are of `dtype`, which is `<f4` where a drawing does not show the difference;
    `min` and `max` are left out of raw points; `width` is that of the buckets, 1 for points.
    """
    series = []
    steps: Int64 | None = None
    packed_steps: bytes | list[int] = b""
    for one, data in zip(found, _narrow(found), strict=True):
        # Ranks go in step: most have the same ones.
        if one.steps is not steps and (steps is None or not np.array_equal(steps, one.steps)):
            steps, packed_steps = one.steps, _steps(one.steps)
        made: dict[str, Any] = {"rank": one.rank, "width": one.width, "steps": packed_steps}
        made["dtype"] = "<f4" if data[0].dtype == np.float32 else "<f8"
        for name, values in zip(("values", "min", "max"), data, strict=False):
            made[name] = pack(values)
        series.append(made)
    packed: bytes = msgpack.packb({"metric": metric, "series": series})
    return packed


def _narrow(found: Sequence[RankSeries]) -> list[list[Any]]:
    """The arrays of each rank; float32 where a drawing of that rank does not show it."""
    arrays = [[s.values] if s.low is s.values else [s.values, s.low, s.high] for s in found]
    wide = [n for n, of in enumerate(arrays) if any(len(a) and a.dtype != np.float32 for a in of)]
    begin = 0
    while begin < len(wide):
        # As many as the processor's caches hold with what is computed of them.
        end, held = begin, 0
        while end < len(wide) and (end == begin or held < _AT_ONCE):
            held += sum(map(len, arrays[wide[end]]))
            end += 1
        some = wide[begin:end]
        ends = np.cumsum([sum(map(len, arrays[n])) for n in some])
        whole = np.concatenate([a for n in some for a in arrays[n]])
        short, differs = narrowed(whole, np.append(0, ends[:-1]))
        for n, stop, keeps in zip(some, ends.tolist(), differs.tolist(), strict=True):
            size, count = len(arrays[n][0]), len(arrays[n])
            start, data = stop - count * size, whole if keeps else short
            arrays[n] = [data[start + k * size : start + (k + 1) * size] for k in range(count)]
        begin = end
    return arrays


def _steps(steps: Int64) -> bytes | list[int]:
    if len(steps) > 1:
        stride = int(steps[1] - steps[0])
        if (
            int(steps[-1] - steps[0]) == stride * (len(steps) - 1)
            and ((steps[1:] - steps[:-1]) == stride).all()
        ):
            return [int(steps[0]), stride, len(steps)]
    return pack(steps)
