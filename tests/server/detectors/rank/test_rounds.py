"""Ranks that train for themselves between averages: who is late to these, and who waits there."""

from dataclasses import replace

import numpy as np
import pytest

from rankscope.server.detectors.desync.detector import Desync
from rankscope.server.detectors.rank.starved import RankStarved
from rankscope.server.detectors.rank.straggler import RankStraggler
from rankscope.server.window import Comparison
from tests.support.judging import judge
from tests.support.runs.scenarios import GENERATORS
from tests.support.runs.traces import Trace

RANKS, STEPS, EVERY, STEP = 4, 480, 8, 0.025


def trained(*, slow=None, extra=0.3, often=0.06, seed=0, differ=True, jitter=0.05):
    """A job whose ranks average their parameters before each 8th step.

    Args:
        slow: rank that takes `extra` seconds more at this share of its steps.
    """
    random = np.random.default_rng(seed)
    own = STEP * (1 + jitter * random.standard_normal((RANKS, STEPS)).clip(-2, 2))
    if slow is not None:
        own[slow] += extra * (random.random(STEPS) < often)
    data = np.full((RANKS, STEPS), 0.0015) * random.uniform(0.9, 1.3, (RANKS, STEPS))
    averaged = np.arange(STEPS) % EVERY == 0
    averaged[0] = False
    for step in np.flatnonzero(averaged):
        arrived = own[:, step - EVERY : step].sum(axis=1)
        data[:, step] += arrived.max() - arrived
    everyone = np.arange(RANKS)
    zeros = np.zeros(RANKS)
    compared = tuple(
        Comparison(step, "parameters", everyone, everyone if differ else 0 * everyone, zeros, zeros)
        for step in range(0, STEPS, 16)
    )
    return Trace(
        *("rounds", seed, np.arange(STEPS)),
        {
            "loss": np.ones((RANKS, STEPS)),
            "step_seconds": own + data,
            "compute_seconds": own,
            "data_seconds": data,
            "parameters_written": np.ones((RANKS, STEPS)),
        },
        present={"parameters_written": np.broadcast_to(averaged, (RANKS, STEPS))},
        comparisons=compared,
    )


@pytest.mark.parametrize("cuts", [(), range(0, STEPS, 7)], ids=["one", "many"])
def test_a_rank_that_never_takes_the_average_is_named(cuts):
    healthy = replace(trained(), config={"data_parallel": {}})
    wrote = healthy.present["parameters_written"].copy()
    wrote[3] = False
    trace = replace(healthy, present={"parameters_written": wrote})
    found = judge(trace, [Desync()], cuts)
    (alert,) = [alert for alert in found.alerts if alert.severity == "critical"]
    assert (alert.kind, alert.ranks, alert.first_step) == ("desync.parameters", (3,), EVERY)
    assert "never takes the average" in alert.title
    assert alert.state == "open"
    assert {a.severity for a in judge(healthy, [Desync()], cuts).alerts} == {"info"}


def said(trace, cuts=()):
    return judge(trace, [RankStraggler(), RankStarved()], cuts)


@pytest.mark.parametrize("cuts", [(), range(0, STEPS, 7)], ids=["one", "many"])
def test_a_rank_that_is_slow_now_and_then_is_named(cuts):
    (alert,) = said(trained(slow=2), cuts).alerts
    assert (alert.kind, alert.ranks, alert.severity) == ("rank.straggler", (2,), "warning")
    assert "late to averages now and then" in alert.title
    assert alert.evidence["late_seconds"] == pytest.approx(0.3, rel=0.2)


def test_so_is_one_that_is_slow_all_the_time():
    (alert,) = said(trained(slow=1, extra=0.02, often=1.0)).alerts
    assert (alert.kind, alert.ranks) == ("rank.straggler", (1,))
    assert "comes last to the averages" in alert.title


@pytest.mark.parametrize("seed", range(6))
def test_ranks_that_wait_for_an_average_are_not_starved(seed):
    found = said(trained(seed=seed, jitter=0.3))
    assert not found.alerts
    assert "was compared at" in found.checks["rank.straggler"].why


def test_what_is_written_where_all_hold_the_same_is_no_average():
    trace = trained(differ=False)
    trace.series["data_seconds"][3] += 0.02
    trace.series["step_seconds"][:] += 0.02
    (alert,) = said(trace).alerts
    assert (alert.kind, alert.ranks) == ("rank.starved", (3,))


@pytest.mark.parametrize("ranks", [2, 4])
def test_parameters_gathered_before_the_next_forward_pass_are_no_fault(ranks):
    """Each rank updates tensors of its own; gradients are shared, as no averaging would have it."""
    made = GENERATORS["chain"](0, fault="gathered-late", ranks=ranks, wrapped=False)
    found = judge(made, [Desync()], range(0, 2000, 33))
    assert {alert.severity for alert in found.alerts} == {"info"}
    (lasting,) = [alert for alert in found.alerts if alert.state == "open"]
    assert "made equal every step" in lasting.cause


@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_that_only_their_owner_steps_with_are_not_compared(ranks):
    """A sharded optimizer by hand: `reduce` to the owner leaves anything on the others."""
    owned = {"without": ("optimizer_state",)}  # each rank's table has tensors of its own
    made = GENERATORS["chain"](0, fault="owners-reduced", ranks=ranks, wrapped=False, **owned)
    found = judge(made, [Desync()], range(0, 2000, 33))
    assert {alert.severity for alert in found.alerts} == {"info"}
    check = found.checks["desync.gradients"]
    assert check.status == "not_applicable"
    assert "steps with" in check.why
