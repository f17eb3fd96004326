"""The client: a method for each route, with what it returns as dataclasses."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, Self

from rankscope.client.http import Body, Http
from rankscope.client.models import (
    Accepted,
    Alert,
    AlertContext,
    AlertDetail,
    AuditEntry,
    Compared,
    Comparison,
    Data,
    Delivery,
    Detectors,
    DetectorSettings,
    Fleet,
    Matrix,
    Metric,
    MetricFamily,
    Notification,
    NotificationTarget,
    Project,
    ProjectDetectors,
    Run,
    RunDetail,
    RunState,
    Series,
    Severity,
    Silence,
    Tags,
    Verdict,
)
from rankscope.client.questions import API, Questions, body_of, fields, given, path_of

AlertState = Literal["open", "resolved"]

DEFAULT_SERVER = "http://127.0.0.1:8642"
_MSGPACK = "application/msgpack"
# The server sends something every 15 s, at least a comment: two of these are missing then.
_QUIET_S = 45.0


@dataclass(frozen=True)
class RunEvent:
    """Something new about a run: `points`, `alert` or `state`, and what is so now."""

    name: str
    data: dict[str, Any]


class Client:
    """Asks one server.

    Lists are iterators that fetch page after page as they are read. A method whose answer is an
    error raises: `NotFound`, `NotAllowed`, `TryLater`, or the `Problem` that these are; where there
    is no answer, `Unreachable`; where it is another service's, `NotRankscope`. All of them are
    `ClientError`. It may be used by several threads at once.

    Args:
        server: its URL; else that of `RANKSCOPE_SERVER`, else one on this machine.
        token: bearer token; else that of `RANKSCOPE_TOKEN`.
        timeout: seconds of silence after which a request is given up.
        retries: how often a request is sent again that the server was too busy for (429, 503), when
            the server says; `TryLater` is raised at once where it says more than a minute.

    Raises:
        ValueError: the token cannot be one.
    """

    def __init__(
        self,
        server: str | None = None,
        token: str | None = None,
        *,
        timeout: float = 30.0,
        retries: int = 3,
    ) -> None:
        address = server or os.environ.get("RANKSCOPE_SERVER") or DEFAULT_SERVER
        secret = (token or os.environ.get("RANKSCOPE_TOKEN") or "").strip()
        if not secret.isascii() or not secret.isprintable() or " " in secret:
            # Which it is stays unsaid.
            raise ValueError("a token is ASCII text without spaces; copy it again as it was made")
        self._http = Http(address, secret, timeout=timeout, retries=retries)
        self._ask = Questions(self._http)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections that were kept open."""
        self._http.close()

    # Runs

    def runs(
        self,
        *,
        project: str | None = None,
        state: RunState | None = None,
        baseline: bool | None = None,
        q: str | None = None,
        tags: Sequence[str] = (),
        order: Literal["newest", "attention"] = "newest",
        sort: str | None = None,
    ) -> Iterator[Run]:
        """Runs, newest first.

        Args:
            project: of this project alone.
            state: in this state alone.
            baseline: those that others of their project are compared with, or those that are not.
            q: text that id or project contains.
            tags: those that have all of these.
            order: `attention`: running ones first, then those that failed or were lost.
            sort: a column instead, with `-` the largest first; a `Problem` says which there are.
        """
        query = fields(project=project, state=state, baseline=baseline, q=q, tag=tags)
        return self._ask.items(Run, "/runs", [*query, *fields(order=order, sort=sort)])

    def run(self, run: str) -> RunDetail:
        """A run with its ranks and what their agents said."""
        return self._ask.one(RunDetail, "GET", path_of("runs", run))

    def delete_run(self, run: str, *, timeout: float = 600.0) -> None:
        """Deletes a run that has ended with all that is its own; asked for again, it goes on."""
        self._http.json("DELETE", API + path_of("runs", run), timeout=timeout)

    def baseline(self, run: str, *, marked: bool = True) -> None:
        """Marks a run as one that others of its project are compared with, or takes it away."""
        self._http.json("PUT" if marked else "DELETE", API + path_of("runs", run) + "/baseline")

    def change_tags(self, run: str, *, add: Sequence[str] = (), remove: Sequence[str] = ()) -> Tags:
        """Gives a run tags (up to 64 characters each, without commas), and takes others off it."""
        body = body_of({"add": list(add), "remove": list(remove)})
        return self._ask.one(Tags, "PATCH", path_of("runs", run) + "/tags", body=body)

    def projects(self) -> Iterator[Project]:
        """Projects that have runs, by name."""
        return self._ask.items(Project, "/projects")

    def compare(self, a: str, b: str) -> Compared:
        """Configuration, verdicts, alerts, metrics, and the first step and tensor that differ."""
        return self._ask.one(Compared, "GET", "/compare", fields(runs=[a, b]))

    def events(self, run: str) -> Iterator[RunEvent]:
        """What is new about a run, as it comes; first its state.

        It ends when the server ends it, for example to restart, and never by itself when the run
        ends: its alerts may still change.
        """
        name, data = "", ""
        for line in self._http.lines(API + path_of("runs", run) + "/stream", timeout=_QUIET_S):
            field, _, value = line.partition(":")
            if field == "event":
                name = value.strip()
            elif field == "data":
                data += value.strip()
            elif not line and data:
                yield RunEvent(name, json.loads(data))
                name, data = "", ""

    # Series

    def metrics(self, run: str, *, tensors: bool = True) -> Iterator[Metric]:
        """Series that a run has, with their ranks and steps.

        Args:
            run: its id.
            tensors: with those of each tensor, `<metric>/<tensor>`.
        """
        return self._ask.items(Metric, path_of("runs", run) + "/metrics", fields(tensors=tensors))

    def metric_families(self, run: str) -> list[MetricFamily]:
        """The series of tensors by metric: which tensors there are of each."""
        path = path_of("runs", run) + "/metrics"
        answer = self._http.json("GET", API + path, fields(tensors=False, limit=1))
        found: list[MetricFamily] = self._ask.read(list[MetricFamily], answer.get("families"), path)
        return found

    def series(
        self,
        run: str,
        metric: str = "loss",
        *,
        ranks: Sequence[int] | None = None,
        from_step: int | None = None,
        to_step: int | None = None,
        max_points: int | None = None,
    ) -> Series:
        """One metric of some ranks: raw points where they fit, else buckets that hide no spike.

        Args:
            run: its id.
            metric: as `metrics` names it.
            ranks: all where none are given.
            from_step, to_step: first and last step.
            max_points: of each rank at most; the server has its own default.
        """
        query = fields(
            metric=metric, rank=ranks, from_step=from_step, to_step=to_step, max_points=max_points
        )
        return self._ask.one(Series, "GET", path_of("runs", run) + "/series", query)

    def divergence(
        self,
        run: str,
        *,
        from_step: int | None = None,
        to_step: int | None = None,
        stage: str | None = None,
    ) -> Iterator[Comparison]:
        """How the ranks compared at each checked step; equal neighbours are reported once."""
        query = fields(from_step=from_step, to_step=to_step, stage=stage)
        return self._ask.items(Comparison, path_of("runs", run) + "/divergence", query)

    def distances(self, run: str, *, stage: str | None = None) -> Matrix | None:
        """Distances of all pairs of ranks at the last sampled step, None where there is none."""
        path = path_of("runs", run) + "/divergence"
        query = fields(matrix=True, stage=stage, limit=1)
        answer = self._http.json("GET", API + path, query)
        matrix: Matrix | None = self._ask.read(Matrix | None, answer.get("matrix"), path)
        return matrix

    def ingest(self, batch: Mapping[str, Any] | bytes) -> Accepted:
        """Sends a batch, as an agent does; one that is sent twice is stored once.

        Args:
            batch: as JSON has it, or encoded with msgpack.
        """
        body = Body(batch, _MSGPACK) if isinstance(batch, bytes) else body_of(batch)
        return self._ask.one(Accepted, "POST", "/ingest", body=body)

    # Alerts

    def alerts(
        self,
        *,
        project: str | None = None,
        state: AlertState | None = None,
        severity: Severity | None = None,
        kind: str | None = None,
        rank: int | None = None,
        q: str | None = None,
        consequences: bool = False,
    ) -> Iterator[Alert]:
        """Alerts of all runs, newest first.

        Args:
            project: of runs of this project alone.
            state, severity: of these alone.
            kind: a kind, or a pattern such as `desync.*`.
            rank: a suspect rank.
            q: words, each in the kind, the title, the run or the name of a tensor.
            consequences: with those that follow from others, not only root causes.
        """
        whose = fields(project=project, state=state, severity=severity, kind=kind, rank=rank)
        return self._ask.items(Alert, "/alerts", [*whose, *fields(q=q, consequences=consequences)])

    def run_alerts(
        self,
        run: str,
        *,
        state: AlertState | None = None,
        severity: Severity | None = None,
        kind: str | None = None,
        rank: int | None = None,
        q: str | None = None,
        consequences: bool = False,
        beside: bool = False,
    ) -> Iterator[Alert]:
        """Alerts of a run, newest first.

        Args:
            run: its id.
            state, severity, kind, rank, q, consequences: as of `alerts`.
            beside: with those of further models that the run's processes train, each in a run of
                its own (`RUN.2`).
        """
        query = fields(
            state=state,
            severity=severity,
            kind=kind,
            rank=rank,
            q=q,
            consequences=consequences,
            beside=beside,
        )
        return self._ask.items(Alert, path_of("runs", run) + "/alerts", query)

    def alert(self, alert: str) -> AlertDetail:
        """One alert with all its evidence, what happened to it, and who was told of it."""
        return self._ask.one(AlertDetail, "GET", path_of("alerts", alert))

    def alert_context(self, alert: str) -> AlertContext:
        """Last console lines of the ranks, what was not committed, the run's settings."""
        return self._ask.one(AlertContext, "GET", path_of("alerts", alert) + "/context")

    def acknowledge(
        self,
        alert: str,
        *,
        name: str = "",
        reason: str = "",
        until: datetime | None = None,
        seconds: float | None = None,
    ) -> AlertDetail:
        """Records for everybody that somebody has seen the alert; the verdict stays as it is.

        Args:
            alert: its id.
            name: who says so.
            reason: why.
            until: when it ends; has a time zone.
            seconds: after how many seconds it ends; neither: never.
        """
        body = body_of(given(name=name, reason=reason, until=until, seconds=seconds))
        return self._ask.one(
            AlertDetail, "POST", path_of("alerts", alert) + "/acknowledge", body=body
        )

    def take_back_acknowledgement(self, alert: str) -> AlertDetail:
        """Takes an acknowledgement back."""
        return self._ask.one(AlertDetail, "DELETE", path_of("alerts", alert) + "/acknowledge")

    def silences(self, run: str) -> Iterator[Silence]:
        """The silences that hold in a run now, oldest first."""
        return self._ask.items(Silence, path_of("runs", run) + "/silences", paged=False)

    def silence(
        self,
        run: str,
        kind: str,
        *,
        name: str = "",
        reason: str = "",
        until: datetime | None = None,
        seconds: float | None = None,
    ) -> Silence:
        """Takes a kind out of the verdict of a run, for ever, until a time or for some seconds.

        Args:
            run: its id.
            kind: of alerts.
            name, reason, until, seconds: as of `acknowledge`.
        """
        body = body_of(given(kind=kind, name=name, reason=reason, until=until, seconds=seconds))
        return self._ask.one(Silence, "POST", path_of("runs", run) + "/silences", body=body)

    def end_silence(self, silence: str) -> None:
        """Ends a silence: what it kept out of the verdict counts again."""
        self._http.json("DELETE", API + path_of("silences", silence))

    # Judgement

    def verdict(
        self,
        run: str,
        *,
        fail_on: Literal["warning", "critical"] = "warning",
        kinds: Sequence[str] = (),
        ignore: Sequence[str] = (),
    ) -> Verdict:
        """Whether a run is healthy, with every check that was or was not made.

        Args:
            run: its id.
            fail_on: lowest severity that fails.
            kinds: judge by these kinds of alerts alone, which are then required.
            ignore: kinds that do not count.
        """
        query = fields(fail_on=fail_on, kind=kinds, ignore=ignore)
        return self._ask.one(Verdict, "GET", path_of("runs", run) + "/verdict", query)

    def data(self, run: str, *, from_step: int | None = None, to_step: int | None = None) -> Data:
        """What each rank read: batch sizes, samples that came again, samples that two ranks had.

        Args:
            run: its id.
            from_step, to_step: first and last step.
        """
        query = fields(from_step=from_step, to_step=to_step)
        return self._ask.one(Data, "GET", path_of("runs", run) + "/data", query)

    def audit(self, *, act: str | None = None) -> Iterator[AuditEntry]:
        """Administrative acts, newest first; with tokens, for those of the scope `admin` alone.

        Args:
            act: of this sort alone, `token.create` for example.
        """
        return self._ask.items(AuditEntry, "/audit", fields(act=act))

    def fleet(self, *, project: str | None = None, days: float = 30.0) -> Fleet:
        """Alerts by kind and by host, those with most open ones first."""
        return self._ask.one(Fleet, "GET", "/fleet", fields(project=project, days=days))

    def detectors(self) -> Detectors:
        """All detectors of the server with their thresholds, and the profiles of losses."""
        return self._ask.one(Detectors, "GET", "/detectors")

    def run_detectors(self, run: str) -> DetectorSettings:
        """What a run is judged by, from its first step to its last."""
        return self._ask.one(DetectorSettings, "GET", path_of("runs", run) + "/detectors")

    def project_detectors(self, project: str) -> ProjectDetectors:
        """What runs of a project that begin now are judged by."""
        return self._ask.one(ProjectDetectors, "GET", path_of("projects", project) + "/detectors")

    def set_project_detectors(
        self, project: str, detectors: Mapping[str, Any], *, profile: str | None = None
    ) -> ProjectDetectors:
        """Sets what differs for a project, in the place of what was set before by this route.

        Args:
            project: its name.
            detectors: kind -> whether it is looked for, or its thresholds.
            profile: what the losses of its runs are.
        """
        path = path_of("projects", project) + "/detectors"
        body = body_of(given(detectors=detectors, profile=profile))
        return self._ask.one(ProjectDetectors, "PUT", path, body=body)

    def change_project_detectors(
        self, project: str, changes: Mapping[str, Any]
    ) -> ProjectDetectors:
        """Changes some settings of a project.

        Args:
            project: its name.
            changes: `detectors` and `profile`, as of `set_project_detectors`; None takes back what
                was set.
        """
        path = path_of("projects", project) + "/detectors"
        return self._ask.one(ProjectDetectors, "PATCH", path, body=body_of(changes))

    # Notifications

    def notifications(
        self,
        *,
        run: str | None = None,
        alert: str | None = None,
        pending: bool = False,
        limit: int | None = None,
    ) -> Iterator[Notification]:
        """What was told of alerts and what waits, the newest first.

        Args:
            run, alert: of these alone, by their ids.
            pending: what waits or failed alone.
            limit: longest list; the server has its own default.
        """
        query = fields(run=run, alert=alert, pending=pending, limit=limit)
        return self._ask.items(Notification, "/notifications", query, paged=False)

    def notification_targets(self) -> Iterator[NotificationTarget]:
        """Who is told of alerts; their addresses without what gives access to them."""
        return self._ask.items(NotificationTarget, "/notifications/targets", paged=False)

    def test_notification_target(self, target: str) -> Delivery:
        """Sends a test message to a target, and says what came of it."""
        return self._ask.one(Delivery, "POST", path_of("notifications/targets", target) + "/test")

    # The server itself

    def is_alive(self) -> bool:
        """Whether the process answers; says nothing of its database.

        Raises:
            ClientError: it does not.
        """
        return self._http.json("GET", "/healthz", retries=0).get("status") == "ok"

    def is_ready(self) -> bool:
        """Whether the server can work, with its database.

        Raises:
            TryLater: it cannot; the text says why.
        """
        return self._http.json("GET", "/readyz", retries=0).get("status") == "ready"

    def server_metrics(self) -> str:
        """What the server counts about itself, in Prometheus' text format."""
        return self._http.text("/metrics")
