"""`rankscope sync`: sends what an offline or cut-off run left on disk."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rankscope.agent import wire
from rankscope.agent.delivery.queue import Outbox
from rankscope.agent.delivery.spool import SpoolFolder, folders_below
from rankscope.agent.delivery.transport import Accepted, Away, Outcome, Refused, Transport
from rankscope.agent.options import resolve

# A server that restarts or is busy gets this long, for each batch, before the rest is left.
_PATIENCE_SECONDS = 20.0


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
    transport = Transport(server, token, connect_timeout=5.0, read_timeout=30.0)

    def lose(reason: str, points: int) -> None:
        report.damaged += reason == "spool_damaged"

    away = False
    for place in folders_below(folder):
        files = SpoolFolder(place)
        if not files.acquire():
            report.in_use += 1
            continue
        outbox = Outbox(files, lose=lose)
        outbox.adopt(files)
        while not away and (head := outbox.head()) is not None:
            entry, body = head
            outcome = _post_patiently(transport, body, patience)
            if isinstance(outcome, Away):
                away, report.problem = True, f"the server {server} is away: {outcome.why}"
            elif isinstance(outcome, Accepted):
                outbox.acknowledge(entry)
                report.sent += 1
                report.duplicates += outcome.answer.duplicate
                if (run := wire.decode(body).run) not in report.runs:
                    report.runs.append(run)
            elif isinstance(outcome, Refused) or not outbox.split(entry, body):
                report.refused += 1
                why = outcome.why if isinstance(outcome, Refused) else "a batch is too large"
                report.problem = report.problem or f"the server refuses a batch: {why}"
                files.set_aside(entry.seq, "refused")
                outbox.give_up(entry, "refused")
            progress(report)
        report.left += len(outbox)
        files.close()
    transport.close()
    return report


def _post_patiently(transport: Transport, body: bytes, patience: float) -> Outcome:
    end, pause = time.monotonic() + patience, 0.25
    while True:
        outcome = transport.post(body)
        if not isinstance(outcome, Away) or outcome.misdirected:
            return outcome
        pause = max(pause, outcome.retry_after or 0.0)
        if time.monotonic() + pause > end:
            return outcome
        time.sleep(pause)
        pause = min(2 * pause, 5.0)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code.

    0: nothing is left to send; 1: something was refused or damaged; 2: wrong usage; 3: the server
    is away and batches are left.
    """
    parser = argparse.ArgumentParser(
        prog="rankscope sync",
        description="Send what an offline or cut-off run left on disk. It may be cut off and "
        "called again at any time; what arrives twice is stored once.",
    )
    parser.add_argument("spool", nargs="?", metavar="SPOOL", help="folder; by default the spool")
    parser.add_argument("--server", help="URL of the server (RANKSCOPE_SERVER)")
    given = parser.parse_args(arguments)
    try:
        options = resolve({"server": given.server, "spool": given.spool}, os.environ)
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    if given.spool is not None and not options.spool.is_dir():
        parser.error(f"there is no folder {options.spool}")
    report = sync(options.spool, options.server, options.token)
    _print(report, options.spool)
    if report.left:
        return 3
    return 1 if report.refused or report.damaged else 0


def _print(report: Report, spool: Path) -> None:
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
