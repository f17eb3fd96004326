"""Tensors that ranks hold alike although they hold different parts of others."""

import numpy as np
import pytest
import torch

from rankscope.agent import wire
from rankscope.agent.fingerprint.portable import sketch
from rankscope.server.comparison.shared_tensors import _is_constant
from rankscope.server.evaluation.align import Aligner
from rankscope.server.window import FingerprintPart, LivenessPart, NewData, RankLiveness
from tests.support.runs.columns import of_rank

GRADIENT = "reduced_gradient"


def table(names, shards):
    return wire.TensorTable(names, ((4,),) * len(names), ("f",) * len(names), shards)


# Two pairs: in each, a rank has the left half of `column` and one the right; all have `norm`.
PAIRS = {
    rank: {"parameters": table(("norm", "column"), ("", f"half {rank % 2}"))} for rank in range(4)
}
# Two stages whose first layers are called the same by chance.
STAGES = {
    rank: {
        "parameters": table(("layer.0", "embed"), ("", ""))
        if rank < 2
        else table(("layer.0", "head"), ("", ""))
    }
    for rank in range(4)
}


def fingerprint_of(rank, step, digests, stage=GRADIENT, size=1.0):
    digests = np.array(digests, np.uint64)
    return FingerprintPart(
        rank,
        0,
        wire.Fingerprint(
            step=step,
            stage=stage,
            table="parameters",
            digests=digests,
            sketches=np.full((2, 4), size) * digests[:, None],
        ),
    )


def compared(aligner, tables, step, fingerprints=(), digests=()):
    liveness = tuple(
        LivenessPart(RankLiveness(r, 95.0, 100.0, step), 0, step, 0.0) for r in range(4)
    )
    aligner.add(
        NewData(
            arrival=step + 1,
            more=False,
            columns=(),
            digests=tuple(digests),
            fingerprints=tuple(fingerprints),
            liveness=liveness,
            tables=tables,
            world_size=4,
            config={},
        )
    )
    return [c for window in aligner.windows(100.0) for c in window.comparisons]


def pairs(step, *, differ, stage=GRADIENT):
    """`norm` differs between the halves, or does not."""
    return [fingerprint_of(r, step, [7 + (differ and r % 2), 20 + r % 2], stage) for r in range(4)]


def digests(step):
    return [
        of_rank(r, 0, "parameters", np.array([step]), np.array([r % 2], np.uint64))
        for r in range(4)
    ]


def test_what_all_hold_is_compared_between_ranks_that_hold_different_halves():
    aligner = Aligner({"loss"})
    [good] = compared(aligner, PAIRS, 0, pairs(0, differ=False))
    [found] = compared(aligner, {}, 1, pairs(1, differ=True))
    assert good.equal
    assert found.deviating == (0, 1, 2, 3)
    assert not found.decided
    assert [t.name for t in found.tensors] == ["norm"]
    assert found.tensor_count == 2


def test_ranks_that_share_nothing_else_are_said_to_agree_in_what_they_do():
    tables = {rank: PAIRS[rank] for rank in (0, 1)}
    aligner = Aligner(())
    for step, differ in ((0, False), (1, True), (2, False)):
        fingerprints = pairs(step, differ=differ)[:2]
        liveness = tuple(
            LivenessPart(RankLiveness(r, 95.0, 100.0, step), 0, step, 0.0) for r in (0, 1)
        )
        aligner.add(
            NewData(
                arrival=step + 1,
                more=False,
                columns=(),
                digests=(),
                fingerprints=tuple(fingerprints),
                liveness=liveness,
                tables=tables,
                world_size=2,
                config={},
            )
        )
        [found] = [c for window in aligner.windows(100.0) for c in window.comparisons]
        assert (found.ranks.tolist(), found.equal) == ([0, 1], not differ)


def test_halves_are_not_compared_with_each_other():
    [found] = compared(Aligner({"loss"}), PAIRS, 0, pairs(0, differ=False))
    assert found.equal
    assert found.ranks.tolist() == [0, 1, 2, 3]


def test_a_rank_that_leaves_its_class_is_that_and_no_more():
    fingerprints = pairs(0, differ=False)
    fingerprints[2] = fingerprint_of(2, 0, [8, 99])
    [found] = compared(Aligner({"loss"}), PAIRS, 0, fingerprints)
    assert found.ranks.tolist() == [0, 2]


def test_who_is_wrong_in_what_more_ranks_hold_is_reported_by_all_of_them():
    fingerprints = pairs(0, differ=False)
    fingerprints[2] = fingerprint_of(2, 0, [8, 20])
    [found] = compared(Aligner({"loss"}), PAIRS, 0, fingerprints)
    assert found.ranks.tolist() == [0, 1, 2, 3]
    assert (found.deviating, found.decided) == ((2,), True)
    assert [t.name for t in found.tensors] == ["norm"]


def test_what_has_spread_over_a_class_is_reported_of_the_class():
    fingerprints = pairs(0, differ=False)
    fingerprints[0] = fingerprint_of(0, 0, [8, 20])
    fingerprints[2] = fingerprint_of(2, 0, [9, 20])
    [found] = compared(Aligner({"loss"}), PAIRS, 0, fingerprints)
    assert found.ranks.tolist() == [0, 2]


def wrote(*values):
    return [
        of_rank(r, 0, "outside_optimizer", np.array([0]), np.array([value], np.uint64))
        for r, value in enumerate(values)
    ]


def test_who_wrote_parameters_is_asked_of_all_parts_of_the_model():
    [found] = compared(Aligner({"loss"}), PAIRS, 0, digests=wrote(0, 0, 0, 5))
    assert (found.deviating, found.decided) == ((3,), True)


def test_where_most_wrote_replicas_show():
    [found] = compared(Aligner({"loss"}), PAIRS, 0, digests=wrote(6, 5, 6, 0))
    assert (found.ranks.tolist(), found.decided) == ([1, 3], False)
    [found] = compared(Aligner({"loss"}), PAIRS, 0, digests=wrote(6, 5, 6, 5))
    assert found.equal


def test_settings_are_compared_between_ranks_that_hold_different_halves():
    rates = [
        of_rank(r, 0, "hyperparameters", np.array([0]), np.array([r == 1], np.uint64))
        for r in range(4)
    ]
    [found] = compared(Aligner({"loss"}), PAIRS, 0, digests=rates)
    assert (found.deviating, found.decided) == ((1,), True)


def test_stages_of_a_pipeline_may_have_settings_of_their_own():
    rates = [
        of_rank(r, 0, "hyperparameters", np.array([0]), np.array([r // 2], np.uint64))
        for r in range(4)
    ]
    [found] = compared(Aligner({"loss"}), STAGES, 0, digests=rates)
    assert found.equal


def test_classes_that_agree_do_not_show_that_it_is_over():
    aligner = Aligner({"loss"})
    compared(aligner, PAIRS, 0, pairs(0, differ=True, stage="parameters"))
    assert compared(aligner, {}, 1, digests=digests(1)) == []
    [over] = compared(aligner, {}, 2, pairs(2, differ=False, stage="parameters"))
    assert over.equal
    [after] = compared(aligner, {}, 3, digests=digests(3))
    assert after.equal


def test_layers_of_one_name_in_different_models_are_strangers():
    strangers = [fingerprint_of(r, 0, [r // 2, 5 + r // 2]) for r in range(4)]
    [found] = compared(Aligner({"loss"}), STAGES, 0, strangers)
    assert found.equal


def test_until_they_have_had_one_gradient():
    aligner = Aligner({"loss"})
    compared(aligner, STAGES, 0, [fingerprint_of(r, 0, [9, 5 + r // 2]) for r in range(4)])
    [found] = compared(
        aligner, {}, 1, [fingerprint_of(r, 1, [r // 2, 5 + r // 2]) for r in range(4)]
    )
    assert found.deviating == (0, 1, 2, 3)
    assert [t.name for t in found.tensors] == ["layer.0"]


def test_what_differed_from_the_start_is_a_stranger_until_it_has_had_one_gradient():
    aligner = Aligner({"loss"})
    begins = [*pairs(0, differ=True), *pairs(0, differ=True, stage="start")]
    found = compared(aligner, PAIRS, 0, begins)
    assert [c.equal for c in found] == [True, True]
    compared(aligner, {}, 1, pairs(1, differ=False))
    [found] = compared(aligner, {}, 2, pairs(2, differ=True, stage="parameters"))
    assert [t.name for t in found.tensors] == ["norm"]


def test_a_gradient_of_zeros_proves_nothing():
    aligner = Aligner({"loss"})
    compared(aligner, STAGES, 0, [fingerprint_of(r, 0, [0, 5 + r // 2]) for r in range(4)])
    [found] = compared(
        aligner, {}, 1, [fingerprint_of(r, 1, [r // 2, 5 + r // 2]) for r in range(4)]
    )
    assert found.equal


def test_what_the_user_says_needs_no_proof():
    tied = {
        rank: {
            "parameters": table(("words", "embed"), ("tied", ""))
            if rank < 2
            else table(("words", "head"), ("tied", ""))
        }
        for rank in range(4)
    }
    [found] = compared(
        Aligner({"loss"}), tied, 0, [fingerprint_of(r, 0, [r // 2, 5 + r // 2]) for r in range(4)]
    )
    assert [t.name for t in found.tensors] == ["words"]


# --------------------------------------------------------------- constants beside what is cut


LAYER = {
    rank: {"parameters": table(("layer.bias", "layer.weight"), ("", f"half {rank % 2}"))}
    for rank in range(4)
}


def layers(step, stage, biases, *, constant=False):
    """A layer whose weight is cut, on two pairs of ranks; its bias has a digest on each half."""
    sketches = np.random.default_rng(step).standard_normal((2, 64))
    if constant:
        sketches[0] = 0.0
    return [
        FingerprintPart(
            r,
            0,
            wire.Fingerprint(
                step=step,
                stage=stage,
                table="parameters",
                digests=np.array([biases[r % 2], 20 + r % 2], np.uint64),
                sketches=sketches,
            ),
        )
        for r in range(4)
    ]


def names_of(comparisons):
    return [tuple(t.name for t in c.tensors) for c in comparisons if not c.equal]


def began(aligner, *, constant=True):
    assert not names_of(compared(aligner, LAYER, 0, layers(0, "start", (3, 3), constant=constant)))


@pytest.mark.parametrize("stage", [GRADIENT, "parameters"])
def test_a_constant_that_becomes_another_on_each_part_is_cut_like_them(stage):
    aligner = Aligner({"loss"})
    began(aligner)
    for step in (1, 2):
        assert not names_of(compared(aligner, {}, step, layers(step, stage, (7, 8))))
    # What each part has replicas of is compared among these.
    own = layers(3, stage, (7, 8))
    own[2] = fingerprint_of(2, 3, [9, 20], stage)
    [found] = [c for c in compared(aligner, {}, 3, own) if not c.equal]
    assert (found.ranks.tolist(), names_of([found])) == ([0, 2], [("layer.bias",)])


@pytest.mark.parametrize("stage", [GRADIENT, "parameters"])
def test_one_that_was_seen_to_be_trained_alike_is_a_replica(stage):
    aligner = Aligner({"loss"})
    began(aligner)
    assert not names_of(compared(aligner, {}, 1, layers(1, stage, (7, 7))))
    assert names_of(compared(aligner, {}, 2, layers(2, stage, (7, 8)))) == [("layer.bias",)]


def test_a_constant_without_a_gradient_is_neither():
    aligner = Aligner({"loss"})
    began(aligner)
    nothing = layers(1, GRADIENT, (4, 4), constant=True)
    assert not names_of(compared(aligner, {}, 1, nothing))
    assert not names_of(compared(aligner, {}, 1, layers(1, "parameters", (3, 3))))
    assert not names_of(compared(aligner, {}, 2, layers(2, GRADIENT, (7, 8))))


def test_what_began_alike_and_is_no_constant_is_a_replica():
    aligner = Aligner({"loss"})
    began(aligner, constant=False)
    assert names_of(compared(aligner, {}, 1, layers(1, GRADIENT, (7, 8)))) == [("layer.bias",)]


def test_a_constant_in_a_module_of_its_own_is_a_replica():
    tables = {
        rank: {"parameters": table(("norm.bias", "layer.weight"), ("", f"half {rank % 2}"))}
        for rank in range(4)
    }
    aligner = Aligner({"loss"})
    compared(aligner, tables, 0, layers(0, "start", (3, 3), constant=True))
    assert names_of(compared(aligner, {}, 1, layers(1, GRADIENT, (7, 8)))) == [("norm.bias",)]


@pytest.mark.parametrize("elements", [1, 3, 32, 64, 100, 512, 700, 4096, 100_000])
def test_a_sketch_shows_a_constant(elements):
    for constant in (0.0, 1.0, 0.1, -3e-5):
        assert _is_constant(sketch(torch.full((elements,), constant)), elements)
    if elements > 2:
        torch.manual_seed(elements)
        assert not _is_constant(sketch(torch.randn(elements)), elements)
