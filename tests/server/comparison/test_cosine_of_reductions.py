"""How much of the ranks' gradients is in what came out of the reduction, from sketches alone."""

import math

import numpy as np
import pytest

from rankscope.server.comparison import conservation, fidelity
from rankscope.server.comparison.compare import LabelledTable
from tests.support.runs.chain import chain


def cosines(**how):
    found = {}
    for window in chain(0, **how).windows():
        found |= {made.step: made.cosine for made in window.reductions}
    return found


@pytest.mark.parametrize("how", [{}, {"clip": 0.5}, {"amp": 1024.0}, {"fault": "sum"}])
def test_scales_of_all_sorts_change_no_direction(how):
    found = cosines(**how)
    assert len(found) > 10
    assert min(found.values()) > 1 - 1e-6


def test_what_is_added_or_left_out_does():
    noisy = cosines(fault="noise-added")
    assert all(value > 1 - 1e-6 for step, value in noisy.items() if step < 24)
    assert all(0.9 < value < 1 - 1e-4 for step, value in noisy.items() if step >= 24)
    stale = cosines(fault="stale")
    assert all(abs(value) < 0.9 for step, value in stale.items() if step > 24)


def test_a_tensor_that_is_not_known_does_not_count():
    random = np.random.default_rng(0)
    local = random.standard_normal((2, 3, 32))
    reduced = local.mean(axis=0)
    local[1, 0] = math.nan
    assert fidelity.cosine(local, reduced) == pytest.approx(1.0)
    assert math.isnan(fidelity.cosine(local, np.zeros_like(reduced)))
    assert math.isnan(fidelity.cosine(np.full_like(local, math.nan), reduced))


def two_steps(carried, scale, rounding, *, seed=3):
    """What a reduction's explanation is, after one of another gradient.

    Args:
        carried: share of the step before that is added again.
        scale: of the loss, which its gradient keeps up to the reduction.
        rounding: of what comes out, relative.
    """
    random = np.random.default_rng(seed)
    local = random.standard_normal((2, 2, 3, 64))
    table = LabelledTable(("a", "b", "c"), ((64,),) * 3, ("parameters",) * 3)
    ranks = np.arange(2)
    means = local.mean(axis=1)
    out = means[1] + carried * means[0]
    out *= 1 + rounding * random.standard_normal(out.shape)
    before = conservation.Sums(0, scale * means[0], means[0])
    return conservation.balance(1, ranks, scale * local[1], out, table, before=before)


@pytest.mark.parametrize("scale", [1.0, 8192.0, 1 / 8192])
@pytest.mark.parametrize(("carried", "found"), [(1.0, True), (0.2, True), (0.0, False)])
def test_adding_up_is_distinguished_from_rounding_at_any_scale_of_the_loss(scale, carried, found):
    made = two_steps(carried, scale, 5e-4)
    assert (made.pattern == "accumulated") is found
