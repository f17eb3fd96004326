"""What commands that work on the database itself have in common: its address, what goes wrong."""

from __future__ import annotations

import argparse
import getpass
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError

from rankscope.server.commands.client import USAGE, complain
from rankscope.server.settings import Settings, default_database
from rankscope.server.storage.access.audit import Actor
from rankscope.server.storage.database import migrate
from rankscope.server.storage.database.engine import open_engine

Value = TypeVar("Value")

_SIZES = {"MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0}


def add_url(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    """Gives a command its `--db`."""
    parser.add_argument(
        "--db", metavar="URL", default=default, help="SQLAlchemy URL; default: an SQLite file"
    )


def operator() -> Actor:
    """Who calls a command, for the audit log: the user of the operating system, on this host."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        name = f"user {os.getuid()}"  # in containers without a list of users
    return Actor(name=name, origin=socket.gethostname())


def call(options: argparse.Namespace) -> int:
    """Calls `options.do` with an engine on the database of `--db`, brought up to date.

    `options.unused` is then whether it was empty before. What is wrong with the database, or a
    `ValueError`, is said, and is the exit code of wrong usage.
    """
    engine = None
    try:
        settings = Settings(database=options.db or default_database())
        engine = open_engine(settings.database)
        options.unused = migrate.current(engine) is None
        migrate.upgrade(engine)
        code: int = options.do(engine, options)
        return code
    except (ValueError, migrate.SchemaError) as error:
        complain(str(error))
    except OSError as error:
        complain(file_text(error))
    except (SQLAlchemyError, ImportError) as error:
        complain(database_text(settings.database, error))
    finally:
        if engine is not None:
            engine.dispose()
    return USAGE


def age(text: str, *, nothing: str = "is no time at all") -> float:
    """Seconds of an age such as 90d, 36h or 15m; `nothing`: what is wrong with an age of 0."""
    if not re.fullmatch(r"[0-9]{1,12}[dhm]", text):
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r} is no age; write for example 90d, 36h or 15m"
        )
    if not int(text[:-1]):
        raise argparse.ArgumentTypeError(f"{text!r} {nothing}; the least is 1m")
    return int(text[:-1]) * _UNITS[text[-1]]


def size(text: str) -> int:
    """Bytes of a size such as 500MB, 50GB or 2TB."""
    if not re.fullmatch(r"[0-9]{1,6}(MB|GB|TB)", text) or not int(text[:-2]):
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r} is no size; write for example 500MB, 50GB or 2TB"
        )
    return int(text[:-2]) * _SIZES[text[-2:]]


def of_project(value: Callable[[str], Value]) -> Callable[[str], tuple[str | None, Value]]:
    """Reads `VALUE`, or `PROJECT=VALUE`; the project is None for all that are not named."""

    def read(text: str) -> tuple[str | None, Value]:
        project, named, rest = text.rpartition("=")
        return (project if named else None), value(rest)

    return read


def shown(url: str) -> str:
    """A database URL without its password."""
    return make_url(url).render_as_string(hide_password=True)


def file_text(error: OSError) -> str:
    """What is wrong with a file."""
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)


def database_text(url: str, error: Exception) -> str:
    """What is wrong with a database, and what to do."""
    reason = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
    name = shown(url)
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite" and parsed.database:
        folder = Path(parsed.database).absolute().parent
        if not folder.is_dir():
            return f"cannot use the database {name}: there is no folder {folder}; make it first"
    if isinstance(error, ImportError):
        return f"{name} needs a driver: pip install 'rankscope[postgres]' ({reason})"
    return f"cannot use the database {name}: {reason}. Is the address right, and may you write?"
