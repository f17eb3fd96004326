"""`rankscope sync`: sends what an offline or cut-off run left on disk."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rankscope.agent import wire
from rankscope.agent.delivery.deliver import Delivery
from rankscope.agent.delivery.outcome import Accepted, Away, Outcome
from rankscope.agent.delivery.pace import Pace
from rankscope.agent.delivery.queue import BatchQueue
from rankscope.agent.delivery.spool import SpoolFolder, folders_below
from rankscope.agent.options import resolve

# A server that restarts or is busy gets this long, for each batch, before the rest is left.
_PATIENCE_SECONDS = 20.0
# Folders in a row whose batches are not taken, as those of a project that the token is not for,
# after which it is the server or the token itself.
_MOST_NOT_TAKEN = 8
# Nobody's training waits for it, and it does not last long enough for an uploader.
_PACE = Pace(connect_timeout=5.0, read_timeout=30.0, uploader_after=math.inf)


@dataclass(slots=True)
class Report:
    """What `sync` did; numbers of batches.

    Attributes:
        sent: stored by the server now.
        duplicates: of those sent, how many the server had already.
        refused: the server will never take them; they stay, as `*.refused`.
        damaged: files that were not whole; they stay, as `*.damaged`.
        left: still on disk.
        in_use: folders that a living process sends by itself.
        runs: ids of the runs that something was sent of.
        problem: why batches are left, or were refused; empty if all is well.
    """

    sent: int = 0
    duplicates: int = 0
    refused: int = 0
    damaged: int = 0
    left: int = 0
    in_use: int = 0
    runs: list[str] = field(default_factory=list)
    problem: str = ""


def sync(
    folder: Path,
    server: str,
    token: str | None,
    *,
    patience: float = _PATIENCE_SECONDS,
    progress: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Send all batches at or below a folder, each process's in its order.

    It may be cut off and called again at any time: what has arrived is removed, and what arrives
    twice is stored once.

    Args:
        folder: a spool, or a run's or a process's folder in one.
        server: URL of the server.
        token: bearer token.
        patience: seconds to go on trying while the server is away.
        progress: called after each batch.
    """
    report = Report()

    def lose(reason: str, points: int) -> None:
        report.damaged += reason == "spool_damaged"
        report.refused += reason in ("refused", "too_large")

    # Nothing is put into this one: each folder has its own, so that a file which cannot be read
    # holds up those of its process alone.
    nothing = BatchQueue(SpoolFolder(folder), lose=lose)
    delivery = Delivery(nothing, server, token, pace=_PACE)
    delivery.connect()
    away, not_for_us = False, 0
    for place in folders_below(folder):
        files = SpoolFolder(place)
        if not files.acquire():
            report.in_use += 1
            continue
        queue = BatchQueue(files, lose=lose)
        queue.adopt(files)
        delivery.take_from(queue)
        while not away:
            refused = report.refused
            delivered = _deliver_patiently(delivery, patience)
            if delivered is None:
                break
            body, outcome = delivered
            if isinstance(outcome, Away) and outcome.this_batch:
                not_for_us += 1
                away = not_for_us == _MOST_NOT_TAKEN
                report.problem = f"the server {server} did not take a batch: {outcome.why}"
                break
            if isinstance(outcome, Away):
                away = True
                what = "does not let you in" if outcome.of_the_token else "is away"
                report.problem = f"the server {server} {what}: {outcome.why}"
            elif isinstance(outcome, Accepted):
                not_for_us = 0
                report.sent += 1
                report.duplicates += outcome.answer.duplicate
                if (run := wire.decode(body).run) not in report.runs:
                    report.runs.append(run)
            elif report.refused > refused:
                report.problem = report.problem or f"the server refuses a batch: {outcome.why}"
            progress(report)
        report.left += len(queue)
        files.close()
    delivery.close()
    return report


def _deliver_patiently(delivery: Delivery, patience: float) -> tuple[bytes, Outcome] | None:
    """The oldest batch and what came of it; None where there is none that can be read."""
    end = time.monotonic() + patience
    while True:
        delivered = delivery.deliver_next()
        if delivered is None or not isinstance(delivered[1], Away):
            return delivered
        if delivered[1].misdirected or delivery.next_try > end:
            return delivered
        time.sleep(max(0.0, delivery.next_try - time.monotonic()))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code.

    0: nothing is left to send; 1: something was refused or damaged; 2: wrong usage; 3: the server
    is away, or asks for another token, and batches are left.
    """
    parser = argparse.ArgumentParser(
        prog="rankscope sync",
        description="Send what an offline or cut-off run left on disk. It may be cut off and "
        "called again at any time; what arrives twice is stored once.",
    )
    parser.add_argument("spool", nargs="?", metavar="SPOOL", help="folder; by default the spool")
    parser.add_argument("--server", help="URL of the server (RANKSCOPE_SERVER)")
    parser.add_argument("--token", help="bearer token (RANKSCOPE_TOKEN)")
    given = parser.parse_args(arguments)
    named = {"server": given.server, "token": given.token, "spool": given.spool}
    try:
        options = resolve(named, os.environ)
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    if given.spool is not None and not options.spool.is_dir():
        parser.error(f"there is no folder {options.spool}")
    report = sync(options.spool, options.server, options.token)
    _show(report, options.spool)
    if report.left:
        return 3
    return 1 if report.refused or report.damaged else 0


def _show(report: Report, spool: Path) -> None:
    lines = []
    if report.sent:
        again = f" ({report.duplicates} of them were there already)" if report.duplicates else ""
        lines.append(f"sent {report.sent} batches{again} of {', '.join(report.runs)}")
    elif not (report.left or report.refused or report.damaged or report.in_use):
        lines.append(f"nothing waits in {spool}")
    if report.in_use:
        lines.append(f"{report.in_use} processes still run and send their own batches")
    if report.damaged:
        lines.append(f"{report.damaged} files are not whole; they stay as *.damaged")
    if report.refused:
        lines.append(f"{report.refused} batches were refused; they stay as *.refused")
    if report.left:
        lines.append(f"{report.left} batches are left in {spool}")
    if report.problem:
        lines.append(report.problem)
    sys.stdout.write("".join(f"{line}\n" for line in lines))
