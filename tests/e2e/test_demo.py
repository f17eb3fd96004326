"""`rankscope demo --exit`, as a newcomer calls it."""

import os
import re
import subprocess

import pytest

from rankscope.server.demo.faults import FAULTS, decide
from rankscope.server.demo.processes import RANKSCOPE

pytestmark = pytest.mark.e2e


def demo(tmp_path, *arguments):
    """Output of the demo in an empty home folder."""
    done = subprocess.run(
        [*RANKSCOPE, "demo", "--exit", *arguments],
        env={**os.environ, "HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_default_fault_is_found_with_rank_step_and_tensor(tmp_path):
    printed = demo(tmp_path, "--seed", "5")
    expected = decide(FAULTS["skipped-allreduce"], ranks=4, steps=600, seed=5)
    alert = re.search(r"ALERT +critical +desync\.gradients +since step (\d+) +rank (\d)", printed)
    assert alert is not None, printed
    assert (int(alert[1]), int(alert[2])) == (expected.step, expected.rank)
    assert f"tensor  {expected.tensor}" in printed
    assert re.search(r"Dashboard +http://127\.0\.0\.1:\d+/runs/demo-skipped-allreduce-", printed)
    assert printed.rstrip().endswith("as expected")


def test_without_a_fault_there_is_no_alert(tmp_path):
    printed = demo(tmp_path, "--fault", "none", "--seed", "5", "--ranks", "2")
    assert "found:     nothing" in printed
    assert "ALERT" not in printed or "ALERT  info" in printed
