"""`rankscope runs` and `rankscope alerts RUN`: lists of a server, in the terminal."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any

from rankscope.server.commands import client
from rankscope.server.detectors.wording import listing, ranks


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
    options = parser.parse_args(argv)

    def show(answer: Any) -> None:
        if not answer["items"]:
            print("No runs.")
            return
        rows = [("RUN", "PROJECT", "STATE", "RANKS", "LAST STEP", "VERDICT", "OPEN ALERTS")]
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
                )
            )
        print(*client.table(rows), sep="\n")
        _mention_more(answer)

    query = {"project": options.project, "state": options.state, "limit": "100"}
    if options.baseline:
        query["baseline"] = "true"
    return _read(options, "/runs", query, show)


@client.command
def alerts(argv: Sequence[str]) -> int:
    """`rankscope alerts RUN`: the alerts of a run."""
    parser = client.parser(
        "alerts",
        "List the alerts of a run, newest first, and of further models that its processes train, "
        "each in a run of its own (RUN.2).",
    )
    parser.add_argument("run", metavar="RUN", type=client.run_id, help="id of the run")
    parser.add_argument("--state", choices=("open", "resolved"), help="in this state alone")
    options = parser.parse_args(argv)

    def show(answer: Any) -> None:
        items = answer["items"]
        if not items:
            print("No alerts.")
        shown = {alert["id"] for alert in items}
        below: dict[str, list[Any]] = {}
        for alert in items:
            if alert["parent"] in shown:
                below.setdefault(alert["parent"], []).append(alert)
        for alert in items:
            if alert["parent"] not in shown:
                _show_alert(alert, below.get(alert["id"], []), asked=options.run)
        _mention_more(answer)

    path = f"{client.run_path(options.run)}/alerts"
    query = {"state": options.state, "limit": "100", "beside": "true"}
    if not options.json:
        query["consequences"] = "true"
    return _read(options, path, query, show)


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
    query: dict[str, str | None],
    show: Callable[[Any], None],
) -> int:
    body = client.server_of(options).get(path, query)
    if options.json:
        print(json.dumps(body, indent=2))
    else:
        show(body)
    return client.OK
