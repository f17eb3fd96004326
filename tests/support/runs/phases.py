"""Runs whose data, targets or learning rate have a course of their own beside the loss."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from rankscope.server.window import Occurrence
from tests.support.runs.layered import layered
from tests.support.runs.traces import Trace


def learned_sooner(seed: int, *, within: float = 10.0, share: float = 0.45) -> Trace:
    """Three ranks, the loss of one of which comes to lie lower than the others'.

    Args:
        within: in how many steps it does, about step 60.
        share: of the others' losses that its own comes to.
    """
    random = np.random.default_rng(seed)
    each = np.arange(160)
    course = 0.25 + 1.1 / (1 + np.exp((each - 45) / 6))
    loss = course * np.exp(0.15 * random.standard_normal((3, len(each))))
    loss[2] *= share ** (1 / (1 + np.exp(np.clip((60 - each) / within, -50, 50))))
    return Trace("learned sooner", seed, each, {"loss": loss})


def unlike_targets(
    seed: int,
    *,
    times: float = 50.0,
    falls: float = 0.0,
    scale: float = 0.002,
    inputs: float = 1.0,
    steps: int = 400,
) -> Trace:
    """A regression whose outputs begin far from its targets.

    Args:
        times: loss over that of the mean of all targets, in the end.
        falls: the same, lost from the first step to the last.
        scale: size of the outputs over that of the targets, in the first steps.
        inputs: their root mean square.
    """
    random = np.random.default_rng(seed)
    each = np.arange(steps)
    course = times + falls * (1 - each / steps)
    loss = course * np.exp(0.05 * random.standard_normal((2, steps)))
    series = {
        "loss": loss,
        "explained_deviance": 1 - loss,
        "output_scale": np.full(loss.shape, scale),
        "input_rms": np.full(loss.shape, inputs),
        "update_ratio": np.full(loss.shape, 2e-3),
        "lr": np.full(loss.shape, 1e-3),
    }
    return Trace("unlike targets", seed, each, series)


def phases(
    seed: int,
    *,
    at: int = 200,
    jump: float = 6.0,
    learned_in: float = 25.0,
    targets: float = 2.3,
    elements: int = 64,
    mark: bool = False,
    rate: float = 1.0,
    steps: int = 400,
) -> Trace:
    """A loss that has fallen to 0.02, and jumps as other data come.

    Args:
        jump: the loss at step `at`.
        learned_in: steps in which it falls to a third from there; 0: it stays.
        targets: deviance of a batch's targets from then on; 1.1 before.
        elements: of a sample from then on; 64 before.
        mark: the user marks the step.
        rate: factor of the learning rate from then on.
    """
    random = np.random.default_rng(seed)
    each = np.arange(steps)
    fall = np.exp(-(each - at) / learned_in) if learned_in else np.ones(steps)
    course = np.where(each < at, 1.1 * np.exp(-each / 25) + 0.02, 0.1 + jump * fall)
    shape = (2, steps)
    loss = course * np.exp(0.1 * random.standard_normal(shape))
    series = {
        "loss": loss,
        "explained_deviance": 1 - loss / 1.1,
        "target_deviance": np.where(each < at, 1.1, targets) + 0.02 * random.standard_normal(shape),
        "target_share": np.where(each < at, 1.0, targets / 1.1) * np.ones((2, 1)),
        "accuracy": np.full(shape, 0.3),
        "sample_elements": np.where(each < at, 64.0, float(elements)) * np.ones((2, 1)),
        "grad_norm": np.where(each < at, 0.2, 0.2 + 10 * fall)
        * np.exp(0.1 * random.standard_normal(shape)),
        "lr": np.where(each < at, 1e-3, rate * 1e-3) * np.ones((2, 1)),
    }
    marks = (Occurrence(0, at, "mark", "second task", {}, 0.0),) if mark else ()
    return Trace("phases", seed, each, series, events=marks)


def turns(
    seed: int,
    *,
    period: int = 3,
    high: float = 3.0,
    explained: float = 0.9,
    others: float = 0.9,
    inputs: float = 1.0,
    rate: float = 1.0,
    falls: float = 0.01,
    steps: int = 400,
) -> Trace:
    """A loss that is higher at an interval of steps.

    Args:
        high: factor of that value.
        explained: share of the deviance explained at that step; `others` at the others.
        inputs: factor of the size of the inputs there.
        rate: factor of the learning rate there.
        falls: of the logarithm of the loss, a step.
    """
    random = np.random.default_rng(seed)
    each = np.arange(steps)
    there = each % period == 0
    shape = (2, steps)
    course = (2.0 * np.exp(-falls * each) + 0.2) * np.where(there, high, 1.0)
    series = {
        "loss": course * np.exp(0.05 * random.standard_normal(shape)),
        "explained_deviance": np.where(there, explained, others)
        + 0.02 * random.standard_normal(shape),
        "input_rms": np.where(there, inputs, 1.0) * np.exp(0.02 * random.standard_normal(shape)),
        "lr": np.where(there, rate, 1.0) * np.full(shape, 1e-3),
    }
    return Trace("turns", seed, each, series)


def given_to_the_loss(
    seed: int,
    *,
    series: str = "scores_softmaxed",
    value: float = 0.0,
    since: int = 0,
    games: bool = False,
    rank: int = -1,
) -> Trace:
    """What a loss function is given, at every second step: right before step `since`.

    Args:
        rank: that alone is given it; -1 for both.
        games: another optimizer steps in turns with this one.
    """
    each = np.arange(100)
    right = 1.0 if series in ("loss_broadcast", "next_token_distance") else 0.0
    values = np.where(each < since, right, value) * np.ones((2, 1))
    if rank >= 0:
        values[1 - rank] = right
    there = np.broadcast_to(each % 2 == 0, values.shape).copy()
    turns = Occurrence(0, 0, "optimizers.turns", "turns", {"optimizers": 2}, 0.0)
    events = (turns,) if games else ()
    there_too = {series: there}
    known = {series: values, "loss": np.ones((2, 100))}
    return Trace("given to the loss", seed, each, known, there_too, events=events)


def mixed(
    seed: int,
    *,
    share: float = 1.0,
    since: int = 100,
    steps: int = 300,
    samples: float | None = None,
    rank: int = -1,
) -> Trace:
    """Scatter of a step's targets over that of all so far, from step `since` on by this factor.

    Args:
        samples: of each step, with the entropy of ten classes; None for not posted.
        rank: that has it exactly so, and alone; -1 for both.
    """
    random = np.random.default_rng(seed)
    each = np.arange(steps)
    course = np.where(each < since, 1.0, share) * np.ones((2, 1))
    shares = np.maximum(course + 0.05 * random.standard_normal((2, steps)), 0.0)
    if rank >= 0:
        shares[1 - rank] = np.maximum(1 + 0.05 * random.standard_normal(steps), 0.0)
        shares[rank, since:] = share
    series = {"target_share": shares}
    if samples is not None:
        series |= {"samples": np.full((2, steps), samples), "target_deviance": 2.3 * shares}
    return Trace("mixed", seed, each, series)


def rare_class(
    seed: int, *, rate: float = 0.02, samples: int = 16, since: int = 10_000, steps: int = 600
) -> Trace:
    """Targets of two classes, one of them rare; from step `since` on the usual one alone."""
    random = np.random.default_rng(seed)
    each = np.arange(steps)
    counts = random.binomial(samples, rate, (2, steps)) * (each < since)
    spread = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    with np.errstate(divide="ignore", invalid="ignore"):
        p = counts / samples
        alone = np.where(counts > 0, -(p * np.log(p) + (1 - p) * np.log(1 - p)), 0.0)
    # As the agent corrects it for few samples (Miller and Madow).
    alone += (counts > 0) / (2 * samples)
    series = {
        "target_share": alone / spread,
        "target_deviance": alone,
        "samples": np.full((2, steps), float(samples)),
    }
    return Trace("rare class", seed, each, series)


def one_class(
    seed: int,
    *,
    falls: float = 0.0,
    steps: int = 200,
    batches: str = "unknown",
    in_turn: bool = False,
) -> Trace:
    """Targets that are all of one class; the loss falls to this share of what it was at first.

    Args:
        batches: `unknown`, `same` all the time, or `other` ones at each step.
        in_turn: one class follows the other, each in batches of its own.
    """
    random = np.random.default_rng(seed)
    each = np.arange(steps)
    course = falls + (1 - falls) * np.exp(-each / 10.0)
    losses = course * (1 + 0.05 * random.standard_normal((2, steps)))
    series = {"target_share": np.zeros((2, steps)), "loss": losses}
    digests = 7 + each * (batches == "other") + np.zeros((2, 1), np.int64)
    if in_turn:
        series["explained_deviance"] = 1 - losses
    words = {} if batches == "unknown" else {"batch": digests.astype(np.uint64)}
    return Trace("one class", seed, each, series, words=words)


def dying(seed: int, *, update: float = 0.3, spread: float = 1.0, inputs: float = 1.0) -> Trace:
    """Units that die at step 120, after six steps that change the parameters by this much.

    Args:
        spread: scatter of the samples of a batch over their size.
        inputs: their root mean square.
    """
    trace = layered(seed, fault="dead", every=1)
    updates = np.where((trace.steps > 110) & (trace.steps < 117), update, 1e-3)
    made = {
        "update_ratio": updates,
        "input_spread": np.full(len(updates), spread),
        "input_rms": np.full(len(updates), inputs),
    }
    series = {name: np.tile(values, (trace.ranks, 1)) for name, values in made.items()}
    present = {name: mask for name, mask in trace.present.items() if name not in series}
    return replace(trace, series={**trace.series, **series}, present=present)


def silent(seed: int, *, course: str, at: int, update: float = 1e-3) -> Trace:
    """Six of ten units of a layer are dead from a step on.

    Args:
        course: of the loss: `slow` (it falls ever more slowly, to a floor far above 0), `stopped`
            (it stands still from then on), `raised` (it stands a tenth higher), `flat` (nothing is
            learned), `thrown` (far up before, and back to where it began).
        update: of the parameters, three steps before.
    """
    trace = layered(seed, fault="some-dead", at=at)
    each = trace.steps.astype(float)
    slow = 24.0 + 17.0 * np.exp(-each / 10) + 4.0 * np.exp(-each / 100)
    loss = {
        "slow": slow,
        "stopped": np.where(each < at, slow, slow[at]),
        "raised": np.where(each < at, slow, 1.1 * slow[at]),
        "flat": np.full(len(each), 2.3),
        "thrown": 2.3 + np.where(each < at - 3, 0.0, 200.0 * np.exp(-(each - at + 3) / 20)),
    }[course]
    noise = 0.02 * np.random.default_rng(seed).standard_normal((trace.ranks, len(each)))
    updates = np.where(trace.steps == at - 3, update, 1e-3)
    series = {"loss": loss * np.exp(noise), "update_ratio": np.tile(updates, (trace.ranks, 1))}
    present = {name: mask for name, mask in trace.present.items() if name not in series}
    return replace(trace, series={**trace.series, **series}, present=present)


def embeddings(
    seed: int,
    *,
    ends: float = 0.01,
    dips: float = 1.0,
    compared: int = 2,
    targets: bool = False,
    inputs: float = 0.95,
    undone: bool = False,
    power: float = 0.0,
    halves: float = 0.0,
    shrinks: float = 1.0,
    steps: int = 400,
) -> Trace:
    """Outputs that are compared with each other, whose directions have a spread of 0.6 at first.

    Args:
        ends: what the spread comes to.
        dips: factor of it about step 40.
        compared: outputs of a shape in a step.
        targets: the loss goes by targets of its own.
        inputs: scatter of the samples of a batch over their size.
        undone: the loss rises again.
        power: of the spread, by which the loss falls; 0: it goes to -1.
        halves: distance of the two halves of an output over that of any two rows; 0: not posted.
        shrinks: deviance of the targets in the end over that at first.
    """
    random = np.random.default_rng(seed)
    each = np.arange(steps)
    shape = (2, steps)
    course = ends + (0.6 - ends) * np.exp(-each / 20)
    course *= dips ** np.exp(-(((each - 40) / 30) ** 2))
    loss = -1 + np.exp(-each / 25) + (2.0 * each / steps if undone else 0.0)
    loss = loss + 0.002 * random.standard_normal(shape)
    if power:
        course = ends + (0.6 - ends) * np.exp(-each / 40)
        loss = 0.5 * np.exp(-each / 40) ** power * np.exp(0.05 * random.standard_normal(shape))
    series = {
        "loss": loss,
        "output_spread": course * np.exp(0.05 * random.standard_normal(shape)),
        "outputs_compared": np.full(shape, float(compared)),
        "input_spread": np.full(shape, inputs),
        "tensors_without_gradient": np.zeros(shape),
    }
    if targets:
        series["explained_deviance"] = np.full(shape, 0.9)
        series["target_deviance"] = 0.1 * shrinks ** (each / steps) * np.ones(shape)
    if halves:
        series["output_halves"] = halves * np.exp(0.2 * random.standard_normal(shape))
    return Trace("embeddings", seed, each, series)


def score(
    seed: int,
    *,
    name: str = "reward",
    ends: float = -0.5,
    dips: float = 0.0,
    along: float = 0.0,
    noise: float = 0.3,
    within: float = 40.0,
    other: str = "",
    lost: int = 0,
    back: float = 1.0,
    losses: tuple[str, ...] = ("loss",),
    steps: int = 400,
) -> Trace:
    """A score that a user logs, 0 at first.

    Args:
        ends: what it comes to within some 100 steps.
        within: in how many steps it comes to two thirds of that.
        dips: by how much it lies lower about step 100.
        along: autocorrelation of its noise at lag 1; 1: it walks.
        other: another score, which rises.
        lost: step from which on it loses what it had come to, within some 20; 0: none.
        back: share of that which it loses.
        losses: what is posted beside it.
    """
    random = np.random.default_rng(seed)
    each = np.arange(steps)
    shape = (1, steps)
    around = random.standard_normal(steps)
    for step in range(1, steps):
        around[step] = along * around[step - 1] + math.sqrt(1 - min(along, 0.9) ** 2) * around[step]
    course = ends * (1 - np.exp(-each / within)) - dips * np.exp(-(((each - 100) / 60) ** 2))
    if lost:
        course *= 1 - back * (1 - np.exp(-np.clip(each - lost, 0, None) / 8))
    series = {name: (course + noise * around).reshape(shape)}
    series |= {loss: 0.3 * random.standard_normal(shape) for loss in losses}
    if other:
        series[other] = each / 100 + 0.1 * random.standard_normal(shape)
    return Trace("score", seed, each, series)


def next_tokens(
    seed: int,
    *,
    seen: float = 2.0,
    unseen: float = 2.0,
    learns: int = 100,
    until: int = 300,
    steps: int = 300,
) -> Trace:
    """Cross entropies where a target is in the input and where not, after `learns` steps.

    Args:
        until: from here on both are as large.
    """
    random = np.random.default_rng(seed)
    course = np.exp(-np.arange(steps) / learns * 3)
    rows = [
        np.maximum(end + (4 - end) * course + 0.1 * random.standard_normal((2, steps)), 0.0)
        if end >= 0
        else np.full((2, steps), -1.0)
        for end in (seen, unseen)
    ]
    rows[0][:, until:] = rows[1][:, until:]
    series = dict(zip(("next_token_seen", "next_token_unseen"), rows, strict=True))
    return Trace("next tokens", seed, np.arange(steps), series)


def given_targets(
    seed: int,
    *,
    error: float | None = None,
    first: float = 0.1,
    column: int | None = None,
    other: int | None = None,
    constant: float = 3.0,
    steps: int = 120,
) -> Trace:
    """Two ranks that are given their targets, place by place or as a column of a table.

    Args:
        error: mean cross entropy that the training comes to; `first`: that at the first place.
        column: that is the target; `other`: on the second rank.
        constant: what the frequencies of the targets cost.
    """
    random = np.random.default_rng(seed)
    series = {}
    if error is not None:
        course = np.exp(-np.arange(steps) / 15)
        noise = 1 + 0.05 * random.standard_normal((2, steps))
        errors = (error + (constant - error) * course) * noise
        series = {
            "given_target_error": errors if error >= 0 else np.full((2, steps), -1.0),
            "given_target_first": (first + (constant - first) * course) * noise,
            "explained_deviance": 1 - errors / constant,
        }
    if column is not None:
        second = column if other is None else other
        series["target_column"] = np.repeat([[column], [second]], steps, axis=1).astype(float)
    return Trace("given targets", seed, np.arange(steps), series)


def thrown_back(
    seed: int, *, every: int = 50, rank: int | None = None, ranks: int = 3, steps: int = 200
) -> Trace:
    """A loss that is back at two thirds of its beginning every so often, and falls anew.

    Args:
        rank: the only one whose loss it is; parameters are written on all ranks each time.
    """
    random = np.random.default_rng(seed)
    noise = np.exp(0.08 * random.standard_normal((ranks, steps)))
    since = np.arange(steps) % every
    height = np.where(np.arange(steps) < every, 3.0, 2.0)
    calm = 0.4 + 2.6 * np.exp(-np.arange(steps) / 15)
    losses = np.tile(calm, (ranks, 1))
    losses[slice(None) if rank is None else rank] = 0.4 + (height - 0.4) * np.exp(-since / 15)
    written = np.zeros((ranks, steps), dtype=bool)
    written[:, every::every] = True
    series = {"loss": losses * noise, "parameters_written": np.ones((ranks, steps))}
    present = {"parameters_written": written}
    return Trace("thrown back", seed, np.arange(steps), series, present)


def constant_score(
    seed: int, *, name: str = "val_iou", value: float = 0.0, last: float = 0.0, steps: int = 300
) -> Trace:
    """A score that a user logs at every twentieth step, always the same but for the `last` one."""
    each = np.arange(steps)
    scores = np.full((2, steps), value)
    scores[:, steps - 20 :] = last
    series = {"loss": np.tile(2 * np.exp(-each / 80), (2, 1)), name: scores}
    return Trace("a constant score", seed, each, series, {name: np.tile(each % 20 == 5, (2, 1))})


def module_settings(
    seed: int, *, said: dict | None = None, evaluated: float = 0.0, steps: int = 60
) -> Trace:
    """Two ranks that say at their first step what their modules are; None: nothing.

    Args:
        evaluated: loss of the evaluations, at every twentieth step; 0: there are none.
    """
    events = tuple(
        Occurrence(rank, 0, "mode.changed", "", {"of": 2, **said})
        for rank in range(2)
        if said is not None
    )
    series = {"modules_in_eval": np.zeros((2, steps))}
    present = {}
    if evaluated:
        series |= {"loss": np.full((2, steps), 0.1), "eval/loss": np.full((2, steps), evaluated)}
        present["eval/loss"] = np.tile(np.arange(steps) % 20 == 19, (2, 1))
    return Trace("module settings", seed, np.arange(steps), series, present, events=events)
