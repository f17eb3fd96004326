"""What losses are multiplied by, from what their functions have given."""

import numpy as np
import pytest

from rankscope.server.detectors.data.imbalanced import Imbalanced
from rankscope.server.detectors.rank.loss_outlier import RankLossOutlier
from tests.support.judging import judge
from tests.support.runs.traces import Trace

STEPS = 160
SIZES = np.array([64.0, 64.0, 64.0, 8.0])


def run(weights, sizes=SIZES, *, steps=STEPS, every=1, posted=True, seed=0):
    """Losses of a classifier that are means over the targets times a weight of each rank's."""
    random = np.random.default_rng(seed)
    shape = len(sizes), steps
    constant = np.full(shape, 2.3)
    share = np.exp(0.01 * random.standard_normal(shape))
    given = 2.3 * np.exp(-0.005 * np.arange(steps)) * np.exp(0.05 * random.standard_normal(shape))
    explained = 1.0 - given * share / constant
    sampled = np.zeros(shape, dtype=bool)
    sampled[:, ::every] = posted
    series = {
        "loss": given * np.asarray(weights)[:, None],
        "samples": np.repeat(sizes[:, None], steps, axis=1),
        "explained_deviance": explained,
        "target_deviance": constant,
        "target_share": share,
    }
    present = dict.fromkeys(("explained_deviance", "target_deviance", "target_share"), sampled)
    return Trace("weights", seed, np.arange(steps), series, present=present)


def kinds(trace):
    found = judge(trace, [RankLossOutlier(), Imbalanced()])
    return {a.kind for a in found.alerts if a.severity != "info"}


@pytest.mark.parametrize("every", [1, 8])
def test_losses_weighted_by_samples_are_in_order(every):
    assert kinds(run(SIZES / SIZES.mean(), every=every)) == set()


def test_losses_that_are_not_say_so():
    assert kinds(run(np.ones(4))) == {"data.imbalanced"}


@pytest.mark.parametrize("weights", [[1, 1, 1, 0.3], [1.28, 1.28, 1.28, 0.5]])
def test_other_weights_are_no_shares_of_samples(weights):
    assert "data.imbalanced" in kinds(run(weights))
    assert "rank.loss_outlier" in kinds(run(weights))


def test_a_weight_that_is_a_fault_is_found_where_batches_are_alike():
    assert kinds(run([1, 1, 3, 1], np.full(4, 32.0))) == {"rank.loss_outlier"}


def test_without_what_the_functions_gave_nothing_is_excused():
    assert "data.imbalanced" in kinds(run(SIZES / SIZES.mean(), posted=False))
