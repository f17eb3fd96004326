"""How often samples came, and what cannot be known where all of them are new."""

import numpy as np
import pytest

from rankscope.server.detectors.data.overlap import Overlap
from rankscope.server.detectors.data.replayed import Replayed
from rankscope.server.detectors.mechanisms.epochs_seen import Visits
from tests.support.judging import judge
from tests.support.runs.traces import Trace

STEPS = 200


def run(*, dataset, labels=0, batches=20):
    """Two ranks that read two samples a step.

    Args:
        dataset: samples of a rank; 0: each sample is another one, as augmentation makes it.
        labels: number of different labels a batch may have, of an order that is never the same; 0:
            they are not known.
        batches: of a rank's loader.
    """
    random = np.random.default_rng(0)
    each, rank = np.arange(STEPS), np.array([[0], [1]])
    if dataset:
        samples = random.integers(0, dataset, (2, 2, STEPS)) * 2 + rank
    else:
        samples = random.integers(0, 2**32 - 1, (2, 2, STEPS))
    words = {
        "batch": random.integers(0, 2**62, (2, STEPS)).astype(np.uint64),
        "rows/0": samples[0].astype(np.uint64) << np.uint64(32) | samples[1].astype(np.uint64),
    }
    if labels:
        words["labels"] = random.integers(0, labels, (2, STEPS)).astype(np.uint64)
    series = {"loader_batches": np.full((2, STEPS), float(batches))}
    return Trace("visits", 0, each, series, words=words)


@pytest.mark.parametrize(
    ("dataset", "labels", "status"),
    [
        (100, 0, "ok"),  # the batches differ though their samples came before
        (0, 0, "insufficient_data"),
        (0, 10**9, "ok"),  # labels show the order, and it is another one each time
        (0, 1, "insufficient_data"),  # they are all alike
    ],
)
def test_the_order_of_new_inputs_is_known_by_labels_alone(dataset, labels, status):
    check = judge(run(dataset=dataset, labels=labels), [Replayed()]).checks["data.unshuffled"]
    assert check.status == status
    assert (status == "ok") is ("augmented" not in check.why)


@pytest.mark.parametrize(("batches", "known"), [(20, False), (STEPS, True)])
def test_after_an_epoch_without_a_known_sample_overlap_cannot_show(batches, known):
    check = judge(run(dataset=0, batches=batches), [Overlap()]).checks["data.overlap"]
    assert ("augmented" not in check.why) is known
    assert known or check.status == "insufficient_data"


def test_visits_are_counted_with_bounded_memory():
    visits = Visits()
    assert not visits.all_new  # nothing is reported
    steps = np.arange(30_000)
    samples = ((steps * 2654435761) % 2**31).astype(np.uint64)
    words = {"rows/0": (samples << np.uint64(32) | (samples + np.uint64(2**31)))[None]}
    for window in Trace("many", 0, steps, {}, words=words).windows([]):
        visits.take(window)
        visits.take(window)
    assert visits.mean == 2.0
