"""`rankscope runs` and `rankscope alerts RUN`: lists of a server, in the terminal."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any

from rankscope.agent import wire
from rankscope.server.commands import client
from rankscope.server.detectors.mechanisms.wording import listing, ranks

# Alerts that are printed: more of them nobody reads in a terminal.
_SHOWN = 100


@client.command
def runs(argv: Sequence[str]) -> int:
    """`rankscope runs`: the runs of a server."""
    parser = client.parser("runs", "List the runs of a server, newest first.")
    parser.add_argument("--project", help="of this project alone")
    parser.add_argument(
        "--state", choices=("running", "finished", "failed", "lost"), help="in this state alone"
    )
    parser.add_argument(
        "--baseline", action="store_true", help="those that others are compared with alone"
    )
    parser.add_argument(
        "--tag", action="append", help="with this tag alone; given several times: with all of them"
    )
    options = parser.parse_args(argv)

    def show(answer: Any) -> None:
        if not answer["items"]:
            print("No runs.")
            return
        rows = [("RUN", "PROJECT", "STATE", "RANKS", "LAST STEP", "VERDICT", "OPEN ALERTS", "TAGS")]
        for run in answer["items"]:
            rows.append(
                (
                    run["id"],
                    run["project"],
                    run["state"],
                    f"{len(run['ranks'])}/{run['world_size']}",
                    "-" if run["last_step"] < 0 else str(run["last_step"]),
                    run["verdict"],
                    str(run["open_alerts"]),
                    ", ".join(run.get("tags", ())),
                )
            )
        print(*client.table(rows), sep="\n")
        _mention_more(answer)

    query = {
        "project": options.project,
        "state": options.state,
        "tag": options.tag,
        "limit": "100",
    }
    if options.baseline:
        query["baseline"] = "true"
    return _read(options, "/runs", query, show)


@client.command
def alerts(argv: Sequence[str]) -> int:
    """`rankscope alerts RUN`: the alerts of a run."""
    parser = client.parser(
        "alerts",
        "List the alerts of a run, what is open first, the gravest before the others, and those of "
        "further models that its processes train, each in a run of its own (RUN.2). JSON has them "
        "as the server does: newest first.",
    )
    parser.add_argument("run", metavar="RUN", type=client.run_id, help="id of the run")
    parser.add_argument("--state", choices=("open", "resolved"), help="in this state alone")
    options = parser.parse_args(argv)

    path = f"{client.run_path(options.run)}/alerts"
    query = {"state": options.state, "beside": "true"}
    if options.json:
        return _read(options, path, {**query, "limit": "100"}, lambda answer: None)
    _show_alerts(
        client.server_of(options).items(path, {**query, "consequences": "true", "limit": "500"}),
        asked=options.run,
    )
    return client.OK


def _show_alerts(items: Sequence[Any], *, asked: str) -> None:
    """Prints alerts, each with what follows from it; those somebody has to act on come first."""
    if not items:
        print("No alerts.")
    known = {alert["id"] for alert in items}
    below: dict[str, list[Any]] = {}
    for alert in items:
        if alert["parent"] in known:
            below.setdefault(alert["parent"], []).append(alert)
    # Newest first, as they come, where both are the same.
    roots = sorted(
        (alert for alert in items if alert["parent"] not in known),
        key=lambda a: (a["state"] != "open", -wire.SEVERITIES.index(a["severity"])),
    )
    for alert in roots[:_SHOWN]:
        _show_alert(alert, below.get(alert["id"], []), asked=asked)
    if len(roots) > _SHOWN:
        print(f"{len(roots) - _SHOWN} more are not printed; the dashboard has them.")


def _show_alert(alert: Any, below: Sequence[Any], *, asked: str) -> None:
    """Prints an alert, and under it a line for each of those that follow from it.

    Args:
        asked: the run that was asked for: another one is named.
    """
    who = f", {ranks(alert['ranks'])}" if alert["ranks"] else ""
    print(f"{alert['severity'].upper()} {alert['kind']} ({alert['state']}): {alert['title']}")
    print(f"  since {_since(alert)}{who}")
    if alert["run"] != asked:
        print(f"  in run {alert['run']}, of a further model in the same processes")
    if alert["parent"] is not None:
        print(f"  a consequence of alert {alert['parent']}, which is not listed here")
    if alert["tensors"]:
        print(f"  tensors: {listing(alert['tensors'], most=6)}")
    print(f"  cause: {alert['cause']}\n  remedy: {alert['remedy']}")
    if below:
        print(f"  consequences: {len(below)}")
    for other in sorted(below, key=lambda a: (a["first_step"], a["kind"])):
        print(
            f"    {other['severity'].upper()} {other['kind']} ({other['state']}): {other['title']}"
        )
    print()


def _since(alert: Any) -> str:
    step = alert["first_step"]
    since = alert.get("since")
    if not isinstance(since, dict):
        return f"step {step}"  # an older server's
    earliest = 0 if since["after"] is None else since["after"] + 1
    return f"step {step}" if earliest == step else f"a step from {earliest} to {step}"


def _mention_more(answer: Any) -> None:
    if answer["next_cursor"] is not None:
        print(f"These are the newest {len(answer['items'])}; the dashboard has the others.")


def _read(
    options: argparse.Namespace,
    path: str,
    query: client.Query,
    show: Callable[[Any], None],
) -> int:
    body = client.server_of(options).get(path, query)
    if options.json:
        print(json.dumps(body, indent=2))
    else:
        show(body)
    return client.OK
