"""`rankscope import TOOL LOGDIR`: what another tool has logged, as a run of the server."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rankscope.agent import wire
from rankscope.server.commands import client
from rankscope.server.commands.files import refusals
from rankscope.server.detectors.mechanisms.wording import count
from rankscope.server.exchange import recognise
from rankscope.server.exchange.batches import batches
from rankscope.server.exchange.logs import Log
from rankscope.server.exchange.points import ExchangeError
from rankscope.server.exchange.tags import names

_DESCRIPTION = """\
Reads what another tool has logged and sends it to the server, which judges it as it judges any run.
Tags that are known (train/loss, Loss/train, epoch_loss, val_loss, ...) become the metrics that the
detectors read; the others keep their names. The same log is stored once, however often it comes.
"""


@client.command
def import_(argv: Sequence[str]) -> int:
    """Sends a log to the server and returns the exit code."""
    parser = client.parser("import", _DESCRIPTION)
    parser.add_argument("tool", choices=recognise.TOOLS, help="what the log was written with")
    parser.add_argument("source", metavar="LOGDIR|FILE|URL", help="log of one run")
    add_select(parser)
    parser.add_argument(
        "--run", metavar="NAME", type=client.run_id, help="id of the run; default: as the folder"
    )
    parser.add_argument("--project", default="default", help="groups runs; default: default")
    options = parser.parse_args(argv)
    with refusals(f"cannot read {options.source}", client.USAGE):
        found = _import(client.server_of(options), options)
    client.show(found, options, lines)
    return client.OK


def add_select(parser: argparse.ArgumentParser) -> None:
    """Adds the argument that chooses a run of a store."""
    parser.add_argument(
        "--select", metavar="RUN", help="id or name of the run, where a store of MLflow has several"
    )


def run_name(source: str, log: Log) -> str:
    """Id of a run as the tool calls it, or after the folder or file that it comes from."""
    path = Path(source).resolve()
    name = log.name or (path.stem if path.is_file() else path.name)
    made = re.sub(r"[^\w.=+-]+", "-", name).strip("-.")[: wire.MAX_NAME_LENGTH]
    return made or "imported"


def described(log: Log, metrics: Mapping[str, str]) -> list[dict[str, Any]]:
    """What has become of each tag, with its extent."""
    found = []
    for tag, metric in metrics.items():
        columns = [columns[tag] for columns in log.ranks.values() if tag in columns]
        found.append(
            {
                "tag": tag,
                "metric": metric,
                "ranks": len(columns),
                "points": sum(len(c.steps) for c in columns),
                "first_step": min(int(c.steps[0]) for c in columns),
                "last_step": max(int(c.steps[-1]) for c in columns),
            }
        )
    return found


def mapping_lines(tags: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Which tag has become which metric, as a table."""
    rows = [("TAG", "METRIC", "RANKS", "POINTS", "STEPS")]
    # What was recognised first: the rest is as it was.
    for tag in sorted(tags, key=lambda tag: (tag["tag"] == tag["metric"], tag["tag"])):
        steps = f"{tag['first_step']} to {tag['last_step']}"
        rows.append((tag["tag"], tag["metric"], str(tag["ranks"]), str(tag["points"]), steps))
    yield from client.table(rows)


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """What was imported, as lines of text."""
    yield from mapping_lines(found["tags"])
    yield ""
    yield from found["notes"]
    points = sum(tag["points"] for tag in found["tags"])
    if found["stored_before"]:
        yield f"Run {found['run']} has all of this already: nothing was stored twice."
    else:
        of = count(found["ranks"], "rank")
        yield f"Run {found['run']}: {count(points, 'point')} of {of} stored."
    yield f"`rankscope gate {found['run']}` and `rankscope alerts {found['run']}` show the verdict."


def _import(server: client.Server, options: argparse.Namespace) -> dict[str, Any]:
    log = recognise.read_as(options.tool, options.source, options.select)
    metrics = names(log.ranks)
    run = options.run or run_name(options.source, log)
    _refuse_other_run(server, run, log)
    sent = batches(log, metrics, run=run, project=options.project)
    # A batch that the server had already is not stored again.
    duplicates = [server.send(batch)["duplicate"] for batch in sent]
    return {
        "run": run,
        "project": options.project,
        "ranks": len(log.ranks),
        "stored_before": all(duplicates),
        "tags": described(log, metrics),
        "notes": list(log.notes),
    }


def _refuse_other_run(server: client.Server, run: str, log: Log) -> None:
    """Points of two trainings in one run would make nonsense of both."""
    try:
        known = server.get(client.run_path(run))
    except client.Refused as refused:
        if refused.code == client.UNKNOWN_RUN:
            return
        raise
    origin = known["config"].get("imported_from")
    if origin != log.source:
        what = f"was imported from {origin}" if origin else "was not imported"
        raise ExchangeError(f"there is a run {run!r}, which {what}; give --run another name")
