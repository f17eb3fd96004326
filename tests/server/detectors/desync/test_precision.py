"""Ranks that compute in another precision than the others."""

import numpy as np
import pytest

from rankscope.server.detectors.desync.config import Config
from rankscope.server.window import Series, Window


def judged(values, *, cut=1):
    """Findings by key after all of them; `values`: bits of the significand, [R, S]."""
    detector = Config()
    state, found, check = detector.start(), {}, None
    values = np.array(values, dtype=float)
    for begin in range(0, values.shape[1], cut):
        part = values[:, begin : begin + cut]
        steps = np.arange(begin, begin + part.shape[1])
        window = Window(
            world_size=len(part),
            ranks=np.arange(len(part)),
            steps=steps,
            series={"autocast": Series(part, ~np.isnan(part))},
            last_step=int(steps[-1]),
        )
        outcome = detector.advance(window, state)
        found |= {finding.key: finding for finding in outcome.findings}
        check = detector.checks(outcome, window.last_step)["desync.config"]
    return found, check


@pytest.mark.parametrize("cut", [1, 5, 32])
def test_one_rank_that_computes_in_another_precision(cut):
    found, check = judged([[0] * 32, [0] * 10 + [8] * 22, [0] * 32], cut=cut)
    finding = found["precision"]
    assert (finding.severity, finding.ranks, finding.first_step) == ("warning", (1,), 10)
    assert "without autocast on ranks 0 and 2; bfloat16 on rank 1" in finding.cause
    assert check.status == "open"


def test_of_two_ranks_both_are_named():
    found, _ = judged([[11] * 12, [8] * 12])
    assert found["precision"].ranks == (0, 1)
    assert "No precision is that of most ranks" in found["precision"].cause


@pytest.mark.parametrize(
    "values",
    [
        [[8] * 20, [8] * 20],
        [[0] * 10 + [8] * 10] * 3,  # switched on, on all of them
        [[0] * 20, [0] * 8 + [8] * 3 + [0] * 9],  # for some steps only
        [[0] * 20, [np.nan] * 20],  # not seen
    ],
)
def test_what_is_the_same_or_short_is_none(values):
    assert not judged(values)[0]
