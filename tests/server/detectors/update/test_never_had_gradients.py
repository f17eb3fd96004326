"""Steps of an optimizer whose parameters have no gradient."""

import numpy as np
import pytest

from rankscope.server.detectors.update.missing import UpdateMissing
from rankscope.server.window import Series, Window

STEPS = 48


def judged(*, updates=None, gradients=None, digests=None, made=None, steps=STEPS):
    shape = (2, steps)
    there = np.ones(shape, dtype=bool)
    series = {
        "lr": Series(np.full(shape, 1e-3), there),
        "update_ratio": Series(np.zeros(shape) if updates is None else updates, there),
    }
    if gradients is not None:
        series["grad_norm"] = Series(gradients, there)
    if made is not None:
        series["grad_norm_preclip"] = Series(made, there)
    held = np.full(shape, 7, dtype=np.uint64) if digests is None else digests
    window = Window(
        world_size=2,
        ranks=np.arange(2),
        steps=np.arange(steps),
        series=series,
        digests={"parameters": Series(held, there)},
        last_step=steps - 1,
    )
    detector = UpdateMissing()
    outcome = detector.advance(window, detector.start())
    return outcome.findings, detector.checks(outcome, steps - 1)["update.missing"]


def test_a_loss_that_is_cut_off():
    (finding,), check = judged()
    assert (finding.severity, finding.first_step, finding.ranks) == ("critical", 0, (0, 1))
    assert "No parameter has a gradient" in finding.title
    assert "detach" in finding.cause
    assert check.status == "open"


def test_gradients_that_are_gone_when_the_optimizer_steps():
    (finding,), _ = judged(made=np.full((2, STEPS), 1.5))
    assert "Backward passes make gradients (of norm 1.5)" in finding.cause
    assert "zero_grad" in finding.remedy
    # Where they are exactly zero in the backward pass, the loss is cut off.
    (finding,), _ = judged(made=np.zeros((2, STEPS)))
    assert "detach" in finding.cause


@pytest.mark.parametrize(
    "more",
    [
        {"gradients": np.ones((2, STEPS))},
        {"updates": np.full((2, STEPS), 1e-3)},
        # The parameters are written between the steps.
        {"digests": np.arange(2 * STEPS, dtype=np.uint64).reshape(2, STEPS)},
        {"steps": 20},
    ],
)
def test_what_is_no_loss_that_is_cut_off(more):
    assert not any(f.key == "no gradient" for f in judged(**more)[0])
