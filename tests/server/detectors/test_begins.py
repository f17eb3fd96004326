"""Ranks that begin at different steps, where their number changes."""

from dataclasses import replace

import pytest

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
