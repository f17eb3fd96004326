"""What the ranks of a run posted, read off the lab's database: for those who write detectors.

    python -m tests.lab.faults.signals FOLDER/lab.db RUN [NAME ...] [--from 20] [--to 40]

Without names it lists what there is. Scores never come from here.
"""

from __future__ import annotations

import argparse
import sqlite3
import sys
from collections import defaultdict

import numpy as np

from rankscope.server.storage.database.packing import unpack_steps

Points = dict[int, dict[int, str]]  # step -> rank -> text


def main() -> int:
    """Prints names, or values side by side."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab.faults.signals")
    parser.add_argument("database")
    parser.add_argument("run", help="its id, or the beginning of it")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--from", type=int, default=0, dest="first")
    parser.add_argument("--to", type=int, default=10**9, dest="last")
    options = parser.parse_args()
    database = sqlite3.connect(f"file:{options.database}?mode=ro", uri=True)
    found = database.execute(
        "select key, id from run where id like ? order by key desc", (options.run + "%",)
    ).fetchone()
    if found is None:
        print(f"no run {options.run}", file=sys.stderr)
        return 1
    run, name = found
    print(name)
    if not options.names:
        _list(database, run)
    for wanted in options.names:
        points = _points(database, run, wanted)
        ranks = sorted({rank for by_rank in points.values() for rank in by_rank})
        print(wanted, "ranks", ranks)
        for step in sorted(s for s in points if options.first <= s <= options.last):
            print(f"{step:6}", *(f"{points[step].get(rank, '-'):>18}" for rank in ranks))
    return 0


def _list(database: sqlite3.Connection, run: int) -> None:
    for kind in ("scalar", "word", "layers"):
        rows = database.execute(
            'select distinct name, "table" from metric where run = ? and kind = ? order by name',
            (run, kind),
        )
        print(f"{kind}:", ", ".join(f"{n} ({t})" if t else n for n, t in rows))
    rows = database.execute(
        'select distinct stage, "table" from fingerprint where run = ? order by stage', (run,)
    )
    print("prints:", ", ".join(f"{stage} ({table})" for stage, table in rows))
    for row in database.execute(
        "select rank, step, kind, text from event where run = ? order by step, rank", (run,)
    ):
        print("event:", *row)


def _points(database: sqlite3.Connection, run: int, name: str) -> Points:
    points: Points = defaultdict(dict)
    wanted = dict(
        database.execute("select id, kind from metric where run = ? and name = ?", (run, name))
    )
    rows = database.execute(
        'select l.metrics, c.rank, c.first_step, c.points, c.steps, c."values" from chunk c'
        " join layout l on l.run = c.run and l.id = c.layout where c.run = ?"
        " order by c.attempt, c.arrival",
        (run,),
    )
    for metrics, rank, first, count, steps, values in rows:
        at = unpack_steps(steps, first, count)
        for place, metric in enumerate(np.frombuffer(metrics, "<i4").tolist()):
            if metric not in wanted:
                continue
            word = wanted[metric] == "word"
            what = np.frombuffer(values, "<u8" if word else "<f8")[place * count :][:count]
            for step, value in zip(at.tolist(), what.tolist(), strict=True):
                points[step][rank] = f"{value:016x}" if word else f"{value:.6g}"
    return points


if __name__ == "__main__":
    sys.exit(main())
