"""Which process launched this one: what all ranks of a node have in common without talking."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path

# Processes that adopt orphans: every job of the machine has them in common.
_ADOPTERS = frozenset(
    {"catatonit", "docker-init", "dumb-init", "init", "pause", "s6-svscan", "systemd", "tini"}
)
_MULTIPROCESSING = ("--multiprocessing-fork", "multiprocessing.forkserver")


@dataclass(frozen=True, slots=True)
class Process:
    """One process of this machine.

    Attributes:
        started: time of its start, in clock ticks since the machine's.
        command: the words of its command line.
        variables: names (never values, which may be secrets) of the environment it started with.
    """

    pid: int
    parent: int
    started: int
    command: tuple[str, ...] = ()
    variables: frozenset[str] = frozenset()


Read = Callable[[int], Process | None]


def read_process(pid: int, proc: Path = Path("/proc")) -> Process | None:
    """What `/proc` says of a process; None where there is no such thing."""
    folder = proc / str(pid)
    try:
        stat = (folder / "stat").read_bytes()
        command = (folder / "cmdline").read_bytes()
    except OSError:
        return None
    # The name of the program stands in parentheses and may itself have spaces and parentheses.
    fields = stat[stat.rindex(b")") + 2 :].split()
    try:
        environment = (folder / "environ").read_bytes()
    except OSError:
        environment = b""  # of another user: certainly no rank of ours
    return Process(
        pid=pid,
        parent=int(fields[1]),
        started=int(fields[19]),
        command=tuple(word.decode("utf-8", "replace") for word in command.split(b"\0") if word),
        variables=frozenset(
            entry.split(b"=", 1)[0].decode("utf-8", "replace")
            for entry in environment.split(b"\0")
            if b"=" in entry
        ),
    )


def launching_process(pid: int, marks: Set[str], read: Read = read_process) -> Process | None:
    """The process that started the ranks of a job, seen from one of them.

    It is the first one, from the rank itself upwards, that is neither part of a rank nor a mere
    copy: wrappers around a rank carry its variables in their environment; forked and spawned
    children, of a trainer as of a launcher, have their parent's command or the options of
    `multiprocessing` in it. A trainer that is rank 0 itself and starts the others is its own
    launcher.

    Args:
        pid: the rank's process.
        marks: variables that the launcher gives to each rank; one of them is enough.
        read: reads the table of processes.

    Returns:
        None where the rank has outlived its launcher, or where the table cannot be read.
    """
    process = read(pid)
    while process is not None:
        if process.command and Path(process.command[0]).name in _ADOPTERS:
            return None
        parent = read(process.parent) if process.parent else None
        if not (
            process.variables & marks
            # Horovod's shell sets them on its command line.
            or any(f"{mark}=" in word for word in process.command for mark in marks)
            or any(mark in word for word in process.command for mark in _MULTIPROCESSING)
            or (parent is not None and parent.command == process.command)
        ):
            return process
        process = parent
    return None
