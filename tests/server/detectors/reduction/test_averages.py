"""Averages of parameters, one after the other: when they are reported as wrong, and of whom."""

import numpy as np
import pytest

from rankscope.server.detectors.desync.detector import Desync
from rankscope.server.detectors.reduction.wrong import ReductionWrong
from rankscope.server.window import Average, Series, Window

RANKS = 3
MEAN = (1 / 3, 1 / 3, 1 / 3)


def average(step, weights=MEAN, *, share=None, left=1e-6, **more):
    moved = max(abs(w - 1 / RANKS) for w in weights) if share is None else share
    made = {"share": moved, "weights": tuple(weights), "left": left, **more}
    return Average(step=step, ranks=(0, 1, 2), **made)


def stale(step):
    return average(step, (0.3, 0.4, 0.3), share=0.3, left=0.2)


def judged(averages, *, samples=(32.0, 32.0, 32.0)):
    """Findings after all of them, and the check; a window for each."""
    detector = ReductionWrong()
    state, found, check = detector.start(), {}, None
    for made in averages:
        ranks, steps = np.arange(RANKS), np.array([made.step])
        series = {}
        if samples is not None:
            held = np.array(samples)[:, None]
            series["samples"] = Series(held, np.ones(held.shape, dtype=bool))
        window = Window(
            world_size=RANKS,
            ranks=ranks,
            steps=steps,
            series=series,
            averages=(made,),
            last_step=made.step,
        )
        outcome = detector.advance(window, state)
        found |= {finding.first_step: finding for finding in outcome.findings}
        check = detector.checks(outcome, window.last_step)["reduction.wrong"]
    return list(found.values()), check


def test_means_are_right():
    found, check = judged([average(8 * n) for n in range(1, 10)])
    assert not found
    assert check.status == "ok"
    assert "9 averages" in check.why


def test_a_rank_that_counts_twice_from_some_step_on():
    before = [average(8 * n) for n in range(1, 6)]
    (finding,), check = judged([*before, *(average(8 * n, (0.25, 0.5, 0.25)) for n in (6, 7, 8))])
    assert (finding.severity, finding.ranks, finding.first_step) == ("warning", (1,), 48)
    assert "rank 1 counts 2 times" in finding.title
    assert finding.evidence["odd"] == {"1": pytest.approx(2.0)}
    assert check.status == "open"


def test_a_rank_that_is_lost():
    before = [average(8 * n) for n in range(1, 6)]
    (finding,), _ = judged([*before, *(average(8 * n, (0.5, 0.5, 0.0)) for n in (6, 7))])
    assert "rank 2 counts nothing" in finding.title


def test_other_parameters_than_those_that_are_trained():
    before = [average(8 * n) for n in range(1, 6)]
    (finding,), _ = judged([*before, *(stale(8 * n) for n in (6, 7))])
    assert (finding.severity, finding.first_step) == ("warning", 48)
    assert "old copy" in finding.cause


@pytest.mark.parametrize(
    "odd",
    [
        [stale(8 * n) for n in range(1, 12)],  # an outer optimizer, from the start on
        [*(average(8 * n) for n in range(1, 6)), stale(48), *(average(8 * n) for n in (7, 8))],
        # Something else writes between the averages, again and again.
        [*(average(8 * n) for n in range(1, 6)), stale(43), stale(51), stale(59)],
    ],
)
def test_what_is_no_fault(odd):
    assert not judged(odd)[0]


def test_shares_of_the_samples_are_right():
    unequal = [average(8 * n, (0.25, 0.25, 0.5)) for n in range(1, 8)]
    assert not judged(unequal, samples=(16.0, 16.0, 32.0))[0]


@pytest.mark.parametrize(("samples", "severity"), [((8.0, 8.0, 8.0), "warning"), (None, "info")])
def test_weights_from_the_start_on_are_wrong_where_samples_are_equal(samples, severity):
    unequal = [average(8 * n, (0.25, 0.25, 0.5)) for n in range(1, 8)]
    (finding,), _ = judged(unequal, samples=samples)
    assert (finding.severity, finding.ranks, finding.first_step) == (severity, (2,), 8)


def test_a_multiple_of_the_mean_from_the_start():
    made = [average(8 * n, share=0.4, scale=3 / 2.9) for n in range(1, 6)]
    (finding,), _ = judged(made)
    assert (finding.severity, finding.ranks, finding.first_step) == ("warning", (0, 1, 2), 8)
    assert "1.03 times the ranks' mean" in finding.title


def test_a_multiple_of_the_mean_once_is_no_chance():
    before = [average(8 * n) for n in range(1, 6)]
    zeros = average(48, (1 / 3, 1 / 3, 0.0), share=0.3, scale=2 / 3)
    (finding,), _ = judged([*before, zeros, average(56)])
    assert (finding.severity, finding.first_step) == ("warning", 48)
    assert finding.title.endswith("0.667 times the ranks' mean before step 48")


def test_a_rank_that_gives_an_old_copy_once_is_named():
    before = [average(8 * n) for n in range(1, 6)]
    old = average(48, (1 / 3, 1 / 3, 0.0), share=0.3, earlier=1 / 3)
    (finding,), _ = judged([*before, old, average(56)])
    assert (finding.severity, finding.ranks, finding.first_step) == ("warning", (2,), 48)
    assert finding.title == "Rank 2 gave old parameters into the average before step 48"


def test_an_outer_optimizer_that_goes_a_part_of_the_way_is_none():
    made = [average(8 * n, (0.7 / 3,) * 3, share=0.3, earlier=0.3) for n in range(1, 8)]
    assert not judged(made)[0]


@pytest.mark.parametrize("cut", [1, 3])
def test_a_rank_that_does_not_take_the_average_of_a_tensor(cut):
    detector = Desync()
    state, found = detector.start(), {}
    made = [average(8 * n, apart=(("bias", (1,)),) if n > 2 else ()) for n in range(1, 7)]
    for place in range(0, len(made), cut):
        part = tuple(made[place : place + cut])
        window = Window(
            world_size=RANKS,
            ranks=np.arange(RANKS),
            steps=np.array([a.step for a in part]),
            series={},
            averages=part,
            last_step=part[-1].step,
        )
        found |= {f.key: f for f in detector.advance(window, state).findings}
    finding = found["not taken"]
    assert (finding.severity, finding.ranks, finding.first_step) == ("warning", (1,), 24)
    assert (finding.tensors, finding.evidence["rounds"]) == (("bias",), 4)
