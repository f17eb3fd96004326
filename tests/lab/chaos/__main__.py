"""Rounds of faults over real servers and senders; counts what is lost, stored twice, altered.

    make chaos ARGS="--rounds 200"
    python -m tests.lab.chaos --folder .chaos --database postgresql --rounds 20 --first 1000

A round is a seed. What was done before, as `results.jsonl` in the folder says, is not done again;
of a round that is not whole, the folder is kept. Exit code 1 where one is not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from rankscope.server.demo.processes import handling_sigterm
from tests.lab.chaos.round import Account, Round
from tests.support.servers import postgres as pg


def main() -> int:
    """Runs the rounds that are missing, and prints the sums of all."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.lab.chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--folder", type=Path, default=Path(".chaos"))
    add("--rounds", type=int, default=20)
    add("--first", type=int, default=0, help="seed of the first round")
    add("--database", choices=("sqlite", "postgresql"), default="sqlite")
    add("--faults", type=int, default=5, help="a round")
    options = parser.parse_args()
    folder: Path = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    done = {(a.database, a.seed) for a in _accounts(folder)}
    with handling_sigterm(), _server(options.database) as server:
        for seed in range(options.first, options.first + options.rounds):
            if (options.database, seed) in done:
                continue
            place = folder / f"{options.database}-{seed}"
            with _database(server, seed) as url:
                account = Round(place, seed, url, options.faults).run()
            with (folder / "results.jsonl").open("a", encoding="utf-8") as results:
                results.write(json.dumps(asdict(account)) + "\n")
            if account.whole:
                shutil.rmtree(place)
            print(_line(account), flush=True)
    accounts = _accounts(folder)
    print(_sums(accounts))
    return 0 if all(account.whole for account in accounts) else 1


def _accounts(folder: Path) -> list[Account]:
    results = folder / "results.jsonl"
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    return [Account(**json.loads(line)) for line in lines]


@contextlib.contextmanager
def _server(kind: str) -> Iterator[str | None]:
    if kind == "sqlite":
        yield None
        return
    with pg.postgres(durable=True) as uri:
        yield uri


@contextlib.contextmanager
def _database(server: str | None, seed: int) -> Iterator[str | None]:
    if server is None:
        yield None
        return
    with pg.fresh_database(server, f"chaos{seed}") as url:
        yield url


def _line(a: Account) -> str:
    state = "whole" if a.whole else "NOT WHOLE"
    return (
        f"{a.database} {a.seed}: {state}: {a.produced} produced, {a.acknowledged} acknowledged, "
        f"{a.spooled} spooled, {a.stored} stored; {a.lost} lost, {a.twice} twice, "
        f"{a.altered} altered; {a.died} died in memory, dropped {a.dropped}, {a.busy} times 429; "
        f"{', '.join(a.faults)}; {a.seconds:.0f} s"
    )


def _sums(accounts: list[Account]) -> str:
    def total(name: str) -> int:
        return sum(getattr(account, name) for account in accounts)

    return (
        f"{len(accounts)} rounds, {sum(not a.whole for a in accounts)} not whole: "
        f"{total('produced')} points produced, {total('stored')} stored, {total('lost')} lost, "
        f"{total('twice')} twice, {total('altered')} altered"
    )


if __name__ == "__main__":
    sys.exit(main())
