"""Ranks that train copies of their own of some tensors, and are replicas in all else."""

import numpy as np
import pytest

from rankscope.agent import wire
from rankscope.server.comparison.replicas import Replicas
from rankscope.server.evaluation import snapshot
from rankscope.server.evaluation.align import Aligner
from rankscope.server.window import FingerprintPart, LivenessPart, NewData, RankLiveness
from tests.support.runs.columns import of_rank

EVERYONE = np.arange(4)


def own(rank):
    return f"{wire.RANK_LOCAL}{rank}"


def table(*names, shards=None, shape=(4,)):
    count = len(names)
    return wire.TensorTable(names, (shape,) * count, ("f",) * count, shards or ("",) * count)


def hybrid(rank):
    """A table that each rank trains a copy of its own of, and a body."""
    return {"parameters": table("table", "a", "b", shards=(own(rank), "", ""))}


HYBRID = {rank: hybrid(rank) for rank in range(4)}


def made(rank, stage, digests, of="parameters", step=5):
    """A fingerprint whose sketches differ as much as its digests."""
    digests = np.array(digests, np.uint64)
    sketches = np.full((len(digests), 4), 1.0) * digests[:, None]
    reported = wire.Fingerprint(
        step=step, stage=stage, table=of, digests=digests, sketches=sketches
    )
    return FingerprintPart(rank, 0, reported)


def posted(kind, name, *values, step=5):
    array = np.array(values, kind)
    return [of_rank(r, 0, name, np.array([step]), array[r : r + 1]) for r in range(len(values))]


def windows(tables, *, fingerprints=(), digests=(), series=(), aligner=None, step=5):
    ranks = len(tables)
    aligner = aligner or Aligner({"loss"})
    aligner.add(
        NewData(
            arrival=step,
            more=False,
            columns=tuple(series),
            digests=tuple(digests),
            fingerprints=tuple(fingerprints),
            liveness=tuple(
                LivenessPart(RankLiveness(r, 95.0, 100.0, step), 0, step, 0.0) for r in range(ranks)
            ),
            tables=tables,
            world_size=ranks,
            config={},
        )
    )
    [window] = aligner.windows(100.0)
    return window


def compared(*how, **more):
    return windows(*how, **more).comparisons


def test_beside_their_copies_the_ranks_are_replicas_with_batches_of_their_own():
    window = windows(HYBRID)
    assert window.replicas == window.data_parallel == ((0, 1, 2, 3),)
    assert window.rank_local == frozenset(range(4))


def test_ranks_that_hold_parts_are_none():
    halves = {r: {"parameters": table("table", shards=(f"half {r % 2}",))} for r in range(4)}
    window = windows(halves)
    assert window.replicas == ((0, 2), (1, 3))
    assert not window.rank_local


def test_copies_may_differ_and_the_rest_must_not():
    fingerprints = [made(r, "parameters", [10 + r, 1, 2]) for r in range(4)]
    [found] = compared(HYBRID, fingerprints=fingerprints)
    assert (found.equal, found.ranks.tolist(), found.tensor_count) == (True, [0, 1, 2, 3], 2)
    fingerprints[2] = made(2, "parameters", [12, 1, 3])
    [found] = compared(HYBRID, fingerprints=fingerprints)
    assert (found.deviating, found.decided, found.tensor_count) == ((2,), True, 2)
    assert [t.name for t in found.tensors] == ["b"]


@pytest.mark.parametrize("stage", ["start", "outside_optimizer", "parameters", "optimizer_state"])
def test_model_digests_say_nothing(stage):
    assert compared(HYBRID, digests=posted(np.uint64, stage, 1, 2, 3, 4)) == ()


def test_norms_of_whole_gradients_say_nothing():
    assert compared(HYBRID, series=posted(np.float64, "grad_norm", 1.0, 2.0, 3.0, 4.0)) == ()


@pytest.mark.parametrize("stage", ["hyperparameters", "buffers"])
def test_settings_and_buffers_have_to_be_the_same(stage):
    [found] = compared(HYBRID, digests=posted(np.uint64, stage, 7, 7, 8, 7))
    assert (found.stage, found.deviating) == (stage, (2,))
    [found] = compared(HYBRID, series=posted(np.float64, "lr", 0.1, 0.1, 0.1, 0.2))
    assert (found.stage, found.deviating) == ("hyperparameters", (3,))


def test_digests_of_other_replicas_are_compared_as_ever():
    """Two of four ranks hold another stage, all of which is reduced."""
    tables = HYBRID | {rank: {"parameters": table("head")} for rank in (2, 3)}
    window = windows(tables, digests=posted(np.uint64, "parameters", 1, 2, 3, 3))
    assert window.replicas == ((0, 1), (2, 3))
    [found] = window.comparisons
    assert (found.equal, found.ranks.tolist()) == (True, [2, 3])
    fingerprints = [made(r, "parameters", [10 + r, 1, 2 + r]) for r in range(2)]
    digests = posted(np.uint64, "parameters", 1, 2, 3, 3)
    [found] = compared(tables, digests=digests, fingerprints=fingerprints)
    assert found.deviating == (0, 1)
    assert [t.name for t in found.tensors] == ["b"]


def test_the_state_of_an_optimizer_is_compared_without_that_of_the_copies():
    momentum = {"optimizer/momentum": table("table", "a", "b")}
    tables = {rank: hybrid(rank) | momentum for rank in range(4)}
    fingerprints = [
        made(r, "optimizer_state", [10 + r, 1, 2 + (r == 1)], "optimizer/momentum")
        for r in range(4)
    ]
    [found] = compared(tables, fingerprints=fingerprints)
    assert (found.deviating, [t.name for t in found.tensors]) == ((1,), ["b"])


def test_so_is_an_average_of_the_model_but_not_what_is_called_alike_by_chance():
    beside = {"watched/ema": table("ema.table", "ema.a"), "buffers": table("table")}
    tables = {rank: hybrid(rank) | beside for rank in range(4)}
    fingerprints = [made(r, "watched", [10 + r, 1], "watched/ema") for r in range(4)]
    [found] = compared(tables, fingerprints=fingerprints)
    assert (found.equal, found.tensor_count) == (True, 1)
    fingerprints = [made(r, "buffers", [10 + (r == 3)], "buffers") for r in range(4)]
    [found] = compared(tables, fingerprints=fingerprints)
    assert (found.stage, found.deviating) == ("buffers", (3,))


def test_copies_may_be_of_tensors_that_no_other_rank_has():
    """Each rank has tables of its own, under other names and in other numbers."""
    tables = {
        rank: {
            "parameters": table(
                *(f"table {rank}.{n}" for n in range(rank)), "a", shards=(own(rank),) * rank + ("",)
            )
        }
        for rank in range(4)
    }
    fingerprints = [made(r, "parameters", [*range(10, 10 + r), 1 + (r == 3)]) for r in range(4)]
    window = windows(tables, fingerprints=fingerprints)
    assert window.replicas == ((0, 1, 2, 3),)
    [found] = window.comparisons
    assert (found.deviating, [t.name for t in found.tensors]) == ((3,), ["a"])


def test_where_all_is_each_rank_s_own_there_is_nothing_to_compare():
    tables = {rank: {"parameters": table("a", shards=(own(rank),))} for rank in range(4)}
    stages = ("parameters", "local_gradient", "reduced_gradient")
    fingerprints = [made(r, stage, [r + 1]) for r in range(4) for stage in stages]
    window = windows(tables, fingerprints=fingerprints)
    assert window.replicas == ((0, 1, 2, 3),)
    assert (window.comparisons, window.reductions) == ((), ())


@pytest.mark.parametrize("factor", [1, 4])
def test_the_mean_of_the_gradients_is_checked_without_the_copies(factor):
    local = [made(r, "local_gradient", [100 + r, 1 + r, 5 + r]) for r in range(4)]
    # What each rank applies to its copy is its own; of the rest it is the mean.
    reduced = []
    for rank in range(4):
        part = made(rank, "reduced_gradient", [100 + rank, 3, 7])
        part.fingerprint.sketches[1:] = np.array([[2.5], [6.5]]) * factor
        reduced.append(part)
    window = windows(HYBRID, fingerprints=[*local, *reduced])
    [reduction] = window.reductions
    assert reduction.agreed
    assert (reduction.tensor_count, reduction.known, reduction.wrong_count) == (2, 2, 0)
    assert reduction.ratio == pytest.approx(factor)
    [found] = window.comparisons
    assert (found.stage, found.equal) == ("reduced_gradient", True)


def test_a_fingerprint_of_which_it_is_not_known_what_it_speaks_of_is_not_compared():
    fingerprints = [made(r, "parameters", [10 + r, 1], "parameters@1") for r in range(4)]
    fingerprints += [made(r, "start", [10 + r, 1]) for r in range(4)]
    assert compared(HYBRID, fingerprints=fingerprints) == ()


def test_parts_and_copies_beside_each_other():
    """Two pairs of tensor-parallel ranks, all with tables of their own."""
    tables = {
        rank: {
            "parameters": table("table", "half", "norm", shards=(own(rank), f"{rank % 2}/2", ""))
        }
        for rank in range(4)
    }
    fingerprints = [made(r, "parameters", [10 + r, r % 2, 5 + (r == 2)]) for r in range(4)]
    window = windows(tables, fingerprints=fingerprints)
    assert window.replicas == ((0, 2), (1, 3))
    [found] = window.comparisons
    assert (found.ranks.tolist(), found.deviating) == ([0, 1, 2, 3], (2,))
    assert [t.name for t in found.tensors] == ["norm"]


def test_ranks_that_say_it_one_after_the_other():
    replicas = Replicas()
    plain = {"parameters": table("table", "a", "b")}
    replicas.learn(dict.fromkeys(range(4), plain))
    replicas.learn({0: hybrid(0), 1: hybrid(1)})
    assert [c.tolist() for c in replicas.classes("parameters", EVERYONE)] == [[0, 1], [2, 3]]
    assert replicas.whole("parameters", EVERYONE[2:])
    assert not replicas.whole("parameters", EVERYONE[:2])
    replicas.learn({2: hybrid(2), 3: hybrid(3)})
    assert [c.tolist() for c in replicas.classes("parameters", EVERYONE)] == [[0, 1, 2, 3]]
    # Restarted without it.
    replicas.learn(dict.fromkeys(range(4), plain))
    assert replicas.own.ranks == frozenset()
    assert replicas.whole("parameters", EVERYONE)


def test_without_such_tensors_nothing_is_copied():
    replicas, plain = Replicas(), {"parameters": table("a")}
    replicas.learn({0: plain})
    part = made(0, "parameters", [1]).fingerprint
    assert replicas.own.without(0, part) is part
    assert replicas.table(0, "parameters") is plain["parameters"]


def test_it_goes_on_from_a_snapshot():
    aligner = Aligner({"loss"})
    fingerprints = [made(r, "parameters", [10 + r, 1, 2]) for r in range(4)]
    windows(HYBRID, fingerprints=fingerprints, aligner=aligner)
    aligner = snapshot.from_bytes(snapshot.to_bytes(aligner))
    fingerprints = [made(r, "parameters", [10 + r, 1, 2 + (r == 2)], step=6) for r in range(4)]
    aligner.add(
        NewData(
            arrival=6,
            more=False,
            columns=(),
            digests=(),
            fingerprints=tuple(fingerprints),
            liveness=tuple(
                LivenessPart(RankLiveness(r, 95.0, 100.0, 6), 0, 6, 0.0) for r in range(4)
            ),
            tables={},
            world_size=4,
            config={},
        )
    )
    [found] = [c for window in aligner.windows(100.0) for c in window.comparisons]
    assert (found.deviating, [t.name for t in found.tensors]) == ((2,), ["b"])
