"""What the frameworks of the day log is judged; `tests/server/commands/test_real_logs.py`."""

import subprocess
from pathlib import Path

import pytest

from tests.server.commands.test_real_logs import FOUND, judged
from tests.support.stacks import ENVIRONMENT

pytestmark = [pytest.mark.stacks, pytest.mark.e2e]
TREE = Path(__file__).parents[2]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("framework", FOUND)
def test_a_framework_s_own_log(framework, tmp_path, capsys):
    python = ENVIRONMENT / "bin" / "python"
    for fault in ("", "rate"):
        folder = tmp_path / f"log{fault}"
        subprocess.run(
            [python, "-m", "tests.stacks.write_logs", framework, folder, *([fault] * bool(fault))],
            cwd=TREE,
            check=True,
            capture_output=True,
            timeout=240,
        )
        code, report, _ = judged(folder, capsys)
        kinds = {alert["kind"] for alert in report["alerts"]}
        assert (code, FOUND[framework][0] in kinds) == (bool(fault), bool(fault)), kinds
