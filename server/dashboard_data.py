"""Arrays for the figures of the dashboard, out of the database."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from sqlalchemy import Connection, Engine

from rankscope.agent.wire import Float64
from rankscope.dashboard.figures import Curve, Mark, Scaled
from rankscope.dashboard.source import (
    AlertFacts,
    DataRead,
    Distances,
    Divergence,
    GradientNoise,
    LayerValues,
    Selection,
)
from rankscope.server.comparison.compare import pairwise_distances
from rankscope.server.comparison.reference import without_suspects
from rankscope.server.evaluation import data_ledger
from rankscope.server.evaluation.gradient_noise import read_noise
from rankscope.server.evaluation.scaling import read_scaling
from rankscope.server.storage.database.engine import reading
from rankscope.server.storage.judgement import alerts, comparisons
from rankscope.server.storage.reading import layers, runs, series
from rankscope.server.window import Comparison

_PAGE = 1000
# More alerts than this say nothing on a chart.
_MAX_MARKS = 100


class DatabaseSource:
    """The `rankscope.dashboard.source.Source` of a server.

    Args:
        engine: the server's database.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # What was read last, with what had been asked for.
        self._data: tuple[tuple[int, int, int | None, int | None], data_ledger.DataRead] | None = (
            None
        )

    def ranks(self, run: str) -> Sequence[int] | None:
        """See `Source`."""
        with reading(self._engine) as connection:
            row = runs.find_run(connection, run)
            if row is None:
                return None
            return list(runs.ranks_seen(connection, runs=[row.key]).get(row.key, ()))

    def similar(self, run: str) -> Sequence[str]:
        """See `Source`."""
        with reading(self._engine) as connection:
            return runs.similar(connection, run)

    def curves(self, run: str, metric: str, wanted: Selection) -> Sequence[Curve]:
        """See `Source`."""
        with reading(self._engine) as connection:
            found = series.read_series(
                connection,
                run=_key(connection, run),
                metric=metric,
                ranks=wanted.ranks,
                from_step=wanted.from_step,
                to_step=wanted.to_step,
                max_points=wanted.max_points,
                steady=wanted.steady,
            )
        return [
            # Raw points are their own extremes; only buckets have a range worth drawing.
            Curve(s.rank, s.steps, _wide(s.values))
            if s.low is s.values
            else Curve(s.rank, s.steps, _wide(s.values), _wide(s.low), _wide(s.high))
            for s in found
        ]

    def divergence(
        self, run: str, *, stage: str | None, from_step: int | None, to_step: int | None
    ) -> Divergence:
        """See `Source`."""
        with reading(self._engine) as connection:
            key = _key(connection, run)
            stages = comparisons.list_stages(connection, run=key)
            chosen = stage or _most_specific(stages)
            stretches: list[comparisons.Stretch] = []
            after = None
            while True:
                found, after = comparisons.list_comparisons(
                    connection,
                    run=key,
                    limit=_PAGE,
                    stage=chosen,
                    from_step=from_step,
                    to_step=to_step,
                    after=after,
                )
                stretches += found
                if after is None:
                    break
            stretches = _with_reference(connection, key, stretches)
        return _divergence(chosen, stages, stretches)

    def distances(self, run: str, *, stage: str | None, step: int | None) -> Distances | None:
        """See `Source`."""
        with reading(self._engine) as connection:
            key = _key(connection, run)
            chosen = stage or _most_specific(comparisons.list_stages(connection, run=key))
            parts = comparisons.sampled_fingerprints(
                connection, run=key, stage=chosen, to_step=step
            )
            if not parts:
                return None
            accused = _accused(connection, key)
        count, at = len(parts), parts[0].fingerprint.step
        seen: dict[bytes, int] = {}
        labels = np.array(
            [seen.setdefault(p.fingerprint.digests.tobytes(), len(seen)) for p in parts]
        )
        equal = labels[:, None] == labels[None, :]
        sketches = [p.fingerprint.sketches for p in parts if p.fingerprint.sketches is not None]
        if len(sketches) == count and len({s.shape for s in sketches}) == 1:
            distance = pairwise_distances(np.stack(sketches))
        else:
            distance = np.where(equal, 0.0, np.nan)
        return Distances(
            stage=chosen,
            step=at,
            ranks=tuple(p.rank for p in parts),
            distance=distance,
            equal=equal,
            suspects=_named_at(at, at, accused),
        )

    def layers(self, run: str, metric: str, table: str, wanted: Selection) -> LayerValues | None:
        """See `Source`."""
        with reading(self._engine) as connection:
            found = layers.read_family(
                connection,
                run=_key(connection, run),
                metric=metric,
                table=table,
                rank=min(wanted.ranks) if wanted.ranks else None,
                from_step=wanted.from_step,
                to_step=wanted.to_step,
            )
        return None if found is None else LayerValues(*found)

    def data(self, run: str, *, from_step: int | None, to_step: int | None) -> DataRead | None:
        """See `Source`."""
        with reading(self._engine) as connection:
            row = _row(connection, run)
            asked = (row.key, row.arrivals, from_step, to_step)
            # A page asks for its figures one after the other, and all are drawn from this.
            if (last := self._data) is not None and last[0] == asked:
                read = last[1]
            else:
                read = data_ledger.read_data(
                    connection, run=row.key, from_step=from_step, to_step=to_step
                )
                self._data = asked, read
        found = read.ledger
        return (
            None
            if found is None
            else DataRead(
                ranks=tuple(found.ranks.tolist()),
                steps=found.steps,
                of_ranks=found.of_ranks,
                of_steps=found.of_steps,
                shared=found.shared,
                passes=found.passes,
                by_samples=found.by_samples,
                complete=read.complete,
            )
        )

    def noise(
        self, run: str, *, from_step: int | None, to_step: int | None
    ) -> GradientNoise | None:
        """See `Source`."""
        with reading(self._engine) as connection:
            row = _row(connection, run)
            found = read_noise(
                connection,
                run=row.key,
                world_size=row.world_size,
                from_step=from_step,
                to_step=to_step,
            )
        if found is None or not np.isfinite(found.scale).any():
            return None
        return GradientNoise(found.steps, found.scale, found.batch, found.counted)

    def scaling(self, run: str) -> Sequence[Scaled]:
        """See `Source`."""
        with reading(self._engine) as connection:
            found = read_scaling(connection, _row(connection, run))
        return [Scaled(one.run, one.ranks, one.rate) for one in found]

    def metrics(self, run: str) -> Sequence[str]:
        """See `Source`."""
        with reading(self._engine) as connection:
            found = series.list_metrics(connection, run=_key(connection, run))
        return [metric.name for metric in found]

    def alert(self, run: str, alert: str) -> AlertFacts | None:
        """See `Source`."""
        with reading(self._engine) as connection:
            found = alerts.get_alert(connection, alert)
            if found is None or found[0] != _key(connection, run):
                return None
            key, about = found
            tensor = about.tensors[0] if about.tensors else ""
            families = layers.list_families(connection, run=key) if tensor else []
        return AlertFacts(
            about.kind,
            about.stage or "",
            tuple(about.ranks),
            about.first_step,
            about.last_step,
            about.evidence,
            tensor,
            tuple(family.metric for family in families if tensor in family.tensors),
        )

    def marks(self, run: str) -> Sequence[Mark]:
        """See `Source`."""
        with reading(self._engine) as connection:
            found, _ = alerts.list_alerts(connection, run=_key(connection, run), limit=_MAX_MARKS)
        return [Mark(a.id, a.severity, a.title, a.first_step, a.last_step) for a in found]

    def suspects(self, run: str) -> Sequence[int]:
        """See `Source`."""
        with reading(self._engine) as connection:
            found, _ = alerts.list_alerts(
                connection, run=_key(connection, run), limit=_MAX_MARKS, state="open"
            )
        return sorted({rank for a in found if a.severity != "info" for rank in a.ranks})


def _wide(values: Float64) -> Float64:
    """As figures compute with them; roll-ups come as they are stored, which may be float32."""
    return values.astype(np.float64, copy=False)


def _row(connection: Connection, run: str) -> Any:
    """A run that is there: the pages have asked for its ranks before."""
    row = runs.find_run(connection, run)
    if row is None:
        raise LookupError(f"there is no run {run!r}")
    return row


def _key(connection: Connection, run: str) -> int:
    return int(_row(connection, run).key)


def _most_specific(stages: Sequence[str]) -> str:
    """Parameters hold all that went wrong before; else the last link that was compared."""
    if "parameters" in stages or not stages:
        return "parameters"
    return ([stage for stage in stages if stage != "buffers"] or list(stages))[-1]


@dataclass(frozen=True, slots=True)
class _Accused:
    """Ranks that an alert names as those that differ, and from when to when."""

    first_step: int
    last_step: float
    ranks: frozenset[int]


def _accused(connection: Connection, key: int) -> list[_Accused]:
    """Whom the alerts of replicas that differ blame: the rank that began it, where that is known.

    Of ranks of which nothing shows which one is wrong the alert names all, and blames nobody.
    """
    found, _ = alerts.list_alerts(connection, run=key, limit=_MAX_MARKS, consequences=True)
    by_id = {alert.id: alert for alert in found}
    accused = []
    for alert in found:
        if not isinstance(alert.evidence.get("groups"), list):
            continue  # it is not about groups of ranks that hold the same
        root = by_id.get(alert.parent or "", alert)
        began = {*root.ranks} < {*alert.ranks} and root.ranks
        if began or alert.evidence.get("decided"):
            last = math.inf if alert.state == "open" else alert.last_step
            who = frozenset(root.ranks if began else alert.ranks)
            accused.append(_Accused(alert.first_step, last, who))
    return accused


def _named_at(step: int, until: int, accused: Sequence[_Accused]) -> tuple[int, ...]:
    there = (one.ranks for one in accused if one.first_step <= until and step <= one.last_step)
    return tuple(sorted(frozenset().union(*there)))


def _with_reference(
    connection: Connection, key: int, stretches: list[comparisons.Stretch]
) -> list[comparisons.Stretch]:
    """Where ranks differ without a majority: compared with those that no alert blames."""
    if all(s.comparison.decided for s in stretches):
        return stretches
    accused = _accused(connection, key)
    named = [_named_at(s.comparison.step, s.until_step, accused) for s in stretches]
    return [
        replace(s, comparison=without_suspects(s.comparison, of))
        for s, of in zip(stretches, named, strict=True)
    ]


def _divergence(
    stage: str, stages: tuple[str, ...], stretches: Sequence[comparisons.Stretch]
) -> Divergence:
    everyone = np.unique(np.concatenate([s.comparison.ranks for s in stretches] or [_NOBODY]))
    relative = np.zeros((len(everyone), len(stretches)))
    checked = np.zeros(relative.shape, np.bool_)
    for column, stretch in enumerate(stretches):
        rows = np.searchsorted(everyone, stretch.comparison.ranks)
        checked[rows, column] = True
        relative[rows, column] = _relative(stretch.comparison)
    return Divergence(
        stage=stage,
        stages=stages,
        ranks=tuple(int(r) for r in everyone),
        steps=np.array([s.comparison.step for s in stretches], np.int64),
        until=np.array([s.until_step for s in stretches], np.int64),
        counts=np.array([s.checked for s in stretches], np.int64),
        relative=relative,
        checked=checked,
        undecided=frozenset(s.comparison.step for s in stretches if not s.comparison.decided),
    )


_NOBODY = np.empty(0, np.int64)


def _relative(comparison: Comparison) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Relative distances, 0 for equal bits only, and NaN where the sketches cannot show."""
    differing = comparison.clusters != 0
    known = np.where(differing & ~(comparison.relative > 0), np.nan, comparison.relative)
    relative = np.where(differing, known, 0.0)
    if not comparison.decided and differing.any():
        # Nothing shows which side is wrong: the side that was taken as the reference differs, too.
        sizes = known[differing]
        relative[~differing] = np.nan if np.isnan(sizes).all() else np.nanmax(sizes)
    return relative
