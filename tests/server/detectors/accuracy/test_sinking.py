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


@pytest.mark.parametrize(
    ("name", "scores", "more"),
    [
        ("val_loss_ratio", SINKS, {}),
        ("eval/kl", SINKS, {}),
        ("val_auc", SINKS[::-1].copy(), {}),
        # Over-trained: it rises before it falls, and loses little.
        ("val_acc", 0.5 + 0.3 * np.exp(-(((EACH - 60) / 120) ** 2)), {}),
        ("val_acc", 0.9 - 0.1 * EACH / STEPS, {}),
        # Precision for recall.
        ("val_precision", SINKS, {"val_recall": SINKS[::-1].copy()}),
        ("val_auc", 0.5 + 0.05 * np.sin(EACH * EACH), {}),
        # Of single batches, and of two evaluations in all.
        ("train_acc", SINKS, {"every": 2}),
        ("val_auc", SINKS, {"every": 200}),
    ],
)
def test_what_only_seems_to_get_worse(name, scores, more):
    found = alerts(name, scores, **more)
    assert not [alert for alert in found if "worse and worse" in alert.title]
