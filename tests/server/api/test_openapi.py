"""The OpenAPI document and the server agree, whatever is asked: drawn by schemathesis."""

import subprocess
import sys

import pytest

from rankscope.server.app import create_app
from rankscope.server.settings import Settings
from tests.support.runs.fixture_run import SyntheticRun, post, wait_until_evaluated
from tests.support.servers.serve_app import serve_app

# What an answer is held to. Its time is not: machines are shared.
CHECKS = "not_a_server_error,status_code_conformance,response_schema_conformance"


def drawn(url, folder, *options):
    """Requests of all operations, right and wrong ones; what schemathesis says, and its code."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json"),
            *("--checks", CHECKS, "--continue-on-failure", "--no-shrink", "--seed", "7"),
            # A stream does not end, and a run that is deleted answers nothing more.
            *("--exclude-path-regex", "stream|test$", "--exclude-method", "DELETE"),
            *("--suppress-health-check", "all", "--request-timeout", "30", "--warnings", "off"),
            *options,
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("phases", ["coverage", "fuzzing"])
def test_every_answer_is_one_that_is_documented(database_url, tmp_path, phases):
    app = create_app(Settings(database=database_url))
    with serve_app(app) as client:
        url = str(client.base_url).rstrip("/")
        run = SyntheticRun(run="otter", ranks=2, steps=120, desync=(1, 60))
        post(url, run)
        wait_until_evaluated(url, run)
        code, said = drawn(url, tmp_path, "--phases", phases, "-n", "25", "--max-time", "10")
        assert code == 0, said
        assert "Tested:" in said
        assert client.get("/api/v1/runs/otter").json()["id"] == "otter"
        assert client.get("/readyz").status_code == 200
