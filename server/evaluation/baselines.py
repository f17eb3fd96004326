"""What a run is held against while it goes on: curves of its project's baselines.

They are read once a run, before its first steps are judged, one baseline at a time, so that no
other run waits for them. Runs that have ended do not change: what was read of one is kept for the
next run of its project.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from rankscope.server.comparison import configurations
from rankscope.server.comparison.courses import in_buckets, mean_over_ranks
from rankscope.server.storage.judgement import baselines as stored
from rankscope.server.storage.reading import series
from rankscope.server.window import Baselines, SettingBeside
from rankscope.server.window.baselines import BUCKETS, width_at, widths

_logger = logging.getLogger(__name__)

Curve = npt.NDArray[np.float32]

# Baselines that a run is held against. With a dozen the limit of the band is 7 % farther out than
# with the 20 of the gate, which asks once, at the end (t of 13 and 21 degrees of freedom).
_MOST = 12
# Ranks that are read of each, evenly spaced, as the gate does.
_RANKS = 64
# Runs whose curves are kept: some 20 KB each.
_KEPT = 512
# A baseline has nine tenths of the others' steps, as the gate has it.
_WHOLE = 0.9
# Settings that are kept of those that differ: more than a person reads in an alert.
_SETTINGS = 12
# Of so many runs that agree on a setting it is what a project does, and not what was tried last.
_ESTABLISHED = 3

LOSS = "loss"
# What else is held against them -> which of the ranks' values, and of those of a bucket. These are
# kept at the widest buckets alone: they are looked at for what lasts.
OTHERS: Mapping[str, str] = {
    "eval/loss": "mean",
    "lr": "mean",
    "samples": "mean",
    "target_deviance": "mean",
    "grad_norm": "mean",
    "update_ratio": "mean",
    "step_seconds": "mean",
    "step_seconds/shortest": "low",
    "process_resident_memory_bytes": "high",
    "cuda_max_memory_allocated_bytes": "high",
    "cuda_memory_reserved_bytes": "high",
}


class _Curves(NamedTuple):
    """Of one run: its first and last step with a loss, and its curves by series and width."""

    first: int
    last: int
    curves: Mapping[str, Mapping[int, Curve]]


@dataclass(slots=True)
class Library:
    """Curves of runs that were read, the last used last, and of the newest sets of them."""

    runs: OrderedDict[tuple[int, int], _Curves | None] = field(default_factory=OrderedDict)
    stacks: OrderedDict[tuple[int, ...], Mapping[str, Mapping[int, Curve]]] = field(
        default_factory=OrderedDict
    )

    def of(self, connection: Connection, row: Any) -> _Curves | None:
        """Those of a run, read where they are not there; None where it has no loss."""
        key = (row.key, row.arrivals)
        if key not in self.runs:
            self.runs[key] = _read_safely(connection, row)
        self.runs.move_to_end(key)
        while len(self.runs) > _KEPT:
            self.runs.popitem(last=False)
        return self.runs[key]

    def stacked(
        self, keys: tuple[int, ...], made: Callable[[], Mapping[str, Mapping[int, Curve]]]
    ) -> Mapping[str, Mapping[int, Curve]]:
        """Runs of one project that go on together share what they are held against."""
        if keys not in self.stacks:
            self.stacks[keys] = made()
        self.stacks.move_to_end(keys)
        while len(self.stacks) > _KEPT // _MOST:
            self.stacks.popitem(last=False)
        return self.stacks[keys]


@dataclass(slots=True)
class Learning:
    """The reading of one run's baselines, a part at a time.

    Args:
        library: what is there already.
    """

    library: Library
    _rows: list[Any] | None = None
    # Settings of all baselines of the model, by key.
    _settings: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    _found: list[tuple[Any, _Curves]] = field(default_factory=list)

    def advance(
        self,
        connection: Connection,
        *,
        key: int,
        run: str,
        project: str,
        world_size: int,
        config: Mapping[str, Any],
    ) -> Baselines | None:
        """Reads one more; None while there are more to be read.

        Args:
            key: of the run that is held against them; `run` is its id.
            config: what it says of itself.
        """
        own = configurations.of_run(world_size, config)
        if self._rows is None:
            rows = stored.before(connection, run=key, project=project)
            if not rows:
                return Baselines(of=run, why="The project has no baselines.")
            alike = [row for row in rows if _model(row.id, row.config) == _model(run, config)]
            if not alike:
                why = f"None of the project's {len(rows)} baselines is of this model."
                return Baselines(of=run, why=why)
            self._settings = {row.key: _settings(row) for row in alike}
            self._rows = self._nearest(dict(configurations.flattened(own)), alike)[:_MOST]
        if self._rows:
            row = self._rows.pop(0)
            if (curves := self.library.of(connection, row)) is not None:
                self._found.append((row, curves))
            return None
        return self._made(run, own)

    def _nearest(self, own: Mapping[str, Any], rows: Sequence[Any]) -> list[Any]:
        """Of the rows those with the fewest settings that were chosen otherwise, in their order."""
        distances = []
        for row in rows:
            theirs = self._settings[row.key]
            keys = filter(configurations.is_chosen, own.keys() | theirs.keys())
            same = (configurations.same(own.get(key), theirs.get(key)) for key in keys)
            distances.append(sum(not one for one in same))
        least = min(distances)
        return [row for row, d in zip(rows, distances, strict=True) if d == least]

    def _made(self, run: str, own: Mapping[str, Any]) -> Baselines:
        found = _long_enough(self._found)
        if not found:
            return Baselines(
                of=run, why="The project's baselines have no losses over the same steps."
            )
        last = min(curves.last for _, curves in found)
        keys = tuple(row.key for row, _ in found)
        nearest = configurations.of_run(found[0][0].world_size, found[0][0].config)
        differing, _ = configurations.differences([nearest, own])
        chosen = [s.key for s in differing if configurations.is_chosen(s.key)]
        among = [self._settings[key] for key in keys]
        mine = dict(configurations.flattened(own))
        unlike = [key for key in chosen if _is_other(key, mine, among)]
        theirs = list(self._settings.values())
        same = all(len({repr(one.get(key)) for one in theirs}) == 1 for key in unlike)
        machine = _machine(own)
        return Baselines(
            of=run,
            runs=tuple(str(row.id) for row, _ in found),
            last=last,
            curves=self.library.stacked(keys, lambda: _stacked([c for _, c in found], last)),
            elsewhere=tuple(_machine(one) != machine for one in map(_whole, found)),
            differing=tuple(SettingBeside(s.key, s.values[1], s.values[0]) for s in differing)[
                :_SETTINGS
            ],
            unlike=tuple(unlike),
            established=same and len(theirs) >= _ESTABLISHED,
        )


def _whole(found: tuple[Any, _Curves]) -> Mapping[str, Any]:
    return configurations.of_run(found[0].world_size, found[0].config)


def _settings(row: Any) -> dict[str, Any]:
    return dict(configurations.flattened(configurations.of_run(row.world_size, row.config)))


def _is_other(key: str, own: Mapping[str, Any], among: Sequence[Mapping[str, Any]]) -> bool:
    """Whether no baseline has a setting as the run has it, and it is no name that each run has."""
    values = [one.get(key) for one in among]
    if any(configurations.same(own.get(key), value) for value in values):
        return False
    return len({repr(value) for value in values}) < max(2, len(values))


def _model(run: str, config: Mapping[str, Any]) -> tuple[Any, str]:
    """What has to be the same: how many parameters, and which of a job's models it is."""
    first = config.get("first_run")
    return config.get("parameters"), "" if first is None else run.removeprefix(str(first))


def _machine(config: Mapping[str, Any]) -> tuple[Any, str, str]:
    """What has to be the same for times and memory to compare, as the gate has it."""
    device = str(config.get("device", "")).partition(":")[0]
    return config.get("world_size"), device, str(config.get("device_name") or "")


def _long_enough(found: list[tuple[Any, _Curves]]) -> list[tuple[Any, _Curves]]:
    """Those that begin and end where most of them do."""
    if not found:
        return []
    usual = float(np.median([curves.last for _, curves in found]))
    begin = float(np.median([curves.first for _, curves in found]))
    return [
        (row, c)
        for row, c in found
        if c.last >= _WHOLE * usual and c.first - begin <= (1 - _WHOLE) * (usual - begin)
    ]


def _read_safely(connection: Connection, row: Any) -> _Curves | None:
    try:
        return _read(connection, row)
    except SQLAlchemyError:
        raise
    except Exception:
        # What is wrong with an earlier run must not stop another one from being judged.
        _logger.exception("the curves of baseline %s could not be read", row.id)
        return None


def _read(connection: Connection, row: Any) -> _Curves | None:
    ranks = np.unique(np.linspace(0, row.world_size - 1, _RANKS).round().astype(int)).tolist()

    def read(metric: str, width: int | None = None) -> list[series.RankSeries]:
        """In buckets of a width, or in full length in as few as there may be."""
        return series.read_series(
            connection,
            run=row.key,
            metric=metric,
            ranks=ranks,
            from_step=None if width is None else 0,
            to_step=None if width is None else BUCKETS * width - 1,
            max_points=BUCKETS,
            steady=True,
        )

    whole = read(LOSS)
    if not whole:
        return None
    first = min(int(one.steps[0]) for one in whole)
    last = min(row.last_step, max(int(one.steps[-1]) + one.width - 1 for one in whole))
    loss = {width: _curve(read(LOSS, width), width, "mean") for width in widths(last)}
    curves: dict[str, Mapping[int, Curve]] = {LOSS: loss}
    top = width_at(last)
    for name, which in OTHERS.items():
        if found := read(name.removesuffix("/shortest"), top):
            curves[name] = {top: _curve(found, top, which)}
    return _Curves(first, last, curves)


def _curve(found: Sequence[series.RankSeries], width: int, which: str) -> Curve:
    """One value a bucket, float32 [`BUCKETS`]: of the ranks' mean, lowest or highest values."""
    made = np.full(BUCKETS, np.nan, np.float32)
    if not found:
        return made
    if which == "mean":
        course = mean_over_ranks([(one.steps, one.values) for one in found])
        course = in_buckets(course, width)
        steps, values = course.steps, course.values
    else:
        steps = np.concatenate([one.steps for one in found]) // width * width
        ends = np.concatenate([getattr(one, which) for one in found])
        steps, places = np.unique(steps, return_inverse=True)
        extreme = np.fmin if which == "low" else np.fmax
        values = np.full(len(steps), np.nan)
        extreme.at(values, places, ends)
    there = steps < BUCKETS * width
    made[steps[there] // width] = values[there]
    return made


def _stacked(found: Sequence[_Curves], last: int) -> Mapping[str, Mapping[int, Curve]]:
    """Curves of several runs, at the widths by which the buckets reach their last common step."""
    names = {name for one in found for name in one.curves}
    wide = widths(last)
    return {
        name: {
            width: np.stack([_at(one.curves.get(name, {}), width) for one in found])
            for width in (wide if name == LOSS else wide[-1:])
        }
        for name in sorted(names)
    }


def _at(curves: Mapping[int, Curve], width: int) -> Curve:
    """A curve in buckets of a width; those of a longer run are wider, and cover more."""
    if width in curves:
        return curves[width]
    made = np.full(BUCKETS, np.nan, np.float32)
    wider = min((w for w in curves if w > width), default=0)
    if wider:
        spread: Curve = np.repeat(curves[wider], wider // width)[:BUCKETS]
        made[: len(spread)] = spread
    return made
