"""A job that CI launches again under the same run id: the gate judges its last launch."""

import subprocess
from pathlib import Path

import pytest

from rankscope.server.demo.processes import RANKSCOPE
from tests.support.jobs.ranks import finished, forked_job
from tests.support.servers.service import Service, eventually

pytestmark = pytest.mark.e2e

SCRIPT = Path(__file__).parents[1] / "support" / "jobs" / "rerun_job.py"
RUN = "ci-7"


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with Service(tmp_path_factory.mktemp("server")) as service:
        yield service


def launched(service, folder, how):
    """The gate's exit code and output after a launch of both ranks."""
    environment = {"RANKSCOPE_SERVER": service.url, "RANKSCOPE_RUN": RUN, "OMP_NUM_THREADS": "1"}
    with forked_job(SCRIPT, how, ranks=2, folder=folder, environment=environment) as job:
        done = finished(job)
    assert all(done.exit_codes) if how == "raises" else not any(done.exit_codes), done.outputs
    gate = subprocess.run(
        [*RANKSCOPE, "gate", RUN, "--server", service.url, "--wait", "60"],
        capture_output=True,
        text=True,
        timeout=150,
    )
    return gate.returncode, gate.stdout + gate.stderr


def test_every_launch_has_a_verdict_of_its_own(service, tmp_path):
    codes = []
    for number, how in enumerate(("diverges", "clean", "raises", "clean", "diverges", "clean")):
        code, output = launched(service, tmp_path / str(number), how)
        codes.append((how, code))
        if how == "diverges":
            assert "desync." in output
        if how == "clean":
            assert code == 0, output
            assert "desync.parameters  critical" not in output
    expected = {"diverges": 1, "clean": 0, "raises": 1}
    assert codes == [(how, expected[how]) for how, _ in codes]
    # All that was found in any of them stays listed.
    items = eventually(
        lambda: service.get(f"/runs/{RUN}/alerts", limit=100, consequences=True)["items"],
        timeout_s=60,
    )
    found = {(a["kind"].partition(".")[0], a["start"], a["state"]) for a in items}
    assert {(kind, s) for kind, _, s in found if kind in ("desync", "rank")} <= {
        ("desync", "resolved"),
        ("rank", "resolved"),
    }
    assert len({start for kind, start, _ in found if kind == "desync"}) == 2
