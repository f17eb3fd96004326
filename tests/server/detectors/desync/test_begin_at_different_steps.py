"""Ranks that begin at different steps, where their number changes."""

from dataclasses import replace

import pytest

from rankscope.server.detectors.desync.detector import Desync
from rankscope.server.detectors.desync.progress import Progress
from tests.support.runs.scenarios import noise


def found(begins):
    """What is said of four ranks whose processes began at these steps."""
    detector = Progress()
    state = detector.start()
    window = next(iter(noise(0, steps=80).windows()))
    outcome = detector.advance(replace(window, begins=begins), state)
    return [(finding.first_step, finding.ranks) for finding in outcome.findings]


@pytest.mark.parametrize(
    ("begins", "expected"),
    [
        (dict.fromkeys(range(4), (0,)), []),
        ({0: (0, 16), 1: (0, 32), 2: (0, 32), 3: (0, 32)}, [(16, (0,))]),
        # Two ranks, then four.
        ({0: (0, 32), 1: (0, 32), 2: (32,), 3: (32,)}, []),
        ({0: (0, 16), 1: (0, 32), 2: (32,), 3: (32,)}, [(16, (0,))]),
        ({0: (0, 32), 1: (0, 32), 2: (32,), 3: (16,)}, [(16, (3,))]),
        # Two, three, four.
        ({0: (0, 20, 40), 1: (0, 20, 40), 2: (20, 40), 3: (40,)}, []),
        # Some alone, which catch up.
        ({0: (0, 16), 1: (0,), 2: (0,), 3: (0,)}, []),
        ({0: (0, 32, 60), 1: (0, 32, 60), 2: (32,), 3: (32,)}, []),
        ({0: (0,), 1: (0,), 2: (), 3: (0,)}, []),
    ],
)
def test_ranks_that_were_started_together_begin_together(begins, expected):
    assert found(begins) == expected


SAME, OTHER = 17, 18


def resumed(begins, held, counted=None):
    """What is said of four ranks that began at these steps with these parameters."""
    counted = begins if counted is None else counted
    detectors = Progress(), Desync()
    window = replace(
        next(iter(noise(0, steps=80).windows())),
        begins={rank: (step,) for rank, step in enumerate(begins)},
        started=dict(enumerate(held)),
        configs={rank: {"optimizer_steps": steps} for rank, steps in enumerate(counted)},
    )
    return [
        (finding.kind, finding.key, finding.first_step, finding.ranks)
        for detector in detectors
        for finding in detector.advance(window, detector.start()).findings
    ]


@pytest.mark.parametrize(
    ("begins", "held", "counted", "expected"),
    [
        ((60, 0, 60, 60), [SAME] * 4, None, ("desync.optimizer", "begin", 60, (1,))),
        # Loaded by one rank, which broadcast the weights.
        ((60, 0, 0, 0), [SAME] * 4, None, ("desync.optimizer", "begin", 60, (1, 2, 3))),
        # Not resumed at all.
        ((60, 0, 60, 60), [SAME, OTHER, SAME, SAME], None, ("desync.progress", "begin", 0, (1,))),
        # Of other checkpoints.
        ((60, 50, 60, 60), [SAME] * 4, None, ("desync.progress", "begin", 50, (1,))),
        ((60, 0, 50, 60), [SAME] * 4, None, ("desync.progress", "begin", 0, (1, 2))),
        # The trainer has said itself where it begins.
        ((60, 0, 60, 60), [SAME] * 4, (60,) * 4, ("desync.progress", "begin", 0, (1,))),
        # An older agent does not say where the step is from.
        ((60, 0, 60, 60), [SAME] * 4, (None,) * 4, ("desync.progress", "begin", 0, (1,))),
    ],
)
def test_ranks_that_resumed_without_the_state_of_their_optimizer(begins, held, counted, expected):
    assert resumed(begins, held, counted) == [expected]


def test_ranks_that_resumed_alike_are_not_named():
    assert resumed((60,) * 4, [SAME] * 4) == resumed((0,) * 4, [SAME] * 4) == []
