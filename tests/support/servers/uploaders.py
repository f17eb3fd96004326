"""The uploaders that run on this machine, and other processes."""

from __future__ import annotations

import subprocess
from pathlib import Path

from rankscope.agent.delivery import uploader_process
from tests.support.servers.collector import wait_until

_SCRIPT = uploader_process.__file__.encode()


def uploaders(trainer: int | None = None) -> set[int]:
    """Process ids; without those that have ended and only wait to be buried.

    Args:
        trainer: of this process alone.
    """
    found = {int(p.name): _arguments(p) for p in Path("/proc").glob("[0-9]*")}
    return {
        pid
        for pid, arguments in found.items()
        if _SCRIPT in arguments and (trainer is None or str(trainer).encode() in arguments)
    }


def assert_ended(pid: int) -> None:
    """That uploader ends, within the patience of `wait_until`."""
    wait_until(lambda: pid not in uploaders())


def children(parent: int) -> list[int]:
    """Process ids."""
    done = subprocess.run(["pgrep", "-P", str(parent)], capture_output=True, text=True)
    return [int(line) for line in done.stdout.split()]


def _arguments(process: Path) -> list[bytes]:
    try:
        return (process / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return []
