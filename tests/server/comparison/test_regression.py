"""Simulated trainings beside earlier ones: how often a good one fails, and a worse one passes."""

import math
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest

from rankscope.server.comparison.courses import Course
from rankscope.server.comparison.measures import Recorded
from rankscope.server.comparison.regression import compared


@dataclass(frozen=True)
class Training:
    """What trainings of one sort are like; a run of it has a seed.

    Attributes:
        noise: of a batch, as a share of the loss; `depends` on the batch before.
        seeds, speed: spread of the level and of the number of steps between seeds.
        floor, falls, pace: where the loss ends, from how far above, in how many steps.
        busy: share of the steps in which the machine had something else to do.
        worse, slower, longer, larger: factors of the loss, steps, times, memory.
        starts: whether the loss falls to below 0.
    """

    steps: int = 400
    noise: float = 0.03
    depends: float = 0.0
    seeds: float = 0.003
    speed: float = 0.05
    floor: float = 0.5
    falls: float = 2.0
    pace: float = 50.0
    machine: float = 0.1
    busy: float = 0.0
    worse: float = 1.0
    slower: float = 1.0
    longer: float = 1.0
    larger: float = 1.0
    every: int = 1
    negative: float = 0.0

    def run(self, name: str, random: np.random.Generator) -> Recorded:
        steps = np.arange(self.steps)
        speed = np.exp(self.speed * random.standard_normal()) / self.slower
        level = self.worse * np.exp(self.seeds * random.standard_normal())
        noise = random.standard_normal(self.steps)
        for i in range(1, self.steps):
            noise[i] = self.depends * noise[i - 1] + math.sqrt(1 - self.depends**2) * noise[i]
        course = (self.floor + self.falls * np.exp(-steps * speed / self.pace)) * level
        loss = course * np.exp(self.noise * noise) - self.negative
        machine = self.longer * np.exp(self.machine * random.standard_normal())
        seconds = 0.01 * machine * np.exp(0.1 * random.standard_normal(self.steps))
        seconds *= np.where(random.random(self.steps) < self.busy, 8.0, 1.0)
        memory = 5e8 * self.larger * np.exp(0.01 * random.standard_normal(self.steps))
        evaluations = steps[steps % 40 == 39]
        right = 1 - 0.2 * (course[evaluations] - 0.3) * np.exp(
            0.01 * random.standard_normal(len(evaluations))
        )
        kept = steps % self.every == 0
        return Recorded(
            name,
            {
                "loss": Course(steps[kept], loss[kept]),
                "step_seconds": Course(steps[kept], seconds[kept]),
                "process_resident_memory_bytes": Course(steps, memory),
                "eval/loss": Course(evaluations, course[evaluations] * level),
                "eval/accuracy": Course(evaluations, right),
            },
        )


def states(run, baseline, **options):
    found = compared(run, baseline, tolerance=options.pop("tolerance", 0.02), **options)
    return {m.name: m.state for m in found.measures}


def failures(training, other, *, runs, trials, not_run=0):
    """How often each measure failed, and `any`, where a run of the other is held against runs.

    `not_run` is how many of them have a measure that could not be made.
    """
    counted = Counter()
    left_out = 0
    for trial in range(trials):
        random = np.random.default_rng(1000 * runs + trial)
        baseline = [training.run(f"b{i}", random) for i in range(runs)]
        found = states(other.run("r", random), baseline)
        left_out += "not_run" in found.values()
        failed = [name for name, state in found.items() if state == "failed"]
        counted.update([*failed, *(["any"] if failed else [])])
    assert left_out == not_run
    return counted


PLAIN = Training()
SORTS = {
    "plain": PLAIN,
    "noisy": replace(PLAIN, noise=0.3, depends=0.5),
    "short": replace(PLAIN, steps=80, pace=10.0),
    "to nothing": replace(PLAIN, floor=0.001, falls=2.3, pace=80.0, speed=0.08),
    "negative": replace(PLAIN, negative=2.0),
    "seldom recorded": replace(PLAIN, steps=2000, pace=250.0, every=8),
}


@pytest.mark.parametrize("runs", [1, 3, 10])
@pytest.mark.parametrize("sort", SORTS)
def test_another_seed_of_the_same_training_passes(sort, runs):
    found = failures(SORTS[sort], SORTS[sort], runs=runs, trials=40)
    assert found["any"] <= 2, found


WORSE = {
    "3 % worse": (replace(PLAIN, worse=1.03), "loss"),
    "half the speed": (replace(PLAIN, longer=2.0), "step_seconds"),
    "twice the steps": (replace(PLAIN, slower=2.0), "steps_to_loss"),
    "a fourth more memory": (replace(PLAIN, larger=1.25), "process_resident_memory_bytes"),
}


@pytest.mark.parametrize("what", WORSE)
def test_a_worse_training_is_found_with_ten_runs(what):
    other, measure = WORSE[what]
    found = failures(PLAIN, other, runs=10, trials=50)
    assert found[measure] >= 45, found


@pytest.mark.parametrize("sort", sorted(SORTS.keys() - {"noisy", "negative"}))
def test_twice_the_steps_and_half_the_speed_are_found_with_three_runs(sort):
    training = SORTS[sort]
    slow = failures(training, replace(training, slower=2.0), runs=3, trials=20)
    assert slow["steps_to_loss"] >= 19, slow
    assert failures(training, replace(training, longer=2.0), runs=3, trials=20)["any"] >= 19


def test_much_worse_is_found_with_one_run():
    much = replace(PLAIN, worse=1.15, longer=2.5)
    found = failures(PLAIN, much, runs=1, trials=20)
    assert found["loss"] >= 19, found
    assert found["step_seconds"] >= 19, found


def test_a_busy_machine_is_no_slower_training():
    """Most steps of the run are long, of the baseline few; those that are short are as short."""
    busy = replace(PLAIN, busy=0.7)
    found = failures(replace(PLAIN, busy=0.1), busy, runs=3, trials=20, not_run=20)
    assert not found["step_seconds"]
    slower = failures(replace(PLAIN, busy=0.5), replace(busy, longer=2.0), runs=10, trials=20)
    assert slower["step_seconds"] >= 18, slower


def test_better_passes():
    better = replace(PLAIN, worse=0.8, slower=0.5, longer=0.5, larger=0.5)
    assert not failures(PLAIN, better, runs=5, trials=10)["any"]


def of(seed, training=PLAIN, count=3):
    random = np.random.default_rng(seed)
    return [training.run(f"b{i}", random) for i in range(count)]


def changed(run, **courses):
    """The run with other courses; None takes one away."""
    known = {**run.courses, **{k.replace("__", "/"): v for k, v in courses.items()}}
    return replace(run, courses={k: v for k, v in known.items() if v is not None})


def test_a_run_beside_itself_passes_to_the_last_bit():
    (run,) = of(1, count=1)
    twins = [replace(run, name=f"b{i}") for i in range(3)]
    for measure in compared(run, twins, tolerance=0.0).measures:
        assert measure.state == "passed", measure
        assert measure.value == pytest.approx(measure.expected)
        assert measure.runs == ("b0", "b1", "b2")


def test_a_loss_that_is_not_finite_fails_and_such_a_baseline_is_no_measure():
    run, *baseline = of(2, count=5)
    loss = run.courses["loss"]
    ending = np.where(loss.steps > 390, np.nan, loss.values)
    broken = changed(run, loss=Course(loss.steps, ending))
    failed = compared(broken, baseline, tolerance=0.02).measures[0]
    assert failed.state == "failed"
    assert "not finite at 9 of the last 40" in failed.why
    beside = compared(run, [replace(broken, name="broken"), *baseline], tolerance=0.02)
    assert beside.measures[0].runs == tuple(r.name for r in baseline)
    assert states(run, [replace(broken, name="broken")])["loss"] == "not_run"


def test_what_one_side_has_not_recorded_is_not_measured():
    run, *baseline = of(3, count=4)
    without = changed(run, eval__loss=None, step_seconds=None)
    found = {m.name: m for m in compared(without, baseline, tolerance=0.02).measures}
    assert found["eval/loss"].state == found["step_seconds"].state == "not_run"
    assert found["eval/loss"].why == "the run has not recorded it, its baseline has"
    nothing = [replace(b, courses={}) for b in baseline]
    compared_with_none = compared(run, nothing, tolerance=0.02)
    assert [m.state for m in compared_with_none.measures] == ["not_run"]
    assert not compared_with_none.convergence
    assert set(compared_with_none.left_out) == {b.name for b in baseline}
    assert not compared(Recorded("empty"), baseline, tolerance=0.02).convergence


def test_runs_are_compared_at_steps_that_all_have():
    run, *baseline = of(4, replace(PLAIN, steps=800), count=4)
    loss = run.courses["loss"]
    half = changed(run, loss=Course(loss.steps[:450], loss.values[:450]))
    found = compared(half, baseline, tolerance=0.02)
    assert found.steps == (0, 449)
    assert found.measures[0].steps[1] == 449
    assert found.measures[0].state == "passed"
    short = changed(run, loss=Course(loss.steps[:300], loss.values[:300]))
    (none,) = compared(short, baseline, tolerance=0.02).measures
    assert none.state == "not_run"
    assert none.why == (
        "the run and its baseline have 300 steps in common, fewer than half of the baseline's 800"
    )


def test_a_baseline_that_ends_early_is_left_out():
    run, *baseline = of(5, count=4)
    loss = baseline[0].courses["loss"]
    baseline[0] = changed(baseline[0], loss=Course(loss.steps[:100], loss.values[:100]))
    found = compared(run, baseline, tolerance=0.02)
    assert found.left_out == {baseline[0].name: "it ends at step 99"}
    assert found.steps == (0, 399)


def test_nor_is_one_that_begins_late_a_measure_of_the_others_steps():
    run, *baseline = of(5, count=5)
    late = {n: Course(c.steps[350:], c.values[350:]) for n, c in baseline[0].courses.items()}
    baseline[0] = replace(baseline[0], courses={n: c for n, c in late.items() if len(c.steps)})
    found = compared(run, baseline, tolerance=0.02)
    assert found.left_out == {baseline[0].name: "it begins at step 350"}
    assert found.steps == (0, 399)


def test_one_odd_baseline_does_not_keep_the_others_from_being_compared():
    run, *baseline = of(9, count=6)
    odd = baseline[0]
    evaluations, seconds = odd.courses["eval/loss"], odd.courses["step_seconds"]
    baseline[0] = changed(
        odd,
        eval__loss=Course(evaluations.steps + 1, evaluations.values),
        step_seconds=Course(seconds.steps[-2:], seconds.values[-2:]),
        process_resident_memory_bytes=Course(seconds.steps[-2:], np.zeros(2)),
    )
    worse = changed(
        run,
        eval__loss=replace(run.courses["eval/loss"], values=2 * run.courses["eval/loss"].values),
        step_seconds=replace(seconds, values=3 * run.courses["step_seconds"].values),
    )
    others = tuple(r.name for r in baseline[1:])
    measures = {m.name: m for m in compared(worse, baseline, tolerance=0.02).measures}
    assert measures["eval/loss"].state == measures["step_seconds"].state == "failed"
    for name in ("eval/loss", "step_seconds", "process_resident_memory_bytes"):
        assert measures[name].runs == others


def test_times_of_other_machines_are_not_compared_where_they_alone_say_the_steps():
    run, *baseline = [changed(r, loss=None, eval__loss=None) for r in of(10, count=4)]
    faster = [replace(r, elsewhere=True) for r in baseline[1:]]
    measures = {m.name: m for m in compared(run, [baseline[0], *faster], tolerance=0.02).measures}
    assert measures["step_seconds"].runs == (baseline[0].name,)
    assert measures["process_resident_memory_bytes"].runs == (baseline[0].name,)


def test_a_loss_that_says_nothing_is_not_measured_and_what_was_evaluated_is():
    run, *baseline = of(6, count=4)
    found = states(run, baseline, no_measure="a game", other_machine="4 ranks, not 2")
    assert found["loss"] == found["steps_to_loss"] == found["step_seconds"] == "not_run"
    assert found["eval/loss"] == "passed"


def test_evaluations_at_other_steps_are_not_compared():
    run, *baseline = of(7, count=3)
    course = run.courses["eval/loss"]
    shifted = changed(run, eval__loss=Course(course.steps + 1, course.values))
    assert states(shifted, baseline)["eval/loss"] == "not_run"


def test_less_accuracy_is_worse():
    run, *baseline = of(8, count=6)
    course = run.courses["eval/accuracy"]
    less = changed(run, eval__accuracy=Course(course.steps, 0.93 * course.values))
    more = changed(run, eval__accuracy=Course(course.steps, 1.03 * course.values))
    assert states(less, baseline)["eval/accuracy"] == "failed"
    assert states(more, baseline)["eval/accuracy"] == "passed"


def test_steps_are_counted_to_a_loss_that_every_baseline_had_reached_half_way():
    random = np.random.default_rng(9)
    training = replace(PLAIN, noise=0.0, speed=0.0, seeds=0.0, falls=3.0, pace=300.0)
    baseline = [training.run(f"b{i}", random) for i in range(3)]
    slow = replace(training, slower=1.9).run("r", random)
    found = {m.name: m for m in compared(slow, baseline, tolerance=0.02).measures}
    measure = found["steps_to_loss"]
    assert measure.expected == pytest.approx(200, rel=0.02)
    assert measure.value / measure.expected == pytest.approx(1.9, rel=0.02)
    never = replace(training, slower=4.0).run("r", random)
    found = {m.name: m for m in compared(never, baseline, tolerance=0.02).measures}
    assert found["steps_to_loss"].value == math.inf
    assert found["steps_to_loss"].state == "failed"


def test_a_loss_that_does_not_fall_has_no_steps_to_it():
    flat = replace(PLAIN, falls=0.0)
    run, *baseline = of(10, flat, count=4)
    found = states(run, baseline)
    assert found["loss"] == "passed"
    assert found["steps_to_loss"] in ("not_run", "passed")


@pytest.mark.parametrize("factor", [1e-6, 1e6])
def test_units_do_not_matter(factor):
    run, *baseline = of(11, replace(PLAIN, negative=2.0), count=4)

    def scaled(one):
        loss = one.courses["loss"]
        return changed(one, loss=Course(loss.steps, loss.values * factor))

    plain = compared(run, baseline, tolerance=0.02).measures[0]
    other = compared(scaled(run), [scaled(b) for b in baseline], tolerance=0.02).measures[0]
    assert other.state == plain.state
    assert other.value == pytest.approx(factor * plain.value)
    assert other.bound == pytest.approx(factor * plain.bound)
