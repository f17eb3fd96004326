"""Two ranks whose model is not wrapped: they train alone, and nobody may find out another way."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.ranks import TORCHRUN
from tests.support.service import Service

pytestmark = pytest.mark.e2e

SCRIPT = Path(__file__).parent.parent / "support" / "unwrapped.py"
ALONE = "The ranks train alone: the model is not wrapped, gradients are not reduced"
OWN_SEEDS, NEVER = -1, 0


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with Service(tmp_path_factory.mktemp("server")) as service:
        yield service


def alerts_of(service, run, *arguments):
    """Alerts of a training, those that are the consequence of another one included."""
    environment = {k: v for k, v in os.environ.items() if k != "CI"}
    subprocess.run(
        [TORCHRUN, "--standalone", "--nproc-per-node=2", str(SCRIPT), *map(str, arguments)],
        env={
            **environment,
            "OMP_NUM_THREADS": "1",
            "RANKSCOPE_SERVER": service.url,
            "RANKSCOPE_RUN": run,
        },
        check=True,
        capture_output=True,
        timeout=120,
    )
    service.wait_for_state(run, "finished")
    return service.get(f"/runs/{run}/alerts", consequences="true", limit=200)["items"]


@pytest.mark.parametrize(
    ("seed", "kind", "stage"),
    [(3, "desync.gradients", "reduced_gradient"), (OWN_SEEDS, "desync.parameters", "start")],
)
def test_ranks_that_never_exchange_anything_train_alone(service, seed, kind, stage):
    items = alerts_of(service, f"alone-{seed}", 200, seed, NEVER)
    [alert] = [a for a in items if a["severity"] != "info" and a["parent"] is None]
    assert (alert["title"], alert["severity"]) == (ALONE, "critical")
    assert (alert["kind"], alert["stage"]) == (kind, stage)
    assert (alert["first_step"], alert["ranks"]) == (0, [0, 1])
    assert "no two ranks were seen to apply the same gradient" in alert["cause"]


@pytest.mark.parametrize(("steps", "every"), [(200, 4), (60, NEVER)])
def test_ranks_that_average_or_may_do_so_yet_do_not(service, steps, every):
    items = alerts_of(service, f"averaged-{steps}-{every}", steps, 3, every)
    assert [a["title"] for a in items if a["severity"] != "info" or a["title"] == ALONE] == []
