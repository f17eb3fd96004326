"""Scores of some evaluations that get worse and worse, and such as only seem to."""

import numpy as np
import pytest

from rankscope.server.detectors.accuracy.stalled import AccuracyStalled
from tests.support.judging import judge
from tests.support.runs.traces import Trace

STEPS = 400
EACH = np.arange(STEPS)


def alerts(name, scores, *, every=20, cuts=(), **others):
    loss = 2 * np.exp(-EACH / 80)
    series = {"loss": loss, name: scores, **others}
    series = {key: np.tile(values, (2, 1)) for key, values in series.items()}
    there = np.tile(EACH % every == 5 % every, (2, 1))
    trace = Trace("scores", 0, EACH, series, dict.fromkeys(series.keys() - {"loss"}, there))
    return judge(trace, [AccuracyStalled()], cuts).alerts


SINKS = 0.05 + 0.35 * np.exp(-EACH / 60)


@pytest.mark.parametrize("cuts", [(), range(0, STEPS, 7)], ids=["one", "many"])
@pytest.mark.parametrize("name", ["val_auc", "eval/ndcg"])
def test_one_that_gets_worse_at_each_evaluation(name, cuts):
    (alert,) = alerts(name, SINKS, cuts=cuts)
    assert (alert.kind, alert.severity, alert.state) == ("accuracy.stalled", "warning", "open")
    assert alert.first_step == 5
    assert alert.seen_step <= 5 + 9 * 20
    assert f"`{name}` gets worse and worse: from 0.37" in alert.title


def test_one_that_gets_a_little_worse_each_time():
    found = [alert.title for alert in alerts("val_ndcg", 0.5 + 0.04 * np.exp(-EACH / 60))]
    assert "`val_ndcg` gets worse and worse: from 0.537 to 0.5" in found


def test_one_that_does_not_move_while_the_loss_falls():
    scores = 0.15 + 0.01 * EACH / STEPS
    (alert,) = alerts("val_accuracy", scores)
    assert (alert.kind, alert.severity) == ("accuracy.stalled", "warning")
    assert (alert.first_step, alert.seen_step) == (5, 185)
    assert "`val_accuracy` stays near 0.16" in alert.title
    # It moves in the end, is one of a step each, of rewards, of rare classes, or high enough.
    late = np.where(EACH < 150, scores, 0.15 + (EACH - 150) / 500)
    for name, values, every in [
        ("val_accuracy", late, 20),
        ("train_accuracy", scores, 2),
        ("eval_reward", scores, 20),
        ("val_recall", 0.02 + 0.02 * EACH / STEPS, 20),
        ("val_accuracy", 0.6 + 0.01 * EACH / STEPS, 20),
    ]:
        found = alerts(name, values, every=every)
        assert not [alert for alert in found if "while the loss falls" in alert.title], name


@pytest.mark.parametrize("scores", [SINKS, 0.1 + 0.005 * np.sin(EACH / 9)], ids=["sinks", "stands"])
def test_it_goes_on_however_many_evaluations_there_are(scores):
    many = np.interp(np.arange(4000), np.linspace(0, 3999, STEPS), scores)
    loss = 2 * np.exp(-np.arange(4000) / 80)
    series = {"loss": np.tile(loss, (2, 1)), "val_acc": np.tile(many, (2, 1))}
    there = np.tile(np.arange(4000) % 20 == 5, (2, 1))
    trace = Trace("scores", 0, np.arange(4000), series, {"val_acc": there})
    found = [a for a in judge(trace, [AccuracyStalled()]).alerts if "fallen" not in a.title]
    assert [alert.state for alert in found] == ["open"]


def test_one_that_was_trained_before_may_forget():
    trace = Trace(
        "resumed",
        0,
        20_000 + EACH,
        {"loss": np.full((2, STEPS), 1.0), "val_acc": np.tile(SINKS, (2, 1))},
        {"val_acc": np.tile(EACH % 20 == 5, (2, 1))},
    )
    assert not judge(trace, [AccuracyStalled()]).alerts


@pytest.mark.parametrize(
    ("name", "scores", "more"),
    [
        ("val_loss_ratio", SINKS, {}),
        ("eval/kl", SINKS, {}),
        ("val_auc", SINKS[::-1].copy(), {}),
        # Over-trained: it rises before it falls, and loses little.
        ("val_acc", 0.5 + 0.3 * np.exp(-(((EACH - 60) / 120) ** 2)), {}),
        ("val_acc", 0.9 - 0.03 * EACH / STEPS, {}),
        # Precision for recall, in both ways.
        (
            "val_precision",
            np.full(STEPS, 0.2) + 0.01 * np.sin(EACH),
            {"val_recall": SINKS[::-1].copy()},
        ),
        ("val_precision", SINKS, {"val_recall": SINKS[::-1].copy()}),
        ("val_auc", 0.5 + 0.05 * np.sin(EACH * EACH), {}),
        # Of single batches, and of two evaluations in all.
        ("train_acc", SINKS, {"every": 2}),
        ("val_auc", SINKS, {"every": 200}),
    ],
)
def test_what_only_seems_to_get_worse(name, scores, more):
    found = alerts(name, scores, **more)
    said = ("worse and worse", "while the loss falls")
    assert not [alert for alert in found if any(words in alert.title for words in said)]
