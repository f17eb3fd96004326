"""What waits is returned as if each value were put in its place one by one."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rankscope.server.evaluation.pending import Pending
from rankscope.server.window import Columns
from tests.support.runs.columns import of_rank

RANKS = np.array([0, 2, 5])

posts = st.lists(
    st.tuples(
        st.sets(st.sampled_from(RANKS.tolist()), min_size=1),
        st.integers(0, 2),
        st.sampled_from([("a",), ("b", "a"), ("b",)]),
        st.sets(st.integers(0, 9), min_size=1),
    ),
    max_size=12,
)


def columns(ranks, attempt, names, steps, number):
    shape = (len(ranks), len(names), len(steps))
    return Columns(
        np.array(sorted(ranks)),
        np.arange(len(ranks)) + 100 * number,
        attempt,
        names,
        np.array(sorted(steps)),
        np.arange(np.prod(shape), dtype=float).reshape(shape) + 1000 * number,
    )


def taken(pending, through):
    """Series, rank and step -> value."""
    steps = np.unique(np.concatenate([np.zeros(0, np.int64), *pending.steps()]))
    found = pending.take(RANKS, steps[steps <= through], through)
    return {
        (name, rank, step): held.values[row, column]
        for name, held in found.items()
        for row, rank in enumerate(RANKS.tolist())
        for column, step in enumerate(steps[steps <= through].tolist())
        if held.present[row, column]
    }


@given(posts, st.lists(st.integers(0, 9), max_size=3), st.integers(0, 9))
def test_the_newest_attempts_last_value_of_a_step_stands(posted, cuts, first):
    # From `first` on, rank 2's first attempt counts no more.
    superseded = {(2, 0): first}
    expected = {}
    made = [columns(*one, number) for number, one in enumerate(posted)]
    for part in sorted(made, key=lambda part: (part.attempt, part.arrivals[0])):
        for n, rank in enumerate(part.ranks.tolist()):
            for m, name in enumerate(part.names):
                for s, step in enumerate(part.steps.tolist()):
                    if step < superseded.get((rank, part.attempt), 10):
                        expected[name, rank, step] = part.values[n, m, s]
    pending = Pending(np.float64)
    for part in made:
        pending.add(part)
    pending.forget(superseded)
    found = {}
    for through in (*sorted(cuts), 9):
        of_cut = taken(pending, through)
        assert not found.keys() & of_cut.keys()
        assert all(step <= through for _, _, step in of_cut)
        found |= of_cut
    assert found == expected
    assert pending.steps() == []


def test_digests_keep_every_bit():
    pending = Pending(np.uint64)
    pending.add(of_rank(5, 0, "parameters", [3], np.array([2**64 - 1], np.uint64)))
    found = pending.take(RANKS, np.array([3, 4]), 4)
    assert found["parameters"].values.tolist() == [[0, 0], [0, 0], [2**64 - 1, 0]]
    assert found["parameters"].present.tolist() == [[False] * 2, [False] * 2, [True, False]]
