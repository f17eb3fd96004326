"""The public JSON, apart from wire classes and tables: three shapes, three owners.

Of runs, series and verdicts, and what all of it is made of; of alerts, notifications, detectors and
comparisons it is in the `*_models.py` beside this file.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, PlainSerializer, WithJsonSchema

from rankscope.agent.wire import number_to_json

Item = TypeVar("Item")

# A float, or one of the strings "NaN", "Infinity", "-Infinity": JSON has no such numbers.
Number = Annotated[
    float,
    PlainSerializer(number_to_json, return_type=float | str),
    WithJsonSchema(
        {"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]},
        mode="serialization",
    ),
]

Severity = Literal["info", "warning", "critical"]
RunState = Literal["running", "finished", "failed", "lost"]
Baseline = Literal["passed", "marked", "unmarked"]
VerdictName = Literal["pass", "fail", "pending"]


def time_of(seconds: float) -> datetime:
    """Seconds since 1970 as a time that is written in RFC 3339, UTC."""
    return datetime.fromtimestamp(seconds, UTC)


class Model(BaseModel):
    """Base: unknown members are refused in what clients send."""

    model_config = ConfigDict(extra="forbid")


class Items(BaseModel, Generic[Item]):
    """A page of a list."""

    items: list[Item]
    next_cursor: str | None = None


class Accepted(BaseModel):
    """Answer to a batch."""

    accepted: int
    duplicate: bool
    dense_until: int | None
    hello_wanted: bool


class OpenAlert(BaseModel):
    """An alert in short."""

    id: str
    kind: str
    severity: Severity
    title: str


class Run(BaseModel):
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
    baseline: Baseline | None
    open_alerts: int
    worst_alert: OpenAlert | None
    silenced_alert: OpenAlert | None


class TagChanges(Model):
    """Which tags a run gets, and which are taken off it."""

    add: list[str] = []
    remove: list[str] = []


class Tags(BaseModel):
    """The tags that a run has, by name."""

    tags: list[str]


class Project(BaseModel):
    """A project and how many runs it has."""

    name: str
    runs: int


class RankStatus(BaseModel):
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
    loss: Number | None
    step_seconds: Number | None


class AgentEvent(BaseModel):
    """Something that an agent said once."""

    rank: int
    step: int
    at: datetime
    kind: str
    text: str
    data: dict[str, Any]


class Sampling(BaseModel):
    """What the agent of a rank samples how often (steps, by tier), and what share that costs.

    `sampled` is the share of the steps so far that were sampled in full.
    """

    rank: int
    overhead: Number | None
    sampled: Number | None
    intervals: dict[str, int]


class AgentFault(BaseModel):
    """What agents could not do; reported once a rank, and here once for all ranks that say so."""

    text: str
    ranks: list[int]
    step: int
    at: datetime


class Agent(BaseModel):
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


class RunDetail(Run):
    """A run with its ranks."""

    rank_status: list[RankStatus]
    events: list[AgentEvent]
    evaluated_step: int
    agent: Agent


class Metric(BaseModel):
    """A series that a run has."""

    name: str
    ranks: list[int]
    first_step: int
    last_step: int


class MetricFamily(BaseModel):
    """One metric of the tensors of a table: each a series, `<metric>/<tensor>`."""

    metric: str
    table: str
    tensors: list[str]
    ranks: list[int]
    first_step: int
    last_step: int


class Metrics(Items[Metric]):
    """The series of a run; those of tensors by family, too."""

    families: list[MetricFamily]


class RankSeries(BaseModel):
    """One metric of one rank; `values` are means where there are buckets.

    `width` is that of the buckets in steps, and 1 where these are the raw points.
    """

    rank: int
    width: int
    steps: list[int]
    values: list[Number]
    min: list[Number]
    max: list[Number]


class Series(BaseModel):
    """One metric of some ranks."""

    metric: str
    series: list[RankSeries]


class TensorDifference(BaseModel):
    """How far one tensor differs."""

    name: str
    shape: list[int]
    ranks: list[int]
    distance: Number
    relative: Number
    buckets: int
    table: str


class Comparison(BaseModel):
    """One link of the chain, as it stood at each compared step from `step` to `until_step`."""

    step: int
    until_step: int
    count: int
    stage: str
    equal: bool
    decided: bool
    ranks: list[int]
    clusters: list[list[int]]
    distance: list[Number]
    relative: list[Number]
    first_tensor: TensorDifference | None
    tensors: list[TensorDifference]
    missing: list[int]


class Matrix(BaseModel):
    """L2 distance of any two ranks at a step."""

    step: int
    stage: str
    ranks: list[int]
    distance: list[list[Number]]


class Divergence(Items[Comparison]):
    """Comparisons, and the distances where they were asked for."""

    matrix: Matrix | None = None


class VerdictSettings(BaseModel):
    """What the run is judged by, as far as it is not what detectors declare."""

    profile: str | None
    off: list[str]
    thresholds: dict[str, dict[str, int | float]]


class CheckLine(BaseModel):
    """Whether something was checked, and what came of it."""

    name: str
    state: Literal["passed", "failed", "not_run"]
    why: str


class Requirement(BaseModel):
    """A kind that has to be judged for a pass; `by` is the one that was, itself or another."""

    name: str
    state: Literal["judged", "not_judged", "not_applicable"]
    by: str | None
    why: str


class Verdict(BaseModel):
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
    sampled: Number | None
    not_seen: str | None
    settings: VerdictSettings
    first_start: int
    start: int
    resumed_step: int | None
