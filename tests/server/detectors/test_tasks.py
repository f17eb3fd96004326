"""Tasks that are trained in turn are judged by the steps of one of them."""

import numpy as np
import pytest

from rankscope.server.detectors.gradient.oscillating import GradientOscillating
from rankscope.server.detectors.loss.diverging import LossDiverging
from rankscope.server.detectors.loss.oscillating import LossOscillating
from rankscope.server.detectors.tasks import Tasks
from tests.support.judging import judge, verdict
from tests.support.runs.traces import Trace

STEPS = np.arange(400)


def in_turn(tasks, *, posted=True, rises=False, first_highest=False, scale=100.0):
    """Each task has a level of its own, `scale` times that of the one before, or after it."""
    random = np.random.default_rng(0)
    course = 2.0 * np.exp(-STEPS / 200) + 0.1
    if rises:
        course = np.where(STEPS < 200, course, 5.0)
    scale = scale ** (tasks.max() - tasks if first_highest else tasks)
    noise = np.exp(0.1 * random.standard_normal((1, len(STEPS))))
    series = {"loss": course * scale * noise, "grad_norm": scale * noise}
    if posted:
        series["task"] = tasks[None, :].astype(float)
    return Trace("in turn", 0, STEPS, series)


def kinds(trace):
    detectors = [LossDiverging(), LossOscillating(), GradientOscillating()]
    return {alert.kind for alert in judge(trace, detectors, range(0, 400, 33)).alerts}


@pytest.mark.parametrize("period", [2, 3, 5])
def test_levels_of_tasks_in_a_fixed_order_are_no_oscillation(period):
    tasks = (STEPS % period == period - 1).astype(int)
    assert kinds(in_turn(tasks, posted=False))
    assert kinds(in_turn(tasks)) == set()


@pytest.mark.parametrize("period", [3, 5])
def test_the_first_task_is_no_rise_from_the_levels_of_the_others(period):
    """Before the order is known, most steps are of tasks with lower losses."""
    assert kinds(in_turn(STEPS % period, first_highest=True)) == set()


def test_what_was_found_before_the_order_was_known_is_ended():
    random = np.random.default_rng(1)
    tasks = np.where(STEPS < 150, random.integers(0, 5, len(STEPS)), STEPS % 5)
    trace = in_turn(tasks, scale=1.0)
    trace.series["loss"][:, 60:250] += 20.0
    found = judge(trace, [LossDiverging()], range(0, 400, 33))
    assert [(a.kind, a.state) for a in found.alerts] == [("loss.diverging", "resolved")]
    assert 250 <= found.alerts[0].last_step + 50 <= 320


@pytest.mark.parametrize("cuts", [(5,), (7, 8, 9), range(1, 60)])
def test_where_windows_are_cut_makes_no_difference(cuts):
    trace = in_turn(STEPS % 3, first_highest=True, rises=True)

    def found(cuts):
        made = judge(trace, [LossDiverging(), LossOscillating(), GradientOscillating()], cuts)
        return [verdict(alert) for alert in made.alerts]

    assert found(cuts) == found(()) != []


def test_a_task_that_is_taken_up_late_leaves_what_is_known_of_the_first():
    tasks = np.where(STEPS < 300, 0, STEPS % 2)
    assert "loss.diverging" in kinds(in_turn(tasks, rises=True))


def test_the_first_task_is_judged():
    assert kinds(in_turn(STEPS % 2, rises=True)) == {"loss.diverging"}


def cycle_of(tasks):
    found = Tasks()
    for window in in_turn(np.resize(tasks, len(STEPS))).windows(range(0, 400, 33)):
        found.of_first(window)
    return found.cycle


def test_only_a_fixed_order_counts():
    assert cycle_of([0, 1]) == (0, 1)
    assert cycle_of([0, 1, 1]) == (0, 1, 1)
    assert cycle_of([0]) == ()
    assert cycle_of(np.random.default_rng(0).integers(0, 2, len(STEPS))) == ()
    # A part that is trained from some step on is no task in turn.
    assert cycle_of((STEPS > 200).astype(int)) == ()
    assert cycle_of(np.where(STEPS < 200, STEPS % 2, 0)) == ()


def test_tasks_in_random_order_have_none_by_chance():
    """As of experts that get no token now and then: what is known of the loss is kept."""
    for seed in range(20):
        tasks = Tasks()
        trace = in_turn(np.random.default_rng(seed).integers(0, 2, len(STEPS)), scale=1.0)
        for window in trace.windows():
            tasks.of_first(window)
        assert tasks.known_at == -1


def test_a_loss_rises_while_it_chooses_among_ever_more_classes():
    random = np.random.default_rng(0)
    classes = np.minimum(32.0 * (1 + STEPS), 4096.0)
    loss = 0.3 * np.log(classes) * np.exp(-STEPS / 1000) - 0.8
    series = {"loss": (loss + 0.05 * random.standard_normal(len(STEPS)))[None, :]}
    assert kinds(Trace("queue", 0, STEPS, series)) == {"loss.diverging"}
    trace = Trace("queue", 0, STEPS, series | {"loss_classes": classes[None, :]})
    assert kinds(trace) == set()
    # What comes after it has been filled is judged.
    late = series["loss"] + np.where(STEPS > 300, 3.0, 0.0)
    trace = Trace("queue", 0, STEPS, {"loss": late, "loss_classes": classes[None, :]})
    assert kinds(trace) == {"loss.diverging"}


def ends_soon(nan_at=None):
    """Tasks at random, in turn from step 90 to 130, and then the first one alone."""
    random = np.random.default_rng(0)
    each = np.arange(400)
    task = np.where(each < 90, random.integers(0, 3, 400), each % 3)
    task = np.where(each >= 130, 0, task)[None].astype(float)
    if nan_at is not None:
        task[0, nan_at] = np.nan
    sizes = 100.0 ** (2 - task) * np.exp(0.1 * random.standard_normal((1, 400)))
    loss = (2 * np.exp(-each / 200) + 0.1) * sizes
    series = {"loss": loss, "grad_norm": sizes, "task": task}
    return Trace("tasks", 0, each, series)


def test_an_order_that_ends_in_the_window_in_which_it_is_known_makes_no_difference():
    detectors = [LossDiverging(), LossOscillating(), GradientOscillating()]
    found = {
        str(judge(ends_soon(), detectors, cuts).alerts)
        for cuts in ((), (105,), range(33, 400, 33), range(1, 400))
    }
    assert len(found) == 1


def test_a_task_that_is_no_number_is_not_known():
    assert judge(ends_soon(nan_at=50), [LossDiverging()]).checks
