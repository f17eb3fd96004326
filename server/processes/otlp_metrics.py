"""Sends the state of running runs as metrics of OpenTelemetry, in a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from rankscope.server import otlp
from rankscope.server.health import Health, Kept, Sparingly
from rankscope.server.outbound_post import NotTaken
from rankscope.server.storage.database.engine import reading
from rankscope.server.storage.judgement import alerts, comparisons, leases
from rankscope.server.storage.reading import runs, series
from rankscope.server.window import Comparison

if TYPE_CHECKING:
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
        ExportMetricsServiceRequest,
    )

_logger = logging.getLogger(__name__)

# Those with the newest start. Each has up to four gauges and one a kind of alert that is open, of
# which there are rarely more than five: some 2,000 series, which is what backends take from a
# service without a thought (the SDK's own limit is 2,000 a metric).
_MOST_RUNS = 200
# Of the runs of all servers; beyond that not even the number of those left out is exact.
_MOST_LISTED = 10 * _MOST_RUNS
_STAGE = "parameters"


@dataclass(frozen=True, slots=True)
class RunState:
    """A running run as it now stands; None where it has no such value.

    Attributes:
        loss: mean over the ranks of their last losses.
        steps_per_second: by the mean of the ranks' last step times.
        divergence: largest relative distance of a rank's parameters, at the last comparison.
        open_alerts: how many roots are open, by kind and severity.
    """

    run: str
    project: str
    last_step: int
    loss: float | None
    steps_per_second: float | None
    divergence: float | None
    open_alerts: Mapping[tuple[str, str], int] = field(default_factory=dict)


class MetricsExporter:
    """Sends gauges now and then; a receiver that is away misses values, and holds up nobody.

    Args:
        endpoint: of OTLP over HTTP, to which `/v1/metrics` is added.
        server: name of the server whose runs are sent: of several on one database each sends those
            that it evaluates.
        health: is notified of what fails, and that the thread is there.
    """

    def __init__(
        self,
        engine: Engine,
        endpoint: str,
        *,
        server: str,
        health: Health | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._engine = engine
        self._endpoint = endpoint
        self._server = server
        self._health = health or Health()
        self._now = now
        self._interval = otlp.metric_interval()
        self._failures = Sparingly(600.0)
        self._stopping = threading.Event()
        self._thread = Kept("otlp", self._work, health=self._health, stopping=self._stopping)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends it; what is under way has some seconds to come to its end."""
        self._stopping.set()
        self._thread.join(5)

    def _work(self) -> None:
        while not self._stopping.wait(self._interval):
            try:
                self.send()
            except SQLAlchemyError:
                _logger.exception("metrics wait for the database")
            except NotTaken as why:
                self._health.count("otlp_failures")
                self._failures.warn(_logger, f"metrics are not taken: {why}")

    def send(self) -> None:
        """Sends what there is now, where there is anything.

        Raises:
            NotTaken: the receiver did not take it.
        """
        with reading(self._engine) as connection:
            states, left_out = running(connection, server=self._server)
        if states or left_out:
            otlp.send_metrics(self._endpoint, request(states, left_out=left_out, now=self._now()))


def running(connection: Connection, *, server: str) -> tuple[list[RunState], int]:
    """The running runs that a server evaluates, newest start first, and how many were left out."""
    rows, _ = runs.list_runs(connection, limit=_MOST_LISTED, state="running")
    holders = leases.holders(connection, runs=[row.key for row in rows])
    mine = [row for row in rows if holders.get(row.key) == server]
    found = []
    for row in mine[:_MOST_RUNS]:
        latest = series.latest_values(connection, run=row.key, metrics=("loss", "step_seconds"))
        seconds = _mean(latest, "step_seconds")
        newest = comparisons.newest(connection, run=row.key, stage=_STAGE)
        counts = Counter(
            (alert.kind, alert.severity)
            for alert in alerts.roots(connection, run=row.key, run_id=row.id)
            if alert.state == "open"
        )
        found.append(
            RunState(
                run=row.id,
                project=row.project,
                last_step=row.last_step,
                loss=_mean(latest, "loss"),
                steps_per_second=1 / seconds if seconds else None,
                divergence=None if newest is None else divergence_of(newest),
                open_alerts=counts,
            )
        )
    return found, len(mine) - len(found)


def divergence_of(comparison: Comparison) -> float:
    """The largest relative distance from the reference; 0 where all ranks hold the same bits.

    NaN where ranks differ and no sketch shows by how much.
    """
    differing = comparison.relative[comparison.clusters != 0]
    return float(np.fmax.reduce(differing)) if differing.size else 0.0


def _mean(latest: Mapping[tuple[int, str], float], metric: str) -> float | None:
    values = [value for (_, name), value in latest.items() if name == metric]
    return float(np.mean(values)) if values else None


def request(
    states: Sequence[RunState], *, left_out: int, now: float
) -> ExportMetricsServiceRequest:
    """Gauges of runs.

    Args:
        left_out: runs that are not among them.
        now: seconds since 1970.
    """
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
        ExportMetricsServiceRequest,
    )
    from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
    from opentelemetry.proto.metrics.v1 import metrics_pb2 as pb

    at = round(now * 1e9)

    def gauge(name: str, unit: str, what: str, points: list[pb.NumberDataPoint]) -> pb.Metric:
        return pb.Metric(
            name=f"rankscope.{name}",
            unit=unit,
            description=what,
            gauge=pb.Gauge(data_points=points),
        )

    def point(value: float, about: Mapping[str, str]) -> pb.NumberDataPoint:
        number = {"as_int": value} if isinstance(value, int) else {"as_double": value}
        return pb.NumberDataPoint(time_unix_nano=at, attributes=otlp.attributes(about), **number)

    def named(state: RunState) -> dict[str, str]:
        return {"rankscope.run": state.run, "rankscope.project": state.project}

    def of_runs(member: str) -> list[pb.NumberDataPoint]:
        return [
            point(value, named(state))
            for state in states
            if (value := getattr(state, member)) is not None
        ]

    alerts_open = [
        point(
            count,
            {
                **named(state),
                "rankscope.alert.kind": kind,
                "rankscope.alert.severity": severity,
            },
        )
        for state in states
        for (kind, severity), count in state.open_alerts.items()
    ]
    metrics = [
        gauge("run.last_step", "{step}", "Last step of the run.", of_runs("last_step")),
        gauge("run.loss", "1", "Last loss, mean over the ranks.", of_runs("loss")),
        gauge("run.step.rate", "{step}/s", "Steps per second.", of_runs("steps_per_second")),
        gauge(
            "run.divergence",
            "1",
            "Largest relative L2 distance of a rank's parameters from the others'.",
            of_runs("divergence"),
        ),
        gauge("alerts.open", "{alert}", "Open alerts that follow from no other.", alerts_open),
        gauge(
            "runs.left_out", "{run}", "Running runs that are not exported.", [point(left_out, {})]
        ),
    ]
    scope = pb.ScopeMetrics(
        scope=InstrumentationScope(name=otlp.SCOPE),
        metrics=[metric for metric in metrics if metric.gauge.data_points],
    )
    return ExportMetricsServiceRequest(
        resource_metrics=[pb.ResourceMetrics(resource=otlp.resource(), scope_metrics=[scope])]
    )
