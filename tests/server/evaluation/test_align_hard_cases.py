"""Alignment and comparison where ranks restart, fall silent, or sample other steps; in pages."""

import numpy as np

from rankscope.agent import wire
from rankscope.server.comparison import compare
from rankscope.server.evaluation.align import Aligner
from rankscope.server.window import FingerprintPart, LivenessPart, NewData, RankLiveness
from tests.support.runs.columns import of_rank

TABLE = wire.TensorTable(("a", "b"), ((4,), (4,)), ("f", "f"), ("", ""))
JOINED = compare.joined_table({"parameters": TABLE})


def life(rank, through, *, state="running", last_seen=100.0, attempt=0, heartbeat=5.0):
    return LivenessPart(
        RankLiveness(rank, 95.0, last_seen, through, state, heartbeat_seconds=heartbeat),
        attempt,
        through,
        0.0,
    )


def data(liveness, columns=(), digests=(), fingerprints=(), more=False):
    return NewData(
        1,
        more,
        tuple(columns),
        tuple(digests),
        tuple(fingerprints),
        tuple(liveness),
        {life_.liveness.rank: {"parameters": TABLE} for life_ in liveness},
        len(liveness),
        {},
    )


def digest(rank, steps, values, attempt=0):
    return of_rank(rank, attempt, "parameters", np.array(steps), np.array(values, np.uint64))


def col(rank, steps, value=1.0, metric="loss", attempt=0):
    return of_rank(rank, attempt, metric, np.array(steps), np.full(len(steps), value))


def run(aligner, now=100.0):
    return list(aligner.windows(now))


def test_a_client_that_never_says_through_step_is_evaluated_once_it_has_finished():
    a = Aligner({"loss"})
    a.add(data([life(0, -1, state="finished")], [col(0, range(50))]))
    assert sum(len(w.steps) for w in run(a, 1000.0)) == 50


def test_a_quiet_server_side_outage_of_all_ranks_excuses_nobody():
    a = Aligner({"loss"})
    # both were cut off together 15 s ago; rank 1's last batch has not come through
    liveness = [life(0, 155, last_seen=85.0), life(1, 150, last_seen=84.5)]
    a.add(
        data(liveness, digests=[digest(0, range(156), [7] * 156), digest(1, range(151), [7] * 151)])
    )
    run(a)
    a.add(
        data(
            [life(0, 160), life(1, 160)],
            digests=[digest(0, range(156, 161), [7] * 5), digest(1, range(151, 161), [9] * 10)],
        )
    )
    found = [c for w in run(a, 101.0) for c in w.comparisons if not c.equal]
    assert found
    assert found[0].step == 151


def test_a_rank_within_its_own_heartbeat_holds():
    a = Aligner({"loss"})
    liveness = [life(0, 20, last_seen=100.0), life(1, 10, last_seen=85.0, heartbeat=30.0)]
    a.add(data(liveness, digests=[digest(0, range(21), [7] * 21), digest(1, range(11), [7] * 11)]))
    run(a)
    assert a.last_step == 10


def test_digests_of_a_dead_attempt_are_not_compared_with_those_of_the_new_one():
    a = Aligner({"loss"})
    old = [digest(0, range(156), [7] * 156), digest(1, range(151), [7] * 151)]
    a.add(data([life(0, 155), life(1, 150)], digests=old))
    run(a)
    assert a.last_step == 150
    # restart from step 100; the trajectory is another one (other hardware); rank 0 thins its
    # digests
    even = range(100, 201, 2)
    new = [digest(0, even, [8] * len(even), 1), digest(1, range(100, 201), [8] * 101, 1)]
    a.add(data([life(0, 200, attempt=1), life(1, 200, attempt=1)], digests=new))
    assert [c.step for w in run(a) for c in w.comparisons if not c.equal] == []


def test_minus_zero_stays_a_difference_of_tiny_size():
    s = np.ones((2, 4))
    fingerprints = [
        wire.Fingerprint(
            step=1,
            stage="parameters",
            table="parameters",
            digests=np.array(d, np.uint64),
            sketches=s,
        )
        for d in ([1, 2], [1, 2], [1, 3])
    ]
    c = compare.compare_fingerprints(1, "parameters", np.arange(3), fingerprints, JOINED)
    assert c.deviating == (2,)
    assert c.tensors[0].name == "b"
    assert 0 < c.distance[2] < 1e-300


def test_sketches_that_differ_by_summation_order_only_make_no_distance():
    # The digest decides equality, the sketch decides size
    base = np.ones((2, 4))
    other = base.copy()
    other[0] += 1e-9
    other[1] += 0.5
    fingerprints = [
        wire.Fingerprint(
            step=1,
            stage="parameters",
            table="parameters",
            digests=np.array(d, np.uint64),
            sketches=k,
        )
        for d, k in (([1, 2], base), ([1, 2], base), ([1, 2], base + 1e-9), ([1, 3], other))
    ]
    c = compare.compare_fingerprints(1, "parameters", np.arange(4), fingerprints, JOINED)
    assert c.distance[2] == 0.0, c.distance


def test_fingerprints_of_some_ranks_still_name_the_tensor():
    a = Aligner({"loss"})
    s = np.ones((2, 4))
    t = s.copy()
    t[1, 0] = 5
    fingerprints = [
        FingerprintPart(
            r,
            0,
            wire.Fingerprint(
                step=8,
                stage="parameters",
                table="parameters",
                digests=np.array([1, 3 if r == 2 else 2], np.uint64),
                sketches=t if r == 2 else s,
            ),
        )
        for r in (0, 2, 3)
    ]
    digests = [digest(r, [8], [9 if r == 2 else 7]) for r in range(4)]
    a.add(data([life(r, 8) for r in range(4)], digests=digests, fingerprints=fingerprints))
    (c,) = [c for w in run(a) for c in w.comparisons]
    assert c.deviating == (2,)
    assert [d.name for d in c.tensors] == ["b"]
    assert c.distance[2] == 4.0


def test_missing_is_filled():
    a = Aligner({"loss"})
    liveness = [life(0, 20), life(1, 20), life(2, 10, last_seen=50.0)]
    a.add(
        data(
            liveness,
            digests=[
                digest(0, range(21), [7] * 21),
                digest(1, range(21), [7] * 21),
                digest(2, range(11), [7] * 11),
            ],
        )
    )
    last = [c for w in run(a) for c in w.comparisons][-1]
    assert last.step == 20
    assert last.missing == (2,)


def of_a_server(states, **more):
    """The last comparison of a server's versions, of which worker 2 pulled half."""
    through = (20, 20, 10)
    a = Aligner({"loss", "push_worker"})
    liveness = [
        life(rank, last, state=state, **(more if rank == 2 else {}))
        for rank, (last, state) in enumerate(zip(through, states, strict=True))
    ]
    pushes = col(0, range(21), metric="push_worker")
    held = [digest(rank, range(last + 1), [7] * (last + 1)) for rank, last in enumerate(through)]
    a.add(data(liveness, columns=[pushes], digests=held))
    last = [c for w in run(a) for c in w.comparisons][-1]
    assert last.step == 20
    return last


def test_a_worker_that_has_ended_pulled_no_later_version():
    assert of_a_server(["finished"] * 3).missing == ()
    # Of one that fell silent nobody knows what it held.
    assert of_a_server(["finished", "finished", "running"], last_seen=50.0).missing == (2,)


def test_replay_in_pages_gives_what_live_gave_with_late_readouts():
    # One batch a step; the loss of a step is read off the device two steps later.
    from itertools import chain

    steps, ranks = 60, 2
    batches = []
    for k in range(steps + 2):
        for r in range(ranks):
            cols = [col(r, [k - 2], value=k)] if k >= 2 else []
            ws = [digest(r, [k], [7])] if k < steps else []
            batches.append((r, k - 2, cols, ws))

    def liveness_at(n):
        t = {0: -1, 1: -1}
        for r, through, *_ in batches[:n]:
            t[r] = max(t[r], through)
        return [life(r, t[r]) for r in t]

    def collect(a, size):
        got = 0
        for i in range(0, len(batches), size):
            part = batches[i : i + size]
            more = i + size < len(batches)
            replay = size > 1
            a.add(
                data(
                    liveness_at(len(batches)) if replay else liveness_at(i + size),
                    chain.from_iterable(b[2] for b in part),
                    chain.from_iterable(b[3] for b in part),
                    more=more and replay,
                )
            )
            got += sum(int(w.series["loss"].present.sum()) for w in run(a) if "loss" in w.series)
        return got, a.late

    live = collect(Aligner({"loss"}), 1)
    replayed = collect(Aligner({"loss"}), 15)
    assert live == replayed == (steps * ranks, 0)
