"""Two ranks that average their weights now and then, sampled as a user's run is."""

from pathlib import Path

import pytest

from tests.support.jobs.ranks import REPOSITORY, run_ranks
from tests.support.servers.service import Service

pytestmark = pytest.mark.e2e

SCRIPT = Path(__file__).parent.parent / "support" / "jobs" / "averaging.py"
STEPS = 240


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with Service(tmp_path_factory.mktemp("server")) as service:
        yield service


def alerts_of(service, folder, run, every, *, missed=-1, least=0):
    """Alerts of a training that are more than information, and its checks."""
    script = (str(every), str(STEPS), str(missed), str(least))
    run_ranks(
        SCRIPT,
        *script,
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
    items = service.get(f"/runs/{run}/alerts", consequences="true", limit=200)["items"]
    return [a for a in items if a["kind"].startswith("desync.") and a["severity"] != "info"], items


# Averages of every fourth step lie between the steps that are sampled, those of every 32nd come
# after the first steps, in which each one is.
@pytest.mark.parametrize("every", [1, 3, 4, 8, 32])
def test_averages_are_no_desync(service, tmp_path, every):
    serious, items = alerts_of(service, tmp_path, f"healthy-{every}", every)
    assert serious == []
    # Where an average takes far longer than a step, it is said as well that one of `every` does.
    of_ranks = [a for a in items if a["kind"].startswith("desync.")]
    meant = [a for a in of_ranks if a["evidence"].get("period") == every]
    assert [a["title"] for a in meant] == [
        "The ranks differ between synchronisations, "
        + ("every step" if every == 1 else f"every {every} steps")
    ]


@pytest.mark.parametrize("every", [2, 8])
def test_the_one_that_misses_an_average_is_named(service, tmp_path, every):
    missed = 79
    [alert], _ = alerts_of(service, tmp_path, f"missed-{every}", every, missed=missed)
    assert (alert["kind"], alert["first_step"]) == ("desync.parameters", missed + 1)
    assert 1 in alert["ranks"]
    assert alert["parent"] is None


@pytest.mark.parametrize("every", [2, 8])
def test_tensors_that_are_not_averaged_are_named(service, tmp_path, every):
    [alert], _ = alerts_of(service, tmp_path, f"weights-only-{every}", every, least=2)
    assert (alert["kind"], alert["severity"]) == ("desync.parameters", "warning")
    assert alert["tensors"] == ["0.bias", "2.bias"]
    assert alert["first_step"] <= 2 * every
    assert "2 tensors of 4 are left out of the averaging" in alert["title"]
