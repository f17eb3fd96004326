"""`rankscope runs` and `alerts` start as fast as the gate does; `tests/server/test_cli.py`."""

import subprocess
import sys

import pytest

from rankscope.agent.cli import COMMANDS

# What takes most of the second that a server takes to start, and is no matter of who asks one.
HEAVY = {"fastapi", "pydantic", "sqlalchemy", "uvicorn", "torch", "plotly"}


@pytest.mark.parametrize("command", ["runs", "alerts", "gate", "show", "compare", "export"])
def test_who_asks_a_server_loads_none(command):
    [home] = [c.home for c in COMMANDS if c.name == command]
    program = f"import sys, {home.partition(':')[0]}; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    ).stdout.split()
    assert not HEAVY & set(loaded)
