"""Runs of which the size of the parameters, or loss and accuracy together, take some course."""

import numpy as np

from rankscope.agent.wire import TensorTable
from rankscope.server.window import LayerNumbers, Occurrence
from tests.support.runs.traces import Trace


def weights(
    seed: int,
    *,
    rate: float = 0.0,
    power: float = 0.0,
    jump: float = 1.0,
    until: int = 10_000,
    start: float = 5.0,
    every: int = 4,
    steps: int = 1200,
) -> Trace:
    """Norms of the parameters, at an interval of steps.

    Args:
        rate: growth of their logarithm a step, up to step `until`.
        power: of the number of steps that they grow with.
        jump: factor at half of the steps.
    """
    random = np.random.default_rng(seed)
    each = np.arange(steps)
    course = start * np.exp(rate * np.minimum(each, until)) * (1 + each / 10) ** power
    course[steps // 2 :] *= jump
    course = course * np.exp(0.002 * random.standard_normal(steps))
    both = np.tile(course, (2, 1))
    there = np.broadcast_to(each % every == 0, both.shape).copy()
    return Trace("weights", seed, each, {"weight_norm": both}, {"weight_norm": there})


def zero_at(
    seed: int, *, every: int = 0, once: int = 0, to_the_end: int = 0, loss: float = 1.0
) -> Trace:
    """Two ranks whose gradients are exactly zero at some of 300 steps.

    Args:
        every: at each such step from 100 on.
        once: at this one.
        to_the_end: from this one on.
        loss: at these steps, in units of that of the others.
    """
    random = np.random.default_rng(seed)
    each = np.arange(300)
    zero = each == once if once else np.zeros(300, dtype=bool)
    if every:
        zero |= (each >= 100) & (each % every == 0)
    if to_the_end:
        zero |= each >= to_the_end
    losses = np.where(zero, loss, 1.0) * (1 + 0.1 * random.standard_normal((2, 300)))
    norms = np.where(zero, 0.0, np.exp(0.2 * random.standard_normal(300))) * np.ones((2, 1))
    return Trace("zero_at", seed, each, {"loss": losses, "grad_norm": norms})


def zeros(
    seed: int,
    *,
    until: int = 10_000,
    loss: float = -0.0,
    noise: float = 0.0,
    every: int = 1,
    begin: int = 0,
    rate: float = 0.1,
    made: float = 0.0,
    steps: int = 300,
) -> Trace:
    """Two ranks whose gradients are exactly zero up to step `until`, sampled at intervals.

    Args:
        loss: at all of these steps, with this much noise.
        begin: first step of the run, which is a resumed one.
        made: norm of the gradients in the backward pass; 0: not posted.
    """
    random = np.random.default_rng(seed)
    each = np.arange(begin, begin + steps)
    losses = np.full((2, steps), loss) + noise * random.random((2, steps))
    norms = np.where(each < until, 0.0, 1.0) * np.ones((2, 1))
    there = np.broadcast_to((each - begin < 4) | (each % every == 0), norms.shape).copy()
    series = {
        "loss": losses,
        "accuracy": np.ones((2, steps)) if not noise else np.full((2, steps), 0.5),
        "grad_norm": norms,
        "update_ratio": 0.001 * norms,
        "tensors_without_gradient": np.where(norms > 0, 0.0, 2.0),
        "lr": np.full((2, steps), rate),
    }
    if made:
        series["grad_norm_local"] = np.full((2, steps), made)
    masks = dict.fromkeys(("grad_norm", "update_ratio", "tensors_without_gradient"), there)
    return Trace("zeros", seed, each, series, masks, config={"parameter_tensors": 2})


def answers(
    seed: int,
    *,
    gain: float = 0.3,
    fall: float = 0.5,
    until: int = 10_000,
    explains: tuple[float, float] = (0.0, 0.0),
    counted: float = 0.0,
    steps: int = 500,
) -> Trace:
    """Loss and accuracy of four ranks.

    Args:
        gain: of the accuracy over all steps, up to step `until`; below 0 it falls.
        fall: share of the loss that is lost over all steps.
        explains: share of the deviance explained, at first and in the end; not posted where it is
            nothing all the time.
        counted: what the accuracy comes to of the answers that the loss is given, from a half; 0:
            it is not posted.
    """
    random = np.random.default_rng(seed)
    each = np.arange(steps)
    loss = 2.0 * (1 - fall * each / steps) * np.exp(0.05 * random.standard_normal((4, steps)))
    right = 0.5 + gain * np.minimum(each, until) / steps
    accuracy = right + 0.05 * random.standard_normal((4, steps))
    series = {"loss": loss, "accuracy": accuracy}
    if any(explains):
        series["explained_deviance"] = np.tile(np.linspace(*explains, steps), (4, 1))
    if counted:
        series["accuracy_counted"] = np.tile(np.linspace(0.5, counted, steps), (4, 1))
    return Trace("answers", seed, each, series)


def standing(
    seed: int,
    *,
    update: float = 4e-3,
    gained: float = 0.0,
    games: bool = False,
    begin: int = 0,
    steps: int = 300,
) -> Trace:
    """A loss of which nothing else is known, and that gains this much of itself over all steps."""
    random = np.random.default_rng(seed)
    each = np.arange(begin, begin + steps)
    loss = (1 - gained * np.arange(steps) / steps) * np.exp(
        0.01 * random.standard_normal((2, steps))
    )
    series = {
        "loss": loss,
        "update_ratio": np.full((2, steps), update),
        "lr": np.full((2, steps), 0.01),
        "grad_norm": np.exp(0.1 * random.standard_normal((2, steps))),
    }
    turns = Occurrence(0, 0, "optimizers.turns", "turns", {"optimizers": 2}, 0.0)
    events = (turns,) if games else ()
    return Trace("standing", seed, each, series, events=events)


def constant_answers(
    seed: int,
    *,
    explained: float = 0.0,
    before: float = 0.0,
    until: int = 0,
    entropy: float = 2.75,
    begins: float = 3.3,
    within: float = 20.0,
    falls: float = 0.0,
    scatter: float = 0.02,
    first_update: float = 0.01,
    update: float = 1e-3,
    games: bool = False,
    accuracy: float = 0.2,
    dataset: int = 0,
    thin: int = 10**9,
    peak: float = 0.0,
    gain: float = 0.6,
    steps: int = 300,
) -> Trace:
    """A loss that comes down to what the frequencies of the targets give, or below.

    Args:
        explained: share of the deviance that the answers explain in the end.
        before: the same up to step `until`.
        begins: loss of the first step.
        within: steps in which all but a share 1 / e of the fall from there is over.
        falls: of the loss, from step 20 to the last.
        scatter: of a single loss, as a share of it.
        games: another optimizer steps in turns with this one.
        dataset: samples that a rank has, of which two are reported at each step; 0: none are.
        thin: step from which on one step in 8 is sampled.
        peak: how far the second loss is above that, which falls back within 10 steps to 1 / e.
        gain: of the weights before the first step.
    """
    random = np.random.default_rng(seed)
    each = np.arange(steps)
    course = np.where(each < until, before, explained)
    level = entropy * (1 - course) + (begins - entropy) * np.exp(-each / within)
    level += falls * (1 - each / steps)
    level += peak * np.exp(-each / 10) * (each > 0)
    loss = level * np.maximum(1 + scatter * random.standard_normal((2, steps)), 0.01)
    updates = np.where(each < 10 if peak else each < 5, first_update, update) * np.ones((2, 1))
    series = {
        "loss": loss,
        "explained_deviance": 1 - loss / entropy,
        "update_ratio": updates,
        "accuracy": np.full((2, steps), accuracy),
        "lr": np.full((2, steps), 1e-3),
        "initial_gain": np.full((2, steps), gain),
    }
    turns = Occurrence(0, 0, "optimizers.turns", "turns", {"optimizers": 2}, 0.0)
    words = {}
    if dataset:
        samples = (2 * each + np.array([[0], [1]])).astype(np.uint64) % np.uint64(dataset)
        # Two of 32 bits in one number; those of the second rank are others.
        pairs = samples << np.uint64(33) | samples << np.uint64(1) | np.array([[0], [1]], np.uint64)
        words["rows/0"] = pairs
    events = (turns,) if games else ()
    sampled = np.broadcast_to((each < thin) | (each % 8 == 0), (2, steps)).copy()
    there = dict.fromkeys(("explained_deviance", "update_ratio", "accuracy"), sampled)
    there["initial_gain"] = np.broadcast_to(each == 0, (2, steps)).copy()
    return Trace("constant answers", seed, each, series, there, words=words, events=events)


def thrown_away(
    seed: int, *, discarded: int = 3, every: int = 1, games: bool = False, divisor: float = 1.0
) -> Trace:
    """Steps of two ranks that throw gradients away before they step.

    Args:
        discarded: backward passes, at an interval of steps.
        games: another optimizer steps in turns with this one.
        divisor: what the losses of all passes are divided by.
    """
    random = np.random.default_rng(seed)
    each = np.arange(200)
    loss = np.exp(-each / 50) * (1 + 0.02 * random.standard_normal((2, len(each))))
    series = {"loss": loss, "passes_discarded": np.full(loss.shape, float(discarded))}
    there = {"passes_discarded": np.broadcast_to(each % every == 0, loss.shape).copy()}
    if divisor != 1.0:
        series["loss_divisor"] = np.full(loss.shape, divisor)
        there["loss_divisor"] = there["passes_discarded"]
    turns = Occurrence(0, 0, "optimizers.turns", "turns", {"optimizers": 2}, 0.0)
    events = (turns,) if games else ()
    return Trace("thrown away", seed, each, series, there, events=events)


def guessing(
    seed: int,
    *,
    answers: int = 3,
    level: float = 1.07,
    began: float = 5000.0,
    falls: float = 0.0,
    known: bool = False,
    steps: int = 240,
) -> Trace:
    """A loss of which nothing else is known, and a model whose last tensor has so many numbers.

    Args:
        level: of the loss, after the first steps.
        began: the loss of the second step.
        falls: by what it falls until the end.
        known: an accuracy is posted, which rises.
    """
    random = np.random.default_rng(seed)
    each = np.arange(steps)
    loss = level - falls * each / steps + 0.08 * random.standard_normal((2, steps))
    loss[:, :3] = [began / 50, began, began / 500]
    series = {"loss": loss, "update_ratio": np.full((2, steps), 1e-3)}
    if known:
        series["accuracy"] = np.broadcast_to(0.3 + 0.4 * each / steps, (2, steps)).copy()
    table = TensorTable(
        names=("w1", "b1", "w2", "b2"),
        shapes=((8, 13), (8,), (answers, 8), (answers,)),
        dtypes=("float32",) * 4,
        shards=("",) * 4,
    )
    layers = tuple(
        LayerNumbers(step=step, rank=rank, table=table, metric="weight_norm", values=np.ones(4))
        for step in range(0, steps, 16)
        for rank in range(2)
    )
    return Trace("guessing", seed, each, series, layers=layers)
