"""What is said of a broken link leads to what broke it."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from rankscope.server.detectors.desync.exchange import Exchange
from rankscope.server.detectors.desync.explain import finding_of
from rankscope.server.detectors.desync.incident import Divergence
from rankscope.server.detectors.mechanisms.wording import number
from rankscope.server.window import Applied, Comparison, Reduction, TensorDifference


def tensor(name="w", *, factor=math.nan, partner="", ranks=(3,)):
    return TensorDifference(name, (4, 4), ranks, 0.1, 0.1, 7, factor=factor, partner=partner)


def incident(stage="reduced_gradient", *, step=25, decided=True, tensors=(), **more):
    own = more.pop("ranks", (3,) if decided else (0, 1, 2, 3))
    groups = ((0, 1, 2), (3,)) if decided else ((0,), (1,), (2,), (3,))
    kinds = {
        "start": "desync.parameters",
        "hyperparameters": "desync.hyperparameters",
        "parameters": "desync.parameters",
    }
    return Divergence(
        first_step=step,
        seen_step=step,
        last_step=step + 9,
        clear_after=16,
        kind=kinds.get(stage, "desync.gradients"),
        stage=stage,
        ranks=own,
        decided=decided,
        groups=groups,
        agreed=(),
        by_norm=(),
        last_equal=more.pop("last_equal", step - 1),
        tensors=tensors,
        tensor_count=8,
        tensor_stage=stage,
        tensor_step=step,
        broken=more.pop("broken", {stage: 10}),
        compared={stage: 10},
        relative=0.5,
        **more,
    )


def said(made):
    found = finding_of(made, 1e-6, 1e-2)
    return f"{found.title}. {found.cause} {found.remedy}"


def test_tensors_that_nobody_reduces_are_not_called_a_missing_all_reduce():
    text = said(incident(decided=False, tensors=(tensor("conv2.weight", ranks=(1, 2, 3)),)))
    assert "replaced or added after the model was wrapped" in text
    assert "Wrap the model last" in text
    assert "no all-reduce took place" not in text
    # Where all of them differ it is one.
    everything = tuple(tensor(f"w{i}", ranks=(1, 2, 3)) for i in range(8))
    assert "no all-reduce took place" in said(incident(decided=False, tensors=everything))


EVERYTHING = tuple(tensor(f"w{i}", ranks=(1, 2, 3)) for i in range(8))


def applied(averaged, own, **more):
    given = {"factors": (1.0,) * 4, "rest": (0.0,) * 4, "received": (False,) * 4} | more
    return Applied(tensors=8, averaged=averaged, own=own, **given)


def beside(known, **more):
    made = incident(tensors=EVERYTHING, **{"decided": False, **more})
    everyone = np.arange(4)
    made.take_reductions(
        [Reduction(step=26, ranks=everyone, tensor_count=8, agreed=False, applied=known)]
    )
    return made


def test_that_nothing_was_reduced_is_claimed_where_that_was_seen():
    text = said(beside(applied((0,) * 4, (8,) * 4)))
    assert "every rank applied its own gradient: no all-reduce took place." in text
    unseen = said(incident(decided=False, tensors=EVERYTHING))
    assert "no all-reduce took place, or the ranks changed what it gave" in unseen


def test_a_tensor_left_out_is_named_where_clipping_by_a_common_norm_changes_all_of_them():
    known = applied(
        *((7,) * 4, (1,) * 4),
        unreduced=("w3",),
        unreduced_count=1,
        factors=(0.5, 0.6, 0.7, 0.4),
    )
    text = said(beside(known))
    assert "applied its own gradient for w3, and the mean of all for the other tensors" in text
    assert "as clipping does by a norm of which a part differs" in text
    assert "no all-reduce took place" not in text


def test_noise_on_a_rank_is_no_missing_all_reduce():
    known = applied(
        *((8, 8, 8, 0), (0,) * 4), rest=(0.0, 0.0, 0.0, 0.8), received=(True,) * 4, changed=("w0",)
    )
    text = said(beside(known, decided=True))
    assert "the gradients of other ranks were in it" in text
    assert "0.8 on rank 3" in text
    assert "all-reduce was skipped" not in text
    each = applied((0,) * 4, (0,) * 4, rest=(0.8,) * 4, received=(True,) * 4, changed=("w0",))
    assert "no all-reduce took place" not in said(beside(each))


def test_means_of_some_ranks_are_called_that():
    ring = applied((0,) * 4, (0,) * 4, subsets=((0, 3), (0, 1), (1, 2), (2, 3)))
    text = said(beside(ring))
    assert "rank 0 that of ranks 0 and 3, rank 1 that of ranks 0 and 1" in text
    assert "no all-reduce took place" not in text
    without_one = applied((0,) * 4, (0, 0, 0, 8), subsets=(*((0, 1, 2),) * 3, ()))
    assert "rank 2 that of ranks 0-2 and rank 3 its own" in said(beside(without_one))


def test_a_mean_times_other_numbers_is_called_one():
    text = said(beside(applied((8,) * 4, (0,) * 4, factors=(0.5, 0.6, 0.7, 0.4))))
    assert "times a number of its own: 0.5 on rank 0, 0.6 on rank 1" in text
    assert "no all-reduce took place" not in text


def test_of_two_ranks_the_one_that_applied_the_mean_is_right():
    made = two_ranks(8)
    known = Applied(
        tensors=8,
        averaged=(8, 0),
        own=(0, 0),
        factors=(1.0, math.nan),
        rest=(0.0, 0.5),
        received=(True, True),
    )
    made.take_reductions(
        [Reduction(step=3, ranks=np.arange(2), tensor_count=8, agreed=False, applied=known)]
    )
    found = finding_of(made, 1e-6, 1e-2)
    assert found.ranks == (1,)
    assert "nothing shows which one is wrong" not in found.cause


@pytest.mark.parametrize(
    ("distance", "relative", "factor", "who"),
    [
        (0.1, 1.0, 0.0, 1),
        (0.1, math.inf, math.nan, 0),
        (0.1, 0.5, math.nan, None),
        # What is not finite on one of them is no zero of the other.
        (math.inf, math.inf, math.nan, None),
        (math.nan, math.nan, math.nan, None),
    ],
)
def test_of_two_ranks_the_one_without_a_gradient_is_wrong(distance, relative, factor, who):
    made = two_ranks(0)
    held = [replace(tensor("w0", ranks=(1,)), distance=distance, relative=relative, factor=factor)]
    made.take([compared(1, held)])
    text = said(made)
    assert made.ranks == ((0, 1) if who is None else (who,))
    assert ("the gradient of w0 was zero on rank" in text) == (who is not None)


@pytest.mark.parametrize(
    ("factors", "times"),
    [
        # Clipped, and a bucket of rank 0 divided by three ranks beside.
        ((math.nan, 0.8), 2 / 3),
        # The sum, and its mean; a mean that was divided twice.
        ((2.0, 1.0), 2.0),
        ((0.5, 1.0), 0.5),
        ((0.8, 0.8), None),
        # One of them clipped, and nothing tells whether the other one forgot to.
        ((0.8, 1.0), None),
    ],
)
def test_of_two_ranks_the_one_that_did_nothing_else_to_the_mean_is_right(factors, times):
    made = two_ranks(8)
    seen_from_rank_0 = 1.0 / times if times else math.nan
    made.tensors = (replace(tensor("w0", ranks=(1,)), factor=seen_from_rank_0),)
    known = Applied(tensors=8, averaged=(8, 8), own=(0, 0), factors=factors)
    made.take_reductions(
        [Reduction(step=3, ranks=np.arange(2), tensor_count=8, agreed=False, applied=known)]
    )
    found = finding_of(made, 1e-6, 1e-2)
    assert found.ranks == ((0,) if times else (0, 1))
    assert ("nothing shows which one is wrong" in found.cause) == (times is None)
    if times:
        assert found.evidence["tensor_details"][0]["ranks"] == [0]
        assert f"was {number(times)} times that of the other ranks" in found.cause


@pytest.mark.parametrize(
    ("averaged", "who"),
    [((8, 8, 8, 0), (3,)), ((8, 0, 0, 0), (1, 2, 3)), ((8, 8, 8, 8), (3,)), ((0,) * 4, (3,))],
)
def test_the_few_that_applied_the_mean_are_right(averaged, who):
    """What one rank passes on to others, these agree in: a ring hands on what is stale in it."""
    right = averaged.count(8) in (1, 3) and averaged.index(0)
    made = incident(decided=True, ranks=(3,) if right != 1 else (0,))
    if right == 1:
        made.groups = ((1, 2, 3), (0,))
    known = applied(averaged, (0,) * 4, rest=(0.5,) * 4, received=(True,) * 4)
    made.take_reductions(
        [Reduction(step=30, ranks=np.arange(4), tensor_count=8, agreed=False, applied=known)]
    )
    assert made.ranks == who


def test_ranks_whose_gradients_are_exchanged_do_not_train_alone():
    known = applied((0,) * 4, (0,) * 4, rest=(0.8,) * 4, received=(True,) * 4)
    window = SimpleNamespace(
        config={"data_parallel": None},
        series={},
        digests={},
        reductions=[
            Reduction(step=3, ranks=np.arange(4), tensor_count=8, agreed=False, applied=known)
        ],
    )
    exchange = Exchange()
    exchange.observe(window, rank_local=False)
    assert exchange.shared


def test_exchanged_tensors_are_named_with_what_they_hold():
    pair = (
        tensor("norm1.weight", partner="norm2.weight"),
        tensor("norm2.weight", partner="norm1.weight"),
    )
    text = said(incident(tensors=pair))
    assert "norm1.weight (that of norm2.weight)" in text
    assert "in another order" in text
    assert "from any one rank" in text


def test_a_zero_is_called_one():
    text = said(incident(tensors=(tensor("inner.weight", factor=0.0),)))
    assert "the gradient of inner.weight was zero on rank 3 after the reduction" in text
    # One of several that is not leaves it open.
    both = (tensor("inner.weight", factor=0.0), tensor("head.weight"))
    assert "was zero" not in said(incident(tensors=both))


@pytest.mark.parametrize(
    ("factor", "who"),
    [(0.0425, "it alone clipped, or to a smaller norm"), (4.0, "it clipped less")],
)
def test_who_clipped_is_reported_by_the_factor(factor, who):
    tensors = tuple(tensor(f"w{i}", factor=factor) for i in range(8))
    text = said(incident("clipped_gradient", tensors=tensors))
    assert "gradient after clipping differs" in text
    assert who in text
    assert "Clip on all ranks or on none" in text


def test_what_happened_once_is_no_state():
    once = said(incident(tensors=(tensor(),), broken={"reduced_gradient": 1}))
    assert "at step 25, once" in once
    assert "since step 25" not in once
    assert "since step 25" in said(incident(tensors=(tensor(),)))


def test_nobody_is_sent_to_a_checkpoint_before_the_first_step():
    text = said(incident(step=0, tensors=(tensor(),), last_equal=None))
    assert "or start again." in text
    assert "before step 0" not in text
    assert "checkpoint from before step 25" in said(incident(tensors=(tensor(),)))


def test_a_single_tensor_that_differs_at_the_start_was_written():
    text = said(incident("start", step=0, tensors=(tensor("narrow.weight"),), last_equal=None))
    assert "something wrote them in place" in text
    assert "seeds" not in text
    everything = tuple(tensor(f"w{i}") for i in range(8))
    loaded = said(
        incident(
            "start",
            step=30,
            tensors=everything,
            ranks=(0,),
            broken={"start": 1, "optimizer_state": 9},
        )
    )
    assert "it is usually the one that did load" in loaded
    assert "The optimizer's state differs, too." in loaded


def test_gradients_reduced_inside_groups_are_called_so_in_the_title():
    everything = tuple(tensor(f"w{i}", ranks=(2, 3)) for i in range(8))
    made = incident(decided=False, tensors=everything)
    made.groups = ((0, 1), (2, 3))
    found = finding_of(made, 1e-6, 1e-2)
    assert found.title == (
        "Ranks 0-3 have different gradients since step 25, equal only inside (0 and 1) and "
        "(2 and 3) (all 8 tensors)"
    )
    # What each of the groups has is wrong: nobody has to be found out.
    assert "which ones are wrong" not in found.cause


@pytest.mark.parametrize(
    ("factor", "says"),
    [
        (4.0, "it is the sum over the 4 ranks, not divided by their number"),
        (0.25, "it was divided by the number of ranks twice"),
        (-1.0, "its sign was turned"),
        (
            3.0,
            "3 times that of the other ranks: after the reduction it was divided by another number",
        ),
    ],
)
def test_a_gradient_that_is_a_multiple_of_the_others_is_said_to_be_one(factor, says):
    everything = tuple(tensor(f"w{i}", factor=factor * (1 + 1e-6 * i)) for i in range(8))
    text = said(incident(tensors=everything))
    assert says in text
    assert "all-reduce was skipped" not in text


def test_factors_that_are_not_one_say_nothing_of_a_divisor():
    several = tuple(tensor(f"w{i}", factor=2.0 + i) for i in range(8))
    assert "all-reduce was skipped" in said(incident(tensors=several))
    unknown = tuple(tensor(f"w{i}") for i in range(8))
    assert "all-reduce was skipped" in said(incident(tensors=unknown))


def test_ranks_that_share_a_model_do_not_train_alone():
    shared = (tensor("norm.weight", ranks=(0, 1)),)
    made = incident(step=0, decided=False, tensors=shared, ranks=(0, 1), parts=True)
    made.groups, made.last_step = ((0,), (1,)), 200
    text = said(made)
    assert "not wrapped" not in text
    assert "Each has a part of their gradient, which was not summed" in text
    made.own_batches = True
    assert "read different batches" in said(made)
    assert "not summed" not in said(made)


def compared(step, tensors, stage="reduced_gradient", ranks=2):
    each = np.arange(ranks)
    return Comparison(
        step, stage, each, each, 0.1 * each, 0.1 * each, False, tuple(tensors), tensor_count=8
    )


def two_ranks(held, *later, broken=9):
    made = incident(
        step=0, decided=False, ranks=(0, 1), last_equal=None, broken={"reduced_gradient": broken}
    )
    made.groups, made.tensor_count = ((0,), (1,)), 0
    for step, count in enumerate((held, *later)):
        made.take([compared(step, [tensor(f"w{i}", ranks=(1,)) for i in range(count)])])
    return made


def test_gradients_of_zero_do_not_hide_that_nothing_is_reduced():
    """Behind a weight that begins at zero all gradients are zero, on every rank."""
    made = two_ranks(4)
    assert "these were left out of the all-reduce" in said(made)
    made = two_ranks(4, 8, 8, broken=10)
    made.compared = dict(made.broken)
    assert made.tensor_step == 1
    text = said(made)
    assert "no all-reduce took place" in text
    assert "went around the wrapper" in text
    assert "replaced or added after wrapping" not in text


def test_a_step_at_which_two_ranks_agreed_is_no_missing_wrapper():
    made = two_ranks(8, 8)
    made.compared["reduced_gradient"] = made.broken["reduced_gradient"] + 1
    assert "no all-reduce took place" not in said(made)


def test_what_more_ranks_show_to_be_right_is_not_named_anew():
    made = incident(tensors=(tensor("w0"),))
    made.take([compared(30, [tensor(f"w{i}") for i in range(8)], ranks=4)])
    assert [t.name for t in made.tensors] == ["w0"]


@pytest.mark.parametrize(
    ("at_start", "says", "not_said"),
    [
        (True, "from what each rank computes for itself", "ReduceLROnPlateau"),
        (False, "ReduceLROnPlateau", "from what each rank computes for itself"),
    ],
)
def test_learning_rates_that_differ_from_the_first_step_are_no_scheduler_s(
    at_start, says, not_said
):
    text = said(
        incident(
            "hyperparameters",
            decided=False,
            ranks=(0, 1),
            setting="learning rate",
            values={0: 0.01, 1: 0.03},
            at_start=at_start,
        )
    )
    assert says in text
    assert not_said not in text


def test_tensors_of_another_optimizer_are_no_skipped_step_of_this_one():
    named = (tensor("head.weight"), tensor("head.bias"))
    made = incident("parameters", tensors=named)
    assert "skipped the step" in said(made)
    window = SimpleNamespace(
        reductions=(), config={"optimizer_tensors": {"missing": ["head.weight", "head.bias", "x"]}}
    )
    made.learn(window)
    assert "another optimizer has stepped on some ranks only" in said(made)
    made.tensors = (*named, tensor("body.weight"))
    assert "another optimizer" not in said(made)
