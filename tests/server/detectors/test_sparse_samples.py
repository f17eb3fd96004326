"""Samples get rarer, and some are of single ranks: neither ends an incident."""

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest

from rankscope.server.detectors.data.imbalanced import Imbalanced
from rankscope.server.detectors.desync.batch import BatchShared
from rankscope.server.window import Series, Window
from tests.support.judging import judge
from tests.support.runs.traces import Trace

STEPS = 700
# As an agent samples, at every step at first, then at ever fewer.
SAMPLED = [*range(9), 16, *range(64, STEPS, 64)]


def sampled(values, at, *, without=()):
    """Which values were posted: at those samples, but for pairs of rank and step."""
    present = np.zeros_like(values, dtype=bool)
    present[:, list(at)] = True
    for rank, step in without:
        present[rank, step] = False
    return present


@pytest.mark.parametrize("cuts", [(), range(STEPS)], ids=["one", "each"])
def test_samples_of_other_ranks_do_not_show_that_batches_are_of_one_size(cuts):
    sizes = np.full((4, STEPS), 16.0)
    sizes[1] = 2.0
    # At one sample the rank whose batches are small reports none.
    present = sampled(sizes, [*SAMPLED, 48], without=[(0, 48), (1, 48)])
    made = Trace("made", 0, np.arange(STEPS), {"samples": sizes}, present={"samples": present})
    (alert,) = judge(made, [Imbalanced()], cuts).alerts
    assert (alert.state, alert.ranks, alert.first_step) == ("open", (1,), 0)


def test_a_sample_of_the_rank_itself_does():
    sizes = np.full((4, STEPS), 16.0)
    sizes[1, :100] = 2.0
    present = sampled(sizes, SAMPLED)
    made = Trace("made", 0, np.arange(STEPS), {"samples": sizes}, present={"samples": present})
    (alert,) = judge(made, [Imbalanced()]).alerts
    assert (alert.state, alert.last_step) == ("resolved", 127)


# ------------------------------------------------------------------ batches of a group, and losses


@dataclass(frozen=True)
class Pair:
    """Two ranks that hold different parts of one model: sampled batches, a loss at every step."""

    loss: np.ndarray
    batches: np.ndarray
    sampled_at: tuple[int, ...] = tuple(SAMPLED)

    def windows(self, cuts=()):
        edges = [0, *sorted({cut + 1 for cut in cuts if cut < STEPS - 1}), STEPS]
        present = sampled(self.batches, self.sampled_at)
        everywhere = np.ones_like(present)
        for first, end in pairwise(edges):
            at = slice(first, end)
            yield Window(
                world_size=2,
                ranks=np.arange(2),
                steps=np.arange(first, end),
                series={"loss": Series(self.loss[:, at], everywhere[:, at])},
                digests={"batch": Series(self.batches[:, at], present[:, at])},
                classes=((0,), (1,)),
                last_step=end - 1,
            )


def pair(batches_differ=300, losses_differ=300):
    """Batches and losses of which rank 1 has others from some step on."""
    loss = np.tile(np.random.default_rng(0).lognormal(size=STEPS), (2, 1))
    loss[1, losses_differ:] *= 1.01
    batches = np.tile(np.arange(1, STEPS + 1, dtype=np.uint64), (2, 1))
    batches[1, batches_differ:] += np.uint64(STEPS)
    return Pair(loss, batches)


@pytest.mark.parametrize("cuts", [(), range(STEPS), (299, 300, 319)], ids=["one", "each", "some"])
def test_losses_that_are_no_longer_one_show_since_when_batches_are_not(cuts):
    (alert,) = judge(pair(), [BatchShared()], cuts).alerts
    assert (alert.first_step, alert.seen_step, alert.state) == (300, 320, "open")
    assert alert.evidence["agreed_until"] == 256
    assert "Since step 300 they no longer have one and the same loss." in alert.cause


@pytest.mark.parametrize("since", [0, 200])
def test_losses_that_were_different_before_show_nothing(since):
    (alert,) = judge(pair(losses_differ=since), [BatchShared()]).alerts
    assert (alert.first_step, alert.evidence["losses_apart"]) == (320, None)


def test_losses_that_are_no_numbers_are_not_different_ones():
    made = pair()
    made.loss[:, 280] = math.nan
    (alert,) = judge(made, [BatchShared()]).alerts
    assert alert.first_step == 300


def test_other_losses_with_one_batch_are_no_other_batches():
    assert not judge(pair(batches_differ=STEPS), [BatchShared()]).alerts
