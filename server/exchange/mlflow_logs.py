"""Runs of MLflow's stores as logs: a database (`mlflow.db`), a folder `mlruns`, or a server."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rankscope.server.exchange.logs import Collected, Log, ranks_of
from rankscope.server.exchange.points import ExchangeError

_SQLITE = b"SQLite format 3\0"
SERVERS = ("http://", "https://")
# Runs that are named where one has to be chosen.
_NAMED = 10


def store(source: str) -> str | None:
    """The tracking URI of a store; None where the source is none."""
    if source.startswith(SERVERS):
        return source
    path = Path(source)
    if path.is_file():
        with path.open("rb") as file:
            return f"sqlite:///{path.resolve()}" if file.read(16) == _SQLITE else None
    # Experiments are folders with a description, and so are the runs in them.
    return path.resolve().as_uri() if any(path.glob("*/meta.yaml")) else None


def read(source: str, chosen: str | None = None) -> Log:
    """One run of a store.

    Args:
        source: file, folder or URL.
        chosen: id or name of the run; may be left out where there is one alone.

    Raises:
        ExchangeError: there is no store or no such run, several runs are meant, or the package
            mlflow is missing.
    """
    uri = store(source)
    if uri is None:
        raise ExchangeError(
            f"{source} is no store of MLflow: name an mlflow.db, a folder mlruns, or the URL of a "
            "tracking server"
        )
    # What MLflow no longer writes it still reads, where it is asked to.
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    try:
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException
    except ImportError as error:
        raise ExchangeError(
            "reading stores of MLflow needs its package: pip install 'rankscope[mlflow]'"
        ) from error
    try:
        client = MlflowClient(tracking_uri=uri)
        run = _chosen(_runs(client), source, chosen)
        collected = Collected()
        for key in run.data.metrics:
            for point in client.get_metric_history(run.info.run_id, key):
                collected.add(key, point.step, point.value)
    except MlflowException as error:
        raise ExchangeError(f"MLflow cannot read {source}: {error}") from error
    at = source if source.startswith(SERVERS) else Path(source).resolve()
    place = f"{at}#{run.info.run_id}"
    ranks, notes = ranks_of(place, {0: collected})
    started_at, name = run.info.start_time / 1000, run.info.run_name
    return Log(place, "MLflow", ranks, tuple(notes), started_at, name)


def _runs(client: Any) -> list[Any]:
    experiments = [one.experiment_id for one in client.search_experiments()]
    found: list[Any] = []
    token: str | None = None
    while True:
        page = client.search_runs(experiments, page_token=token)
        found += page
        token = page.token
        if not token:
            return found


def _chosen(runs: Sequence[Any], source: str, chosen: str | None) -> Any:
    meant = [
        run for run in runs if chosen is None or chosen in (run.info.run_id, run.info.run_name)
    ]
    if len(meant) == 1:
        return meant[0]
    named = ", ".join(f"{run.info.run_name} ({run.info.run_id})" for run in runs[:_NAMED])
    if not runs:
        raise ExchangeError(f"{source} holds no runs")
    if not meant:
        raise ExchangeError(f"{source} holds no run {chosen!r}; there are {named}")
    several = f"{len(meant)} runs" if chosen is None else f"{len(meant)} runs called {chosen!r}"
    raise ExchangeError(f"{source} holds {several}; choose one by --select: {named}")
