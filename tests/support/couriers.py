"""The couriers that run on this machine."""

from __future__ import annotations

from pathlib import Path

from rankscope.agent import courier_process

_SCRIPT = courier_process.__file__.encode()


def couriers() -> set[int]:
    """Process ids; without those that have ended and only wait to be buried."""
    return {int(p.name) for p in Path("/proc").glob("[0-9]*") if _is_courier(p)}


def _is_courier(process: Path) -> bool:
    try:
        return _SCRIPT in (process / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
