"""Ranks whose inputs become larger or smaller, and data whose sizes scatter or all change."""

import numpy as np
import pytest

from rankscope.server.detectors.data.outlier import DataOutlier
from tests.support.judging import judge
from tests.support.runs.traces import Trace


def sizes(*, ranks=4, steps=160, scatter=0.01, levels=None, seed=0, loss=None):
    """Root mean squares of the inputs, [R, S]."""
    random = np.random.default_rng(seed)
    made = np.exp(scatter * random.standard_normal((ranks, steps)))
    return made if levels is None else made * np.asarray(levels, dtype=float)[:, None]


def alerts(rms, *, every=1):
    ranks, steps = rms.shape
    random = np.random.default_rng(1)
    loss = 2 * np.exp(0.05 * random.standard_normal((ranks, steps)))
    present = np.tile(np.arange(steps) % every == 0, (ranks, 1))
    made = Trace(
        "inputs",
        0,
        np.arange(steps),
        {"loss": loss, "input_rms": np.where(present, rms, 0.0)},
        present={"loss": np.ones_like(present), "input_rms": present},
    )
    return judge(made, [DataOutlier()]).alerts


@pytest.mark.parametrize(
    ("factor", "size"), [(16.0, "larger"), (1 / 255, "smaller"), (2.4, "larger")]
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_normalises_otherwise_from_some_step_on(factor, size, ranks):
    rms = sizes(ranks=ranks)
    rms[1, 80:] *= factor
    (alert,) = alerts(rms)
    assert (alert.kind, alert.severity, alert.stage) == ("data.outlier", "warning", "batch")
    assert (alert.ranks, alert.first_step, alert.state) == ((1,), 80, "open")
    assert f"times {size} since step 80" in alert.title
    assert alert.evidence["factor"] == pytest.approx(factor, rel=0.05)


def test_it_is_over_where_the_inputs_are_as_before():
    rms = sizes()
    rms[2, 60:90] *= 3
    (alert,) = alerts(rms)
    assert (alert.ranks, alert.first_step, alert.state) == ((2,), 60, "resolved")
    assert 87 <= alert.last_step <= 90


def test_it_is_found_where_batches_are_sampled_now_and_then():
    rms = sizes(steps=400)
    rms[2, 200:] *= 3
    (alert,) = alerts(rms, every=8)
    assert (alert.ranks, alert.first_step) == ((2,), 200)


@pytest.mark.parametrize("seed", range(20))
def test_data_of_many_sizes_are_nothing(seed):
    """Each rank has data of its own, whose sizes scatter by half and more."""
    assert alerts(sizes(scatter=0.5, levels=[1, 2, 0.3, 5], seed=seed)) == ()


def test_what_changes_on_all_ranks_is_the_data():
    rms = sizes()
    rms[:, 80:] *= 4
    assert alerts(rms) == ()
    # One that is a little late with it is none either.
    rms[2, 80:82] /= 4
    assert alerts(rms) == ()


def test_three_odd_batches_are_no_shift():
    rms = sizes()
    rms[1, 80:83] *= 16
    assert alerts(rms) == ()


def test_a_few_steps_say_nothing_of_what_is_usual():
    rms = sizes()
    rms[1, 4:] *= 3
    assert alerts(rms) == ()


@pytest.mark.parametrize(("factor", "size"), [(255.0, "larger"), (1 / 16, "smaller")])
@pytest.mark.parametrize("since", [0, 4])
def test_one_rank_reads_inputs_of_another_size_than_all_others_from_the_start(factor, size, since):
    rms = sizes(ranks=4, scatter=0.05)
    rms[1, since:] *= factor
    (alert,) = alerts(rms)
    assert (alert.kind, alert.severity, alert.stage) == ("data.outlier", "warning", "batch")
    assert (alert.ranks, alert.first_step, alert.state) == ((1,), since, "open")
    assert f"times {size} than the others'" in alert.title
    assert alert.evidence["factor"] == pytest.approx(factor, rel=0.05)


def test_of_two_ranks_nobody_can_say_which_is_right():
    (alert,) = alerts(sizes(levels=[255, 1], ranks=2))
    assert (alert.ranks, alert.severity) == ((0, 1), "warning")
    assert alerts(sizes(levels=[8, 1], ranks=2)) == ()


def test_it_ends_where_the_sizes_become_alike():
    rms = sizes(levels=[1, 1, 40], ranks=3)
    rms[2, 100:] /= 40
    first, second = sorted(alerts(rms), key=lambda alert: alert.first_step)
    assert (first.first_step, first.state) == (0, "resolved")
    assert 97 <= first.last_step <= 103
    assert second.first_step == 100


def test_an_early_change_is_dated_back():
    rms = sizes(steps=40)
    rms[1, 12:] *= 16
    (alert,) = alerts(rms)
    assert (alert.ranks, alert.first_step) == ((1,), 12)


@pytest.mark.parametrize("levels", [[1, 4, 1, 1], [1, 16, 3, 1], [1, 1, 30, 30], [9, 1]])
def test_ranks_that_read_data_of_sizes_of_their_own_are_not_judged(levels):
    assert alerts(sizes(levels=levels, ranks=len(levels))) == ()


def odd(rms, **keywords):
    return [
        a for a in alerts(rms, **keywords) if "single step" in a.title or "The inputs at" in a.title
    ]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(("factor", "size"), [(255.0, "large"), (0.0, "small")])
def test_single_batches_of_all_ranks_that_are_not_normalised(ranks, factor, size):
    rms = sizes(ranks=ranks, steps=300, scatter=0.1)
    rms[:, 39::40] *= factor
    (alert,) = odd(rms)
    assert (alert.kind, alert.severity, alert.ranks) == ("data.outlier", "warning", ())
    assert (alert.first_step, alert.evidence["period"]) == (39, 40)
    assert size in alert.title


def test_one_such_batch_of_one_rank_is_an_accident():
    rms = sizes(scatter=0.1)
    rms[1, 70] *= 100
    (alert,) = odd(rms)
    assert (alert.severity, alert.ranks, alert.first_step) == ("info", (1,), 70)
    assert alert.state == "resolved"


def test_one_that_no_data_explain_is_none():
    rms = sizes(scatter=0.1)
    rms[:, 70] *= 10_000
    (alert,) = odd(rms)
    assert (alert.severity, alert.ranks, alert.first_step) == ("warning", (), 70)
    # Beside what has come before, or of padding alone.
    random = np.random.default_rng(2)
    wide = np.exp(2.0 * random.standard_normal((4, 160)))
    wide[:, 70] = 10_000
    empty = sizes(scatter=0.1)
    empty[:, 70] = 0.0
    assert not [alert for alert in odd(wide) + odd(empty) if alert.severity != "info"]


def test_other_data_from_some_step_on_and_heavy_tails_are_no_single_batches():
    rms = sizes(scatter=0.05)
    rms[:, 80:] *= 20
    assert not odd(rms)
    random = np.random.default_rng(3)
    wild = odd(np.exp(0.7 * random.standard_t(5, (4, 1000))))
    assert len(wild) <= 1
    assert all(alert.severity == "info" for alert in wild)
    assert not odd(1 + np.abs(random.standard_t(3, (4, 1000))))


def test_of_odd_batches_without_end_some_are_kept_and_all_are_counted():
    rms = sizes(ranks=1, steps=8000)
    odd = np.arange(40, 7990, 40)
    rms[0, odd] *= 100
    (alert,) = alerts(rms)
    assert f"The inputs of {len(odd)} single steps are" in alert.title
    assert alert.evidence["period"] == 40
    assert alert.first_step == 40
    assert 8 < len(alert.evidence["steps"]) <= 64
    assert alert.evidence["steps"][-1] == odd[-1]
