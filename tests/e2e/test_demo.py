"""`rankscope demo --exit`, as a newcomer calls it."""

import contextlib
import os
import re
import signal
import subprocess
from pathlib import Path

import httpx
import pytest

from rankscope.server.demo.faults import FAULTS, decide
from rankscope.server.demo.processes import RANKSCOPE, Process
from tests.support.servers.service import eventually

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
    alert = re.search(r"ALERT +\w+ +desync\.gradients +since step (\d+) +rank (\d)", printed)
    assert alert is not None, printed
    assert (int(alert[1]), int(alert[2])) == (expected.step, expected.rank)
    # The alert itself may come a moment before the tensors have been distinguished.
    assert re.search(rf"found: .* tensor {re.escape(expected.tensor)}\n", printed)
    assert re.search(r"Dashboard +http://127\.0\.0\.1:\d+/runs/demo-skipped-allreduce-", printed)
    assert printed.rstrip().endswith("as expected")


def test_without_a_fault_there_is_no_alert(tmp_path):
    # Healthy trainings of full length are the lab's, with many seeds.
    short = ("--ranks", "2", "--steps", "300")
    printed = demo(tmp_path, "--fault", "none", "--seed", "5", *short)
    assert "found:     nothing" in printed
    assert "ALERT" not in printed or "ALERT  info" in printed


def test_without_exit_the_dashboard_stays_until_ctrl_c(tmp_path):
    arguments = ["--fault", "none", "--ranks", "2", "--steps", "60"]
    with Process([*RANKSCOPE, "demo", *arguments], log=tmp_path / "demo.log") as process:

        def address():
            assert process.exit_code is None, process.tail(40)
            return re.search(r"The dashboard stays at (\S+) until Ctrl-C", process.tail(5))

        page = eventually(address, timeout_s=120)[1]
        assert httpx.get(page).status_code == 200
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(20) == 0, process.tail(40)
    with pytest.raises(httpx.ConnectError):
        httpx.get(page)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_interrupted_in_training_it_leaves_nothing_behind(tmp_path):
    with Process([*RANKSCOPE, "demo", "--ranks", "2"], log=tmp_path / "demo.log") as process:

        def address():
            assert process.exit_code is None, process.tail(40)
            return re.search(r"Server +(\S+)", process.tail(40))

        server = eventually(address, timeout_s=120)[1]
        children = eventually(lambda: children_of(process.pid), timeout_s=60)
        process.stop(60)  # it waits for its ranks and its server in turn
        assert process.exit_code == 128 + signal.SIGTERM, process.tail(40)
    with pytest.raises(httpx.ConnectError):
        httpx.get(server)
    assert [pid for pid in children if is_running(pid)] == []


def children_of(pid):
    """Process ids of the server and both ranks, once all are there."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # a process that has just ended
            # The name in parentheses may hold anything; state and parent come after it.
            parent = file.read_text().rpartition(")")[2].split()[1]
            found += [int(file.parent.name)] if int(parent) == pid else []
    return found if len(found) == 3 else None


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
