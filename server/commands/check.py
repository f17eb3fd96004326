"""`rankscope check LOGDIR|FILE`: judges what another tool has logged, without a server."""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from sqlalchemy import Engine

from rankscope.agent import wire
from rankscope.server.api import alerts, verdict
from rankscope.server.api.deps import Page
from rankscope.server.api.problems import Problem
from rankscope.server.commands import client
from rankscope.server.commands.files import refusals
from rankscope.server.commands.importing import add_select, run_name
from rankscope.server.evaluation.worker import Worker
from rankscope.server.exchange import mlflow_logs, recognise
from rankscope.server.exchange.batches import batches
from rankscope.server.exchange.logs import Log
from rankscope.server.exchange.tags import names
from rankscope.server.gate import gate
from rankscope.server.gate.formats import Report
from rankscope.server.storage.database import migrate
from rankscope.server.storage.database.engine import open_engine, writing
from rankscope.server.storage.ingest.batches import store_batch

_DESCRIPTION = """\
Reads what another tool has logged (TensorBoard event files, trainer_state.json of Transformers,
metrics.csv of Lightning, runs of wandb, stores of MLflow) and judges it as the server judges a run,
with nothing to set up and nothing left behind. What only an agent could have recorded is listed as
not checked.
"""
_EXIT_TEXT = """\
exit code: 0 the run passes; 1 it fails; 2 usage, or a log that cannot be read; 4 not enough data to
judge it.
"""
# Longest that a log of this kind may take to be judged, where a detector hangs.
_EVALUATION_SECONDS = 600.0


@client.command
def check(argv: Sequence[str]) -> int:
    """Prints the verdict on a log and returns the exit code."""
    options = _parser().parse_args(argv)
    with refusals(f"cannot read {options.source}", client.USAGE):
        log = recognise.read(options.source, options.select)
        metrics = names(log.ranks)
        options.run = run_name(options.source, log)
        # Of machines only standard output is read, and that is the report's.
        print(*_read_lines(log, metrics), sep="\n", file=sys.stderr)
        with _database() as engine:
            _judge(engine, batches(log, metrics, run=options.run, project="default"))
            report = _report(engine, options)
    gate.show(_located(report, log), options.format)
    return gate.EXIT_CODES[report.verdict]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rankscope check", description=_DESCRIPTION, epilog=_EXIT_TEXT
    )
    parser.add_argument("source", metavar="LOGDIR|FILE|URL", help="log of one run")
    add_select(parser)
    gate.add_judging(parser)
    return parser


def _read_lines(log: Log, metrics: Mapping[str, str]) -> Iterator[str]:
    yield f"rankscope check: {log.source} ({log.tool}, ranks: {len(log.ranks)})"
    known = [f"{tag} is {metric}" for tag, metric in metrics.items() if tag != metric]
    if known:
        yield f"rankscope check: {', '.join(known[:20])}"
    if "loss" not in metrics.values():
        yield (
            "rankscope check: no tag is known as the loss of training, without which most checks "
            f"cannot be made; there are {', '.join(list(metrics)[:20])}"
        )
    yield from (f"rankscope check: {note}" for note in log.notes)


@contextmanager
def _database() -> Iterator[Engine]:
    """An empty database, for as long as it is needed."""
    with tempfile.TemporaryDirectory(prefix="rankscope-check-") as folder:
        engine = open_engine(f"sqlite:///{folder}/check.db")
        try:
            migrate.upgrade(engine)
            yield engine
        finally:
            engine.dispose()


def _judge(engine: Engine, of: Iterator[wire.Batch]) -> None:
    """Stores the batches and evaluates them as a server would."""
    for batch in of:
        with writing(engine) as connection:
            store_batch(connection, batch, received_at=time.time())
    worker = Worker(engine, threading.Event())
    until = time.monotonic() + _EVALUATION_SECONDS
    while worker.sweep() and time.monotonic() < until:
        pass


def _report(engine: Engine, options: argparse.Namespace) -> Report:
    try:
        return gate.report_of(_Local(engine), options)
    except Problem as problem:
        raise client.Refused(client.USAGE, str(problem.detail)) from problem


class _Local:
    """Answers the gate out of a database as the REST interface would."""

    url = ""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def get(self, path: str, query: Sequence[tuple[str, str]] = ()) -> dict[str, Any]:
        """The answer to one of the two questions that the gate asks."""
        run = unquote(path.split("/")[2])
        if path.endswith("/alerts"):
            page = Page(limit=sys.maxsize >> 8, after=None)
            found = alerts.run_alerts(self._engine, run, page, alerts.Filter(consequences=True))
            return found.model_dump(mode="json")
        asked = verdict.get_verdict(
            self._engine,
            run,
            fail_on="critical" if ("fail_on", "critical") in query else "warning",
            kind=[value for name, value in query if name == "kind"],
            ignore=[value for name, value in query if name == "ignore"],
        )
        return asked.model_dump(mode="json")


def _located(report: Report, log: Log) -> Report:
    """The report with the log in place of a page's address."""
    is_url = log.source.startswith(mlflow_logs.SERVERS)
    return replace(report, address=log.source if is_url else Path(log.source).as_uri())
