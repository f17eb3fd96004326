"""Who is slow, by events on a device: real jobs whose device alone is simulated."""

from pathlib import Path

import pytest

from tests.support.jobs.ranks import started_ranks
from tests.support.servers.service import Service, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.alone]

SCRIPT = Path(__file__).parents[1] / "support" / "jobs" / "device_job.py"
AT = 40


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with Service(tmp_path_factory.mktemp("server")) as service:
        yield service


@pytest.mark.parametrize(
    ("fault", "kind", "who"),
    [
        ("computes", "rank.straggler", [2]),
        ("fetches", "rank.starved", [2]),
        ("reduces", "collective.slow", None),
    ],
)
def test_what_devices_time_names_the_slow_one(service, tmp_path, fault, kind, who):
    environment = {
        "RANKSCOPE_SERVER": service.url,
        "RANKSCOPE_RUN": fault,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    with started_ranks(
        *(SCRIPT, fault, str(AT)), ranks=3, folder=tmp_path, environment=environment
    ) as job:
        assert not any(job.wait(120))
    (alert,) = eventually(
        lambda: [a for a in service.alerts(fault) if a["kind"] == kind], timeout_s=60
    )
    if who is not None:
        assert alert["ranks"] == who
    assert AT - 2 <= alert["first_step"] <= AT + 8
