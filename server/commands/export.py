"""`rankscope export RUN`: every point of a run, as files that other tools read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from rankscope.server.commands import client
from rankscope.server.commands.files import refusals
from rankscope.server.detectors.mechanisms.wording import count
from rankscope.server.exchange.event_files import EventWriter
from rankscope.server.exchange.points import Points, PointWriter
from rankscope.server.exchange.tables import CsvWriter, ParquetWriter

FORMATS: Mapping[str, Callable[[Path, Mapping[str, Any]], PointWriter]] = {
    "tensorboard": EventWriter,
    "csv": CsvWriter,
    "parquet": ParquetWriter,
}
# Steps and ranks of one question: its answer has some megabytes at most.
_STEPS, _RANKS = 20_000, 8
# Into so many parts a range of steps is cut that has more points than fit.
_PARTS = 16

_DESCRIPTION = """\
Writes every recorded point of every series of every rank of a run, as it was recorded. Where a step
was done twice (a restart from a checkpoint), the later value stands. CSV and Parquet have the
columns metric, rank, step and value; TensorBoard gets a folder for each rank, to be opened with
`tensorboard --logdir PATH`.
"""


@client.command
def export(argv: Sequence[str]) -> int:
    """Writes the points of a run into files and returns the exit code."""
    parser = client.parser("export", _DESCRIPTION)
    parser.add_argument("run", metavar="RUN", type=client.run_id, help="id of the run")
    parser.add_argument("--format", required=True, choices=tuple(FORMATS), help="of the files")
    parser.add_argument(
        "-o",
        "--output",
        required=True,
        type=Path,
        metavar="PATH",
        help="file to write, which replaces an older one; for TensorBoard a new folder",
    )
    options = parser.parse_args(argv)
    with refusals(f"cannot write {options.output}", client.FAILED):
        found = _export(client.server_of(options), options)
    client.show(found, options, _lines)
    return client.OK


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    points, metrics = count(found["points"], "point"), count(found["metrics"], "metric")
    yield f"{points} of {metrics} of {count(found['ranks'], 'rank')} written to {found['path']}"


def _export(server: client.Server, options: Any) -> dict[str, Any]:
    path = client.run_path(options.run)
    run = server.get(path)
    about = {name: run[name] for name in ("id", "project", "name", "state", "world_size")}
    about["started"] = datetime.fromisoformat(run["started_at"]).timestamp()
    metrics = server.items(f"{path}/metrics")
    if not metrics:
        raise client.Refused(client.UNKNOWN_RUN, f"run {options.run!r} has no points yet")
    writer = FORMATS[options.format](options.output, about)
    count = 0
    ranks: set[int] = set()
    try:
        for points in _all_points(server, path, metrics):
            writer.write(points)
            count += len(points.steps)
            ranks.add(points.rank)
        writer.close()
    except BaseException:
        writer.abandon()
        raise
    return {
        "run": run["id"],
        "format": options.format,
        "path": str(options.output),
        "metrics": len(metrics),
        "ranks": len(ranks),
        "points": count,
    }


def _all_points(
    server: client.Server, path: str, metrics: Sequence[Mapping[str, Any]]
) -> Iterator[Points]:
    for metric in metrics:
        ranks, last = metric["ranks"], metric["last_step"]
        for begin in range(0, len(ranks), _RANKS):
            some = ranks[begin : begin + _RANKS]
            yield from _points(server, path, metric["name"], some, metric["first_step"], last)


def _points(
    server: client.Server, path: str, metric: str, ranks: Sequence[int], first: int, last: int
) -> Iterator[Points]:
    """Raw points of some ranks from step `first` to `last`, steps ascending for each rank.

    The server gives buckets where there are more points than asked for. Of as many steps as points
    there never are; where steps are far apart, a range of far more of them fits as well.
    """
    answer = server.get(
        f"{path}/series",
        {
            "metric": metric,
            "rank": [str(rank) for rank in ranks],
            "from_step": str(first),
            "to_step": str(last),
            "max_points": str(_STEPS),
        },
    )
    if all(one["width"] == 1 for one in answer["series"]):
        for one in answer["series"]:
            steps = np.array(one["steps"], dtype=np.int64)
            if len(steps):
                # Non-finite numbers are text in JSON, which numpy reads as what they are.
                yield Points(metric, one["rank"], steps, np.array(one["values"], dtype=np.float64))
        return
    width = max(_STEPS, -(-(last - first + 1) // _PARTS))
    for begin in range(first, last + 1, width):
        end = min(begin + width - 1, last)
        yield from _points(server, path, metric, ranks, begin, end)
