"""Tensors that change on some ranks and not on others, with and without a replica."""

import numpy as np
import pytest

from rankscope.agent import wire
from rankscope.server.comparison.own_history import Change, changed_alone
from rankscope.server.evaluation.align import Aligner
from rankscope.server.window import FingerprintPart, LivenessPart, NewData, RankLiveness
from tests.support.runs.columns import of_rank

RANKS = 4
NAMES = ("a", "b")


def change(*changed, shapes=((4,), (4,)), by=None):
    return Change("parameters", NAMES, shapes, np.array(changed), by)


def test_the_rank_on_which_a_tensor_changed_is_named():
    by = np.zeros((2, 8))
    by[1, 3] = 0.5
    changes = {rank: change(False, False) for rank in range(RANKS)}
    changes[2] = change(False, True, by=by)
    found = changed_alone(7, "outside_optimizer", changes)
    assert (found.deviating, found.decided) == ((2,), True)
    [tensor] = found.tensors
    assert (tensor.name, tensor.ranks, tensor.distance, tensor.buckets) == ("b", (2,), 0.5, 1)


def test_so_is_the_one_on_which_it_did_not():
    changes = {rank: change(True, rank != 1) for rank in range(RANKS)}
    found = changed_alone(7, "outside_optimizer", changes)
    assert found.deviating == (1,)
    assert [t.name for t in found.tensors] == ["b"]


def test_of_two_ranks_both():
    found = changed_alone(7, "frozen", {0: change(False, False), 1: change(True, False)})
    assert (found.deviating, found.decided) == ((0, 1), False)


def test_what_changes_everywhere_is_no_difference():
    assert changed_alone(7, "frozen", {r: change(True, False) for r in range(RANKS)}) is None
    assert changed_alone(7, "frozen", {r: change(False, False) for r in range(RANKS)}) is None


def test_who_holds_nothing_of_a_tensor_has_left_nothing_out():
    whole, nothing = ((4,), (4,)), ((4,), (0,))
    changes = {
        rank: change(False, rank < 2, shapes=whole if rank < 2 else nothing)
        for rank in range(RANKS)
    }
    assert changed_alone(7, "outside_optimizer", changes) is None


# ------------------------------------------------------------------- through the whole alignment


def tables(*, sharded, names=NAMES, of="parameters"):
    return {
        rank: {
            "parameters": table(rank, ("x",), sharded=sharded),
            of: table(rank, names, sharded=sharded),
        }
        for rank in range(RANKS)
    }


def table(rank, names, *, sharded):
    shard = f"Shard(dim=0)@{rank}/{RANKS}" if sharded else ""
    count = len(names)
    return wire.TensorTable(names, ((4,),) * count, ("float32",) * count, (shard,) * count)


def made(rank, step, digests, *, of, stage, sketches=True):
    digests = np.array(digests, np.uint64)
    sketched = np.ones((len(digests), 8)) * digests[:, None] if sketches else None
    printed = wire.Fingerprint(step=step, stage=stage, table=of, digests=digests, sketches=sketched)
    return FingerprintPart(rank, 0, printed)


class Run:
    """A run of four ranks, evaluated step by step."""

    def __init__(self, held):
        self.aligner, self.tables = Aligner({"loss"}), held

    def step(self, step, *fingerprints, words=None):
        digests = [
            of_rank(r, 0, "outside_optimizer", np.array([step]), np.array([w], np.uint64))
            for r, w in enumerate(words or ())
        ]
        self.aligner.add(
            NewData(
                arrival=step,
                more=False,
                columns=(),
                digests=tuple(digests),
                fingerprints=fingerprints,
                liveness=tuple(
                    LivenessPart(RankLiveness(r, 95.0, 100.0, step), 0, step, 0.0)
                    for r in range(RANKS)
                ),
                tables=self.tables,
                world_size=RANKS,
                config={},
            )
        )
        self.tables = {}
        [window] = self.aligner.windows(100.0)
        return window.comparisons


def frozen(step, of, *digests, sketches=False):
    return [
        made(r, step, d, of=of, stage="frozen", sketches=sketches) for r, d in enumerate(digests)
    ]


@pytest.mark.parametrize("sharded", [False, True])
def test_a_frozen_tensor_that_changes_on_one_rank(sharded):
    run = Run(tables(sharded=sharded, of="frozen/0"))
    first = [[r * sharded, 5] for r in range(RANKS)]
    assert all(c.equal for c in run.step(0, *frozen(0, "frozen/0", *first, sketches=True)))
    assert all(c.equal for c in run.step(1, *frozen(1, "frozen/0", *first)))
    later = [[*one] for one in first]
    later[3][1] = 6
    posted = frozen(2, "frozen/0", *later)
    posted[3] = made(3, 2, later[3], of="frozen/0", stage="frozen")
    [found] = run.step(2, *posted)
    assert (found.stage, found.deviating, found.decided) == ("frozen", (3,), True)
    [tensor] = found.tensors
    # Who has seen no change sends digests alone: the sketch is that of the same digest before.
    assert (tensor.name, tensor.ranks) == ("b", (3,))
    assert tensor.distance == pytest.approx(np.sqrt(8.0))


def test_that_another_part_agrees_does_not_show_that_it_is_over():
    held = tables(sharded=False, of="frozen/0")
    for rank in range(RANKS):
        held[rank]["frozen/1"] = table(rank, ("c",), sharded=False)
    run = Run(held)
    run.step(0, *frozen(0, "frozen/0", *[[1, 5]] * 3, [1, 6], sketches=True))
    [found] = run.step(2, *frozen(2, "frozen/0", *[[1, 5]] * 3, [1, 6]))
    assert (found.deviating, found.tensor_count) == ((3,), 3)
    assert run.step(3, *frozen(3, "frozen/1", *[[7]] * 4)) == ()
    [found] = run.step(4, *frozen(4, "frozen/0", *[[1, 5]] * 4))
    assert found.equal
    [found] = run.step(5, *frozen(5, "frozen/1", *[[7]] * 4))
    assert found.equal


def quiet_run(steps):
    run = Run(tables(sharded=True, names=("x",), of="parameters"))
    for step in range(steps):
        assert run.step(step, words=[0] * RANKS) == ()
    return run


def test_a_shard_that_is_written_on_one_rank_alone():
    run = quiet_run(10)
    write = made(1, 10, [9], of="parameters", stage="outside_optimizer")
    [found] = run.step(10, write, words=[0, 9, 0, 0])
    assert (found.stage, found.deviating) == ("outside_optimizer", (1,))
    assert [t.name for t in found.tensors] == ["x"]


def test_not_where_it_is_done_as_a_rule_or_by_all():
    run = Run(tables(sharded=True, names=("x",), of="parameters"))
    for step in range(20):
        write = made(1, step, [9], of="parameters", stage="outside_optimizer")
        assert run.step(step, write, words=[0, 9, 0, 0]) == ()
    run = quiet_run(10)
    writes = [
        made(r, 10, [9 + r], of="parameters", stage="outside_optimizer") for r in range(RANKS)
    ]
    assert run.step(10, *writes, words=[9 + r for r in range(RANKS)]) == ()


def test_not_where_it_is_not_known_which_tensor_it_was():
    assert quiet_run(10).step(10, words=[0, 9, 0, 0]) == ()
