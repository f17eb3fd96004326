"""Which of two alerts follows from the other: one pair for each line of the table, and its like."""

import pytest

from tests.support.incidents import alert, forever, linked

CASES = {
    # root, consequence, whether they are linked
    "gradients that are zero from the start, and units that are silent": (
        forever("gradient.vanishing", 0, severity="critical", evidence={"observed": 160}),
        alert("layer.dead", 5, key="units:dead"),
        True,
    ),
    "units that died, and the gradients that became small": (
        forever("layer.dead", 20, key="units:dead"),
        alert("gradient.vanishing", 60, evidence={"ratio": 1e-3}),
        True,
    ),
    "a rate of next to nothing, and tensors that it cannot move": (
        alert("lr.too_low", 0, last_step=300, evidence={"below_rounding": True}),
        alert("update.missing", 0, evidence={"few": True}),
        True,
    ),
    "a batch that comes again and again, and a rank's loss much later": (
        alert("data.unshuffled", 40, key="stuck", last_step=900),
        alert("rank.loss_outlier", 400, ranks=(0,)),
        False,
    ),
    "a batch that comes again and again, and what each rank makes of its own": (
        alert("data.unshuffled", 40, key="stuck", last_step=900),
        alert("rank.loss_outlier", 45, ranks=(0,)),
        True,
    ),
    "one class after the other, and the loss that rises with it": (
        alert("data.unmixed", 5, last_step=300),
        alert("loss.diverging", 0, severity="critical"),
        True,
    ),
    "gradients that are zero, and the weight decay that goes on": (
        forever("gradient.vanishing", 0, severity="critical", evidence={"observed": 160}),
        alert("update.drift", 2, key="shrunk"),
        True,
    ),
    "a loss that stays, and units that died of which enough are left": (
        forever("loss.plateau", 0),
        forever("layer.dead", 46, key="units:dead", evidence={"enough_left": True}),
        True,
    ),
    "answers at rest whose gradient is gone, and steps that are small": (
        forever("loss.plateau", 0, evidence={"grad_norm_first": 0.04}),
        alert("lr.too_low", 0),
        True,
    ),
    "steps that are small, and a loss that stays": (
        forever("lr.too_low", 0),
        alert("loss.plateau", 0, evidence={"grad_norm": 0.04}),
        True,
    ),
    "a loss that is not finite, and activations that are all alike": (
        forever("loss.nonfinite", 58, severity="critical"),
        alert("data.replayed", 60, ranks=(1, 2)),
        True,
    ),
    "dead units, and the loss that rose with them": (
        alert("layer.dead", 200, stage="local_gradient"),
        alert("loss.diverging", 200),
        True,
    ),
    "units that died of a divergence": (
        forever("loss.diverging", 180),
        alert("layer.dead", 200),
        True,
    ),
    "a worker that no longer pulls, and its loss that no longer falls": (
        forever("push.stale", 101, severity="critical", ranks=(3,)),
        alert("rank.loss_outlier", 120, ranks=(3,)),
        True,
    ),
    "a worker that no longer pulls, and another one's loss": (
        forever("push.stale", 101, severity="critical", ranks=(3,)),
        alert("rank.loss_outlier", 120, ranks=(2,)),
        False,
    ),
    "gradients of old weights, and the loss that rose": (
        forever("push.stale", 101, severity="critical", ranks=(3,)),
        alert("loss.diverging", 140),
        True,
    ),
    "labels that changed on a rank, and gradients against each other, dated to the start": (
        forever("rank.loss_outlier", 100, severity="critical", ranks=(0, 1)),
        forever("rank.gradient_outlier", 0, key="opposed", seen_step=180, ranks=(0, 1)),
        True,
    ),
    "labels that changed on a rank, and a gradient that is larger since long before": (
        forever("rank.loss_outlier", 100, severity="critical", ranks=(0, 1)),
        forever("rank.gradient_outlier", 0, key="", seen_step=20, ranks=(0, 1)),
        False,
    ),
    "weights that come back from a checkpoint, and the loss that they had": (
        forever("update.reverted", 81, ranks=(0, 1)),
        alert("loss.diverging", 80),
        True,
    ),
    "a model left in evaluation mode, and statistics that come to rest": (
        forever("mode.evaluation", 100, ranks=(0, 1)),
        forever("desync.buffers", 100, key="rest", ranks=(0, 1)),
        True,
    ),
    "a model left in evaluation mode, and statistics that differed long before": (
        forever("mode.evaluation", 100, ranks=(0, 1)),
        forever("desync.buffers", 1, ranks=(0, 1)),
        False,
    ),
    "batches in one order, and losses that recur with it": (
        forever("data.unshuffled", 20, evidence={"distance": 20}),
        alert("loss.oscillating", 3, seen_step=63, evidence={"period": 20}),
        True,
    ),
    "batches in one order, and losses that recur with another period": (
        forever("data.unshuffled", 20, evidence={"distance": 20}),
        alert("loss.oscillating", 3, seen_step=63, evidence={"period": 7}),
        False,
    ),
    "a gradient that fades, and nothing learned": (
        alert("gradient.vanishing", 0, stage="local_gradient"),
        alert("loss.plateau", 0),
        True,
    ),
    "a step left out, and the loss scale that it changed": (
        forever("desync.progress", 50, stage="parameters", ranks=(2,)),
        forever("desync.hyperparameters", 50, stage="hyperparameters", ranks=(2,)),
        True,
    ),
    "clipped to nothing, while momentum goes on": (
        forever("clipping.saturated", 50),
        alert("loss.diverging", 57),
        True,
    ),
    "a limit that clips nearly always": (
        forever("clipping.saturated", 50, severity="info"),
        alert("loss.diverging", 57),
        False,
    ),
    "tensors that no optimizer holds, and gradients that add up for it": (
        forever("update.missing", 0, key="held"),
        alert("gradient.accumulating", 1, severity="critical"),
        True,
    ),
    "a rank that does not move, and gradients that add up": (
        forever("update.missing", 0),
        alert("gradient.accumulating", 1, severity="critical"),
        False,
    ),
    "parameters that fade away, and steps that are large for what is left": (
        forever("update.drift", 40, key="faded"),
        forever("update.ratio", 40, severity="critical"),
        True,
    ),
    "parameters that grow, and steps that are too large": (
        forever("update.drift", 40),
        forever("update.ratio", 80, severity="critical"),
        False,
    ),
    "a learning rate that goes to and fro, and the loss with it": (
        forever("schedule.mismatch", 0, key="alternates"),
        forever("loss.spike", 60, severity="critical"),
        True,
    ),
    "a schedule that has ended, and a spike": (
        forever("schedule.mismatch", 0),
        forever("loss.spike", 60, severity="critical"),
        False,
    ),
    "desync, then a spike": (forever("desync.parameters", 50), alert("loss.spike", 50), True),
    "a spike, then desync": (forever("desync.parameters", 50), alert("loss.spike", 49), False),
    "desync and the loss of the same rank": (
        forever("desync.parameters", 50, ranks=(2,)),
        alert("rank.loss_outlier", 300, ranks=(2,)),
        True,
    ),
    "desync and the loss of another rank": (
        forever("desync.parameters", 50, ranks=(2,)),
        alert("rank.loss_outlier", 300, ranks=(1,)),
        False,
    ),
    "desync that is over": (
        alert("desync.parameters", 50, last_step=60, clear_after=10, state="resolved"),
        alert("loss.diverging", 71),
        False,
    ),
    "desync that is not over": (
        alert("desync.parameters", 50, last_step=60, clear_after=10),
        alert("loss.diverging", 70),
        True,
    ),
    "odd labels, and the gradient of the same rank": (
        alert("rank.loss_outlier", 100, ranks=(2,)),
        alert("rank.gradient_outlier", 90, ranks=(2,)),
        True,
    ),
    "odd labels, and the gradient of another rank": (
        alert("rank.loss_outlier", 100, ranks=(2,)),
        alert("rank.gradient_outlier", 110, ranks=(1,)),
        False,
    ),
    "a slow loader, and those who wait for it": (
        forever("rank.starved", 40, ranks=(0,)),
        alert("rank.straggler", 48, ranks=(1,)),
        True,
    ),
    "a loss that rose again to where it began": (
        alert("loss.diverging", 300),
        alert("loss.plateau", 0, seen_step=400),
        True,
    ),
    "nothing learned, seen before the loss rose": (
        alert("loss.diverging", 300),
        alert("loss.plateau", 0, seen_step=199),
        False,
    ),
    "gradients that add up until the loss is where it began": (
        forever("gradient.accumulating", 48),
        alert("loss.plateau", 0, seen_step=199),
        True,
    ),
    "a loss that rose between two samples of what made it rise": (
        forever("desync.parameters", 64, ranks=(1,), evidence={"agreed_until": 32}),
        alert("rank.loss_outlier", 50, seen_step=79, ranks=(1,)),
        True,
    ),
    "a loss that rose before the last sample that found nothing": (
        forever("desync.parameters", 64, ranks=(1,), evidence={"agreed_until": 55}),
        alert("rank.loss_outlier", 50, seen_step=79, ranks=(1,)),
        False,
    ),
    "a jump while the loss is away from what it had reached": (
        alert("loss.diverging", 80, last_step=509, clear_after=90),
        alert("loss.spike", 346),
        True,
    ),
    "a jump after it has come back": (
        alert("loss.diverging", 80, last_step=200, clear_after=90),
        alert("loss.spike", 346),
        False,
    ),
    "ranks that merely drift apart": (
        forever("desync.parameters", 0, severity="info"),
        alert("loss.spike", 50),
        False,
    ),
    "desync before NaN": (
        forever("desync.gradients", 50, stage="reduced_gradient", ranks=(1,)),
        alert("loss.nonfinite", 51, ranks=(0,)),
        True,
    ),
    "parameters written over before the forward pass that gives NaN": (
        forever("desync.parameters", 50, stage="outside_optimizer"),
        alert("loss.nonfinite", 50),
        True,
    ),
    "NaN, and gradients that differ for it": (
        alert("loss.nonfinite", 50, clear_after=50),
        forever("desync.gradients", 50, stage="reduced_gradient"),
        True,
    ),
    "NaN after a rise": (alert("loss.nonfinite", 50), alert("loss.spike", 30), True),
    "NaN long after a spike": (alert("loss.nonfinite", 150), alert("loss.spike", 10), False),
    "a spike, and NaN because of it": (alert("loss.spike", 10), alert("loss.nonfinite", 60), True),
    "NaN while the loss diverges": (
        alert("loss.diverging", 10, last_step=400, clear_after=90),
        alert("loss.nonfinite", 480),
        True,
    ),
    "NaN and one rank's loss": (
        alert("loss.nonfinite", 50, ranks=(0,), clear_after=50),
        alert("rank.loss_outlier", 60, ranks=(1,)),
        True,
    ),
    "a loss that is no number, and the scale that falls for it": (
        alert("loss.nonfinite", 50, clear_after=50),
        alert("amp.scale_collapse", 52),
        True,
    ),
    "a scale that falls before the loss is no number": (
        alert("loss.nonfinite", 80, clear_after=50),
        alert("amp.scale_collapse", 20),
        False,
    ),
    "one rank's labels move the mean": (
        alert("rank.loss_outlier", 50, ranks=(2,)),
        alert("loss.spike", 30),
        True,
    ),
    "one rank's labels, and a swing while they last": (
        alert("rank.loss_outlier", 50, ranks=(2,), last_step=400, clear_after=150),
        alert("loss.oscillating", 550),
        True,
    ),
    "one rank's labels, and a spike after them": (
        alert("rank.loss_outlier", 50, ranks=(2,), last_step=400, clear_after=150),
        alert("loss.spike", 551),
        False,
    ),
    "one rank's labels, and a spike of another": (
        alert("rank.loss_outlier", 50, ranks=(2,), last_step=400, clear_after=150),
        alert("loss.spike", 55, ranks=(3,)),
        False,
    ),
    "diverging found after it swung": (
        alert("loss.diverging", 60),
        alert("loss.oscillating", 45),
        True,
    ),
    "swinging first, diverging later": (
        alert("loss.oscillating", 60),
        alert("loss.diverging", 130),
        True,
    ),
    "sorted data, in the same order in each epoch": (
        alert("data.unmixed", 0, last_step=300),
        alert("data.unshuffled", 62),
        True,
    ),
    "sorted data, whose order is known while they are": (
        alert("data.unshuffled", 16),
        alert("data.unmixed", 4, last_step=200, seen_step=35),
        True,
    ),
    "a dropout of 0.95, and nothing that is learned": (
        forever("mode.settings", 0),
        alert("loss.plateau", 0),
        True,
    ),
    "statistics that stay as they were made, and a desync": (
        forever("mode.settings", 0),
        alert("desync.parameters", 40),
        False,
    ),
    "gradients on one line, and the steps that a rate would be blamed for": (
        alert("gradient.oscillating", 1, key="line", last_step=300),
        alert("lr.too_high", 60),
        True,
    ),
    "units that were dead for a while, and a loss that never falls": (
        alert("layer.dead", 200, last_step=240, clear_after=8, state="resolved"),
        alert("loss.plateau", 0, seen_step=220, last_step=1000),
        False,
    ),
    "a jump that is over, and units that stay dead": (
        alert("loss.spike", 200, last_step=210, clear_after=16, state="resolved"),
        alert("layer.dead", 205, last_step=1000),
        False,
    ),
    "the same while nobody can say yet whether they stay": (
        alert("loss.spike", 200, last_step=210, clear_after=16, state="resolved"),
        alert("layer.dead", 205, last_step=300),
        True,
    ),
    "a swing of half a run, and a plateau a little longer": (
        alert("loss.oscillating", 200, last_step=600, clear_after=60, state="resolved"),
        alert("loss.plateau", 220, seen_step=400, last_step=980),
        False,
    ),
    "what is not finite, and units that stay dead": (
        alert("loss.nonfinite", 200, last_step=210, clear_after=16, state="resolved"),
        alert("layer.dead", 205, last_step=1000),
        True,
    ),
    "a weight decay, and the swing of what it leaves": (
        forever("update.drift", 30, key="held"),
        alert("loss.oscillating", 80, last_step=143, clear_after=115),
        True,
    ),
    "a swing, and a weight decay that it does not make": (
        forever("loss.oscillating", 80),
        alert("update.drift", 150, key="faded"),
        False,
    ),
    "steps that are too large, and parameters that grow with them": (
        forever("lr.too_high", 80),
        alert("update.drift", 90, key="grown"),
        True,
    ),
    "broken batches that recur, and the mean that rose with them": (
        forever("loss.oscillating", 147, evidence={"period": 20, "recurs": True}),
        forever("loss.diverging", 70, seen_step=130),
        True,
    ),
    "inputs of another size, and the loss that rose with them": (
        forever("data.outlier", 160, key="inputs:all"),
        forever("loss.diverging", 160, severity="critical"),
        True,
    ),
    "labels that changed, and an accuracy that stays where the loss has settled": (
        forever("loss.diverging", 100),
        alert("accuracy.stalled", 100, seen_step=299),
        True,
    ),
    "two episodes": (alert("loss.oscillating", 60), alert("loss.diverging", 161), False),
    "two spikes": (alert("loss.spike", 60), alert("loss.spike", 110), True),
    "two spikes far from each other": (alert("loss.spike", 60), alert("loss.spike", 111), False),
}


@pytest.mark.parametrize(("root", "consequence", "follows"), CASES.values(), ids=CASES)
def test_pairs(root, consequence, follows):
    for order in ((root, consequence), (consequence, root)):
        found = linked(order)
        assert (found[consequence.id].parent == root.id) is follows
        assert found[root.id].consequences == ((consequence.id,) if follows else ())
        assert found[root.id].parent is None
