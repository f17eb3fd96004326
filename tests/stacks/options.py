"""The options that every case of a stack gives the agent. No framework in here."""

from __future__ import annotations

from typing import Any

from tests.lab.faults.case import Setting


def agent_options(setting: Setting) -> dict[str, Any]:
    """Options of `attach` and `start`."""
    full = {"overhead": 1.0} if setting.full else {}
    return {"server": setting.server, "run": setting.run, "project": "stacks", **full}
