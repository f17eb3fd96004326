"""A value far outside its own recent past has the next steps sampled, a bounded number of times."""

import math
import random
from itertools import pairwise

import pytest

from rankscope.agent.tripwires import SAMPLES, Tripwires


def tripped(values, metric="loss", wires=None, first=0):
    """Steps at which the values of a metric trip."""
    wires = wires or Tripwires(first)
    trips = [wires.take(step, {metric: v}) for step, v in enumerate(values, start=first)]
    return [trip.step for trip in trips if trip is not None]


def noisy(count, middle=1.0, spread=0.2, seed=0):
    generator = random.Random(seed)
    return [middle * math.exp(generator.gauss(0, spread)) for _ in range(count)]


@pytest.mark.parametrize(
    ("metric", "value"),
    [
        ("loss", 50.0),
        ("loss", -40.0),
        ("loss", math.nan),
        ("grad_norm_preclip", 7500.0),
        ("grad_norm_preclip", 0.0),
        ("grad_norm_local", math.inf),
        ("clip_coefficient", 1e-4),
        ("amp_scale", 0.01),
        ("step_seconds", 20.0),
    ],
)
def test_a_value_far_from_those_before_it_trips_at_its_step(metric, value):
    values = noisy(200)
    values[101] = value
    assert tripped(values, metric) == [101]


def test_what_comes_every_third_step_is_far_each_time_as_long_as_there_are_tokens():
    values = [7500.0 if step >= 100 and step % 3 == 0 else v for step, v in enumerate(noisy(1100))]
    found = tripped(values, "grad_norm_preclip")
    assert found[:3] == [102, 120, 138]
    # Four at once of one metric, and one more each 1,024 steps.
    assert len(found) == 4
    assert len(tripped([*values, *values], "grad_norm_preclip")) in (5, 6)


def test_nothing_is_far_where_little_is_known():
    assert tripped([1.0] * 10 + [100.0]) == []
    assert tripped([math.nan] * 100) == [0]
    assert tripped([1.0, 2.0, 0.5] * 100, "a/metric/of/the/user") == []


def test_what_goes_by_itself_is_not_far():
    fall = [2.3 * math.exp(-step / 40) + 0.1 * v for step, v in enumerate(noisy(2000))]
    assert tripped(fall) == []
    # A loss scaler halves and doubles its scale.
    scale = [65536.0 * 2 ** (step // 500 % 2) for step in range(3000)]
    assert tripped(scale, "amp_scale") == []
    assert tripped([0.0] * 500) == []


@pytest.mark.parametrize("draw", ["gauss", "laplace", "lognormal"])
def test_false_trips_are_few_and_what_they_cost_is_bounded(draw):
    generator = random.Random(7)

    def value():
        if draw == "gauss":
            return generator.gauss(1, 0.3)
        if draw == "laplace":
            return 1 + 0.3 * generator.choice((-1, 1)) * generator.expovariate(1)
        return generator.lognormvariate(0, 1)

    values = [value() for _ in range(20_000)]
    metric = "grad_norm" if draw == "lognormal" else "loss"
    assert len(tripped(values, metric)) <= {"gauss": 0, "laplace": 20, "lognormal": 0}[draw]
    # The worst there is: half of all values are far away from the others, and no two alike.
    wild = Tripwires()
    names = ("loss", "grad_norm", "grad_norm_preclip", "clip_coefficient", "step_seconds")
    trips = []
    for step in range(20_000):
        given = {n: 10.0 ** generator.uniform(-300, 300) * (step % 3 == 0) + 1 for n in names}
        if (trip := wild.take(step, given)) is not None:
            trips.append(trip)
    sampled = {t.step + after for t in trips for after in range(1, SAMPLES + 1)}
    assert len(sampled) <= SAMPLES * len(trips) <= SAMPLES * (8 + 20_000 / 1024)
    # Only the training's own values trip while steps are sampled, and that for a slow step alone.
    for before, after in pairwise(trips):
        if before.metric != "step_seconds" or after.metric == "step_seconds":
            assert after.step - before.step > SAMPLES
    for family in (
        [t.step for t in trips if t.metric == "step_seconds"],
        [t.step for t in trips if t.metric != "step_seconds"],
    ):
        assert all(b - a > SAMPLES for a, b in pairwise(family))


def test_a_loss_that_jumps_soon_after_a_slow_step_is_examined_all_the_same():
    wires = Tripwires()
    seen = []
    for step, (loss, seconds) in enumerate(zip(noisy(200), noisy(200, seed=1), strict=True)):
        # The trainer posts them in two parts: a loss when it is known, the time at the step's end.
        for given in (
            {"loss": 50.0 if step in (110, 114) else loss},
            {"step_seconds": 30.0 if step in (101, 105, 120) else seconds},
        ):
            if (trip := wires.take(step, given)) is not None:
                seen.append((trip.step, trip.metric))
    assert seen == [(101, "step_seconds"), (110, "loss")]


def test_of_two_values_of_one_step_that_are_far_the_training_s_own_is_examined():
    wires = Tripwires()
    for step in range(64):
        assert wires.take(step, {"step_seconds": 0.1, "loss": 1.0}) is None
    trip = wires.take(64, {"step_seconds": 9.0, "loss": 50.0})
    assert (trip.step, trip.metric) == (64, "loss")


def test_slow_steps_without_end_leave_the_loss_tokens():
    wires = Tripwires()
    slow, loss = 0, []
    for step, (usual, value) in enumerate(zip(noisy(20_000), noisy(20_000, seed=1), strict=True)):
        if wires.take(step, {"step_seconds": 30.0 if step % 5 == 0 else usual}) is not None:
            slow += 1
        jumps = step > 10_000 and step % 2_500 == 0
        if (trip := wires.take(step, {"loss": 50.0 if jumps else value})) is not None:
            loss.append(trip.step)
    assert {12_500, 15_000, 17_500} <= set(loss)
    assert slow <= 4 + 20_000 / 2048


def test_counts_that_are_new_trip_and_those_that_vary_do_not():
    epochs = ([32.0] * 99 + [17.0]) * 5
    assert tripped(epochs, "samples") == [99]
    assert tripped([32.0] * 200 + [31.0] * 200, "samples") == [200]
    assert tripped([float(step % 40) for step in range(400)], "samples") == []


def test_of_running_counts_the_increase_is_judged():
    steps = [float(step) for step in range(300)]
    assert tripped(steps, "scheduler_steps") == []
    twice = [s + max(s - 200, 0) for s in steps]
    assert tripped(twice, "scheduler_steps") == [201]
    # Steps in between that were not sampled say nothing of one.
    wires = Tripwires()
    assert [wires.take(s, {"micro_steps": 4.0 * s}) for s in [*range(100), 500, 600]] == [
        None
    ] * 102


def test_a_new_level_is_reported_once_and_then_is_the_past():
    values = noisy(200) + noisy(2000, middle=30.0, seed=1)
    assert tripped(values) == [200]


def test_it_says_what_is_usual():
    wires = Tripwires()
    for step in range(64):
        assert wires.take(step, {"grad_norm": 2.0, "loss": 1.0}) is None
    trip = wires.take(64, {"grad_norm": 500.0, "loss": 1.0})
    assert str(trip) == "grad_norm is 500 at step 64; the median of the steps before is 2"
