"""What a monitor needs to be heard: the records, the sender, and the hello of the process."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import time
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from rankscope.agent.delivery.records import Records
from rankscope.agent.delivery.sender import Sender
from rankscope.agent.launcher import Identity
from rankscope.agent.options import Options
from rankscope.agent.wire import Event, Hello, TensorTable

# Of a tensor table that changes, that many versions are sent.
_VERSIONS = 4

_logger = logging.getLogger("rankscope")
_open: weakref.WeakSet[Session] = weakref.WeakSet()


def _write(text: str) -> None:
    # A daemon may have no stderr, or a closed one: no reason to go unwatched.
    with contextlib.suppress(AttributeError, OSError, ValueError):
        sys.stderr.write(text)


class HasPhase(Protocol):
    """Knows what the training thread is doing."""

    @property
    def phase(self) -> str:
        """One identifier without spaces."""


class Session:
    """One monitor's way to the server, from its attach to its end.

    A process in which several monitors live (a generator's and a discriminator's) has a run for
    each: the second one's id ends in `.2`, on every rank in the order in which they were attached.

    Attributes:
        options: what the user chose.
        identity: with the run id in force.
        url: address of the run's page.
    """

    def __init__(
        self, options: Options, identity: Identity, *, config: Mapping[str, Any], wrapper: str = ""
    ) -> None:
        # A process may also hold several ranks of one run.
        self._asked = (identity.run, identity.rank)
        number = 1 + sum(c.alive and c._asked == self._asked for c in _open)
        if number > 1:
            # With it the server judges the first run together with those beside it.
            config = {**config, "first_run": identity.run}
            identity = replace(identity, run=f"{identity.run}.{number}")
        self.options = options
        self.identity: Identity = identity
        self.url = f"{options.server}/runs/{identity.run}"
        self.records = Records()
        self._owner: weakref.ref[HasPhase] | None = None
        self._tables: dict[str, TensorTable] = {}
        self._hello = Hello(
            started_at=time.time(),
            boot=_boot(),
            steady=_since_boot(),
            host=socket.gethostname(),
            pid=os.getpid(),
            local_rank=identity.local_rank,
            launcher=identity.launcher,
            wrapper=wrapper,
            heartbeat_seconds=Sender.HEARTBEAT_SECONDS,
            config=config,
        )
        address = f"rankscope: run {identity.run} at {self.url}\n"

        def connected() -> None:
            if identity.rank == 0 and not identity.fresh:
                _write(address)

        # Every rank finds the same server absent: one of them says so. A rank that alone cannot
        # reach it is missed by the server instead.
        level = logging.WARNING if identity.rank == 0 else logging.INFO
        if identity.warning:
            _logger.log(level, "%s", identity.warning)
        if identity.fresh:
            # Nobody knows an id that was made up here: it is shown whether or not a server answers.
            _write(address)
        self.sender = Sender(
            self.records,
            options=options,
            identity=identity,
            hello=lambda: replace(self._hello, tables=dict(self._tables)),
            phase=self._phase,
            on_problem=lambda text: _logger.log(level, "%s", text),
            on_connected=connected,
        )
        if number > 1:
            self._announce_to_first()
        _open.add(self)

    def _announce_to_first(self) -> None:
        """Says on the page of the process's first run that this one is beside it."""
        run = self.identity.run
        text = f"a further model of this process is watched as run {run}: its alerts are there"
        for known in _open:
            if known.alive and known._asked == self._asked and known.identity.run == self._asked[0]:
                known.records.event(Event(step=0, kind="agent.note", text=text))

    @property
    def alive(self) -> bool:
        """Whether its monitor still is."""
        owner = None if self._owner is None else self._owner()
        return owner is not None and not getattr(owner, "closed", True)

    def ask_phase_of(self, owner: HasPhase) -> None:
        """Has the phase of the training thread asked of its monitor; held weakly."""
        self._owner = weakref.ref(owner)

    def announce(self, name: str, table: TensorTable) -> None:
        """Has a tensor table sent to the server, before its first fingerprint."""
        # The server keeps the tables that it was sent before; but for one that it was not yet sent,
        # or has lost with its database, fingerprints may still be on their way.
        base = name.partition("@")[0]
        self._tables.pop(name, None)
        versions = [known for known in self._tables if known.partition("@")[0] == base]
        for known in versions[: 1 - _VERSIONS]:
            del self._tables[known]
        self._tables[name] = table
        self.sender.say_hello_again()

    def _phase(self) -> str:
        owner = None if self._owner is None else self._owner()
        return "start" if owner is None else owner.phase


def _boot() -> str:
    """What tells this boot of the machine from others; empty where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()[:64]
    except (OSError, ValueError):
        return ""


def _since_boot() -> float:
    """Seconds since the machine's boot, those in which it was suspended among them."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
