"""The points of a series of one rank, as they go into files."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rankscope.agent.wire import Float64, Int64


class ExchangeError(Exception):
    """A file cannot be read or written: what, where, and what to do about it."""


@dataclass(frozen=True, slots=True)
class Points:
    """Raw points of one metric of one rank.

    Attributes:
        steps: int64 [N], ascending.
        values: float64 [N]; NaN and infinities are data.
    """

    metric: str
    rank: int
    steps: Int64
    values: Float64


class PointWriter(Protocol):
    """Writes points as they come, series by series."""

    def write(self, points: Points) -> None:
        """Writes some points of a series, which may have more."""

    def close(self) -> None:
        """Makes what was written complete."""

    def abandon(self) -> None:
        """Leaves nothing behind: the export has failed."""


def require(module: str, extra: str, purpose: str) -> Any:
    """A module of a package that only some need.

    Raises:
        ExchangeError: it is not installed; names the extra that brings it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:
            raise
        raise ExchangeError(
            f"{purpose} need{'s' if not purpose.endswith('s') else ''} the package {package}; "
            f"install it with: pip install 'rankscope[{extra}]'"
        ) from error


def places(path: Path) -> tuple[Path, Path]:
    """The file that a path means, and where it is written before it takes that place.

    So nobody reads half of it, and what is there stays until it is whole.

    Raises:
        ExchangeError: the path is a folder or no ordinary file, or there is no folder for it.
    """
    if path.is_dir():
        raise ExchangeError(f"{path} is a folder; -o names the file to write")
    # Such as a pipe, or /dev/null: a file would take its place for everybody.
    if path.exists() and not path.is_file():
        raise ExchangeError(f"{path} is no ordinary file; -o names the file to write")
    # Where it is a link, that stays.
    file = path.resolve()
    if not file.parent.is_dir():
        raise ExchangeError(f"there is no folder {path.parent}; make it first")
    return file, file.with_name(f".{file.name}.part")


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file, which is replaced where there is one.

    Raises:
        ExchangeError: as `places`.
        OSError: it cannot be written; what was there is still there.
    """
    file, part = places(path)
    try:
        part.write_bytes(content)
        part.replace(file)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
