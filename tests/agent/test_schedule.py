"""The sampling plan: nested, dense where it matters, within its budget."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.agent.schedule import TIERS, Schedule


def trained(schedule, steps, *, step_seconds, costs, first=0, jitter=None):
    """Plays steps as a monitor does, which samples no step before one is due.

    Args:
        step_seconds: what a step takes, of its number.
        costs: tier -> what a sample costs.
        jitter: random factors of each step's time, of its number.

    Returns:
        (step, seconds since the first, exponents) of each sampled step.
    """
    sampled, now, ended, due_at = [], 0.0, None, first
    for step in range(first, first + steps):
        now += step_seconds(step) * (jitter(step) if jitter else 1.0)
        if step < due_at:
            continue
        plan = dict(zip(TIERS, schedule.plan(step), strict=True))
        tiers = {t: costs[t] for t in TIERS if plan[t] and t in costs}
        dear = len(tiers) > 1
        if ended is not None and (dear or schedule.wants(step, now - ended[1])):
            since = now - ended[1]
            mean = since / (step - ended[0])
            schedule.note(step, step_seconds=mean, base=8e-6, tiers=tiers, since=since)
            ended = step, now
        ended = ended or (step, now)
        sampled.append((step, now, schedule.exponents))
        due_at = schedule.next_due(step)
    return sampled


def run(schedule, steps, *, step_seconds=0.01, base=0.0, basic=0.0, word=0.0, full=0.0, first=0):
    """Plays steps with fixed costs; returns the steps at which each tier was due."""
    due = {tier: [] for tier in TIERS}
    for step in range(first, first + steps):
        tiers = {}
        for tier, cost in (("basic", basic), ("word", word), ("full", full)):
            if schedule.due(tier, step):
                due[tier].append(step)
                tiers[tier] = cost
        schedule.note(step, step_seconds=step_seconds, base=base, tiers=tiers)
    return due


def test_cheap_probes_are_due_at_every_step():
    due = run(Schedule(overhead=0.01), 100, word=1e-6, full=1e-6)
    assert due["word"] == due["full"] == list(range(100))


def test_dear_probes_are_thinned_to_the_budget():
    schedule = Schedule(overhead=0.01)
    due = run(schedule, 2000, base=2e-5, word=1e-4, full=1e-3)
    late = [s for s in due["full"] if s >= 1000]
    spent = (
        2e-5 + 1e-4 * len([s for s in due["word"] if s >= 1000]) / 1000 + 1e-3 * len(late) / 1000
    )
    assert late
    assert spent <= 0.01 * 0.01
    assert schedule.share() <= 0.01


def test_everything_is_due_in_the_first_steps_of_an_attempt():
    due = run(Schedule(overhead=0.001, first_step=1003), 100, word=1.0, full=1.0, first=1003)
    assert due["full"][:8] == list(range(1003, 1011))
    assert len(due["full"]) < 20


def test_the_server_can_request_dense_sampling():
    schedule = Schedule(overhead=0.001)
    run(schedule, 100, word=1.0, full=1.0)
    schedule.ask_dense(120)
    due = run(schedule, 100, word=1.0, full=1.0, first=100)
    assert due["full"][:21] == list(range(100, 121))
    assert len(due["full"]) < 25


def test_a_long_request_is_not_forgotten_for_short_ones_within_it():
    schedule = Schedule(overhead=0.001)
    run(schedule, 100, word=1.0, full=1.0)
    schedule.ask_dense(10_000, 2_000)
    for step in range(2_000, 4_000, 100):
        schedule.ask_dense(step + 16, step)
    assert schedule.due("full", 9_001)


def test_a_short_request_gives_way_to_a_longer_one():
    schedule = Schedule(overhead=0.001)
    run(schedule, 100, word=1.0, full=1.0)
    schedule.ask_dense(220, 201)
    for step in range(1_000, 1_020):
        schedule.ask_dense(step + 16, 1_000)
    assert schedule.due("full", 205)
    assert schedule.due("full", 1_035)


def test_dense_sampling_may_begin_later():
    schedule = Schedule(overhead=0.001, dense_basic_steps=0)
    run(schedule, 1000, basic=1.0, word=1.0, full=1.0)
    schedule.ask_dense(1520, 1501)
    schedule.ask_dense(1520, 1501)
    schedule.ask_dense(1210, 1203)
    due = run(schedule, 1000, basic=1.0, word=1.0, full=1.0, first=1000)
    asked = {*range(1203, 1211), *range(1501, 1521)}
    assert {step for step in due["full"] if step % 1024} == asked
    # Whoever asks for the next step at which something is due misses none of them.
    step, found = 1000, set()
    while step < 2000:
        step = schedule.next_due(step)
        found.add(step)
    assert found - {2048} >= asked | {1024}
    assert len(found) < len(asked) + 4


def test_a_budget_that_the_base_cost_eats_up_still_leaves_a_sample_now_and_then():
    due = run(Schedule(overhead=0.01), 5000, base=1.0, word=1.0, full=1.0)
    assert [s for s in due["full"] if s > 100] == [1024, 2048, 3072, 4096]


def test_samples_over_the_limit_are_rare_once_a_run_is_under_way():
    # Steps of 1 ms: digests of the whole model take a twentieth of one, tensor by tensor a third.
    schedule = Schedule(overhead=0.01, first_step=10_000)
    due = run(schedule, 20_000, step_seconds=1e-3, word=5e-5, full=3e-4, first=10_000)
    before = [s for s in due["full"] if 11_100 <= s < 12_048]
    assert len(before) > 8
    assert [s for s in due["full"] if s >= 12_200] == [12_288, 16_384, 20_480, 24_576, 28_672]
    assert len([s for s in due["word"] if 13_000 <= s < 14_000]) > 10

    # Who allows more gets more samples; and a sample that has become cheap is no longer rare.
    generous = Schedule(overhead=0.05)
    due = run(generous, 8000, step_seconds=1e-3, word=1e-4, full=3e-4)
    assert len([s for s in due["full"] if s >= 4000]) > 25
    run(schedule, 80_000, step_seconds=1e-3, word=1e-5, full=3e-5, first=30_000)
    assert schedule.exponents["full"] < 8


def test_losses_come_although_they_exceed_the_limit():
    schedule = Schedule(overhead=0.01)
    due = run(schedule, 20_000, step_seconds=1e-3, basic=3e-4, word=3e-5, full=3e-4)
    assert len([s for s in due["basic"] if s >= 4096]) > 30
    # What adds little to a step that is slow already comes as often.
    assert len([s for s in due["word"] if s >= 4096]) > 30
    assert [s for s in due["full"] if s >= 4096] == [4096, 8192, 12_288, 16_384]


def test_under_way_a_tier_is_thinned_to_a_small_share_or_to_every_two_seconds():
    found = {}
    for step_seconds in (0.01, 0.04, 0.1, 0.5, 2.0):
        schedule = Schedule(overhead=0.01)
        run(schedule, 4096, step_seconds=step_seconds, basic=2.5e-4, word=0.04 * step_seconds)
        found[step_seconds] = tuple(1 << schedule.exponents[t] for t in ("basic", "word"))
    # Losses three times a second or more, at every step where the budget bears that; digests at
    # least every four seconds, and of long steps as often as before.
    assert found == {0.01: (32, 64), 0.04: (8, 64), 0.1: (1, 32), 0.5: (1, 16), 2.0: (1, 16)}


def test_what_is_read_once_more_belongs_to_the_sample_before():
    shares, intervals = [], []
    for together in (True, False):
        schedule = Schedule(overhead=0.01, dense_steps=0, dense_basic_steps=0, steps_under_way=0)
        step = 0
        while step < 20_000:
            word = dict(zip(TIERS, schedule.plan(step), strict=True))["word"]
            tiers = {"basic": 1e-4} | ({"word": 5e-4 if together else 2e-4} if word else {})
            schedule.note(step, step_seconds=0.01, base=0.0, tiers=tiers)
            step = schedule.next_due(step)
            if word and not together:
                # The step after it, at which nothing is due.
                tiers = {"basic": 1e-4, "word": 2e-4}
                schedule.note(step, step_seconds=0.01, base=0.0, tiers=tiers, again=[*tiers])
        shares.append(schedule.share())
        intervals.append(schedule.exponents)
    assert shares[0] == shares[1]
    assert intervals[0] == intervals[1]
    assert intervals[0]["word"] > intervals[0]["basic"]


def test_what_is_due_itself_is_no_part_of_the_sample_before():
    schedule = Schedule(overhead=1.0)
    for step in range(0, 200, 2):
        schedule.note(step, step_seconds=1.0, base=0.0, tiers={"basic": 0.01, "word": 0.03})
        tiers = {"basic": 0.01, "word": 0.02}
        schedule.note(step + 1, step_seconds=1.0, base=0.0, tiers=tiers, again=["word"])
    assert set(schedule.exponents.values()) == {0}
    assert schedule.share() == pytest.approx(0.01 + 0.05)


def test_the_step_after_a_sample_over_the_limit_does_not_make_it_come_more_often():
    schedule = Schedule(overhead=0.01, dense_steps=0, dense_basic_steps=0, steps_under_way=0)
    step, found = 0, []
    while step < 400_000:
        word = schedule.due("word", step)
        tiers = {"basic": 2.5e-4} | ({"word": 1.2e-3} if word else {})
        schedule.note(step, step_seconds=0.01, base=0.0, tiers=tiers)
        if word:
            tiers = {"basic": 2.5e-4, "word": 2e-4}
            schedule.note(step + 1, step_seconds=0.01, base=0.0, tiers=tiers, again=[*tiers])
        step = schedule.next_due(step)
        found.append(schedule.exponents["word"])
    # A sample takes more than a tenth of a step, the step after it does not.
    assert set(found[len(found) // 2 :]) == {12}


def test_there_is_no_plan_before_samples_were_noted():
    schedule = Schedule(overhead=0.01)
    run(schedule, 7)
    assert not schedule.is_made
    run(schedule, 1, first=7)
    assert schedule.is_made


def test_a_run_of_long_steps_is_under_way_after_20_seconds():
    schedule = Schedule(overhead=0.01)
    due = run(schedule, 1200, step_seconds=0.1, basic=2e-3)
    # Losses of the first 1,024 steps are recorded whatever these take, gradient norms for 20 s.
    assert due["basic"][:1024] == list(range(1024))
    assert [s for s in due["basic"] if s >= 1024] == list(range(1024, 1200, 32))
    assert [schedule.due("signals", s) for s in (300, 301, 303)] == [False, False, False]


@pytest.mark.parametrize("slower", [1, 10, 100])
def test_how_busy_a_machine_is_does_not_change_which_losses_a_short_run_has(slower):
    schedule = Schedule(overhead=0.01)
    due = run(schedule, 1000, step_seconds=5e-3 * slower, basic=3e-4 * slower)
    assert due["basic"] == list(range(1000))


def test_the_plan_changes_as_soon_as_a_run_is_under_way():
    schedule = Schedule(overhead=0.01)
    due = run(schedule, 2300, step_seconds=1e-3, basic=4e-5, word=3e-5)
    before = [s for s in due["basic"] if 1600 <= s < 2048]
    after = [s for s in due["basic"] if 2048 < s]
    assert before == list(range(1600, 2048, before[1] - before[0]))
    assert after == list(range(2048 + after[1] - after[0], 2300, after[1] - after[0]))
    assert after[1] - after[0] > before[1] - before[0]


def test_of_cheap_samples_one_in_four_is_noted_once_a_run_is_under_way():
    schedule = Schedule(overhead=0.01)
    assert all(schedule.wants(step, 0.01) for step in range(100))
    run(schedule, 4096, step_seconds=0.01, basic=2.5e-4)
    assert schedule.exponents["basic"] == 5
    samples = range(4096, 5120, 32)
    assert [s for s in samples if schedule.wants(s, 0.3)] == list(range(4128, 5120, 128))
    assert all(schedule.wants(s, 1.1) for s in samples)


COSTS = {"basic": 2.5e-4, "signals": 5e-4, "word": 4e-4, "full": 5e-4, "state": 5e-4}


def test_a_training_that_becomes_slower_is_sampled_as_often_as_before():
    for before, after in ((1.5e-3, 15e-3), (1.5e-3, 0.15), (2e-3, 1.0)):
        sampled = trained(
            Schedule(overhead=0.01),
            20_000,
            step_seconds=lambda step, b=before, a=after: b if step < 16_000 else a,
            costs=COSTS,
        )
        changed = next(at for step, at, _ in sampled if step >= 16_000)
        known = Schedule(overhead=0.01)
        trained(known, 8000, step_seconds=lambda step, a=after: a, costs=COSTS)
        right = next(
            at
            for _, at, exponents in sampled
            if at > changed
            and all(exponents[t] <= known.exponents[t] + 1 for t in ("basic", "full"))
        )
        # What takes long is that steps pass until one is sampled, twice.
        assert right - changed <= 3 * 512 * after, (before, after)


def test_a_training_that_becomes_faster_is_sampled_less():
    sampled = trained(
        Schedule(overhead=0.01),
        60_000,
        step_seconds=lambda step: 0.02 if step < 4000 else 2e-3,
        costs=COSTS,
    )
    assert {e["basic"] for s, _, e in sampled if 3500 < s < 4000} < {3, 4, 5}
    assert {e["basic"] for s, _, e in sampled if s > 6000} < {7, 8, 9}


def test_a_pause_does_not_end_the_dense_start():
    sampled = trained(
        Schedule(overhead=0.01),
        1500,
        step_seconds=lambda step: 25.0 if step in (0, 5, 300) else 0.01,
        costs=COSTS,
    )
    assert [s for s, _, _ in sampled if s < 1024] == list(range(1024))


def test_seconds_are_counted_as_they_pass_where_steps_are_left_out():
    # A worker of sixteen, whose steps are counted for the whole job.
    schedule = Schedule(overhead=0.01)
    for turn in range(300):
        step = 16 * turn
        basic = schedule.due("basic", step)
        assert basic or turn >= 64
        if turn < 64:
            schedule.note(step, step_seconds=0.1, base=0.0, tiers={"basic": 1e-5}, since=0.1)
    assert schedule._elapsed < 64 * 0.1


def test_a_cost_at_the_edge_of_the_share_under_way_does_not_make_the_plan_jump():
    schedule = Schedule(overhead=0.01)
    seen = set()
    for turn in range(20):
        cost = 2.4e-4 if turn % 2 else 2.7e-4
        run(schedule, 4096, step_seconds=0.01, basic=cost, first=4096 * turn)
        seen.add(schedule.exponents["basic"])
    assert seen == {6}


def test_noise_under_way_does_not_make_the_plan_jump():
    generator = random.Random(0)
    plans = {}
    for name, step_seconds in (("short", 1.3e-3), ("ten", 10e-3), ("edge", 83e-3)):
        sampled = trained(
            Schedule(overhead=0.01),
            30_000,
            step_seconds=lambda step, s=step_seconds: s,
            costs=COSTS,
            jitter=lambda step: generator.choice((0.7, 0.8, 1.0, 1.0, 1.2, 2.0)),
        )
        late = [e for s, _, e in sampled if s > 15_000]
        plans[name] = sum(a != b for a, b in itertools.pairwise(late))
    assert all(changes <= 2 for changes in plans.values()), plans


def test_samples_over_the_limit_come_every_48_seconds_at_least():
    intervals = {}
    for step_seconds in (1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0):
        schedule = Schedule(overhead=0.01)
        run(schedule, 12_000, step_seconds=step_seconds, full=0.3 * step_seconds)
        intervals[step_seconds] = 1 << schedule.exponents["full"]
    # What the budget bears is one step in 64.
    assert intervals == {1e-3: 4096, 1e-2: 4096, 1e-1: 256, 1.0: 64, 10.0: 64, 100.0: 64}


def test_a_clock_that_stands_still_fails_nothing():
    schedule = Schedule(overhead=0.01)
    run(schedule, 3000, step_seconds=0.0, word=1e-4, full=1e-4)
    assert schedule.exponents["full"] <= 12


def test_the_first_samples_with_cold_caches_are_not_judged():
    schedule = Schedule(overhead=0.01)
    run(schedule, 8, step_seconds=2e-3, full=4e-3)
    due = run(schedule, 20_000, step_seconds=2e-3, full=1.5e-4, first=8)
    assert len([s for s in due["full"] if s > 2200]) > 50


def test_samples_at_the_limit_do_not_jump():
    schedule = Schedule(overhead=0.01)
    run(schedule, 4096, step_seconds=1e-3, word=1e-4, full=1.1e-4)
    seen = set()
    for turn in range(20):
        cost = 1.1e-4 if turn % 2 else 0.9e-4
        first = 4096 * (turn + 1)
        run(schedule, 4096, step_seconds=1e-3, word=1e-4, full=cost, first=first)
        seen.add(schedule.exponents["full"])
    assert seen == {12}


@given(
    costs=st.lists(st.tuples(st.floats(1e-6, 1e-2), st.floats(1e-6, 1e-1)), min_size=2, max_size=5)
)
def test_two_ranks_always_share_the_sparser_ones_steps(costs):
    schedules = []
    for word, full in costs:
        schedule = Schedule(overhead=0.01)
        run(schedule, 400, word=word, full=full)
        schedules.append(schedule)
    for tier in TIERS:
        sparsest = max(s.exponents[tier] for s in schedules)
        shared = range(0, 1 << 12, 1 << sparsest)
        assert all(s.due(tier, step) for s in schedules for step in shared)


def test_noise_does_not_make_the_plan_jump():
    schedule = Schedule(overhead=0.01)
    seen = set()
    for step in range(1000):
        cost = 1.0e-4 * (1.3 if step % 3 else 0.8)
        tiers = {"word": cost} if schedule.due("word", step) else {}
        schedule.note(step, step_seconds=0.01, base=0.0, tiers=tiers)
        if step > 200:
            seen.add(schedule.exponents["word"])
    assert len(seen) == 1


def signals_due(schedule, costs, *, first=0, step_seconds=0.01):
    """Plays steps at which the tier `signals` costs what is given; returns those at which it was
    due."""
    due = []
    for step, cost in enumerate(costs, start=first):
        tiers = {}
        if schedule.due("signals", step):
            due.append(step)
            tiers["signals"] = cost
        schedule.note(step, step_seconds=step_seconds, base=0.0, tiers=tiers)
    return due


def test_gradient_norms_of_the_first_steps_are_dense_while_they_are_cheap():
    dear, cheap = [4e-4] * 200, [1e-4] * 800
    due = signals_due(Schedule(overhead=0.01), dear + cheap)
    assert len([s for s in due if 100 <= s < 200]) < 30
    assert [s for s in due if s >= 600] == list(range(600, 1000))
    # Beyond the first 1,024 steps only what the budget bears.
    schedule = Schedule(overhead=0.01)
    signals_due(schedule, [1e-4] * 1024)
    assert len(signals_due(schedule, [1e-4] * 1024, first=1024)) < 300


def test_who_allows_more_gets_more_samples():
    costs = [4e-4] * 400
    assert len(signals_due(Schedule(overhead=0.01), costs)) < 120
    assert signals_due(Schedule(overhead=0.1), costs) == list(range(400))
