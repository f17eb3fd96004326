"""What the tags of other tools mean."""

import numpy as np
import pytest

from rankscope.agent.wire import Column
from rankscope.server.exchange.tags import meant, names


@pytest.mark.parametrize(
    ("tags", "name"),
    [
        (
            "loss Loss train/loss Loss/train train_loss train_loss_step epoch_loss batch_loss "
            "training/total_loss Loss/Training trainLoss avg_loss",
            "loss",
        ),
        (
            "val_loss Loss/val validation/epoch_loss eval/loss test_loss loss/validation "
            "validation/evaluation_loss_vs_iterations eval_loss valLoss",
            "eval/loss",
        ),
        ("lr LR learning_rate train/learning_rate lr-Adam lr-SGD/pg1 LearningRate", "lr"),
        ("accuracy train_acc Accuracy/train epoch_sparse_categorical_accuracy acc1", "accuracy"),
        ("val_acc eval/accuracy Accuracy/test validation/epoch_accuracy", "eval/accuracy"),
        ("train/grad_norm gradient_norm grad_2.0_norm_total", "grad_norm_preclip"),
        ("grad_norm", "grad_norm"),
    ],
)
def test_known_tags(tags, name):
    assert {tag: meant(tag) for tag in tags.split()} == dict.fromkeys(tags.split(), name)


@pytest.mark.parametrize(
    "tag",
    "train/ce_loss loss_scale aux_loss train_runtime val/learning_rate grad_norm/a.weight steps "
    "kl d_loss weights lr_mult".split(),
)
def test_what_is_something_else_keeps_its_name(tag):
    assert meant(tag) is None


def ranks(**points):
    def column(steps):
        return Column(np.array(list(steps)), np.zeros(len(steps)))

    return {0: {tag.replace("__", "/"): column(steps) for tag, steps in points.items()}}


def test_of_several_tags_of_one_metric_the_one_with_most_points_is_it():
    found = names(ranks(train_loss_epoch=range(3), train_loss_step=range(300), loss_scale=range(3)))
    assert found == {
        "train_loss_epoch": "train_loss_epoch",
        "train_loss_step": "loss",
        "loss_scale": "loss_scale",
    }


@pytest.mark.parametrize(("loss", "chosen"), [("epoch", 0), ("batch", 1)])
def test_evaluations_are_counted_as_the_loss_is(loss, chosen):
    steps = range(5) if loss == "epoch" else range(500)
    evaluations = ("validation/epoch_loss", "validation/evaluation_loss_vs_iterations")
    found = names(
        ranks(
            **{f"train__{loss}_loss": steps},
            validation__epoch_loss=range(5),
            validation__evaluation_loss_vs_iterations=range(99, 500, 100),
        )
    )
    assert found[evaluations[chosen]] == "eval/loss"
    assert found[evaluations[1 - chosen]] == evaluations[1 - chosen]


def test_a_name_of_ours_is_never_given_to_another_tag():
    found = names(ranks(loss=range(3), train_loss=range(300)))
    assert found == {"loss": "loss", "train_loss": "train_loss"}


def test_long_tags_stay_different():
    one, other = "x" * 300 + "a", "x" * 300 + "b"
    found = names(ranks(**{one: range(2), other: range(2)}))
    assert len(set(found.values())) == 2
    assert max(map(len, found.values())) <= 250
