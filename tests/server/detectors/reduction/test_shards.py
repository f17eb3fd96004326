"""Shards of one gradient that each rank clips by the norm of its own."""

import numpy as np
import pytest

from rankscope.agent import wire
from rankscope.server.detectors.reduction.wrong import ReductionWrong
from rankscope.server.detectors.runner import Evaluation
from rankscope.server.window import LayerNumbers, Series, Window

RANKS, STEPS, LIMIT = 4, 60, 0.3


def norms(seed=0):
    """Of the shards before clipping, [R, S]."""
    return 0.5 * np.exp(0.3 * np.random.default_rng(seed).standard_normal((RANKS, STEPS)))


def own(before):
    return np.minimum(1.0, LIMIT / (before + 1e-6))


def common(before):
    return np.broadcast_to(own(np.sqrt((before**2).sum(axis=0))), before.shape)


def found(*, factors=None, applied=None, sharded=True, layers=()):
    given = {"clip_coefficient": factors, "grad_norm": applied}
    window = Window(
        world_size=RANKS,
        ranks=np.arange(RANKS),
        steps=np.arange(STEPS),
        series={k: Series(v, np.isfinite(v)) for k, v in given.items() if v is not None},
        configs={
            r: {"sharded_over": {"first": 0, "step": 1, "count": RANKS}} if sharded else {}
            for r in range(RANKS)
        },
        classes=tuple((r,) for r in range(RANKS)),
        layers=layers,
        last_step=STEPS - 1,
    )
    findings, _ = Evaluation([ReductionWrong()], strict=True).advance(window)
    return findings


def test_factors_that_differ_are_found():
    before = norms()
    (finding,) = found(factors=own(before), applied=before * own(before))
    assert (finding.kind, finding.key, finding.stage) == (
        *("reduction.wrong", "shards", "clipped_gradient"),
    )
    assert finding.ranks == tuple(range(RANKS))
    assert "gradients were multiplied by" in finding.cause


def test_so_are_norms_that_are_cut_to_one_limit():
    before = 0.2 * norms()  # none of them is clipped
    before[:, 20:] *= 10
    (finding,) = found(applied=before * own(before))
    assert finding.evidence["limit"] == pytest.approx(LIMIT, rel=1e-4)
    assert 20 <= finding.first_step <= 22


@pytest.mark.parametrize("seen", [True, False])
def test_clipping_by_the_norm_of_the_whole_is_right(seen):
    before = norms()
    factors = common(before)
    assert not found(factors=factors if seen else None, applied=before * factors)


def test_a_gradient_of_signs_has_one_norm_for_ever():
    signs = np.full((RANKS, STEPS), 24.0)
    signs[3] = 20.0
    assert not found(applied=signs)
    held = wire.TensorTable(("a", "b"), ((4,), (4,)), ("float32",) * 2, ("",) * 2)
    layers = tuple(
        LayerNumbers(step=step, rank=r, metric="grad_norm", table=held, values=np.array([2.0, 2.0]))
        for step in range(STEPS)
        for r in range(RANKS)
    )
    assert not found(applied=signs, layers=layers)


def test_ranks_that_share_no_gradient_clip_for_themselves():
    before = norms()
    assert not found(factors=own(before), applied=before * own(before), sharded=False)
