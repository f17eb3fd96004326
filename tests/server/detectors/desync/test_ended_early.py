"""Ranks that end long before others with which they reduced gradients."""

from dataclasses import replace

import numpy as np
import pytest

from rankscope.server.comparison import compare
from rankscope.server.detectors.desync.progress import Progress
from rankscope.server.window import RankLiveness, Series, Window


def judged(last, *, states=None, equal=True, through=259, dealt_out=False):
    """Findings and the check after a run whose ranks took their last steps at `last`."""
    ranks = np.arange(len(last))
    states = states or ["finished"] * len(last)
    detector = Progress()
    state = detector.start()
    shared = min(last)
    lives = tuple(
        RankLiveness(rank, 0.0, 60.0, step, of)
        for rank, (step, of) in enumerate(zip(last, states, strict=True))
    )
    agreed = compare.agreed(shared, "reduced_gradient", ranks)
    if not equal:
        digests = np.arange(len(last), dtype=np.uint64)
        agreed = compare.compare_digests(shared, "reduced_gradient", ranks, digests)
    deals = {"sharded_over": {"first": 0, "step": 1, "count": len(last)}}
    steps = np.arange(through + 1)
    there = steps <= np.array(last)[:, None]
    counted = np.broadcast_to(steps + 1.0, there.shape)
    window = Window(
        world_size=len(last),
        ranks=ranks,
        steps=steps,
        series={"optimizer_steps": Series(counted, there)},
        comparisons=() if dealt_out else (agreed,),
        liveness=lives,
        classes=tuple((rank,) for rank in ranks.tolist()) if dealt_out else (),
        configs=dict.fromkeys(ranks.tolist(), deals) if dealt_out else {},
        now=60.0,
        last_step=through,
    )
    outcome = detector.advance(window, state)
    # Nothing more comes; it stays what it is.
    empty = replace(window, steps=steps[:0], series={}, comparisons=())
    again = detector.advance(empty, state)
    assert [f.title for f in outcome.findings] == [f.title for f in again.findings]
    return outcome.findings, detector.checks(again, through)["desync.progress"]


@pytest.mark.parametrize("dealt_out", [False, True], ids=["replicas", "parts"])
@pytest.mark.parametrize("others", [1, 3])
def test_a_rank_that_ends_long_before_the_others(others, dealt_out):
    (finding,), check = judged([89, *[259] * others], dealt_out=dealt_out)
    assert (finding.severity, finding.ranks, finding.first_step) == ("warning", (0,), 90)
    assert "no step after step 89" in finding.title
    assert "170 steps before" in finding.cause
    assert check.status == "open"


@pytest.mark.parametrize(
    ("last", "more"),
    [
        ([259, 259], {}),
        ([190, 259], {}),  # data that are dealt out unequally
        ([190, 259], {"dealt_out": True}),
        ([3, 11], {"through": 11}),
        ([89, 259], {"equal": False}),  # workers that go their own way
        ([89, 259], {"states": ["failed", "finished"]}),  # said by another kind
        ([89, 259], {"states": ["running", "running"]}),
    ],
)
def test_what_is_no_early_end(last, more):
    findings, check = judged(last, **more)
    assert not findings
    assert check.status == "ok"
