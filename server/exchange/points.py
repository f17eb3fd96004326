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


def beside(path: Path) -> Path:
    """Where a file is written before it takes its place, so that nobody reads half of it.

    Raises:
        ExchangeError: the path is a folder, or there is no folder for it.
    """
    if path.is_dir():
        raise ExchangeError(f"{path} is a folder; -o names the file to write")
    if not path.parent.is_dir():
        raise ExchangeError(f"there is no folder {path.parent}; make it first")
    return path.with_name(f".{path.name}.part")
