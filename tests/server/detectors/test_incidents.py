"""What happens after an incident has begun: it ends, comes back, grows, and is reported in time."""

import pickle
from collections import deque
from dataclasses import replace

import numpy as np
import pytest

from rankscope.server.detectors.gradient.exploding import GradientExploding
from rankscope.server.detectors.loss.diverging import LossDiverging
from rankscope.server.detectors.loss.nonfinite import LossNonFinite
from rankscope.server.detectors.loss.oscillating import LossOscillating
from rankscope.server.detectors.loss.spike import LossSpike
from rankscope.server.detectors.mechanisms.history import Companions, RankHistory
from rankscope.server.detectors.rank.loss_outlier import RankLossOutlier
from rankscope.server.detectors.rank.silent import RankSilent
from rankscope.server.window import Series, Status, Window
from tests.support.judging import judge
from tests.support.runs.liveness import Timeline, silence
from tests.support.runs.scenarios import noise, recorded, spikes, swinging, two_sides
from tests.support.runs.traces import Trace


def trace(loss, **series):
    loss = np.asarray(loss, dtype=float)
    shape = loss.shape
    more = {name: np.broadcast_to(values, shape).copy() for name, values in series.items()}
    return Trace("made", 0, np.arange(shape[1]), {"loss": loss, **more})


def test_a_gradient_that_was_exactly_zero_did_not_explode():
    """As where a layer that can learn is added to one that could not."""
    norms = np.where(np.arange(300) < 100, 0.0, 0.2)
    made = trace(np.full((2, 300), 2.3), grad_norm=norms)
    found = judge(made, [GradientExploding()])
    assert found.alerts == ()
    assert found.checks["gradient.exploding"].status is Status.OK


# -------------------------------------------------------------------------------------------- loss


def test_a_loss_that_is_finite_again_resolves_and_the_next_one_is_another_incident():
    loss = noise(0).series["loss"]
    loss[:, [100, 110, 300]] = np.nan
    found = judge(trace(loss), [LossNonFinite()])
    assert [(a.first_step, a.last_step, a.state) for a in found.alerts] == [
        (100, 110, "resolved"),
        (300, 300, "resolved"),
    ]
    assert found.alerts[0].evidence["points"] == 8
    check = found.checks["loss.nonfinite"]
    assert check.status == "ok"
    assert "12 before were not" in check.why


def test_the_learning_rate_that_rose_before_is_named():
    loss = noise(0).series["loss"]
    loss[:, 200:] = np.inf
    rates = np.where(np.arange(400) < 195, 0.1, 5.0)
    (alert,) = judge(trace(loss, lr=rates), [LossNonFinite()]).alerts
    assert "raised from 0.1 to 5 (step 195)" in alert.cause
    assert alert.evidence["lr_step"] == 195


def test_of_one_rank_that_has_a_loss_nothing_is_said_of_the_others():
    loss = noise(0).series["loss"]
    loss[:, 200:] = np.nan
    one = np.zeros(loss.shape, dtype=bool)
    one[3] = True  # the last stage of a pipeline, say
    (alert,) = judge(replace(trace(loss), present={"loss": one}), [LossNonFinite()]).alerts
    assert "One rank alone has a loss at that step" in alert.cause
    assert "All 1" not in alert.cause


def test_no_loss_at_all_is_no_pass():
    empty = Trace("none", 0, np.arange(5), {"loss": np.zeros((2, 5))})
    empty = replace(empty, present={"loss": np.zeros((2, 5), dtype=bool)})
    assert judge(empty, [LossNonFinite()]).checks["loss.nonfinite"].status == "insufficient_data"


def test_spikes_long_apart_are_incidents_of_their_own():
    found = judge(spikes(0, at=[150, 250]), [LossSpike()])
    assert [a.first_step for a in found.alerts] == [150, 250]
    assert {a.severity for a in found.alerts} == {"info"}
    assert "2 spikes before" in found.checks["loss.spike"].why


def test_a_spike_that_comes_back_while_the_last_is_watched_counts_with_it():
    at = [150, 220, 300, 340]
    found = judge(spikes(0, at=at), [LossSpike()])
    assert [a.first_step for a in found.alerts] == [150, 220, 300]
    last = found.alerts[-1]
    assert (last.evidence["spikes"], last.last_step, last.severity) == (4, 340, "critical")
    assert "the last of 4 recent spikes" in last.title


def test_spikes_are_forgotten_after_a_thousand_steps():
    loss = noise(0, steps=2500, decay=0.05).series["loss"]
    loss[:, [200, 900, 1600, 2300]] *= 40
    found = judge(trace(loss), [LossSpike()])
    assert [(a.severity, a.evidence["spikes"]) for a in found.alerts] == [
        ("info", 1),
        ("info", 2),
        ("info", 2),
        ("info", 2),
    ]


def test_the_only_rank_carries_nothing_alone():
    loss = noise(0, ranks=1).series["loss"]
    loss[:, 200] *= 40
    (alert,) = judge(trace(loss), [LossSpike()]).alerts
    assert alert.ranks == ()


def test_a_new_level_is_taken_for_what_it_is_in_the_end():
    loss = noise(0, steps=700, decay=0.05).series["loss"]
    loss[:, 300:] *= 20
    loss[:, 600] *= 30
    found = judge(trace(loss), [LossSpike()])
    assert [(a.first_step, a.severity) for a in found.alerts] == [
        (300, "critical"),
        (600, "info"),
    ]
    assert found.alerts[0].state == "resolved"
    assert "has not come back" in found.alerts[0].title


def test_a_gradient_that_rose_first_speaks_for_the_optimisation():
    made = spikes(0, at=[250])
    norms = np.ones(400)
    norms[247] = 12.0
    (alert,) = judge(trace(made.series["loss"], grad_norm=norms), [LossSpike()]).alerts
    assert "12 times its usual at step 247" in alert.cause
    assert alert.evidence["grad_norm_step"] == 247


def test_values_that_are_not_finite_are_left_to_their_own_detector():
    loss = noise(0).series["loss"]
    loss[:, 200] = np.nan
    detectors = [LossSpike(), LossDiverging(), LossOscillating(), RankLossOutlier()]
    assert judge(trace(loss), detectors).alerts == ()


def test_a_rise_is_over_when_the_loss_is_back():
    course = noise(0, steps=900, decay=0.05, sigma=0.05).series["loss"]
    course[:, 300:400] += 1.2
    (alert,) = judge(trace(course), [LossDiverging()]).alerts
    assert (alert.state, alert.severity) == ("resolved", "warning")
    assert 295 <= alert.first_step <= 305
    assert 390 <= alert.last_step <= 410
    assert "No rise of the learning rate was seen before it" in alert.cause


def test_a_slow_swing_goes_on_being_one_incident_on_all_scales():
    loss = noise(0, level=1.0, steps=1500).series["loss"]
    at = np.arange(1500)
    loss[:, 150:] *= np.exp(0.8 * np.cos(2 * np.pi * at / 12) + np.cos(np.pi * at / 40))[150:]
    (alert,) = judge(trace(loss), [LossOscillating()]).alerts
    assert alert.state == "open"


def test_swings_that_end_resolve():
    made = swinging(0, period=2, steps=900)
    quiet = noise(1, level=1.0, steps=900).series["loss"]
    made.series["loss"][:, 400:] = quiet[:, 400:]
    rates = np.where(np.arange(900) < 140, 0.1, 0.4)
    (alert,) = judge(trace(made.series["loss"], lr=rates), [LossOscillating()]).alerts
    assert alert.state == "resolved"
    assert "At a learning rate of 0.1 the loss did not swing" in alert.remedy


def momentum(*, factor, rate, steps=500):
    """Heavy-ball descent, by the formula, where one direction is far steeper than 31 others."""
    steepness = np.concatenate([[1.0], np.geomspace(0.05, 1e-4, 31)])
    place, velocity = np.ones(32), np.zeros(32)
    loss = np.empty((4, steps))
    for step in range(steps):
        loss[:, step] = 0.3 + steepness @ place**2 / steepness.sum()
        velocity = factor * velocity + steepness * place
        place = place - rate * velocity
    return trace(loss * np.exp(0.01 * np.random.default_rng(0).standard_normal(loss.shape)))


@pytest.mark.parametrize(("factor", "rate", "period"), [(0.995, 0.3, 5.7), (0.99, 0.2, 7)])
def test_swings_of_one_clear_period_count_also_while_the_loss_falls(factor, rate, period):
    (alert,) = judge(momentum(factor=factor, rate=rate), [LossOscillating()]).alerts
    assert alert.first_step < 60
    assert alert.evidence["period"] == pytest.approx(period, rel=0.05)
    assert alert.evidence["trend"] < -1
    assert alert.severity == "warning"  # it fades, however its frequencies come into step


def test_usual_momentum_does_not_swing():
    assert judge(momentum(factor=0.9, rate=0.3), [LossOscillating()]).alerts == ()


# ------------------------------------------------------------------------------------------- ranks


def test_ranks_that_come_later_are_aligned():
    history = RankHistory(3)
    history.push(0, np.array([0, 2]), np.array([1.0, 3.0]))
    history.push(1, np.array([0, 1, 2]), np.array([4.0, 5.0, 6.0]))
    assert np.array_equal(
        history.matrix(np.array([0, 1, 2])), [[1, np.nan, 3], [4, 5, 6]], equal_nan=True
    )
    assert history.matrix(np.array([0, 1, 2]), last=1).tolist() == [[4, 5, 6]]


def test_a_rank_that_joins_is_judged_once_it_has_enough():
    whole = two_sides(0, ranks=4, onset=200)
    detector = RankLossOutlier()
    state = detector.start()
    values = whole.series["loss"]
    values[3, :] = values[0, :] * 1.02
    values[2, 200:] = values[0, 200:] * 1.01
    values[3, 150:] += 1.5
    for low in range(0, 400, 10):
        ranks = np.arange(3 if low < 150 else 4)
        block = values[: len(ranks), low : low + 10]
        window = Window(
            4,
            ranks,
            np.arange(low, low + 10),
            {"loss": Series(block, np.ones(block.shape, dtype=bool))},
            last_step=low + 9,
        )
        outcome = detector.advance(window, state)
    (finding,) = outcome.findings
    assert finding.ranks == (3,)
    assert finding.first_step == 150


def test_ranks_that_hardly_post_are_not_judged():
    made = two_sides(0, ranks=3, onset=0)
    present = (np.arange(400) + np.arange(3)[:, None]) % 3 != 0
    found = judge(replace(made, present={"loss": present}), [RankLossOutlier()])
    assert found.alerts == ()


def test_an_outlier_from_the_first_step_on_is_dated_there():
    (alert,) = judge(two_sides(0, ranks=3, onset=0), [RankLossOutlier()]).alerts
    assert alert.first_step == 0


def test_an_outlier_that_is_mended_resolves():
    made = two_sides(0, ranks=4, onset=0)
    loss = noise(0, steps=600).series["loss"]
    loss[1, 200:300] += 1.5
    loss[3, :] = loss[0, :] * 1.01
    (alert,) = judge(trace(loss), [RankLossOutlier()]).alerts
    assert (alert.ranks, alert.state) == ((1,), "resolved")
    assert alert.first_step == 200
    assert len(made.series["loss"]) == 4


@pytest.mark.parametrize(("less", "suspects"), [(0.9, (1, 2)), (0.5, (1,)), (0.25, (1,))])
def test_a_second_rank_at_fault_does_not_hide_the_first(less, suspects):
    loss = noise(0, ranks=8).series["loss"]
    loss[1, 200:] += 2.5
    loss[2, 200:] += less * 2.5
    (alert,) = judge(trace(loss), [RankLossOutlier()]).alerts
    assert (alert.ranks, alert.evidence["decided"]) == (suspects, True)
    assert alert.first_step == 200


def test_a_rank_below_the_others_is_an_outlier_too():
    loss = noise(0, level=1.0).series["loss"]
    loss[2, 200:] *= 0.3
    (alert,) = judge(trace(loss), [RankLossOutlier()]).alerts
    assert alert.ranks == (2,)
    assert "below" in alert.title
    assert "easier data" in alert.cause


def test_accuracies_stand_beside_it_where_they_are_posted():
    loss = noise(0).series["loss"]
    loss[2, 200:] += 2
    accuracy = np.full(loss.shape, 0.9)
    accuracy[2, 200:] = 0.1
    (alert,) = judge(trace(loss, accuracy=accuracy), [RankLossOutlier()]).alerts
    assert alert.evidence["accuracy"] == pytest.approx(0.1)
    assert "Its accuracy is 10 %, the others' 90 %." in alert.cause


def test_ranks_of_one_lost_machine_are_one_alert():
    found = judge(silence(0, ranks=8, rank=6, hosts=4, others="fail", seconds=70), [RankSilent()])
    assert [a.ranks for a in found.alerts] == [(6,)]

    def both(time):
        lives = silence(0, ranks=8, rank=6, hosts=4, others="fail").lives(time)
        seventh = replace(lives[6], rank=7)
        return [*lives[:7], seventh]

    found = judge(Timeline(world_size=8, seconds=70, lives=both), [RankSilent()])
    assert [(a.ranks, a.key) for a in found.alerts] == [((6, 7), "host:node3")]


def test_nobody_is_missed_where_nobody_is_heard():
    """The job as a whole is gone: that, and not that a rank of it never came."""
    made = silence(0, others="stop", at=10.0, never=True, seconds=300)
    assert [alert.key for alert in judge(made, [RankSilent()]).alerts] == ["job"]


def test_rare_heartbeats_are_waited_for():
    quiet = silence(0, others="go-on", at=60.0, seconds=112)
    rare = replace(
        quiet, lives=lambda time: [replace(r, heartbeat_seconds=20.0) for r in quiet.lives(time)]
    )
    assert len(judge(quiet, [RankSilent()]).alerts) == 1
    assert judge(rare, [RankSilent()]).alerts == ()


def test_without_any_rank_there_is_no_answer():
    empty = Window(4, np.arange(0), np.arange(0), {}, now=1.0)
    detector = RankSilent()
    checks = detector.advance(empty, detector.start()).checks
    assert checks["rank.silent"].status == "insufficient_data"


# ---------------------------------------------------------------------------------------- the rest


def test_a_fall_of_the_learning_rate_is_no_rise():
    companions = Companions()
    values = np.array([[1.0, 1.0, 0.5, 0.5, 0.6, 0.6]])
    window = Window(
        1, np.arange(1), np.arange(6), {"lr": Series(values, np.ones((1, 6), dtype=bool))}
    )
    companions.take(window)
    companions.pass_to(5)
    assert companions.raised_rate(5, before=10, factor=1.5) is None
    assert companions.raised_rate(50, before=10, factor=1.5) is None
    assert companions.raised_rate(2, before=1, factor=1.5) is None
    assert companions.gradient_rose_first(5) is None


def test_a_rate_that_is_lower_after_its_rise_than_before_it():
    rates = {step: 1e-3 - 1e-5 * step for step in range(20)} | {12: 0.1}
    companions = Companions(rates=deque(rates.items()))
    rise = companions.raised_rate(18, before=15, factor=1.5)
    assert rise == {"lr_before": rates[11], "lr_after": 0.1, "lr_step": 12}


def test_a_recorded_run_is_what_was_recorded(tmp_path):
    made = recorded(0, trace="H33-demo")
    made.save(tmp_path / "again.npz")
    again = Trace.load(tmp_path / "again.npz")
    for name, values in made.series.items():
        assert np.array_equal(values, again.series[name], equal_nan=True)


def test_without_a_fault_nothing_piles_up():
    detector = LossNonFinite()
    state = detector.start()
    course = 1.0 + 0.1 * np.random.default_rng(0).random((2, 2000))
    sizes = []
    for window in trace(course, lr=np.full((2, 2000), 0.1)).windows(range(0, 2000, 50)):
        detector.advance(window, state)
        sizes.append(len(pickle.dumps(state)))
    assert len(sizes) == 40
    assert sizes[-1] <= 1.05 * sizes[19]
