"""A server of one's own on this machine, for as long as it is needed."""

from __future__ import annotations

import re
import time
from pathlib import Path

from rankscope.server.demo.processes import RANKSCOPE, Process

_LISTENS = re.compile(r"listens on (http://\S+)")
_START_SECONDS = 60.0


class NotStarted(Exception):
    """The server did not start; the text has the last lines that it printed."""

    @property
    def is_address_taken(self) -> bool:
        """Whether somebody else has its port."""
        return "cannot listen" in str(self)


class LocalServer(Process):
    """A server on the loopback interface; stopped with the block that holds it.

    Args:
        folder: for its database and its log; an empty one.
        port: where it listens; 0: at a free one.

    Attributes:
        url: its address.

    Raises:
        NotStarted: it ended, or said nothing within a minute.
    """

    def __init__(self, folder: Path, port: int = 0) -> None:
        database = f"sqlite:///{folder / 'rankscope.db'}"
        command = [*RANKSCOPE, "serve", "--port", str(port), "--db", database]
        super().__init__(command, log=folder / f"server{port}.log")
        try:
            self.url = self._address()
        except BaseException:
            self.stop()
            raise

    def _address(self) -> str:
        """Where it listens, as it says itself."""
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            ended = self.exit_code is not None
            if listens := _LISTENS.search(self.tail()):
                return listens[1]
            if ended:
                break
            time.sleep(0.1)
        raise NotStarted(self.tail())
