"""Figures of lines that grow: who has one is sent what is new of it, and not the whole again.

The first answer has all points, and says in `layout.meta.tail` up to where they stand and a digest
of them: `{"from": x, "digest": ...}`. Who brings both back gets, as long as these points are what
they were, those from `x` on; `layout.meta.appended` is `{"from": x, "traces": [places of those that
were cut]}`. What lies before may change all the same: a rank was late, buckets have become wider.
Then the digest differs, and the whole figure is sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go

_LINES = ("raw", "smoothed", "median")
_AREAS = ("envelope", "band")
# Extremes of a bucket, which a line has beside its means.
_EXTREMES = 2
# Points at the end of a line that may still change: of buckets the last is filling.
_OPEN = 2
# Share of the points of what is over all ranks that may: these are not equally far.
_OPEN_OVER_RANKS = 0.05
_OVER_RANKS = ("median", "band")


@dataclass(frozen=True, slots=True)
class Known:
    """What a browser has of a figure: points up to `end`, not included, with this digest."""

    end: float
    digest: str

    @classmethod
    def parse(cls, text: str) -> Known | None:
        """Of `END:DIGEST`; None for what is none."""
        end, _, digest = text.partition(":")
        try:
            return cls(float(end), digest)
        except ValueError:
            return None


def outline_later(figure: go.Figure) -> None:
    """Empties the areas between the extremes of lines' buckets: half of what a figure holds.

    The lines have the extremes, too (`customdata`), and the page makes the outlines of these.
    """
    known = {
        trace.meta["rank"]
        for trace in figure.data
        if _role(trace) == "raw" and np.shape(trace.customdata)[1:] == (_EXTREMES,)
    }
    for trace in figure.data:
        if _role(trace) == "envelope" and trace.meta.get("rank") in known:
            trace.x = trace.y = None
            figure.layout.meta = {**(figure.layout.meta or {}), "outlined": True}


def cut(figure: go.Figure, known: Known | None) -> None:
    """Leaves of a figure what is new, if what is known of it still holds, and says where to go on.

    Lines and areas are cut; all else is small and stays.
    """
    traces = [
        _Trace(place, trace)
        for place, trace in enumerate(figure.data)
        # Sizes of single markers are an array, too: of points that stand alone, which are rare.
        if _role(trace) in (*_LINES, *_AREAS)
        and np.ndim(trace.marker.size) == 0
        and trace.x is not None
    ]
    ends = [end for trace in traces if (end := trace.settled()) is not None]
    if not ends or len({trace.key for trace in traces}) < len(traces):
        return
    meta: dict[str, Any] = {"tail": {"from": min(ends), "digest": _digest(traces, min(ends))}}
    if known is not None and known.digest == _digest(traces, known.end):
        for trace in traces:
            trace.keep_from(known.end)
        meta["appended"] = {"from": known.end, "traces": [trace.place for trace in traces]}
    figure.layout.meta = {**(figure.layout.meta or {}), **meta}


def _role(trace: Any) -> str:
    return str((trace.meta or {}).get("role", ""))


class _Trace:
    """A line, or an area between two lines, of a figure."""

    def __init__(self, place: int, trace: Any) -> None:
        self.place = place
        self._trace = trace
        self.area = _role(trace) in _AREAS
        self.over_ranks = _role(trace) in _OVER_RANKS
        self.key = (trace.name, repr(sorted((trace.meta or {}).items())))
        self.x = np.asarray(trace.x, np.float64)

    def settled(self) -> float | None:
        """Where the points begin that may still change; None where there are too few."""
        x = self.x[~np.isnan(self.x)]
        x = np.unique(x) if self.area else x
        share = _OPEN_OVER_RANKS if self.over_ranks else 0.0
        back = max(_OPEN, int(len(x) * share))
        return float(x[-back]) if len(x) > back else None

    def before(self, end: float) -> Iterator[bytes]:
        """What stands before a place, as a drawing shows it."""
        there = self.x < end
        yield repr(self.key).encode()
        yield self.x[there].tobytes()
        for name in self._arrays():
            # Roll-ups are of single precision, and the points that they are of are not.
            yield np.asarray(self._trace[name], np.float32)[there].tobytes()

    def keep_from(self, begin: float) -> None:
        """Cuts off what stands before."""
        there = self.x >= begin
        if self.area:
            there |= self._gaps(there)
        for name in ("x", *self._arrays()):
            self._trace[name] = np.asarray(self._trace[name])[there]

    def _arrays(self) -> list[str]:
        """Those that have an entry for each point."""
        every = ("y", "customdata")
        return [name for name in every if self._trace[name] is not None]

    def _gaps(self, there: np.ndarray[Any, np.dtype[np.bool_]]) -> np.ndarray[Any, Any]:
        """Gaps between stretches of an area of which something stays."""
        gaps = np.isnan(self.x)
        stays = np.logical_or.accumulate(there)
        return gaps & stays


def _digest(traces: list[_Trace], end: float) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for trace in traces:
        for part in trace.before(end):
            digest.update(part)
    return digest.hexdigest()
