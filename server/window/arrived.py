"""What came from the ranks, as storage reads it and alignment takes it: not aligned yet.

Shapes: N ranks, M series, S steps, T tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from rankscope.agent import wire
from rankscope.agent.wire import Array, Float64, Int64, TensorTable
from rankscope.server.window.aligned import Occurrence, RankLiveness


@dataclass(frozen=True, slots=True)
class Columns:
    """Some series of ranks that posted all of them at the same steps.

    Attributes:
        ranks: int64 [N], each once.
        arrivals: int64 [N]: of several values of a rank at one step the last to arrive stands.
        attempt: of all of the ranks.
        names: [M]; stages, for digests.
        steps: int64 [S], ascending.
        values: float64, uint64 for digests, [N, M, S].
    """

    ranks: Int64
    arrivals: Int64
    attempt: int
    names: tuple[str, ...]
    steps: Int64
    values: Array


@dataclass(frozen=True, slots=True)
class BatchesRead:
    """Batches that ranks have said they read; N of them, by rank and step.

    Attributes:
        ranks, steps: int64 [N].
        digests: uint64 [N]: equal ones are the same batch.
        samples: uint32 [N, SAMPLES_REPORTED]: which samples are in it, of some that its rank picked
            by their hashes; `NO_SAMPLE` where there is none.
        complete: whether these are all of the steps that were asked for; else the newest.
    """

    ranks: Int64 = field(default_factory=lambda: np.empty(0, np.int64))
    steps: Int64 = field(default_factory=lambda: np.empty(0, np.int64))
    digests: Array = field(default_factory=lambda: np.empty(0, np.uint64))
    samples: Array = field(default_factory=lambda: np.empty((0, wire.SAMPLES_REPORTED), np.uint32))
    complete: bool = True


@dataclass(frozen=True, slots=True)
class LayerPart:
    """What one rank posted of one metric of the tensors of a table.

    Attributes:
        name: the table's.
        steps: int64 [S], ascending.
        values: float64 [T, S].
    """

    rank: int
    attempt: int
    metric: str
    name: str
    table: TensorTable
    steps: Int64
    values: Float64


@dataclass(frozen=True, slots=True)
class LivenessPart:
    """The newest attempt of a rank; `session` is its process."""

    liveness: RankLiveness
    attempt: int
    through_step: int
    started_at: float
    session: str = ""


@dataclass(frozen=True, slots=True)
class FingerprintPart:
    """A fingerprint of one rank."""

    rank: int
    attempt: int
    fingerprint: wire.Fingerprint


class FingerprintKey(NamedTuple):
    """What a fingerprint is of."""

    step: int
    stage: str
    rank: int


# Model digests by link and rank: int64 [S], ascending, and uint64 [S].
Digests = dict[tuple[str, int], tuple[Int64, wire.UInt64]]


@dataclass(frozen=True, slots=True)
class NewData:
    """What came after `after`.

    Attributes:
        arrival: newest arrival read; ask on with it.
        more: whether there is more than the limit let through.
        tables: tensor tables by rank and name, of the newest attempts of the ranks whose tables are
            new; a rank's is all of them.
        configs: what ranks said of themselves at attach, of those where it is new.
        events: what ranks reported once, as far as detectors ask for it.
        layers: numbers of single tensors, of the first few ranks.
        start: number of the job's start that all of this is of, and the arrival that it began with.
    """

    arrival: int
    more: bool
    columns: tuple[Columns, ...]
    digests: tuple[Columns, ...]
    fingerprints: tuple[FingerprintPart, ...]
    liveness: tuple[LivenessPart, ...]
    tables: Mapping[int, Mapping[str, wire.TensorTable]]
    world_size: int
    config: Mapping[str, Any]
    configs: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    events: tuple[Occurrence, ...] = ()
    layers: tuple[LayerPart, ...] = ()
    start: tuple[int, int] = (0, 0)


def joined_fingerprint(fingerprints: Mapping[str, wire.Fingerprint]) -> wire.Fingerprint:
    """One fingerprint out of those of several tables, in the order of their names."""
    ordered = [fingerprints[name] for name in sorted(fingerprints)]
    if len(ordered) == 1:
        return ordered[0]
    sketches = [made.sketches for made in ordered if made.sketches is not None]
    whole = len(sketches) == len(ordered) and len({s.shape[1] for s in sketches}) == 1
    return replace(
        ordered[0],
        digests=np.concatenate([made.digests for made in ordered]),
        sketches=np.concatenate(sketches) if whole else None,
    )
