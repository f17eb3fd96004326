"""The uploaders that run on this machine."""

from __future__ import annotations

from pathlib import Path

from rankscope.agent.delivery import uploader_process

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


def _arguments(process: Path) -> list[bytes]:
    try:
        return (process / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return []
