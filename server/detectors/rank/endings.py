"""What kind of end the last message of a rank reports."""

from __future__ import annotations

import enum
import re

# What libraries of collectives say when a peer is gone or does not come. Matched on the first line,
# which has the type; c10d, gloo, NCCL, MPI, Horovod and the stores by which ranks meet.
_COLLECTIVE = re.compile(
    r"gloo|nccl|rccl|hccl|xccl|\bucc\b|\bmpi_|processgroup|process group|c10d|tcpstore|filestore|"
    r"dist(backend|network|store)error|horovod|"
    r"connection (closed|reset|refused|aborted)|closed by (the )?(remote )?peer|broken pipe|"
    r"socket|collective|all_?reduce|allgather|broadcast|watchdog|rendezvous|"
    r"timed out (waiting|after)|wait timeout|application timeout",
    re.IGNORECASE,
)
# Exit codes of a process that was asked to end by SIGINT or SIGTERM: 128 and the signal.
_STOPPED = re.compile(r"terminated by SIG|KeyboardInterrupt|SystemExit: (130|143)\b")
_LINE = 400


class Ending(enum.Enum):
    """How a rank failed."""

    OWN = "own"
    COLLECTIVE = "collective"
    STOPPED = "stopped"


def ending_of(error: str) -> Ending:
    """How a rank failed: by itself, in a collective because of another, or asked to end."""
    line = first_line(error)
    if _STOPPED.match(line):
        return Ending.STOPPED
    return Ending.COLLECTIVE if _COLLECTIVE.search(line) else Ending.OWN


def first_line(error: str) -> str:
    """Type and first line of the message of an error, of bounded length."""
    lines = error.strip().splitlines()
    return lines[0].strip()[:_LINE] if lines else "an error without a message"
