"""Numbers of single tensors, from a real job to the verdict on its layers and its compression."""

from pathlib import Path

import pytest

from tests.support.jobs import ddp_layers
from tests.support.jobs.ranks import run_ranks
from tests.support.servers.service import Service

pytestmark = pytest.mark.e2e

SCRIPT = Path(ddp_layers.__file__)


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with Service(tmp_path_factory.mktemp("server")) as service:
        yield service


def judged(service, folder, hook):
    """What is said of a job: its alerts of severity warning and above, and its checks, by kind."""
    run_ranks(
        SCRIPT,
        *(service.url, hook, hook),
        ranks=2,
        folder=folder,
        environment={"PYTHONPATH": str(SCRIPT.parents[3])},
        timeout_s=240,
    ).check()
    service.wait_for_state(hook, "finished")
    checks = service.get(f"/runs/{hook}/verdict")["checks"]
    found = service.get(f"/runs/{hook}/alerts", limit=100, consequences="true")["items"]
    alerts = {a["kind"]: a for a in found if a["severity"] != "info"}
    return alerts, {check["name"]: check for check in checks}


def test_a_layer_that_is_cut_off_is_named_and_sixteen_bits_are_enough(service, tmp_path):
    alerts, checks = judged(service, tmp_path, "half")
    assert list(alerts) == ["layer.dead"]
    cut = alerts["layer.dead"]
    assert cut["first_step"] == ddp_layers.CUT
    assert cut["tensors"] == ["first.weight", "first.bias", "second.weight", "second.bias"]
    assert "all that comes before `head.weight`" in cut["cause"]
    assert checks["compression.error"]["state"] == "passed"
    assert "cosine of 1 " in checks["compression.error"]["why"]
    assert checks["update.ratio"]["state"] == "passed"


def test_a_hook_that_leaves_almost_nothing_is_reported(service, tmp_path):
    alerts, checks = judged(service, tmp_path, "few")
    found = alerts["compression.error"]
    assert 0.02 < found["evidence"]["cosine"] < 0.35
    assert found["evidence"]["hooks"] == ["few"]
    assert checks["layer.dead"]["state"] == "passed"
    assert "finite loss values of 200 needed" in checks["gradient.vanishing"]["why"]
