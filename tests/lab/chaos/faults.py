"""What is done to a server and its ranks: a table of faults, each a function of a round."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import psutil
import psycopg

from tests.lab.chaos.proxy import Weather

if TYPE_CHECKING:
    from tests.lab.chaos.round import Round

Fault = Callable[["Round"], None]


def _kill_server(r: Round) -> None:
    """Ended as by a power cut, and started again at once or after a while."""
    r.service.kill()
    time.sleep(r.chance.choice([0.0, r.chance.uniform(0.5, 5.0)]))
    r.service.start()


def _end_server(r: Round) -> None:
    """Asked to end, as by an update."""
    r.service.stop()
    time.sleep(r.chance.uniform(0.0, 2.0))
    r.service.start()


def _stop_server(r: Round) -> None:
    """Suspended for longer than a rank waits for an answer."""
    with _suspended(r.service.pid):
        time.sleep(r.chance.uniform(1.0, 5.0))


def _kill_background(r: Round) -> None:
    """The process that evaluates and compacts is killed."""
    for child in psutil.Process(r.service.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "spawn_main" in " ".join(child.cmdline()):
                child.kill()


def _full_disk(r: Round) -> None:
    """No file of the server's may grow."""
    parent = psutil.Process(r.service.pid)
    before = {}
    for process in (parent, *parent.children()):
        with contextlib.suppress(ProcessLookupError):
            no_more = (1, resource.RLIM_INFINITY)
            before[process.pid] = resource.prlimit(process.pid, resource.RLIMIT_FSIZE, no_more)
    time.sleep(r.chance.uniform(1.0, 4.0))
    for pid, limit in before.items():
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)


def _locked_file(r: Round) -> None:
    """Another process writes to the SQLite file, for long, with and without waiting its turn."""
    with open(r.folder / "rankscope.db-lock", "rb") as turn:
        polite = r.chance.random() < 0.5
        if polite:
            fcntl.flock(turn, fcntl.LOCK_EX)
        with contextlib.closing(
            sqlite3.connect(r.folder / "rankscope.db", isolation_level=None, timeout=60)
        ) as other:
            other.execute("BEGIN IMMEDIATE")
            time.sleep(r.chance.uniform(1.0, 4.0))
            other.execute("ROLLBACK")


def _locked_table(r: Round) -> None:
    """Somebody holds a table of PostgreSQL's."""
    with psycopg.connect(r.database) as other:
        table = r.chance.choice(["run", "attempt", "chunk"])
        other.execute(f"LOCK TABLE {table} IN EXCLUSIVE MODE")
        time.sleep(r.chance.uniform(1.0, 4.0))


def _lost_connections(r: Round) -> None:
    """PostgreSQL ends all connections, again and again."""
    for _ in range(r.chance.randint(1, 5)):
        with psycopg.connect(r.database, autocommit=True) as other:
            other.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        time.sleep(r.chance.uniform(0.0, 1.0))


def _bad_network(r: Round) -> None:
    """Posts are cut off, halved, repeated, reordered, and their answers lost."""
    some = r.chance.uniform
    r.proxy.weather = Weather(
        refused=some(0.0, 0.4),
        halved=some(0.0, 0.3),
        unanswered=some(0.0, 0.5),
        late=some(0.0, 0.3),
        again=some(0.0, 0.5),
    )
    time.sleep(r.chance.uniform(2.0, 5.0))
    r.proxy.weather = Weather(again=r.proxy.weather.again)


def _kill_rank(r: Round) -> None:
    """Killed, and started again further on: from a checkpoint that it had written."""
    r.restart(r.chance.randrange(r.ranks))


def _stop_rank(r: Round) -> None:
    """Suspended."""
    with _suspended(r.processes[r.chance.randrange(r.ranks)].pid):
        time.sleep(r.chance.uniform(0.5, 3.0))


@contextlib.contextmanager
def _suspended(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


_EVERYWHERE: tuple[Fault, ...] = (
    _kill_server,
    _end_server,
    _stop_server,
    _bad_network,
    _bad_network,
    _kill_rank,
    _kill_rank,
    _stop_rank,
)
FAULTS: dict[str, tuple[Fault, ...]] = {
    "sqlite": (*_EVERYWHERE, _kill_background, _full_disk, _locked_file),
    "postgresql": (*_EVERYWHERE, _kill_background, _locked_table, _lost_connections),
}
"""By kind of database; what is there twice happens twice as often."""
