"""The uploaders that run on this machine."""

from __future__ import annotations

from pathlib import Path

from rankscope.agent import uploader_process

_SCRIPT = uploader_process.__file__.encode()


def uploaders() -> set[int]:
    """Process ids; without those that have ended and only wait to be buried."""
    return {int(p.name) for p in Path("/proc").glob("[0-9]*") if _is_uploader(p)}


def _is_uploader(process: Path) -> bool:
    try:
        return _SCRIPT in (process / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
