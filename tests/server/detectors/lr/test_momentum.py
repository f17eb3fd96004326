"""A momentum that carries the parameters away."""

import numpy as np
import pytest

from rankscope.server.detectors.lr.too_high import RateTooHigh
from rankscope.server.window import Series, Window


def findings(momentum, grown, *, steps=200, **more):
    """Of a run whose parameters come to so many times what they were."""
    each = np.arange(steps)
    posted = {
        "loss": 2.0 * np.exp(-each / 400),
        "lr": np.full(steps, 0.1),
        "weight_norm": 10 * (1 + (grown - 1) * each / steps),
    }
    there = np.ones((1, steps), dtype=bool)
    detector = RateTooHigh()
    window = Window(
        world_size=1,
        ranks=np.array([0]),
        steps=each,
        series={name: Series(values[None], there) for name, values in posted.items()},
        last_step=steps - 1,
        config={"parameter_groups": [{"momentum": momentum, "lr": 0.1, **more}]},
    )
    return detector.advance(window, detector.start()).findings


def test_a_heavy_momentum_and_parameters_that_grow():
    (found,) = findings(0.995, 6.0)
    assert (found.kind, found.severity, found.first_step) == ("lr.too_high", "warning", 0)
    assert found.title == "A momentum of 0.995 carries the parameters away"
    assert "for 200 steps" in found.cause
    assert found.evidence["now"] > 50


@pytest.mark.parametrize(("momentum", "grown"), [(0.9, 6.0), (0.995, 2.0)])
def test_either_of_them_alone_is_usual(momentum, grown):
    assert not findings(momentum, grown)


def test_parameters_grow_in_the_course_of_any_long_training():
    assert not findings(0.98, 6.0, steps=2000)


@pytest.mark.parametrize("said", [10**400, float("nan"), True, "0.995", None])
def test_what_an_agent_may_say_breaks_nothing(said):
    assert not findings(said, 6.0)


def test_dampened_steps_are_as_much_smaller():
    assert not findings(0.995, 6.0, dampening=0.995)
