"""`make bench`: the points really written, really read back, and the table of what came out."""

import json

import pytest

from benchmarks import run
from benchmarks.peers import environments, table, turns

_PLAN = turns.Plan(scalars=3, steps=40, seconds=5.0, rounds=1, limit_s=60.0)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Of Rankscope, TensorBoard, and a peer that cannot be installed."""
    folder = tmp_path_factory.mktemp("environments")
    with pytest.MonkeyPatch.context() as patch:
        # A version that does not exist, reported without asking a registry.
        patch.setattr(environments, "pins", lambda: {"wandb": "wandb @ file:///nowhere/wandb.whl"})
        return turns.measure(_PLAN, ("tensorboard", "wandb"), folder)


def test_all_points_are_written_and_measured(results):
    for name in ("rankscope, ordinary", "rankscope, fast", "tensorboard, ordinary"):
        line = results["ways"][name]
        assert line["points"] == 120
        assert line["points_per_s"] > 0
        assert line["bytes_per_point"] > 8
        assert line["read_ms"] > 0
    json.dumps(results)


def test_a_peer_that_does_not_install_is_listed_with_the_reason(results):
    reported = table.peers(results)
    assert "does not install" in results["ways"]["wandb, ordinary"]["failed"]
    assert "- wandb, ordinary: does not install" in reported
    assert "| wandb" not in reported


def test_rankscope_is_what_the_ratios_are_to(results):
    lines = table.peers(results).splitlines()
    ours = next(line for line in lines if line.startswith("| rankscope, ordinary"))
    assert [cell.strip() for cell in ours.split("|")][5::2][:2] == ["1.00", "1.00"]


def test_peers_are_all_none_or_named():
    assert run._peers("all") == turns.PEERS
    assert run._peers("none") == ()
    assert run._peers("aim,wandb") == ("aim", "wandb")
    with pytest.raises(SystemExit):
        run.main(["--peers", "sacred"])


def test_every_peer_is_pinned_or_of_this_environment():
    assert set(environments.pins()) | set(environments.OWN) == set(turns.WAYS)
