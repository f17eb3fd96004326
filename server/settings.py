"""What a server is given at start, checked."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import platformdirs
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from rankscope.server import otlp
from rankscope.server.evaluation.detector_settings import Given
from rankscope.server.notifications import cordon
from rankscope.server.storage.maintenance.retention import Retention

BACKENDS = ("sqlite", "postgresql")
# Addresses to listen on that are no names of the machine.
_EVERYWHERE = ("0.0.0.0", "::", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of one server.

    Attributes:
        database: SQLAlchemy URL.
        workers: server processes behind the port.
        evaluate: whether this server evaluates runs; off in tests that want to do it themselves.
        background: where it does so, and compacts: in a process of its own, or in `threads`.
        detectors: what the file of `--detectors` sets.
        public_url: where people reach the server; empty: at its host and port.
        retention: how long runs are kept, and how much of them.
        cordon_commands: full paths of programs that targets of notifications may name, by name.
        otlp: where metrics go by OTLP over HTTP, without a slash at its end; empty: nowhere.
        hosts: names besides localhost that requests may call the server by; None: any.
    """

    database: str
    host: str = "127.0.0.1"
    port: int = 8642
    evaluate: bool = True
    workers: int = 1
    background: Literal["process", "threads"] = "threads"
    detectors: Given = field(default_factory=Given)
    public_url: str = ""
    retention: Retention = field(default_factory=Retention)
    cordon_commands: Mapping[str, str] = field(default_factory=dict)
    otlp: str = ""
    hosts: tuple[str, ...] | None = None

    @property
    def address(self) -> str:
        """For links in what is sent elsewhere, without a slash at its end."""
        if self.public_url:
            return self.public_url.rstrip("/")
        host = socket.getfqdn() if self.host in _EVERYWHERE else self.host
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def __post_init__(self) -> None:
        try:
            backend = make_url(self.database).get_backend_name()
        except ArgumentError as error:
            raise ValueError(
                f"--db {self.database!r} is no database URL; write for example "
                "sqlite:////path/to/file.db or postgresql://user:password@host/name"
            ) from error
        if backend not in BACKENDS:
            raise ValueError(f"--db names a {backend} database; use sqlite or postgresql")
        if not 0 <= self.port < 65536:
            raise ValueError(f"--port {self.port} is none; use 0 (any free one) to 65535")
        url = urlsplit(self.public_url)
        if self.public_url and (url.scheme not in ("http", "https") or not url.hostname):
            raise ValueError(
                f"--public-url {self.public_url!r} is no address of a server; write for example "
                "https://rankscope.example.org"
            )
        url = urlsplit(self.otlp)
        if self.otlp and (url.scheme not in ("http", "https") or not url.hostname):
            raise ValueError(
                f"--otlp {self.otlp!r} is no endpoint of OTLP over HTTP; write for example "
                "http://collector:4318"
            )
        if self.otlp and not otlp.is_there():
            raise ValueError(f"--otlp {otlp.MISSING}")
        if self.otlp:
            otlp.metric_interval()
        cordon.check_commands(self.cordon_commands)
        if self.workers < 1:
            raise ValueError(f"--workers {self.workers} is none; at least one has to do the work")
        if self.workers > 1 and backend == "sqlite":
            raise ValueError(
                f"--workers {self.workers} needs PostgreSQL: SQLite lets one process write at a "
                "time, so that several would wait for each other. Use --db postgresql://..., or "
                "leave --workers out"
            )


def default_database() -> str:
    """URL of the SQLite file in the user's data folder, which is made where it is missing."""
    folder: Path = platformdirs.user_data_path("rankscope", appauthor=False)
    folder.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{folder / 'rankscope.db'}"
