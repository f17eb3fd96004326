"""Two runs side by side.

Written by docs/client_models.py (`make docs`). Do not edit by hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rankscope.client.models.runs import Run, Severity, TensorDifference, VerdictName


@dataclass(frozen=True)
class SettingDifference:
    """A key of the configurations, `a.b.0`, whose values differ; null: the run has no such key."""

    key: str
    values: list[Any]


@dataclass(frozen=True)
class ConfigurationDifference:
    """Keys that differ, the most relevant first, and how many are the same."""

    differing: list[SettingDifference]
    equal: int


@dataclass(frozen=True)
class RunVerdict:
    """The verdict of one of the runs."""

    run: str
    verdict: VerdictName
    so_far: VerdictName
    reasons: list[str]


@dataclass(frozen=True)
class CheckDifference:
    """A check that came to something else; null: the run does not list it."""

    name: str
    states: list[Literal["passed", "failed", "not_run"] | None]
    why: list[str | None]


@dataclass(frozen=True)
class KindAlerts:
    """Alerts of a kind in one of the runs: the gravest severity, the first step."""

    count: int
    open: int
    severity: Severity
    first_step: int
    ranks: list[int]


@dataclass(frozen=True)
class AlertDifference:
    """A kind that was found in at least one of the runs; null: not in this one."""

    kind: str
    runs: list[KindAlerts | None]


@dataclass(frozen=True)
class MetricDifference:
    """A series that both runs have, as the mean over their ranks at steps that both have.

    `final` are the last values of each run at its own end, `final_steps`. Over `steps` common steps
    from `first_step` to `last_step` (buckets of `width` steps, where there are too many), `at_last`
    are the values at the last one, `first_differing` is the first step at which the values are not
    the same, `mean_difference` the mean of the second's minus the first's, `largest_step` the step
    of the largest difference and `at_largest` the values there.
    """

    metric: str
    final: list[float | None]
    final_steps: list[int]
    steps: int
    width: int
    first_step: int | None
    last_step: int | None
    at_last: list[float] | None
    first_differing: int | None
    mean_difference: float
    largest_step: int | None
    at_largest: list[float] | None


@dataclass(frozen=True)
class FirstDifference:
    """Where the runs first differ: step, link of the chain, ranks.

    `after` is the last compared step before, at which all was equal, null where there was none.
    `tensor` is the first one of the model that differs, and `tensors` all of them, by the first
    fingerprints from there on that both runs have and that differ: those of `tensor_step` and
    `tensor_stage`. Null where there are none: then a digest of the whole model has shown it.
    """

    step: int
    after: int | None
    stage: str
    ranks: list[int]
    tensor: str | None
    tensor_step: int | None
    tensor_stage: str | None
    tensors: list[TensorDifference]


@dataclass(frozen=True)
class BitComparison:
    """Whether the runs hold the same bits, rank by rank, by the digests that agents recorded.

    `same_seed` is null where neither configuration names a seed. Compared were `steps` steps, from
    `first_step` to `last_step`, on `ranks`; `summary` says in a sentence what came of it, and
    `not_compared` what was not compared, and why.
    """

    state: Literal["equal", "differ", "not_compared"]
    summary: str
    same_seed: bool | None
    seeds: list[dict[str, Any]]
    first: FirstDifference | None
    ranks: list[int]
    steps: int
    first_step: int | None
    last_step: int | None
    not_compared: list[str]


@dataclass(frozen=True)
class Compared:
    """Two runs side by side."""

    runs: list[Run]
    configuration: ConfigurationDifference
    verdicts: list[RunVerdict]
    checks: list[CheckDifference]
    alerts: list[AlertDifference]
    metrics: list[MetricDifference]
    bits: BitComparison
