"""Runs, their series and their verdicts.

Written by docs/client_models.py (`make docs`). Do not edit by hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

Severity = Literal["info", "warning", "critical"]
RunState = Literal["running", "finished", "failed", "lost"]
VerdictName = Literal["pass", "fail", "pending"]


@dataclass(frozen=True)
class Accepted:
    """Answer to a batch."""

    accepted: int
    duplicate: bool
    dense_until: int | None
    hello_wanted: bool


@dataclass(frozen=True)
class Project:
    """A project and how many runs it has."""

    name: str
    runs: int


@dataclass(frozen=True)
class OpenAlert:
    """An alert in short."""

    id: str
    kind: str
    severity: Severity
    title: str


@dataclass(frozen=True)
class Run:
    """A run, as lists show it.

    `baseline` is whether others of the project are compared with it: `passed` (it is one of the
    newest that did), `marked` or `unmarked` (by a person); null: they are not.
    `worst_alert` is the gravest open one that is not silenced, `silenced_alert` the gravest of
    those that are.
    """

    id: str
    project: str
    name: str
    state: RunState
    world_size: int
    ranks: list[int]
    started_at: datetime
    last_seen_at: datetime
    last_step: int
    config: dict[str, Any]
    tags: list[str]
    verdict: VerdictName
    baseline: Literal["passed", "marked", "unmarked"] | None
    open_alerts: int
    worst_alert: OpenAlert | None
    silenced_alert: OpenAlert | None


@dataclass(frozen=True)
class RankStatus:
    """One rank as it was last heard of."""

    rank: int
    attempt: int
    host: str
    pid: int
    local_rank: int
    launcher: str
    wrapper: str
    state: str
    phase: str
    error: str
    last_step: int
    first_seen_at: datetime
    last_seen_at: datetime
    heartbeat_seconds: float
    dropped: dict[str, int]
    loss: float | None
    step_seconds: float | None


@dataclass(frozen=True)
class AgentEvent:
    """Something that an agent said once."""

    rank: int
    step: int
    at: datetime
    kind: str
    text: str
    data: dict[str, Any]


@dataclass(frozen=True)
class Sampling:
    """What the agent of a rank samples how often (steps, by tier), and what share that costs.

    `sampled` is the share of the steps so far that were sampled in full.
    """

    rank: int
    overhead: float | None
    sampled: float | None
    intervals: dict[str, int]


@dataclass(frozen=True)
class AgentFault:
    """What agents could not do; reported once a rank, and here once for all ranks that say so."""

    text: str
    ranks: list[int]
    step: int
    at: datetime


@dataclass(frozen=True)
class Agent:
    """What the agents of a run say of themselves, and what was not examined.

    `dropped` was given up by the agents, `late` came after its step had been evaluated, and for
    `given_up` there was no room. Up to `dense_until` ranks sample densely, as the server asked.
    """

    sampling: list[Sampling]
    dense_until: int | None
    faults: list[AgentFault]
    dropped: dict[str, int]
    late: int
    given_up: int


@dataclass(frozen=True)
class RunDetail(Run):
    """A run with its ranks."""

    rank_status: list[RankStatus]
    events: list[AgentEvent]
    evaluated_step: int
    agent: Agent


@dataclass(frozen=True)
class Tags:
    """The tags that a run has, by name."""

    tags: list[str]


@dataclass(frozen=True)
class Metric:
    """A series that a run has."""

    name: str
    ranks: list[int]
    first_step: int
    last_step: int


@dataclass(frozen=True)
class MetricFamily:
    """One metric of the tensors of a table: each a series, `<metric>/<tensor>`."""

    metric: str
    table: str
    tensors: list[str]
    ranks: list[int]
    first_step: int
    last_step: int


@dataclass(frozen=True)
class RankSeries:
    """One metric of one rank; `values` are means where there are buckets.

    `width` is that of the buckets in steps, and 1 where these are the raw points.
    """

    rank: int
    width: int
    steps: list[int]
    values: list[float]
    min: list[float]
    max: list[float]


@dataclass(frozen=True)
class Series:
    """One metric of some ranks."""

    metric: str
    series: list[RankSeries]


@dataclass(frozen=True)
class TensorDifference:
    """How far one tensor differs."""

    name: str
    shape: list[int]
    ranks: list[int]
    distance: float
    relative: float
    buckets: int
    table: str


@dataclass(frozen=True)
class Comparison:
    """One link of the chain, as it stood at each compared step from `step` to `until_step`."""

    step: int
    until_step: int
    count: int
    stage: str
    equal: bool
    decided: bool
    ranks: list[int]
    clusters: list[list[int]]
    distance: list[float]
    relative: list[float]
    first_tensor: TensorDifference | None
    tensors: list[TensorDifference]
    missing: list[int]


@dataclass(frozen=True)
class Matrix:
    """L2 distance of any two ranks at a step."""

    step: int
    stage: str
    ranks: list[int]
    distance: list[list[float]]


@dataclass(frozen=True)
class CheckLine:
    """Whether something was checked, and what came of it."""

    name: str
    state: Literal["passed", "failed", "not_run"]
    why: str


@dataclass(frozen=True)
class Requirement:
    """A kind that has to be judged for a pass; `by` is the one that was, itself or another."""

    name: str
    state: Literal["judged", "not_judged", "not_applicable"]
    by: str | None
    why: str


@dataclass(frozen=True)
class VerdictSettings:
    """What the run is judged by, as far as it is not what detectors declare."""

    profile: str | None
    off: list[str]
    thresholds: dict[str, dict[str, int | float]]


@dataclass(frozen=True)
class Verdict:
    """Pass, fail or pending, and why; `so_far` is what it would be if the run ended now.

    What was not checked is in `checks` as `not_run`; `sampled` is the share of the steps that were
    sampled in full on the rank where the fewest were, null where no agent says so, and `not_seen`
    what could not have been seen at the others, as a sentence. `evaluated` is false while data that
    the server has wait for its detectors. It is the verdict of the job's last launch: of its starts
    from `first_start`, mostly the last one itself, to `start`, its last; where that went on from a
    checkpoint, alerts that were over before `resumed_step` do not count.
    """

    verdict: VerdictName
    so_far: VerdictName
    reasons: list[str]
    checks: list[CheckLine]
    required: list[Requirement]
    state: RunState
    evaluated: bool
    sampled: float | None
    not_seen: str | None
    settings: VerdictSettings
    first_start: int
    start: int
    resumed_step: int | None
