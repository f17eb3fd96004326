"""What the agent reports of its own faults: each kind once, to the user and on the run's page."""

from __future__ import annotations

import logging
from collections.abc import Callable

from rankscope.agent import wire
from rankscope.agent.delivery.records import Records
from rankscope.agent.guard import Guard
from rankscope.agent.launcher import Identity
from rankscope.agent.options import Options

_log = logging.getLogger("rankscope")

# For the page of the run, once the server is there: they explain what is missing there.
_ON_THE_PAGE = ("away", "busy", "token", "refused", "too_large")
# What all ranks of a node see in the same way, one of them reports.
_OF_THE_NODE = ("away", "busy", "token", "left")
# After these it has been said that batches wait, and where.
_WAITING = ("away", "token")
_LONGEST_TEXT = 1000


class Diagnostics:
    """Reports them.

    Args:
        records: takes what is reported on the page.
        options: server and spool are named.
        identity: place of this process in the job.
        step: the step that it happened at.
        on_problem: called with a sentence for the user.

    Attributes:
        guard: contains faults, and reports them here.
    """

    def __init__(
        self,
        records: Records,
        options: Options,
        identity: Identity,
        *,
        step: Callable[[], int],
        on_problem: Callable[[str], None],
    ) -> None:
        self._records = records
        self._options = options
        self._identity = identity
        self._step = step
        self._on_problem = on_problem
        self._reported: set[str] = set()
        self.guard = Guard(self.fault)

    def report(self, kind: str, text: str) -> None:
        """Something that a person should know of."""
        if kind in self._reported:
            return
        self._reported.add(kind)
        if kind in _ON_THE_PAGE:
            self._event("agent.fault", f"server: {text}")
        identity = self._identity
        if kind == "away":
            text = (
                f"the server {self._options.server} is away ({text}). Training goes on; batches "
                f"wait in {self._options.spool} until it is back, or for `rankscope sync`"
            )
        if kind == "busy":
            text = (
                f"the server {self._options.server} is busy ({text}). Training goes on; batches "
                f"wait in {self._options.spool} and are sent when it has time for them"
            )
        if kind == "token":
            text = (
                f"the server {self._options.server} does not let this job in ({text}). Set "
                "RANKSCOPE_TOKEN to a token with the scope write for the project "
                f"{self._options.project!r}, which `rankscope token create` makes. Training goes "
                f"on; batches wait in {self._options.spool} for `rankscope sync`"
            )
        if kind in _OF_THE_NODE and identity.local_rank != 0:
            _log.info("rank %d: %s", identity.rank, text)
            return
        if kind not in _OF_THE_NODE and identity.world_size > 1:
            text = f"rank {identity.rank}: {text}"
        with self.guard.probe("report"):
            self._on_problem(f"rankscope: {text}")

    def fault(self, probe: str, text: str) -> None:
        """A part of the agent failed."""
        self._event("agent.fault", f"{probe}: {text}")
        self.report(
            f"fault {probe}", f"a part of the agent failed, training goes on: {probe}: {text}"
        )

    def spool(self, text: str) -> None:
        """The spool cannot be written; on the page once too, however often it is tried."""
        if "fault spool" not in self._reported:
            self.fault("spool", f"cannot be written: {text}")

    def left(self, *, lost: int, kept: int, disk_problem: str) -> None:
        """At the end: points that are lost, or batches that wait in the spool."""
        if lost:
            self._records.lose("spool_failed", lost)
            self.report(
                "spool",
                f"{lost} points are lost: the server is away, and the spool cannot be written "
                f"({disk_problem})",
            )
        elif kept and not self._reported.intersection(_WAITING):
            self.report(
                "left",
                f"{kept} batches have not been sent and wait in {self._options.spool}; "
                "send them with `rankscope sync`",
            )

    def uploader_lost(self, why: str) -> None:
        """Nothing is lost with it: no fault, but to be known where steps are measured."""
        text = f"the uploader's process is of no use ({why}); a thread of the trainer posts"
        _log.info("rankscope: rank %d: %s", self._identity.rank, text)
        self._event("agent.note", text)

    def _event(self, kind: str, text: str) -> None:
        if self._records.stopped:
            return  # nothing is sent any more; it is in the log
        self._records.event(wire.Event(step=self._step(), kind=kind, text=text[:_LONGEST_TEXT]))
