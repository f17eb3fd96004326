"""Files that a command reads or writes: what is wrong with them, as a refusal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rankscope.agent import wire
from rankscope.server.commands.client import USAGE, Refused
from rankscope.server.exchange.points import ExchangeError


@contextmanager
def refusals(what: str, code: int) -> Iterator[None]:
    """For what goes through files of other tools.

    Args:
        what: cannot be done where the system refuses it: `cannot read PATH`.
        code: the exit code then; of a file that is no such log it is `USAGE`.

    Raises:
        Refused: in place of every error of the file or of what it holds.
    """
    try:
        yield
    except (ExchangeError, wire.WireError) as error:
        raise Refused(USAGE, str(error)) from error
    except OSError as error:
        raise Refused(code, f"{what}: {error.strerror or error}") from error
