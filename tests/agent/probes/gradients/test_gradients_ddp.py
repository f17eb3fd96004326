"""Local against reduced gradients in two processes under DistributedDataParallel."""

import numpy as np
import pytest
import torch

from tests.support.jobs.ddp_gradients import SCALE, WAYS, worker
from tests.support.jobs.ranks import forked_ranks


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ddp")
    forked_ranks(worker, str(folder), ranks=2)
    return [torch.load(folder / str(rank), weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("way", WAYS)
def test_the_mean_of_the_local_sketches_is_the_reduced_sketch(reported, way):
    (first, scalars, _), (second, _, _) = (rank[way] for rank in reported)
    digests, reduced = first["reduced_gradient"]
    assert np.array_equal(digests, second["reduced_gradient"][0])
    local = [rank["local_gradient"][1] for rank in (first, second)]
    # They are different: each rank has data of its own.
    assert np.linalg.norm(local[0] - local[1]) > 0.1 * np.linalg.norm(local[0])
    mean = (local[0] + local[1]) / 2 / (SCALE if way == "scaled" else 1)
    tolerance = 1e-2 if way == "half" else 1e-5
    assert np.linalg.norm(mean - reduced) < tolerance * np.linalg.norm(reduced)
    assert not reduced[4:].any()
    assert scalars["grad_norm_local"] > 0


@pytest.mark.parametrize("way", WAYS)
def test_cosines_are_those_of_the_sketches(reported, way):
    for rank in reported:
        fingerprints, scalars, before = rank[way]
        reduced = fingerprints["reduced_gradient"][1].ravel()
        local = fingerprints["local_gradient"][1].ravel()
        earlier = before["reduced_gradient"].ravel()

        def cosine(a, b):
            return a @ b / np.linalg.norm(a) / np.linalg.norm(b)

        assert scalars["grad_cosine_local"] == pytest.approx(cosine(local, reduced), rel=1e-9)
        assert scalars["grad_cosine"] == pytest.approx(cosine(earlier, reduced), rel=1e-9)
        # The mean of two gradients that know nothing of each other is at 45 degrees to each.
        assert 0.5 < scalars["grad_cosine_local"] < 1
