"""The fixture `rankscope_run`, in a file of tests that pytest runs in a process of its own."""

import subprocess
import sys
import textwrap

from rankscope.server.demo.processes import free_port
from tests.support.jobs.ranks import EXAMPLE


def tried(folder, source, *arguments):
    """What pytest prints of a file of tests."""
    script = folder / "test_of_a_user.py"
    script.write_text(textwrap.dedent(source))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", script, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    return done.stdout + done.stderr


def test_a_training_passes_or_fails_by_what_was_found(tmp_path):
    printed = tried(
        tmp_path,
        f"""\
        import subprocess, sys

        import pytest


        def train(*arguments):
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
            script = [{str(EXAMPLE)!r}, "--steps", "60", *arguments]
            subprocess.run([*torchrun, *script], check=True, timeout=120)


        def test_healthy(rankscope_run):
            train()
            rankscope_run.check()
            assert rankscope_run.report(kinds=["loss.nonfinite"]).verdict == "pass"


        def test_broken(rankscope_run):
            train("--nan-step", "30")
            report = rankscope_run.report()
            assert report.verdict == "fail"
            assert report.address == rankscope_run.address
            assert {{alert["kind"] for alert in report.alerts}} >= {{"loss.nonfinite"}}
            rankscope_run.check()


        @pytest.mark.parametrize("name", ["a/b c"])
        def test_without_training(rankscope_run, name):
            with pytest.raises(RuntimeError, match="no verdict on run test_without_.*-a-b-c-"):
                rankscope_run.report(wait=0)
            with pytest.raises(ValueError, match="there is no kind 'loss.spikes'; did you mean"):
                rankscope_run.check(ignore=["loss.spikes"])
        """,
    )
    outcomes = {line.split("::")[1] for line in printed.splitlines() if line.startswith("PASSED")}
    assert outcomes == {"test_healthy", "test_without_training[a/b c]"}, printed
    # What the gate would have printed, and no traceback of ours.
    assert "1 failed, 2 passed" in printed
    assert "FAIL  run test_broken-" in printed
    assert "since step: 30" in printed
    assert "pytest_plugin.py" not in printed


def test_a_server_can_be_given(tmp_path):
    url = f"http://127.0.0.1:{free_port()}"
    printed = tried(
        tmp_path,
        f"""\
        import os

        import pytest


        def test_one(rankscope_run):
            assert rankscope_run.server == os.environ["RANKSCOPE_SERVER"] == {url!r}
            assert rankscope_run.run == os.environ["RANKSCOPE_RUN"]
            with pytest.raises(RuntimeError, match="cannot be reached"):
                rankscope_run.check(wait=0)
        """,
        "--rankscope-server",
        f"{url}/",
    )
    assert "1 passed" in printed, printed
