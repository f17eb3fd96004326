"""What must agree between ranks, what need not, and tables that are reported late."""

import numpy as np
import pytest

from rankscope.agent import wire
from rankscope.server.comparison.replicas import REPLICATED, Replicas
from rankscope.server.evaluation.align import Aligner
from rankscope.server.window import FingerprintPart, LivenessPart, NewData, RankLiveness
from tests.support.runs.columns import of_rank


def table(*names, shards=None):
    count = len(names)
    return wire.TensorTable(names, ((4,),) * count, ("f",) * count, shards or ("",) * count)


def data(tables, through, *, digests=(), fingerprints=(), state="running"):
    return NewData(
        arrival=1,
        more=False,
        columns=(),
        digests=tuple(digests),
        fingerprints=tuple(fingerprints),
        liveness=tuple(
            LivenessPart(RankLiveness(r, 95.0, 100.0, through, state), 0, through, 0.0)
            for r in range(3)
        ),
        tables=tables,
        world_size=3,
        config={},
    )


def digest(rank, stage, step, value):
    return of_rank(rank, 0, stage, np.array([step]), np.array([value], np.uint64))


def made(rank, stage, step, digests, of="parameters", sketches=None):
    return FingerprintPart(
        rank,
        0,
        wire.Fingerprint(
            step=step,
            stage=stage,
            table=of,
            digests=np.array(digests, np.uint64),
            sketches=sketches,
        ),
    )


MODEL = {"parameters": table("w", "b")}
ALL = dict.fromkeys(range(3), MODEL)


def compared(aligner, *run_events):
    found = []
    for one in run_events:
        aligner.add(one)
        found += [c for window in aligner.windows(100.0) for c in window.comparisons]
    return found


def test_what_goes_into_a_reduction_need_not_agree():
    assert {"batch", "local_gradient"}.isdisjoint(REPLICATED)
    assert set(REPLICATED) < set(wire.STAGES)
    names = ["batch", "local_gradient", "rng/torch", "rng/cuda", "parameters"]
    digests = [
        digest(r, name, 5, 7 if name == "parameters" else r) for r in range(3) for name in names
    ]
    fingerprints = [made(r, "local_gradient", 5, [r, r]) for r in range(3)]
    [found] = compared(Aligner({"loss"}), data(ALL, 5, digests=digests, fingerprints=fingerprints))
    assert (found.stage, found.equal) == ("parameters", True)


@pytest.mark.parametrize("stage", ["buffers", "watched"])
def test_what_is_beside_the_chain_is_compared(stage):
    digests = [digest(r, stage, 5, r == 1) for r in range(3)]
    [found] = compared(Aligner({"loss"}), data(ALL, 5, digests=digests))
    assert (found.stage, found.deviating) == (stage, (1,))


def test_the_state_of_an_optimizer_is_compared_table_by_table():
    tables = {
        rank: MODEL
        | {"optimizer/exp_avg": table("w", "b"), "optimizer/exp_avg_sq": table("w", "b")}
        for rank in range(3)
    }
    fingerprints = [made(r, "optimizer_state", 5, [1, 2], "optimizer/exp_avg") for r in range(3)]
    sketches = [np.ones((2, 4)) + [[0.0], [0.5 * (r == 2)]] for r in range(3)]
    fingerprints += [
        made(r, "optimizer_state", 5, [3, 4 + (r == 2)], "optimizer/exp_avg_sq", sketches[r])
        for r in range(3)
    ]
    [found] = compared(Aligner({"loss"}), data(tables, 5, fingerprints=fingerprints))
    assert found.deviating == (2,)
    assert found.tensor_count == 4
    assert [(d.name, d.table) for d in found.tensors] == [("b", "optimizer/exp_avg_sq")]


def test_ranks_that_keep_other_parts_of_the_state_are_no_replicas():
    tables = {
        rank: MODEL | {"optimizer/momentum": table("w" if rank == 0 else "b")} for rank in range(3)
    }
    digests = [digest(r, "optimizer_state", 5, r == 0) for r in range(3)]
    [found] = compared(Aligner({"loss"}), data(tables, 5, digests=digests))
    assert (found.equal, found.ranks.tolist()) == (True, [1, 2])


def test_a_rank_that_has_not_reported_what_its_optimizer_keeps_is_compared():
    held = MODEL | {"optimizer/momentum": table("w")}
    digests = [digest(r, "optimizer_state", 5, r == 1) for r in range(3)]
    [found] = compared(Aligner({"loss"}), data({0: held, 1: MODEL, 2: held}, 5, digests=digests))
    assert found.deviating == (1,)


def test_fingerprints_of_a_table_nobody_has_described_are_compared_without_names():
    fingerprints = [made(r, "buffers", 5, [1, 2 + (r == 0)], "buffers") for r in range(3)]
    [found] = compared(Aligner({"loss"}), data(ALL, 5, fingerprints=fingerprints))
    assert found.deviating == (0,)
    assert [d.name for d in found.tensors] == ["buffers[1]"]


def test_a_table_that_comes_later_names_the_tensors_from_then_on():
    aligner = Aligner({"loss"})

    def fingerprints(step):
        return [made(r, "buffers", step, [1, 2 + (r == 0)], "buffers") for r in range(3)]

    with_buffers = {rank: MODEL | {"buffers": table("mean", "var")} for rank in range(3)}
    first, second, third = compared(
        aligner,
        data(ALL, 5, fingerprints=fingerprints(5)),
        data({0: with_buffers[0], 1: with_buffers[1]}, 6, fingerprints=fingerprints(6)),
        data({2: with_buffers[2]}, 7, fingerprints=fingerprints(7)),
    )
    assert [d.name for d in first.tensors] == ["buffers[1]"]
    assert [d.name for d in second.tensors] == [d.name for d in third.tensors] == ["var"]
    assert [c.deviating for c in (first, second, third)] == [(0,)] * 3


def test_a_table_of_another_length_than_the_fingerprint_names_nothing():
    fingerprints = [made(r, "parameters", 5, [1, 2, 3 + (r == 1)]) for r in range(3)]
    [found] = compared(Aligner({"loss"}), data(ALL, 5, fingerprints=fingerprints))
    assert [d.name for d in found.tensors] == ["parameters[2]"]


def test_fingerprints_of_unlike_lengths_are_compared_among_most():
    fingerprints = [made(r, "parameters", 5, [1, 2] if r else [1, 2, 3]) for r in range(3)]
    [found] = compared(Aligner({"loss"}), data(ALL, 5, fingerprints=fingerprints))
    assert (found.equal, found.ranks.tolist()) == (True, [1, 2])


def test_tables_are_compared_by_what_they_say():
    replicas = Replicas()
    replicas.learn(
        {rank: {"parameters": table("w", shards=(f"{rank % 2}/2",))} for rank in range(5)}
    )
    assert replicas.rows("parameters", np.arange(5)).tolist() == [0, 2, 4]
    replicas.learn({4: {"parameters": table("w", shards=("1/2",))}})
    assert replicas.rows("parameters", np.arange(5)).tolist() == [1, 3, 4]


def test_ranks_report_one_after_the_other_of_other_parameters():
    replicas, everyone = Replicas(), np.arange(3)
    replicas.learn(ALL)
    changed = {f"parameters@{n}": table("w") for n in range(1, 11)}
    replicas.learn({2: MODEL | changed})
    assert [c.tolist() for c in replicas.classes("parameters", everyone)] == [[0, 1, 2]]
    replicas.learn({0: MODEL | changed, 1: MODEL | {"parameters@1": table("b")}})
    assert [c.tolist() for c in replicas.classes("parameters", everyone)] == [[0, 2], [1]]
