"""What may be spent once: beginnings and short runs are seen whole, and at what cost."""

import math
import random

import pytest

from rankscope.agent.allowance import Allowance
from rankscope.agent.schedule import TIERS, Schedule

COSTS = {"basic": 2e-4, "signals": 8e-4, "word": 1e-3, "full": 2e-3, "state": 1e-3}
FULL = sum(COSTS.values())  # 5 ms


def trained(schedule, steps, *, plain, costs=None, noise=lambda: 1.0, pauses=()):
    """Plays steps that sample nothing before it is due; samples lengthen them.

    Args:
        plain: seconds that a step takes without the agent.
        pauses: steps that take 100 times as long.

    Returns:
        Steps sampled in full, seconds of the agent at each step.
    """
    costs = costs or COSTS
    sampled, own = [], []
    for step in range(steps):
        plan = dict(zip(TIERS, schedule.plan(step), strict=True))
        tiers = {tier: cost * noise() for tier, cost in costs.items() if plan[tier]}
        own.append(sum(tiers.values()))
        seconds = plain * (100 if step in pauses else 1) + (own[-2] if step else 0.0)
        schedule.note(step, step_seconds=seconds, base=8e-6, tiers=tiers)
        if plan["full"]:
            sampled.append(step)
    return sampled, own


@pytest.mark.parametrize("plain", [0.01, 0.04])
def test_a_short_run_is_seen_whole(plain):
    assert trained(Schedule(overhead=0.01, allowance=10), 200, plain=plain)[0] == [*range(200)]
    # As it was without: one step in some twenty.
    assert len(trained(Schedule(overhead=0.01), 200, plain=plain)[0]) < 20


@pytest.mark.parametrize(("plain", "interval"), [(0.007, 4), (0.012, 2), (0.022, 1), (0.2, 1)])
def test_after_its_first_part_a_step_is_lengthened_by_a_quarter_on_average(plain, interval):
    schedule = Schedule(overhead=0.01, allowance=10)
    sampled, own = trained(schedule, 1200, plain=plain)
    assert sampled[:390] == [*range(390)]
    assert [s for s in sampled if s > 440] == [s for s in range(441, 1200) if s % interval == 0]
    assert sum(own[440:1200]) <= 0.25 * plain * 760 * 1.01 + 0.01 * 760 * plain
    assert schedule.allowance.interval == interval


def test_when_it_is_spent_the_budget_governs():
    for allowance in (1.0, 10.0):
        schedule = Schedule(overhead=0.01, allowance=allowance)
        sampled, own = trained(schedule, 8000, plain=0.02)
        last = max(s for s in range(1, len(own)) if sum(own[:s]) < allowance)
        assert last > 0.9 * allowance / FULL
        assert not schedule.allowance.lasts
        assert schedule.allowance.interval == 0
        assert sum(own[last + 64 :]) < 0.011 * 0.02 * (8000 - last - 64) + 2 * FULL
        # A sample of a quarter of a step exceeds the limit: it comes every 48 s or 4,096 steps.
        assert [s for s in sampled if s > last + 64]


def test_none_at_all():
    schedule = Schedule(overhead=0.01, allowance=0)
    assert not schedule.allowance.lasts
    assert schedule.allowance.interval == 0


def test_without_an_end_every_step_is_sampled_whatever_it_takes():
    schedule = Schedule(overhead=0.01, allowance=math.inf)
    assert trained(schedule, 3000, plain=0.001)[0] == [*range(3000)]
    assert schedule.next_due(3000) == 3001


def test_ranks_that_measure_differently_share_the_steps_of_the_sparsest():
    sampled = []
    for rank in range(4):
        noise = random.Random(rank)
        schedule = Schedule(overhead=0.01, allowance=10)
        costs = {tier: cost * (1 + rank) for tier, cost in COSTS.items()}
        sampled.append(
            set(
                trained(
                    schedule,
                    1000,
                    plain=0.01,
                    costs=costs,
                    noise=lambda n=noise: n.uniform(0.5, 1.5),
                )[0]
            )
        )
    shared = set.intersection(*sampled)
    assert shared >= {*range(90)} | {*range(96, 1000, 16)}
    for one in sampled:
        # Whatever one samples, one that samples more does, too, but where a plan has just changed.
        assert len(shared) > 0.8 * min(len(one) for one in sampled)


def test_pauses_and_noise_do_not_make_it_jump():
    noise = random.Random(1)
    schedule = Schedule(overhead=0.01, allowance=10)
    sampled, _ = trained(
        schedule,
        1400,
        plain=0.01,
        noise=lambda: noise.uniform(0.8, 1.2),
        pauses=range(500, 1400, 90),
    )
    late = [s for s in sampled if s > 500]
    assert sum(s % 2 for s in late) <= 8


def test_whoever_asks_for_the_next_step_misses_no_sample():
    schedule = Schedule(overhead=0.01, allowance=10, dense_basic_steps=0, dense_steps=0)
    trained(schedule, 600, plain=0.004)
    assert schedule.allowance.interval > 2
    step, found = 600, set()
    while step < 700:
        step = schedule.next_due(step)
        found.add(step)
    assert found >= {s for s in range(601, 701) if schedule.due("full", s)}


def test_a_clock_that_stands_still_fails_nothing():
    allowance = Allowance(1.0)
    for _ in range(100):
        allowance.note(1.0, 0.0, 0.0)
    assert allowance.lasts
    assert allowance.interval == 1
