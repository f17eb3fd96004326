"""Throughput of runs of one training with different numbers of ranks, out of the database."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from sqlalchemy import Connection

from rankscope.agent.wire import Float64
from rankscope.server.storage.reading import runs, series

_METRIC = "samples_per_second"
# What has to be the same for a rank to have the same to do: the model by its layout, in which
# precision and on which device it computes, by how many threads. A run that does not say which
# model it trains is compared with none.
_MODEL = "parameters_digest"
_SAME = (_MODEL, "dtypes", "precision", "device_name", "threads")
# Points of a rank, each a mean of some steps where there are more: what their median needs.
_POINTS = 200
# Of fewer points the median is that of the warm-up.
_FEWEST = 5
# Different numbers of ranks that are shown, the largest ones: more than are tried in practice.
_MOST = 8


@dataclass(frozen=True, slots=True)
class Throughput:
    """What the ranks of a run got done.

    Attributes:
        run: its id.
        ranks: how many it has.
        rate: samples a second and rank: the mean over the ranks of each one's median.
    """

    run: str
    ranks: int
    rate: float


def read_scaling(connection: Connection, row: Any) -> list[Throughput]:
    """The run and, of the same training with fewer ranks, the newest run of each number of ranks.

    Args:
        row: of the run.

    Returns:
        By number of ranks, ascending, the run itself last; empty where there is no other one whose
        throughput is known.
    """
    own = _throughput(connection, row.id, row.key, row.world_size)
    if own is None or not row.config.get(_MODEL):
        return []
    found: dict[int, Throughput] = {}
    for other in runs.list_smaller(connection, row):
        if other.world_size in found or not _alike(row.config, other.config):
            continue
        one = _throughput(connection, other.id, other.key, other.world_size)
        if one is not None:
            found[other.world_size] = one
    fewer = [found[ranks] for ranks in sorted(found)][-_MOST:]
    return [*fewer, own] if fewer else []


def _alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(one.get(name) == other.get(name) for name in _SAME)


def _throughput(connection: Connection, name: str, key: int, ranks: int) -> Throughput | None:
    """None where a rank has not reported it, or hardly any of it."""
    found = series.read_series(connection, run=key, metric=_METRIC, max_points=_POINTS)
    rates = [_median(one.values) for one in found]
    if len(rates) < ranks or not np.isfinite(rates).all():
        return None
    return Throughput(name, ranks, float(np.mean(rates)))


def _median(values: Float64) -> float:
    there = values[np.isfinite(values)]
    return float(np.median(there)) if len(there) >= _FEWEST else np.nan
