"""Training gives the same bits with the agent and without it."""

import math

import pytest
import torch

from rankscope import agent
from rankscope.agent.probes import PROBES
from tests.support import trainings
from tests.support.jobs.ranks import forked_ranks
from tests.support.servers.collector import Collector

ROUNDS = 200
KINDS = {
    "mlp": trainings.mlp,
    "cnn": trainings.cnn,
    "transformer": trainings.transformer,
    "gan": trainings.gan,
    "lbfgs": trainings.lbfgs,
}


@pytest.fixture(autouse=True)
def _one_thread():
    # Two runs of one training may differ with several threads, whoever watches.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def plain():
    """Kind -> outcome without the agent."""
    outcomes = {}

    def trained(kind):
        if kind not in outcomes:
            outcomes[kind] = KINDS[kind](lambda model, optimizer: None, ROUNDS)
        return outcomes[kind]

    return trained


def assert_same(watched, plain):
    assert watched.keys() == plain.keys()
    # One by one: a difference is reported by its name.
    for key in plain:
        assert watched[key] == plain[key], key


def expected_losses(kind, outcome):
    """What each monitor is to record: step -> loss."""
    losses = [float.fromhex(text) for text in outcome["losses"]]
    if kind == "gan":
        return [dict(enumerate(losses[::2])), dict(enumerate(losses[1::2]))]
    if kind != "transformer":
        return [dict(enumerate(losses))]
    # The mean over the micro-batches. Those of a skipped step lead to none.
    rounds = zip(losses[::2], losses[1::2], strict=True)
    kept = [sum(pair) / 2 for i, pair in enumerate(rounds) if i not in trainings.OVERFLOWS]
    return [dict(enumerate(kept))]


@pytest.mark.parametrize("everything", [True, False], ids=["everything", "default"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits(kind, everything, plain, tmp_path):
    expected = plain(kind)
    monitors = []
    with Collector() as collector:

        def watch(model, optimizer):
            options = {"overhead": 1.0} if everything else {}
            given = {"server": collector.url, "run": "run", "spool": tmp_path, **options}
            monitor = agent.attach(model, optimizer, **given)
            monitors.append(monitor)
            assert {type(probe) for probe in monitor._calls.all} == set(PROBES)
            if everything:
                monitor._schedule.ask_dense(10**6)

        watched = KINDS[kind](watch, ROUNDS)
        for monitor in monitors:
            monitor.close()
        assert_same(watched, expected)

        for index, losses in enumerate(expected_losses(kind, expected)):
            run = "run" if index == 0 else f"run.{index + 1}"
            batches = [b for b in collector.batches if b.run == run]
            seen = {s: v for b in batches for s, v in points(b, "loss")}
            # Sums of two are rounded; a loss by itself arrives as it is.
            assert seen == (pytest.approx(losses, rel=1e-6) if kind == "transformer" else losses)
            sampled = {
                stage: {p.step for b in batches for p in b.prints if p.stage == stage}
                for stage in ("parameters", "reduced_gradient", "optimizer_state")
            }
            for stage, steps in sampled.items():
                if everything:
                    assert steps == set(losses), stage
                else:
                    assert steps >= set(range(8)), stage
            assert not [e.text for b in batches for e in b.events if e.kind == "agent.fault"]
            assert batches[-1].state == "finished"
            assert batches[-1].through_step == max(losses)


def points(batch, metric):
    if metric not in batch.columns:
        return []
    column = batch.columns[metric]
    return zip(column.steps.tolist(), column.values.tolist(), strict=True)


def test_what_is_compared_shows_a_single_bit(plain):
    """The comparison itself can fail."""
    once = trainings.mlp(lambda model, optimizer: None, 20)

    def touch(model, optimizer):
        with torch.no_grad():
            weight = model[0].weight
            weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(math.inf))

    def draw(model, optimizer):
        torch.rand(1)

    assert_same(trainings.mlp(lambda model, optimizer: None, 20), once)
    for disturb in (touch, draw):
        other = trainings.mlp(disturb, 20)
        assert other["models"] != once["models"]
    assert other["torch"] != once["torch"]


def test_the_same_bits_under_ddp(tmp_path):
    with Collector() as collector:
        forked_ranks(trainings.ddp_worker, str(tmp_path), collector.url, ROUNDS, ranks=2)
        for rank in range(2):
            plain, watched, faults = torch.load(tmp_path / str(rank), weights_only=False)
            assert_same(watched, plain)
            assert faults == []
            digests = [b.words for b in collector.batches if b.rank == rank]
            steps = {
                s for w in digests if "parameters" in w for s in w["parameters"].steps.tolist()
            }
            assert steps == set(range(ROUNDS))
        assert {b.rank for b in collector.batches} == {0, 1}
