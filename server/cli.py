"""`rankscope serve`: the server, from its options to its end."""

from __future__ import annotations

import argparse
import errno
import ipaddress
import resource
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn
from sqlalchemy.exc import SQLAlchemyError

from rankscope.server.app import create_app
from rankscope.server.commands import client
from rankscope.server.commands.database_options import (
    add_url,
    age,
    database_text,
    file_text,
    of_project,
    size,
)
from rankscope.server.evaluation.detector_settings import Given, read_file
from rankscope.server.processes import supervisor
from rankscope.server.settings import Settings, default_database
from rankscope.server.storage.access import tokens
from rankscope.server.storage.database import migrate
from rankscope.server.storage.database.engine import open_engine, reading
from rankscope.server.storage.maintenance.retention import Retention

OK, FAILED, USAGE = client.OK, client.FAILED, client.USAGE

# Connections beyond these would need several servers; some programs look at each number there is.
_FILES = 65_536
# With fewer it is told: the largest jobs that were tried on one server have 1,024 ranks.
_FEW_FILES = 2048
# Of the server's own: the database's connections, mostly.
_OWN_FILES = 200


def serve(argv: Sequence[str]) -> int:
    """`rankscope serve`: runs the server until it is asked to stop."""
    parser = argparse.ArgumentParser(
        prog="rankscope serve", description="Run the server and the dashboard."
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8642, help="port; 0 takes a free one")
    add_url(parser)
    parser.add_argument(
        "--workers", type=int, default=1, metavar="N", help="server processes; needs PostgreSQL"
    )
    parser.add_argument(
        "--detectors",
        type=Path,
        metavar="FILE",
        help="TOML file that switches detectors off and sets their thresholds",
    )
    parser.add_argument(
        "--no-authentication",
        action="store_true",
        help="listen on an address that others reach although no token has been made: all of them "
        "may then read and write everything",
    )
    parser.add_argument(
        "--public-url",
        default="",
        metavar="URL",
        help="where people reach the server, for links in notifications; default: host and port",
    )
    parser.add_argument(
        "--cordon-command",
        action="append",
        default=[],
        type=_command,
        metavar="NAME=PROGRAM",
        help="call this program for alerts that accuse a host, once `rankscope notify add "
        "cordon-command://NAME` says for which; may be given several times",
    )
    parser.add_argument(
        "--otlp",
        default="",
        metavar="URL",
        help="send metrics of running runs to this endpoint of OpenTelemetry (OTLP over HTTP), for "
        "example http://collector:4318; alerts: `rankscope notify add otlp://collector:4318`",
    )
    parser.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="name, besides localhost, by which a proxy on this machine calls the server; may be "
        "given several times",
    )
    parser.add_argument(
        "--keep",
        action="append",
        default=[],
        type=of_project(age),
        metavar="[PROJECT=]AGE",
        help="delete runs that have ended and that nothing was heard of for so long, for example "
        "90d; may be given for several projects, and once for all others",
    )
    parser.add_argument(
        "--keep-size",
        action="append",
        default=[],
        type=of_project(size),
        metavar="[PROJECT=]SIZE",
        help="delete the oldest runs that have ended where a project has more than this, for "
        "example 50GB; likewise",
    )
    options = parser.parse_args(argv)
    loopback = _is_loopback(options.host)
    try:
        settings = Settings(
            database=options.db or default_database(),
            host=options.host,
            port=options.port,
            workers=options.workers,
            # Several servers evaluate side by side as it is.
            background="process" if options.workers == 1 else "threads",
            detectors=read_file(options.detectors) if options.detectors else Given(),
            public_url=options.public_url,
            cordon_commands=dict(options.cordon_command),
            otlp=options.otlp.rstrip("/"),
            retention=Retention(dict(options.keep), dict(options.keep_size)),
            hosts=tuple(name.lower() for name in options.allowed_host) if loopback else None,
        )
    except ValueError as error:
        return _complain(str(error))
    except OSError as error:
        return _complain(file_text(error))
    try:
        engine = open_engine(settings.database)
        migrate.upgrade(engine)
        with reading(engine) as connection:
            guarded = bool(tokens.by_digest(connection))
        engine.dispose()
    except migrate.SchemaError as error:
        return _complain(str(error))
    except (SQLAlchemyError, ImportError) as error:
        return _complain(database_text(settings.database, error))
    if not (loopback or guarded or options.no_authentication):
        return _complain(
            f"--host {options.host} lets others reach the server, and nobody would be asked who "
            "they are. Make a token first (`rankscope token create NAME`, with the same --db), or "
            "say --no-authentication"
        )
    _open_files()
    listener = socket.socket(socket.AF_INET6 if ":" in settings.host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        return _complain(_listening_text(settings, error))
    port = listener.getsockname()[1]
    settings = replace(settings, port=port)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host

    def started() -> None:
        print(f"Rankscope listens on http://{host}:{port}", flush=True)

    try:
        if settings.workers == 1:
            return _listen(settings, listener, started)
        # The backlog is the listener's and not theirs: nobody is refused while they start.
        listener.listen(2048)
        return supervisor.supervise(settings, listener, _listen, started)
    finally:
        listener.close()


def _command(text: str) -> tuple[str, str]:
    name, found, program = text.partition("=")
    if not found:
        raise argparse.ArgumentTypeError(f"{text[:60]!r} is not NAME=PROGRAM")
    return name, program


def _open_files() -> None:
    """Takes as many open files as the system lets a process have, and warns where they are few.

    Each rank keeps a connection open, which is a file; systems begin with 1,024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    if soft != resource.RLIM_INFINITY and soft < _FEW_FILES:
        client.complain(
            f"this process may open {soft} files, which is enough for about "
            f"{max(soft - _OWN_FILES, 0)} ranks and pages at a time: raise the limit for more "
            "(`ulimit -n`, or LimitNOFILE= of systemd)"
        )


def _is_loopback(host: str) -> bool:
    """Whether an address to listen on is reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _listen(settings: Settings, listener: socket.socket, started: Callable[[], None]) -> int:
    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                started()

        def handle_exit(self, sig: int, frame: Any) -> None:
            # Streams of open pages end by themselves once they know; uvicorn would wait for them.
            app.state.run_events.stopping.set()
            super().handle_exit(sig, frame)

    app = create_app(settings)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=3,
        # A rank may have nothing to say for a heartbeat: that must not cost it its connection.
        timeout_keep_alive=75,
    )
    server = Server(config)
    try:
        server.run(sockets=[listener])
    except KeyboardInterrupt:
        pass
    # uvicorn sends itself the signal again; by then the work is done.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return OK if server.started else FAILED


def _listening_text(settings: Settings, error: OSError) -> str:
    text = f"cannot listen on {settings.host} port {settings.port}: {error.strerror or error}."
    if error.errno == errno.EADDRINUSE:
        return f"{text} Is a server running there already? --port 0 takes a free port."
    if error.errno == errno.EACCES:
        return f"{text} Ports below 1024 are the system's: take a higher one."
    return f"{text} --host is an address of this machine; 0.0.0.0 stands for all of them."


def _complain(text: str) -> int:
    client.complain(text)
    return USAGE
