"""A batch: everything that one post of one rank can say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]
# A step, and what is said of it: name -> number.
Row = tuple[int, Mapping[str, Any]]


class Column(NamedTuple):
    """One series' points of one rank.

    Attributes:
        steps: int64 [n], in any order.
        values: float64 [n] (NaN and infinities are data), or uint64 [n] for digests.
    """

    steps: Int64
    values: Array


@dataclass(frozen=True, slots=True)
class TensorTable:
    """The tensors that a fingerprint of a stage describes, in its order.

    Attributes:
        names: the model's own names, [T].
        shapes: shape of each tensor as this rank holds it, [T].
        dtypes: for example `float32`, [T].
        shards: which part of the logical tensor this rank holds, [T]; ranks with the same name and
            the same shard hold replicas of one thing. Empty text: the whole tensor. One that begins
            with `RANK_LOCAL`, followed by the rank: a copy that this rank trains for itself, beside
            which it is a replica of the others.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    shards: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """What holds for the whole life of one process: sent with its first batch.

    It may come again when there is more to say. What it says then replaces what it said before,
    except that tables it does not name any more stay.

    Attributes:
        started_at: seconds since 1970, the rank's own clock; NaN where it is not said.
        tables: tensor tables by name; a fingerprint names the one it describes.
        config: facts and options, JSON-able, that a person wants to see beside the run.
        heartbeat_seconds: how often this process promises to be heard of.
        boot: of the machine, since which `steady` counts; empty where it is not said.
        steady: seconds since the machine's boot at `started_at`, by a clock that nobody sets.
    """

    started_at: float
    host: str = ""
    pid: int = 0
    local_rank: int = 0
    launcher: str = ""
    wrapper: str = ""
    heartbeat_seconds: float = 5.0
    tables: Mapping[str, TensorTable] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    boot: str = ""
    steady: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Fingerprint, tensor by tensor, of one link of the chain at one step.

    Attributes:
        stage: one of `STAGES`.
        table: name of the tensor table in `Hello.tables`.
        digests: uint64 [T]; equal digests mean equal bits.
        sketches: float64 [T, K] or None: linear, so that the distance of two ranks is that of their
            sketches.
    """

    step: int
    stage: str
    table: str
    digests: UInt64
    sketches: Float64 | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """One number for each tensor of a table at one step: a norm, a ratio, a share, a count.

    Attributes:
        table: name of the tensor table in `Hello.tables`.
        metric: for example `grad_norm`; a tensor's series is called `<metric>/<tensor>`.
        values: float64 [T]; NaN where there is none.
    """

    step: int
    table: str
    metric: str
    values: Float64


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened once: a fault of the agent itself, a mark of the user, a phase.

    Attributes:
        kind: `agent.fault`, `agent.note`, `mark`, ...
    """

    step: int
    kind: str
    text: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One post of one rank.

    `(run, rank, session, seq)` identifies it: the server stores it once, however often it comes.

    Attributes:
        session: random text of this process, so that a restarted rank does not repeat the
            sequence numbers of the one before it. Several of one process are the same up to the
            last dot, and differ after it.
        attempt: how often the launcher has restarted the job, where it says so.
        seq: 0, 1, 2, ... without gaps.
        through_step: last step about which this rank has, with this batch and those before it,
            said everything it will say; -1 before the first.
        phase: where the training thread was last seen: `start`, `forward`, `backward`, `step`,
            `evaluation`, `idle`.
        columns: metric name -> points.
        words: stage, or another name of what was digested (`rng/torch`) -> one digest a step.
        rows, word_rows: more of both, as they were collected; whoever reads a batch finds them in
            `columns` and `words`, where the later of two values of a step stands. Of one series
            there is nothing in both.
        dropped: points and fingerprints given up since the start, by reason; never silent.
    """

    run: str
    rank: int
    seq: int
    session: str = ""
    project: str = "default"
    attempt: int | None = None
    world_size: int = 1
    sent_at: float = 0.0
    through_step: int = -1
    state: str = "running"
    phase: str = ""
    error: str = ""
    hello: Hello | None = None
    columns: Mapping[str, Column] = field(default_factory=dict)
    words: Mapping[str, Column] = field(default_factory=dict)
    rows: tuple[Row, ...] = ()
    word_rows: tuple[Row, ...] = ()
    prints: tuple[Fingerprint, ...] = ()
    layers: tuple[Layers, ...] = ()
    events: tuple[Event, ...] = ()
    dropped: Mapping[str, int] = field(default_factory=dict)

    @property
    def points(self) -> int:
        """Number of points that the batch carries."""
        columns = sum(len(c.steps) for c in (*self.columns.values(), *self.words.values()))
        rows = sum(len(values) for _, values in (*self.rows, *self.word_rows))
        return columns + rows + sum(len(made.values) for made in self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The server's answer to a batch.

    Attributes:
        accepted: number of points and fingerprints stored now; 0 for a batch that was already
            there.
        dense_until: sample everything at every step up to this one, where the server requests dense
            sampling; None for no request.
        hello_wanted: the server does not know this process (its database is a new one): say hello
            again with the next batch.
    """

    accepted: int
    duplicate: bool = False
    dense_until: int | None = None
    hello_wanted: bool = False
