"""A TensorBoard folder as a log: of SummaryWriter, Keras, Lightning, Transformers, the agent."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankscope.server.detectors.mechanisms.wording import count as counted
from rankscope.server.exchange.logs import Collected, Log, ranks_of
from rankscope.server.exchange.points import ExchangeError, require

_EVENTS = "*tfevents*"
_RANK = re.compile(r"(?:(?:rank|worker|process|proc|node|gpu|replica)[-_ ]?)?(\d{1,6})", re.I)
_PHASE = re.compile(r"train|training|val|valid|validation|eval|evaluation|test", re.I)
# Where SummaryWriter puts hyperparameters, and once more the final values.
_HPARAMS = re.compile(r"\d{9,}\.\d+")


@dataclass(frozen=True, slots=True)
class _Place:
    """What the path of an event file says of it.

    Attributes:
        run: the folders that distinguish runs.
    """

    path: Path
    run: tuple[str, ...]
    rank: int
    phase: str


def has_events(folder: Path) -> bool:
    """Whether there are event files in a folder, or below it."""
    return next(folder.rglob(_EVENTS), None) is not None


def read(source: Path) -> Log:
    """The run in a log folder, or in an event file.

    Folders such as `rank_0`, `worker-1` or `3` are ranks, `train` and `validation` are phases of
    one run. Several files of a folder are one log that was gone on with.

    Raises:
        ExchangeError: tensorboard is not installed, or there is no run, or more than one.
    """
    places = [p for p in _places(source) if not any(map(_HPARAMS.fullmatch, p.run))]
    if not places:
        raise ExchangeError(
            f"{source} holds no TensorBoard events: there is no file *tfevents* in it or below"
        )
    places = _one_run(source, _with_scalars_of_parents(places))
    reader = _Reader()
    for place in places:
        reader.read(place)
    ranks, notes = ranks_of(str(source), reader.ranks)
    return Log(
        str(source.resolve()), "TensorBoard", ranks, (*reader.notes, *notes), reader.started_at
    )


def _places(source: Path) -> Iterator[_Place]:
    """All event files, in the order in which they were begun, as their names say."""
    files = [source] if source.is_file() else source.rglob(_EVENTS)
    for path in sorted(files, key=lambda path: (path.parent, path.name)):
        parts = () if path == source else path.parent.relative_to(source).parts
        run, rank, phase = [], 0, ""
        for part in parts:
            if match := _RANK.fullmatch(part):
                rank = int(match[1])
            elif _PHASE.fullmatch(part):
                phase = part
            else:
                run.append(part)
        yield _Place(path, tuple(run), rank, phase)


def _with_scalars_of_parents(places: list[_Place]) -> list[_Place]:
    """`add_scalars` of SummaryWriter makes a folder for each curve, below that of the run."""
    runs = {place.run for place in places}
    return [
        _Place(p.path, p.run[:-1], p.rank, p.run[-1]) if p.run and p.run[:-1] in runs else p
        for p in places
    ]


def _one_run(source: Path, places: list[_Place]) -> list[_Place]:
    runs = sorted({place.run for place in places})
    if len(runs) > 1:
        named = ", ".join(str(source.joinpath(*run)) for run in runs[:10])
        more = f" and {len(runs) - 10} more" if len(runs) > 10 else ""
        raise ExchangeError(f"{source} holds {len(runs)} runs; name one of them: {named}{more}")
    return places


class _Reader:
    """Reads event files one after the other.

    Attributes:
        ranks: what was read of each rank.
        notes: of files that are not whole.
        started_at: time of the first event.
    """

    def __init__(self) -> None:
        self.ranks: dict[int, Collected] = {}
        self.notes: list[str] = []
        self.started_at = math.nan
        stub = "tensorboard.compat.tensorflow_stub"
        purpose = "Event files"
        self._records = require(f"{stub}.pywrap_tensorflow", "tensorboard", purpose)
        self._errors = require(f"{stub}.errors", "tensorboard", purpose)
        self._event = require("tensorboard.compat.proto.event_pb2", "tensorboard", purpose).Event
        self._numbers = require("tensorboard.util.tensor_util", "tensorboard", purpose)
        # What a tag is stands with its first value alone.
        self._plugins: dict[tuple[Path, str], str] = {}

    def read(self, place: _Place) -> None:
        """Takes all scalars of a file."""
        collected = self.ranks.setdefault(place.rank, Collected())
        for event in self._events(place.path):
            if not self.started_at <= event.wall_time and event.wall_time > 0:
                self.started_at = event.wall_time
            for value in event.summary.value:
                number = self._number(place.path.parent, value)
                if number is not None:
                    collected.add(_tag(place, value.tag), event.step, number)

    def _events(self, path: Path) -> Iterator[Any]:
        try:
            reader = self._records.PyRecordReader_New(str(path))
        except Exception as error:  # whatever a file system's plugin raises
            raise ExchangeError(f"{path} cannot be read: {error}") from error
        count = 0
        while True:
            try:
                reader.GetNext()
                event = self._event.FromString(reader.record())
            except self._errors.OutOfRangeError:
                return
            except Exception as error:
                # A job that was killed, or still writes, leaves half a record.
                if not count:
                    raise ExchangeError(f"{path} is no event file: {error}") from error
                self.notes.append(
                    f"{path} breaks off after {counted(count, 'event')} (cut off, still being "
                    "written, or damaged): what comes before was read."
                )
                return
            count += 1
            yield event

    def _number(self, folder: Path, value: Any) -> float | None:
        kind = value.WhichOneof("value")
        if kind == "simple_value":
            return float(value.simple_value)
        if kind != "tensor":
            return None
        key = (folder, value.tag)
        if value.HasField("metadata"):
            self._plugins[key] = value.metadata.plugin_data.plugin_name
        if self._plugins.get(key) != "scalars":
            return None
        number = self._numbers.make_ndarray(value.tensor)
        return float(number.reshape(-1)[0]) if number.size == 1 else None


def _tag(place: _Place, tag: str) -> str:
    """The tag with what its folder adds to it.

    Raises:
        ExchangeError: the folder is neither a phase nor a curve of `add_scalars`: another run.
    """
    if not place.phase:
        return tag
    flat = tag.replace("/", "_") + "_"
    if place.phase.startswith(flat):
        return f"{tag}/{place.phase[len(flat) :]}"
    if not _PHASE.fullmatch(place.phase):
        raise ExchangeError(
            f"{place.path.parent} is a run of its own, below the folder of another one; name the "
            "one or move it elsewhere"
        )
    return f"{place.phase}/{tag}"
