"""Losses that the first steps throw up."""

import numpy as np
import pytest

from rankscope.server.detectors.loss.bad_start import ThrownUp


def thrown(first, up, now, steps=300):
    """Whether it is reported of losses that begin so, go up so far, and come to so much."""
    random = np.random.default_rng(0)
    losses = np.full(steps, now) * np.exp(0.02 * random.standard_normal(steps))
    losses[0], losses[3:9] = first, up
    follower = ThrownUp()
    for step, loss in enumerate(losses.tolist()):
        follower.push(step, loss, known=False)
    return follower.watch.open(steps) is not None


def test_two_tasks_in_turns_are_none():
    random = np.random.default_rng(0)
    losses = np.where(np.arange(300) % 2, 20 * np.exp(-np.arange(300) / 100), 0.35)
    losses = losses * np.exp(0.2 * random.standard_normal(300))
    losses[:2] = 0.66, 36.0
    follower = ThrownUp()
    for step, loss in enumerate(losses.tolist()):
        follower.push(step, loss, known=False)
    assert follower.watch.open(300) is None


@pytest.mark.parametrize(
    ("first", "up", "now", "reported"),
    [
        (2.3, 30.0, 2.35, True),
        # Of initial outputs that cost more than a constant answer does.
        (3.55, 1e6, 2.36, True),
        (2.74, 6e4, 2.35, True),
        # What was learned since shows that it was a detour.
        (2.74, 40.0, 2.35, False),
        (2.74, 6e4, 1.2, False),
        (2.3, 2.5, 0.4, False),
    ],
)
def test_what_is_not_made_good_is_reported(first, up, now, reported):
    assert thrown(first, up, now) is reported
