"""Windows out of what ranks post: complete, in order, once, and bounded."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.agent import wire
from rankscope.server.evaluation.align import Aligner
from rankscope.server.evaluation.judged_until import MAX_LAG, SILENT_SECONDS, UNSEEN_SECONDS
from rankscope.server.window import FingerprintPart, LivenessPart, NewData, RankLiveness
from tests.support.runs.columns import of_rank

TABLES = {"parameters": wire.TensorTable(("w",), ((1,),), ("float32",), ("",))}


def part(rank, steps, values=None, attempt=0, metric="loss", dtype=np.float64):
    steps = np.array(steps, np.int64)
    held = steps * 1.0 + 1000 * rank if values is None else np.array(values)
    return of_rank(rank, attempt, metric, steps, held.astype(dtype))


def life(rank, through, state="running", last_seen=0.0, attempt=0):
    return LivenessPart(
        liveness=RankLiveness(
            rank, first_seen=0.0, last_seen=last_seen, last_step=through, state=state
        ),
        attempt=attempt,
        through_step=through,
        started_at=0.0,
    )


def data(columns=(), liveness=(), digests=(), world_size=2, more=False):
    return NewData(
        arrival=1,
        more=more,
        columns=tuple(columns),
        digests=tuple(digests),
        fingerprints=(),
        liveness=tuple(liveness),
        tables={entry.liveness.rank: TABLES for entry in liveness},
        world_size=world_size,
        config={},
    )


def steps_of(aligner, now=0.0):
    return [s for w in aligner.windows(now) for s in w.steps.tolist()]


def test_a_step_waits_for_every_rank():
    aligner = Aligner({"loss"})
    aligner.add(data([part(0, range(5))], [life(0, 4), life(1, -1)]))
    assert steps_of(aligner) == []
    aligner.add(data([part(1, range(3))], [life(0, 4), life(1, 2)]))
    [window] = aligner.windows(0.0)
    assert window.steps.tolist() == [0, 1, 2]
    assert window.series["loss"].values.tolist() == [[0, 1, 2], [1000, 1001, 1002]]
    assert window.series["loss"].present.all()
    aligner.add(data([part(1, [3, 4])], [life(0, 4), life(1, 4)]))
    assert steps_of(aligner) == [3, 4]


def test_a_value_that_a_rank_did_not_post_is_not_present():
    aligner = Aligner({"loss"})
    aligner.add(data([part(0, [0, 1, 2]), part(1, [0, 2])], [life(0, 2), life(1, 2)]))
    [window] = aligner.windows(0.0)
    assert window.series["loss"].present.tolist() == [[True] * 3, [True, False, True]]


def test_a_rank_that_fell_silent_holds_the_others_up_for_a_while_only():
    aligner = Aligner({"loss"})
    parts = [part(0, range(10)), part(1, range(3))]
    liveness = [life(0, 9, last_seen=99.0 + SILENT_SECONDS), life(1, 2, last_seen=100.0)]
    aligner.add(data(parts, liveness))
    assert steps_of(aligner, 99.0 + SILENT_SECONDS) == [0, 1, 2]
    liveness = [life(0, 9, last_seen=101.0 + SILENT_SECONDS), life(1, 2, last_seen=100.0)]
    aligner.add(data([], liveness))
    assert steps_of(aligner, 101.0 + SILENT_SECONDS) == list(range(3, 10))


def test_a_rank_that_was_never_seen_too():
    aligner = Aligner({"loss"})
    aligner.add(data([part(0, range(3))], [life(0, 2, last_seen=UNSEEN_SECONDS)]))
    assert steps_of(aligner, UNSEEN_SECONDS - 1) == []
    assert steps_of(aligner, UNSEEN_SECONDS + 1) == [0, 1, 2]


def test_a_rank_that_has_finished_holds_nobody_up():
    aligner = Aligner({"loss"})
    liveness = [life(0, 5), life(1, 2, state="finished")]
    aligner.add(data([part(0, range(6)), part(1, range(3))], liveness))
    assert steps_of(aligner) == list(range(6))


def test_memory_is_bounded_when_a_rank_lags():
    aligner = Aligner({"loss"})
    steps = range(MAX_LAG + 11)
    liveness = [life(0, MAX_LAG + 10), life(1, 4)]
    aligner.add(data([part(0, steps), part(1, range(5))], liveness))
    assert steps_of(aligner)[-1] == MAX_LAG + 10


def test_what_comes_too_late_is_counted_and_not_examined():
    aligner = Aligner({"loss"})
    aligner.add(data([part(0, range(3))], [life(0, 2)], world_size=1))
    assert steps_of(aligner) == [0, 1, 2]
    aligner.add(data([part(0, [1, 3], [9.0, 9.0])], [life(0, 3)], world_size=1))
    assert steps_of(aligner) == [3]
    assert aligner.late == 1


def test_the_later_attempt_of_a_rank_stands_from_its_first_step_on():
    aligner = Aligner({"loss"})
    parts = [part(0, [1], [2.0], attempt=1), part(0, [0, 1, 2], [1.0, 8.0, 9.0])]
    aligner.add(data(parts, [life(0, 2, attempt=1)], world_size=1))
    [window] = aligner.windows(0.0)
    assert window.series["loss"].values[:, :2].tolist() == [[1.0, 2.0]]
    assert window.series["loss"].present.tolist() == [[True, True, False][: len(window.steps)]]


def start_fingerprint(rank, step, digest, attempt):
    made = wire.Fingerprint(
        step=step, stage="start", table="parameters", digests=np.array([digest], np.uint64)
    )
    return FingerprintPart(rank=rank, attempt=attempt, fingerprint=made)


def test_what_was_loaded_at_a_restart_is_compared_although_its_steps_were():
    """Steps between the checkpoint and the restart are trained again, and judged once."""
    aligner = Aligner({"loss"})
    first = data([part(0, range(37)), part(1, range(37))], [life(0, 36), life(1, 36)])
    aligner.add(replace(first, fingerprints=tuple(start_fingerprint(r, 0, 5, 0) for r in (0, 1))))
    assert steps_of(aligner) == list(range(37))
    again = data(
        [part(0, range(32, 37), attempt=1), part(1, range(32, 37), attempt=1)],
        [life(0, 36, attempt=1), life(1, 36, attempt=1)],
    )
    aligner.add(
        replace(again, fingerprints=tuple(start_fingerprint(r, 32, 5 + r, 1) for r in (0, 1)))
    )
    assert [c for w in aligner.windows(0.0) for c in w.comparisons] == []
    late = aligner.late
    liveness = [life(0, 39, attempt=1), life(1, 39, attempt=1)]
    more = data([part(r, range(37, 40), attempt=1) for r in (0, 1)], liveness)
    # Of an attempt that is not the newest, and of one that goes on, nothing is begun.
    old = (
        start_fingerprint(0, 0, 9, 0),
        start_fingerprint(1, 0, 8, 0),
        start_fingerprint(0, 33, 9, 1),
    )
    aligner.add(replace(more, fingerprints=old))
    [window] = aligner.windows(0.0)
    assert window.steps.tolist() == [37, 38, 39]
    [found] = window.comparisons
    assert (found.step, found.stage, found.ranks.tolist(), found.equal) == (
        32,
        "start",
        [0, 1],
        False,
    )
    assert aligner.late == late + 3


def test_in_the_middle_of_a_replay_only_what_was_read_whole_counts():
    aligner = Aligner({"loss"})
    liveness = [life(0, 99, "finished"), life(1, 99, "finished")]
    # A page may end before the later half of a batch, or before a value that came late: only
    # what the next page but one cannot touch any more is whole.
    aligner.add(data([part(0, range(50)), part(1, range(30))], liveness, more=True))
    assert steps_of(aligner) == []
    aligner.add(data([part(0, range(48, 70)), part(1, range(29, 60))], liveness, more=True))
    assert steps_of(aligner) == list(range(29))
    aligner.add(data([part(0, range(70, 100)), part(1, range(60, 100))], liveness))
    assert steps_of(aligner) == list(range(29, 100))


def test_digests_are_compared_step_by_step():
    aligner = Aligner(())
    digests = [
        part(0, range(4), [5, 5, 5, 5], metric="parameters", dtype=np.uint64),
        part(1, range(4), [5, 5, 6, 6], metric="parameters", dtype=np.uint64),
        part(2, [0, 2], [5, 5], metric="parameters", dtype=np.uint64),
    ]
    liveness = [life(r, 3) for r in range(3)]
    aligner.add(data(digests=digests, liveness=liveness, world_size=3))
    [window] = aligner.windows(0.0)
    reported = [(c.step, c.ranks.tolist(), c.deviating) for c in window.comparisons]
    assert reported == [
        (0, [0, 1, 2], ()),
        (1, [0, 1], ()),
        (2, [0, 1, 2], (1,)),
        (3, [0, 1], (0, 1)),
    ]


def test_ranks_that_hold_different_shards_are_not_compared():
    aligner = Aligner(())
    digests = [part(r, [0], [r], metric="parameters", dtype=np.uint64) for r in range(2)]
    sharded = data(digests=digests, liveness=[life(0, 0), life(1, 0)])
    tables = {
        r: {"parameters": wire.TensorTable(("w",), ((1,),), ("float32",), (f"{r}/2",))}
        for r in range(2)
    }
    aligner.add(NewData(**{f: getattr(sharded, f) for f in sharded.__slots__} | {"tables": tables}))
    [window] = aligner.windows(0.0)
    assert window.comparisons == ()


def clipping(first, second, *, clip):
    """Two ranks' norms of what they applied, and of what they clipped before; and the factor."""
    names = ("grad_norm", "grad_norm_preclip", "clip_coefficient")[: 3 if clip else 1]
    aligner = Aligner(())
    columns = [
        part(rank, [0], [value], metric=name)
        for rank, reported in enumerate((first, second))
        for name, value in zip(names, reported, strict=False)
    ]
    aligner.add(data(columns, [life(0, 0), life(1, 0)]))
    [window] = aligner.windows(0.0)
    return {c.stage: c.equal for c in window.comparisons}


def test_ranks_that_clip_different_tensors_by_their_norms_had_one_gradient_before():
    # Of a gradient of norm 5, one rank clips a part of norm 3 to 0.1, the other one of norm 4.
    first = (np.hypot(4.0, 0.1), 3.0, 0.1 / 3)
    second = (np.hypot(3.0, 0.1), 4.0, 0.1 / 4)
    found = clipping(first, second, clip=True)
    assert found == {"reduced_gradient": True, "clipped_gradient": False}
    assert clipping(first, second, clip=False) == {"reduced_gradient": False}


def test_ranks_that_clip_all_of_different_gradients_had_different_ones_before():
    assert clipping((0.1, 3.0, 0.1 / 3), (0.2, 4.0, 0.2 / 4), clip=True) == {
        "reduced_gradient": False
    }


def test_of_the_settings_that_are_numbers_one_that_differs_counts():
    for scales in ([8.0, 4.0], [8.0, 8.0]):
        for rates in ([0.1, 0.1], [0.1, 0.2]):
            aligner = Aligner(())
            reported = {"lr": rates, "amp_scale": scales}
            columns = [part(r, [0], [reported[n][r]], metric=n) for n in reported for r in range(2)]
            digests = [
                part(r, [0], [7], metric="hyperparameters", dtype=np.uint64) for r in range(2)
            ]
            aligner.add(data(columns, [life(0, 0), life(1, 0)], digests))
            [window] = aligner.windows(0.0)
            (comparison,) = window.comparisons
            assert comparison.equal == (scales[0] == scales[1] and rates[0] == rates[1])


@settings(deadline=None)
@given(
    posts=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 7)), min_size=1, max_size=40),
    evaluations=st.lists(st.booleans(), min_size=40, max_size=40),
)
def test_how_it_comes_does_not_matter(posts, evaluations):
    aligner = Aligner({"loss"})
    done = [0, 0, 0]
    seen, values = [], []
    for (rank, count), evaluate in zip(posts, evaluations, strict=False):
        columns = [part(rank, range(done[rank], done[rank] + count))]
        done[rank] += count
        aligner.add(data(columns, [life(r, done[r] - 1) for r in range(3)], world_size=3))
        if evaluate:
            for window in aligner.windows(0.0):
                seen += window.steps.tolist()
                if len(window.steps):
                    values.append(window.series["loss"].values)
    aligner.add(data((), [life(r, done[r] - 1) for r in range(3)], world_size=3))
    for window in aligner.windows(0.0):
        seen += window.steps.tolist()
        if len(window.steps):
            values.append(window.series["loss"].values)
    assert seen == list(range(min(done)))
    if seen:
        joined = np.concatenate(values, axis=1)
        expected = np.array(seen) + 1000.0 * np.arange(3)[:, None]
        assert joined == pytest.approx(expected)
