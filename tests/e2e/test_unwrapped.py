"""Two ranks whose model is not wrapped: they train alone, and nobody may find out another way."""

from pathlib import Path

import pytest

from tests.support.jobs.ranks import REPOSITORY, run_ranks
from tests.support.servers.service import Service

pytestmark = [pytest.mark.e2e, pytest.mark.jobs]

SCRIPT = Path(__file__).parent.parent / "support" / "jobs" / "unwrapped.py"
ALONE = "The ranks train alone: the model is not wrapped, gradients are not reduced"
OWN_SEEDS, NEVER = -1, 0


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with Service(tmp_path_factory.mktemp("server")) as service:
        yield service


def alerts_of(service, folder, run, *arguments):
    """Alerts of a training, those that are the consequence of another one included."""
    run_ranks(
        SCRIPT,
        *map(str, arguments),
        ranks=2,
        folder=folder,
        environment={
            "PYTHONPATH": str(REPOSITORY),
            "RANKSCOPE_SERVER": service.url,
            "RANKSCOPE_RUN": run,
        },
        timeout_s=120,
    ).check()
    service.wait_for_state(run, "finished")
    return service.get(f"/runs/{run}/alerts", consequences="true", limit=200)["items"]


@pytest.mark.parametrize(
    ("seed", "kind", "stage"),
    [(3, "desync.gradients", "reduced_gradient"), (OWN_SEEDS, "desync.parameters", "start")],
)
def test_ranks_that_never_exchange_anything_train_alone(service, tmp_path, seed, kind, stage):
    items = alerts_of(service, tmp_path, f"alone-{seed}", 200, seed, NEVER)
    [alert] = [a for a in items if a["severity"] != "info" and a["parent"] is None]
    assert (alert["title"], alert["severity"]) == (ALONE, "critical")
    assert (alert["kind"], alert["stage"]) == (kind, stage)
    assert (alert["first_step"], alert["ranks"]) == (0, [0, 1])
    assert "no two ranks were seen to apply the same gradient" in alert["cause"]


@pytest.mark.parametrize(("steps", "every"), [(200, 4), (60, NEVER)])
def test_ranks_that_average_or_may_do_so_yet_do_not(service, tmp_path, steps, every):
    items = alerts_of(service, tmp_path, f"averaged-{steps}-{every}", steps, 3, every)
    assert [a["title"] for a in items if a["severity"] != "info" or a["title"] == ALONE] == []
