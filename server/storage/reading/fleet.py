"""Alerts of all runs by kind and by host: what is open, and what comes again and again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, select

from rankscope.agent.wire import SEVERITIES
from rankscope.server.storage import schema
from rankscope.server.storage.access.visibility import of_visible
from rankscope.server.storage.reading import hosts

# The newest alerts that are counted.
_MOST = 10_000


@dataclass(frozen=True, slots=True)
class Tally:
    """Alerts that have something in common.

    Attributes:
        name: the kind, or the host.
        open: how many are open.
        alerts: how many there were.
        runs: ids of the runs that they are of, the newest alert first.
        others: hosts of a kind, kinds of a host, by name.
        severity: the gravest.
        newest: seconds since the epoch, when the newest opened.
    """

    name: str
    open: int
    alerts: int
    runs: tuple[str, ...]
    others: tuple[str, ...]
    severity: str
    newest: float


def tallies(
    connection: Connection, *, since: float, project: str | None = None
) -> tuple[list[Tally], list[Tally]]:
    """Alerts since a time that follow from no others, by kind and by host: most open ones first.

    An alert counts for the hosts of the ranks that it names, unless it names more than half of the
    run's ranks on several hosts: that says nothing of a machine. Information counts for nobody.

    Args:
        since: seconds since the epoch.
        project: None for all.
    """
    a, r = schema.alert.c, schema.run.c
    wanted = [of_visible(r.project), a.parent.is_(None), a.severity != "info"]
    if project is not None:
        wanted.append(r.project == project)
    rows = connection.execute(
        select(a.run, r.id, a.kind, a.severity, a.state, a.ranks, a.opened_at)
        .join(schema.run, r.key == a.run)
        .where(*wanted, (a.opened_at >= since) | (a.state == "open"))
        .order_by(a.opened_at.desc())
        .limit(_MOST)
    ).all()
    of_ranks = hosts.of_runs(connection, sorted({row.run for row in rows}))
    by_kind: dict[str, list[tuple[Any, str]]] = defaultdict(list)
    by_host: dict[str, list[tuple[Any, str]]] = defaultdict(list)
    for row in rows:
        named = _blamed(row.ranks, of_ranks.get(row.run, {}))
        by_kind[row.kind] += [(row, host) for host in named or [""]]
        for host in named:
            by_host[host].append((row, row.kind))
    return _tallied(by_kind), _tallied(by_host)


def _blamed(ranks: Iterable[int], of_ranks: dict[int, str]) -> list[str]:
    named = {rank for rank in ranks if of_ranks.get(rank)}
    machines = sorted({of_ranks[rank] for rank in named})
    if len(machines) > 1 and 2 * len(named) > len(of_ranks):
        return []
    return machines


def _tallied(groups: dict[str, list[tuple[Any, str]]]) -> list[Tally]:
    found = []
    for name, entries in groups.items():
        # A kind has an entry for each host that one alert names: that is still one alert.
        rows = list({id(row): row for row, _ in entries}.values())
        found.append(
            Tally(
                name=name,
                open=sum(row.state == "open" for row in rows),
                alerts=len(rows),
                runs=tuple(dict.fromkeys(row.id for row in rows)),
                others=tuple(sorted({other for _, other in entries} - {""})),
                severity=max((row.severity for row in rows), key=SEVERITIES.index),
                newest=max(row.opened_at for row in rows),
            )
        )
    return sorted(found, key=lambda one: (-one.open, -len(one.runs), -one.alerts, one.name))
